"""Calls on ranges of files: where data is and where holes are, making holes, making room.

What they change needs no bytes: the log has a record of a few bytes for a hole of any size, and a hole in a
block list is what no part covers, to the byte. Room is not set aside anywhere: a file that was allocated has
its size, and whether the bytes written later fit is known when they are written, as for a sparse file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from fsd.model.errors import NoSpace, PosixError
from fsd.model.limits import FILE_MAX
from fsd.vfs.attributes import RECORD_ROOM
from fsd.vfs.calls import Handle
from fsd.vfs.extents import HOLE
from fsd.vfs.files import SYNC_FLAGS, FileCalls
from fsd.vfs.log import PUNCH
from fsd.vfs.node import Inode
from fsd.vfs.records import LENGTH, TIME

# Modes of fallocate(2).
KEEP_SIZE: Final = 1
PUNCH_HOLE: Final = 2
ZERO_RANGE: Final = 16

GRAIN: Final = 4096  # data and holes are told in pieces of this size, as a disk with such blocks does


class Found(NamedTuple):
    """What SEEK_DATA or SEEK_HOLE found; `offset` None: nothing, ENXIO. `hole`: some hole was met on the way,
    so that stores through a mapping which are not known here could change the answer."""

    offset: int | None
    hole: bool


class RangeCalls(FileCalls):
    """See the module."""

    def seek(self, fh: int, offset: int, whence: int) -> Found:
        """SEEK_DATA, SEEK_HOLE. Whatever is known here counts, committed or not."""
        node = self.handle(fh).node
        self.current(node)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise PosixError(errno.EINVAL, "only data and holes are looked for here")
        if not 0 <= offset < node.size:
            return Found(None, hole=False)
        self.know_blocks(node)
        if whence == os.SEEK_DATA:
            start, _ = next(data_from(node, offset), (None, 0))
            return Found(start, hole=start != offset)
        for start, end in data_from(node, offset):
            if start > offset:
                break
            offset = end
        return Found(offset, hole=offset < node.size)

    def allocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """fallocate(2). On an O_SYNC/O_DSYNC handle parks with `again=False` until committed."""
        handle = self.handle(fh)
        node = self.to_change(handle)
        known = mode & ~(KEEP_SIZE | ZERO_RANGE) == 0 or mode == PUNCH_HOLE | KEEP_SIZE
        if not known:
            raise PosixError(errno.EOPNOTSUPP, "fallocate in this mode is not supported")
        if offset < 0 or length <= 0:
            raise PosixError(errno.EINVAL, "a range begins in the file and has bytes")
        end = offset + length
        if end > FILE_MAX:
            raise PosixError(errno.EFBIG, "a file has at most 16 TiB")
        self.current(node)
        self.know_blocks(node)
        self.room(2 * RECORD_ROOM)
        if not mode & PUNCH_HOLE:
            self._fits(node, offset, end)
        self.take_bits(handle)
        inside = min(end, node.size)
        grows = end > node.size and not mode & KEEP_SIZE
        punches = bool(mode & (PUNCH_HOLE | ZERO_RANGE)) and offset < inside
        if punches and grows:
            self.core.prepare(2 * RECORD_ROOM + self.flusher.base_length(node))  # both, or neither
        if punches:
            self._punch(node, offset, inside)
        elif not grows:
            self.set_attributes(node, mtime=self.core.stamp())
        if grows:
            self.truncate(node, end)
        if handle.flags & SYNC_FLAGS and not node.gone:
            self.wait_out(self.sync_want(handle))

    def to_change(self, handle: Handle) -> Inode:
        """The file of a handle that is to be changed by other means than a write."""
        if handle.drops >= 0:
            self.dropped(handle)
        if not handle.writable:
            raise PosixError(errno.EBADF, "not open for writing")
        if not handle.node.is_file:
            raise PosixError(errno.ENODEV, "not a regular file")
        if self.core.guarded:
            self.must_be_writable(handle.node)
        return handle.node

    def _fits(self, node: Inode, offset: int, end: int) -> None:
        """Whether the server has room for what is not stored of a range; ENOSPC."""
        inside = min(end, node.size)
        stored = node.file().stored(offset, inside) if offset < inside else 0
        free = self.core.space.free
        if end - offset - stored > free:
            raise NoSpace(
                f"{end - offset - stored} bytes are to be set aside, and the server has room for {free}",
                hint="allocate less, or make room on the server's disk",
            )

    def _punch(self, node: Inode, start: int, end: int) -> None:
        """[start, end), which lies inside the file, is a hole from now on."""
        content, core = node.file(), self.core
        time = core.stamp()
        # As a truncation it fits on a full disk: it may be what makes room.
        pos = self.flusher.log_change(node, PUNCH, start, [TIME.pack(time, 0), LENGTH.pack(end - start)])
        node.rdev += content.stored(start, end)
        content.wrote(start, end, pos, core.now(), ref=HOLE)
        self.content_changed(node, time)

    def may_be_mapped(self, fh: int) -> bool:
        """Whether the kernel may have changes of the file that are not known here: somebody has it open who
        may have mapped it, to store into it."""
        node = self.handle(fh).node
        if node.content is None or not node.content.writers:
            return False
        return any(h.node is node and h.flags & os.O_ACCMODE == os.O_RDWR for h in self.handles.values())


def data_from(node: Inode, offset: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what is stored of a file, from `offset` on, in order; no two touch. The block list is
    known."""
    low = high = -1
    for start, end in node.file().spans(offset // GRAIN * GRAIN, node.size):
        start, end = max(offset, start // GRAIN * GRAIN), min(node.size, -(-end // GRAIN) * GRAIN)
        if start <= high:
            high = max(high, end)
            continue
        if high > offset:
            yield low, high
        low, high = start, end
    if high > offset:
        yield low, high
