"""The working set of one commit: inodes, names and blocks as they are now, and as they will be.

`View` is filled set-wise from a `Source` (`prefetch`), changed in memory by the rules, and written by
`rows.write`. Rare things (a conflict's other names, a parent's parents) are loaded when asked for. A view
belongs to one transaction and one thread; it never writes.

Invariants: every object here is the only one for its key; `orig_…` is what the database holds and never
changes; an absent key that was looked up is remembered as absent.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgpack

from fsd.model.attrs import Attr
from fsd.model.limits import BLOCK
from fsd.model.ops import CONTENT, CREATE, LINK, RENAME, RMDIR, SETATTR, SETXATTR, UNLINK, Op

LIVE: Final = 140_737_488_355_327  # `died` of a live row; the same literal stands in the SQL
IDX_END: Final = 2**40  # past every block index

NameKey = tuple[int, bytes]


class GoneFile(NamedTuple):
    """What is remembered of a regular file or other inode after its last name went: where it was and whose
    it was, so that content committed later by somebody else comes back to its place."""

    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    xattrs: bytes | None


class Node:
    """One inode, changeable. Fields as in `Attr`, `xattrs` in stored form. `grown` is the seq of the last
    content change that was not an append. `orig_born` is -1 for an inode the database does not hold."""

    __slots__ = (
        "atime",
        "born",
        "changed",
        "cseq",
        "ctime",
        "gid",
        "gone",
        "grown",
        "ino",
        "mode",
        "mtime",
        "nlink",
        "orig_born",
        "orig_mode",
        "orig_parts",
        "orig_size",
        "parent",
        "parts",
        "rdev",
        "size",
        "target",
        "uid",
        "writer",
        "xattrs",
    )

    def __init__(
        self,
        ino: int,
        mode: int,
        nlink: int,
        uid: int,
        gid: int,
        size: int,
        atime: int,
        mtime: int,
        ctime: int,
        rdev: int,
        target: bytes | None,
        parent: int,
        parts: bytes | None,
        xattrs: bytes | None,
        cseq: int,
        writer: int,
        grown: int,
        born: int,
        *,
        stored: bool = True,
    ) -> None:
        self.ino, self.mode, self.nlink, self.uid, self.gid = ino, mode, nlink, uid, gid
        self.size, self.atime, self.mtime, self.ctime, self.rdev = size, atime, mtime, ctime, rdev
        self.target, self.parent, self.parts, self.xattrs = target, parent, parts, xattrs
        self.cseq, self.writer, self.grown, self.born = cseq, writer, grown, born
        self.orig_born = born if stored else -1
        self.orig_parts = parts if stored else None
        self.orig_size = size if stored else 0
        self.orig_mode = mode if stored else 0
        self.changed = not stored
        self.gone = False

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    def attr(self) -> Attr:
        """This inode as answers and `Attr` readers see it."""
        return Attr(
            self.ino,
            self.mode,
            self.nlink,
            self.uid,
            self.gid,
            self.size,
            self.atime,
            self.mtime,
            self.ctime,
            self.rdev,
            self.target,
            self.parent,
            self.parts,
            decode_xattrs(self.xattrs) or None,
            self.cseq,
            self.writer,
            self.born,
        )


class Name:
    """One directory entry, changeable. `ino` 0: absent. `touched`: written in this commit."""

    __slots__ = ("ino", "name", "orig_born", "orig_ino", "parent", "touched", "writer")

    def __init__(self, parent: int, name: bytes, ino: int, writer: int, born: int) -> None:
        self.parent, self.name, self.ino, self.writer = parent, name, ino, writer
        self.orig_ino, self.orig_born = ino, born
        self.touched = False


class Block:
    """One block row (index ≥ 1), changeable. `parts` None: a hole. `orig_born` -1: not in the database."""

    __slots__ = ("orig_born", "orig_parts", "parts", "touched")

    def __init__(self, parts: bytes | None, born: int) -> None:
        self.parts, self.orig_parts, self.orig_born = parts, parts, born
        self.touched = False


class Source(Protocol):
    """Where a view's rows come from: the live rows of one filesystem. Bounded queries, no caching."""

    def nodes(self, inos: Sequence[int]) -> list[Node]: ...

    def names(self, keys: Sequence[NameKey]) -> list[Name]: ...

    def names_of(self, ino: int) -> list[Name]: ...

    def child_counts(self, parents: Sequence[int]) -> dict[int, int]: ...

    def blocks(self, ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, bytes, int]]:
        """Rows (ino, idx, parts, born) of the ranges (ino, first, last), both ends included."""
        ...

    def gone(self, ino: int) -> GoneFile | None: ...


def decode_xattrs(raw: bytes | None) -> dict[bytes, bytes]:
    if raw is None:
        return {}
    found: dict[bytes, bytes] = msgpack.unpackb(raw, raw=False)
    return found


def encode_xattrs(xattrs: dict[bytes, bytes]) -> bytes | None:
    if not xattrs:
        return None
    packed: bytes = msgpack.packb(xattrs, use_bin_type=True)
    return packed


class View:
    """See the module. `seq` is the commit's number. `new_ino` gives a server-made inode number. `tx` is the
    transaction, for callers that read by SQL beside the view (direct commands): rows changed in the view are
    not there yet."""

    def __init__(self, source: Source, seq: int, new_ino: Callable[[], int], tx: Any = None) -> None:
        self.source = source
        self.seq = seq
        self.new_ino = new_ino
        self.tx = tx
        self.node_map: dict[int, Node | None] = {}
        self.name_map: dict[NameKey, Name] = {}
        self.block_map: dict[int, dict[int, Block]] = {}
        self.gone_new: dict[int, GoneFile] = {}
        self._block_known: dict[int, tuple[int, set[int]]] = {}  # ino -> (all from here on, single ones)
        self._children: dict[int, int] = {}  # as in the database
        self._child_delta: dict[int, int] = {}
        self._placed: dict[int, set[NameKey]] = {}  # names given in this commit, by ino
        self._names_of_loaded: set[int] = set()

    # Loading.

    def prefetch(self, ops: Iterable[Op], redirects: dict[int, int]) -> None:
        """Load what `ops` mention in a few queries. Nothing breaks without it; it is only slower."""
        inos: set[int] = set()
        names: set[NameKey] = set()
        made: set[int] = set()
        emptied: set[int] = set()
        to = redirects.get
        for op in ops:
            if op.kind == CREATE:
                parent = to(op.parent, op.parent)  # type: ignore[union-attr]
                made.add(op.ino)
                inos.add(op.ino)
                inos.add(parent)
                names.add((parent, op.name))  # type: ignore[union-attr]
            elif op.kind in (CONTENT, SETATTR, SETXATTR):
                inos.add(to(op.ino, op.ino))
            elif op.kind in (LINK, UNLINK, RMDIR):
                parent, ino = to(op.parent, op.parent), to(op.ino, op.ino)  # type: ignore[union-attr]
                inos.update((parent, ino))
                names.add((parent, op.name))  # type: ignore[union-attr]
                if op.kind == RMDIR:
                    emptied.add(ino)
            elif op.kind == RENAME:
                parent, new = to(op.parent, op.parent), to(op.new_parent, op.new_parent)  # type: ignore[union-attr]
                inos.update((parent, new, to(op.ino, op.ino)))
                names.update(((parent, op.name), (new, op.new_name)))  # type: ignore[union-attr]
                if op.over:  # type: ignore[union-attr]
                    inos.add(to(op.over, op.over))  # type: ignore[union-attr]
        self.load_nodes(inos)
        absent = {ino for ino in made if self.node_map[ino] is None}
        # A directory made by these operations holds nothing in the database.
        self.load_names(key for key in names if key[0] not in absent)
        for key in names:
            if key[0] in absent and key not in self.name_map:
                self.name_map[key] = Name(key[0], key[1], 0, 0, -1)
        for ino in absent:
            self._children[ino] = 0
        want = [i for i in emptied if i not in self._children]
        if want:
            counts = self.source.child_counts(want)
            self._children.update((i, counts.get(i, 0)) for i in want)
        self._prefetch_blocks(ops, redirects)

    def _prefetch_blocks(self, ops: Iterable[Op], redirects: dict[int, int]) -> None:
        ranges: list[tuple[int, int, int]] = []
        for op in ops:
            if op.kind not in (CONTENT, UNLINK):
                continue
            node = self.node_map.get(redirects.get(op.ino, op.ino))
            if node is None or node.orig_size <= BLOCK:
                continue
            if op.kind == CONTENT and not op.full:  # type: ignore[union-attr]
                ranges.extend(self._wanted(node.ino, [i for i, _ in op.blocks], op.size // BLOCK))  # type: ignore[union-attr]
            elif op.kind == CONTENT:
                ranges.extend(self._wanted(node.ino, [], 1))
        if ranges:
            self._take_blocks(ranges)

    def load_nodes(self, inos: Iterable[int]) -> None:
        want = [ino for ino in inos if ino not in self.node_map]
        if not want:
            return
        for ino in want:
            self.node_map[ino] = None
        for node in self.source.nodes(want):
            self.node_map[node.ino] = node

    def load_names(self, keys: Iterable[NameKey]) -> None:
        want = [key for key in keys if key not in self.name_map]
        if not want:
            return
        for key in want:
            self.name_map[key] = Name(key[0], key[1], 0, 0, -1)
        for name in self.source.names(want):
            self.name_map[name.parent, name.name] = name

    # Reading.

    def node(self, ino: int) -> Node | None:
        """The inode as it is now in this commit; None when it does not exist."""
        try:
            found = self.node_map[ino]
        except KeyError:
            self.load_nodes((ino,))
            found = self.node_map[ino]
        return None if found is None or found.gone else found

    def attr(self, ino: int) -> Attr | None:
        """The inode as a reader will see it after this commit."""
        found = self.node(ino)
        if found is None:
            return None
        return found.attr()._replace(born=self.seq) if found.changed else found.attr()

    def slot(self, parent: int, name: bytes) -> Name:
        """The entry's object, present (`ino`) or absent (`ino` 0)."""
        try:
            return self.name_map[parent, name]
        except KeyError:
            self.load_names(((parent, name),))
            return self.name_map[parent, name]

    def name(self, parent: int, name: bytes) -> Name | None:
        found = self.slot(parent, name)
        return found if found.ino else None

    def placed_in(self, ino: int) -> set[int]:
        """The directories in which this commit gave the inode a name, as far as it did."""
        return {parent for parent, _ in self._placed.get(ino, ())}

    def names_of(self, ino: int) -> list[Name]:
        """All present names of an inode, in order of (parent, name)."""
        if ino not in self._names_of_loaded:
            self._names_of_loaded.add(ino)
            for name in self.source.names_of(ino):
                self.name_map.setdefault((name.parent, name.name), name)
                self._placed.setdefault(ino, set()).add((name.parent, name.name))
        keys = self._placed.get(ino, set())
        return [self.name_map[key] for key in sorted(keys) if self.name_map[key].ino == ino]

    def is_empty(self, ino: int) -> bool:
        """Whether the directory has no entry now."""
        if ino not in self._children:
            self._children[ino] = self.source.child_counts((ino,)).get(ino, 0)
        return self._children[ino] + self._child_delta.get(ino, 0) == 0

    def inside(self, ino: int, ancestor: int) -> bool:
        """Whether `ino` is `ancestor` or lies below it, by walking up the parents."""
        seen = set()
        while ino not in seen:
            if ino == ancestor:
                return True
            seen.add(ino)
            node = self.node(ino)
            if node is None or node.parent == 0:
                return False
            ino = node.parent
        return False

    def gone(self, ino: int) -> GoneFile | None:
        return self.gone_new.get(ino) or self.source.gone(ino)

    # Blocks.

    def _wanted(self, ino: int, singles: Sequence[int], tail: int) -> list[tuple[int, int, int]]:
        """Ranges to load so that the blocks `singles` and all from `tail` on are known."""
        tail = max(tail, 1)
        known_tail, known = self._block_known.setdefault(ino, (IDX_END, set()))
        ranges: list[tuple[int, int, int]] = []
        for idx in singles:
            if 1 <= idx < min(tail, known_tail) and idx not in known:
                known.add(idx)
                if ranges and ranges[-1][2] == idx - 1:
                    ranges[-1] = (ino, ranges[-1][1], idx)
                else:
                    ranges.append((ino, idx, idx))
        if tail < known_tail:
            ranges.append((ino, tail, known_tail - 1))
            self._block_known[ino] = (tail, known)
        return ranges

    def _take_blocks(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        for ino, idx, parts, born in self.source.blocks(ranges):
            self.block_map.setdefault(ino, {}).setdefault(idx, Block(parts, born))

    def blocks(self, node: Node, singles: Sequence[int], tail: int) -> dict[int, Block]:
        """The file's block rows (index ≥ 1), with those of `singles` and from `tail` on surely loaded."""
        if node.orig_size > BLOCK:
            ranges = self._wanted(node.ino, singles, tail)
            if ranges:
                self._take_blocks(ranges)
        return self.block_map.setdefault(node.ino, {})

    def set_block(self, node: Node, idx: int, parts: bytes | None) -> None:
        """Give block `idx` new parts. For idx ≥ 1 the caller has loaded it through `blocks`."""
        if idx == 0:
            node.parts = parts
            node.changed = True
            return
        rows = self.block_map.setdefault(node.ino, {})
        row = rows.get(idx)
        if row is None:
            if parts is None:
                return
            row = rows[idx] = Block(None, -1)
        row.parts = parts
        row.touched = True

    def get_block(self, node: Node, idx: int) -> bytes | None:
        """Parts of block `idx` now, loading it when need be."""
        if idx == 0:
            return node.parts
        row = self.blocks(node, (idx,), IDX_END).get(idx)
        return None if row is None else row.parts

    # Changing.

    def add_node(self, node: Node) -> None:
        """Add an inode the database does not hold (or held once: then it keeps what is stored)."""
        before = self.node_map.get(node.ino)
        assert before is None or before.gone, "an inode is added twice"
        if before is not None:
            node.orig_born, node.orig_parts = before.orig_born, before.orig_parts
            node.orig_size, node.orig_mode = before.orig_size, before.orig_mode
        self.node_map[node.ino] = node
        self._children.setdefault(node.ino, 0)

    def place(self, slot: Name, ino: int, writer: int) -> None:
        """Give the (absent) entry an inode."""
        assert slot.ino == 0, "an entry is placed over another"
        slot.ino, slot.writer, slot.touched = ino, writer, True
        self._child_delta[slot.parent] = self._child_delta.get(slot.parent, 0) + 1
        self._placed.setdefault(ino, set()).add((slot.parent, slot.name))

    def take(self, slot: Name) -> None:
        """Remove the entry."""
        assert slot.ino != 0, "an entry is taken twice"
        slot.ino, slot.touched = 0, True
        self._child_delta[slot.parent] = self._child_delta.get(slot.parent, 0) - 1

    def drop(self, node: Node, gone: GoneFile | None) -> None:
        """The inode's last link is gone: it goes with its blocks."""
        if node.orig_size > BLOCK or node.ino in self.block_map:
            for row in self.blocks(node, (), 1).values():
                row.parts, row.touched = None, True
        node.gone = node.changed = True
        node.parts = None
        if gone is not None:
            self.gone_new[node.ino] = gone
