"""`Remote`: the server as the client side sees it.

Every call blocks, may be made from any thread, and raises an `FsdError`: what the server said (translated
from its error body), or `Unavailable` for everything that is no answer: refused, unreachable, slow, HTML,
empty, cut, not ours. After `Unavailable` nobody knows whether the server acted; every call here may
therefore be made again with the same arguments (commits carry ticket and digest, blobs their hash, a
session's start and end an idempotency key).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fsd.model.plain import dataclass
from fsd.wire.frame import Blob
from fsd.wire.messages import NO_MARK, Commit, CommitAnswer, FeedPage, Mark


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A mount that wants to be the only writer of its subtree, whose top is the inode `ino` (0: that of
    `before`). The lease lasts `ttl` seconds when it is not renewed. `before`: the session this one goes on
    for, its newest ticket and the number of its next operation."""

    ino: int
    ttl: float
    before: tuple[int, bytes, int] | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a mount tells of itself when its session starts. `host` and `path` name the sandbox and the mount
    point for people; `remote_path` is the subtree, as text. `known`: the newest commit a mount that goes on
    under another session has seen."""

    mount_id: str
    host: str
    path: str
    remote_path: str
    read_only: bool
    version: str
    exclusive: Exclusive | None = None
    known: Mark | None = None


@dataclass(frozen=True, slots=True)
class PreviousSession:
    """How the newest session of the same mount ended. `pending_at_last_report` is (operations, files, bytes);
    times as the server wrote them (RFC 3339), None when there was none."""

    ended: str
    last_commit_at: str | None
    pending_at_last_report: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A new session: its number, the ticket of its first commit, and the filesystem's seq at that moment.
    `fence` is that of its writer lease, 0 without one."""

    session: int
    ticket: bytes
    seq: int
    previous: PreviousSession | None
    server_version: str
    block_size: int
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the last call was answered, and how long the newest short call took (None: none yet)."""

    reachable: bool
    rtt_ms: float | None


class Remote(Protocol):
    """One filesystem on one server. `timeout` is for the whole call, in seconds, connecting included; what a
    body takes on a slow way comes on top."""

    def start_session(self, info: SessionInfo) -> SessionStart:
        """Raises `LeaseHeld` when it is to be exclusive and cannot be, `HistoryChanged`; then there is no
        session."""
        ...

    def renew_lease(self, session: int, fence: int, ttl: float) -> int:
        """Keep the session's writer lease; its fence now. Raises `LeaseLost`."""
        ...

    def release_lease(self, fence: int) -> None: ...

    def count_conflicts(self, top: bytes, timeout: float) -> int:
        """How many conflicts below the path `top` nobody has taken care of yet."""
        ...

    def end_session(self, session: int, ended: str, pending: tuple[int, int, int]) -> None: ...

    def report(self, session: int, pending: tuple[int, int, int]) -> None: ...

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        """Send one commit. Raises `SessionForked`, `SessionUnknown`, `HistoryChanged` and so on as the server
        says."""
        ...

    def create_checkpoint(self, ask: Mapping[str, Any], key: str, timeout: float) -> dict[str, Any]:
        """A checkpoint of the server's present state: POST …/checkpoints with the fields `ask`. The same
        `key` is the same request."""
        ...

    def delete_checkpoint(self, checkpoint_id: str) -> None: ...

    def upload(self, blobs: list[Blob], timeout: float) -> None:
        """Store blobs, durable on return. More than one pack's worth is sent as several."""
        ...

    def ask(self, questions: Sequence[tuple[Any, ...]], timeout: float) -> tuple[int, list[Any]]:
        """An answer to each namespace question (`fsd.wire.messages`), all at one seq, with `Attr` and `Entry`
        objects. At most NS_BATCH_MAX questions, else `UsageError`."""
        ...

    def keep(self, hashes: Sequence[bytes], timeout: float) -> list[bytes]:
        """The server keeps these blobs for its grace from now on; those it does not have."""
        ...

    def blobs(self, hashes: Sequence[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        """The blobs found, not yet verified (`open_blob` does), and the hashes the server does not have."""
        ...

    def answer_barrier(
        self,
        session: int,
        ask: int,
        *,
        included: bool,
        seq: int,
        pending: tuple[int, int, int],
        reason: str,
    ) -> None:
        """What became of a barrier the feed asked for. Raises `SessionUnknown` when nobody waits for it."""
        ...

    def changes(
        self,
        after: int,
        session: int,
        wait: float,
        root: int = 0,
        asked: int | None = None,
        known: Mark = NO_MARK,
    ) -> FeedPage:
        """The change feed behind `after`; waits up to `wait` seconds for the first change. `root` is the
        mount's top, `asked` the newest barrier it was asked for (None: it places none), `known` the newest
        commit it has seen. Raises `HistoryChanged`."""
        ...
