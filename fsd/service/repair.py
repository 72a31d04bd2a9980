"""`fsd audit --repair`: what can be put right from the rows alone, as a plan that is carried out unchanged.

Counts and figures are set to what the rows say; rows that nothing can show, and rows about content that
nothing refers to and whose bytes are gone, are removed. Nothing is ever made up, no object is deleted, and a
row that something refers to stays even where its bytes are lost: putting them back (from a copy of the
store, or by writing the file again) then mends it. The rest of the findings is told as `left`.

A plan is the repair itself in a transaction that is undone. Carrying it out is the same transaction again,
under the filesystem's lock; where it would do something else by now, nothing is done.
"""

from __future__ import annotations

import hashlib
import stat
from collections import defaultdict
from typing import Any, NamedTuple

from fsd.blobs.store import BlobStore
from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import MAX
from fsd.model import blocks
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Conflict, NotFound, UsageError
from fsd.service.access import FsRef
from fsd.service.audit import Finding, findings
from fsd.service.audit_contract import name_references, wrong_counts
from fsd.service.packs import object_key

_VERSIONED = ("inode", "dentry", "block")


class Step(NamedTuple):
    """One change. `rule` is the invariant it restores, `where` the row, `what` the change."""

    rule: str
    where: str
    what: str


class Repair(NamedTuple):
    """`steps` in order, and what they leave. `plan` names exactly these steps."""

    steps: list[Step]
    left: list[Finding]

    @property
    def plan(self) -> str:
        return hashlib.sha256(repr(self.steps).encode()).hexdigest()[:16]


class _Undo(Exception):
    def __init__(self, repair: Repair) -> None:
        super().__init__("a plan is undone")
        self.repair = repair


def plan(db: Database, store: BlobStore, fs: FsRef) -> Repair:
    """What a repair would do. Changes nothing. Raises `NotFound`."""
    lost = _lost_packs(db, store, fs)

    def run(tx: Tx) -> Repair:
        raise _Undo(_repair(tx, fs, lost))

    try:
        return db.write(run)
    except _Undo as undo:
        return undo.repair


def execute(db: Database, store: BlobStore, fs: FsRef, planned: str) -> Repair:
    """Carry out the plan of that name; raises `Conflict`, and does nothing, when another is due by now;
    `NotFound` when the filesystem was deleted."""
    lost = _lost_packs(db, store, fs)

    def run(tx: Tx) -> Repair:
        done = _repair(tx, fs, lost)
        if done.plan != planned:
            raise Conflict(
                f"{fs.name} has changed: the plan {planned} does not hold any more",
                hint="look at the new plan: fsd audit --repair",
            )
        return done

    return db.write(run)


def _lost_packs(db: Database, store: BlobStore, fs: FsRef) -> list[int]:
    """Packs the filesystem wrote whose object is not there."""
    rows = db.read(lambda tx: tx.all("SELECT id FROM pack WHERE fs=? AND data IS NULL ORDER BY id", (fs.id,)))
    there = {one.key for one in store.list(f"packs/{fs.name}/")}
    return [pack for (pack,) in rows if object_key(fs.name, pack) not in there]


def _repair(tx: Tx, fs: FsRef, lost: list[int]) -> Repair:
    tx.lock_fs(fs.id)
    work = _Work(tx, fs)
    copied = tx.one("SELECT copied FROM fs WHERE id=? AND status='active'", (fs.id,))
    if copied is None:
        raise NotFound(f"no filesystem {fs.name}")
    work.pinned()
    work.versions()
    if copied[0]:
        work.links()
    work.counts()
    work.names()
    work.packs(lost)
    if copied[0]:
        work.figures()
    work.feed()
    return Repair(work.steps, findings(tx, fs))


class _Work:
    """The steps, each done as it is found."""

    def __init__(self, tx: Tx, fs: FsRef) -> None:
        self.tx, self.fs = tx, fs
        self.steps: list[Step] = []
        self.now = Host().wall_ns()

    def all(self, sql: str) -> list[tuple[Any, ...]]:
        return self.tx.all(sql, (self.fs.id,))

    def one(self, sql: str) -> Any:
        row = self.tx.one(sql, (self.fs.id,))
        return None if row is None else row[0]

    def do(self, step: Step, sql: str, *params: object) -> None:
        self.tx.execute(sql, params)
        self.steps.append(step)

    def pinned(self) -> None:
        newest = self.one("SELECT max(seq) FROM pin WHERE fs=?")
        wanted = -1 if newest is None else int(newest)
        have = self.one("SELECT pinned FROM fs WHERE id=?")
        if have != wanted:
            step = Step("frozen", "fs", f"pinned {have} becomes {wanted}, the newest pin")
            self.do(step, "UPDATE fs SET pinned=? WHERE id=?", wanted, self.fs.id)

    def versions(self) -> None:
        """Dead rows that no pin sees: nothing can show them."""
        for table in _VERSIONED:
            where = (
                f"{table}.fs=? AND {table}.died<{MAX} AND NOT EXISTS (SELECT 1 FROM pin p"
                f" WHERE p.fs={table}.fs AND p.seq>={table}.born AND p.seq<{table}.died)"
            )
            count = self.one(f"SELECT count(*) FROM {table} WHERE {where}")
            if count:
                step = Step("frozen", table, f"{count} dead rows that no pin sees are removed")
                self.do(step, f"DELETE FROM {table} WHERE {where}", self.fs.id)

    def links(self) -> None:
        """Link counts of what has a name. What has none is not touched: its content may be all there is."""
        inodes = {
            row[0]: (row[1], row[2])
            for row in self.all(f"SELECT ino, mode, nlink FROM inode WHERE fs=? AND died={MAX}")
        }
        names: dict[int, int] = defaultdict(int)
        below: dict[int, int] = defaultdict(int)
        for parent, ino in self.all(f"SELECT parent, ino FROM dentry WHERE fs=? AND died={MAX}"):
            names[ino] += 1
            below[parent] += ino in inodes and stat.S_ISDIR(inodes[ino][0])
        for ino, (mode, nlink) in sorted(inodes.items()):
            wanted = 2 + below[ino] if stat.S_ISDIR(mode) else names[ino]
            if nlink != wanted and (names[ino] or ino == ROOT_INO):
                self.do(
                    Step("tree", f"inode {ino}", f"nlink {nlink} becomes {wanted}"),
                    f"UPDATE inode SET nlink=? WHERE fs=? AND ino=? AND died={MAX}",
                    *(wanted, self.fs.id, ino),
                )

    def counts(self) -> None:
        refs = self.references()
        for digest, have in self.all("SELECT hash, refs FROM blob WHERE fs=? ORDER BY hash"):
            wanted = refs.get(digest, 0)
            if have != wanted:
                what = f"refs {have} becomes {wanted}"
                if not wanted:  # the count may be all that is left of a row that was lost
                    what += ": the sweep takes it then; leave it while a file reads zeros that it should not"
                # Without references from now on it has its whole grace before it, as after a commit.
                self.do(
                    Step("counted", f"blob {digest.hex()}", what),
                    "UPDATE blob SET refs=?, fresh=? WHERE fs=? AND hash=?",
                    *(wanted, self.now, self.fs.id, digest),
                )

    def references(self) -> dict[bytes, int]:
        refs = name_references(self.tx, self.fs)
        for table in ("inode", "block"):
            for (raw,) in self.all(f"SELECT parts FROM {table} WHERE fs=? AND parts IS NOT NULL"):
                try:
                    parts = blocks.decode(raw)
                except UsageError:
                    continue  # stays among what is left
                for digest in blocks.hashes(parts):
                    refs[digest] += 1
        return refs

    def names(self) -> None:
        """Checkpoints of hosts' threads count the keys, and the entries, of their records."""
        for wrong in wrong_counts(self.tx, self.fs):
            if wrong.entries is not None:
                step = Step("record", wrong.where, f"has {wrong.entries} entries")
                self.do(step, "UPDATE checkpoint SET entries=? WHERE num=?", wrong.entries, wrong.num)
            if not (wrong.add or wrong.drop):
                continue
            self.tx.many(
                "INSERT INTO named (fs, name, checkpoint) VALUES (?,?,?)",
                [(self.fs.id, name, wrong.num) for name in wrong.add],
            )
            self.tx.many(
                "DELETE FROM named WHERE fs=? AND name=? AND checkpoint=?",
                [(self.fs.id, name, wrong.num) for name in wrong.drop],
            )
            what = f"counts {len(wrong.add)} keys it did not, {len(wrong.drop)} no more"
            self.steps.append(Step("counted", wrong.where, what))

    def packs(self, lost: list[int]) -> None:
        """Rows about bytes that are gone and that nothing refers to, in any filesystem."""
        for (digest,) in self.all(
            "SELECT hash FROM blob WHERE fs=? AND refs=0"
            " AND NOT EXISTS (SELECT 1 FROM pack p WHERE p.id=blob.pack) ORDER BY hash"
        ):
            step = Step("blob before name", f"blob {digest.hex()}", "removed: nothing refers to it, no pack")
            self.do(step, "DELETE FROM blob WHERE fs=? AND hash=?", self.fs.id, digest)
        for pack in lost:
            rows = self.tx.all("SELECT fs, refs FROM blob WHERE pack=?", (pack,))
            if all(fs == self.fs.id and refs == 0 for fs, refs in rows):
                step = Step(
                    "blob before name",
                    f"pack {pack}",
                    f"removed with {len(rows)} blobs: its object is missing, nothing refers to them",
                )
                self.tx.execute("DELETE FROM blob WHERE pack=?", (pack,))
                self.do(step, "DELETE FROM pack WHERE id=?", pack)
        for (pack,) in self.all(
            "SELECT pack FROM dropped WHERE fs=?"
            " AND EXISTS (SELECT 1 FROM pack p WHERE p.id=dropped.pack) ORDER BY pack"
        ):
            step = Step("deletion backwards", f"pack {pack}", "is in use: it waits no more to be deleted")
            self.do(step, "DELETE FROM dropped WHERE fs=? AND pack=?", self.fs.id, pack)

    def figures(self) -> None:
        used = 0
        for table in ("inode", "block"):
            for (raw,) in self.all(
                f"SELECT parts FROM {table} WHERE fs=? AND died={MAX} AND parts IS NOT NULL"
            ):
                try:
                    used += blocks.stored_bytes(blocks.decode(raw))
                except UsageError:
                    continue
        count = self.one(f"SELECT count(*) FROM inode WHERE fs=? AND died={MAX}")
        for name, wanted in (("storage_bytes", used), ("file_count", count)):
            have = self.one(f"SELECT {name} FROM fs WHERE id=?")
            if have != wanted:
                step = Step("counted", "fs", f"{name} {have} becomes {wanted}")
                self.do(step, f"UPDATE fs SET {name}=? WHERE id=?", wanted, self.fs.id)

    def feed(self) -> None:
        """Change rows in front of a gap: their readers start over, instead of missing what lay in it."""
        seqs = [row[0] for row in self.all("SELECT seq FROM change WHERE fs=? ORDER BY seq DESC")]
        run = next((at for at in range(1, len(seqs)) if seqs[at] != seqs[at - 1] - 1), len(seqs))
        if run < len(seqs):
            step = Step("one way", "change", f"{len(seqs) - run} rows before {seqs[run - 1]} are removed")
            self.do(step, "DELETE FROM change WHERE fs=? AND seq<?", self.fs.id, seqs[run - 1])
