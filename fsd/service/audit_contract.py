"""The audit's part about threads, checkpoints and blob names, recomputed from the stored records.

Names that a checkpoint counts and that are not stored are no finding: the contract lets a checkpoint name
what was never uploaded. `Names.missing` lists them for who captured it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fsd.meta.database import Tx
from fsd.model import blocks
from fsd.model.errors import FsdError
from fsd.model.limits import BLOCK
from fsd.service.access import FsRef
from fsd.service.contract_check import key_text, keys_of
from fsd.service.names import hashes_of, unpack_parts
from fsd.service.records import NATIVE, key_of, own_thread, read_body, unpack_body

Say = Callable[[str, str, str], None]
_UNREADABLE: Final = (ValueError, KeyError, TypeError)  # of a record that is damaged


def audit_contract(tx: Tx, fs: FsRef, say: Say) -> None:
    """Tell `say` (rule, where, what) what is broken."""
    _Contract(tx, fs, say).run()


def name_references(tx: Tx, fs: FsRef) -> dict[bytes, int]:
    """How often the blob names of a filesystem reference each blob."""
    refs: dict[bytes, int] = defaultdict(int)
    for (raw,) in tx.all("SELECT parts FROM blob_name WHERE fs=?", (fs.id,)):
        try:
            found = unpack_parts(raw)
        except FsdError:
            continue  # told by `audit_contract`
        for digest in hashes_of(found):
            refs[digest] += 1
    return refs


class WrongCount(NamedTuple):
    """A checkpoint that counts other keys than its record names, or another number of entries. `add` and
    `drop` are stored names; `entries`: how many there are, None where its row says so."""

    num: int
    where: str
    add: list[bytes]
    drop: list[bytes]
    entries: int | None = None


def wrong_counts(tx: Tx, fs: FsRef) -> list[WrongCount]:
    """What a repair sets right: the rows follow the records. A record that cannot be read keeps its rows."""
    counted, found = _counted(tx, fs), []
    rows = tx.all("SELECT num, id, kind, thread, entries FROM checkpoint WHERE fs=? ORDER BY num", (fs.id,))
    for num, name, kind, thread, said in rows:
        have = set(counted.pop(num, []))
        try:
            body = unpack_body(read_body(tx, num) or b"")
            files = json.loads(body.files)
            wanted = set(keys_of(files, json.loads(body.artifacts)))
            entries = None if _is_own(fs, kind, thread) or len(files) == said else len(files)
        except (FsdError, *_UNREADABLE):
            continue  # told by `audit_contract`
        if have != wanted or entries is not None:
            add, drop = sorted(wanted - have), sorted(have - wanted)
            found.append(WrongCount(num, f"checkpoint {name!a}", add, drop, entries))
    for num, names in sorted(counted.items()):
        found.append(WrongCount(num, f"checkpoint number {num}", [], names))
    return found


def _is_own(fs: FsRef, kind: str, thread: bytes) -> bool:
    """Whether a checkpoint is in the filesystem's own thread: its files are in no record."""
    return kind == NATIVE and thread == key_of(own_thread(fs))


def _counted(tx: Tx, fs: FsRef) -> dict[int, list[bytes]]:
    """The names each checkpoint counts, in order."""
    made: dict[int, list[bytes]] = defaultdict(list)
    for num, name in tx.all("SELECT checkpoint, name FROM named WHERE fs=? ORDER BY name", (fs.id,)):
        made[num].append(name)
    return made


class _Contract:
    def __init__(self, tx: Tx, fs: FsRef, say: Say) -> None:
        self.tx, self.fs, self.say = tx, fs, say

    def all(self, sql: str) -> list[tuple[Any, ...]]:
        return self.tx.all(sql, (self.fs.id,))

    def run(self) -> None:
        self.threads()
        self.records()
        self.states()
        self.names()

    def threads(self) -> None:
        """Each head is a checkpoint of its thread, each checkpoint is of a thread that exists."""
        threads = {row[0]: row[1:] for row in self.all("SELECT key, id, head, fence FROM thread WHERE fs=?")}
        of = dict(self.all("SELECT key, thread FROM checkpoint WHERE fs=?"))
        for key, (name, head, fence) in threads.items():
            where = f"thread {name!a}"
            if key != key_of(name.decode()):
                self.say("thread", where, "its key is not its id's")
            if head is not None and of.get(head) != key:
                self.say("thread", where, "its head is no checkpoint of it")
            if fence < 0:
                self.say("thread", where, f"its fence is {fence}")
        for key, thread in of.items():
            if thread not in threads:
                self.say("thread", f"checkpoint {key.hex()}", "its thread does not exist")

    def records(self) -> None:
        """What a record says is what its row says, and its keys are counted once each."""
        counted = _counted(self.tx, self.fs)
        rows = self.all("SELECT num, key, id, thread, parent, kind, entries FROM checkpoint WHERE fs=?")
        for num, key, name, thread, parent, kind, entries in rows:
            where = f"checkpoint {name!a}"
            try:
                body = unpack_body(read_body(self.tx, num) or b"")
                record, files = json.loads(body.rest), json.loads(body.files)
                keys = keys_of(files, json.loads(body.artifacts))
            except (FsdError, *_UNREADABLE) as exc:
                self.say("record", where, f"cannot be read: {exc}")
                continue
            above = record.get("parentCheckpointId")
            said = (
                key_of(record["id"]),
                key_of(record["threadId"]),
                None if above is None else key_of(above),
            )
            if said != (key, thread, parent) or key != key_of(name.decode()):
                self.say("record", where, "the record and its row name different things")
            if not _is_own(self.fs, kind, thread) and len(files) != entries:
                self.say("record", where, f"it has {len(files)} entries, its row says {entries}")
            if keys != counted.pop(num, []):
                self.say("counted", where, "the keys it counts are not those of its files and artifacts")
        for num in counted:
            self.say("counted", f"checkpoint number {num}", "does not exist, but counts keys")

    def states(self) -> None:
        """Each native checkpoint has a pin of its own, of the state it shows."""
        pins = {row[0]: row[1:] for row in self.all("SELECT id, seq, kind FROM pin WHERE fs=?")}
        rows = self.all("SELECT id, fs_seq, pin FROM checkpoint WHERE fs=? AND kind='native'")
        for name, seq, pin in rows:
            if pins.pop(pin, None) != (seq, "checkpoint"):
                self.say("frozen", f"checkpoint {name!a}", f"no pin of its own keeps the state {seq}")

    def names(self) -> None:
        """A name's blocks are as long as it says. That its blobs are stored and counted is seen with all
        others."""
        lengths = dict(self.all("SELECT hash, raw_len FROM blob WHERE fs=?"))
        for name, size, raw in self.all("SELECT name, size, parts FROM blob_name WHERE fs=?"):
            where = f"name {key_text(name)}"
            try:
                found = unpack_parts(raw)
            except FsdError as exc:
                self.say("blob before name", where, exc.message)
                continue
            if len(found) != -(-size // BLOCK):
                self.say("blob before name", where, f"{len(found)} blocks for {size} bytes")
            for idx, parts in enumerate(found):
                if blocks.clip(parts, size - idx * BLOCK) != parts:
                    self.say("blob before name", where, "content behind its end")
                if any(part.boff + part.length > lengths.get(part.hash, BLOCK) for part in parts):
                    self.say("blob before name", where, "it names bytes behind the end of a blob")
