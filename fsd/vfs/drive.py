"""`Driver`: run a volume's jobs on the calling thread until something is reached (recovery, tests)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fsd.model.errors import FsdError, Unavailable
from fsd.model.words import counted
from fsd.remote.api import Remote
from fsd.vfs.types import Cache, Park, Told, Want
from fsd.vfs.volume import Volume

T = TypeVar("T")

FULL_PATIENCE = 3.0  # seconds for a full disk: only what is sent meanwhile could make room


class Driver:
    """The volume's thread and its workers in one. `sleep` waits seconds; tests move their clock there.

    `patience`: give up with the last error after so many seconds in which nothing went through. `told` hears
    of whatever goes through.
    """

    def __init__(
        self,
        volume: Volume,
        remote: Remote,
        cache: Cache,
        *,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = 60.0,
        told: Told | None = None,
    ) -> None:
        self.volume = volume
        self.remote = remote
        self.cache = cache
        self.sleep = sleep
        self.patience = patience
        self.told = told

    def step(self) -> bool:
        """Run the jobs that are waiting. False: there was none."""
        jobs = self.volume.jobs()
        for job in jobs:
            result: object
            try:
                result = job.run(self.remote, self.cache)
            except FsdError as exc:
                result = exc
            self.volume.finish(job, result)
            if self.told is not None and not isinstance(result, FsdError):
                self.told(f"{counted(len(self.volume.core.queue), 'operation')} of an earlier run to send")
        return bool(jobs)

    def until(self, want: Want) -> None:
        """Returns when `want` ended well; raises its error, or `Unavailable` when patience ran out."""
        volume = self.volume
        host = volume.core.host
        since = host.monotonic()
        mark = (volume.committer.committed_ops, volume.core.acked)
        while not volume.done(want):
            if self.step():
                now_at = (volume.committer.committed_ops, volume.core.acked)
                if now_at != mark or not volume.core.reason:
                    since, mark = host.monotonic(), now_at
                continue
            now = host.monotonic()
            full = volume.core.no_space
            if full is not None and full.message == volume.core.reason and now - since >= FULL_PATIENCE:
                raise full
            deadline = volume.next_deadline()
            if now - since >= self.patience:
                raise Unavailable(volume.core.reason or f"nothing went through: {want.what}")
            self.sleep(min(1.0, max(0.001, (deadline if deadline is not None else now + 0.05) - now)))
            volume.tick(host.monotonic())

    def call(self, fn: Callable[[], T]) -> T:
        """Make a volume call, waiting out its parks."""
        while True:
            try:
                return fn()
            except Park as park:
                self.until(park.want)
                if not park.again:
                    return park.want.result  # type: ignore[return-value]  # what the call would return
