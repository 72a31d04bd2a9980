"""What the numbers and names a session uses have become: `redirect` and `moved`, as one commit sees them.

A session that lost many names (two mounts run the same installation in one directory) has tens of thousands
of rows, and a commit names a few. So they are looked up: set-wise what the operations name (`prefetch`), the
rest when asked for, each once. In memory beside a `Source`; it never writes, `redirect_rows.store` does.

Invariants: what is stored is flat, a number leads to what it means in one step, so there is no chain to
follow and no circle; what this commit changed hides what is stored; `_meant` is `_to` backwards, and complete
for the targets in `_asked_targets`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from fsd.model.ops import CONTENT, CREATE, LINK, RENAME, RMDIR, UNLINK, Op
from fsd.service.view import NameKey

NOTHING: Final = 0  # no inode
_TYPE_BITS: Final = 0o170000
MoveKey: TypeAlias = tuple[int, bytes, int]  # directory, name, inode


class Source(Protocol):
    """What is stored for one session. Bounded queries, no caching; a row may come several times."""

    def targets(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(number, what it means) of those of `numbers` that were redirected."""
        ...

    def numbers(self, targets: Sequence[int]) -> list[tuple[int, int]]:
        """(number, what it means) of all numbers that mean one of `targets`."""
        ...

    def moves(self, keys: Sequence[MoveKey]) -> list[tuple[MoveKey, NameKey]]:
        """Where those of `keys` that were moved went."""
        ...


class Redirects:
    """One thread, one commit. `source` None: nothing is stored. What this commit adds is in `new_…`."""

    def __init__(self, source: Source | None = None) -> None:
        self._source = source
        self._to: dict[int, int] = {}
        self._meant: dict[int, set[int]] = {}
        self._moved: dict[MoveKey, NameKey] = {}
        self._asked: set[int] = set()
        self._asked_targets: set[int] = set()
        self._asked_moves: set[MoveKey] = set()
        self.new_numbers: dict[int, int] = {}
        self.new_moves: dict[MoveKey, NameKey] = {}

    # Loading.

    def prefetch(self, ops: Sequence[Op], *, every_name: bool = False) -> None:
        """Load what `ops` name in a few queries, `every_name`: also names that are made. Nothing breaks
        without it; it is only slower."""
        if self._source is None:
            return
        numbers: set[int] = set()
        made: set[int] = set()
        for op in ops:
            numbers.add(op.ino)
            if op.kind == CREATE:
                made.add(op.ino)
            if op.kind in (CREATE, LINK, UNLINK, RMDIR, RENAME):
                numbers.add(op.parent)  # type: ignore[union-attr]
            if op.kind == RENAME:
                numbers.update((op.new_parent, op.over))  # type: ignore[union-attr]
        self._load(numbers)
        targets: set[int] = set()
        keys: set[MoveKey] = set()
        for op in ops:
            if op.kind == CONTENT and op.ino not in made:
                targets.add(self.real(op.ino))
            # By its bits: `stat.S_ISREG` raises where a sender's mode, not checked yet, has more than 32.
            elif op.kind == CREATE and op.mode & _TYPE_BITS != stat.S_IFREG:  # type: ignore[union-attr,operator]
                targets.add(op.ino)
            if op.kind in (UNLINK, RMDIR, RENAME) or (every_name and op.kind in (CREATE, LINK)):
                keys.add((self.real(op.parent), op.name, self.real(op.ino)))  # type: ignore[union-attr]
            if op.kind == RENAME and op.over:  # type: ignore[union-attr]
                keys.add((self.real(op.new_parent), op.new_name, self.real(op.over)))  # type: ignore[union-attr]
        self._load_meant(targets)
        self._load_moves(keys)

    def _load(self, numbers: Iterable[int]) -> None:
        want = [one for one in numbers if one not in self._asked]
        if self._source is None or not want:
            return
        self._asked.update(want)
        self._take(self._source.targets(sorted(want)))

    def _load_meant(self, targets: Iterable[int]) -> None:
        want = [one for one in targets if one not in self._asked_targets]
        if self._source is None or not want:
            return
        self._asked_targets.update(want)
        self._take(self._source.numbers(sorted(want)))

    def _load_moves(self, keys: Iterable[MoveKey]) -> None:
        want = [key for key in keys if key not in self._asked_moves]
        if self._source is None or not want:
            return
        self._asked_moves.update(want)
        for key, to in self._source.moves(sorted(want)):
            self._moved.setdefault(key, to)

    def _take(self, found: Iterable[tuple[int, int]]) -> None:
        for number, target in found:
            if number not in self._to:
                self._asked.add(number)
                self._to[number] = target
                self._meant.setdefault(target, set()).add(number)

    # Reading.

    @property
    def known(self) -> dict[int, int]:
        """What was loaded or made so far: number → what it means. To read; it changes."""
        return self._to

    def real(self, number: int) -> int:
        """The inode a session's number means now; NOTHING: its creation was refused."""
        if self._source is not None and number not in self._asked:
            self._load((number,))
        return self._to.get(number, number)

    def nothing(self, number: int) -> bool:
        """Whether the creation of what the number was for was refused."""
        return self.real(number) == NOTHING and number in self._to

    @property
    def none(self) -> bool:
        """Whether surely no number was redirected, ever."""
        return self._source is None and not self._to

    def moved(self, key: MoveKey) -> NameKey | None:
        """Where a conflict put what the session means by `key`."""
        if self._source is not None and key not in self._asked_moves and key not in self._moved:
            self._load_moves((key,))
        return self._moved.get(key)

    # Changing.

    def redirect(self, number: int, to: int) -> None:
        """From now on the session's `number`, and whatever already meant it, means `to`."""
        self._load_meant((number,))
        for old in list(self._meant.get(number, ())):
            self._point(old, to)
        self._point(number, to)

    def not_made(self, number: int) -> None:
        """The number means nothing, for good."""
        self._point(number, NOTHING)

    def _point(self, number: int, to: int) -> None:
        before = self._to.get(number)
        if before is not None:
            self._meant[before].discard(number)
        self._to[number] = self.new_numbers[number] = to
        self._meant.setdefault(to, set()).add(number)

    def move(self, key: MoveKey, to: NameKey) -> None:
        self._moved[key] = self.new_moves[key] = to
