"""The sweep: room of what nothing shows any more comes back (invariant 5, *deletion backwards*).

A round over a filesystem goes through PHASES, each a row of bounded steps: soft pins whose time is over,
rows that are too old, blobs without references, packs without blobs or with few, objects that no row needs,
and objects that never got a row. Every step plans on a snapshot and looks again in the transaction that
removes; rows go before objects. So a round may end anywhere (crash, lost lease, a second sweep beside it),
and the next one does the rest. The lease of a filesystem only keeps replicas from doing the same work twice.

`turn` is the background's: the next step of the next filesystem that is due. `call` is a person's: it sweeps
what it is asked to until its time is over and says where to go on. Crash points: `sweep.*`, those of the
store and of the database.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fsd.blobs.store import BlobStore, Listed
from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import MAX, chunks, in_list
from fsd.model.errors import Busy, NoSpace, NotFound, UsageError
from fsd.model.limits import (
    STRAY_LEAST,
    SWEEP_BLOBS,
    SWEEP_CALL,
    SWEEP_LEASE,
    SWEEP_LIST,
    SWEEP_LIST_EVERY,
    SWEEP_OBJECTS,
    SWEEP_ROWS,
    VACUUM_PAGES,
)
from fsd.model.plain import dataclass
from fsd.model.times import NS
from fsd.service import expire, repack
from fsd.service.access import FsRef, no_file_system
from fsd.service.packs import Packs, object_key
from fsd.service.retention import Retention

log = logging.getLogger(__name__)

PHASES: Final = ("pins", "rows", "blobs", "packs", "objects", "strays", "end")
_VACUUM: Final = "vacuum"
_CURSOR: Final = re.compile(r"([0-9a-f]{16})/([0-9]{1,18})/([a-z]+)/([A-Za-z0-9_./-]*)")
_AT: Final = {  # what stands for a place within a phase
    "blobs": re.compile(r"([0-9a-f]{64})?"),
    "packs": re.compile(r"([0-9]{1,18}-[0-9]{1,18})?"),
    "objects": re.compile(r"([0-9]{1,18})?"),
    "strays": re.compile(r".*"),
}
_NO_AT: Final = re.compile(r"(more)?")
_CALM: Final = 6  # pauses after a round that found nothing to do
_SHARE: Final = 20  # a round that took long is followed by a pause this many times as long
BLOBS_SQL: Final = (
    "SELECT hash, pack, stored_len, refs, fresh FROM blob WHERE fs=? AND hash>? ORDER BY hash LIMIT ?"
)
DROPPED_SQL: Final = "SELECT pack, size FROM dropped WHERE fs=? AND pack>? AND since<=? ORDER BY pack LIMIT ?"
DUE_SQL: Final = (
    "SELECT fs.id, fs.name FROM fs LEFT JOIN sweep s ON s.fs=fs.id WHERE fs.status IN ('active','kept')"
    " AND (s.fs IS NULL OR (s.due<=? AND s.until<=?)) ORDER BY fs.id LIMIT 1"
)
# What a round did, or with `dry` would do; the names of the answer and of the metrics.
FIGURES: Final = (
    "pins", "rows", "blobs", "blob_bytes", "packs", "packs_rewritten", "packs_gathered", "bytes_rewritten",
    "objects", "object_bytes", "strays", "stray_bytes", "packs_damaged", "file_systems",
)  # fmt: skip
Figures = Counter[str]


class Cursor(NamedTuple):
    """Where a round is: filesystem, phase, and where in it ('' its beginning)."""

    fs: FsRef
    phase: str = PHASES[0]
    at: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """`older`: seconds for which nothing may have used what goes. `dry`: only count. `lists`: also look for
    objects that never got a row."""

    older: float
    dry: bool = False
    lists: bool = True


class Sweep:
    """`turn` from one thread at a time, `call` from any."""

    def __init__(self, db: Database, store: BlobStore, packs: Packs, keep: Retention, host: Host) -> None:
        self._db, self._store, self._packs, self._keep, self._host = db, store, packs, keep, host
        self._holder = f"server:{host.token_bytes(8).hex()}"
        self._now: Cursor | None = None
        self._terms = Terms(keep.grace)
        self._began = 0.0
        self._did: Figures = Counter()
        self._until = 0
        self._mutex = threading.Lock()
        self._totals: Figures = Counter(dict.fromkeys(("rounds", *FIGURES), 0))

    def totals(self) -> dict[str, int]:
        """All this server's sweeps have done since it started."""
        with self._mutex:
            return dict(self._totals)

    # In the background.

    def turn(self) -> bool:
        """Do one step; False: nothing is due. What a step raises (`Unavailable`, …) ends the round; it is
        due again after the lease."""
        if not self._keep.every:
            return False
        if self._now is None:
            fs = self._due()
            if fs is None:
                return False
            if not self._claim(fs, self._holder):
                return True  # another replica was quicker: look for the next
            self._begin(fs)
        assert self._now is not None
        cursor, self._now = self._now, None
        if self._until - self._host.wall_ns() < SWEEP_LEASE * NS / 2 and not self._claim(
            cursor.fs, self._holder
        ):
            return True  # somebody else goes on with it
        self._now = self._step(cursor, self._terms, self._did)
        if self._now is None:
            took = self._host.monotonic() - self._began
            calm = 1 if any(self._did.values()) else _CALM
            self._end(cursor.fs, self._holder, max(calm * self._keep.every, _SHARE * took))
            self._add(Counter(rounds=1))
        return True

    def _due(self) -> FsRef | None:
        now = self._host.wall_ns()
        row = self._db.read(lambda tx: tx.one(DUE_SQL, (now, now)))
        return None if row is None else FsRef(int(row[0]), str(row[1]))

    def _begin(self, fs: FsRef) -> None:
        listed = self._db.read(lambda tx: tx.one("SELECT listed FROM sweep WHERE fs=?", (fs.id,)))
        before = self._keep.before(self._host.wall_ns(), SWEEP_LIST_EVERY)
        self._terms = Terms(self._keep.grace, lists=listed is None or listed[0] < before)
        self._began = self._host.monotonic()
        self._did = Counter()
        self._now = Cursor(fs)

    def _claim(self, fs: FsRef, holder: str) -> bool:
        """Take or renew the lease. A person's sweep takes it from a server's."""
        now = self._host.wall_ns()
        until = now + int(SWEEP_LEASE * NS)
        taken = "server:%" if not holder.startswith("server:") else holder

        def take(tx: Tx) -> bool:
            tx.execute(
                "INSERT INTO sweep (fs, holder, until, due, listed)"
                " SELECT id, '', 0, 0, 0 FROM fs WHERE id=? ON CONFLICT (fs) DO NOTHING",
                (fs.id,),
            )
            return bool(
                tx.execute(
                    "UPDATE sweep SET holder=?, until=? WHERE fs=? AND (holder IN ('',?) OR until<=?"
                    " OR holder LIKE ?)",
                    (holder, until, fs.id, holder, now, taken),
                )
            )

        won = self._db.write(take, frees=True)
        if won and holder == self._holder:
            self._until = until
        return won

    def _end(self, fs: FsRef, holder: str, pause: float) -> None:
        due = self._host.wall_ns() + int(pause * NS)
        self._db.write(
            lambda tx: tx.execute(
                "UPDATE sweep SET holder='', until=0, due=? WHERE fs=? AND holder=?", (due, fs.id, holder)
            ),
            frees=True,
        )

    # When asked.

    def call(
        self, only: str | None, terms: Terms, cursor: str, *, vacuum: bool = False, token: str = "0" * 16
    ) -> dict[str, Any]:
        """Sweep the filesystem `only`, or all, for about SWEEP_CALL seconds from `cursor` ('' the beginning)
        on. `token`, 16 hex digits, is whose sweep it is; a cursor carries it on. Raises `NotFound`,
        `UsageError` (the cursor), `Busy` (another person's sweep is at the same filesystem)."""
        token, now = self._resume(cursor, only, token)
        holder = f"call:{token}"
        figures: Figures = Counter(dict.fromkeys(FIGURES, 0))
        end = self._host.monotonic() + SWEEP_CALL
        claimed = 0
        while now is not None and now.phase != _VACUUM:
            if not terms.dry and claimed != now.fs.id:
                if not self._claim(now.fs, holder):
                    raise Busy(f"{now.fs.name} is being swept already", hint="try again in a minute")
                claimed = now.fs.id
            following = self._step(now, terms, figures)
            if following is None:
                figures["file_systems"] += 1
                if not terms.dry:
                    self._end(now.fs, holder, self._keep.every)
                following = None if only else self._next_fs(now.fs.id)
            now = following
            if self._host.monotonic() > end:
                break
        again = f"{token}/{now.fs.id}/{now.phase}/{now.at}" if now is not None else None
        if now is None or now.phase == _VACUUM:
            again = self._vacuum(token, end) if vacuum and not terms.dry else None
        return {
            "dry_run": terms.dry,
            **figures,
            "database": self._db.room()._asdict(),
            "next_cursor": again,
        }

    def _vacuum(self, token: str, end: float) -> str | None:
        while self._db.give_back(VACUUM_PAGES):
            if self._host.monotonic() > end:
                return f"{token}/0/{_VACUUM}/"
        return None

    def _resume(self, text: str, only: str | None, token: str) -> tuple[str, Cursor | None]:
        if not text:
            if only is None:
                return token, self._next_fs(0)
            row = self._db.read(
                lambda tx: tx.one(
                    "SELECT id, name FROM fs WHERE name=? AND status IN ('active','kept')", (only,)
                )
            )
            if row is None:
                raise no_file_system(only)
            return token, Cursor(FsRef(*row))
        match = _CURSOR.fullmatch(text)
        if match is None or not _AT.get(match[3], _NO_AT).fullmatch(match[4]):
            raise UsageError("the cursor is not one of an earlier answer")
        token, number, phase, at = match[1], int(match[2]), match[3], match[4]
        if phase == _VACUUM:
            return token, Cursor(FsRef(0, ""), _VACUUM)
        if phase not in PHASES:
            raise UsageError("the cursor is not one of an earlier answer")
        row = self._db.read(
            lambda tx: tx.one("SELECT name FROM fs WHERE id=? AND status IN ('active','kept')", (number,))
        )
        if row is None:  # deleted since
            return token, None if only else self._next_fs(number)
        return token, Cursor(FsRef(number, row[0]), phase, at)

    def _next_fs(self, after: int) -> Cursor | None:
        row = self._db.read(
            lambda tx: tx.one(
                "SELECT id, name FROM fs WHERE id>? AND status IN ('active','kept') ORDER BY id LIMIT 1",
                (after,),
            )
        )
        return None if row is None else Cursor(FsRef(*row))

    # Steps.

    def _step(self, cursor: Cursor, terms: Terms, figures: Figures) -> Cursor | None:
        """One step; where the next one begins, None at the end of the round."""
        did: Figures = Counter()
        steps: dict[str, Callable[[FsRef, str, Terms, Figures], str | None]] = {
            "pins": self._pins,
            "rows": self._rows,
            "blobs": self._blobs,
            "packs": self._pack_rows,
            "objects": self._objects,
            "strays": self._strays,
            "end": self._last,
        }
        try:
            at = steps[cursor.phase](cursor.fs, cursor.at, terms, did)
        except NotFound:  # the filesystem was deleted meanwhile: `FileSystems.collect` does the rest
            return None
        finally:
            figures.update(did)
            if not terms.dry:
                self._add(did)
        if at is not None:
            return cursor._replace(at=at)
        following = PHASES.index(cursor.phase) + 1
        return Cursor(cursor.fs, PHASES[following]) if following < len(PHASES) else None

    def _add(self, did: Figures) -> None:
        with self._mutex:
            self._totals.update(did)

    def _idle(self, terms: Terms) -> int:
        return self._keep.before(self._host.wall_ns(), terms.older)

    def _pins(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        now = self._host.wall_ns()
        if terms.dry:
            did["pins"] += self._db.read(lambda tx: expire.count_expired_pins(tx, fs, now))
            return None
        removed = expire.expired_pins(self._db, self._packs, fs, now)
        did["pins"] += removed
        return "more" if removed == expire.PINS else None

    def _rows(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        if terms.dry:
            return None
        removed = expire.old_rows(self._db, fs, self._keep, self._host.wall_ns())
        did["rows"] += removed
        return "more" if removed >= SWEEP_ROWS else None

    def _blobs(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        """Blobs that nothing refers to, in order of hash."""
        idle, after = self._idle(terms), bytes.fromhex(at)
        rows = self._db.read(lambda tx: tx.all(BLOBS_SQL, (fs.id, after, SWEEP_BLOBS)))
        wanted = {digest: size for digest, _pack, size, refs, fresh in rows if refs == 0 and fresh < idle}
        if wanted and not terms.dry:
            self._host.crash_point("sweep.blobs")
            gone = self._db.write(lambda tx: _delete_blobs(tx, fs, list(wanted), idle), frees=True)
            self._host.crash_point("sweep.blobs_gone")
            wanted = {digest: wanted[digest] for digest in gone}
        did["blobs"] += len(wanted)
        did["blob_bytes"] += sum(wanted.values())
        return rows[-1][0].hex() if len(rows) == SWEEP_BLOBS else None

    def _pack_rows(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        """Packs up to the newest there was when the phase began: those made meanwhile wait for a round."""
        idle = self._idle(terms)
        if at:
            after, top = (int(number) for number in at.split("-"))
        else:
            newest = "SELECT id FROM pack WHERE fs=? AND id<? ORDER BY id DESC LIMIT 1"
            row = self._db.read(lambda tx: tx.one(newest, (fs.id, MAX)))
            after, top = -1, 0 if row is None else int(row[0])
        looks = self._db.read(lambda tx: repack.look(tx, fs.id, after, top, idle))
        if not looks:
            return None
        choice = repack.choose(looks, idle)
        dead = [one.id for one in choice.dead]
        went: list[int] = []
        if not terms.dry:
            # What is in a dead pack has waited its time as blobs.
            dead = repack.drop(self._db, choice.dead, idle)
            self._host.crash_point("sweep.dropped")
            if choice.batch:
                done = self._repack(fs, choice.batch)
                went = done.went
                did["bytes_rewritten"] += done.bytes
                did["packs_damaged"] += done.damaged
        else:
            went = [one.id for one in choice.batch]
            did["bytes_rewritten"] += sum(one.live for one in choice.batch)
        inline = {one.id for one in choice.batch if one.inline}
        did["packs"] += len(dead)
        did["packs_gathered"] += len(inline.intersection(went))
        did["packs_rewritten"] += len(set(went) - inline)
        return f"{choice.last}-{top}" if choice.last < top else None

    def _repack(self, fs: FsRef, batch: Sequence[repack.Look]) -> repack.Repacked:
        """On a full disk nothing is rewritten: what is to be deleted comes after it, and makes room."""
        try:
            return repack.repack(self._db, self._packs, self._host, fs, batch)
        except NoSpace as exc:
            log.warning("sweep: packs of %s are rewritten later: %s", fs.name, exc.message)
            return repack.Repacked([], 0, 0)

    def _objects(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        """Objects that no row has needed for the grace. Looked up once more: a defect anywhere must not cost
        bytes that somebody needs."""
        bounds = (fs.id, int(at or -1), self._idle(terms), SWEEP_OBJECTS)
        rows = self._db.read(lambda tx: tx.all(DROPPED_SQL, bounds))
        numbers = [row[0] for row in rows]
        following = str(numbers[-1]) if len(rows) == SWEEP_OBJECTS else None
        if terms.dry or not rows:
            did["objects"] += len(rows)
            did["object_bytes"] += sum(size for _, size in rows)
            return following
        needed = self._db.read(lambda tx: _needed(tx, numbers))
        if needed:
            log.error("sweep: packs %s of %s are dropped and used: run fsd audit", sorted(needed), fs.name)
        gone = [(pack, size) for pack, size in rows if pack not in needed]
        for pack, _ in gone:
            self._host.crash_point("sweep.object")
            self._store.delete(object_key(fs.name, pack))
        self._host.crash_point("sweep.objects_gone")
        self._db.write(
            lambda tx: tx.many("DELETE FROM dropped WHERE fs=? AND pack=?", [(fs.id, n) for n in numbers]),
            frees=True,
        )
        did["objects"] += len(gone)
        did["object_bytes"] += sum(size for _, size in gone)
        return following

    def _strays(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        """Objects of uploads that crashed before their rows were written. Old ones only: an upload under way
        has no row either."""
        if not terms.lists:
            return None
        prefix = f"packs/{fs.name}/"
        before = self._keep.before(self._host.wall_ns(), max(terms.older, STRAY_LEAST)) // NS
        count, last = 0, ""
        listed: dict[int, Listed] = {}
        for found in self._store.list(prefix, at):
            count, last = count + 1, found.key
            number = pack_number(found.key, prefix)
            if number is not None:
                listed[number] = found
            if count == SWEEP_LIST:
                break
        known = self._db.read(lambda tx: _known(tx, fs, list(listed)))
        # How much the store's clock is behind, as objects whose rows are known tell.
        behind = max(0, min((at // NS - listed[one].mtime for one, at in known.items() if at), default=0))
        strays = {
            number: found.size
            for number, found in listed.items()
            if number not in known and found.mtime + behind < before
        }
        for number in strays if not terms.dry else ():
            self._host.crash_point("sweep.stray")
            self._store.delete(object_key(fs.name, number))
        did["strays"] += len(strays)
        did["stray_bytes"] += sum(strays.values())
        if count == SWEEP_LIST:
            return last
        if not terms.dry:
            now = self._host.wall_ns()
            self._db.write(
                lambda tx: tx.execute("UPDATE sweep SET listed=? WHERE fs=?", (now, fs.id)), frees=True
            )
        return None

    def _last(self, fs: FsRef, at: str, terms: Terms, did: Figures) -> str | None:
        """A deleted filesystem that was kept for its packs goes with the last of them."""
        if not terms.dry and self._db.read(lambda tx: _is_empty(tx, fs)):
            self._db.write(lambda tx: _forget(tx, fs), frees=True)
            self._store.tidy(f"packs/{fs.name}")
        return None


def _delete_blobs(tx: Tx, fs: FsRef, hashes: list[bytes], idle: int) -> list[bytes]:
    """Those of `hashes` that still have no reference and were not used meanwhile. The lock holds back whoever
    is about to refer to one or answers that it is there."""
    tx.lock_fs(fs.id)
    gone: list[bytes] = []
    for some in chunks(hashes):
        marks, params = in_list(some)
        gone += [
            row[0]
            for row in tx.all(
                f"DELETE FROM blob WHERE fs=? AND hash IN {marks} AND refs=0 AND fresh<? RETURNING hash",
                [fs.id, *params, idle],
            )
        ]
    return gone


def _known(tx: Tx, fs: FsRef, numbers: list[int]) -> dict[int, int]:
    """Those packs that have a row, with its time, or wait in `dropped` for theirs (0)."""
    found: dict[int, int] = {}
    for some in chunks(numbers):
        marks, params = in_list(some)
        found.update(tx.all(f"SELECT id, created FROM pack WHERE id IN {marks}", params))
        waiting = tx.all(f"SELECT pack FROM dropped WHERE fs=? AND pack IN {marks}", [fs.id, *params])
        found.update((row[0], 0) for row in waiting)
    return found


def _needed(tx: Tx, numbers: list[int]) -> set[int]:
    marks, params = in_list(numbers)
    found = {row[0] for row in tx.all(f"SELECT id FROM pack WHERE id IN {marks}", params)}
    return found | {row[0] for row in tx.all(f"SELECT DISTINCT pack FROM blob WHERE pack IN {marks}", params)}


def _is_empty(tx: Tx, fs: FsRef) -> bool:
    return (
        tx.one("SELECT 1 FROM fs WHERE id=? AND status='kept'", (fs.id,)) is not None
        and tx.one("SELECT 1 FROM pack WHERE fs=? LIMIT 1", (fs.id,)) is None
        and tx.one("SELECT 1 FROM dropped WHERE fs=? LIMIT 1", (fs.id,)) is None
    )


def _forget(tx: Tx, fs: FsRef) -> None:
    tx.lock_fs(fs.id)
    if _is_empty(tx, fs):
        tx.execute("DELETE FROM sweep WHERE fs=?", (fs.id,))
        tx.execute("DELETE FROM fs WHERE id=?", (fs.id,))


def pack_number(key: str, prefix: str) -> int | None:
    """The number of the pack that the object `key` is, None when it is none of ours."""
    name = key[len(prefix) :]
    if len(name) != 16 or not all(digit in "0123456789abcdef" for digit in name):
        return None
    return int(name, 16)
