"""Leases: timed rights with a fence, on the server's clock. Writer leases of subtrees and `fsd lock`.

A fence is a number that rises over all leases of a filesystem, so that whoever is told one can tell a late
holder from the present one. Leases change under the filesystem's lock. Taking or giving up a writer lease is
a commit without changes of the tree: mounts that follow the feed hear of it at once, on every replica.
"""

from __future__ import annotations

from typing import Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Busy, LeaseLost, UsageError
from fsd.model.limits import (
    LEASE_KEEP,
    LEASE_TTL_MAX,
    LEASE_TTL_MIN,
    LEASES_MAX,
    LEASES_PAST_MAX,
    LOCK_PATH_MAX,
)
from fsd.model.names import show
from fsd.model.plain import dataclass, replace
from fsd.model.times import NS, rfc3339
from fsd.service.access import FsRef, Grant, hold, hold_tree
from fsd.service.feed import Feed
from fsd.service.writers import LOCK, WRITER, Lease, check_own, held_by_other, load, upwards

_TEXT_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A writer lease that a mount session wants with its start. `ino` is the top of the subtree, 0: that of
    the lease `before` had. `before` is the session it goes on for, with that one's newest ticket and next
    operation as this mount knows them: its lease passes over, unless a copy of the sandbox has committed what
    this one has not."""

    ino: int
    path: bytes
    ttl: float
    before: tuple[int, bytes, int] | None = None


class Leases:
    """All methods from any thread; those that take a `tx` inside a `Database` function."""

    def __init__(self, db: Database, feed: Feed, host: Host) -> None:
        self._db, self._feed, self._host = db, feed, host

    # writer leases -----------------------------------------------------------------------------------

    def take(self, tx: Tx, fs: FsRef, session: int, host: str, place: str, want: Exclusive) -> Lease:
        """The writer lease for a session that was just begun in `tx`. Raises `LeaseHeld`, `LeaseLost`,
        `Busy`, `UsageError`. The caller wakes the feed (`announced`) once it is durable."""
        _check_ttl(want.ttl)
        hold_tree(tx, fs)
        now = self._host.wall_ns()
        leases = self._tidy(tx, fs, now)
        if not want.ino:
            want = replace(want, ino=_ino_of(leases, want))
        way = upwards(tx, fs.id, want.ino)
        mine = [one for one in leases if self._passes(tx, fs, one, want)]
        for one in leases:
            if one.kind != WRITER or one.ended or not _overlap(tx, fs.id, one.ino, want.ino, way):
                continue
            if one in mine:
                self._end(tx, fs, one, "its mount went on in another session")
            elif one.binds(now):
                raise held_by_other(one)
            else:
                self._end(tx, fs, one, f"it expired, and {host}:{place} took it at {rfc3339(now)}")
        made = self._insert(tx, fs, WRITER, want.ino, want.path, session, host, place, now, want.ttl)
        tx.execute("UPDATE fs SET writers=writers+1 WHERE id=?", (fs.id,))
        self._announce(tx, fs, want.ino)
        self._host.crash_point("lease.taken")
        return made

    def _passes(self, tx: Tx, fs: FsRef, lease: Lease, want: Exclusive) -> bool:
        if want.before is None or lease.session != want.before[0] or lease.kind != WRITER:
            return False
        row = tx.one("SELECT ticket, next_op FROM session WHERE id=? AND fs=?", (lease.session, fs.id))
        # The ticket alone is not enough: a copy is told the current one along with what both had done.
        return row is not None and row[0] == want.before[1] and row[1] <= want.before[2]

    def announced(self, fs: FsRef) -> None:
        """A writer lease changed hands, durably."""
        self._feed.wake(fs.id, self._feed.head(fs))

    # `fsd lock` --------------------------------------------------------------------------------------

    def lock(self, tx: Tx, fs: FsRef, path: bytes, host: str, place: str, ttl: float, who: Grant) -> Lease:
        """The lock called `path`. Raises `LeaseHeld`, `Busy`, `UsageError`."""
        _check_ttl(ttl)
        if len(path) > LOCK_PATH_MAX:
            raise UsageError(f"a lock's path has at most {LOCK_PATH_MAX} bytes")
        hold(tx, fs, who)
        now = self._host.wall_ns()
        for one in self._tidy(tx, fs, now):
            if one.kind != LOCK or one.path != path or one.ended:
                continue
            if one.binds(now):
                raise held_by_other(one)
            self._end(tx, fs, one, f"it expired, and {host}:{place} took it at {rfc3339(now)}")
        return self._insert(tx, fs, LOCK, 0, path, 0, host, place, now, ttl)

    # both --------------------------------------------------------------------------------------------

    def renew(self, fs: FsRef, session: int, fence: int, ttl: float, who: Grant) -> Lease:
        """Some more time. An expired lease nobody took is taken again, a writer's under a new fence; the old
        one with its `session` goes on meaning it. Raises `LeaseLost`."""
        _check_ttl(ttl)

        def run(tx: Tx) -> Lease:
            hold(tx, fs, who)
            lease = self._of(tx, fs, session, fence)
            old, now = lease.fence, self._host.wall_ns()
            if lease.kind == WRITER and not lease.binds(now):
                self._check_free(tx, fs, lease, now)
                lease = lease._replace(fence=_next_fence(tx, fs))
            lease = lease._replace(expires=now + int(ttl * NS))
            tx.execute(
                "UPDATE lease SET fence=?, expires=? WHERE fs=? AND fence=?",
                (lease.fence, lease.expires, fs.id, old),
            )
            return lease

        return self._db.write(run, frees=True)

    @staticmethod
    def _check_free(tx: Tx, fs: FsRef, lease: Lease, now: int) -> None:
        """Whoever takes an overlapping lease ends one that expired; but a rename, too, may have brought it
        together with another's since. Raises `LeaseLost`."""
        way = upwards(tx, fs.id, lease.ino)
        for one in load(tx, fs.id):
            other = one.kind == WRITER and one.fence != lease.fence and one.binds(now)
            if other and _overlap(tx, fs.id, one.ino, lease.ino, way):
                raise LeaseLost(f"the writer lease of {show(lease.path)} expired, and {one}")

    def release(self, fs: FsRef, fence: int, who: Grant) -> None:
        """Give it up. What is not there (any more) is released already."""

        def run(tx: Tx) -> bool:
            hold(tx, fs, who)
            lease = next((one for one in load(tx, fs.id) if one.fence == fence and not one.ended), None)
            if lease is None:
                return False
            tx.execute("DELETE FROM lease WHERE fs=? AND fence=?", (fs.id, fence))
            if lease.kind != WRITER:
                return False
            tx.execute("UPDATE fs SET writers=writers-1 WHERE id=?", (fs.id,))
            self._announce(tx, fs, lease.ino)
            return True

        if self._db.write(run, frees=True):
            self.announced(fs)

    def held(self, fs: FsRef) -> list[Lease]:
        """Those that are held."""
        now = self._host.wall_ns()
        return [one for one in self._db.read(lambda tx: load(tx, fs.id)) if one.binds(now)]

    # rows --------------------------------------------------------------------------------------------

    def _of(self, tx: Tx, fs: FsRef, session: int, fence: int) -> Lease:
        """The lease that its holder still has: a lock by its number, a writer's by its session. Raises
        `LeaseLost`."""
        leases = load(tx, fs.id)
        if session:
            return check_own([one for one in leases if one.kind == WRITER], session, fence)
        found = next((one for one in leases if one.kind == LOCK and one.fence == fence), None)
        if found is None or found.ended:
            what = "the lock is not held any more"
            if found is not None:
                what = f"the lock {show(found.path)} was lost: {found.ended}"
            raise LeaseLost(what, hint="take it again")
        return found

    def _insert(
        self,
        tx: Tx,
        fs: FsRef,
        kind: str,
        ino: int,
        path: bytes,
        session: int,
        host: str,
        place: str,
        now: int,
        ttl: float,
    ) -> Lease:
        for text in (host, place):
            if len(text) > _TEXT_MAX or "\0" in text:
                raise UsageError("a lease's texts have at most 4096 characters and no NUL")
        fence = _next_fence(tx, fs)
        made = Lease(fence, kind, ino, path, session, host, place, now, now + int(ttl * NS), "")
        tx.execute(
            "INSERT INTO lease (fs, fence, kind, ino, path, session, host, place, since, expires, ended) "
            "VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            (fs.id, *made),
        )
        return made

    def _end(self, tx: Tx, fs: FsRef, lease: Lease, why: str) -> None:
        """Its holder has it no more, and is told why when it comes."""
        tx.execute("UPDATE lease SET ended=? WHERE fs=? AND fence=?", (why, fs.id, lease.fence))
        if lease.kind == WRITER:
            tx.execute("UPDATE fs SET writers=writers-1 WHERE id=?", (fs.id,))

    def _tidy(self, tx: Tx, fs: FsRef, now: int) -> list[Lease]:
        """The filesystem's leases, without those nobody will ask about. Every commit beside a writer looks
        at all of them, and sandboxes that are killed give none up: of those that bind nobody, LEASES_PAST_MAX
        are remembered, the newest. Raises `Busy` at the bound of those that do."""
        leases = load(tx, fs.id)
        bind = sum(1 for one in leases if one.binds(now))
        if bind >= LEASES_MAX:
            raise Busy(f"{LEASES_MAX} leases are held in this filesystem", hint="release some, or wait")
        past = [one for one in leases if not one.binds(now)]
        # What is still its session's goes last.
        past.sort(key=lambda one: (one.kind == WRITER and not one.ended, one.expires))
        over = max(0, len(past) - LEASES_PAST_MAX)
        old = past[:over] + [
            one
            for one in past[over:]
            if now - one.expires > LEASE_KEEP * NS and (one.ended or one.kind == LOCK)
        ]
        if old:
            tx.many("DELETE FROM lease WHERE fs=? AND fence=?", [(fs.id, one.fence) for one in old])
        lost = sum(1 for one in old if one.kind == WRITER and not one.ended)
        if lost:
            tx.execute("UPDATE fs SET writers=writers-? WHERE id=?", (lost, fs.id))
        gone = {one.fence for one in old}
        return [one for one in leases if one.fence not in gone]

    def _announce(self, tx: Tx, fs: FsRef, ino: int) -> None:
        row = tx.one("UPDATE fs SET seq=seq+1 WHERE id=? RETURNING seq", (fs.id,))
        assert row is not None, "the filesystem is locked"
        self._feed.append(tx, fs.id, int(row[0]), 0, [ino], [])


def _ino_of(leases: list[Lease], want: Exclusive) -> int:
    for one in leases:
        if one.kind == WRITER and want.before is not None and one.session == want.before[0]:
            return one.ino
    raise LeaseLost("the writer lease is not this mount's any more")


def _next_fence(tx: Tx, fs: FsRef) -> int:
    row = tx.one("UPDATE fs SET fence=fence+1 WHERE id=? RETURNING fence", (fs.id,))
    assert row is not None, "the filesystem is locked"
    return int(row[0])


def _check_ttl(ttl: float) -> None:
    if not LEASE_TTL_MIN <= ttl <= LEASE_TTL_MAX:
        raise UsageError(f"a lease lasts from {LEASE_TTL_MIN:g} to {LEASE_TTL_MAX:g} seconds")


def _overlap(tx: Tx, fs: int, one: int, other: int, above_other: list[int]) -> bool:
    return one in above_other or other in upwards(tx, fs, one)
