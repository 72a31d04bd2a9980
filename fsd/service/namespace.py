"""Reading the live namespace: the mount's questions, and paths.

Each question is a bounded number of queries, none per entry (namespace.md section 2, queries 1 and 2). All
questions of one request see one state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.attrs import ROOT_INO, Attr, Entry
from fsd.model.errors import TooLarge, UsageError
from fsd.model.limits import DIR_INLINE_MAX, NS_BATCH_MAX, NS_BYTES_MAX
from fsd.service.access import FsRef, no_file_system
from fsd.service.view import decode_xattrs
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE

_I: Final = (
    "i.ino, i.mode, i.nlink, i.uid, i.gid, i.size, i.atime, i.mtime, i.ctime, i.rdev, i.target, i.parent, "
    "i.parts, i.xattrs, i.cseq, i.writer, i.born"
)
_ENTRY: Final = (
    f"SELECT d.name, d.born, {_I} FROM dentry d CROSS JOIN inode i "
    "WHERE d.fs=? AND d.died=140737488355327 AND i.fs=d.fs AND i.ino=d.ino AND i.died=140737488355327 AND "
)
LOOKUP_SQL: Final = _ENTRY + "d.parent=? AND d.name=?"
LIST_SQL: Final = _ENTRY + "d.parent=? AND d.name>? ORDER BY d.name LIMIT ?"
TREE_SQL: Final = f"SELECT d.parent, {_ENTRY.removeprefix('SELECT ')} d.parent IN "
ATTRS_SQL: Final = f"SELECT {_I} FROM inode i WHERE i.fs=? AND i.died=140737488355327 AND i.ino IN "
# How many entries directories have, and how many bytes their inodes' attributes.
WEIGHT_SQL: Final = (
    "SELECT d.parent, count(*), sum(coalesce(length(i.xattrs),0)) FROM dentry d CROSS JOIN inode i "
    "WHERE d.fs=? AND d.died=140737488355327 AND i.fs=d.fs AND i.ino=d.ino AND i.died=140737488355327 AND "
    "d.parent IN {} GROUP BY d.parent"
)
COUNT_SQL: Final = (
    "SELECT count(*) FROM (SELECT 1 FROM dentry "
    "WHERE fs=? AND parent=? AND died=140737488355327 LIMIT ?) AS c"
)
BLOCKS_SQL: Final = (
    "SELECT idx, parts FROM block WHERE fs=? AND ino=? AND idx>=? AND idx<? "
    "AND died=140737488355327 ORDER BY idx"
)
_XATTRS: Final = Attr._fields.index("xattrs")
_ENTRIES_MAX: Final = 4 * DIR_INLINE_MAX  # of one request in all; past that directories are left out
_COUNT_MAX: Final = 4096  # inodes or blocks of one question
_TREE_DIRS: Final = 200  # directories read by one query
_PATH_MAX: Final = 256
_LIST_CHUNK: Final = 1024  # entries read at a time: each may have 64 KiB of attributes
_FIXED: Final = 256  # bytes of an entry beside what varies much


def attr(row: Sequence[Any]) -> Attr:
    """An `Attr` from columns in its order."""
    made = Attr._make(row)
    return made if made.xattrs is None else made._replace(xattrs=decode_xattrs(row[_XATTRS]))


def entry(row: Sequence[Any]) -> Entry:
    """An `Entry` from (name, born, attr columns)."""
    return Entry(row[0], attr(row[2:]), row[1])


def weight(one: Attr) -> int:
    """About how many bytes an inode has in an answer."""
    held = one.xattrs
    varying = 0 if held is None else sum(len(name) + len(value) for name, value in held.items())
    return _FIXED + len(one.target or b"") + len(one.parts or b"") + varying


def lookup(tx: Tx, fs: int, parent: int, name: bytes) -> Entry | None:
    row = tx.one(LOOKUP_SQL, (fs, parent, name))
    return None if row is None else entry(row)


def list_some(tx: Tx, fs: int, parent: int, after: bytes, limit: int) -> list[Entry]:
    """Up to `limit` entries with names behind `after`, in order of name."""
    return [entry(row) for row in tx.all(LIST_SQL, (fs, parent, after, limit))]


def attrs(tx: Tx, fs: int, inos: Sequence[int]) -> list[Attr | None]:
    found: dict[int, Attr] = {}
    for some in chunks(list(dict.fromkeys(inos))):
        marks, values = in_list(some)
        for row in tx.all(ATTRS_SQL + marks, (fs, *values)):
            found[row[0]] = attr(row)
    return [found.get(ino) for ino in inos]


def resolve(tx: Tx, fs: int, names: Sequence[bytes]) -> list[Entry | None]:
    """Each component from the root; None from the first that does not exist. Symlinks are not followed."""
    found: list[Entry | None] = []
    parent: int | None = ROOT_INO
    for name in names:
        one = None if parent is None else lookup(tx, fs, parent, name)
        found.append(one)
        parent = one.attr.ino if one is not None and one.attr.is_dir else None
    return found


def root(tx: Tx, fs: int) -> Attr:
    found = attrs(tx, fs, (ROOT_INO,))[0]
    assert found is not None, "a filesystem has a root"
    return found


def blocks(tx: Tx, fs: int, ino: int, first: int, count: int) -> tuple[int, list[tuple[int, bytes]]] | None:
    """Content seq and the blocks [first, first+count) that are no holes, in stored form; None: no inode."""
    row = tx.one("SELECT cseq, parts FROM inode WHERE fs=? AND ino=? AND died=140737488355327", (fs, ino))
    if row is None:
        return None
    found: list[tuple[int, bytes]] = [(0, row[1])] if first == 0 and count and row[1] is not None else []
    found += tx.all(
        BLOCKS_SQL,
        (fs, ino, max(first, 1), first + count),
    )
    return row[0], found


class Namespace:
    """Any thread."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def ask(self, fs: FsRef, questions: Sequence[Any]) -> tuple[int, list[Any]]:
        """Answer the mount's questions (`wire.messages`) on one state; its seq and the answers in order.
        Raises `UsageError`, `TooLarge`, `NotFound`."""
        if not isinstance(questions, (tuple, list)):
            raise UsageError("questions are a list")
        if len(questions) > NS_BATCH_MAX:
            raise TooLarge(f"{len(questions)} questions in one request, at most {NS_BATCH_MAX}")
        checked = [_check(question) for question in questions]

        def read(tx: Tx) -> tuple[int, list[Any]]:
            row = tx.one("SELECT seq FROM fs WHERE id=?", (fs.id,))
            if row is None:
                raise no_file_system(fs.name)
            asking = _Asking(tx, fs.id)
            return int(row[0]), [asking.answer(*question) for question in checked]

        return self._db.read(read)


_FORMS: Final[dict[str, tuple[type, ...]]] = {
    LOOKUP: (int, bytes, int),
    LIST: (int, bytes, int),
    ATTRS: (tuple,),
    BLOCKS: (int, int, int),
    TREE: (int, int),
    PATH: (tuple,),
}


def _check(question: Any) -> tuple[str, tuple[Any, ...]]:
    """The question's kind and arguments, of the right types and in range."""
    if not isinstance(question, (tuple, list)) or not question or type(question[0]) is not str:
        raise UsageError("not a question")
    if question[0] not in _FORMS:
        raise UsageError("a question of an unknown kind")
    kind = question[0]
    args: tuple[Any, ...] = tuple(tuple(a) if isinstance(a, list) else a for a in question[1:])
    form = _FORMS[kind]
    if len(args) != len(form) or any(type(a) is not t for a, t in zip(args, form)):
        raise UsageError(f"a question {kind!r} has the wrong arguments")
    if any(type(a) is int and not 0 <= a < 2**63 for a in args):
        raise UsageError(f"a number in a question {kind!r} is out of range")
    if kind == ATTRS and (
        len(args[0]) > _COUNT_MAX or any(type(i) is not int or not 0 <= i < 2**63 for i in args[0])
    ):
        raise UsageError(f"attributes of at most {_COUNT_MAX} inode numbers")
    if kind == PATH and (len(args[0]) > _PATH_MAX or any(type(n) is not bytes for n in args[0])):
        raise UsageError(f"a path has at most {_PATH_MAX} names, in bytes")
    if kind == BLOCKS and args[2] > _COUNT_MAX:
        raise UsageError(f"at most {_COUNT_MAX} blocks at a time")
    return kind, args


class _Asking:
    """One request's questions; `left` bounds the entries of all its answers, `room` their bytes."""

    def __init__(self, tx: Tx, fs: int) -> None:
        self.tx, self.fs = tx, fs
        self.left = _ENTRIES_MAX
        self.room = NS_BYTES_MAX

    def answer(self, kind: str, args: tuple[Any, ...]) -> Any:
        if kind == LOOKUP:
            return self._lookup(*args)
        if kind == LIST:
            return self._list(*args)
        if kind == ATTRS:
            return self._attrs(args[0])
        if kind == BLOCKS:
            return self._blocks(*args)
        if kind == TREE:
            return self._tree(*args)
        return resolve(self.tx, self.fs, args[0])

    def _is_dir(self, ino: int) -> bool:
        found = attrs(self.tx, self.fs, (ino,))[0]
        return found is not None and found.is_dir

    def _spend(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise TooLarge("the answer would be too large", hint="ask for less at a time")

    def _attrs(self, inos: Sequence[int]) -> list[Attr | None]:
        found: list[Attr | None] = []
        for some in chunks(inos):
            got = attrs(self.tx, self.fs, some)
            self._spend(sum(weight(one) for one in got if one is not None))
            found += got
        return found

    def _blocks(self, ino: int, first: int, count: int) -> tuple[int, list[tuple[int, bytes]]] | None:
        found = blocks(self.tx, self.fs, ino, first, count)
        if found is not None:
            self._spend(sum(len(parts) for _, parts in found[1]))
        return found

    def _some(self, ino: int, after: bytes, limit: int) -> tuple[list[Entry], bool]:
        """Up to `limit` entries behind `after`, at least one, fewer where they are large; whether there are
        more."""
        found: list[Entry] = []
        while True:
            asked = min(_LIST_CHUNK, limit + 1 - len(found))
            page = list_some(self.tx, self.fs, ino, after, asked)
            for one in page:
                size = weight(one.attr)
                if len(found) == limit or (found and self.room < size):
                    return found, True
                self.room -= size
                self.left -= 1
                found.append(one)
            if len(page) < asked:
                return found, False
            after = page[-1].name

    def _lookup(self, parent: int, name: bytes, dir_max: int) -> Any:
        if not self._is_dir(parent):
            return None
        most = min(dir_max, DIR_INLINE_MAX, self.left)
        found = lookup(self.tx, self.fs, parent, name)
        if not most:
            return found, None
        count = self.tx.one(COUNT_SQL, (self.fs, parent, most + 1))
        if count is None or count[0] > most:
            return found, None
        listing, more = self._some(parent, b"", most)
        return found, None if more else listing

    def _list(self, ino: int, after: bytes, limit: int) -> Any:
        if not self._is_dir(ino):
            return None
        return self._some(ino, after, max(1, min(limit, DIR_INLINE_MAX, self.left)))

    def _tree(self, ino: int, limit: int) -> Any:
        """Breadth first, one query a level and batch of directories."""
        if not self._is_dir(ino):
            return None
        limit = min(limit, self.left)
        level: list[int] = [ino]
        answer: list[tuple[int, list[Entry]]] = []
        while level:
            below: list[int] = []
            for batch in chunks(level, _TREE_DIRS):
                fits = self._fitting(batch, limit, first=not answer)
                for directory, entries in self._list_all(batch[:fits]):
                    answer.append((directory, entries))
                    limit -= len(entries)
                    self.left -= len(entries)
                    below.extend(one.attr.ino for one in entries if one.attr.is_dir)
                if fits < len(batch):
                    return answer
            level = below
        return answer

    def _fitting(self, batch: Sequence[int], limit: int, *, first: bool) -> int:
        """How many of the first directories of `batch` fit into `limit` entries together."""
        if first:
            limit = max(limit, min(DIR_INLINE_MAX, self.left))
        marks, values = in_list(batch)
        rows = self.tx.all(WEIGHT_SQL.format(marks), (self.fs, *values))
        known = {directory: (count, count * _FIXED + int(size)) for directory, count, size in rows}
        for at, directory in enumerate(batch):
            count, size = known.get(directory, (0, 0))
            limit -= count
            if limit < 0 or self.room < size:
                return at
            self.room -= size
        return len(batch)

    def _list_all(self, directories: Sequence[int]) -> list[tuple[int, list[Entry]]]:
        if not directories:
            return []
        found: dict[int, list[Entry]] = {directory: [] for directory in directories}
        marks, values = in_list(directories)
        for row in self.tx.all(f"{TREE_SQL}{marks} ORDER BY d.parent, d.name", (self.fs, *values)):
            found[row[0]].append(entry(row[1:]))
        return list(found.items())
