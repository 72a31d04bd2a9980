"""A view's rows in the database: loading them (`DbSource`) and writing what changed (`write`).

How a row changes is namespace.md section 2, query 3: with P = fs.pinned and c the new seq, a row with
born > P is updated (or deleted) in place and gets born = c; else it dies at c and another is born. One
reference per distinct blob hash of each row version that names it: versions that die keep theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from fsd.meta.database import Tx
from fsd.meta.sql import chunks, in_list, values_list
from fsd.model import blocks
from fsd.service.view import LIVE, GoneFile, Name, NameKey, Node, View

COLUMNS: Final = (
    "ino, mode, nlink, uid, gid, size, atime, mtime, ctime, rdev, target, parent, parts, xattrs, "
    "cseq, writer, grown, born"
)
NODES: Final = f"SELECT {COLUMNS} FROM inode WHERE fs=? AND died=140737488355327 AND ino IN "
NAMES: Final = (
    "SELECT d.parent, d.name, d.ino, d.writer, d.born FROM {} AS k CROSS JOIN dentry d "
    "WHERE d.fs=? AND d.parent=k.column1 AND d.name=k.column2 AND d.died=140737488355327"
)
BLOCKS: Final = (
    "SELECT b.ino, b.idx, b.parts, b.born FROM {} AS k CROSS JOIN block b "
    "WHERE b.fs=? AND b.ino=k.column1 AND b.idx>=k.column2 AND b.idx<=k.column3 AND b.died=140737488355327"
)
NAMES_OF: Final = (
    "SELECT parent, name, ino, writer, born FROM dentry WHERE fs=? AND ino=? AND +died=140737488355327"
)
CHILDREN: Final = (
    "SELECT parent, count(*) FROM dentry "
    "WHERE fs=? AND +died=140737488355327 AND parent IN {} GROUP BY parent"
)


class DbSource:
    """The live rows of filesystem `fs` in `tx` (a `view.Source`)."""

    def __init__(self, tx: Tx, fs: int) -> None:
        self.tx, self.fs = tx, fs

    def nodes(self, inos: Sequence[int]) -> list[Node]:
        found: list[Node] = []
        for some in chunks(inos):
            marks, values = in_list(some)
            found.extend(Node(*row) for row in self.tx.all(NODES + marks, (self.fs, *values)))
        return found

    def names(self, keys: Sequence[NameKey]) -> list[Name]:
        found: dict[NameKey, Name] = {}
        for some in chunks(keys):
            rows, values = values_list(some)
            for row in self.tx.all(NAMES.format(rows), (*values, self.fs)):
                found[row[0], row[1]] = Name(*row)
        return list(found.values())

    def names_of(self, ino: int) -> list[Name]:
        return [Name(*row) for row in self.tx.all(NAMES_OF, (self.fs, ino))]

    def child_counts(self, parents: Sequence[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for some in chunks(parents):
            marks, values = in_list(some)
            rows = self.tx.all(CHILDREN.format(marks), (self.fs, *values))
            found.update((int(parent), int(count)) for parent, count in rows)
        return found

    def blocks(self, ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, bytes, int]]:
        found: dict[tuple[int, int], tuple[int, int, bytes, int]] = {}
        for some in chunks(ranges):
            rows, values = values_list(some)
            for ino, idx, parts, born in self.tx.all(BLOCKS.format(rows), (*values, self.fs)):
                found[ino, idx] = (ino, idx, parts, born)
        return list(found.values())

    def gone(self, ino: int) -> GoneFile | None:
        row = self.tx.one(
            "SELECT parent, name, mode, uid, gid, xattrs FROM gone WHERE fs=? AND ino=?",
            (self.fs, ino),
        )
        return None if row is None else GoneFile(*row)


class Written:
    """What `write` did, for the commit: count changes of blobs, usage, and what the feed tells."""

    def __init__(self) -> None:
        self.refs: dict[bytes, int] = defaultdict(int)
        self.storage_bytes = 0
        self.inodes = 0
        self.changed_inos: list[int] = []
        self.changed_names: list[NameKey] = []

    @property
    def anything(self) -> bool:
        return bool(self.changed_inos or self.changed_names)


class _Table:
    """Changes to one table, gathered and written by kind. `keys` are the columns after `fs` in the key."""

    def __init__(self, name: str, keys: Sequence[str], values: Sequence[str]) -> None:
        key = " AND ".join(f"{column}=?" for column in ("fs", *keys)) + " AND died=140737488355327"
        columns = ["fs", *keys, *values, "born", "died"]
        self.insert_sql = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({','.join('?' * len(columns))})"
        self.update_sql = f"UPDATE {name} SET {', '.join(f'{v}=?' for v in values)}, born=? WHERE {key}"
        self.delete_sql = f"DELETE FROM {name} WHERE {key}"
        self.die_sql = f"UPDATE {name} SET died=? WHERE {key}"


class _Changes:
    """Gathered row changes of one table for one commit."""

    def __init__(self, table: _Table, fs: int, seq: int, pinned: int) -> None:
        self.table, self.fs, self.seq, self.pinned = table, fs, seq, pinned
        self.inserts: list[tuple[Any, ...]] = []
        self.updates: list[tuple[Any, ...]] = []
        self.deletes: list[tuple[Any, ...]] = []
        self.deaths: list[tuple[Any, ...]] = []

    def change(self, key: tuple[Any, ...], born: int, values: tuple[Any, ...] | None) -> bool:
        """Change the row of `key` whose stored version has `born` (-1: none) to `values` (None: removed).
        Returns whether the stored version goes (its references with it)."""
        if born < 0:
            if values is not None:
                self.inserts.append((self.fs, *key, *values, self.seq, LIVE))
            return False
        in_place = born > self.pinned
        if in_place and values is not None:
            self.updates.append((*values, self.seq, self.fs, *key))
        elif in_place:
            self.deletes.append((self.fs, *key))
        else:
            self.deaths.append((self.seq, self.fs, *key))
            if values is not None:
                self.inserts.append((self.fs, *key, *values, self.seq, LIVE))
        return in_place

    def run(self, tx: Tx) -> None:
        """Deaths before births: a key has one live row at any time."""
        for sql, rows in (
            (self.table.delete_sql, self.deletes),
            (self.table.die_sql, self.deaths),
            (self.table.update_sql, self.updates),
            (self.table.insert_sql, self.inserts),
        ):
            if rows:
                tx.many(sql, rows)


_INODE: Final = _Table("inode", ("ino",), COLUMNS.split(", ")[1:-1])
_DENTRY: Final = _Table("dentry", ("parent", "name"), ("ino", "writer"))
_BLOCK: Final = _Table("block", ("ino", "idx"), ("parts",))


class _Counting:
    """References and bytes of parts, decoding each stored form once."""

    def __init__(self, written: Written) -> None:
        self.written = written
        self._known: dict[bytes, tuple[set[bytes], int]] = {}

    def _look(self, raw: bytes) -> tuple[set[bytes], int]:
        found = self._known.get(raw)
        if found is None:
            parts = blocks.decode(raw)
            found = self._known[raw] = blocks.hashes(parts), blocks.stored_bytes(parts)
        return found

    def replace(self, old: bytes | None, new: bytes | None, *, old_goes: bool) -> None:
        """A row's parts change from `old` to `new`; with `old_goes` no version keeps the old ones."""
        if old_goes and old == new:
            return
        refs = self.written.refs
        if old is not None:
            digests, size = self._look(old)
            self.written.storage_bytes -= size
            if old_goes:
                for digest in digests:
                    refs[digest] -= 1
        if new is not None:
            digests, size = self._look(new)
            self.written.storage_bytes += size
            for digest in digests:
                refs[digest] += 1


def _node_values(node: Node) -> tuple[Any, ...]:
    return (
        node.mode,
        node.nlink,
        node.uid,
        node.gid,
        node.size,
        node.atime,
        node.mtime,
        node.ctime,
        node.rdev,
        node.target,
        node.parent,
        node.parts,
        node.xattrs,
        node.cseq,
        node.writer,
        node.grown,
    )


def write(tx: Tx, view: View, fs: int, seq: int, pinned: int) -> Written:
    """Write all that changed in `view` as commit `seq` of filesystem `fs`. Blob counts, the change row and
    the filesystem's row are the caller's."""
    written = Written()
    counting = _Counting(written)
    inodes = _Changes(_INODE, fs, seq, pinned)
    for node in view.node_map.values():
        if node is not None and node.changed:
            _change_node(inodes, written, counting, node)
    kinds = [inodes]
    if view.name_map:
        names = _Changes(_DENTRY, fs, seq, pinned)
        kinds.append(names)
        for name in view.name_map.values():
            if name.touched and (name.ino or name.orig_ino):
                values = (name.ino, name.writer) if name.ino else None
                names.change((name.parent, name.name), name.orig_born, values)
                written.changed_names.append((name.parent, name.name))
    if view.block_map:
        rows = _Changes(_BLOCK, fs, seq, pinned)
        kinds.append(rows)
        for ino, of_file in view.block_map.items():
            for idx, row in of_file.items():
                if row.touched and row.parts != row.orig_parts:
                    goes = rows.change((ino, idx), row.orig_born, None if row.parts is None else (row.parts,))
                    counting.replace(row.orig_parts, row.parts, old_goes=goes)
    for changes in kinds:
        changes.run(tx)
    if view.gone_new:
        _remember_gone(tx, view, fs, seq)
    return written


def _change_node(inodes: _Changes, written: Written, counting: _Counting, node: Node) -> None:
    stored = node.orig_born >= 0
    if node.gone and not stored:
        return
    goes = inodes.change((node.ino,), node.orig_born, None if node.gone else _node_values(node))
    new_parts = None if node.gone else node.parts
    if node.orig_parts is not None or new_parts is not None:
        counting.replace(node.orig_parts, new_parts, old_goes=goes)
    written.inodes += (0 if node.gone else 1) - (1 if stored else 0)
    written.changed_inos.append(node.ino)


def _remember_gone(tx: Tx, view: View, fs: int, seq: int) -> None:
    rows = [
        (fs, ino, seq, g.parent, g.name, g.mode, g.uid, g.gid, g.xattrs)
        for ino, g in view.gone_new.items()
        # Made and removed in one commit: nobody else can have changed it.
        if (node := view.node_map[ino]) is not None and node.orig_born >= 0
    ]
    if rows:
        tx.many(
            "INSERT INTO gone (fs, ino, seq, parent, name, mode, uid, gid, xattrs) "
            "VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING",
            rows,
        )
