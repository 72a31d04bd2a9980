"""What changed between two retained states of a filesystem: an index range, then the values at both ends.

Rows born or dead between the two are the only ones that can differ (namespace.md section 2, query 5). Their
keys are read, the values at both ends compared, and what is equal is dropped; what is left is told by path.
It costs what changed, not what exists. The difference of a state and an earlier one is the reverse.

An inode that goes by another name is *renamed*, a file whose inode is another under the same name (an editor
that writes beside and renames) is *modified*. A directory that was renamed is one change: what is below it
is not listed, unless it changed too. Times of directories and the change time never count.
Content is compared by its parts, unread: the same bytes in other blobs (once cut short, then whole) differ.
"""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from fsd.meta.database import Tx
from fsd.meta.sql import chunks, values_list
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.errors import TooLarge
from fsd.model.limits import DIFF_ROWS_MAX
from fsd.model.plain import dataclass, field
from fsd.service import namespace

# Of table t, its key columns k: fs, :a, :b, :b, fs, :a, :b, :a, limit.
KEYS_SQL: Final = (
    "SELECT {k} FROM {t} WHERE fs=? AND born>? AND born<=? AND +died>? UNION "
    "SELECT {k} FROM {t} WHERE fs=? AND died>? AND died<=? AND died<140737488355327 AND +born<=? LIMIT ?"
)
# The names of inodes at a seq; `{}` is a list of rows, whose parameters come first: then fs, seq, seq.
NAMES_AT_SQL: Final = (
    "SELECT d.ino, d.parent, d.name FROM {} AS k CROSS JOIN dentry d "
    "WHERE d.fs=? AND d.ino=k.column1 AND +d.died>? AND +d.born<=?"
)
# What keys of names mean at a seq; rows first, then fs, seq, fs, seq.
ENTRIES_AT_SQL: Final = (
    "SELECT d.parent, d.name, d.ino FROM {} AS k CROSS JOIN dentry d "
    "WHERE d.fs=? AND d.parent=k.column1 AND d.name=k.column2 AND +d.born<=? AND d.died="
    "(SELECT min(x.died) FROM dentry x WHERE x.fs=? AND x.parent=k.column1 AND x.name=k.column2 AND x.died>?)"
)
# Blocks at a seq; rows first, then fs, seq, seq.
BLOCKS_AT_SQL: Final = (
    "SELECT b.ino, b.idx, b.parts FROM {} AS k CROSS JOIN block b "
    "WHERE b.fs=? AND b.ino=k.column1 AND b.idx=k.column2 AND +b.died>? AND +b.born<=?"
)
KEYS_OF: Final = {"inode": "ino", "dentry": "parent, name", "block": "ino, idx"}
Key = tuple[int, bytes]

ADDED: Final = "added"
REMOVED: Final = "removed"
MODIFIED: Final = "modified"
ATTRIBUTES: Final = "attributes"
RENAMED: Final = "renamed"
REPLACED: Final = "replaced"  # by something of another type


class Change(NamedTuple):
    """One path that differs. `before` and `after`: what was and is there, None: nothing. `source`: where it
    was before a rename. `content`: whether its bytes (or a symlink's target) differ."""

    path: bytes
    kind: str
    before: Attr | None
    after: Attr | None
    source: bytes | None = None
    content: bool = False


@dataclass(slots=True)
class Keys:
    """Keys of the rows that may differ."""

    names: set[Key] = field(default_factory=set)
    inos: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)  # inodes with blocks that may differ
    rows: set[tuple[int, int]] = field(default_factory=set)  # those blocks: inode and index


def changed_keys(tx: Tx, fs: int, first: int, last: int) -> Keys:
    """The keys with rows born or dead in (first, last], which are retained. Raises `TooLarge`."""
    left = DIFF_ROWS_MAX
    found: dict[str, list[tuple[int, ...]]] = {}
    for table, key in KEYS_OF.items():
        bounds = (fs, first, last, last, fs, first, last, first, left + 1)
        rows = tx.all(KEYS_SQL.format(t=table, k=key), bounds)
        left -= len(rows)
        if left < 0:
            raise TooLarge(
                f"more than {DIFF_ROWS_MAX} rows differ",
                hint="compare with a checkpoint in between",
            )
        found[table] = rows
    return Keys(
        {(row[0], row[1]) for row in found["dentry"]},  # type: ignore[misc]
        {row[0] for row in found["inode"]},
        {row[0] for row in found["block"]},
        {(row[0], row[1]) for row in found["block"]},
    )


class Side:
    """One of the two states: what keys mean there, and where inodes are. `at` None: the live rows."""

    def __init__(self, tx: Tx, fs: int, at: int) -> None:
        self._tx, self._fs, self.at = tx, fs, at
        self._attrs: dict[int, Attr | None] = {}
        self._names: dict[int, list[Key]] = {}
        self._known: dict[int, int] = {}  # inodes that go by another's number
        self._own: dict[int, int] = {}  # and back

    def succeed(self, old: int, new: int) -> None:
        """The directory `new` goes by the number of `old`, which is not there, from now on: before any names
        are asked for. `attr` still tells the number it has."""
        assert not self._names, "names would tell the other number"
        self._attrs[old], self._attrs[new] = self.attr(new), None
        self._known[new], self._own[old] = old, new

    def known_as(self, ino: int) -> int:
        return self._known.get(ino, ino)

    def load_attrs(self, inos: Iterable[int]) -> None:
        wanted = [ino for ino in dict.fromkeys(inos) if ino not in self._attrs]
        if wanted:
            self._attrs.update(zip(wanted, namespace.attrs(self._tx, self._fs, wanted, self.at)))

    def use(self, tx: Tx) -> None:
        """Read on in another transaction, which sees the same state."""
        self._tx = tx

    def attr(self, ino: int) -> Attr | None:
        if ino not in self._attrs:
            self.load_attrs((ino,))
        return self._attrs[ino]

    def entries(self, keys: Iterable[Key]) -> dict[Key, int]:
        """What is under `keys`: those that are there."""
        found: dict[Key, int] = {}
        for some in chunks(sorted(keys)):
            rows, values = values_list(some)
            bound = (*values, self._fs, self.at, self._fs, self.at)
            for parent, name, ino in self._tx.all(ENTRIES_AT_SQL.format(rows), bound):
                found[parent, name] = ino
        return found

    def load_names(self, inos: Iterable[int]) -> None:
        wanted = [ino for ino in dict.fromkeys(inos) if ino not in self._names]
        for some in chunks([self._own.get(ino, ino) for ino in wanted]):
            found: dict[int, set[Key]] = defaultdict(set)
            rows, values = values_list([(ino,) for ino in some])
            bound = (*values, self._fs, self.at, self.at)
            for ino, parent, name in self._tx.all(NAMES_AT_SQL.format(rows), bound):
                found[ino].add((self.known_as(parent), name))
            self._names.update((self.known_as(ino), sorted(found[ino])) for ino in some)

    def names(self, ino: int) -> list[Key]:
        if ino not in self._names:
            self.load_names((ino,))
        return self._names[ino]

    def load_paths(self, directories: Iterable[int]) -> None:
        """The names of directories and of all above them, a level at a time."""
        wanted = {ino for ino in directories if ino != ROOT_INO}
        while wanted:
            self.load_names(wanted)
            above = {parent for ino in wanted for parent, _ in self._names[ino]}
            wanted = {ino for ino in above if ino != ROOT_INO and ino not in self._names}

    def path(self, key: Key) -> bytes:
        """The path of an entry that is there."""
        parts = [key[1]]
        parent = key[0]
        while parent != ROOT_INO:
            ((parent, name),) = self.names(parent)
            parts.append(name)
        return b"/" + b"/".join(reversed(parts))

    def block_rows(self, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Single blocks by inode and index, those that are no holes."""
        found: dict[tuple[int, int], bytes] = {}
        for some in chunks(keys):
            rows, values = values_list(some)
            bound = (*values, self._fs, self.at, self.at)
            for ino, idx, parts in self._tx.all(BLOCKS_AT_SQL.format(rows), bound):
                found[ino, idx] = parts
        return found

    def content(self, inos: Iterable[int]) -> dict[int, list[tuple[int, bytes]]]:
        """The block rows of inodes, all of them."""
        return {ino: namespace.block_rows(self._tx, self._fs, ino, 0, 2**40, self.at) for ino in inos}


class Difference:
    """What differs between the retained states `first` and `last` of a filesystem, in one transaction."""

    def __init__(self, tx: Tx, fs: int, first: int, last: int) -> None:
        keys = changed_keys(tx, fs, min(first, last), max(first, last))
        self.before, self.after = Side(tx, fs, first), Side(tx, fs, last)
        self._keys = keys
        self._entries_before = self.before.entries(keys.names)
        self._entries_after = self.after.entries(keys.names)
        self._moved = {
            key for key in keys.names if self._entries_before.get(key) != self._entries_after.get(key)
        }
        inos = keys.inos | keys.blocks
        inos.update(self._entries_before.get(key, 0) for key in self._moved)
        inos.update(self._entries_after.get(key, 0) for key in self._moved)
        inos.discard(0)
        self.before.load_attrs(inos)
        self.after.load_attrs(inos)
        self._other_blocks = self._compare_blocks()

    def _compare_blocks(self) -> set[int]:
        """Inodes on both sides whose blocks from the second on differ."""
        both = {
            ino
            for ino in self._keys.blocks
            if self.before.attr(ino) is not None and self.after.attr(ino) is not None
        }
        rows = sorted(row for row in self._keys.rows if row[0] in both)
        old, new = self.before.block_rows(rows), self.after.block_rows(rows)
        return {row[0] for row in rows if old.get(row) != new.get(row)}

    def changes(self) -> list[Change]:
        """All changes in order of path bytes (of the new path, where there are two)."""
        found = [*self._joined(list(self._of_names())), *self._of_inodes()]
        return sorted(found, key=lambda change: (change.path, change.kind))

    def _joined(self, found: list[Change]) -> Iterator[Change]:
        """What went and what came under one path of two directories, since the one above was replaced (a tree
        that was built anew): one change, as where the directory is the same."""
        went = {change.path: change for change in found if change.kind == REMOVED}
        came = {change.path: change for change in found if change.kind == ADDED}
        for change in found:
            old, new = went.get(change.path), came.get(change.path)
            if old is None or new is None or change not in (old, new) or not self._succeeds(old, new):
                yield change
            elif change is new:
                assert old.before is not None, "it was there"
                assert new.after is not None, "it is there"
                yield from self._succeeded(change.path, old.before, new.after)

    def _succeeds(self, old: Change, new: Change) -> bool:
        """Whether what went is nowhere now and what came was nowhere before."""
        was, now = old.before, new.after
        return (
            was is not None
            and now is not None
            and self.after.attr(was.ino) is None
            and self.before.attr(now.ino) is None
        )

    # -- names ---------------------------------------------------------------------------------------

    def _of_names(self) -> Iterator[Change]:
        lost: dict[int, list[Key]] = defaultdict(list)  # inode → names it does not have any more
        won: dict[int, list[Key]] = defaultdict(list)
        for key in sorted(self._moved):
            old, new = self._entries_before.get(key), self._entries_after.get(key)
            if old is not None:
                lost[old].append(key)
            if new is not None:
                won[new].append(key)
        self.before.load_paths(key[0] for key in self._moved if key in self._entries_before)
        self.after.load_paths(key[0] for key in self._moved if key in self._entries_after)
        done: set[Key] = set()  # names told of as modified, on both sides
        for key in sorted(self._moved):
            if self._is_modified(key):
                done.add(key)
                yield from self._modified(key)
        for ino in sorted(lost.keys() | won.keys()):
            gone = [key for key in lost[ino] if key not in done]
            come = [key for key in won[ino] if key not in done]
            yield from self._of_one(ino, gone, come)

    def _is_modified(self, key: Key) -> bool:
        """Something of one type on both sides, under inodes each of which is there on one side only."""
        old, new = self._entries_before.get(key), self._entries_after.get(key)
        if old is None or new is None:
            return False
        was, now = self.before.attr(old), self.after.attr(new)
        if (
            was is None
            or now is None
            or self.after.attr(old) is not None
            or self.before.attr(new) is not None
        ):
            return False
        return stat.S_IFMT(was.mode) == stat.S_IFMT(now.mode)

    def _modified(self, key: Key) -> Iterator[Change]:
        old, new = self._entries_before[key], self._entries_after[key]
        was, now = self.before.attr(old), self.after.attr(new)
        assert was is not None, "it was there"
        assert now is not None, "it is there"
        yield from self._succeeded(self.after.path(key), was, now)

    def _succeeded(self, path: bytes, was: Attr, now: Attr) -> Iterator[Change]:
        """Another inode under the same path; nothing where it is the same to look at."""
        if stat.S_IFMT(was.mode) != stat.S_IFMT(now.mode):
            yield Change(path, REPLACED, was, now, None, True)
            return
        old, new = was.ino, now.ino
        content = _head_differs(was, now) or (
            was.size == now.size and self.before.content((old,))[old] != self.after.content((new,))[new]
        )
        if content or attributes_differ(was, now):
            kind = MODIFIED if content else ATTRIBUTES
            yield Change(path, kind, was, now, None, content)

    def _of_one(self, ino: int, gone: Sequence[Key], come: Sequence[Key]) -> Iterator[Change]:
        """The names an inode lost and got: pairs of them are renames where it is there on both sides."""
        was, now = self.before.attr(ino), self.after.attr(ino)
        gone, come, same = self._apart(gone, come)
        content = self._content_differs(ino)
        if same and was is not None and now is not None and (content or attributes_differ(was, now)):
            kind = MODIFIED if content else ATTRIBUTES
            yield from (Change(path, kind, was, now, None, content) for path in same)
        pairs = min(len(gone), len(come)) if was is not None and now is not None else 0
        for old, new in zip(gone[:pairs], come[:pairs]):
            yield Change(self.after.path(new), RENAMED, was, now, self.before.path(old), content)
        for key in gone[pairs:]:
            if key not in self._entries_after or not self._takes_over(key):
                yield Change(self.before.path(key), REMOVED, was, None)
        for key in come[pairs:]:
            there = self._entries_before.get(key)
            if there is None or not self._takes_over(key):
                yield Change(self.after.path(key), ADDED, None, now)
            else:
                yield Change(self.after.path(key), REPLACED, self.before.attr(there), now, None, True)

    def _apart(
        self, gone: Sequence[Key], come: Sequence[Key]
    ) -> tuple[Sequence[Key], Sequence[Key], list[bytes]]:
        """Names lost and got, without those that are one path: a directory above was replaced by another that
        has the inode as well. Third, those paths."""
        if not gone or not come:
            return gone, come, []
        here = {self.before.path(key): key for key in gone}
        same = {path: key for key in come if (path := self.after.path(key)) in here}
        if not same:
            return gone, come, []
        left, stay = {here[path] for path in same}, set(same.values())
        return (
            [one for one in gone if one not in left],
            [one for one in come if one not in stay],
            sorted(same),
        )

    def _takes_over(self, key: Key) -> bool:
        """Whether what is under `key` now came there as new: told as one change, `replaced`."""
        old, new = self._entries_before[key], self._entries_after[key]
        return self.before.attr(new) is None and self.after.attr(old) is None

    # -- inodes --------------------------------------------------------------------------------------

    def _of_inodes(self) -> Iterator[Change]:
        """What changed in place: inodes on both sides that are not told of by their names alone."""
        told: dict[int, tuple[bool, Attr, Attr]] = {}
        for ino in self._keys.inos | self._keys.blocks:
            was, now = self.before.attr(ino), self.after.attr(ino)
            if was is None or now is None:
                continue
            content = self._content_differs(ino)
            if content or attributes_differ(was, now):
                told[ino] = (content, was, now)
        self.after.load_names(told)
        self.after.load_paths(key[0] for ino in told for key in self.after.names(ino))
        for ino, (content, was, now) in told.items():
            kind = MODIFIED if content else ATTRIBUTES
            if ino == ROOT_INO:
                yield Change(b"/", kind, was, now)
            for key in self.after.names(ino):
                if key not in self._moved:  # else told of as renamed or added, with both attributes
                    yield Change(self.after.path(key), kind, was, now, None, content)

    def _content_differs(self, ino: int) -> bool:
        was, now = self.before.attr(ino), self.after.attr(ino)
        if was is None or now is None:
            return False
        return ino in self._other_blocks or _head_differs(was, now)


def _head_differs(was: Attr, now: Attr) -> bool:
    """Size, first block or target."""
    if was.is_dir and now.is_dir:
        return False
    return (was.size, was.parts, was.target, was.device) != (now.size, now.parts, now.target, now.device)


def attributes_differ(was: Attr, now: Attr) -> bool:
    """Mode, owner, xattrs; of anything but a directory also its time."""
    same = (was.mode, was.uid, was.gid, was.xattrs) == (now.mode, now.uid, now.gid, now.xattrs)
    return not same or (not was.is_dir and was.mtime != now.mtime)
