"""Forks: filesystems that start at a pinned seq of another (design section 4).

A fork is a few rows in one transaction, whatever the size of its origin: the filesystem, its token, a pin on
the origin, and what is known of the copy. Until it is copied it is an *alias*: reads run on the origin's rows
at that seq (`retained.state_of`), nothing is written to its tree (`access.hold_tree`), and its own seq is the
origin's. The copy (`forkcopy`) is driven in the background and by whoever waits to write; its end makes
the rows its own and lets the pin on the origin go, in one transaction.

Locks are taken in order of filesystem number: an origin is always older than its forks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Busy, Conflict, ForkCopying, NotFound
from fsd.model.limits import (
    FORK_ALIASES_MAX,
    FORK_CHAIN_MAX,
    FORK_LEASE,
    FORK_STEP,
    FORK_WAIT,
    FORK_WAITERS_MAX,
    LIST_PAGE_MAX,
)
from fsd.model.times import NS, rfc3339
from fsd.model.words import counted
from fsd.service import pins
from fsd.service.access import FsRef, Grant, held, no_file_system
from fsd.service.filesystems import new_answer
from fsd.service.forkcopy import STAGES, START, Progress, copy_chunk
from fsd.service.packs import Packs
from fsd.service.retained import checkpoint_seq, source
from fsd.service.text import DISPLAY_NAME_MAX, check_labels, check_line, new_id
from fsd.service.tokens import Tokens

T = TypeVar("T")
_PAUSE: Final = 0.02  # between two looks at a copy somebody else makes
_ROUND: Final = 8  # copies one round of the background looks at
_SHOWN: Final = (
    "f.name, f.display_name, f.labels, f.created, f.seq, f.storage_bytes, f.file_count, f.copied, "
    "f.origin_seq, k.origin_name, k.origin_checkpoint, k.base, k.rows_copied, k.layer, f.id"
)
_FORK: Final = f"SELECT {_SHOWN} FROM fork k CROSS JOIN fs f WHERE f.id=k.fs AND f.status='active' AND "

# What one chunk's transaction found.
_DONE: Final = "done"
_MORE: Final = "more"
_TAKEN: Final = "taken"  # another process is at it


class _Job(NamedTuple):
    """A fork's row of the copy."""

    origin: int
    origin_pin: int | None
    at: Progress
    copier: str
    until: int


class Forks:
    """All methods from any thread; those that take a `tx` inside a `Database` function."""

    def __init__(self, db: Database, packs: Packs, tokens: Tokens, host: Host) -> None:
        self._db, self._packs, self._tokens, self._host = db, packs, tokens, host
        self._me = host.token_bytes(8).hex()
        self._waiters = threading.BoundedSemaphore(FORK_WAITERS_MAX)

    # -- making and showing --------------------------------------------------------------------------

    def create(
        self,
        tx: Tx,
        origin: FsRef,
        display_name: str,
        labels: Sequence[tuple[str, str]],
        checkpoint: str | None = None,
        layer: str = "",
        who: Grant | None = None,
    ) -> dict[str, Any]:
        """A new filesystem at the head of `origin` or at one of its checkpoints, with its owner token;
        `fs_token` is sealed (`Tokens.unseal`). Raises `NotFound`, `NotAuthenticated`, `UsageError`, `Busy`.

        On PostgreSQL eight round trips beside those that only `checkpoint` or a chain of aliases needs."""
        check_line(display_name, "display_name", DISPLAY_NAME_MAX)
        pairs = dict(check_labels(labels))
        seq, pinned, copied, _ = held(tx, origin, who)
        if not copied:
            self._check_depth(tx, origin)
        if checkpoint is not None:
            seq = checkpoint_seq(tx, origin, checkpoint)
        now, name = self._host.wall_ns(), new_id(self._host, "fs_")
        origin_pin = pins.add_pin(tx, origin, seq, "fork", name, pinned=pinned)
        # Of a checkpoint's fork the figures are the origin's until it is copied.
        row = tx.one(
            "INSERT INTO fs (name, display_name, labels, status, created, seq, pinned, storage_bytes, "
            "file_count, origin_fs, origin_seq, copied) "
            "SELECT CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), 'active', CAST(? AS BIGINT), "
            "CAST(? AS BIGINT), CAST(? AS BIGINT), storage_bytes, file_count, id, CAST(? AS BIGINT), 0 "
            "FROM fs WHERE id=? RETURNING id",
            (name, display_name, json.dumps(pairs, ensure_ascii=False), now, seq, seq, seq, origin.id),
        )
        assert row is not None, "the origin is locked and there"
        fork = FsRef(int(row[0]), name)
        base_pin = pins.add_pin(tx, fork, seq, "base", name, pinned=seq)
        tx.execute(
            "INSERT INTO fork (fs, origin, origin_name, origin_checkpoint, origin_pin, base, base_pin, "
            "layer, stage, key_a, key_b, rows_copied, storage_bytes, file_count, copier, until) "
            "VALUES (?,?,?,?,?,?,?,?,?,?,?,0,0,0,'',0)",
            (
                *(fork.id, origin.id, origin.name, checkpoint, origin_pin, seq, base_pin, layer),
                *(START.stage, START.key_a, START.key_b),
            ),
        )
        return {
            **new_answer(self._tokens, tx, fork, display_name, pairs, now),
            "origin_id": origin.name,
            "origin_seq": seq,
            "origin_checkpoint": checkpoint,
            "fs_seq": seq,
            "copied": False,
            "layer": json.loads(layer) if layer else None,
        }

    def _check_depth(self, tx: Tx, origin: FsRef) -> None:
        """Every read of an alias walks to the rows it shows: not along too many."""
        at = origin.id
        for _ in range(FORK_ALIASES_MAX):
            row = tx.one("SELECT origin_fs FROM fs WHERE id=? AND copied=0", (at,))
            if row is None:
                return
            at = int(row[0])
        raise Busy(
            f"{origin.name} is the last of {FORK_ALIASES_MAX} forks of forks that are still being copied",
            hint="wait until `fsd describe` says that it is copied",
        )

    def below(self, origin: FsRef) -> list[dict[str, Any]]:
        """All forks of a filesystem, their forks and so on, origins before forks; at most FORK_CHAIN_MAX."""

        def read(tx: Tx) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            waiting = [origin.id]
            while waiting and len(found) < FORK_CHAIN_MAX:
                rows = tx.all(f"{_FORK}k.origin=? ORDER BY f.id LIMIT ?", (waiting.pop(0), FORK_CHAIN_MAX))
                found += [self._shown(row) for row in rows]
                waiting += [int(row[-1]) for row in rows]
            return found[:FORK_CHAIN_MAX]

        return self._db.read(read)

    def page(self, origin: FsRef, after: str, limit: int) -> dict[str, Any]:
        """A page of a filesystem's direct forks in order of id."""
        limit = min(limit, LIST_PAGE_MAX)
        rows = self._db.read(
            lambda tx: tx.all(
                f"{_FORK}k.origin=? AND f.name>? ORDER BY f.name LIMIT ?", (origin.id, after, limit + 1)
            )
        )
        shown = [self._shown(row) for row in rows[:limit]]
        return {"forks": shown, "next_cursor": shown[-1]["file_system_id"] if len(rows) > limit else None}

    def describe(self, tx: Tx, fork: FsRef) -> dict[str, Any] | None:
        """What a fork's description says beside that of a filesystem; None: it is no fork."""
        row = tx.one(f"{_FORK}k.fs=?", (fork.id,))
        if row is None:
            return None
        shown = self._shown(row)
        names = ("origin_id", "origin_seq", "origin_checkpoint", "base_seq", "copied", "rows_copied")
        return {name: shown[name] for name in names}

    def chain(self, fs: FsRef) -> list[dict[str, Any]]:
        """The filesystem, its origin, that one's origin and so on; one that was deleted ends it, with its id
        alone."""

        def read(tx: Tx) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            at: int | None = fs.id
            gone = fs.name
            while at is not None and len(found) < FORK_CHAIN_MAX:
                row = tx.one(
                    "SELECT f.name, f.display_name, f.created, f.status, f.seq, f.origin_seq, k.origin, "
                    "k.origin_name, k.origin_checkpoint FROM fs f LEFT JOIN fork k ON k.fs=f.id WHERE f.id=?",
                    (at,),
                )
                if row is None or row[3] != "active":
                    found.append({"file_system_id": gone, "status": "deleted"})
                    break
                found.append(
                    {
                        "file_system_id": row[0],
                        "display_name": row[1],
                        "created_at": rfc3339(row[2]),
                        "status": row[3],
                        "fs_seq": row[4],
                        "origin_id": row[7],
                        "origin_seq": row[5],
                        "origin_checkpoint": row[8],
                    }
                )
                at, gone = row[6], row[7]
            return found

        return self._db.read(read)

    def origin_of(self, tx: Tx, fork: FsRef) -> FsRef:
        """What a fork was made from. Raises `NotFound` when that was deleted."""
        row = tx.one("SELECT origin, origin_name FROM fork WHERE fs=?", (fork.id,))
        if row is None:
            raise Conflict(f"{fork.name} is no fork")
        origin = FsRef(int(row[0]), row[1])
        if tx.one("SELECT 1 FROM fs WHERE id=? AND status='active'", (origin.id,)) is None:
            raise NotFound(f"{origin.name}, of which {fork.name} is a fork, was deleted")
        return origin

    def need_descendant(self, tx: Tx, ancestor: FsRef, name: str) -> FsRef:
        """The active filesystem called `name`, if it is a fork of `ancestor` or of one of its forks; raises
        `NotFound` otherwise, in the same words whether it exists or not."""
        row = tx.one("SELECT id FROM fs WHERE name=? AND status='active'", (name,))
        at = None if row is None else int(row[0])
        for _ in range(FORK_CHAIN_MAX):
            above = None if at is None else tx.one("SELECT origin FROM fork WHERE fs=?", (at,))
            if above is None:
                break
            at = int(above[0])
            if at == ancestor.id:
                assert row is not None, "it has an origin"
                return FsRef(int(row[0]), name)
        raise NotFound(f"{ancestor.name} has no fork {name[:64]}", hint="see `fsd list`")

    def _shown(self, row: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "file_system_id": row[0],
            "display_name": row[1],
            "labels": json.loads(row[2]),
            "region_code": self._tokens.region,
            "status": "active",
            "created_at": rfc3339(row[3]),
            "fs_seq": row[4],
            "usage": {"storage_bytes": row[5], "file_count": row[6]},
            "copied": bool(row[7]),
            "origin_seq": row[8],
            "origin_id": row[9],
            "origin_checkpoint": row[10],
            "base_seq": row[11],
            "rows_copied": row[12],
            "layer": json.loads(row[13]) if row[13] else None,
        }

    # -- copying -------------------------------------------------------------------------------------

    def copy_some(self) -> int:
        """One bounded round over forks that are not copied, for the background; 0: nothing to do."""
        waiting = self._db.read(
            lambda tx: tx.all(
                "SELECT fs FROM fork WHERE origin_pin IS NOT NULL ORDER BY fs LIMIT ?", (_ROUND,)
            )
        )
        end = self._host.monotonic() + FORK_STEP
        done = 0
        for (fs,) in waiting:
            while self._host.monotonic() < end:
                result = self._chunk(int(fs))
                done += result != _TAKEN
                if result != _MORE:
                    break
        return done

    def finish(self, fs: FsRef, patience: float = FORK_WAIT) -> None:
        """Copy the fork to its end, or wait while another process does; at most `patience` seconds, then
        `ForkCopying`. Outside of any transaction."""
        deadline = self._host.monotonic() + patience
        while True:
            result = self._chunk(fs.id)
            if result == _DONE:
                return
            if self._host.monotonic() >= deadline:
                raise _copying(fs)
            if result == _TAKEN:
                time.sleep(_PAUSE)

    def when_copied(self, fs: FsRef, call: Callable[[], T]) -> T:
        """`call()`, and again after the copy where it finds that the fork is not copied yet. Who waits holds
        a thread of the server, so only a few may."""
        try:
            return call()
        except ForkCopying:
            if not self._waiters.acquire(blocking=False):
                raise
        try:
            self.finish(fs)
        finally:
            self._waiters.release()
        return call()

    def _chunk(self, fs: int) -> str:
        """The next chunk of a fork's copy, in a transaction of its own."""
        self._host.crash_point("fork.chunk")
        return self._db.write(lambda tx: self._copy(tx, fs))

    def _copy(self, tx: Tx, fs: int) -> str:
        found = tx.one("SELECT origin FROM fork WHERE fs=? AND origin_pin IS NOT NULL", (fs,))
        if found is None:
            return _DONE
        origin = int(found[0])
        rows_of = source(tx, origin)
        for one in sorted({rows_of, origin, fs}):
            tx.lock_fs(one)
        row = tx.one("SELECT name, seq, status FROM fs WHERE id=?", (fs,))
        job = _job(tx, fs)
        if job is None or job.origin_pin is None or row is None or row[2] != "active":
            return _DONE  # another process has made its end, or it was deleted
        if source(tx, origin) != rows_of:
            return _MORE  # it was copied meanwhile
        now = self._host.wall_ns()
        if job.copier not in ("", self._me) and job.until > now:
            return _TAKEN
        if job.at.stage >= len(STAGES):
            self._own(tx, FsRef(fs, row[0]), FsRef(origin, ""), job)
            return _DONE
        chunk = copy_chunk(tx, rows_of, fs, int(row[1]), job.at, now)
        tx.execute(
            "UPDATE fork SET stage=?, key_a=?, key_b=?, rows_copied=rows_copied+?, "
            "storage_bytes=storage_bytes+?, file_count=file_count+?, copier=?, until=? WHERE fs=?",
            (
                *(chunk.next.stage, chunk.next.key_a, chunk.next.key_b),
                *(chunk.rows, chunk.storage_bytes, chunk.inodes, self._me, now + int(FORK_LEASE * NS), fs),
            ),
        )
        return _MORE

    def _own(self, tx: Tx, fork: FsRef, origin: FsRef, job: _Job) -> None:
        """All rows are there: they are the fork's own from now on, and the origin is let go."""
        assert job.origin_pin is not None, "an alias pins its origin"
        tx.execute(
            "UPDATE fs SET copied=1, storage_bytes=(SELECT k.storage_bytes FROM fork k WHERE k.fs=fs.id), "
            "file_count=(SELECT k.file_count FROM fork k WHERE k.fs=fs.id) WHERE id=?",
            (fork.id,),
        )
        tx.execute("UPDATE fork SET origin_pin=NULL, copier='', until=0 WHERE fs=?", (fork.id,))
        pins.unpin(tx, self._packs, origin, job.origin_pin)

    # -- deleting ------------------------------------------------------------------------------------

    def aliases(self, tx: Tx, fs: FsRef) -> list[FsRef]:
        """Forks that read this filesystem's rows: those not copied, and theirs. Origins before forks. Raises
        `Busy` when they are more than one transaction takes along: none may be left behind without rows."""
        found: list[FsRef] = []
        waiting = [fs.id]
        while waiting:
            if len(found) > FORK_CHAIN_MAX:
                raise Busy(
                    f"more than {FORK_CHAIN_MAX} forks of {fs.name} are still being copied",
                    hint="wait a moment: they are copied in the background",
                )
            rows = tx.all(
                "SELECT f.id, f.name FROM fork k CROSS JOIN fs f WHERE k.origin=? "
                "AND k.origin_pin IS NOT NULL AND f.id=k.fs AND f.status='active' ORDER BY f.id LIMIT ?",
                (waiting.pop(), FORK_CHAIN_MAX + 1),
            )
            found += [FsRef(int(row[0]), row[1]) for row in rows]
            waiting += [int(row[0]) for row in rows]
        return found

    def release(self, tx: Tx, fs: FsRef, cascade: bool) -> list[str]:
        """Before a filesystem is marked as deleted, in its transaction: nothing reads its rows any more.
        Raises `Conflict` naming the forks that do, unless `cascade` deletes them as well; the names of those.
        A fork that is not copied itself lets its origin go."""
        job, dependent = _job(tx, fs.id), self.aliases(tx, fs)
        above = [] if job is None or job.origin_pin is None else [job.origin]
        for one in sorted({*above, fs.id, *(fork.id for fork in dependent)}):
            tx.lock_fs(one)
        locked, dependent = set(dependent), self.aliases(tx, fs)
        if not locked.issuperset(dependent):
            raise Busy(f"a fork of {fs.name} is being forked", hint="try again")
        if dependent and not cascade:
            what, why = fs.name, "not copied yet and"
            raise Conflict(
                counted(len(dependent), "fork", f"of {what} is {why} reads", f"of {what} are {why} read")
                + " its files",
                hint="wait a moment, or use --detach (copies them first) or --cascade (deletes them too)",
                details={"forks": [one.name for one in dependent[:100]]},
            )
        for fork in reversed(dependent):
            self._let_go(tx, fork)
            tx.execute("UPDATE fs SET status='deleting' WHERE id=?", (fork.id,))
        self._let_go(tx, fs)
        return [fork.name for fork in dependent]

    def _let_go(self, tx: Tx, fs: FsRef) -> None:
        job = _job(tx, fs.id)
        if job is not None and job.origin_pin is not None:
            tx.execute("UPDATE fork SET origin_pin=NULL, copier='', until=0 WHERE fs=?", (fs.id,))
            name = tx.one("SELECT name FROM fs WHERE id=?", (job.origin,))
            if name is not None:
                pins.unpin(tx, self._packs, FsRef(job.origin, name[0]), job.origin_pin)

    def detach(self, name: str) -> None:
        """Copy every fork that reads this filesystem's rows, so that it can go. Raises `ForkCopying` when
        that takes longer than a request should, `NotFound`."""

        def read(tx: Tx) -> list[FsRef]:
            row = tx.one("SELECT id FROM fs WHERE name=? AND status='active'", (name,))
            if row is None:
                raise no_file_system(name)
            return self.aliases(tx, FsRef(int(row[0]), name))

        dependent = self._db.read(read)
        if dependent and not self._waiters.acquire(blocking=False):
            raise _copying(dependent[0])
        deadline = self._host.monotonic() + FORK_WAIT
        try:
            for fork in dependent:
                self.finish(fork, deadline - self._host.monotonic())
        finally:
            if dependent:
                self._waiters.release()


def _copying(fork: FsRef) -> ForkCopying:
    return ForkCopying(f"the fork {fork.name} is still being copied")


def _job(tx: Tx, fs: int) -> _Job | None:
    row = tx.one("SELECT origin, origin_pin, stage, key_a, key_b, copier, until FROM fork WHERE fs=?", (fs,))
    if row is None:
        return None
    origin, pin, stage, key_a, key_b, copier, until = row
    return _Job(int(origin), pin, Progress(int(stage), int(key_a), bytes(key_b)), copier, int(until))
