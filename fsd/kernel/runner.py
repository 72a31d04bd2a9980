"""Worker threads that run the volume's jobs, by lane.

One thread, and with it one connection, is kept for the fast lane (commits, fsync), so that bulk bodies never
stand in its way; three serve loads, hashing and uploads; one what needs no server. Results go back through
`deliver`, which is called on the worker's thread and must hand them to the volume's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from fsd.remote.api import Remote
from fsd.vfs.types import BULK, FAST, LOCAL, Cache, Job

log = logging.getLogger(__name__)

WORKERS: Final = {FAST: 1, BULK: 3, LOCAL: 1}


class Runner:
    """Started by `start`, never joined at the end: a thread may hang in a dead connection, and the daemon
    leaves through `os._exit`. `submit` may be called from any thread."""

    def __init__(self, remote: Remote, cache: Cache, deliver: Callable[[Job, object], None]) -> None:
        self._remote = remote
        self._cache = cache
        self._deliver = deliver
        self._queues: dict[str, SimpleQueue[Job | None]] = {lane: SimpleQueue() for lane in WORKERS}

    def start(self) -> None:
        for lane, queue in self._queues.items():
            for number in range(WORKERS[lane]):
                name = f"fsd-{lane}-{number}"
                threading.Thread(target=self._work, args=(queue,), name=name, daemon=True).start()

    def submit(self, job: Job) -> None:
        self._queues[job.lane].put(job)

    def stop(self) -> None:
        """Let every worker end after the job it is at."""
        for lane, queue in self._queues.items():
            for _ in range(WORKERS[lane]):
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
