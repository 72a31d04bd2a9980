"""What goes by its age alone: expired pins, the change feed's old rows, what ended sessions left.

Each call removes a bounded part in transactions of its own and says how much; less than the bound means that
nothing is left. Readers of the feed that were away for longer are told to start over; a session that comes
back later than `Retention.sessions` goes on as a new one, and its operations on their recorded bases.
"""

from __future__ import annotations

from typing import Final

from fsd.meta.database import Database, Tx
from fsd.model.errors import NotFound
from fsd.model.limits import SESSION_ROWS_KEEP, SWEEP_ROWS
from fsd.service import pins
from fsd.service.access import FsRef
from fsd.service.packs import Packs
from fsd.service.retention import Retention

PINS: Final = 32  # removed in one call: each may free as many rows as its state had of its own
# Checkpoints' pins belong to their records, forks' to the forks.
EXPIRED_SQL: Final = (
    "SELECT id FROM pin WHERE fs=? AND expires<? AND kind IN ('journal','mount') ORDER BY seq LIMIT ?"
)
CHANGES_SQL: Final = "SELECT seq, at FROM change WHERE fs=? AND seq>? ORDER BY seq LIMIT ?"
OLD_SESSIONS_SQL: Final = (
    "SELECT s.id FROM session s WHERE s.fs=? AND s.last_seen<? AND ("
    "EXISTS (SELECT 1 FROM applied a WHERE a.session=s.id)"
    " OR EXISTS (SELECT 1 FROM redirect r WHERE r.session=s.id)"
    " OR EXISTS (SELECT 1 FROM moved m WHERE m.session=s.id)) LIMIT ?"
)
_SESSIONS: Final = 16  # looked at in one call
_OF_SESSION: Final = (
    ("applied", "session, last_op"),
    ("redirect", "session, ino"),
    ("moved", "session, parent, name, ino"),
)


def expired_pins(db: Database, packs: Packs, fs: FsRef, now: int) -> int:
    """Unpin soft pins whose time is over; one that was given more time meanwhile stays."""

    def remove(tx: Tx, number: int) -> None:
        tx.lock_fs(fs.id)
        if tx.one("SELECT 1 FROM pin WHERE id=? AND expires<?", (number, now)) is not None:
            pins.unpin(tx, packs, fs, number)

    found = db.read(lambda tx: tx.all(EXPIRED_SQL, (fs.id, now, PINS)))
    for (number,) in found:
        try:
            db.write(lambda tx, n=number: remove(tx, n), frees=True)  # type: ignore[misc]
        except NotFound:  # the filesystem goes
            break
    return len(found)


def count_expired_pins(tx: Tx, fs: FsRef, now: int) -> int:
    row = tx.one(
        "SELECT count(*) FROM pin WHERE fs=? AND expires<? AND kind IN ('journal','mount')", (fs.id, now)
    )
    return int(row[0]) if row else 0


def old_rows(db: Database, fs: FsRef, keep: Retention, now: int) -> int:
    """Rows of the feed, of removed files and of sessions that are older than `keep` says."""
    removed = _changes(db, fs, keep.before(now, keep.feed))
    if removed < SWEEP_ROWS:
        removed += _sessions(db, fs.id, keep, now)
        removed += _sessions(db, 0, keep, now)  # the servers' own
    return removed


def _changes(db: Database, fs: FsRef, before: int) -> int:
    """The newest row stays however old it is: the head of the feed is proved by it (`fsd.service.audit`)."""
    rows = db.read(lambda tx: tx.all(CHANGES_SQL, (fs.id, -1, SWEEP_ROWS)))
    old = []
    for seq, at in rows:
        if at >= before:
            break
        old.append(int(seq))
    if not old:
        return 0

    def remove(tx: Tx) -> int:
        tx.lock_fs(fs.id)
        gone = tx.execute(
            "DELETE FROM gone WHERE (fs, ino) IN (SELECT fs, ino FROM gone WHERE fs=? AND seq<=? LIMIT ?)",
            (fs.id, old[-1], SWEEP_ROWS),
        )
        if gone == SWEEP_ROWS:
            return gone
        head = tx.one("SELECT seq FROM fs WHERE id=?", (fs.id,))
        last = old[-1] if head is None else min(old[-1], int(head[0]) - 1)
        return gone + tx.execute("DELETE FROM change WHERE fs=? AND seq<=?", (fs.id, last))

    return db.write(remove, frees=True)


def _sessions(db: Database, fs: int, keep: Retention, now: int) -> int:
    """What repeats need first, the session's own row much later: `fsd mounts` lists it until then."""
    before = keep.before(now, keep.sessions)
    long_ago = keep.before(now, keep.sessions * SESSION_ROWS_KEEP)
    found = db.read(lambda tx: tx.all(OLD_SESSIONS_SQL, (fs, before, _SESSIONS)))
    removed = 0
    for (session,) in found:
        for table, key in _OF_SESSION:
            removed += db.write(
                lambda tx, t=table, k=key, s=session: tx.execute(  # type: ignore[misc]
                    f"DELETE FROM {t} WHERE ({k}) IN (SELECT {k} FROM {t} WHERE session=? LIMIT ?)",
                    (s, SWEEP_ROWS),
                ),
                frees=True,
            )
    if found:
        return removed
    old = "SELECT id FROM session WHERE fs=? AND last_seen<? LIMIT ?"
    if db.read(lambda tx: tx.one(old, (fs, long_ago, 1))) is None:
        return 0
    return db.write(
        lambda tx: tx.execute(f"DELETE FROM session WHERE id IN ({old})", (fs, long_ago, SWEEP_ROWS)),
        frees=True,
    )
