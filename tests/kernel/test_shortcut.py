"""What is answered past pyfuse3 is answered as the handlers do, byte by byte, and reaches no handler."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from support.played import played as in_its_process

ASIDE = [
    "write, no handle",
    "size",
    "size and time",
    "lookup a name that has to be asked for",
    "create what has to be asked for",
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        way: in_its_process("rawshortcut", "answer_late", tmp_path_factory.mktemp("raw"), way)
        for way in ("shortcut", "handlers")
    }


def test_every_answer_is_the_handlers(played: dict[str, Any]) -> None:
    ways = played["shortcut"]["answers"], played["handlers"]["answers"]
    assert len(ways[0]) == len(ways[1]) > 80
    for ours, theirs in zip(*ways, strict=True):
        assert ours == theirs


def test_each_kind_is_refused_and_done(played: dict[str, Any]) -> None:
    """Else nothing was compared."""
    kinds = (
        "create",
        "rename",
        "unlink",
        "write",
        "read",
        "value",
        "attributes",
        "opendir",
        "fsync",
        "fsyncdir",
    )
    for kind in ("lookup", *kinds):
        errors = {bool(error) for what, error, _ in played["shortcut"]["answers"] if what.startswith(kind)}
        assert errors >= ({False, True} if kind in kinds else {False}), kind


def test_absent_names_are_told_without_python_and_known_as_told(played: dict[str, Any]) -> None:
    here, there = played["shortcut"], played["handlers"]
    assert here["looks"] < there["looks"] / 3
    assert here["told"] == there["told"]


def test_a_defect_is_told_and_keeps_nobody_waiting(played: dict[str, Any]) -> None:
    errors = {what: error for what, error, _ in played["shortcut"]["answers"]}
    assert errors["unlink with a defect"] == -errno.EIO
    assert errors["unlink after a defect"] == 0
    assert played["shortcut"]["nonsense"] == [-errno.EIO] * 3 + [0]


def test_what_has_to_be_asked_for_is_asked_once(played: dict[str, Any]) -> None:
    assert played["shortcut"]["asked"] == played["handlers"]["asked"] == 2


def test_only_what_is_not_common_comes_to_a_handler(played: dict[str, Any]) -> None:
    # Attributes of directories are remembered on their way through libfuse.
    files = {"attributes of an open file", "attributes written", "attributes set"}
    handled = played["shortcut"]["handled"]
    assert [what for what in handled if what and not what.startswith("attributes")] == ASIDE
    assert files.isdisjoint(handled)
    assert len(played["handlers"]["handled"]) > 80 and files < set(played["handlers"]["handled"])
