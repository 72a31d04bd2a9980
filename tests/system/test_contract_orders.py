"""The order of the contract's checks: a call that breaks several rules is told of the first of them.

Each row of a table breaks one rule. Every row is tried alone, and together with each of those behind it: the
answer is always that of the first, and nothing is changed.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.contract import Json, Store, checkpoint, file, fork_body, refused, writer

LONE = "\ud800"
Rule = tuple[str, str, dict[str, Any]]  # what is broken, the code, the fields that break it

APPEND: list[Rule] = [
    ("an id", "INVALID_ID", {"checkpoint.parentCheckpointId": LONE}),
    ("the time", "INVALID_ENTRY", {"checkpoint.createdAt": None}),
    ("an entry", "INVALID_ENTRY", {"checkpoint.files": [file("../up")]}),
    ("an artifact", "INVALID_ENTRY", {"checkpoint.artifacts": [None]}),
    ("the writer", "WRITER_LOST", {"writer.ownerToken": "another"}),
    ("an id in use", "DUPLICATE_ID", {"checkpoint.id": "taken"}),
    ("the head", "STALE_HEAD", {"expectedHeadId": "never"}),
    ("the parent", "PARENT_MISMATCH", {"checkpoint.parentCheckpointId": "elsewhere"}),
]
FORK: list[Rule] = [
    ("an id", "INVALID_ID", {"destinationCheckpointId": LONE}),
    ("the time", "INVALID_ENTRY", {"createdAt": True}),
    ("one thread", "FORK_SOURCE_THREAD_MISMATCH", {"sourceThreadId": "full"}),
    ("no source", "FORK_SOURCE_NOT_FOUND", {"sourceCheckpointId": "never"}),
    ("another's", "FORK_SOURCE_THREAD_MISMATCH", {"sourceCheckpointId": "other"}),
    ("the writer", "WRITER_LOST", {"writer.fence": 999}),
    ("a full thread", "FORK_DESTINATION_NOT_EMPTY", {}),
]
DELETE: list[Rule] = [
    ("an id", "INVALID_ID", {"checkpointId": ""}),
    ("another thread's writer", "WRITER_LOST", {"threadId": "other"}),
    ("the writer", "WRITER_LOST", {"writer.ownerToken": "another"}),
    ("no head", "NOT_HEAD", {"checkpointId": "root"}),
]
PRUNE: list[Rule] = [
    ("an id", "INVALID_ID", {"threadId": ""}),
    ("keep", "INVALID_ENTRY", {"keep": 0}),
    ("the writer", "WRITER_LOST", {"writer.fence": 999}),
]


def broken(body: Json, *rules: Rule) -> Json:
    """`body` with the fields of all `rules`; what the first says of a field stands."""
    made = {name: dict(value) if isinstance(value, dict) else value for name, value in body.items()}
    for _, _, fields in reversed(rules):
        for path, value in fields.items():
            name, _, inner = path.partition(".")
            if inner:
                made[name][inner] = value
            else:
                made[name] = value
    return made


def check(store: Store, op: str, body: Json, rules: list[Rule], *threads: str) -> None:
    whole = store.state(*threads)
    for at, first in enumerate(rules):
        for rest in ((), *((rule,) for rule in rules[at + 1 :]), tuple(rules[at + 1 :])):
            tried = broken(body, first, *rest)
            before = [what for what, _, _ in (first, *rest)]
            try:
                refused(first[1], lambda tried=tried: store.call(op, tried))  # type: ignore[misc]
            except AssertionError as exc:
                raise AssertionError(f"{op} with {before}: {exc}") from exc
        assert store.state(*threads) == whole, f"{op} with {first[0]} changed something"


@pytest.fixture
def full(store: Store) -> Json:
    """The lease of the thread `full`, of two checkpoints; others are in `other`."""
    store.grow("other", "taken", "other")
    lease = store.acquire("full")
    store.grow("full", "root", "head", lease=lease)
    return lease


def test_append(store: Store, full: Json) -> None:
    record = checkpoint("new", "full", "head", files=[file("a")])
    body = {"checkpoint": record, "expectedHeadId": "head", "writer": writer(full)}
    check(store, "append", body, APPEND, "full", "other")
    store.call("append", body)  # which nothing was wrong with


def test_fork(store: Store, full: Json) -> None:
    store.grow("src", "s")
    body = fork_body(("src", "s"), ("full", "f"), full)
    check(store, "forkFromCheckpoint", body, FORK, "full", "src", "other")
    store.release(writer(full))
    fresh = store.acquire("fresh")
    store.call("forkFromCheckpoint", fork_body(("src", "s"), ("fresh", "f"), fresh))


def test_delete_head(store: Store, full: Json) -> None:
    body = {"threadId": "full", "checkpointId": "head", "writer": writer(full)}
    check(store, "deleteHead", body, DELETE, "full", "other")
    store.call("deleteHead", body)


def test_delete_checkpoints(store: Store, full: Json) -> None:
    body = {"threadId": "full", "keep": 1, "writer": writer(full)}
    check(store, "deleteCheckpoints", body, PRUNE, "full", "other")
    assert store.call("deleteCheckpoints", body) == {"deleted": ["root"]}


def test_what_is_off_the_chain_is_listed_and_stays(store: Store) -> None:
    """After a pruned root was appended again: `list` has both lines, the walk follows the head's alone."""
    lease = store.acquire("t")
    store.grow("t", "a", "b", "c", lease=lease)
    assert store.prune("t", 1, lease) == ["a", "b"]
    store.delete_head("t", "c", lease)
    assert store.head() is None, "its parent was pruned"
    store.grow("t", "a", "d", lease=lease)
    assert store.prune("t", 1, lease) == ["a"]
    assert store.ids() == ["d"]
    store.append(checkpoint("b", "t", "d"), "d", lease)
    assert store.prune("t", 5, lease) == [], "the walk ends where a parent is missing"
