"""What both sides know of an inode, and inode numbers.

An inode number is `session << 40 | counter`: the session number (23 bits) is given by the server and never
reused, so numbers of forks and merges cannot collide. The root is 1 on the server and through a mount of
the whole tree.
"""

from __future__ import annotations

import stat
from typing import NamedTuple

from fsd.model.blocks import Parts
from fsd.model.blocks import decode as decode_parts
from fsd.model.limits import BLOCK, INO_COUNTER_BITS

ROOT_INO = 1


class Attr(NamedTuple):
    """One version of an inode, as rows, answers and the client's memory hold it.

    `mode` is the whole st_mode. Times are ns since the epoch. `target` is a symlink's. `parent` is set for
    directories. `rdev` is the device number of a device node; a regular file has none, and there it counts
    the bytes of its size that nothing is stored for (0 also where that was never counted). `parts` is the
    stored form of the first block (`blocks.encode`); further blocks are asked for. `xattrs` maps name to
    value. `born` is the seq of this version; `cseq` the seq at which the content last changed (what a content
    operation is based on); `writer` the session that did that.
    """

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
    target: bytes | None
    parent: int
    parts: bytes | None
    xattrs: dict[bytes, bytes] | None
    cseq: int
    writer: int
    born: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def device(self) -> int:
        return 0 if self.is_file else self.rdev

    @property
    def blocks(self) -> int:
        """How many 1 MiB blocks the size spans."""
        return (self.size + BLOCK - 1) // BLOCK

    def first_block(self) -> Parts:
        return decode_parts(self.parts)


class Entry(NamedTuple):
    """One directory entry with its inode: what a listing holds."""

    name: bytes
    attr: Attr
    born: int  # seq of this version of the name


def make_ino(session: int, counter: int) -> int:
    """The inode number number `counter` (≥ 1) of `session`."""
    return session << INO_COUNTER_BITS | counter


def session_of(ino: int) -> int:
    return ino >> INO_COUNTER_BITS
