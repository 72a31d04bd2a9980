"""`Inode`: one inode in memory, the client's side of `model.Attr`."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

from fsd.model.attrs import Attr

if TYPE_CHECKING:
    from fsd.vfs.content import Content


class Inode:
    """One inode. Fields of stat are plain attributes: times ns, `mode` the whole st_mode, `size` as programs
    see it. Only the volume changes them.

    `stamp` rises whenever anything stat shows changes. `kernel` belongs to the kernel layer (ready-made
    EntryAttributes). `lookups` is the kernel's lookup count, kept by `Volume.lookup`, `create`, … and
    `forget`; `handles` counts open handles. `pending` counts own operations not yet acknowledged that
    touch it; while it is not 0 the local state is shown, whatever the server says. `stale`: another mount
    changed it, ask before use. `gone`: it has no name any more, here or on the server.
    """

    __slots__ = (
        "atime",
        "born",
        "complete",
        "content",
        "cseq",
        "ctime",
        "entries",
        "gid",
        "gone",
        "handles",
        "ino",
        "kernel",
        "lookups",
        "mode",
        "mtime",
        "names_pending",
        "names_stale",
        "nlink",
        "parent",
        "pending",
        "rdev",
        "seen",
        "size",
        "stale",
        "stamp",
        "target",
        "uid",
        "where",
        "writer",
        "xattrs",
    )

    def __init__(self, attr: Attr, seen: int) -> None:
        self.ino = attr.ino
        self.kernel: Any = None
        self.stamp = 0
        self.lookups = 0
        self.handles = 0
        self.pending = 0
        self.stale = False
        self.gone = False
        # Directories: name -> ino; None for a name known to be absent. `complete`: every name is in it.
        self.entries: dict[bytes, int | None] | None = {} if attr.is_dir else None
        self.complete = False
        self.names_pending: dict[bytes, int] | None = None
        self.names_stale: set[bytes] | None = None
        # Regular files: what reads and flushes need; made when first opened.
        self.content: Content | None = None
        # One (parent, name) it was last seen under, for messages only.
        self.where: tuple[int, bytes] | None = None
        self.load(attr, seen)

    def load(self, attr: Attr, seen: int) -> None:
        """Take everything from the server's version `attr`, read at seq `seen`."""
        self.mode = attr.mode
        self.nlink = attr.nlink
        self.uid = attr.uid
        self.gid = attr.gid
        self.size = attr.size
        self.atime = attr.atime
        self.mtime = attr.mtime
        self.ctime = attr.ctime
        self.rdev = attr.rdev
        self.target = attr.target
        self.parent = attr.parent
        self.xattrs = dict(attr.xattrs) if attr.xattrs else None
        self.cseq = attr.cseq
        self.writer = attr.writer
        self.born = attr.born
        self.seen = seen
        self.stale = False
        self.stamp += 1

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)
