"""A mount of a retained state waits for a server that is away, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsd.host.seam import Host
from fsd.kernel import tasks
from fsd.kernel.shown import FILE, ShownState
from fsd.model.errors import NotFound, Unavailable

SESSION = 3


def taken(
    directory: Path, keep_state: Callable[[int], int], stopped: tasks.Event, restarts: int = 1
) -> Callable[[], Any]:
    """The state, asked for by a daemon that was started again, which waits for ever; a stop comes when it
    says that it waits."""
    options = SimpleNamespace(state="checkpoint=c", host=Host(), ready_timeout=0.0)
    start = SimpleNamespace(restarts=restarts, channel=SimpleNamespace(say=lambda _text: stopped.set()))
    remote = SimpleNamespace(keep_state=keep_state)
    made = ShownState(cast(Any, remote), cast(Any, options), cast(Any, start), directory)

    async def take() -> int:
        with tasks.fail_after(60):
            return await made.take(SESSION, stopped)

    return take


def test_a_stop_ends_the_waiting_for_a_server(tmp_path: Path) -> None:
    def away(session: int) -> int:
        raise Unavailable("the server is away")

    async def act() -> int:
        stopped = tasks.Event()
        found: int = await taken(tmp_path, away, stopped)()
        assert stopped.is_set()
        return found

    assert tasks.run(act) == SESSION
    assert not (tmp_path / FILE).exists()


def test_a_stop_ends_a_question_that_hangs(tmp_path: Path) -> None:
    gate = threading.Event()

    async def act() -> int:
        token, stopped = tasks.current_loop(), tasks.Event()

        def hangs(session: int) -> int:
            token.post(stopped.set)
            gate.wait(30)
            return 7

        found: int = await taken(tmp_path, hangs, stopped)()
        return found

    try:
        assert tasks.run(act) == SESSION
    finally:
        gate.set()
    assert not (tmp_path / FILE).exists()


def test_what_the_server_keeps_is_written_down(tmp_path: Path) -> None:
    async def act() -> int:
        found: int = await taken(tmp_path, lambda session: 4 + session, tasks.Event())()
        return found

    assert tasks.run(act) == SESSION
    assert (tmp_path / FILE).read_bytes() == b"7"


@pytest.mark.parametrize("error", [NotFound("no such checkpoint"), Unavailable("the server is away")])
def test_what_the_server_says_is_raised(tmp_path: Path, error: Exception) -> None:
    """Away it is told as that at the first start, when the time to wait is over."""

    def refused(session: int) -> int:
        raise error

    async def act() -> None:
        await taken(tmp_path, refused, tasks.Event(), restarts=0)()

    with pytest.raises(type(error)) as told:
        tasks.run(act)
    assert told.value is error
