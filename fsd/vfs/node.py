"""`Inode`: one inode in memory, the client's side of `model.Attr`, and the table of them."""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterator
from sys import getsizeof
from typing import Any, Final, cast

from fsd.model.attrs import Attr
from fsd.model.blocks import decode as decode_parts
from fsd.model.blocks import encode as encode_parts
from fsd.model.errors import PosixError
from fsd.model.limits import BLOCK
from fsd.vfs.content import Content


class _Empty(dict[bytes, Any]):
    """An empty dict that stays so, and the same in every copy of a volume."""

    def __setitem__(self, key: bytes, value: object) -> None:
        raise TypeError("only a directory has names")

    def __deepcopy__(self, memo: object) -> _Empty:
        return self


# What everything but a directory has of names.
NO_ENTRIES: Final[dict[bytes, int | None]] = _Empty()
NO_NAMES: Final[dict[bytes, int]] = _Empty()
_TYPE: Final = 0o170000  # of a mode; asked some ten times a call, so without a call
NO_STALE: Final = cast("set[bytes]", frozenset())
# After so many inodes were dropped the table of inodes is looked at, and made anew where each of them takes
# more bytes of it than SPARSE (a full one takes some 50).
FIT_EVERY: Final = 1024
SPARSE: Final = 400


class Inode:
    """One inode. Fields of stat are plain attributes: times ns, `mode` the whole st_mode, `size` as programs
    see it. Only the volume changes them.

    `rdev` of a regular file counts the bytes of its size that nothing is stored for (see `model.attrs`).
    `stamp` rises whenever anything stat shows changes. `kernel` belongs to the kernel layer (ready-made
    EntryAttributes). `lookups` is the kernel's lookup count, kept by `Volume.lookup`, `create`, … and
    `forget`; `handles` counts open handles. `pending` counts own operations not yet acknowledged that
    touch it; while it is not 0 the local state is shown, whatever the server says. `stale`: another mount
    changed it, ask before use. `gone`: it has no name any more, here or on the server. `seen` is the seq
    its state was read at. `paged` is odd when the pages the kernel may have of its content are what a read
    would be answered with (what programs of this mount write goes through them), and grows when they are not
    any more.
    """

    __slots__ = (
        "atime",
        "born",
        "checked",
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
        "listed",
        "lookups",
        "mode",
        "mtime",
        "names_pending",
        "names_stale",
        "nlink",
        "paged",
        "parent",
        "parts",
        "pending",
        "rdev",
        "seen",
        "size",
        "stale",
        "stamp",
        "target",
        "uid",
        "used",
        "where",
        "xattrs",
    )

    def __init__(self, attr: Attr, seen: int) -> None:
        self.ino = attr.ino
        self.kernel: Any = None
        self.stamp = 0
        self.lookups = 0
        self.handles = 0
        self.pending = 0
        self.gone = False
        self.checked = 0.0  # monotonic time of the last answer about it
        self.paged = 0
        self.cseq = attr.cseq
        # Directories: name -> ino, None for a name known to be absent. `complete`: every name is in it.
        # `used`: the tick its names were last asked for in. `listed`: the seq of the answer that had all of
        # its names. Others share empty ones: a third of an inode.
        is_dir = stat.S_ISDIR(attr.mode)
        self.entries: dict[bytes, int | None] = {} if is_dir else NO_ENTRIES
        self.complete = False
        self.listed = 0
        self.names_pending: dict[bytes, int] = {} if is_dir else NO_NAMES
        self.names_stale: set[bytes] = set() if is_dir else NO_STALE
        self.used = 0
        # Regular files: what reads and flushes need; made when first opened.
        self.content: Content | None = None
        # One (parent, name) it was last seen under: for messages and for what is refused.
        self.where: tuple[int, bytes] | None = None
        self.load(attr, seen)

    def load(self, attr: Attr, seen: int) -> None:
        """Take everything from the server's version `attr`, read at seq `seen`. Clean inodes only."""
        self.mode = attr.mode
        self.nlink = attr.nlink
        self.uid = attr.uid
        self.gid = attr.gid
        self.size = attr.size
        self.mtime = attr.mtime
        # Equal times are one object: memory for 100,000 of them.
        self.atime = attr.mtime if attr.atime == attr.mtime else attr.atime
        self.ctime = attr.mtime if attr.ctime == attr.mtime else attr.ctime
        self.rdev = attr.rdev
        self.target = attr.target
        self.parent = attr.parent
        self.parts = attr.parts
        self.xattrs = dict(attr.xattrs) if attr.xattrs else None
        if attr.cseq != (self.cseq if self.content is None else self.content.cseq):
            self.unpage()
        self.cseq = attr.cseq
        self.born = attr.born
        self.seen = seen
        self.stale = False
        self.stamp += 1
        back = self.gone
        if back:
            # Its removal was not done (another mount had put something into it): it is there again, without
            # what was changed and not sent before.
            self.gone = self.complete = False
            if self.is_dir:
                self.entries.clear()
        if self.content is not None and (back or self.content.void or self.content.cseq != attr.cseq):
            self.unpage()
            writers = self.content.writers
            self.content = self._fresh_content()
            self.content.writers = writers

    def shown(self) -> tuple[object, ...]:
        """What the kernel keeps of it, and which content its pages are of."""
        cseq = self.cseq if self.content is None else self.content.cseq
        owner = (self.mode, self.nlink, self.uid, self.gid)
        return (*owner, self.size, self.rdev, self.mtime, self.ctime, self.xattrs or None, cseq)

    def unpage(self) -> None:
        """Pages the kernel has of it may be old."""
        self.paged = (self.paged | 1) + 1

    def file(self) -> Content:
        """Its content, made from what the inode row says. `content.base` is None when more must be asked."""
        if self.content is None:
            self.content = self._fresh_content()
        return self.content

    def _fresh_content(self) -> Content:
        base = None
        if self.size <= BLOCK:
            base = {0: decode_parts(self.parts)} if self.parts is not None else {}
        return Content(base, self.size, self.cseq)

    def settle(self) -> None:
        """Nobody has it open and nothing is pending: keep of its content only what the inode row holds."""
        content = self.content
        if content is None or self.handles or content.unclean:
            return
        if content.base is not None and not content.void:
            self.parts = encode_parts(content.base.get(0, ()))
        self.cseq = content.cseq
        self.content = None

    @property
    def is_dir(self) -> bool:
        return self.mode & _TYPE == stat.S_IFDIR

    @property
    def is_file(self) -> bool:
        return self.mode & _TYPE == stat.S_IFREG

    @property
    def busy(self) -> bool:
        """Local state the server does not have yet: it is shown, and not replaced by answers."""
        return self.pending > 0 or (self.content is not None and self.content.unclean)


class Nodes:
    """The inodes in memory and what answers of the server do to them. Local inode numbers throughout."""

    def __init__(self) -> None:
        self.by_ino: dict[int, Inode] = {}
        self.also: dict[int, tuple[int, ...]] = {}  # further numbers of an inode (`join`)
        self._dropped = 0

    def join(self, node: Inode, stays: Inode) -> None:
        """`node` is the same inode as `stays`: from now on both numbers mean `stays`."""
        numbers = (node.ino, *self.also.pop(node.ino, ()))
        for number in numbers:
            self.by_ino[number] = stays
        self.also[stays.ino] = (*self.also.get(stays.ino, ()), *numbers)
        stays.lookups += node.lookups
        stays.handles += node.handles
        stays.pending += node.pending
        self.mean(numbers, stays.ino)

    def mean(self, numbers: Collection[int], ino: int) -> None:
        """Every name of one of `numbers` means `ino`."""
        for above in list(self.by_ino.values()):
            if above.is_dir:
                for name in [name for name, child in above.entries.items() if child in numbers]:
                    above.entries[name] = ino

    def drop(self, node: Inode) -> None:
        """Forget it, under every number."""
        self.by_ino.pop(node.ino, None)
        for number in self.also.pop(node.ino, ()):
            self.by_ino.pop(number, None)
        self._dropped += 1
        if self._dropped % FIT_EVERY:
            return
        if getsizeof(self.by_ino) > SPARSE * (FIT_EVERY + len(self.by_ino)):
            kept = dict(self.by_ino)  # a table stays as large as it ever was, however few are left in it
            self.by_ino.clear()
            self.by_ino.update(kept)

    def numbers(self, node: Inode) -> tuple[int, ...]:
        """Every number the kernel may know it under."""
        return (node.ino, *self.also.get(node.ino, ())) if self.also else (node.ino,)

    def get(self, ino: int) -> Inode:
        """Raises ESTALE when it is not in memory."""
        found = self.by_ino.get(ino)
        if found is None:
            raise PosixError(errno.ESTALE, f"inode {ino} is not known here")
        return found

    def directory(self, ino: int) -> Inode:
        """Raises ESTALE, ENOTDIR; ENOENT when it was removed."""
        found = self.get(ino)
        if not found.is_dir:
            raise PosixError(errno.ENOTDIR, "not a directory")
        if found.gone:
            raise PosixError(errno.ENOENT, "the directory was removed")
        return found

    def install(self, attr: Attr, seen: int, now: float, *, keep: bool = False) -> Inode:
        """Have the inode `attr` describes, as of `seen`; local changes win. `keep`: an own commit newer
        than the answer touched it, leave it as it is."""
        found = self.by_ino.get(attr.ino)
        if found is None:
            found = self.by_ino[attr.ino] = Inode(attr, seen)
        elif not found.busy and not keep and seen >= found.seen:
            if found.born != attr.born or found.stale or found.gone:
                found.load(attr, seen)
            found.seen = seen
            found.stale = False
        found.checked = now
        return found

    def enter(self, parent: Inode, name: bytes, ino: int) -> None:
        """`name` means `ino` from now on."""
        if parent.entries is NO_ENTRIES:
            parent.entries = {}
        parent.entries[name] = ino
        child = self.by_ino.get(ino)
        if child is not None:
            child.where = (parent.ino, name)

    def mark_names(self, parent: int, name: bytes, by: int) -> None:
        """Count (`by` 1) or uncount (-1) an own operation on a name."""
        node = self.by_ino.get(parent)
        if node is None:
            return
        if node.names_pending is NO_NAMES:
            node.names_pending = {}
        count = node.names_pending.get(name, 0) + by
        if count > 0:
            node.names_pending[name] = count
        else:
            node.names_pending.pop(name, None)
            if node.complete and node.entries.get(name, 0) is None:
                del node.entries[name]  # absence needs no mark in a complete directory

    def path(self, ino: int, root: int) -> bytes:
        """One path of the inode below the mount's root, as well as it is known; for messages."""
        top, names = self.place(ino, root)
        return b"/" + b"/".join(names if top == root else (b"?%x" % top, *names))

    def place(self, ino: int, root: int) -> tuple[int, tuple[bytes, ...]]:
        """The highest inode above `ino` (or it) that is known, and the names from there to it."""
        names: list[bytes] = []
        seen: set[int] = set()
        while ino != root and ino not in seen:
            seen.add(ino)
            node = self.by_ino.get(ino)
            if node is None or node.where is None:
                break
            ino, name = node.where
            names.append(name)
        return ino, tuple(reversed(names))

    def droppable(self, node: Inode) -> bool:
        """Whether nothing needs it: no lookup, no handle, no name in a loaded directory, nothing pending."""
        if node.lookups or node.handles or node.busy:
            return False
        if node.is_dir and (node.entries or node.names_pending):
            return False
        if node.nlink > 1 and not node.is_dir and not node.gone:
            return False  # perhaps under another name than the one that is remembered
        if node.gone or node.where is None:
            return True
        parent = self.by_ino.get(node.where[0])
        return parent is None or parent.entries.get(node.where[1]) != node.ino

    def upwards(self, node: Inode) -> Iterator[Inode]:
        """`node` and the directories it is known to lie in, from below, each once: where others moved
        several, the old place of one and the new one of another may be known: they lie in each other."""
        seen: set[int] = set()
        at: Inode | None = node
        while at is not None and at.ino not in seen:
            seen.add(at.ino)
            yield at
            above = at.parent if at.is_dir else at.where[0] if at.where is not None else 0
            at = self.by_ino.get(above)
