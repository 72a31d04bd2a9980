"""Ready-made `EntryAttributes`, one for each inode the kernel asked about. FUSE thread only.

An inode's `kernel` slot holds (stamp, epoch, entry); the entry is filled again only when the inode's `stamp`
rose or the time-outs changed. pyfuse3 replies at once after the handler returned, so sharing is safe.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Final, Protocol

from pyfuse3 import EntryAttributes

from fsd.model.limits import ABSENT_MAX
from fsd.vfs.types import Invalidation

TIMEOUT: Final = 60.0
FOREVER: Final = 365 * 86400.0  # what never changes
# What stdio and cp take as their buffer: 128 KiB makes 1/32 of the write requests 4 KiB would.
BLKSIZE: Final = 128 * 1024


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


class Entries:
    """Makes entries for one mount. `root_ino` is shown as 1, everything else under its own number. Without
    `keep` the kernel asks for attributes, absent names and files of several names each time."""

    def __init__(self, root_ino: int, timeout: float = TIMEOUT, *, keep: bool = True) -> None:
        self._root = root_ino
        self._normal = timeout
        self._epoch = 0
        self.timeout = timeout
        self._keep = keep
        # Absent names the kernel was told and may have kept, oldest first; `forget` is told of one too many.
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
                oldest = next(iter(self._absent))
                del self._absent[oldest]
                if self.forget is not None:
                    self.forget([oldest])
        return self.negative

    def take_absent(self) -> list[Invalidation]:
        """The absent names the kernel may hold; it will be made to forget them."""
        found = list(self._absent)
        self._absent.clear()
        return found

    def of(self, inode: Inode) -> EntryAttributes:
        if inode.stale:  # shown for want of newer attributes: the kernel asks again, and nobody tells it to
            entry = EntryAttributes()
            self._fill(entry, inode)
            entry.attr_timeout = 0.0
            return entry
        cached = inode.kernel
        if cached is not None and cached[0] == inode.stamp and cached[1] == self._epoch:  # type: ignore[index]
            known: EntryAttributes = cached[2]  # type: ignore[index]
            return known
        entry = EntryAttributes() if cached is None else cached[2]  # type: ignore[index]
        self._fill(entry, inode)
        inode.kernel = (inode.stamp, self._epoch, entry)
        return entry

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
        regular = stat.S_ISREG(inode.mode)
        entry.st_rdev = 0 if regular else inode.rdev
        entry.st_size = inode.size
        entry.st_blksize = BLKSIZE
        holes = inode.rdev if regular else 0
        if not 0 <= holes <= inode.size:
            holes = 0  # older data may have the number of a device there
        entry.st_blocks = (inode.size - holes + 511) // 512
        entry.st_atime_ns = inode.atime
        entry.st_mtime_ns = inode.mtime
        entry.st_ctime_ns = inode.ctime
        # An open does not tell by which name it came: of several names the kernel looks each one up before.
        one = self._keep or inode.nlink <= 1 or stat.S_ISDIR(inode.mode)
        entry.entry_timeout = self.timeout if one else 0.0
        entry.attr_timeout = self.timeout if self._keep else 0.0
