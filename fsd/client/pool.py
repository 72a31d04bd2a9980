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


class Workers:
    """Use as a context manager: leaving it waits for all jobs; leaving it by an exception (Ctrl-C) drops
    those not begun and waits for those running. `stopping` tells long jobs to end early."""

    def __init__(self, count: int) -> None:
        self.stopping = threading.Event()
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=2 * count)
        self._failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"copy-{at}", daemon=True) for at in range(count)
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
            self.stopping.set()
        for _ in self._threads:
            while not self.stopping.is_set():
                try:
                    self._jobs.put(None, timeout=POLL)
                    break
                except queue.Full:
                    continue  # workers are busy; look at `stopping` again
        for thread in self._threads:
            thread.join()
        if kind is None and self._failed is not None:
            raise self._failed

    def _put(self, job: Job) -> None:
        while True:
            if self._failed is not None:
                raise self._failed
            try:
                self._jobs.put(job, timeout=POLL)
                return
            except queue.Full:
                continue  # look at failures again

    def _work(self) -> None:
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
