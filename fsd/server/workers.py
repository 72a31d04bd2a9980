"""Threads for what blocks: `ThreadPoolExecutor` without its futures, semaphore and locks.

A commit of a small file is one hop to a worker and back, and the executor's Python was a fifth of what that
costs. Idle workers lie on a stack: the one that worked last is taken first, its caches are warm.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from fsd.host import threads
from fsd.model.errors import Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)


class _Job(NamedTuple):
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    around: contextvars.Context
    fn: Callable[[], Any]


class _Worker:
    """One thread. What it is given next lies in its `inbox`; None ends it."""

    __slots__ = ("inbox", "thread")

    def __init__(self, name: str, work: Callable[[_Worker], None]) -> None:
        self.inbox: Final[SimpleQueue[_Job | None]] = SimpleQueue()
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)


class Workers:
    """At most `most` threads, started when none is idle. `run` belongs to the event loop's thread.

    Nothing of a job is kept when it has ended, well or not: what it holds may be a body of many megabytes,
    and the collector comes seldom (`serve._collect_seldom`)."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._all: list[_Worker] = []
        self._idle: deque[_Worker] = deque()
        self._waiting: deque[_Job] = deque()
        self._closed = False
        self._short = False  # of threads, and that was told

    def run(self, fn: Callable[[], T]) -> asyncio.Future[T]:
        """`fn()` on a worker, in the caller's context; when all are busy, or no more are to be had, in turn.
        Raises `Unavailable` when there is not one, `RuntimeError` after `shutdown`."""
        if self._closed:
            raise RuntimeError(f"the {self._name} threads have ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(future, loop, contextvars.copy_context(), fn)
        try:
            self._idle.pop().inbox.put(job)
        except IndexError:
            if len(self._all) < self._most and self._one_more():
                self._all[-1].inbox.put(job)
            else:
                self._waiting.append(job)
                self._look_again()
        return future

    def _one_more(self) -> bool:
        """Start a thread; False where the system has none to give but others are at work."""
        worker = _Worker(f"{self._name}-{len(self._all)}", self._work)
        try:
            worker.thread.start()
        except RuntimeError as exc:
            if not self._all:
                raise Unavailable("the server cannot start a thread", hint=threads.RAISE) from exc
            if not self._short:
                log.warning(
                    "%d %s threads and no more: %s; %s", len(self._all), self._name, exc, threads.RAISE
                )
            self._short = True
            return False
        self._short = False
        self._all.append(worker)
        return True

    def shutdown(self) -> None:
        """Wait for what runs and waits, and end the threads. After the event loop's end."""
        self._closed = True
        for worker in self._all:
            worker.inbox.put(None)
        for worker in self._all:
            worker.thread.join()

    def _look_again(self) -> None:
        """Bring waiting jobs and idle workers together. Whoever has added to either looks: a job added just
        when a worker found none is then found by one of the two."""
        while self._waiting:
            try:
                worker = self._idle.pop()
            except IndexError:
                return  # each that is busy looks when it is done
            try:
                worker.inbox.put(self._waiting.popleft())
            except IndexError:  # another one has it
                self._idle.append(worker)

    def _work(self, me: _Worker) -> None:
        job = me.inbox.get()
        while job is not None:
            _do(job)
            job = None  # an idle worker must not keep the body of its last request
            try:
                job = self._waiting.popleft()
            except IndexError:
                self._idle.append(me)
                self._look_again()
                job = me.inbox.get()


def _do(job: _Job) -> None:
    value, error = None, None
    try:
        value = job.around.run(job.fn)
    except BaseException as exc:  # noqa: BLE001 - raised where the future is awaited
        error = exc
    try:
        job.loop.call_soon_threadsafe(_settle, job.future, value, error)
    except RuntimeError:
        log.debug("a request ended after the event loop")
    finally:
        del job, error  # its traceback has this frame: a circle would keep what `fn` holds


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
