"""copy_file_range: what the server has of the source becomes part of the target without its bytes moving.

The target's block list names the source's blobs from then on, whatever the offsets; the log says so in a
record of some fifty bytes a block. Only what is not committed yet is read from the log and written again.

Until the copy is committed (two seconds, or at once with an fsync) the blobs are the source's. They stay on
the server for its grace after the source has gone, longer while this mount lives (`keep`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final, NamedTuple

from fsd.model.errors import NoSpace, PosixError
from fsd.model.limits import BLOCK, COPY_CALL_BYTES, COPY_CALL_PIECES, COPY_CALL_SPAN, FILE_MAX, KIB, MIB
from fsd.vfs.attributes import RECORD_ROOM
from fsd.vfs.build import base_plan
from fsd.vfs.content import Content
from fsd.vfs.extents import HOLE, Ref
from fsd.vfs.files import SYNC_FLAGS
from fsd.vfs.log import SHARE, WRITE
from fsd.vfs.node import Inode
from fsd.vfs.ranges import RangeCalls
from fsd.vfs.records import TIME, Shared, packb
from fsd.vfs.types import Park

# A piece of a blob this small is written again where its bytes are at hand: naming it would keep all of the
# blob alive, and have all of it fetched by whoever reads the piece.
SHARE_LEAST: Final = 32 * KIB


class Piece(NamedTuple):
    """Bytes [start, end) of the source: what `ref` says, or else bytes that are to be written again, `data`
    or those of the log at `pos`. `loose`: only a part of what it names is used."""

    start: int
    end: int
    ref: Ref | None
    pos: int = 0
    loose: bool = False
    data: bytes | None = None


class CopyCalls(RangeCalls):
    """See the module."""

    def copy_range(
        self, fh_in: int, offset_in: int, fh_out: int, offset_out: int, length: int, flags: int
    ) -> int:
        """copy_file_range(2): how much was copied, which may be less than asked for. On an O_SYNC/O_DSYNC
        handle parks with `again=False` until committed."""
        out = self.handle(fh_out)
        source, node = self.handle(fh_in).node, self.to_change(out)
        if flags or offset_in < 0 or offset_out < 0 or not source.is_file:
            raise PosixError(errno.EINVAL, "a range of a file is copied into one, without flags")
        if offset_out >= FILE_MAX:
            raise PosixError(errno.EFBIG, "a file has at most 16 TiB")
        self.current(source)
        self.current(node)
        length = min(length, source.size - offset_in, FILE_MAX - offset_out, COPY_CALL_SPAN)
        if length <= 0:
            return 0
        if source is node and abs(offset_in - offset_out) < length:
            raise PosixError(errno.EINVAL, "the two ranges overlap")
        self.know_blocks(source)
        self.know_blocks(node)
        self.take_bits(out)
        self.core.sharing[node.ino] = None
        done = 0
        for group in _groups(self._planned(source.file(), offset_in, offset_in + length)):
            try:
                self._take_over(node, group, offset_out - offset_in)
            except (NoSpace, Park):
                if not done:
                    raise
                break  # so much is copied; who goes on hears of it
            done += group[-1].end - group[0].start
        if not node.gone and self.flusher.big(node):
            self.flusher.freeze(node)
        if out.flags & SYNC_FLAGS and not node.gone:
            self.wait_out(self.sync_want(out), done)
        return done

    def _planned(self, content: Content, start: int, end: int) -> list[Piece]:
        """As much of a range of the source as one call takes over, in order. Made before anything is changed:
        the target may be the same file. Where room is made meanwhile, what the log has of the source may be
        written again elsewhere in it; where it was stays readable, since segments go only by a later job."""
        size, found = 0, []
        for piece in _pieces(content, start, end):
            if piece.loose and piece.ref is not None and piece.end - piece.start < SHARE_LEAST:
                blob = self.core.recent.in_memory(piece.ref.hash)
                if blob is not None:
                    boff = piece.ref.boff
                    data = blob[boff : boff + piece.end - piece.start]
                    piece = piece._replace(ref=None, data=data)
            if piece.ref is None:
                size += piece.end - piece.start
            found.append(piece)
            if size >= COPY_CALL_BYTES or len(found) >= COPY_CALL_PIECES:
                break
        return found

    def _take_over(self, node: Inode, group: list[Piece], by: int) -> None:
        """Log some pieces, all named or all bytes, `by` further on in the target, and have them there."""
        core, content = self.core, node.file()
        start, end = group[0].start + by, group[-1].end + by
        time = core.stamp()
        if group[0].ref is None:
            data = b"".join(self._bytes(piece) for piece in group)
            self.room(len(data))
            pos = self._log(node, WRITE, start, [TIME.pack(time, 0), data]) + TIME.size
            self._filled(node, start, end, 0)
            content.wrote(start, end, pos, core.now())
        else:
            body = packb([Shared(p.start + by, p.end + by, *(p.ref or HOLE)) for p in group])
            self.room(RECORD_ROOM + len(body))
            pos = self._log(node, SHARE, 0, [TIME.pack(time, 0), body])
            holes = sum(p.end - p.start for p in group if p.ref == HOLE)
            self._filled(node, start, end, holes)
            for number, piece in enumerate(group):
                content.wrote(piece.start + by, piece.end + by, pos + number, core.now(), ref=piece.ref)
        node.size = max(node.size, end)
        self.content_changed(node, time)

    def _bytes(self, piece: Piece) -> bytes:
        return self.core.log.read(piece.pos, piece.end - piece.start) if piece.data is None else piece.data

    def _log(self, node: Inode, kind: int, offset: int, body: list[bytes]) -> int:
        try:
            pos = self.flusher.log_change(node, kind, offset, body, spare=False)
        except NoSpace as exc:
            self.out_of_space(exc)
        self.disk_since = None
        return pos

    @staticmethod
    def _filled(node: Inode, start: int, end: int, holes: int) -> None:
        """Count the room of [start, end), which is about to hold so many bytes of holes."""
        over = min(end, node.size)
        were = over - start - node.file().stored(start, over) if over > start else 0
        node.rdev += holes - were + max(0, start - node.size)


def _pieces(content: Content, start: int, end: int) -> Iterator[Piece]:
    """What [start, end) of a file is, in order. The block list is known."""
    at = start
    for run in content.extents.runs(start, end):
        yield from _of_base(content, at, run.start)
        yield Piece(run.start, run.end, run.ref, run.pos)
        at = run.end
    yield from _of_base(content, at, end)


def _of_base(content: Content, start: int, end: int) -> Iterator[Piece]:
    if start >= end:
        return
    at = start  # up to here it is told; a hole is one piece, whatever its size
    for index in content.indexes(start, end):
        parts = content.shown(index)
        if not parts:
            continue
        block = index * BLOCK
        whole = {(part.hash, part.boff, part.length) for part in parts}
        low = max(start, block)
        for one in base_plan(parts, low - block, min(end, block + BLOCK) - low):
            if len(one) != 4:
                low += one[-1]
                continue
            _, digest, boff, length = one
            if at < low:
                yield Piece(at, low, HOLE)
            loose = (digest, boff, length) not in whole
            yield Piece(low, low + length, Ref(digest, boff), loose=loose)
            at = low = low + length
    if at < end:
        yield Piece(at, end, HOLE)


def _groups(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Neighbours that go into one record: named ones, or bytes up to a mebibyte."""
    group: list[Piece] = []
    for piece in pieces:
        if group and (
            (group[0].ref is None) != (piece.ref is None)
            or (piece.ref is None and piece.end - group[0].start > MIB)
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
