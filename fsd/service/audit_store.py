"""The part of `fsd audit` that looks at the bytes: every pack against its object and against its own index.

Rows are read first and objects listed afterwards, so an object that is there without a row is nothing wrong
(an upload that is under way, or one that crashed: the sweep's), and one that is not there is looked up once
more before it is called lost. Beside a server that runs nothing is found that is not so.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack

from fsd.blobs.store import BlobStore
from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import IntegrityError, NotFound, TooLarge, UsageError
from fsd.model.limits import AUDIT_PACKS, SWEEP_PACKS
from fsd.model.plain import dataclass
from fsd.service.access import FsRef
from fsd.service.audit import Finding
from fsd.service.packs import object_key
from fsd.service.sweep import pack_number
from fsd.wire.frame import Blob, header_length, open_blob

_HEAD: Final = 8  # bytes in front of a frame's header
Row = tuple[bytes, int, int, int, int]  # hash, off, raw_len, stored_len, codec


class _Pack(NamedTuple):
    id: int
    size: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Checked:
    """`packs` looked at, `read` of them byte by byte; `strays`: objects without a row."""

    packs: int
    read: int
    strays: int


def audit_store(
    db: Database, store: BlobStore, fs: FsRef, *, read_data: bool, rng: random.Random
) -> tuple[list[Finding], Checked]:
    """Findings about the packs a filesystem wrote, whoever uses them. Every object's size is compared with
    its row; index and bytes of AUDIT_PACKS packs taken at random, of all with `read_data`."""
    looking = _Looking(db, store, fs)
    numbers = [row[0] for row in db.read(lambda tx: tx.all("SELECT id FROM pack WHERE fs=?", (fs.id,)))]
    prefix = f"packs/{fs.name}/"
    sizes = {pack_number(one.key, prefix): one.size for one in store.list(prefix)}
    chosen = set(numbers if read_data else rng.sample(numbers, min(AUDIT_PACKS, len(numbers))))
    for some in chunks(numbers, SWEEP_PACKS):
        looking.some(some, sizes, chosen)
    known = set(numbers) | {
        row[0] for row in db.read(lambda tx: tx.all("SELECT pack FROM dropped WHERE fs=?", (fs.id,)))
    }
    return looking.found, Checked(len(numbers), len(chosen), len(sizes.keys() - known))


class _Looking:
    def __init__(self, db: Database, store: BlobStore, fs: FsRef) -> None:
        self.db, self.store, self.fs = db, store, fs
        self.found: list[Finding] = []

    def say(self, rule: str, pack: int, what: str) -> None:
        self.found.append(Finding(rule, f"pack {pack}", what))

    def some(self, numbers: Sequence[int], sizes: dict[int | None, int], chosen: set[int]) -> None:
        packs, rows = self.db.read(lambda tx: _load(tx, numbers, chosen))
        for pack, inline in packs:
            if not inline and sizes.get(pack.id) != pack.size and self.still(pack.id):
                there = "is missing" if pack.id not in sizes else f"has {sizes[pack.id]} bytes"
                self.say("blob before name", pack.id, f"its object {there}, its row says {pack.size}")
                continue
            for digest, off, _raw, stored, _codec in rows[pack.id]:
                if off < 0 or off + stored > pack.size:
                    self.say("blob before name", pack.id, f"blob {digest.hex()} ends behind its end")
            if pack.id in chosen:
                self.whole(pack, inline, rows[pack.id])

    def still(self, pack: int) -> bool:
        """Whether the row is still there: the sweep may have been quicker."""
        return self.db.read(lambda tx: tx.one("SELECT 1 FROM pack WHERE id=?", (pack,))) is not None

    def whole(self, pack: _Pack, inline: bool, rows: list[Row]) -> None:
        """Its index says what the rows say, and the bytes are what they are named by."""
        try:
            data = self.bytes_of(pack) if not inline else pack.data or b""
            if len(data) != pack.size:
                raise IntegrityError(f"it has {len(data)} bytes, its row says {pack.size}")
            index = _index(data)
        except NotFound:
            if self.still(pack.id):
                self.say("blob before name", pack.id, "its object is missing")
            return
        except (IntegrityError, UsageError, TooLarge) as exc:
            self.say("name is hash", pack.id, f"its index cannot be read: {exc.message}")
            return
        for row in rows:
            digest, off, raw, stored, codec = row
            if index.get(digest) != row:
                self.say("name is hash", pack.id, f"its index does not have blob {digest.hex()} as its row")
            try:
                open_blob(Blob(digest, codec, raw, data[off : off + stored]))
            except IntegrityError as exc:
                self.say("name is hash", pack.id, f"blob {digest.hex()}: {exc.message}")

    def bytes_of(self, pack: _Pack) -> bytes:
        return self.store.get(object_key(self.fs.name, pack.id), 0, pack.size)


def _load(
    tx: Tx, numbers: Sequence[int], chosen: set[int]
) -> tuple[list[tuple[_Pack, bool]], dict[int, list[Row]]]:
    """The packs that are still there and the blob rows of every filesystem that point into them. The bytes of
    an inline one only when it is to be read."""
    marks, params = in_list(numbers)
    packs = [
        (_Pack(row[0], row[1], None), bool(row[2]))
        for row in tx.all(
            f"SELECT id, size, CASE WHEN data IS NULL THEN 0 ELSE 1 END FROM pack WHERE id IN {marks}", params
        )
    ]
    for at, (pack, inline) in enumerate(packs):
        if inline and pack.id in chosen:
            row = tx.one("SELECT data FROM pack WHERE id=?", (pack.id,))
            packs[at] = (pack._replace(data=None if row is None else bytes(row[0])), True)
    rows: dict[int, list[Row]] = defaultdict(list)
    for pack_id, digest, off, raw, stored, codec in tx.all(
        f"SELECT DISTINCT pack, hash, off, raw_len, stored_len, codec FROM blob WHERE pack IN {marks}", params
    ):
        rows[pack_id].append((digest, off, raw, stored, codec))
    return packs, rows


def _index(data: bytes) -> dict[bytes, Row]:
    """What a pack says of itself, as its rows should."""
    off = _HEAD + header_length(data)
    try:
        table = msgpack.unpackb(data[_HEAD:off], raw=False, use_list=False)["blobs"]
        found: dict[bytes, Row] = {}
        for digest, codec, raw, stored in table:
            found[digest] = (digest, off, raw, stored, codec)
            off += stored
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as exc:
        raise IntegrityError("no table of blobs") from exc
    return found


def unknown_file_systems(db: Database, store: BlobStore) -> list[str]:
    """Names under which objects lie that this database does not know: another database's, or those of one
    that was restored from an older copy. Nothing ever deletes them."""
    known = {row[0] for row in db.read(lambda tx: tx.all("SELECT name FROM fs"))}
    found: set[str] = set()
    after = "packs/"
    while True:  # one object of each: the names are what is asked for
        one = next(store.list("packs/", after), None)
        if one is None:
            return sorted(found - known)
        name = one.key.split("/")[1]
        found.add(name)
        after = f"packs/{name}/~"
