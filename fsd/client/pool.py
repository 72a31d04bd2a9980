"""A few threads that work through jobs, with a bounded queue and one way to stop.

The caller's thread submits and waits; jobs run on the workers. A job's exception stops everything and is
raised to the caller: failures that should not stop a copy are recorded by the job itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, TypeAlias

Job: TypeAlias = Callable[[], None]
POLL: Final = 0.2  # seconds between looks at a failure while waiting
LAST: Final = 3.0  # seconds that jobs under way have to end once their user wants to go


class Workers:
    """Use as a context manager: leaving it waits for all jobs; leaving it by an exception, and an exception
    while it waits (Ctrl-C), drops those not begun and waits for those running, after Ctrl-C at most `LAST`.
    `stopping` tells long jobs to end early."""

    def __init__(self, count: int) -> None:
        self.stopping = threading.Event()
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=2 * count)
        self._failed: BaseException | None = None
        # And no `Thread.join`: one that a signal interrupts takes the thread for ended (CPython's bpo-45274).
        self._ended = [threading.Event() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._work, args=(ended,), name=f"copy-{at}", daemon=True)
            for at, ended in enumerate(self._ended)
        ]

    def __enter__(self) -> Workers:
        for thread in self._threads:
            thread.start()
        return self

    def submit(self, job: Job) -> None:
        """Queue `job`; blocks while the queue is full. Raises what a job raised."""
        self._put(job)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop(kind)
            return
        try:
            self._finish()
        except BaseException as interruption:
            self._stop(type(interruption))
            raise
        if self._failed is not None:
            raise self._failed

    def _finish(self) -> None:
        """Wait for all jobs, or for those running where one has failed. In pieces: a signal that the kernel
        gave to another thread does not end a wait of the main one."""
        for _ in self._threads:
            while not self.stopping.is_set():
                try:
                    self._jobs.put(None, timeout=POLL)
                    break
                except queue.Full:
                    continue  # workers are busy; look at `stopping` again
        for ended in self._ended:
            while not ended.wait(POLL):
                pass

    def _stop(self, why: type[BaseException]) -> None:
        """Nothing begins any more. What a job still does is seen by whoever goes on, if it ends in time."""
        self.stopping.set()
        looks = None if issubclass(why, Exception) else round(LAST / POLL)
        while (running := [one for one in self._ended if not one.is_set()]) and looks != 0:
            running[0].wait(POLL)
            looks = None if looks is None else looks - 1

    def _put(self, job: Job) -> None:
        while True:
            if self._failed is not None:
                raise self._failed
            try:
                self._jobs.put(job, timeout=POLL)
                return
            except queue.Full:
                continue  # look at failures again

    def _work(self, ended: threading.Event) -> None:
        try:
            self._work_through()
        finally:
            ended.set()

    def _work_through(self) -> None:
        while not self.stopping.is_set():
            try:
                job = self._jobs.get(timeout=POLL)
            except queue.Empty:
                continue  # look at `stopping` again
            if job is None:
                return
            try:
                job()
            except BaseException as exc:  # noqa: BLE001 - carried to the caller's thread
                if self._failed is None:
                    self._failed = exc
                self.stopping.set()
