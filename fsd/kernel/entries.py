"""Ready-made `EntryAttributes`, one for each inode the kernel asked about. FUSE thread only.

An inode's `kernel` slot holds (stamp, epoch, entry); the entry is filled again only when the inode's `stamp`
rose or the time-outs changed. pyfuse3 replies at once after the handler returned, so sharing is safe.
"""

from __future__ import annotations

import functools
import stat
import struct
from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol

from pyfuse3 import EntryAttributes

from fsd.model.limits import ABSENT_MAX
from fsd.vfs.types import Invalidation

TIMEOUT: Final = 60.0
FORGOTTEN_AT_ONCE: Final = 256  # absent names: to send one takes two changes of threads, as 256 do
FOREVER: Final = 365 * 86400.0  # what never changes
# What stdio and cp take as their buffer: 128 KiB makes 1/32 of the write requests 4 KiB would.
BLKSIZE: Final = 128 * 1024


# As the kernel lays them out (protocol 7.33, in the byte order of the machine): the number of an inode, its
# generation and how long its name and its attributes may be kept (seconds, then ns); the latter alone; the
# attributes.
_KEPT: Final = struct.Struct("=QQQQII")
_VALID: Final = struct.Struct("=QII")
_ATTR: Final = struct.Struct("=QQQqqqIIIIIIIIII")
# What pyfuse3 says of a name that does not exist.
_NOTHING: Final = _ATTR.pack(*(0,) * 9, stat.S_IFREG, 1, *(0,) * 3, 4096, 0)
_SECOND: Final = 10**9


@functools.lru_cache(maxsize=16)
def _parts(entry: float, attr: float) -> tuple[int, int, int, int]:
    return int(entry), int(attr), int(entry % 1 * _SECOND), int(attr % 1 * _SECOND)


class Inode(Protocol):
    """What the volume's inodes show. Times are ns; `kernel` belongs to this module."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    atime: int
    mtime: int
    ctime: int
    rdev: int
    stamp: int
    stale: bool
    kernel: object

    @property
    def is_dir(self) -> bool: ...


def _room(inode: Inode) -> tuple[int, int]:
    """Its blocks of 512 bytes, and what number a device has."""
    size, holes = inode.size, inode.rdev
    if not stat.S_ISREG(inode.mode):
        return (size + 511) // 512, holes
    if not 0 <= holes <= size:
        holes = 0  # older data may have the number of a device there
    return (size - holes + 511) // 512, 0


class Entries:
    """Makes entries for one mount. `root_ino` is shown as 1, everything else under its own number. Without
    `keep` the kernel asks for attributes, absent names and files of several names each time."""

    def __init__(self, root_ino: int, timeout: float = TIMEOUT, *, keep: bool = True) -> None:
        self._root = root_ino
        self._normal = timeout
        self._epoch = 0
        self.timeout = timeout
        self._keep = keep
        # Absent names the kernel was told and may have kept, oldest first; `forget` is told of the
        # oldest when they are too many.
        self._absent: dict[Invalidation, None] = {}
        self.forget: Callable[[list[Invalidation]], None] | None = None
        self._passing = EntryAttributes()
        self.negative = EntryAttributes()
        self.negative.st_ino = 0
        self.negative.entry_timeout = timeout if keep else 0.0
        self.negative.attr_timeout = timeout if keep else 0.0

    def silent(self, is_silent: bool) -> None:
        """With the change feed silent every later answer has time-out 0."""
        timeout = 0.0 if is_silent else self._normal
        if timeout != self.timeout:
            self.timeout = timeout
            self._epoch += 1
            self.negative.entry_timeout = timeout if self._keep else 0.0

    def absent(self, parent: int, name: bytes) -> EntryAttributes:
        """The answer for a name that does not exist."""
        if self.negative.entry_timeout:
            self._absent[Invalidation(parent, name, ask=True)] = None
            if len(self._absent) > ABSENT_MAX:
                self._forget_oldest()
        return self.negative

    def _forget_oldest(self) -> None:
        oldest = list(islice(self._absent, FORGOTTEN_AT_ONCE))
        for one in oldest:
            del self._absent[one]
        if self.forget is not None:
            self.forget(oldest)

    def take_absent(self) -> list[Invalidation]:
        """The absent names the kernel may hold; it will be made to forget them."""
        found = list(self._absent)
        self._absent.clear()
        return found

    def of(self, inode: Inode) -> EntryAttributes:
        if inode.stale:
            entry = EntryAttributes()
            self._fill(entry, inode)
            return entry
        cached = inode.kernel
        if cached is not None and cached[0] == inode.stamp and cached[1] == self._epoch:  # type: ignore[index]
            known: EntryAttributes = cached[2]  # type: ignore[index]
            return known
        entry = EntryAttributes() if cached is None else cached[2]  # type: ignore[index]
        self._fill(entry, inode)
        inode.kernel = (inode.stamp, self._epoch, entry)
        return entry

    def absent_bytes(self, parent: int, name: bytes) -> bytes:
        """The same as the kernel reads it."""
        told = self.absent(parent, name)
        return _KEPT.pack(0, 0, *_parts(told.entry_timeout, told.attr_timeout)) + _NOTHING

    def entry_bytes(self, inode: Inode) -> bytes:
        """What `of` says, as the kernel reads it."""
        entry, attr = self._timeouts(inode)
        number = 1 if inode.ino == self._root else inode.ino
        return _KEPT.pack(number, 0, *_parts(entry, attr)) + self._attr(number, inode)

    def attr_bytes(self, inode: Inode) -> bytes:
        """Its attributes alone."""
        attr = self._timeouts(inode)[1]
        number = 1 if inode.ino == self._root else inode.ino
        return _VALID.pack(int(attr), int(attr % 1 * _SECOND), 0) + self._attr(number, inode)

    def _timeouts(self, inode: Inode) -> tuple[float, float]:
        """How long the kernel keeps the name and the attributes."""
        # An open does not tell by which name it came: of several names the kernel looks each one up before.
        one = self._keep or inode.nlink <= 1 or inode.is_dir
        # Shown for want of newer attributes: the kernel asks again, and nobody tells it to.
        attr = self.timeout if self._keep and not inode.stale else 0.0
        return self.timeout if one else 0.0, attr

    @staticmethod
    def _attr(number: int, inode: Inode) -> bytes:
        size = inode.size
        blocks, rdev = _room(inode)
        atime, atime_ns = divmod(inode.atime, _SECOND)
        mtime, mtime_ns = divmod(inode.mtime, _SECOND)
        ctime, ctime_ns = divmod(inode.ctime, _SECOND)
        return _ATTR.pack(
            number,
            size,
            blocks,
            atime,
            mtime,
            ctime,
            atime_ns,
            mtime_ns,
            ctime_ns,
            inode.mode,
            inode.nlink,
            inode.uid,
            inode.gid,
            rdev & 0xFFFFFFFF,
            BLKSIZE,
            0,
        )

    def passing(self, inode: Inode) -> EntryAttributes:
        """The same for a listing, good until the next call: an entry kept for each listed file would be a
        quarter of its memory."""
        if inode.kernel is not None or inode.stale:
            return self.of(inode)
        self._fill(self._passing, inode)
        return self._passing

    def _fill(self, entry: EntryAttributes, inode: Inode) -> None:
        entry.st_ino = 1 if inode.ino == self._root else inode.ino
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_blocks, entry.st_rdev = _room(inode)
        entry.st_size = inode.size
        entry.st_blksize = BLKSIZE
        entry.st_atime_ns = inode.atime
        entry.st_mtime_ns = inode.mtime
        entry.st_ctime_ns = inode.ctime
        entry.entry_timeout, entry.attr_timeout = self._timeouts(inode)
