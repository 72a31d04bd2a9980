"""Reading the namespace, live or as it was at a retained seq: the mount's questions, and paths.

Each question is a bounded number of queries, none per entry (`queries`). All questions of one request see
one state. `at` is a seq that the caller found retained (`retained`), None the live rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list, values_list
from fsd.model.attrs import ROOT_INO, Attr, Entry
from fsd.model.errors import TooLarge, UsageError
from fsd.model.limits import DIR_INLINE_MAX, NS_BATCH_MAX, NS_BYTES_MAX, NS_ENTRIES_MAX
from fsd.service import queries
from fsd.service.access import FsRef
from fsd.service.retained import At, state_of
from fsd.service.view import decode_xattrs
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE

_XATTRS: Final = Attr._fields.index("xattrs")
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


def lookup(tx: Tx, fs: int, parent: int, name: bytes, at: int | None = None) -> Entry | None:
    if at is None:
        row = tx.one(queries.LOOKUP, (fs, parent, name))
    else:
        row = tx.one(queries.LOOKUP_AT, (fs, parent, name, at, fs, parent, name, at, at, at))
    return None if row is None else entry(row)


def list_some(tx: Tx, fs: int, parent: int, after: bytes, limit: int, at: int | None = None) -> list[Entry]:
    """Up to `limit` entries with names behind `after`, in order of name."""
    if at is None:
        rows = tx.all(queries.LIST, (fs, parent, after, limit))
    else:
        rows = tx.all(queries.LIST_AT, (fs, parent, after, at, at, at, at, limit))
    return [entry(row) for row in rows]


def attrs(tx: Tx, fs: int, inos: Sequence[int], at: int | None = None) -> list[Attr | None]:
    found: dict[int, Attr] = {}
    for some in chunks(list(dict.fromkeys(inos))):
        if at is None:
            marks, values = in_list(some)
            rows = tx.all(queries.ATTRS.format(marks), (fs, *values))
        else:
            text, values = values_list([(ino,) for ino in some])
            rows = tx.all(queries.ATTRS_AT.format(text), (*values, fs, at, fs, at))
        for row in rows:
            found[row[0]] = attr(row)
    return [found.get(ino) for ino in inos]


def resolve(tx: Tx, fs: int, names: Sequence[bytes], at: int | None = None) -> list[Entry | None]:
    """Each component from the root; None from the first that does not exist. Symlinks are not followed."""
    found: list[Entry | None] = []
    parent: int | None = ROOT_INO
    for name in names:
        one = None if parent is None else lookup(tx, fs, parent, name, at)
        found.append(one)
        parent = one.attr.ino if one is not None and one.attr.is_dir else None
    return found


def block_rows(
    tx: Tx, fs: int, ino: int, first: int, count: int, at: int | None = None
) -> list[tuple[int, bytes]]:
    """The rows of blocks [first, first+count) that are no holes, in stored form; the first block of a file
    has none (it is named in the inode)."""
    start, end = max(first, 1), first + count
    if start >= end:
        return []
    if at is None:
        return tx.all(queries.BLOCKS, (fs, ino, start, end))
    return tx.all(queries.BLOCKS_AT, (fs, ino, start, end, at, at))


def blocks(
    tx: Tx, fs: int, ino: int, first: int, count: int, at: int | None = None
) -> tuple[int, list[tuple[int, bytes]]] | None:
    """Content seq and the blocks [first, first+count) that are no holes, in stored form; None: no inode."""
    if at is None:
        row = tx.one("SELECT cseq, parts FROM inode WHERE fs=? AND ino=? AND died=140737488355327", (fs, ino))
    else:
        (was,) = attrs(tx, fs, (ino,), at)
        row = None if was is None else (was.cseq, was.parts)
    if row is None:
        return None
    rows: list[tuple[int, bytes]] = [(0, row[1])] if first == 0 and count and row[1] is not None else []
    return row[0], rows + block_rows(tx, fs, ino, first, count, at)


class Namespace:
    """Any thread."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def ask(self, fs: FsRef, questions: Sequence[Any], at: At | None = None) -> tuple[int, list[Any]]:
        """Answer the mount's questions (`wire.messages`) on one state, the live one or `at` a retained one;
        its seq and the answers in order. Raises `UsageError`, `TooLarge`, `NotFound`."""
        if not isinstance(questions, (tuple, list)):
            raise UsageError("questions are a list")
        if len(questions) > NS_BATCH_MAX:
            raise TooLarge(f"{len(questions)} questions in one request, at most {NS_BATCH_MAX}")
        checked = [_check(question) for question in questions]

        def read(tx: Tx) -> tuple[int, list[Any]]:
            state = state_of(tx, fs, at)
            asking = _Asking(tx, state.fs, state.at)
            return state.seq, [asking.answer(*question) for question in checked]

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

    def __init__(self, tx: Tx, fs: int, at: int | None) -> None:
        self.tx, self.fs, self.at = tx, fs, at
        self.left = NS_ENTRIES_MAX
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
        return resolve(self.tx, self.fs, args[0], self.at)

    def _is_dir(self, ino: int) -> bool:
        found = attrs(self.tx, self.fs, (ino,), self.at)[0]
        return found is not None and found.is_dir

    def _spend(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise TooLarge("the answer would be too large", hint="ask for less at a time")

    def _attrs(self, inos: Sequence[int]) -> list[Attr | None]:
        found: list[Attr | None] = []
        for some in chunks(inos):
            got = attrs(self.tx, self.fs, some, self.at)
            self._spend(sum(weight(one) for one in got if one is not None))
            found += got
        return found

    def _blocks(self, ino: int, first: int, count: int) -> tuple[int, list[tuple[int, bytes]]] | None:
        found = blocks(self.tx, self.fs, ino, first, count, self.at)
        if found is not None:
            self._spend(sum(len(parts) for _, parts in found[1]))
        return found

    def _some(self, ino: int, after: bytes, limit: int) -> tuple[list[Entry], bool]:
        """Up to `limit` entries behind `after`, at least one, fewer where they are large; whether there are
        more."""
        found: list[Entry] = []
        while True:
            asked = min(_LIST_CHUNK, limit + 1 - len(found))
            page = list_some(self.tx, self.fs, ino, after, asked, self.at)
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
        most = max(0, min(dir_max, DIR_INLINE_MAX, self.left))  # a list takes one even where none is left
        found = lookup(self.tx, self.fs, parent, name, self.at)
        if not most:
            return found, None
        count = self._count(parent, most + 1)
        if count > most:
            return found, None
        listing, more = self._some(parent, b"", most)
        return found, None if more else listing

    def _count(self, parent: int, most: int) -> int:
        """The entries of a directory, counted up to `most`."""
        if self.at is None:
            row = self.tx.one(queries.COUNT, (self.fs, parent, most))
        else:
            row = self.tx.one(queries.COUNT_AT, (self.fs, parent, self.at, self.at, most))
        assert row is not None, "a count is one row"
        return int(row[0])

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
        batch = batch[: self._few(batch, limit)]
        if not batch:
            return 0
        marks, values = in_list(batch)
        text = queries.WEIGHT if self.at is None else queries.WEIGHT_AT
        rows = self.tx.all(text.format(marks), (self.fs, *values, *self._seqs()))
        known = {directory: (count, count * _FIXED + int(size)) for directory, count, size in rows}
        for at, directory in enumerate(batch):
            count, size = known.get(directory, (0, 0))
            limit -= count
            if limit < 0 or self.room < size:
                return at
            self.room -= size
        return len(batch)

    def _few(self, batch: Sequence[int], limit: int) -> int:
        """How many of the first directories of `batch` have at most `limit` entries together."""
        if limit < 0:  # the first directory may have had more than was asked for
            return 0
        text, values = values_list([(directory,) for directory in batch])
        if self.at is None:
            rows = self.tx.all(queries.COUNTS.format(text), (self.fs, limit + 1, *values))
        else:
            seen = (self.at, self.at)
            rows = self.tx.all(queries.COUNTS_AT.format(text), (self.fs, *seen, limit + 1, *values))
        counts: dict[int, int] = dict(rows)
        for at, directory in enumerate(batch):
            limit -= counts[directory]
            if limit < 0:
                return at
        return len(batch)

    def _seqs(self) -> tuple[int, ...]:
        """The seq as often as the texts over several directories want it."""
        return () if self.at is None else (self.at,) * 4

    def _list_all(self, directories: Sequence[int]) -> list[tuple[int, list[Entry]]]:
        if not directories:
            return []
        found: dict[int, list[Entry]] = {directory: [] for directory in directories}
        marks, values = in_list(directories)
        text = queries.TREE if self.at is None else queries.TREE_AT
        for row in self.tx.all(text.format(marks), (self.fs, *values, *self._seqs())):
            found[row[0]].append(entry(row[1:]))
        return list(found.items())
