"""A commit that was sent without waiting for its answer: by a thread that has other things to do meanwhile.

An fsync is a chain of threads that wake each other. The thread that has the request can send the commit
itself and be told by its poll that the answer is there: two wake-ups fewer than handing it to a worker, and
none in which two threads want the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsd.model.errors import Unavailable
from fsd.remote.transport import Answer, Connection
from fsd.wire.messages import CommitAnswer


class SentCommit:
    """One commit under way. One thread; end it by `step` or `give_up`."""

    def __init__(
        self,
        connection: Connection,
        read: Callable[[Answer], CommitAnswer],
        failed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """`read` makes the answer or raises what the server said, `failed` is told that none came, `ended`
        that the connection is free again."""
        self._connection, self._read, self._failed, self._ended = connection, read, failed, ended
        self.fileno: Final = connection.fileno()
        self.over = False

    def step(self) -> CommitAnswer | None:
        """The answer; None while it is not there. Raises what the server said, `Unavailable` for no answer in
        time or none at all, and `Stale`: send it again, waiting."""
        self.over = True
        try:
            answer = self._connection.step()
            if answer is None:
                self.over = False
                return None
            return self._read(answer)
        except Unavailable:
            self._failed()
            raise
        finally:
            if self.over:
                self._ended()

    def give_up(self) -> None:
        """Whatever comes is for nobody."""
        if not self.over:
            self.over = True
            self._connection.close()
            self._ended()
