"""Packs: how blobs come into the store and out of it.

All blobs of one upload are one pack, one durable write. The pack's bytes are a frame (`fsd.wire.frame`), so
its header is its own index. A small pack lives in its database row, and then the whole upload costs no write
of its own; a larger one is the object `packs/<filesystem>/<pack number, 16 hex digits>`, durable before any
row names it (invariant 1, *blob before name*). A pack belongs to the filesystem that wrote it.

Numbers of packs name objects, so they are never used again: they are reserved in ranges, and what is left of
a range when the server stops is lost. Crash points: those of the store (`pack.*`) and of the database.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsd.blobs.store import BlobStore, Stretch
from fsd.host.direct import ALIGNED, place
from fsd.host.seam import Host
from fsd.meta.database import Database, Tx, take_numbers
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import (
    Busy,
    Conflict,
    DamagedBody,
    FsdError,
    IntegrityError,
    NoSpace,
    NotAuthenticated,
    NotFound,
    PosixError,
    TooLarge,
    Unavailable,
    UsageError,
)
from fsd.model.limits import (
    DIRECT_LEAST,
    KIB,
    PACK_INLINE_MAX,
    PACK_MOVES_MAX,
    STRAY_LEAST,
    UPLOAD_BLOBS_MAX,
    UPLOAD_MAX,
)
from fsd.model.plain import dataclass
from fsd.model.times import NS
from fsd.service.access import FsRef, hold
from fsd.service.retained import source
from fsd.wire.frame import Blob, pack_pieces, verify

log = logging.getLogger(__name__)

_PACK_FORMAT: Final = 1
_PAD_LEAST: Final = 6  # bytes of a header's `pad` beside what it holds, up to 255 bytes; one more above
_PAD_SHORT: Final = 256
_NUMBERS: Final = 1024  # pack numbers reserved at a time
_GAP: Final = 64 * KIB  # unwanted bytes between two blobs of a pack that are cheaper read than skipped
_STRETCH_LEAST: Final = 256 * KIB  # a blob: so much is passed on by the kernel, less costs more than a copy
_Get: TypeAlias = Callable[[str, int, int], bytes | Stretch]  # of a key, an offset and a length


class Location(NamedTuple):
    """Where a blob is: its row, the name of the filesystem that wrote the pack, and the bytes themselves
    when the pack is inline."""

    hash: bytes
    pack: int
    owner: str
    off: int
    raw_len: int
    stored_len: int
    codec: int
    data: bytes | None


class Found(NamedTuple):
    """A blob on its way out, its bytes read or not."""

    hash: bytes
    codec: int
    raw_len: int
    stored: bytes | memoryview | Stretch

    def blob(self) -> Blob:
        assert not isinstance(self.stored, Stretch)
        return Blob(self.hash, self.codec, self.raw_len, self.stored)


class Made(NamedTuple):
    """A pack ready for its rows. `data` None: it is an object already, written from `began` (wall ns) on."""

    number: int
    size: int
    data: bytes | None
    rows: list[tuple[bytes, int, int, int, int]]  # hash, off, raw_len, stored_len, codec
    began: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """Verified blobs on their way into the store: what `insert` needs. `known` were stored already when
    `prepare` looked; their bytes are kept, in case they are swept in between."""

    fs: int
    made: Made | None
    known: dict[bytes, Blob]

    @property
    def hashes(self) -> set[bytes]:
        new = {row[0] for row in self.made.rows} if self.made else set()
        return new | self.known.keys()


def object_key(fs_name: str, pack: int) -> str:
    return f"packs/{fs_name}/{pack:016x}"


class Packs:
    """The store of one server. Any thread; methods that take a `tx` belong into a `Database` function."""

    def __init__(self, db: Database, store: BlobStore, host: Host) -> None:
        self._db = db
        self._store = store
        self._host = host
        self._mutex = threading.Lock()
        self._next = 0
        self._end = 0

    def prepare(self, fs: int, fs_name: str, blobs: Sequence[Blob]) -> Prepared:
        """Verify `blobs` (the same one twice counts once), leave out those stored already, and write the
        pack's object unless it is small. Nothing names it yet. Raises `DamagedBody`, `TooLarge`, and what
        the store raises."""
        if len(blobs) > UPLOAD_BLOBS_MAX:
            raise TooLarge(f"{len(blobs)} blobs in one upload, at most {UPLOAD_BLOBS_MAX}")
        size = _size(blobs)
        if size > UPLOAD_MAX:
            raise TooLarge(f"more than {UPLOAD_MAX} bytes of blobs in one upload")
        given: dict[bytes, Blob] = {}
        for blob in blobs:
            given.setdefault(blob.hash, blob)
        _arrived(list(given.values()))
        # Only an upload worth an object asks first; a small one finds out in its own transaction.
        known: set[bytes] = set()
        if size > PACK_INLINE_MAX:
            known = self._db.read(lambda tx: _stored(tx, fs, list(given)))
        new = [blob for digest, blob in given.items() if digest not in known]
        made = self.write(fs_name, new) if new else None
        return Prepared(fs, made, {digest: given[digest] for digest in known})

    def write(self, fs_name: str, blobs: list[Blob]) -> Made:
        """A new pack of verified `blobs`; an object, unless it is small. No row names it yet."""
        number, began = self._number(), self._host.wall_ns()
        pieces, made = _frame(fs_name, number, blobs)
        if _size(blobs) <= PACK_INLINE_MAX:
            return made._replace(data=b"".join(pieces))
        self._db.check_room()
        self._store.put(object_key(fs_name, number), pieces)
        return made._replace(began=began)

    def discard(self, fs_name: str, number: int) -> None:
        """Delete the object of a pack no row ever named."""
        self._store.delete(object_key(fs_name, number))

    def _number(self) -> int:
        with self._mutex:
            if self._next >= self._end:
                self._next = self._db.write(lambda tx: take_numbers(tx, "pack", _NUMBERS))
                self._end = self._next + _NUMBERS
            self._next += 1
            return self._next - 1

    def insert(self, tx: Tx, prepared: Prepared) -> dict[bytes, int]:
        """Write the rows of `prepared`: afterwards all its blobs are stored and fresh. Counts begin at 0. How
        many bytes each has."""
        fs, now = prepared.fs, self._host.wall_ns()
        if prepared.made is not None:
            self._insert_pack(tx, fs, prepared.made, now)
        if prepared.known:
            gone = self.missing(tx, fs, set(prepared.known))
            if gone:  # swept between prepare and here; the row takes their bytes whatever their size
                number = take_numbers(tx, "pack", 1)
                pieces, made = _frame("", number, [prepared.known[digest] for digest in gone])
                self._insert_pack(tx, fs, made._replace(data=b"".join(pieces)), now)
        lengths = {digest: blob.raw_len for digest, blob in prepared.known.items()}
        if prepared.made is not None:
            lengths.update((row[0], row[2]) for row in prepared.made.rows)
        return lengths

    @staticmethod
    def _insert_pack(tx: Tx, fs: int, made: Made, now: int) -> None:
        check_in_time(made, now)
        # By hash, as everything that touches several blobs, so that transactions never wait in a circle. One
        # stored already stays where it is; its place in this pack is swept.
        new = tx.many(
            "INSERT INTO blob (fs, hash, pack, off, raw_len, stored_len, codec, refs, fresh)"
            " VALUES (?,?,?,?,?,?,?,0,?) ON CONFLICT (fs, hash) DO NOTHING",
            [
                (fs, digest, made.number, off, raw, stored_len, codec, now)
                for digest, off, raw, stored_len, codec in sorted(made.rows)
            ],
        )
        if new < len(made.rows):
            _refresh(tx, fs, {row[0] for row in made.rows}, now)
        if new or made.data is None:  # where all of an inline pack is stored, not even its bytes are kept
            tx.execute(
                "INSERT INTO pack (id, fs, size, data, created) VALUES (?,?,?,?,?)",
                (made.number, fs, made.size, made.data, now),
            )

    def store(self, fs: int, fs_name: str, blobs: Sequence[Blob]) -> None:
        """All of `blobs` are durably stored when this returns. Raises `NotFound` when the filesystem was
        deleted meanwhile."""
        prepared = self.prepare(fs, fs_name, blobs)

        def insert(tx: Tx) -> None:
            hold(tx, FsRef(fs, fs_name))
            self.insert(tx, prepared)

        with self.landing(fs_name, prepared):
            self._db.write(insert)

    @contextlib.contextmanager
    def landing(self, fs_name: str, prepared: Prepared | None) -> Iterator[None]:
        """Around the transaction that inserts `prepared`: where that did not happen for a reason of the
        request's, its object goes too. No row names it; the filesystem may have been deleted, so that
        `FileSystems.collect` has looked for objects already; and who is refused, or finds the disk full,
        and tries again would leave one more there each time. After other errors nobody knows, or the
        caller tries again: it is left to the sweep."""
        try:
            yield
        except (NotFound, NoSpace, Conflict, PosixError, Busy, NotAuthenticated, UsageError):
            made = None if prepared is None else prepared.made
            if made is not None and made.data is None:
                try:
                    self.discard(fs_name, made.number)
                except FsdError as exc:
                    log.warning("pack %016x of %s is left to the sweep: %s", made.number, fs_name, exc)
            raise

    def missing(self, tx: Tx, fs: int, hashes: set[bytes]) -> list[bytes]:
        """Those of `hashes` that are not stored, in order. The others count as fresh from now on, so that no
        sweep takes them before the answer was used (invariant 5)."""
        return sorted(hashes - self.lengths(tx, fs, hashes).keys())

    def keep(self, fs: FsRef, hashes: set[bytes]) -> list[bytes]:
        """As `missing`, in a transaction of its own: for a mount that has a deleted file open. Raises
        `NotFound` when the filesystem was deleted meanwhile."""

        def refresh(tx: Tx) -> list[bytes]:
            hold(tx, fs)
            return self.missing(tx, fs.id, hashes)

        return self._db.write(refresh)

    def lengths(self, tx: Tx, fs: int, hashes: set[bytes]) -> dict[bytes, int]:
        """As `missing`, the other way round: those that are stored, and how many bytes they have."""
        return _refresh(tx, fs, hashes, self._host.wall_ns())

    def adjust(self, tx: Tx, fs: int, deltas: dict[bytes, int]) -> None:
        """Change the reference counts of stored blobs, in order of hash (invariant 3, *counted*)."""
        now = self._host.wall_ns()
        tx.many(
            "UPDATE blob SET refs=refs+?, fresh=? WHERE fs=? AND hash=?",
            [(deltas[digest], now, fs, digest) for digest in sorted(deltas) if deltas[digest]],
        )

    def read(self, fs: int, hashes: Sequence[bytes]) -> dict[bytes, Blob]:
        """The blobs of `hashes` that are stored, in stored form: the reader verifies them (`open_blob`).
        Raises `IntegrityError` when a pack is lost or short."""
        found = self._fetch(fs, self._locate(fs, hashes))
        return {digest: one.blob() for digest, one in found.items()}

    def read_some(
        self, fs: int, hashes: Sequence[bytes], max_bytes: int
    ) -> tuple[dict[bytes, Found], list[bytes]]:
        """As many of the first of `hashes` as fit into `max_bytes`, at least one, and which of all are
        absent. The rest is to be asked for again. What is much is not read here, where it is a file's."""
        found = {location.hash: location for location in self._locate(fs, hashes)}
        chosen: list[Location] = []
        total = 0
        for digest in dict.fromkeys(hashes):
            location = found.get(digest)
            if location is None:
                continue
            total += location.stored_len
            if chosen and total > max_bytes:
                break
            chosen.append(location)
        absent = [digest for digest in dict.fromkeys(hashes) if digest not in found]
        return self._fetch(fs, chosen, self._passed), absent

    def _passed(self, key: str, offset: int, length: int) -> bytes | Stretch:
        some = self._store.stretch(key, offset, length)
        return self._store.get(key, offset, length) if some is None else some

    def _locate(self, fs: int, hashes: Sequence[bytes]) -> list[Location]:
        wanted = list(dict.fromkeys(hashes))
        return self._db.read(lambda tx: _all_locations(tx, fs, wanted)) if wanted else []

    def _fetch(self, fs: int, locations: list[Location], get: _Get | None = None) -> dict[bytes, Found]:
        get = get or self._store.get
        blobs, moved = self._opened(locations, get)
        for _ in range(PACK_MOVES_MAX):
            if not moved:
                return blobs
            # A pack that has gone since was rewritten, or its blobs swept: look once more where they are now.
            old = {location.hash: location.pack for location in moved}
            again = self._locate(fs, list(old))
            lost = [location for location in again if location.pack == old[location.hash]]
            if lost:
                raise IntegrityError(f"pack {lost[0].pack:016x} of {lost[0].owner} is lost")
            found, moved = self._opened(again, get)
            blobs |= found
        if moved:
            raise Unavailable("content moves faster than it is read", hint="try again")
        return blobs

    def fetch(self, locations: list[Location]) -> tuple[dict[bytes, Blob], list[Location]]:
        """The blobs at `locations`, and those whose pack is not where its row says. Several of a pack are
        views of what was read of it."""
        found, moved = self._opened(locations, self._store.get)
        return {digest: one.blob() for digest, one in found.items()}, moved

    def _opened(self, locations: list[Location], get: _Get) -> tuple[dict[bytes, Found], list[Location]]:
        blobs = {one.hash: _found(one, one.data) for one in locations if one.data is not None}
        packs: dict[int, list[Location]] = defaultdict(list)
        for one in locations:
            if one.data is None:
                packs[one.pack].append(one)
        moved: list[Location] = []
        for pack, group in packs.items():
            try:
                for run in _runs(sorted(group, key=lambda location: location.off)):
                    start = run[0].off
                    length = run[-1].off + run[-1].stored_len - start
                    # Small ones may be asked for in any order, and each would be passed on by itself.
                    take = get if length >= _STRETCH_LEAST * len(run) else self._store.get
                    data = take(object_key(run[0].owner, pack), start, length)
                    view = memoryview(data) if len(run) > 1 and isinstance(data, bytes) else data
                    for one in run:
                        at = one.off - start
                        blobs[one.hash] = _found(one, view[at : at + one.stored_len])
            except NotFound:
                moved += group
        return blobs, moved


def _size(blobs: Sequence[Blob]) -> int:
    return sum([len(blob.stored) for blob in blobs])


def check_in_time(made: Made, now: int) -> None:
    """Before the rows of `made` are written. A machine that was stopped for long in between must not name an
    object that another server has swept as a stray meanwhile: raises `Unavailable`."""
    if made.data is None and now - made.began > STRAY_LEAST * NS / 2:
        raise Unavailable("storing this took too long", hint="try again")


def _arrived(blobs: list[Blob]) -> None:
    """Raises `DamagedBody` when a sent blob is not what it is named by."""
    try:
        verify(blobs)
    except IntegrityError as exc:
        raise DamagedBody(exc.message) from exc


def _frame(fs_name: str, number: int, blobs: list[Blob]) -> tuple[list[bytes | memoryview], Made]:
    """The pieces of a pack and what its rows say (as of an object)."""
    header = {"v": _PACK_FORMAT, "fs": fs_name, "pack": number}
    pieces = pack_pieces(header, blobs)
    if _size(blobs) >= DIRECT_LEAST:
        pad = _pad(len(pieces[0]), place(blobs[0].stored))
        if pad is not None:
            pieces = pack_pieces({**header, "pad": bytes(pad)}, blobs)
    off = len(pieces[0])
    rows = []
    for blob in blobs:
        rows.append((blob.hash, off, blob.raw_len, len(blob.stored), blob.codec))
        off += len(blob.stored)
    return pieces, Made(number, off, None, rows)


def _pad(length: int, wanted: int | None) -> int | None:
    """How many bytes in `pad` make a header of `length` bytes end where its page ends but for `wanted`: where
    the first blob begins in its page of memory. The blobs are then written from there (`fsd.host.direct`).
    None: it does so without, or they lie nowhere."""
    if wanted is None or (more := (wanted - length) % ALIGNED) == 0:
        return None
    if more < _PAD_LEAST or more == _PAD_LEAST + _PAD_SHORT:
        more += ALIGNED  # by itself the key is so much, and no length of it gives the other
    return more - _PAD_LEAST - (more > _PAD_LEAST + _PAD_SHORT)


def _found(location: Location, stored: bytes | memoryview | Stretch) -> Found:
    if len(stored) != location.stored_len:
        raise IntegrityError(f"pack {location.pack:016x} ends inside blob {location.hash.hex()}")
    return Found(location.hash, location.codec, location.raw_len, stored)


def _runs(group: list[Location]) -> list[list[Location]]:
    """`group`, in order of offset, cut where the gap to the next blob is worth a read of its own."""
    runs = [[group[0]]]
    for one in group[1:]:
        last = runs[-1][-1]
        if one.off - (last.off + last.stored_len) > _GAP:
            runs.append([one])
        else:
            runs[-1].append(one)
    return runs


def _stored(tx: Tx, fs: int, hashes: Sequence[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for some in chunks(hashes):
        marks, params = in_list(some)
        found |= {
            row[0] for row in tx.all(f"SELECT hash FROM blob WHERE fs=? AND hash IN {marks}", [fs, *params])
        }
    return found


def _refresh(tx: Tx, fs: int, hashes: set[bytes], now: int) -> dict[bytes, int]:
    """Mark stored ones of `hashes` as used now; which those are, and their lengths. One that has references
    needs no mark: it gets one when it loses the last (`adjust`). Holds the filesystem."""
    found: dict[bytes, int] = {}
    idle: list[bytes] = []
    for some in chunks(sorted(hashes)):
        marks, params = in_list(some)
        for digest, length, refs in tx.all(
            f"SELECT hash, raw_len, refs FROM blob WHERE fs=? AND hash IN {marks}", [fs, *params]
        ):
            found[digest] = int(length)
            if not refs:
                idle.append(digest)
    tx.many("UPDATE blob SET fresh=? WHERE fs=? AND hash=?", [(now, fs, digest) for digest in sorted(idle)])
    return found


def _all_locations(tx: Tx, fs: int, hashes: Sequence[bytes]) -> list[Location]:
    """As `_locations`; what a fork that is not copied does not have itself is its origin's."""
    found = _locations(tx, fs, hashes)
    if len(found) < len(hashes):
        rows_of = source(tx, fs)
        if rows_of != fs:
            here = {location.hash for location in found}
            found += _locations(tx, rows_of, [one for one in hashes if one not in here])
    return found


def _locations(tx: Tx, fs: int, hashes: Sequence[bytes]) -> list[Location]:
    found: list[Location] = []
    for some in chunks(hashes):
        marks, params = in_list(some)
        found += [
            Location._make(row)
            for row in tx.all(
                "SELECT b.hash, b.pack, f.name, b.off, b.raw_len, b.stored_len, b.codec,"
                " substr(p.data, CAST(b.off+1 AS INTEGER), CAST(b.stored_len AS INTEGER)) FROM blob b"
                " CROSS JOIN pack p CROSS JOIN fs f"
                f" WHERE b.fs=? AND b.hash IN {marks} AND p.id=b.pack AND f.id=p.fs",
                [fs, *params],
            )
        ]
    return found
