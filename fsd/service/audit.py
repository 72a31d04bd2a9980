"""`fsd audit`: a read-only check of the named invariants of one filesystem (design section 8).

Everything is read in one snapshot and recomputed here from the rows, without the code that wrote them. A
finding says which invariant, which row and what is wrong; repair is another, planned act. The walk keeps the
live tree and all counts in memory: it is a tool for tests and for people who doubt, not a request.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections import defaultdict
from typing import Any, Final, NamedTuple

from fsd.meta.database import Database, Tx
from fsd.meta.sql import MAX
from fsd.model import blocks
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import NotFound, UsageError
from fsd.model.limits import BLOCK
from fsd.model.names import show
from fsd.service.access import FsRef
from fsd.service.audit_contract import audit_contract, name_references
from fsd.service.audit_leases import audit_leases
from fsd.service.audit_states import audit_states

_KEYS: Final = {"inode": "ino", "dentry": "parent, name", "block": "ino, idx"}


class Finding(NamedTuple):
    """One broken invariant. `rule` is its name, `where` the row, `what` the sentence."""

    rule: str
    where: str
    what: str


def audit(db: Database, fs: FsRef) -> list[Finding]:
    """All findings, [] when everything holds. Raises `NotFound` for a filesystem that is not there, or was
    deleted: what is left of it goes piece by piece."""
    return db.read(lambda tx: findings(tx, fs))


def findings(tx: Tx, fs: FsRef) -> list[Finding]:
    """As `audit`, in a transaction of the caller's."""
    return _Audit(tx, fs).run()


# Tables of which something is there as long as a filesystem is, and nothing after it was deleted.
_OWNED: Final = ("inode", "token", "journal", "checkpoint", "pack")


def rows_of_lost(db: Database) -> list[Finding]:
    """Rows of filesystems whose own row is gone: nobody reaches them, and no audit of one looks at them."""
    return db.read(_rows_of_lost)


def _rows_of_lost(tx: Tx) -> list[Finding]:
    found: dict[int, list[str]] = defaultdict(list)
    for table in _OWNED:
        for (number,) in tx.all(
            f"SELECT DISTINCT fs FROM {table} o WHERE NOT EXISTS (SELECT 1 FROM fs WHERE fs.id=o.fs)"
        ):
            found[number].append(table)
    what = "the filesystem's own row is lost; it is in the last good copy of the database. Left: "
    return [Finding("tree", f"fs {number}", what + ", ".join(tables)) for number, tables in found.items()]


class _Audit:
    def __init__(self, tx: Tx, fs: FsRef) -> None:
        self.tx, self.fs = tx, fs
        self.found: list[Finding] = []
        row = tx.one(
            "SELECT seq, pinned, storage_bytes, file_count, copied, origin_seq FROM fs "
            "WHERE id=? AND status='active'",
            (fs.id,),
        )
        if row is None:
            raise NotFound(f"no filesystem {fs.name}")
        self.seq, self.pinned, self.storage_bytes, self.file_count, self.copied, self.first = row

    def say(self, rule: str, where: str, what: str) -> None:
        self.found.append(Finding(rule, where, what))

    def all(self, sql: str) -> list[tuple[Any, ...]]:
        return self.tx.all(sql, (self.fs.id,))

    def run(self) -> list[Finding]:
        for table, key in _KEYS.items():
            self.versions(table, key)
        self.pins()
        self.dropped()
        if self.copied:
            self.tree()
            audit_states(self.tx, self.fs, self.say)
        self.content()
        audit_contract(self.tx, self.fs, self.say)
        audit_leases(self.tx, self.fs, self.say)
        if self.first is not None:
            self.fork()
        self.feed()
        return self.found

    def versions(self, table: str, key: str) -> None:
        """Versions of a key are disjoint, in the past, and seen by the head or by a pin."""
        width = key.count(",") + 1
        rows = self.all(
            f"SELECT {key}, born, died, lag(died) OVER (PARTITION BY {key} ORDER BY died) "
            f"FROM {table} WHERE fs=?"
        )
        pins = sorted(row[0] for row in self.all("SELECT seq FROM pin WHERE fs=?"))
        for row in rows:
            where = f"{table} {row[:width]}"
            born, died, before = row[width:]
            if not 0 <= born < died:
                self.say("one way", where, f"born {born} is not before died {died}")
            if born > self.seq or self.seq < died < MAX:
                self.say("one way", where, f"[{born}, {died}) is behind the head {self.seq}")
            if before is not None and before > born:
                self.say("one way", where, f"born {born} inside the version that died at {before}")
            if died < MAX and bisect_left(pins, born) >= bisect_left(pins, died):
                self.say("frozen", where, f"a dead version [{born}, {died}) that no pin sees")

    def pins(self) -> None:
        newest = self.all("SELECT max(seq) FROM pin WHERE fs=?")[0][0]
        if self.pinned != (-1 if newest is None else newest):
            self.say("frozen", "fs", f"pinned is {self.pinned}, the newest pin {newest}")
        if newest is not None and newest > self.seq:
            self.say("frozen", "pin", f"a pin of {newest}, the head is {self.seq}")

    def dropped(self) -> None:
        """What waits to be deleted is used by nothing."""
        for (pack,) in self.all(
            "SELECT d.pack FROM dropped d WHERE d.fs=? AND (EXISTS (SELECT 1 FROM pack p WHERE p.id=d.pack)"
            " OR EXISTS (SELECT 1 FROM blob b WHERE b.pack=d.pack))"
        ):
            self.say("deletion backwards", f"pack {pack}", "waits to be deleted and is used")

    def tree(self) -> None:
        """Entries, link counts, parents; everything is reached from the root."""
        inodes = {
            row[0]: row[1:]
            for row in self.all(
                "SELECT ino, mode, nlink, parent, size, target FROM inode WHERE fs=? AND died=140737488355327"
            )
        }
        names: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        children: dict[int, list[int]] = defaultdict(list)
        for parent, name, ino in self.all(
            "SELECT parent, name, ino FROM dentry WHERE fs=? AND died=140737488355327"
        ):
            names[ino].append((parent, name))
            children[parent].append(ino)
            where = f"dentry {parent}/{show(name)}"
            if parent not in inodes or not stat.S_ISDIR(inodes[parent][0]):
                self.say("tree", where, "its parent is no directory that exists")
            if ino not in inodes:
                self.say("tree", where, f"its inode {ino} does not exist")
        for ino, (mode, nlink, parent, size, target) in inodes.items():
            self.inode(ino, mode, nlink, parent, size, target, names[ino], children[ino], inodes)
        self.reach(inodes, children)
        if self.file_count != len(inodes):
            self.say("counted", "fs", f"file_count is {self.file_count}, there are {len(inodes)} inodes")

    def inode(
        self,
        ino: int,
        mode: int,
        nlink: int,
        parent: int,
        size: int,
        target: bytes | None,
        names: list[tuple[int, bytes]],
        children: list[int],
        inodes: dict[int, tuple[Any, ...]],
    ) -> None:
        where = f"inode {ino}"
        if stat.S_ISDIR(mode):
            below = sum(1 for child in children if child in inodes and stat.S_ISDIR(inodes[child][0]))
            if nlink != 2 + below:
                self.say("tree", where, f"a directory with {below} directories has nlink {nlink}")
            if ino == ROOT_INO:
                if names:
                    self.say("tree", where, "the root has a name")
            elif [one[0] for one in names] != [parent]:
                self.say("tree", where, f"its parent is {parent}, its names are in {[n[0] for n in names]}")
            return
        if nlink != len(names):
            self.say("tree", where, f"nlink is {nlink}, it has {len(names)} names")
        if parent:
            self.say("tree", where, "only a directory has a parent")
        if stat.S_ISLNK(mode) and (target is None or size != len(target)):
            self.say("tree", where, "a symlink's size is not its target's")

    def reach(self, inodes: dict[int, tuple[Any, ...]], children: dict[int, list[int]]) -> None:
        reached, waiting = {ROOT_INO}, [ROOT_INO]
        while waiting:
            for child in children[waiting.pop()]:
                if child not in reached:
                    reached.add(child)
                    waiting.append(child)
        for ino in inodes.keys() - reached:
            self.say("tree", f"inode {ino}", "is not reached from the root")

    def content(self) -> None:
        """Blobs exist, counts are right, parts lie inside the file, the usage figure is right."""
        files = {
            row[0]: row[1:]
            for row in self.all("SELECT ino, mode, size FROM inode WHERE fs=? AND died=140737488355327")
        }
        refs = name_references(self.tx, self.fs)
        lengths = dict(self.all("SELECT hash, raw_len FROM blob WHERE fs=?"))
        used = 0
        for table, idx in (("inode", "0"), ("block", "idx")):
            rows = self.all(f"SELECT ino, {idx}, parts, died FROM {table} WHERE fs=? AND parts IS NOT NULL")
            for ino, at, raw, died in rows:
                where = f"{table} {ino} block {at} died {died}"
                try:
                    parts = blocks.decode(raw)
                except UsageError as exc:
                    self.say("blob before name", where, exc.message)
                    continue
                for digest in blocks.hashes(parts):
                    refs[digest] += 1
                if any(part.boff + part.length > lengths.get(part.hash, BLOCK) for part in parts):
                    self.say("blob before name", where, "it names bytes behind the end of a blob")
                if died == MAX:
                    used += blocks.stored_bytes(parts)
                    self.fits(where, parts, int(at), files.get(ino))
        if self.copied and used != self.storage_bytes:
            self.say("counted", "fs", f"storage_bytes is {self.storage_bytes}, the live tree has {used}")
        self.blobs(refs)

    def fits(self, where: str, parts: blocks.Parts, idx: int, file: tuple[Any, ...] | None) -> None:
        if file is None or not stat.S_ISREG(file[0]):
            self.say("tree", where, "content without a regular file")
        elif any(idx * BLOCK + part.off + part.length > file[1] for part in parts):
            self.say("tree", where, "content behind the end of the file")

    def blobs(self, refs: dict[bytes, int]) -> None:
        stored = dict(self.all("SELECT hash, refs FROM blob WHERE fs=?"))
        for digest in refs.keys() - stored.keys():
            self.say("blob before name", f"blob {digest.hex()}", f"is named {refs[digest]} times, not stored")
        for digest, count in stored.items():
            named = refs.get(digest, 0)
            if count != named:
                what = f"refs is {count}, rows name it {named} times"
                if count > named:  # a block without a row reads as a hole: nothing else tells of a lost one
                    what += "; if a row is lost, a file reads zeros where these bytes were"
                self.say("counted", f"blob {digest.hex()}", what)
        for digest, pack in self.all(
            "SELECT b.hash, b.pack FROM blob b WHERE b.fs=? "
            "AND NOT EXISTS (SELECT 1 FROM pack p WHERE p.id=b.pack)"
        ):
            self.say("blob before name", f"blob {digest.hex()}", f"its pack {pack} does not exist")

    def fork(self) -> None:
        """Its base is pinned; while it reads its origin's rows, so are those, and it has nothing else."""
        rows = self.all("SELECT base, base_pin, origin, origin_pin FROM fork WHERE fs=?")
        if not rows:
            self.say("frozen", "fork", "what it was made from is known, its row of forks is lost")
            return
        base, base_pin, origin, origin_pin = rows[0]
        kept = self.tx.one("SELECT seq FROM pin WHERE id=? AND fs=?", (base_pin, self.fs.id))
        if kept != (base,) or not self.first <= base <= self.seq:
            self.say("frozen", "fork", f"its base {base} is not pinned")
        if bool(self.copied) != (origin_pin is None):
            self.say("frozen", "fork", f"copied is {self.copied}, its pin on the origin is {origin_pin}")
        if self.copied:
            return
        if self.seq != self.first:
            self.say("one way", "fork", f"it is not copied, but went from {self.first} to {self.seq}")
        if self.tx.one("SELECT seq FROM pin WHERE id=? AND fs=?", (origin_pin, origin)) != (self.first,):
            self.say("frozen", "fork", f"its origin's state {self.first} is not pinned")

    def feed(self) -> None:
        """One change row a commit, from the oldest kept to the head."""
        first, last, count = self.all("SELECT min(seq), max(seq), count(*) FROM change WHERE fs=?")[0]
        if first is None:
            if self.seq != (self.first or 0):
                self.say("one way", "change", f"no change rows, the head is {self.seq}")
        elif last != self.seq or count != last - first + 1:
            self.say("one way", "change", f"{count} rows from {first} to {last}, the head is {self.seq}")
