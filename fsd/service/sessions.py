"""Mount sessions: one row for each mount, with the ticket chain of its commits.

A session is one mount of one process (invariant 10, *one sender*). Its number makes inode numbers and is
never used again. `ended` is '' until the client says how it ended; one that was not seen for LOST_AFTER
counts as lost, but may still commit: a recovered log goes under the session that wrote it. What repeats need
goes with the sweep, long after the last sign of life; one that comes back after all is told `session_forked`
and goes on as a new one.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import NoSpace, SessionUnknown, UsageError
from fsd.model.limits import LIST_PAGE_MAX, SESSION_BITS
from fsd.model.plain import dataclass
from fsd.service.access import ADMIN, ADMIN_GRANT, FsRef, Grant, check_status, check_token, hold
from fsd.service.feed import check_past
from fsd.wire.messages import Mark

LOST_AFTER: Final = 90.0  # seconds without a sign of life: three long polls
SEEN_EVERY: Final = 10.0  # a sign of life is written at most so often
TICKET: Final = 16
_TEXT_MAX: Final = 4096
_ENDS: Final = ("clean", "lost", "replaced")

_LOAD: Final = (
    "SELECT id, host, remote_path, next_op, ticket, prev_ticket, prev_digest, prev_answer, "
    "(SELECT writers FROM fs WHERE fs.id=session.fs), "
    "EXISTS (SELECT 1 FROM redirect r WHERE r.session=session.id) "
    "OR EXISTS (SELECT 1 FROM moved m WHERE m.session=session.id), "
    "(SELECT t.status FROM token t WHERE t.id=? AND t.fs=session.fs), "
    "(SELECT c.at FROM change c WHERE c.fs=session.fs AND c.seq=?) "
    "FROM session WHERE id=? AND fs=?"
)
LIVES: Final = "CASE WHEN ended='replaced' THEN '' ELSE ended END"  # SQL: `ended` at a sign of life

Pending = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a mount says of itself. `mount_id` is a hash of filesystem, subtree and mount point: the same for
    the same place on every machine. `host` names conflicts for people."""

    mount_id: str
    host: str
    path: str
    remote_path: str
    read_only: bool
    version: str


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A new session. `previous`: {ended, last_commit_at (ns or None), pending_at_last_report} or None."""

    session: int
    ticket: bytes
    seq: int
    previous: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class SessionRow:
    """What the commit needs of a session."""

    id: int
    mount: str
    remote_path: str
    next_op: int
    ticket: bytes
    prev_ticket: bytes
    prev_digest: bytes
    prev_answer: bytes
    writers: int  # fs.writers, read along: 0 spares the commit a question about leases
    redirected: int  # whether it has rows in `redirect` or `moved`; read along for the same reason


class Sessions:
    """All methods from any thread; those that take a `tx` inside a `Database` function."""

    def __init__(self, db: Database, host: Host) -> None:
        self._db = db
        self._host = host

    def start(
        self, fs: FsRef, info: SessionInfo, who: Grant = ADMIN_GRANT, known: Mark | None = None
    ) -> SessionStart:
        """Open a session. Raises `UsageError` for texts too long, `NoSpace` after 2^23 sessions."""
        return self._db.write(lambda tx: self.begin(tx, fs, info, who, known), frees=True)

    def begin(
        self, tx: Tx, fs: FsRef, info: SessionInfo, who: Grant, known: Mark | None = None
    ) -> SessionStart:
        """As `start`, in the caller's transaction. `known`: what a mount that goes on under a new session has
        seen. Raises `HistoryChanged`."""
        for text in (info.mount_id, info.host, info.path, info.remote_path, info.version):
            if len(text) > _TEXT_MAX or "\0" in text:
                raise UsageError("a session's texts have at most 4096 characters and no NUL")
        ticket = self._host.token_bytes(TICKET)
        now = self._host.wall_ns()
        seq, _ = hold(tx, fs, who)
        check_past(tx, fs, seq, known)
        previous = tx.one(
            f"SELECT {_SHOWN} FROM session WHERE fs=? AND mount_id=? ORDER BY id DESC LIMIT 1",
            (fs.id, info.mount_id),
        )
        number = insert_session(tx, fs.id, info, ticket, now)
        return SessionStart(number, ticket, seq, self._previous(previous, now))

    def _previous(self, row: tuple[Any, ...] | None, now: int) -> dict[str, Any] | None:
        if row is None:
            return None
        shown = _shown(row, now)
        return {
            "ended": shown["ended"],
            "last_commit_at": shown["last_commit_at"],
            "pending_at_last_report": shown["pending"],
        }

    def end(self, fs: FsRef, session: int, ended: str, pending: Pending) -> None:
        """The mount says how it ended: `replaced` says its next run, which sent what was left. That may be a
        copy of a sandbox that goes on, so a sign of life takes it back. Raises `SessionUnknown`,
        `UsageError`."""
        if ended not in _ENDS:
            raise UsageError("a session ends clean, lost or replaced")
        self._note(fs, session, pending, ended)

    def report(self, fs: FsRef, session: int, pending: Pending) -> None:
        """A sign of life and what the mount still holds. Raises `SessionUnknown`."""
        self._note(fs, session, pending, "")

    def _note(self, fs: FsRef, session: int, pending: Pending, ended: str) -> None:
        text, now = pending_text(pending), self._host.wall_ns()

        def note(tx: Tx) -> int:
            return tx.execute(
                "UPDATE session SET pending=?, ended=?, last_seen=? WHERE id=? AND fs=?",
                (text, ended, now, session, fs.id),
            )

        if not self._db.write(note, frees=True):
            raise unknown(session)

    def seen(self, fs: FsRef, session: int) -> None:
        """A sign of life; written at most every SEEN_EVERY seconds. An unknown session is ignored: the next
        commit says so."""
        now = self._host.wall_ns()
        old = now - int(SEEN_EVERY * 1e9)
        row = self._db.read(
            lambda tx: tx.one("SELECT last_seen, ended FROM session WHERE id=? AND fs=?", (session, fs.id))
        )
        if row is not None and (row[0] < old or row[1] == "replaced"):
            self._db.write(
                lambda tx: tx.execute(
                    f"UPDATE session SET last_seen=?, ended={LIVES} WHERE id=?", (now, session)
                ),
                frees=True,
            )

    def list(self, fs: FsRef, limit: int, before: int | None = None) -> list[dict[str, Any]]:
        """Sessions, newest first; `before` is the session the last page ended with."""
        limit = max(1, min(limit, LIST_PAGE_MAX))
        now = self._host.wall_ns()
        rows = self._db.read(
            lambda tx: tx.all(
                f"SELECT {_SHOWN} FROM session WHERE fs=? AND id<? ORDER BY id DESC LIMIT ?",
                (fs.id, 2**SESSION_BITS if before is None else before, limit),
            )
        )
        return [_shown(row, now) for row in rows]

    def load(self, tx: Tx, fs: FsRef, session: int, who: Grant, known: int) -> tuple[SessionRow, int | None]:
        """The session for a commit of `who`, and when the commit `known` was made. For whoever has locked the
        filesystem and not asked for the token: one question for all of it. Raises `SessionUnknown`,
        `NotAuthenticated`."""
        row = tx.one(_LOAD, (who.token_id, known, session, fs.id))
        if row is None:
            check_token(tx, fs, who)
            raise unknown(session)
        *of_session, status, at = row
        if who.kind != ADMIN:
            check_status(who.token_id, status)
        return SessionRow(*of_session), at


def unknown(session: int) -> SessionUnknown:
    return SessionUnknown(
        f"no session {session} of this filesystem", hint="mount again: that starts a session of its own"
    )


def insert_session(tx: Tx, fs: int, info: SessionInfo, ticket: bytes, now: int) -> int:
    """A new session's row; returns its number."""
    row = tx.one(
        "INSERT INTO session (fs, mount_id, host, path, remote_path, read_only, version, started, "
        "last_seen, last_commit, pending, ended, next_op, ticket, prev_ticket, prev_digest, prev_answer) "
        "VALUES (?,?,?,?,?,?,?,?,?,0,?,'',1,?,?,?,?) RETURNING id",
        (
            fs,
            info.mount_id,
            info.host,
            info.path,
            info.remote_path,
            int(info.read_only),
            info.version,
            now,
            now,
            pending_text((0, 0, 0)),
            ticket,
            b"",
            b"",
            b"",
        ),
    )
    assert row is not None, "INSERT … RETURNING gives a row"
    number = int(row[0])
    if number >= 2**SESSION_BITS:
        raise NoSpace("this server has given out all its session numbers", hint="start a new server")
    return number


def pending_text(pending: Pending) -> str:
    operations, files, size = pending
    if min(pending) < 0:
        raise UsageError("what is pending is counted from 0")
    return f'{{"operations": {operations:d}, "files": {files:d}, "bytes": {size:d}}}'


_SHOWN: Final = (
    "id, mount_id, host, path, remote_path, read_only, version, started, last_seen, last_commit, "
    "pending, ended"
)


def _shown(row: tuple[Any, ...], now: int) -> dict[str, Any]:
    """A session for people; times are ns (None: never)."""
    ended = row[11] or ("active" if now - row[8] < LOST_AFTER * 1e9 else "lost")
    return {
        "session": row[0],
        "mount_id": row[1],
        "host": row[2],
        "path": row[3],
        "remote_path": row[4],
        "read_only": bool(row[5]),
        "version": row[6],
        "started_at": row[7],
        "last_seen_at": row[8],
        "last_commit_at": row[9] or None,
        "pending": json.loads(row[10]),
        "ended": ended,
    }
