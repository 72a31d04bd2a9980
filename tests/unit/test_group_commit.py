"""Group commit without a database: who leads, who waits, what is bounded."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from support.wait import wait_for

from fsd.meta import group
from fsd.meta.database import Tx
from fsd.meta.group import Gathering, GroupCommit
from fsd.model.errors import InternalError, Unavailable
from fsd.model.limits import DB_GROUP_TIME

NO_TX = cast(Tx, None)


class Runs:
    """Runs gatherings when told to, and remembers what was run together."""

    def __init__(self, leaders: int = 1) -> None:
        self.now = 0.0
        self.go = threading.Event()
        self.together: list[list[Any]] = []
        self.commit = GroupCommit(self.run, leaders, lambda: self.now)
        self.results: dict[int, Any] = {}

    def run(self, gathering: Gathering) -> None:
        assert self.go.wait(60)
        values = []
        for request in gathering:
            values.append(request.fn(NO_TX))
            request.succeed(values[-1])
        self.together.append(values)

    def call(self, number: int) -> threading.Thread:
        def work() -> None:
            try:
                self.results[number] = self.commit.submit(lambda tx: number)
            except Unavailable as exc:
                self.results[number] = exc

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def waiting(self) -> int:
        return len(self.commit._queue)


def finish(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_those_that_wait_run_together_in_order() -> None:
    runs = Runs()
    threads = []
    for number in range(10):
        threads.append(runs.call(number))
        wait_for(lambda number=number: runs.commit._busy == 1 and runs.waiting() == number, 30, "its place")
    runs.go.set()
    finish(threads)
    assert runs.results == {number: number for number in range(10)}
    assert runs.together == [list(range(10))]


def test_a_group_has_a_bound_and_the_rest_has_its_own_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "DB_GROUP_MAX", 4)
    runs = Runs()
    threads = []
    for number in range(10):
        threads.append(runs.call(number))
        wait_for(lambda number=number: runs.commit._busy == 1 and runs.waiting() == number, 30, "its place")
    runs.go.set()
    finish(threads)
    assert runs.results == {number: number for number in range(10)}
    assert runs.together == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_queue_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "DB_QUEUE_MAX", 2)
    runs = Runs()
    threads = []
    for number in range(3):
        threads.append(runs.call(number))
        wait_for(lambda number=number: runs.commit._busy == 1 and runs.waiting() == number, 30, "its place")
    with pytest.raises(Unavailable, match="2 writes are waiting"):
        runs.commit.submit(lambda tx: 0)
    runs.go.set()
    finish(threads)
    assert runs.results == {0: 0, 1: 1, 2: 2}


def test_several_leaders_run_beside_each_other() -> None:
    runs = Runs(leaders=3)
    threads = [runs.call(number) for number in range(3)]
    wait_for(lambda: runs.commit._busy == 3, 30, "three leaders")
    threads.append(runs.call(3))
    wait_for(lambda: runs.waiting() == 1, 30, "the fourth to wait")
    runs.go.set()
    finish(threads)
    assert sorted(value for values in runs.together for value in values) == [0, 1, 2, 3]
    assert len(runs.together) == 3


def test_an_interrupted_leader_leaves_nobody_waiting() -> None:
    started, go = threading.Event(), threading.Event()

    def run(gathering: Gathering) -> None:
        started.set()
        assert go.wait(60)
        for request in gathering:
            if len(gathering.taken) == 3:
                raise KeyboardInterrupt
            request.fn(NO_TX)

    commit = GroupCommit(run, 1, lambda: 0.0)
    ends: list[BaseException] = []

    def work() -> None:
        try:
            commit.submit(lambda tx: None)
        except (Unavailable, KeyboardInterrupt) as exc:
            ends.append(exc)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(commit._queue) == 2, 30, "two to wait")
    go.set()
    finish(threads)
    assert sorted(type(end).__name__ for end in ends) == ["KeyboardInterrupt", "Unavailable", "Unavailable"]
    assert commit._busy == 0


def test_inside_a_transaction_none_is_begun() -> None:
    runs = Runs()
    runs.go.set()
    with pytest.raises(InternalError):
        runs.commit.submit(lambda tx: runs.commit.submit(lambda inner: 1))
    assert runs.commit.submit(lambda tx: 2) == 2


def test_close_waits_for_what_runs_and_refuses_what_comes() -> None:
    runs = Runs()
    threads = [runs.call(1)]
    wait_for(lambda: runs.commit._busy == 1, 30, "a leader")
    closing = threading.Thread(target=runs.commit.close)
    closing.start()
    wait_for(lambda: runs.commit._closed, 30, "the close to begin")
    with pytest.raises(Unavailable, match="closed"):
        runs.commit.submit(lambda tx: 0)
    assert closing.is_alive()
    runs.go.set()
    finish([*threads, closing])
    assert runs.results == {1: 1}


def test_a_transaction_that_took_long_takes_no_more() -> None:
    """Large requests that wait do not make the small one before them wait too."""
    runs = Runs()

    def slow(tx: Tx) -> str:
        runs.now += DB_GROUP_TIME
        return "slow"

    first = threading.Thread(target=lambda: runs.results.update({0: runs.commit.submit(slow)}))
    first.start()
    wait_for(lambda: runs.commit._busy == 1, 30, "the leader")
    threads = [first]
    for number in (1, 2):
        threads.append(runs.call(number))
        wait_for(lambda n=number: runs.waiting() == n, 30, "the queue")  # type: ignore[misc]
    runs.go.set()
    finish(threads)
    assert runs.together == [["slow"], [1, 2]]
