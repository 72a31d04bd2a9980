"""Long polls without threads, the test clock, metrics text, the error translation: no disk, no socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable

import pytest
from starlette.exceptions import HTTPException
from support.virtualtime import run

from fsd.host.seam import Host
from fsd.model.errors import InternalError, NoSpace, NotFound, Unavailable, UsageError
from fsd.server.clock import take_header, with_test_clock
from fsd.server.errors import answer, translate
from fsd.server.metrics import Metrics
from fsd.server.waiters import GATHER, GATHER_OWN, Waiter, Waiters


def test_a_wake_between_look_and_wait_is_not_lost() -> None:
    async def scene() -> None:
        waiters = Waiters(None)
        event = waiters.register("a")
        waiters.wake("b")
        assert not await waiters.wait(event, 0.01)
        assert waiters.waiting("a")
        waiters.wake("a")
        assert not waiters.waiting("a"), "who was woken looks anyway"
        assert await waiters.wait(event, 5)
        assert waiters.waiting("a")
        assert not await waiters.wait(event, 0.01)
        assert waiters.count == 1 and waiters.waiting("a")
        waiters.forget("a", event)
        assert waiters.count == 0 and not waiters.waiting("a")

    run(scene())


def test_what_a_session_commits_itself_gathers_for_its_polls() -> None:
    """Each answer costs as much as a commit. Others hear as ever, and what others do ends the gathering."""

    async def scene() -> None:
        waiters = Waiters(None)
        clock = asyncio.get_running_loop().time
        mine, other = waiters.register("a", 1), waiters.register("a", 2)

        async def took(waiter: Waiter) -> float:
            began = clock()
            assert await waiters.wait(waiter, 5)
            return clock() - began

        waiters.wake("a", by=1)
        assert not waiters.waiting("a", by=1), "who was woken looks anyway"
        assert waiters.waiting("a", by=2) and waiters.waiting("a"), "which ends what the first gathers"
        times = await asyncio.gather(took(mine), took(other))
        assert times == [pytest.approx(GATHER_OWN), pytest.approx(GATHER)]

        waiters.wake("a", by=1)
        waiting = asyncio.create_task(took(mine))
        await asyncio.sleep(GATHER_OWN / 2)
        waiters.wake("a", by=2)
        assert not waiters.waiting("a")
        assert await waiting == pytest.approx(GATHER_OWN / 2 + GATHER)

        waiters.wake("a")  # by nobody in particular: of everybody it may be news
        assert await took(mine) == pytest.approx(GATHER)

    run(scene())


def test_a_stop_ends_what_gathers() -> None:
    async def scene() -> None:
        waiters = Waiters(None)
        clock = asyncio.get_running_loop().time
        waiter = waiters.register("a", 1)
        waiters.wake("a", by=1)
        began, waiting = clock(), asyncio.create_task(waiters.wait(waiter, 60))
        await asyncio.sleep(GATHER)
        waiters.stop()
        assert await waiting
        assert clock() - began == pytest.approx(GATHER)

    run(scene())


def test_a_stop_ends_waits_now_and_later_ones() -> None:
    async def scene() -> None:
        waiters = Waiters(None)
        event = waiters.register("a")
        waiting = asyncio.create_task(waiters.wait(event, 60))
        await asyncio.sleep(0)
        waiters.stop()
        assert await asyncio.wait_for(waiting, 5)
        assert waiters.stopping
        assert await asyncio.wait_for(waiters.wait(waiters.register("b"), 60), 5)

    run(scene())


def test_changes_of_other_replicas_are_found_and_failures_survived() -> None:
    async def scene() -> None:
        heads: dict[Hashable, int] = {"a": 1, "b": 1}
        asked = 0

        async def read(subjects: list[Hashable]) -> dict[Hashable, int]:
            nonlocal asked
            asked += 1
            if asked == 2:
                raise Unavailable("the database is gone for a moment")
            return {one: heads[one] for one in subjects}

        waiters = Waiters(read)
        event = waiters.register("a")
        assert await waiters.wait(event, 5), "seen first: looked at once more"
        heads["b"] = 2
        assert not await waiters.wait(event, 0.3)
        heads["a"] = 2
        assert await waiters.wait(event, 5)
        waiters.forget("a", event)
        waiters.stop()

    run(scene())


def test_a_checker_that_failed_is_begun_again() -> None:
    async def scene() -> None:
        failing = True

        async def read(subjects: list[Hashable]) -> dict[Hashable, int]:
            if failing:
                raise KeyError("a defect")
            return dict.fromkeys(subjects, 1)

        waiters = Waiters(read)
        event = waiters.register("a")
        assert not await waiters.wait(event, 0.5)
        failing = False
        again = waiters.register("a")
        assert await waiters.wait(again, 5)
        waiters.stop()

    run(scene())


def test_the_test_clock_holds_for_one_request() -> None:
    host = with_test_clock(Host(wall_ns=lambda: 7))
    assert host.wall_ns() == 7
    take_header([(b"x-fsd-test-now", b"1000")], allowed=True)
    assert host.wall_ns() == 1_000_000_000
    take_header([(b"host", b"x")], allowed=True)
    assert host.wall_ns() == 7
    for value in (b"", b"x", b"-1", b"6000000000001", b"9" * 40):
        with pytest.raises(UsageError):
            take_header([(b"x-fsd-test-now", value)], allowed=True)
    with pytest.raises(UsageError, match="test clock"):
        take_header([(b"x-fsd-test-now", b"1")], allowed=False)
    assert host.wall_ns() == 7


def test_metrics_are_cumulative_prometheus_text() -> None:
    metrics = Metrics()
    for seconds in (0.0001, 0.003, 99.0):
        metrics.request('/a"b', "GET", 200, seconds)
    metrics.error("conflict")
    lines = metrics.text({"fsd_x": 2.0}, {"fsd_y_total": 3.0}).splitlines()
    assert lines[-2:] == ["# TYPE fsd_y_total counter", "fsd_y_total 3"]
    name = 'fsd_request_seconds_bucket{route="/a\\"b",method="GET",le='
    assert f'{name}"0.001"}} 1' in lines and f'{name}"0.005"}} 2' in lines and f'{name}"+Inf"}} 3' in lines
    assert 'fsd_requests_total{route="/a\\"b",method="GET",status="200"} 3' in lines
    assert 'fsd_errors_total{code="conflict"} 1' in lines and "fsd_x 2" in lines


def test_every_exception_becomes_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    token = "fsd1.eyJ4IjoxfQ." + "s" * 43
    with caplog.at_level(logging.WARNING):
        known = translate(NoSpace(f"full, says {token}"), "req_1")
        defect = translate(KeyError("x"), "req_2")
    assert isinstance(defect, InternalError) and "req_2" in caplog.text and "KeyError" in caplog.text
    assert "s" * 43 not in caplog.text
    sent = answer(known, "req_1")
    assert sent.status_code == 507 and sent.headers["retry-after"] == "1"
    assert b"s" * 43 not in bytes(sent.body)
    assert isinstance(translate(HTTPException(404), "r"), NotFound)
    assert translate(HTTPException(405), "r").status == 405
    assert answer(translate(HTTPException(404), "r"), "r").status_code == 404
