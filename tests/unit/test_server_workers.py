"""The server's threads: values, errors, contexts, bounds, and no job that is forgotten."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
import uvloop

from fsd.model.errors import Unavailable
from fsd.server.workers import Workers

VALUE: contextvars.ContextVar[int] = contextvars.ContextVar("value", default=0)


class Body(set[int]):
    """What a weak reference can be made to."""


async def gone(kept: weakref.ref[Body]) -> None:
    while kept() is not None:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(3, "test")
    yield made
    made.shutdown()


async def idle(workers: Workers) -> None:
    """Who has told its result lies down a moment later."""
    while not workers._idle:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scene(), 60)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def test_values_errors_and_contexts_come_through(workers: Workers) -> None:
    def broken() -> None:
        raise ValueError("no")

    async def scene() -> None:
        VALUE.set(7)
        assert await workers.run(VALUE.get) == 7
        with pytest.raises(ValueError, match="no"):
            await workers.run(broken)
        assert await workers.run(threading.get_ident) != threading.get_ident()

    run(scene)


def test_one_at_a_time_is_one_thread_and_many_are_no_more_than_the_bound(workers: Workers) -> None:
    running, most, guard = 0, 0, threading.Lock()
    together = threading.Barrier(3)

    def name() -> str:
        return threading.current_thread().name

    def work() -> str:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        together.wait(50)
        with guard:
            running -= 1
        return name()

    async def scene() -> None:
        names = set()
        for _ in range(5):
            names.add(await workers.run(name))
            await idle(workers)
        assert len(names) == 1
        names = set(await asyncio.gather(*(workers.run(work) for _ in range(60))))
        assert len(names) == 3 and most <= 3

    run(scene)


def test_no_job_is_forgotten_between_busy_and_idle(workers: Workers, pytestconfig: pytest.Config) -> None:
    """Bursts around the number of threads, each job so short that workers fall idle while more come."""

    async def scene() -> None:
        for burst in range(1500 if pytestconfig.getoption("--all") else 400):
            count = 1 + burst % 6
            done = await asyncio.gather(*(workers.run(partial(int, at)) for at in range(count)))
            assert done == list(range(count))

    run(scene)


def test_what_was_given_up_is_not_told_and_ends_nothing(workers: Workers) -> None:
    go = threading.Event()

    async def scene() -> None:
        left = workers.run(lambda: go.wait(60))
        left.cancel()
        go.set()
        assert await workers.run(lambda: 5) == 5

    run(scene)


def test_nothing_of_a_job_is_kept_when_it_has_ended(workers: Workers) -> None:
    """A body of megabytes hangs on it; without the collector, which comes seldom."""

    def broken(body: Body) -> None:
        raise ValueError(len(body))

    async def scene() -> None:
        for _ in range(3):  # a thread's first job is not like its second
            body = Body({1})
            kept = weakref.ref(body)
            await workers.run(partial(len, body))
            del body
            await gone(kept)
            body = Body({1})
            kept = weakref.ref(body)
            with pytest.raises(ValueError, match="1"):
                await workers.run(partial(broken, body))
            del body
            await gone(kept)

    gc.disable()
    try:
        run(scene)
    finally:
        gc.enable()


def test_threads_that_cannot_be_had_do_not_count(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scene() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(5):
                with pytest.raises(Unavailable, match="thread") as told:
                    await workers.run(lambda: 1)
                assert told.value.status == 503 and told.value.retryable
        assert await workers.run(lambda: 2) == 2
        await idle(workers)
        go = threading.Event()
        busy: list[Awaitable[object]] = [workers.run(lambda: go.wait(60))]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            busy += [workers.run(lambda: 3) for _ in range(5)]
            go.set()
            assert await asyncio.gather(*busy) == [True, 3, 3, 3, 3, 3], "they wait for those there are"
        assert len(workers._all) == 1
        assert "no more: can't start new thread" in caplog.text and caplog.text.count("no more") == 1

    run(scene)


def test_shutdown_waits_for_what_waits() -> None:
    made, seen = Workers(1, "test"), list[int]()

    def slow(at: int) -> None:
        time.sleep(0.005)
        seen.append(at)

    async def scene() -> None:
        for at in range(5):
            made.run(partial(slow, at))

    run(scene)
    made.shutdown()
    assert seen == list(range(5))

    async def late() -> None:
        with pytest.raises(RuntimeError):
            made.run(lambda: None)

    run(late)
