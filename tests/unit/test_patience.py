"""How long a silent server is waited for."""

from __future__ import annotations

from fsd.model.limits import MIB, PATIENCE_FIRST
from fsd.remote.patience import Patience


def test_each_silence_doubles_it_and_an_answer_ends_that() -> None:
    patience = Patience()
    assert patience.within(0) == PATIENCE_FIRST
    for _ in range(3):
        patience.silent()
    assert patience.within(0) == 8 * PATIENCE_FIRST
    patience.answered(0.1)
    assert patience.within(0) == PATIENCE_FIRST


def test_a_slow_server_is_given_time_and_trusted_again_slowly() -> None:
    patience = Patience()
    patience.answered(20.0)
    assert patience.within(0) > 60
    before = patience.within(0)
    patience.answered(0.01)
    assert before / 2 < patience.within(0) < before
    for _ in range(50):
        patience.answered(0.01)
    assert patience.within(0) == PATIENCE_FIRST


def test_of_a_kind_nobody_asked_yet_another_kind_tells() -> None:
    patience = Patience(20.0)
    assert patience.within(0) > 60
    patience.answered(0.01)
    assert patience.within(0) < 60


def test_a_body_is_given_time_for_its_way_and_doublings_end() -> None:
    patience = Patience()
    assert patience.within(16 * MIB) > PATIENCE_FIRST + 20
    for _ in range(1000):
        patience.silent()
    assert patience.within(0) < 10_000
