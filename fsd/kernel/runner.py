"""Worker threads that run the volume's jobs, by lane.

One thread, and with it one connection, is kept for the fast lane (commits, fsync), so that bulk bodies never
stand in its way; three serve loads, hashing and uploads. Results go back through `deliver`, which is called
on the worker's thread and must hand them to the volume's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from fsd.remote.api import Remote
from fsd.vfs.types import FAST, Cache, Job

log = logging.getLogger(__name__)

FAST_WORKERS: Final = 1
BULK_WORKERS: Final = 3


class Runner:
    """Started by `start`, never joined at the end: a thread may hang in a dead connection, and the daemon
    leaves through `os._exit`. `submit` may be called from any thread."""

    def __init__(self, remote: Remote, cache: Cache, deliver: Callable[[Job, object], None]) -> None:
        self._remote = remote
        self._cache = cache
        self._deliver = deliver
        self._fast: SimpleQueue[Job | None] = SimpleQueue()
        self._bulk: SimpleQueue[Job | None] = SimpleQueue()

    def start(self) -> None:
        for count, queue, name in (
            (FAST_WORKERS, self._fast, "fsd-fast"),
            (BULK_WORKERS, self._bulk, "fsd-bulk"),
        ):
            for number in range(count):
                threading.Thread(
                    target=self._work, args=(queue,), name=f"{name}-{number}", daemon=True
                ).start()

    def submit(self, job: Job) -> None:
        (self._fast if job.lane == FAST else self._bulk).put(job)

    def stop(self) -> None:
        """Let every worker end after the job it is at."""
        for count, queue in ((FAST_WORKERS, self._fast), (BULK_WORKERS, self._bulk)):
            for _ in range(count):
                queue.put(None)

    def _work(self, queue: SimpleQueue[Job | None]) -> None:
        while True:
            job = queue.get()
            if job is None:
                return
            try:
                result: object = job.run(self._remote, self._cache)
            except Exception as exc:  # noqa: BLE001 - the volume decides what it means
                result = exc
            self._deliver(job, result)
