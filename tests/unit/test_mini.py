"""The scheduler alone: no pyfuse3, no FUSE descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from fsd.kernel.mini import ClosedResourceError, Scheduler, Wait
from fsd.model.limits import WORKER_DEATHS_MAX


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        # A test may have closed one itself.
        with contextlib.suppress(OSError):
            os.close(end)


def test_offers_exactly_the_names_pyfuse3_uses(scheduler: Scheduler) -> None:
    """The list is taken from the pinned version's sources: an upgrade that uses another name fails here."""
    assert pyfuse3.__version__ == "3.5.0"
    used = set()
    for source in ("__init__.pyx", "internal.pxi", "handlers.pxi"):
        text = (Path(pyfuse3.__file__).parent / source).read_text()
        text = re.sub(r"'''.*?'''", "", text, flags=re.S)
        used |= set(re.findall(r"(?<![\w.])trio\.([A-Za-z_.]+)", text))
    assert used == {
        "Lock",
        "open_nursery",
        "ClosedResourceError",
        "lowlevel.current_task",
        "lowlevel.current_trio_token",
        "lowlevel.wait_readable",
        "lowlevel.notify_closing",
    }
    offered: Any = scheduler.as_trio()
    for name in used:
        value = offered
        for part in name.split("."):
            value = getattr(value, part)


def test_a_wait_is_answered_from_another_thread(scheduler: Scheduler) -> None:
    seen: list[object] = []

    async def main() -> None:
        wait = scheduler.make_wait()
        threading.Thread(target=lambda: scheduler.post(lambda: wait.fire("answer"))).start()
        seen.append(await wait)
        seen.append(threading.get_ident())

    scheduler.run(main)
    assert seen == ["answer", threading.get_ident()]


def test_a_wait_fired_before_it_is_awaited_returns_at_once(scheduler: Scheduler) -> None:
    async def main() -> None:
        wait = scheduler.make_wait()
        wait.fire(1)
        wait.fail(OSError("too late"))
        assert await wait == 1

    scheduler.run(main)


def test_a_failed_wait_raises_in_the_waiter(scheduler: Scheduler) -> None:
    async def main() -> None:
        wait = scheduler.make_wait()
        scheduler.post(lambda: wait.fail(OSError(errno.EIO, "no answer")))
        with pytest.raises(OSError, match="no answer"):
            await wait

    scheduler.run(main)


def test_many_posts_from_many_threads_all_arrive(scheduler: Scheduler) -> None:
    got: list[int] = []
    wait = scheduler.make_wait()

    def count(number: int) -> None:
        got.append(number)
        if len(got) == 4000:
            wait.fire()

    def send(start: int) -> None:
        for number in range(start, start + 1000):
            scheduler.post(lambda number=number: count(number))  # type: ignore[misc]

    async def main() -> None:
        for start in range(0, 4000, 1000):
            threading.Thread(target=send, args=(start,)).start()
        await wait

    scheduler.run(main)
    assert sorted(got) == list(range(4000))


def test_a_posted_call_that_raises_is_logged_and_survived(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        wait = scheduler.make_wait()
        scheduler.post(lambda: 1 / 0)
        scheduler.post(wait.fire)
        await wait

    scheduler.run(main)
    assert "ZeroDivisionError" in caplog.text


def test_a_foreign_await_is_refused_with_its_reason(scheduler: Scheduler) -> None:
    class Foreign:
        def __await__(self) -> Any:
            yield "something of trio's"

    async def main() -> None:
        with pytest.raises(RuntimeError, match="only mini's own waits"):
            await Foreign()

    scheduler.run(main)


def test_the_nursery_waits_for_its_children(scheduler: Scheduler) -> None:
    order: list[str] = []

    async def child(wait: Wait) -> None:
        await wait
        order.append("child")

    async def main() -> None:
        wait = scheduler.make_wait()
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(child, wait, name="child")
            scheduler.post(wait.fire)
            order.append("body")
        order.append("after")

    scheduler.run(main)
    assert order == ["body", "child", "after"]


def test_a_worker_ended_by_eagain_is_started_again(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Pitfall 5: the kernel dropped the request between poll and read."""
    starts: list[int] = []

    async def worker(number: int) -> None:
        starts.append(number)
        if len(starts) < 3:
            raise OSError(errno.EAGAIN, "nothing to read")

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(worker, 7)

    scheduler.run(main)
    assert starts == [7, 7, 7]
    assert not caplog.records


def test_a_worker_that_dies_is_logged_and_started_again_up_to_a_bound(scheduler: Scheduler) -> None:
    starts: list[int] = []

    async def worker() -> None:
        starts.append(1)
        raise ValueError("broken for good")

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(worker)

    with pytest.raises(ValueError, match="broken for good"):
        scheduler.run(main)
    assert len(starts) == WORKER_DEATHS_MAX + 1


def test_one_worker_serves_until_it_parks(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    """Pitfall 1: a released lock is not handed on; the next worker is woken when the holder has parked."""
    served: list[str] = []
    lock = scheduler.make_lock()
    parked = scheduler.make_wait()

    async def worker(name: str) -> None:
        while len(served) < 5:
            async with lock:
                await scheduler.wait_readable(pipe[0])
                os.read(pipe[0], 1)
            served.append(name)
            if len(served) == 3:
                await parked
            elif len(served) < 5:
                os.write(pipe[1], b"x")
        parked.fire()
        os.write(pipe[1], b"x")

    def more() -> None:
        os.write(pipe[1], b"x")

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(worker, "a")
            nursery.start_soon(worker, "b")
            os.write(pipe[1], b"x")
            idle: list[int] = []

            def on_idle() -> None:
                idle.append(1)
                if len(served) == 3 and len(idle) > 3:
                    scheduler.on_idle = None
                    more()

            scheduler.on_idle = on_idle

    scheduler.run(main)
    assert served[:3] == ["a", "a", "a"]
    assert served[3:5] == ["b", "b"]


def test_a_worker_whose_request_is_there_goes_on_without_being_parked(
    scheduler: Scheduler, pipe: tuple[int, int]
) -> None:
    """Being parked and resumed was a sixth of the CPU of a request."""
    turns: list[int] = []
    turn = scheduler._turn
    scheduler._turn = lambda: (turns.append(1), turn())[1]  # type: ignore[method-assign]
    lock = scheduler.make_lock()

    async def main() -> None:
        for number in range(5):
            scheduler.post(lambda: os.write(pipe[1], b"x"))  # what else comes is done on the way
            async with lock:
                await scheduler.wait_readable(pipe[0])
            assert os.read(pipe[0], 9) == b"x", number
            assert not lock.locked

    scheduler.run(main)
    assert len(turns) == 1


def test_what_became_ready_runs_before_the_next_request(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    order: list[str] = []
    handler = scheduler.make_wait()

    async def parked() -> None:
        await handler
        order.append("resumed")

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(parked)
            await scheduler.wait_readable(pipe[0])  # `parked` is ready: it runs until it waits
            os.write(pipe[1], b"y")
            handler.fire()
            await scheduler.wait_readable(pipe[0])
            order.append("request")

    os.write(pipe[1], b"x")
    scheduler.run(main)
    assert order == ["resumed", "request"]


def test_who_is_resumed_while_a_worker_polls_does_not_wait_for_a_request(
    scheduler: Scheduler, pipe: tuple[int, int]
) -> None:
    order: list[str] = []
    answered, idle = scheduler.make_wait(), scheduler.make_wait()
    other = os.pipe()

    async def parked() -> None:
        await answered
        await idle
        order.append("resumed")
        os.write(pipe[1], b"x")  # only now there is a request

    def came() -> None:
        os.read(other[0], 1)
        answered.fire()

    def on_idle() -> None:
        if answered.fired:
            idle.fire()

    async def main() -> None:
        scheduler.watch(other[0], came)
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(parked)
            scheduler.post(lambda: os.write(other[1], b"x"))
            await scheduler.wait_readable(pipe[0])
            order.append("request")
        scheduler.unwatch(other[0])

    scheduler.on_idle = on_idle
    scheduler.run(main)
    for end in other:
        os.close(end)
    assert order == ["resumed", "request"]


def test_news_are_told_before_anything_but_the_next_request(
    scheduler: Scheduler, pipe: tuple[int, int]
) -> None:
    """What is known without a handler holds only as long as requests follow each other."""
    order: list[str] = []
    other = os.pipe()
    waiting = scheduler.make_wait()

    async def parked() -> None:
        await waiting
        order.append("resumed")

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(parked)
            for number in range(3):
                os.write(pipe[1], b"x")
                await scheduler.wait_readable(pipe[0])
                os.read(pipe[0], 1)
                order.append(f"request {number}")
            scheduler.post(lambda: order.append("posted"))
            os.write(pipe[1], b"x")
            await scheduler.wait_readable(pipe[0])
            os.read(pipe[0], 1)
            scheduler.watch(other[0], lambda: (os.read(other[0], 1), order.append("watched")))
            os.write(other[1], b"x")
            os.write(pipe[1], b"x")
            await scheduler.wait_readable(pipe[0])
            scheduler.unwatch(other[0])
            waiting.fire()

    scheduler.on_news = lambda: order.append("news")
    scheduler.run(main)
    for end in other:
        os.close(end)
    since = order[order.index("request 1") :]
    assert since[:2] == ["request 1", "request 2"]
    assert since[2:8] == ["news", "posted", "news", "watched", "news", "resumed"]


def test_the_reader_may_wait_where_only_a_post_can_come(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    told: list[int] = []
    other = os.pipe()
    posted: list[str] = []

    async def main() -> None:
        await scheduler.wait_readable(pipe[0])  # nothing is there: the reader waits
        assert told == [scheduler._eventfd]
        scheduler.post(lambda: posted.append("a post"))
        await scheduler.wait_readable(pipe[0])  # the post is done first
        assert (posted, len(told)) == (["a post"], 2)
        scheduler.watch(other[0], lambda: None)
        os.write(pipe[1], b"x")
        await scheduler.wait_readable(pipe[0])  # what is watched may come: polled here
        scheduler.unwatch(other[0])
        scheduler.before_read = lambda: None
        await scheduler.wait_readable(pipe[0])
        assert len(told) == 2

    scheduler.may_wait = told.append
    scheduler.run(main)
    for end in other:
        os.close(end)


def test_what_breaks_while_a_worker_polls_breaks_the_loop(
    scheduler: Scheduler, pipe: tuple[int, int]
) -> None:
    """Not the worker, which would be started again."""
    calls: list[int] = []

    def on_idle() -> None:
        calls.append(1)
        raise OSError(errno.EAGAIN, "the pump broke")

    async def worker() -> None:
        scheduler.on_idle = on_idle
        await scheduler.wait_readable(pipe[0])

    async def main() -> None:
        async with scheduler.open_nursery() as nursery:
            nursery.start_soon(worker)

    with pytest.raises(OSError, match="the pump broke"):
        scheduler.run(main)
    assert calls == [1]


def test_notify_closing_ends_present_and_later_waits(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    closing = threading.Thread(target=lambda: scheduler.notify_closing(pipe[0]))

    async def main() -> None:
        closing.start()
        with pytest.raises(ClosedResourceError):
            await scheduler.wait_readable(pipe[0])
        with pytest.raises(ClosedResourceError):
            await scheduler.wait_readable(pipe[0])

    scheduler.run(main)
    closing.join()  # it may still be about to wake a scheduler that is closed


def test_the_descriptor_is_made_non_blocking(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    """Pitfall 4: a read of nothing must not hold the GIL."""
    os.write(pipe[1], b"x")

    async def main() -> None:
        assert os.get_blocking(pipe[0])
        await scheduler.wait_readable(pipe[0])
        assert not os.get_blocking(pipe[0])

    scheduler.run(main)


def test_a_hangup_with_no_reader_left_is_seen(scheduler: Scheduler, pipe: tuple[int, int]) -> None:
    """Pitfall 8: all workers are parked when the connection is aborted."""
    wait = scheduler.make_wait()
    scheduler.on_hangup = lambda: wait.fail(OSError(errno.EIO, "aborted"))

    async def main() -> None:
        os.write(pipe[1], b"x")
        await scheduler.wait_readable(pipe[0])
        os.read(pipe[0], 1)
        os.close(pipe[1])
        with pytest.raises(OSError, match="aborted"):
            await wait
        # Pitfall 7: a hung descriptor reads as ready, so that the reader meets the error itself.
        await scheduler.wait_readable(pipe[0])

    scheduler.run(main)


def test_a_post_after_the_end_writes_to_no_descriptor() -> None:
    """The eventfd's number may be another file's by then."""
    ended = Scheduler()
    number = ended._eventfd
    ended.close()
    taken = os.memfd_create("taken")
    os.dup2(taken, number)
    try:
        ended.post(lambda: None)
        assert os.fstat(number).st_size == 0
    finally:
        os.close(number)
        if taken != number:
            os.close(taken)
