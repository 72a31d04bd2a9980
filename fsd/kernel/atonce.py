"""Commits that the loop's thread sends itself, instead of handing them to a worker.

The program that waits for an fsync waits for each thread on the way there and back to be woken: without a
worker they are two fewer, and the two threads do not contend for the interpreter. Only what needs no waiting
is done here: a small commit, on a connection that is open and idle, whole into its socket's buffer. All else,
and whatever does not go as usual, is a worker's, which sends the same commit again: that is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fsd.remote.sent import SentCommit
from fsd.remote.transport import Stale
from fsd.vfs.commit import COMMIT_TIMEOUT, CommitJob
from fsd.vfs.types import Job
from fsd.wire.messages import Commit


class Begins(Protocol):
    """A `Remote` that can send a commit without waiting."""

    def begin_commit(self, commit: Commit, timeout: float) -> SentCommit | None: ...


class Watching(Protocol):
    """A loop that can wait for a descriptor beside its own."""

    def watch(self, fd: int, func: Callable[[], object]) -> None: ...
    def unwatch(self, fd: int) -> None: ...


class AtOnce:
    """The commit under way, if any. Loop's thread. `ended` gets a job and its result or error, `hand_on` a
    job that a worker is to do."""

    def __init__(
        self,
        remote: Begins,
        loop: Watching,
        ended: Callable[[Job, object], None],
        hand_on: Callable[[Job], None],
    ) -> None:
        self._remote, self._loop, self._ended, self._hand_on = remote, loop, ended, hand_on
        self._job: CommitJob | None = None
        self._sent: SentCommit | None = None
        self.count = 0  # sent so, for tests

    def take(self, job: Job) -> bool:
        """Send it, if it is a commit and that can be done now."""
        if not isinstance(job, CommitJob) or self._sent is not None:
            return False
        sent = self._remote.begin_commit(job.commit, COMMIT_TIMEOUT)
        if sent is None:
            return False
        self._job, self._sent = job, sent
        self.count += 1
        self._loop.watch(sent.fileno, self.look)
        return True

    def look(self) -> None:
        """Something came, or time has passed."""
        job, sent = self._job, self._sent
        if job is None or sent is None:
            return
        result: object
        try:
            result = sent.step()
            if result is None:
                return
        except Stale:
            self._over(sent)
            self._hand_on(job)
            return
        except Exception as exc:  # noqa: BLE001 - the volume decides what it means
            result = exc
        self._over(sent)
        self._ended(job, result)

    def _over(self, sent: SentCommit) -> None:
        self._job = self._sent = None
        self._loop.unwatch(sent.fileno)

    def stop(self) -> None:
        """Whatever comes is for nobody."""
        if self._sent is not None:
            sent = self._sent
            self._over(sent)
            sent.give_up()
