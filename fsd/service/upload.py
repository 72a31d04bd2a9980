"""Content on its way in and out by path: a body cut into blocks and stored, a file read block by block.

`Uploading` holds at most one pack (8 MiB) and one block. What it stored and nobody named is left to the
sweep. `Reading` reads the state of the moment it was opened: the block list is taken then and blobs
are immutable; a list of more than READ_SNAPSHOT_BLOCKS blocks is taken in parts, and a file that changed
meanwhile ends with `Conflict` rather than mixing states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fsd.meta.database import Database, Tx
from fsd.model import blocks
from fsd.model.attrs import Attr
from fsd.model.blocks import Part, Parts
from fsd.model.errors import Conflict, IntegrityError, TooLarge, UsageError
from fsd.model.limits import (
    BLOCK,
    FILE_MAX,
    PATCHES_MAX,
    READ_BLOCKS,
    READ_SNAPSHOT_BLOCKS,
    UPLOAD_PACK,
)
from fsd.model.plain import dataclass
from fsd.model.spans import Span, merged
from fsd.service.access import FsRef
from fsd.service.packs import Packs, Prepared
from fsd.service.retained import State, is_pinned, still
from fsd.service.tree import block_parts, inode, seq_of
from fsd.wire.frame import Blob, make_blob, open_blob

_ZEROS: Final = bytes(BLOCK)


class FoldNeeded(Exception):
    """An append would give block `idx` of `node` too many parts; `parts` must become one blob first."""

    def __init__(self, node: Attr, idx: int, parts: Parts) -> None:
        super().__init__()
        self.node, self.idx, self.parts = node, idx, parts


@dataclass(frozen=True, slots=True)
class Folded:
    """The block with `parts` of inode `ino` as the one blob it was folded into."""

    ino: int
    idx: int
    parts: Parts
    now: Parts


class Piece(NamedTuple):
    """`length` bytes of a body, a block or its last bytes; `hash` None where all are zero, also of many
    blocks."""

    length: int
    hash: bytes | None


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A whole body that is stored but for `prepared`, which goes into the transaction that names it."""

    size: int
    pieces: tuple[Piece, ...]
    prepared: Prepared | None

    def blocks(self) -> dict[int, Parts]:
        """As the whole content of a file."""
        found: dict[int, Parts] = {}
        at = 0
        for piece in self.pieces:
            if piece.hash is not None:
                found[at // BLOCK] = (Part(0, piece.length, 0, piece.hash),)
            at += piece.length
        return found

    def behind(self, tx: Tx, fs: int, node: Attr, folded: Folded | None) -> dict[int, Parts]:
        """As further content behind what `node` has: the blocks that change. Raises `FoldNeeded`."""
        if node.size + self.size > FILE_MAX:
            raise TooLarge(f"a file has at most {FILE_MAX} bytes")
        if not self.size:
            return {}
        first = node.size // BLOCK
        found = block_parts(tx, fs, node, first, 1) if node.size % BLOCK else {}
        if folded and folded.ino == node.ino and folded.idx == first and found.get(first) == folded.parts:
            found[first] = folded.now
        if len(found.get(first, ())) > PATCHES_MAX - 1:
            raise FoldNeeded(node, first, found[first])
        for at, part in self._parts_from(node.size):
            found[at] = (*found.get(at, ()), part)
        return found

    def _parts_from(self, start: int) -> Iterator[tuple[int, Part]]:
        """The pieces laid out from file offset `start` on, cut at block borders."""
        for piece in self.pieces:
            boff = 0
            while boff < piece.length:
                off = start % BLOCK
                length = min(piece.length - boff, BLOCK - off)
                if piece.hash is not None:
                    yield start // BLOCK, Part(off, length, boff, piece.hash)
                start, boff = start + length, boff + length


class Uploading:
    """A body being stored. One thread at a time; blocks on hashing and on the store."""

    def __init__(self, packs: Packs, fs: FsRef) -> None:
        self._packs, self._fs = packs, fs
        self._tail = bytearray()
        self._pieces: list[Piece] = []
        self._waiting: list[Blob] = []
        self._bytes = 0
        self._named: set[bytes] = set()
        self.size = 0

    def add(self, data: Sequence[bytes]) -> None:
        """Take further bytes; raises `TooLarge`, and what the store raises."""
        for piece in data:
            self.size += len(piece)
            if self.size > FILE_MAX:
                raise TooLarge(f"a file has at most {FILE_MAX} bytes")
            self._tail += piece
            while len(self._tail) >= BLOCK:
                self._block(bytes(self._tail[:BLOCK]))
                del self._tail[:BLOCK]

    def hole(self, length: int) -> None:
        """Take so many zeros; raises `TooLarge`. Costs nothing, however many."""
        self.size += length
        if self.size > FILE_MAX:
            raise TooLarge(f"a file has at most {FILE_MAX} bytes")
        if self._tail:
            fill = min(length, BLOCK - len(self._tail))
            self._tail += bytes(fill)
            length -= fill
            if len(self._tail) == BLOCK:
                self._block(bytes(self._tail))
                self._tail.clear()
        whole = length - length % BLOCK
        if whole:
            self._pieces.append(Piece(whole, None))
        self._tail += bytes(length - whole)

    def _block(self, data: bytes) -> None:
        if data == _ZEROS[: len(data)]:
            self._pieces.append(Piece(len(data), None))
            return
        blob = make_blob(data)
        self._pieces.append(Piece(len(data), blob.hash))
        if blob.hash in self._named:
            return
        self._named.add(blob.hash)
        self._waiting.append(blob)
        self._bytes += len(blob.stored)
        if self._bytes >= UPLOAD_PACK:
            self._packs.store(self._fs.id, self._fs.name, self._waiting)
            self._waiting, self._bytes = [], 0

    def finish(self) -> Uploaded:
        """The body has ended."""
        if self._tail:
            self._block(bytes(self._tail))
            self._tail.clear()
        prepared = None
        if self._waiting:
            prepared = self._packs.prepare(self._fs.id, self._fs.name, self._waiting)
        return Uploaded(self.size, tuple(self._pieces), prepared)


class Spread:
    """The body of a sparse file: its data alone, which lies at `spans` of `size` bytes. As `Uploading`."""

    def __init__(self, uploading: Uploading, spans: Sequence[Span], size: int) -> None:
        self._uploading, self._size = uploading, size
        self._left = list(reversed(spans))

    def add(self, data: Sequence[bytes]) -> None:
        """Take further bytes; raises `UsageError` when there are more than the spans hold."""
        for piece in data:
            view = memoryview(piece)
            while view:
                if not self._left:
                    raise UsageError("the body has more bytes than its data")
                start, end = self._left[-1]
                if start > self._uploading.size:
                    self._uploading.hole(start - self._uploading.size)
                taken = view[: end - self._uploading.size]
                self._uploading.add([bytes(taken)])
                view = view[len(taken) :]
                if self._uploading.size == end:
                    self._left.pop()

    def finish(self) -> Uploaded:
        """The body has ended, and was as long as the spans."""
        self._uploading.hole(self._size - self._uploading.size)
        return self._uploading.finish()


def fold(packs: Packs, fs: FsRef, needed: FoldNeeded) -> Folded:
    """Make the block's parts one stored blob."""
    length = max(part.off + part.length for part in needed.parts)
    data = assemble(needed.parts, 0, length, open_blobs(packs, fs.id, blocks.hashes(needed.parts)))
    blob = make_blob(data)
    packs.store(fs.id, fs.name, [blob])
    return Folded(needed.node.ino, needed.idx, needed.parts, (Part(0, length, 0, blob.hash),))


def open_blobs(packs: Packs, fs: int, hashes: set[bytes]) -> dict[bytes, bytes]:
    """The verified bytes of blobs; raises `IntegrityError`."""
    found = packs.read(fs, sorted(hashes))
    lost = hashes - found.keys()
    if lost:
        raise IntegrityError(f"the blob {min(lost).hex()} is not stored")
    return {digest: open_blob(blob) for digest, blob in found.items()}


def assemble(parts: Parts, off: int, length: int, data: dict[bytes, bytes]) -> bytes:
    """Bytes [off, off+length) of a block from whole blobs. Raises `IntegrityError` where one is too short."""
    wanted = blocks.pieces(parts, off, length)
    for piece in wanted:
        if piece.boff + piece.length > len(data[piece.hash]):
            raise IntegrityError(f"the blob {piece.hash.hex()} is shorter than what names it")
    if len(wanted) == 1 and wanted[0].length == length:
        one = wanted[0]
        return data[one.hash][one.boff : one.boff + length]
    made = bytearray(length)
    for piece in wanted:
        made[piece.at : piece.at + piece.length] = data[piece.hash][piece.boff : piece.boff + piece.length]
    return bytes(made)


class Reading:
    """Bytes [offset, offset+length) of one state of a file. `next_piece` blocks; one thread at a time."""

    def __init__(
        self,
        db: Database,
        packs: Packs,
        fs: FsRef,
        attr: Attr,
        known: tuple[int, dict[int, Parts]],
        span: tuple[int, int],
        state: State,
    ) -> None:
        self._db, self._packs, self._fs, self._attr = db, packs, fs, attr
        self._state = state
        self._at, self._end = span
        self._known, self._blocks = known  # blocks below are in `_blocks`, or holes
        self._spans: list[Span] = []  # what is read behind `_end`, the next one last

    @classmethod
    def open(
        cls, tx: Tx, db: Database, packs: Packs, fs: FsRef, state: State, attr: Attr, offset: int, end: int
    ) -> Reading:
        """In the transaction that found `attr` in `state`; `end` at most the file's size."""
        known = _known_blocks(tx, state.fs, attr, offset // BLOCK, state.at)
        return cls(db, packs, fs, attr, known, (offset, end), state)

    def skip_holes(self) -> list[Span]:
        """From now on only the data is read; the spans of it. What lies behind the block list that is known
        counts as data."""
        known = self._known * BLOCK
        found = [
            (max(self._at, idx * BLOCK + part.off), min(self._end, idx * BLOCK + part.off + part.length))
            for idx, parts in sorted(self._blocks.items())
            for part in sorted(parts)
        ]
        if self._end > known:
            found.append((max(self._at, known), self._end))
        spans = merged((start, end) for start, end in found if start < end)
        self._spans = list(reversed(spans))
        self._end = self._at
        return spans

    def next_piece(self) -> bytes:
        """The next bytes, up to some MiB; empty at the end. Raises `Conflict` when the file changed and the
        rest of its old state is not known, `NotFound` when the filesystem was deleted, `IntegrityError` when
        a blob is lost or damaged."""
        if self._at >= self._end and self._spans:
            self._at, self._end = self._spans.pop()
        if self._at >= self._end:
            return b""
        first = self._at // BLOCK
        if first >= self._known:
            self._load(first)
        last = min((self._end - 1) // BLOCK, first + READ_BLOCKS - 1, self._known - 1)
        wanted = [self._blocks.get(idx, blocks.HOLE) for idx in range(first, last + 1)]
        need: set[bytes] = set().union(*(blocks.hashes(parts) for parts in wanted))
        try:
            data = open_blobs(self._packs, self._fs.id, need)
        except IntegrityError:
            self._db.read(lambda tx: seq_of(tx, self._fs.id))  # a deleted filesystem's blobs are no loss
            raise
        made = []
        for idx, parts in enumerate(wanted, first):
            off = self._at - idx * BLOCK
            length = min(BLOCK - off, self._end - self._at)
            made.append(assemble(parts, off, length, data))
            self._at += length
        for idx in range(first, self._at // BLOCK):
            self._blocks.pop(idx, None)  # not the last one: the next span may begin where this one ends
        return b"".join(made)

    def _load(self, first: int) -> None:
        def read(tx: Tx) -> tuple[int, dict[int, Parts]]:
            fs, at = still(tx, self._fs, self._state).fs, self._state.at
            if at is not None and not is_pinned(tx, fs, at):
                raise Conflict("the state was let go while it was read")
            now = inode(tx, fs, self._attr.ino, at)
            if now is None or now.cseq != self._attr.cseq:
                raise Conflict("the file changed while it was read")
            return _known_blocks(tx, fs, now, first, at)

        self._known, self._blocks = self._db.read(read)


def _known_blocks(tx: Tx, fs: int, attr: Attr, first: int, at: int | None) -> tuple[int, dict[int, Parts]]:
    """Up to which block, and the parts of a file's blocks from `first` on: all of them, or some more than
    READ_SNAPSHOT_BLOCKS that are no holes."""
    found: dict[int, Parts] = {}
    while first < attr.blocks and len(found) < READ_SNAPSHOT_BLOCKS:
        found |= block_parts(tx, fs, attr, first, READ_SNAPSHOT_BLOCKS, at)
        first += READ_SNAPSHOT_BLOCKS
    return first, found
