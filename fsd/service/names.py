"""Blobs by contract: bytes under a name such as `sandbox-files/sha256/<hex>`.

A name is a row that says which blobs its bytes are made of; each distinct one counts a reference, so content
that files share with names outlives either. Removing a name removes the row and its references and no bytes:
those go with the sweep of blobs, after its own grace. Which checkpoints use a name is the table `named`.

The race of sweeps and captures is closed here: whoever is told that a name is there (`touch`, a `put` of what
is stored) has made it young in the same transaction, and the sweep decides name by name under the
filesystem's lock, by the age and the count of that moment.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgpack

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model import blocks
from fsd.model.blocks import Parts
from fsd.model.errors import (
    CheckpointNotFound,
    Conflict,
    IntegrityError,
    InvalidBlob,
    NotFound,
    TooLarge,
    Unavailable,
    UsageError,
)
from fsd.model.limits import BLOCK, CONTRACT_BLOB_MAX, READ_BLOCKS, SWEEP_NAMES, SWEEP_OLDER_MS
from fsd.model.plain import dataclass
from fsd.service.access import FsRef, Grant, hold
from fsd.service.contract_check import (
    ARTIFACTS,
    FILES,
    JsonObject,
    check_id,
    check_older,
    is_key,
    key_text,
    name_of,
    shown,
)
from fsd.service.packs import Packs
from fsd.service.records import find, key_of
from fsd.service.tree import seq_of
from fsd.service.upload import Uploaded, Uploading, assemble
from fsd.wire.frame import open_blob

_HEX: Final = 64
_NAME: Final = 33  # bytes of a stored name
FIND_SQL: Final = "SELECT size, parts, fresh FROM blob_name WHERE fs=? AND name=?"
LIST_SQL: Final = (
    "SELECT name, size, fresh FROM blob_name WHERE fs=? AND name>=? AND name<=? ORDER BY name LIMIT ?"
)
COUNTED_SQL: Final = "SELECT 1 FROM named WHERE fs=? AND name=? LIMIT 1"
SWEEP_SQL: Final = (
    "SELECT name FROM blob_name WHERE fs=? AND name>? AND fresh<? AND NOT EXISTS "
    "(SELECT 1 FROM named WHERE named.fs=blob_name.fs AND named.name=blob_name.name) ORDER BY name LIMIT ?"
)
MISSING_SQL: Final = (
    "SELECT DISTINCT name FROM named WHERE fs=? AND checkpoint=? AND NOT EXISTS "
    "(SELECT 1 FROM blob_name b WHERE b.fs=named.fs AND b.name=named.name) ORDER BY name"
)


@dataclass(frozen=True, slots=True)
class Stat:
    """A stored name. `uploaded` is the ns of the last upload or reuse."""

    key: str
    size: int
    uploaded: int

    def shown(self) -> JsonObject:
        return {"key": self.key, "size": self.size, "uploadedAt": self.uploaded // 1_000_000}


def check_key(text: str) -> bytes:
    """The stored name of a key in a path; raises `InvalidBlob` for what is none."""
    if not is_key(text):
        raise InvalidBlob(f"a blob's key is {FILES} or {ARTIFACTS} and 64 hex digits in lower case")
    return name_of(text)


def check_prefix(text: str) -> list[tuple[bytes, bytes]]:
    """First and last stored name of each range whose keys begin with `text`, in order."""
    found = []
    for mark, start in ((b"\x00", ARTIFACTS), (b"\x01", FILES)):
        if start.startswith(text):
            found.append((mark + b"\x00" * 32, mark + b"\xff" * 32))
        elif text.startswith(start):
            digits = text[len(start) :]
            if len(digits) <= _HEX and all(c in "0123456789abcdef" for c in digits):
                low, high = digits.ljust(_HEX, "0"), digits.ljust(_HEX, "f")
                found.append((mark + bytes.fromhex(low), mark + bytes.fromhex(high)))
    return found


def pack_parts(found: Sequence[Parts]) -> bytes:
    """The stored form of a name's blocks, in order, `()` a hole."""
    packed: bytes = msgpack.packb([blocks.encode(parts) for parts in found], use_bin_type=True)
    return packed


def unpack_parts(raw: bytes) -> list[Parts]:
    """Raises `IntegrityError` for what is damaged."""
    try:
        return [blocks.decode(one) for one in msgpack.unpackb(raw, raw=False)]
    except (ValueError, TypeError, UsageError, msgpack.exceptions.UnpackException) as exc:
        raise IntegrityError("the blocks of a blob's name cannot be read") from exc


def hashes_of(found: Sequence[Parts]) -> set[bytes]:
    """The distinct blobs a name references."""
    made: set[bytes] = set()
    return made.union(*(blocks.hashes(parts) for parts in found))


def insert(tx: Tx, packs: Packs, fs: FsRef, name: bytes, size: int, found: Sequence[Parts], now: int) -> bool:
    """Store a name whose blobs are stored, or make it young where it exists; whether it is new. Holds the
    filesystem."""
    touched = tx.execute("UPDATE blob_name SET fresh=? WHERE fs=? AND name=?", (now, fs.id, name))
    if touched:
        return False
    tx.execute(
        "INSERT INTO blob_name (fs, name, size, parts, fresh) VALUES (?,?,?,?,?)",
        (fs.id, name, size, pack_parts(found), now),
    )
    packs.adjust(tx, fs.id, dict.fromkeys(hashes_of(found), 1))
    return True


class Names:
    """All methods from any thread, none inside a transaction."""

    def __init__(self, db: Database, packs: Packs, host: Host) -> None:
        self._db = db
        self._packs = packs
        self._host = host

    def begin(self, fs: FsRef, key: str) -> Incoming:
        """For a `put`; raises `InvalidBlob`."""
        return Incoming(Uploading(self._packs, fs), key, check_key(key))

    def put(self, fs: FsRef, who: Grant, incoming: Incoming) -> tuple[Stat, bool]:
        """Name the bytes that arrived; whether the name is new. Raises `InvalidBlob` when they do not hash
        to it."""
        done = incoming.finish()
        now = self._host.wall_ns()

        def write(tx: Tx) -> bool:
            hold(tx, fs, who)
            if done.prepared is not None:
                self._packs.insert(tx, done.prepared)
            found = done.blocks()
            count = -(-done.size // BLOCK)
            parts = [found.get(idx, blocks.HOLE) for idx in range(count)]
            lost = self._packs.missing(tx, fs.id, hashes_of(parts))
            if lost:
                raise Unavailable("content uploaded for this is not stored any more", hint="try again")
            return insert(tx, self._packs, fs, incoming.name, done.size, parts, now)

        with self._packs.landing(fs.name, done.prepared):
            new = self._db.write(write)
        return Stat(incoming.key, done.size, now), new

    def touch(self, fs: FsRef, who: Grant, key: str) -> Stat | None:
        """Whether the name is there. The answer makes it young: who asks before an upload will use it."""
        if not is_key(key):
            return None
        name, now = name_of(key), self._host.wall_ns()

        def write(tx: Tx) -> int | None:
            hold(tx, fs, who)
            row = tx.one(
                "UPDATE blob_name SET fresh=? WHERE fs=? AND name=? RETURNING size", (now, fs.id, name)
            )
            return None if row is None else int(row[0])

        if self._db.read(lambda tx: tx.one(FIND_SQL, (fs.id, name))) is None:
            return None
        size = self._db.write(write)
        return None if size is None else Stat(key, size, now)

    def open(self, fs: FsRef, key: str) -> NameReading | None:
        """For a `get`; None when it is not there."""
        if not is_key(key):
            return None
        name = name_of(key)
        row = self._db.read(lambda tx: tx.one(FIND_SQL, (fs.id, name)))
        if row is None:
            return None
        return NameReading(self._db, self._packs, fs, Stat(key, int(row[0]), int(row[2])), row[1])

    def delete(self, fs: FsRef, who: Grant, key: str) -> None:
        """Gone already is no error; raises `Conflict` while a checkpoint counts it."""
        name = check_key(key)

        def write(tx: Tx) -> None:
            hold(tx, fs, who)
            if tx.one(COUNTED_SQL, (fs.id, name)):
                raise Conflict(
                    f"a checkpoint uses {key}", hint="remove the checkpoints that use it, or leave it"
                )
            _remove(tx, self._packs, fs, [name])

        self._db.write(write, frees=True)

    def page(self, fs: FsRef, prefix: str, cursor: str, limit: int) -> tuple[list[Stat], str | None]:
        """Names that begin with `prefix`, after the key `cursor`, in order; where to go on."""
        after = check_key(cursor) if cursor else b""
        found: list[Stat] = []
        for low, high in check_prefix(prefix):
            if after >= high:
                continue
            start = max(low, after + b"\x00" if after else low)
            bounds = (fs.id, start, high, limit + 1 - len(found))
            rows = self._db.read(lambda tx, b=bounds: tx.all(LIST_SQL, b))  # type: ignore[misc]
            found += [Stat(key_text(name), int(size), int(fresh)) for name, size, fresh in rows]
            if len(found) > limit:
                return found[:limit], found[limit - 1].key
        return found, None

    def missing(self, fs: FsRef, body: JsonObject) -> list[str]:
        """The keys that a checkpoint counts and that are not stored: for who captured it. Raises
        `CheckpointNotFound`."""
        name = check_id(body.get("id"), "id")

        def read(tx: Tx) -> list[str]:
            record = find(tx, fs, key_of(name))
            if record is None:
                raise CheckpointNotFound(f"no checkpoint {shown(name)}")
            return [key_text(row[0]) for row in tx.all(MISSING_SQL, (fs.id, record.num))]

        return self._db.read(read)

    def sweep(self, fs: FsRef, who: Grant, body: JsonObject) -> list[str]:
        """Remove the names that no checkpoint counts and that are older than `olderThanMs`; their keys, in
        order. A step is a transaction; one that is cut off is simply run again."""
        older = check_older(body.get("olderThanMs", SWEEP_OLDER_MS))
        before = self._host.wall_ns() - int(min(older, 1e12) * 1_000_000)
        removed: list[str] = []
        after = b""
        while True:
            names = self._db.write(
                lambda tx, at=after: self._sweep_some(tx, fs, who, at, before),  # type: ignore[misc]
                frees=True,
            )
            removed += [key_text(name) for name in names]
            if len(names) < SWEEP_NAMES:
                return removed
            self._host.crash_point("names.swept")
            after = names[-1]

    def _sweep_some(self, tx: Tx, fs: FsRef, who: Grant, after: bytes, before: int) -> list[bytes]:
        hold(tx, fs, who)
        names = [row[0] for row in tx.all(SWEEP_SQL, (fs.id, after, before, SWEEP_NAMES))]
        _remove(tx, self._packs, fs, names)
        return names


def _remove(tx: Tx, packs: Packs, fs: FsRef, names: Sequence[bytes]) -> None:
    """Remove names that are there, and what they count."""
    refs: dict[bytes, int] = defaultdict(int)
    for name in names:
        row = tx.one("DELETE FROM blob_name WHERE fs=? AND name=? RETURNING parts", (fs.id, name))
        if row is not None:
            for digest in hashes_of(unpack_parts(row[0])):
                refs[digest] -= 1
    packs.adjust(tx, fs.id, refs)


class Incoming:
    """Bytes on their way to a name. One thread at a time."""

    def __init__(self, uploading: Uploading, key: str, name: bytes) -> None:
        self.key, self.name = key, name
        self._uploading = uploading
        self._hash = hashlib.sha256()

    def add(self, data: Sequence[bytes]) -> None:
        """Further bytes; raises `TooLarge`, and what the store raises."""
        for piece in data:
            self._hash.update(piece)
        if self._uploading.size + sum(map(len, data)) > CONTRACT_BLOB_MAX:
            raise TooLarge(f"a blob has at most {CONTRACT_BLOB_MAX} bytes")
        self._uploading.add(data)

    def finish(self) -> Uploaded:
        """All came; raises `InvalidBlob` when they are not what the name says."""
        digest = self._hash.digest()
        if digest != self.name[1:]:
            raise InvalidBlob(f"the bytes hash to {digest.hex()}, not to {self.key}")
        return self._uploading.finish()


class NameReading:
    """The bytes of a name, block by block. The last piece is given out only when the whole hashed to the
    name, so that an answer that came whole is right. Blocks; one thread at a time."""

    def __init__(self, db: Database, packs: Packs, fs: FsRef, stat: Stat, raw: bytes) -> None:
        self.stat = stat
        self._db, self._packs, self._fs = db, packs, fs
        self._parts = unpack_parts(raw)
        self._at = 0
        self._hash = hashlib.sha256()

    def next_piece(self) -> bytes:
        """The next bytes, up to some MiB; empty at the end. Raises `IntegrityError`, or `NotFound` when the
        filesystem was deleted."""
        if self._at >= self.stat.size:
            return b""
        first = self._at // BLOCK
        wanted = self._parts[first : first + READ_BLOCKS]
        data = self._blobs(hashes_of(wanted))
        made = b"".join(
            assemble(parts, 0, min(BLOCK, self.stat.size - idx * BLOCK), data)
            for idx, parts in enumerate(wanted, first)
        )
        self._at += len(made)
        self._hash.update(made)
        if not made or (self._at >= self.stat.size and self._hash.digest() != name_of(self.stat.key)[1:]):
            raise IntegrityError(f"what is stored under {self.stat.key} is damaged")
        return made

    def _blobs(self, digests: set[bytes]) -> dict[bytes, bytes]:
        found = self._packs.read(self._fs.id, sorted(digests))
        if len(found) < len(digests):
            self._db.read(lambda tx: seq_of(tx, self._fs.id))  # a deleted filesystem's blobs are no loss
            if self._db.read(lambda tx: tx.one(FIND_SQL, (self._fs.id, name_of(self.stat.key)))) is None:
                raise NotFound(f"{self.stat.key} was deleted while it was read")
            lost = min(digests - found.keys())
            raise IntegrityError(f"the blob {lost.hex()} is not stored")
        return {digest: open_blob(blob) for digest, blob in found.items()}
