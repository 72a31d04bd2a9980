"""What the kernel asks right after a change is answered without a handler, and as a handler answers it."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from support.played import played as in_its_process

# Both directories change in these; in the others the one of the request, or none.
BOTH = ("rename", "exchange")
IN_TWO = ("link",)
NEITHER = ("refused", "chmod")  # of a chmod the kernel is told the outcome


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = in_its_process("rawfuse", "quiet_handle", tmp_path_factory.mktemp("rawfuse"))
    return found


@pytest.fixture(scope="module")
def answers(played: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = played["answers"]
    return found


def test_every_answer_is_the_handlers(answers: dict[str, Any]) -> None:
    assert len(answers) == 30
    for what, one in answers.items():
        assert one["first"] == one["second"], what


def test_a_directory_that_was_changed_asks_no_handler(answers: dict[str, Any]) -> None:
    for what, one in answers.items():
        change, comma, where = what.partition(", ")
        if not comma:
            continue
        changed = change in BOTH or (where == "two") == (change in IN_TWO)
        assert one["ahead"] == (changed and change not in NEITHER), what


def test_a_read_is_answered_as_a_handler_would(played: dict[str, Any]) -> None:
    for what, one in played["reads"].items():
        assert one["first"] == one["second"], what
        assert one["first"][0] == 0, what
    lengths = {what: len(one["second"][1]) // 2 for what, one in played["reads"].items()}
    assert lengths["written"] == 3000 and lengths["a part"] == lengths["over the end"] == 500
    assert lengths["at the end"] == lengths["behind it"] == lengths["emptied since"] == 0
    assert lengths["cut since"] == 100 and lengths["of two pieces"] == 8192


def test_a_read_asks_no_handler_where_its_file_is_as_it_was_opened(played: dict[str, Any]) -> None:
    ahead = {what for what, one in played["reads"].items() if one["ahead"]}
    whole = {"written", "a part", "over the end", "at the end", "behind it", "committed"}
    assert ahead == whole


def test_a_handle_is_released_before_anything_that_comes_after_it(played: dict[str, Any]) -> None:
    assert played["releases"] == {
        "pages kept by the first": True,
        "at once": 0,
        "pages kept by the next": True,
        "after the next": 0,
        "after a posted call": 1,
        "open without a name": 1,
        "closed without a name": 0,
        "a writer at once": 0,
        "a writer after a posted call": 1,
        "many": True,
    }


def test_a_flush_asks_no_handler_where_there_is_nothing_to_tell(played: dict[str, Any]) -> None:
    flushes = played["flushes"]
    ahead = {what for what, one in flushes.items() if one["ahead"]}
    assert ahead == {"made", "written", "opened", "of two", "written since that was told"}
    told = {what for what, one in flushes.items() if one["first"] != [0, ""]}
    assert told == {"refused", "written since it was refused"}
    assert all(flushes[what]["first"] == [-errno.ENOSPC, ""] for what in told), "once"
    assert all(one["second"] == [0, ""] for one in flushes.values()), "and once only"


def test_capabilities_are_asked_for_where_there_may_be_some(answers: dict[str, Any]) -> None:
    ahead = {what: one["ahead"] for what, one in answers.items() if ", " not in what}
    assert ahead == {
        "made": True,
        "told again": True,
        "given": False,
        "has it": False,
        "taken": False,
        "given by another mount": False,
    }
    values = {what: bytes.fromhex(one["second"][1]) for what, one in answers.items() if ", " not in what}
    assert values["given"] == values["has it"] == b"caps"
    assert values["given by another mount"] == b"by another mount"
    assert not values["made"]
    assert not values["taken"]


def test_whoever_asks_without_an_end_leaves_the_loop_its_turns(played: dict[str, Any]) -> None:
    """Results, ticks and commands are posted: they wait for no more than some dozens of such answers."""
    assert played["turns"] >= played["asked"] // 100
