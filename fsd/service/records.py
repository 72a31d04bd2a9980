"""Rows of threads and checkpoints, and the stored form of a checkpoint's record.

Everything here runs in a transaction that holds the filesystem (`access.hold`). A checkpoint is found by the
key of its id, listed by its thread, and followed to its parent by `parent_of`: since ids may be used again
once their checkpoint is removed, a parent is only who was there *before* its child (`num` rises with time).

A record is stored in four JSON texts (ASCII escapes, so that lone surrogates of conversations survive):
`files`, `conversation`, `artifacts` and the rest. A fork swaps the rest and copies the others unread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import zstandard

from fsd.meta.database import Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import CheckpointInvalidEntry, CheckpointInvalidId, IntegrityError
from fsd.service.access import FsRef
from fsd.service.contract_check import JsonObject

MANIFEST: Final = "manifest"
NATIVE: Final = "native"
_APART: Final = ("files", "conversation", "artifacts")

THREAD_SQL: Final = "SELECT key, head, fence, owner, expires FROM thread WHERE fs=? AND key=?"
HEAD_SQL: Final = (
    "SELECT t.head, c.id FROM thread t LEFT JOIN checkpoint c ON c.fs=t.fs AND c.key=t.head "
    "WHERE t.fs=? AND t.key=?"
)
_COLUMNS: Final = "num, key, id, thread, parent, created, kind, fs_seq, pin, entries"
BY_KEY_SQL: Final = f"SELECT {_COLUMNS} FROM checkpoint WHERE fs=? AND key=?"
BY_THREAD_SQL: Final = f"SELECT {_COLUMNS} FROM checkpoint WHERE fs=? AND thread=? ORDER BY num"
LIST_SQL: Final = (
    "SELECT num, kind, length(body) FROM checkpoint WHERE fs=? AND thread=? ORDER BY created, id"
)
BODY_SQL: Final = "SELECT body FROM checkpoint WHERE num=?"


class ThreadRow(NamedTuple):
    """`owner` is empty without a lease; `expires` in ms."""

    key: bytes
    head: bytes | None
    fence: int
    owner: bytes
    expires: float


class Record(NamedTuple):
    """A checkpoint without its body. `thread` and `parent` are keys; `created` in ms."""

    num: int
    key: bytes
    id_bytes: bytes
    thread: bytes
    parent: bytes | None
    created: float
    kind: str
    fs_seq: int | None
    pin: int | None
    entries: int

    @property
    def id(self) -> str:
        return self.id_bytes.decode()


class New(NamedTuple):
    """A checkpoint to be. `fs_seq` and `pin` belong to native ones; `expires` in ns."""

    id: str
    thread: str
    parent: str | None
    created: float
    stored: int
    reason: Any
    label: Any
    body: bytes
    entries: int
    kind: str = MANIFEST
    fs_seq: int | None = None
    pin: int | None = None
    expires: int | None = None


class Body(NamedTuple):
    """A record as JSON texts; `conversation` None where the record has none."""

    rest: bytes
    files: bytes
    conversation: bytes | None
    artifacts: bytes

    def text(self) -> bytes:
        """The record as one JSON object."""
        pieces = [self.rest[:-1], b"," if len(self.rest) > 2 else b"", b'"files":', self.files]
        if self.conversation is not None:
            pieces += [b',"conversation":', self.conversation]
        return b"".join([*pieces, b',"artifacts":', self.artifacts, b"}"])


class Native(Protocol):
    """What native checkpoints do for the contract."""

    def render(self, fs: FsRef, record: Record) -> list[JsonObject]:
        """The entries of the tree that `record` shows, sorted by path bytes; their blobs have names
        afterwards. Blocks; never inside a transaction. Raises `NotFound` when it was deleted meanwhile."""
        ...

    def drop(self, tx: Tx, fs: FsRef, record: Record) -> None:
        """`record` is being removed by its thread: let go of its pin. Holds the filesystem."""
        ...


def key_of(text: str) -> bytes:
    """The key of an id."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def own_thread(fs: FsRef) -> str:
    """The thread of the filesystem's own checkpoints."""
    return f"fsd:{fs.name}"


def check_foreign(fs: FsRef, thread: str) -> None:
    """Raise `CheckpointInvalidId` for the filesystem's own thread: only its own checkpoints go there."""
    if thread == own_thread(fs):
        raise CheckpointInvalidId(
            f"the thread {thread} belongs to the filesystem's own checkpoints",
            hint="fsd checkpoint create makes those; use another thread id here",
        )


# -- texts -------------------------------------------------------------------------------------------


def dumps(value: object) -> bytes:
    """Compact JSON in ASCII; raises `CheckpointInvalidEntry` for what JSON cannot hold."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError as exc:
        raise CheckpointInvalidEntry("a number is too large for JSON") from exc
    except RecursionError as exc:
        raise CheckpointInvalidEntry("the value is nested too deep") from exc


def body_of(record: JsonObject) -> Body:
    """A record in its four texts."""
    rest = {name: value for name, value in record.items() if name not in _APART}
    conversation = dumps(record["conversation"]) if "conversation" in record else None
    return Body(dumps(rest), dumps(record["files"]), conversation, dumps(record["artifacts"]))


def pack_body(body: Body) -> bytes:
    return pack_text(msgpack.packb(list(body), use_bin_type=True))


def unpack_body(raw: bytes) -> Body:
    return Body(*msgpack.unpackb(unpack_text(raw), raw=False))


def pack_text(text: bytes) -> bytes:
    """zstd 1 with the size declared."""
    return zstandard.ZstdCompressor(level=1).compress(text)


def unpack_text(raw: bytes) -> bytes:
    """Raises `IntegrityError`."""
    try:
        return zstandard.ZstdDecompressor().decompress(raw)
    except zstandard.ZstdError as exc:
        raise IntegrityError("a stored record is damaged") from exc


# -- threads -----------------------------------------------------------------------------------------


def find_thread(tx: Tx, fs: FsRef, thread: str) -> ThreadRow | None:
    row = tx.one(THREAD_SQL, (fs.id, key_of(thread)))
    return None if row is None else ThreadRow(*row)


def set_head(tx: Tx, fs: FsRef, thread: str, head: bytes | None) -> None:
    """Move the head of a thread; a thread not seen before begins without a lease."""
    tx.execute(
        "INSERT INTO thread (fs, key, id, head, fence, owner, expires) VALUES (?,?,?,?,0,?,0) "
        "ON CONFLICT (fs, key) DO UPDATE SET head=excluded.head",
        (fs.id, key_of(thread), thread.encode(), head, b""),
    )


def head_id(tx: Tx, fs: FsRef, thread: str) -> str | None:
    """The id of a thread's head."""
    row = tx.one(HEAD_SQL, (fs.id, key_of(thread)))
    if row is None or row[0] is None:
        return None
    if row[1] is None:
        raise IntegrityError("a thread's head does not exist", hint="run fsd audit")
    return str(row[1].decode())


# -- checkpoints -------------------------------------------------------------------------------------


def find(tx: Tx, fs: FsRef, key: bytes) -> Record | None:
    """The checkpoint whose id has `key`."""
    row = tx.one(BY_KEY_SQL, (fs.id, key))
    return None if row is None else Record(*row)


def of_thread(tx: Tx, fs: FsRef, thread: bytes) -> list[Record]:
    """All of a thread, in the order they came."""
    return [Record(*row) for row in tx.all(BY_THREAD_SQL, (fs.id, thread))]


def parent_of(tx: Tx, fs: FsRef, record: Record) -> Record | None:
    """The parent, None when there is none or it was removed (and perhaps its id used again)."""
    found = None if record.parent is None else find(tx, fs, record.parent)
    return found if found is not None and is_parent(found, record) else None


def is_parent(parent: Record, child: Record) -> bool:
    """Whether who bears the id of `child`'s parent is that parent."""
    return parent.thread == child.thread and parent.num < child.num


def read_body(tx: Tx, num: int) -> bytes | None:
    """The packed body; None when the checkpoint is gone."""
    row = tx.one(BODY_SQL, (num,))
    return None if row is None else row[0]


def insert(tx: Tx, fs: FsRef, new: New, names: Sequence[bytes]) -> int:
    """Add a checkpoint that counts `names` and make it the head of its thread; its number."""
    row = tx.one(
        "INSERT INTO checkpoint (fs, key, id, thread, parent, created, stored, reason, label, kind, fs_seq, "
        "pin, entries, expires, body) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) RETURNING num",
        (
            fs.id,
            key_of(new.id),
            new.id.encode(),
            key_of(new.thread),
            None if new.parent is None else key_of(new.parent),
            float(new.created),
            new.stored,
            dumps(new.reason).decode(),
            None if new.label is None else dumps(new.label).decode(),
            new.kind,
            new.fs_seq,
            new.pin,
            new.entries,
            new.expires,
            new.body,
        ),
    )
    assert row is not None, "INSERT … RETURNING gives a row"
    tx.many(
        "INSERT INTO named (fs, name, checkpoint) VALUES (?,?,?)", [(fs.id, name, row[0]) for name in names]
    )
    set_head(tx, fs, new.thread, key_of(new.id))
    return int(row[0])


def remove(tx: Tx, fs: FsRef, records: Sequence[Record], native: Native | None) -> None:
    """Remove checkpoints and what they count. Heads are the caller's."""
    for some in chunks([record.num for record in records]):
        marks, values = in_list(some)
        tx.execute(f"DELETE FROM named WHERE checkpoint IN {marks}", values)
        tx.execute(f"DELETE FROM checkpoint WHERE num IN {marks}", values)
    for record in records:
        if record.kind == NATIVE:
            assert native is not None, "who made a native checkpoint can let go of it"
            native.drop(tx, fs, record)
