"""The part of the audit that is about states that pins keep: each is a whole tree, as the live one is.

The live tree is looked at by itself (`audit`); here are the inodes that have rows which died. Such a row that
is lost takes a file, or a name of one, out of a checkpoint, and nothing else would tell.
"""

from __future__ import annotations

import stat
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from fsd.meta.database import Tx
from fsd.meta.sql import MAX
from fsd.model import blocks
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import UsageError
from fsd.model.limits import BLOCK
from fsd.service.access import FsRef

Say = Callable[[str, str, str], None]
_RULE: Final = "frozen"


class _Version(NamedTuple):
    """A row of an inode, in the states [born, died)."""

    born: int
    died: int
    mode: int
    nlink: int
    size: int


class _Spans:
    """How many of some rows there are in a state, without a look at each."""

    def __init__(self, rows: Iterable[tuple[int, int]]) -> None:
        found = [(born, died) for born, died in rows if born < died]  # others are told as what they are
        self._born = sorted(born for born, _ in found)
        self._died = sorted(died for _, died in found)

    def at(self, pin: int) -> int:
        return bisect_right(self._born, pin) - bisect_right(self._died, pin)

    @property
    def edges(self) -> Iterator[int]:
        yield from self._born
        yield from self._died


class _Name(NamedTuple):
    """A row of an entry: of the inode `ino`, in the states [born, died)."""

    born: int
    died: int
    ino: int


def audit_states(tx: Tx, fs: FsRef, say: Say) -> None:
    """Tell what is wrong in the states that pins keep; each inode and block once. Not of a fork that is still
    being copied: its rows come kind by kind."""
    _States(tx, fs, say).run()


class _States:
    def __init__(self, tx: Tx, fs: FsRef, say: Say) -> None:
        self.tx, self.fs, self.say = tx, fs, say
        self.pins: list[int] = sorted(row[0] for row in self.all("SELECT DISTINCT seq FROM pin WHERE fs=?"))
        self.versions: dict[int, list[_Version]] = defaultdict(list)
        self.names: dict[int, list[_Name]] = defaultdict(list)
        self.below: dict[int, list[_Name]] = defaultdict(list)
        self.last: dict[int, int] = defaultdict(int)  # an inode -> when the last of its rows died that did

    def all(self, sql: str) -> list[tuple[Any, ...]]:
        return self.tx.all(sql, (self.fs.id,))

    def run(self) -> None:
        if not self.pins:
            return
        for ino, *values in self.all("SELECT ino, born, died, mode, nlink, size FROM inode WHERE fs=?"):
            self.versions[ino].append(_Version(*values))
            self._died(ino, values[1])
        for parent, ino, born, died in self.all("SELECT parent, ino, born, died FROM dentry WHERE fs=?"):
            self.names[ino].append(_Name(born, died, ino))
            self.below[parent].append(_Name(born, died, ino))
            self._died(ino, died)
            self._died(parent, died)
        for rows in self.versions.values():
            rows.sort()
        self._gaps()
        for ino, last in self.last.items():
            self._inode(ino, last)
        self._blocks()

    def _died(self, ino: int, died: int) -> None:
        if died < MAX:
            self.last[ino] = max(self.last[ino], died)

    def _gaps(self) -> None:
        """Inodes with a name that is older than their oldest row: one that died is lost."""
        self.last[ROOT_INO] = MAX
        for ino, names in self.names.items():
            since = min((one.born for one in self.versions.get(ino, ())), default=MAX)
            if min(one.born for one in names) < since:
                self.last[ino] = max(self.last[ino], since)

    def _pins(self, born: int, died: int, edges: Iterable[int]) -> Iterator[int]:
        """Of the pins in [born, died) the first, and the first behind each edge: from one edge to the next
        all states are alike, and there may be thousands of pins."""
        found = {bisect_left(self.pins, max(born, edge)) for edge in (born, *edges)}
        for at in sorted(found):
            if at < len(self.pins) and self.pins[at] < died:
                yield self.pins[at]

    def _edges(self, ino: int) -> Iterator[int]:
        for one in self.versions.get(ino, ()):
            yield one.born
            yield one.died

    def _at(self, ino: int, pin: int) -> _Version | None:
        rows = self.versions.get(ino, [])
        at = bisect_right(rows, pin, key=lambda one: one.born)
        return rows[at - 1] if at and pin < rows[at - 1].died else None

    def _inode(self, ino: int, last: int) -> None:
        """Look at an inode in the states before `last`; tell what is wrong first."""
        below = self.below.get(ino, ())
        names = _Spans((one.born, one.died) for one in self.names.get(ino, ()))
        entries = _Spans((one.born, one.died) for one in below)
        directories = _Spans((one.born, one.died) for one in below if self._is_directory(one.ino))
        edges = (*self._edges(ino), *names.edges, *entries.edges)
        for pin in self._pins(0, last, edges):
            here = self._at(ino, pin)
            wrong = self._wrong(ino, here, names.at(pin), entries.at(pin), directories.at(pin))
            if wrong:
                self.say(_RULE, f"inode {ino}", f"in the state {pin} {wrong}")
                break

    @staticmethod
    def _wrong(ino: int, here: _Version | None, names: int, entries: int, directories: int) -> str:
        """What is wrong with an inode in a state; empty: nothing."""
        if here is None:
            if names:
                return "it has no row, and names"
            return "it has no row, and entries" if entries else ""
        if not stat.S_ISDIR(here.mode):
            return "" if here.nlink == names else f"nlink is {here.nlink}, it has {names} names"
        if names != (ino != ROOT_INO):
            return f"a directory has {names} names"
        if here.nlink != 2 + directories:
            return f"a directory with {directories} directories has nlink {here.nlink}"
        return ""

    def _is_directory(self, ino: int) -> bool:
        """Of any of its rows: what an inode is never changes."""
        return any(stat.S_ISDIR(one.mode) for one in self.versions.get(ino, ())[:1])

    def _blocks(self) -> None:
        """Rows of content that died lie in a file of each state that has them."""
        for ino, idx, raw, born, died in self.all(
            f"SELECT ino, idx, parts, born, died FROM block WHERE fs=? AND died<{MAX}"
        ):
            try:
                end = idx * BLOCK + max((part.off + part.length for part in blocks.decode(raw)), default=0)
            except UsageError:
                continue  # told of with the content
            for pin in self._pins(born, died, self._edges(ino)):
                here = self._at(ino, pin)
                if here is None or not stat.S_ISREG(here.mode):
                    self.say(_RULE, f"block {ino} {idx}", f"in the state {pin} it is of no regular file")
                    break
                if end > here.size:
                    self.say(_RULE, f"block {ino} {idx}", f"in the state {pin} it lies behind the file's end")
                    break
