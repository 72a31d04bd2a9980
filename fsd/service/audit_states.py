"""The part of the audit that is about states that pins keep: each is a whole tree, as the live one is.

The live tree is looked at by itself (`audit`); here are the inodes that have rows which died. Such a row that
is lost takes a file, or a name of one, out of a checkpoint, and nothing else would tell.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
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
        self._gaps()
        for ino, last in self.last.items():
            for pin in self._pins(0, last):
                wrong = self._wrong(ino, pin)
                if wrong:
                    self.say(_RULE, f"inode {ino}", f"in the state {pin} {wrong}")
                    break
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

    def _pins(self, born: int, died: int) -> Iterator[int]:
        for at in range(bisect_left(self.pins, born), bisect_left(self.pins, died)):
            yield self.pins[at]

    def _at(self, ino: int, pin: int) -> _Version | None:
        return next((one for one in self.versions.get(ino, ()) if one.born <= pin < one.died), None)

    def _wrong(self, ino: int, pin: int) -> str:
        """What is wrong with an inode in a state; empty: nothing."""
        here = self._at(ino, pin)
        names = sum(one.born <= pin < one.died for one in self.names.get(ino, ()))
        if here is None:
            if names:
                return "it has no row, and names"
            filled = any(one.born <= pin < one.died for one in self.below.get(ino, ()))
            return "it has no row, and entries" if filled else ""
        if not stat.S_ISDIR(here.mode):
            return "" if here.nlink == names else f"nlink is {here.nlink}, it has {names} names"
        if names != (ino != ROOT_INO):
            return f"a directory has {names} names"
        below = sum(
            one.born <= pin < one.died and self._is_directory(one.ino) for one in self.below.get(ino, ())
        )
        return (
            "" if here.nlink == 2 + below else f"a directory with {below} directories has nlink {here.nlink}"
        )

    def _is_directory(self, ino: int) -> bool:
        """Of any of its rows: what an inode is never changes."""
        return any(stat.S_ISDIR(one.mode) for one in self.versions.get(ino, ())[:1])

    def _blocks(self) -> None:
        """Rows of content that died lie in a file of each state that has them."""
        for ino, idx, raw, born, died in self.all(
            "SELECT ino, idx, parts, born, died FROM block WHERE fs=? AND died<140737488355327"
        ):
            try:
                end = idx * BLOCK + max((part.off + part.length for part in blocks.decode(raw)), default=0)
            except UsageError:
                continue  # told of with the content
            for pin in self._pins(born, died):
                here = self._at(ino, pin)
                if here is None or not stat.S_ISREG(here.mode):
                    self.say(_RULE, f"block {ino} {idx}", f"in the state {pin} it is of no regular file")
                    break
                if end > here.size:
                    self.say(_RULE, f"block {ino} {idx}", f"in the state {pin} it lies behind the file's end")
                    break
