"""`Extents`: which bytes of a file lie where in the log; the newest change wins."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from fsd.model.limits import HIDDEN_REFS_MAX


class Ref(NamedTuple):
    """Bytes that are not in the log: those of the stored blob `hash` from `boff` on; of HOLE, none."""

    hash: bytes
    boff: int


HOLE: Final = Ref(b"", 0)


class Run(NamedTuple):
    """File bytes [start, end) are the log's bytes from `pos` on; with `ref` those it names, and `pos` is a
    place in the record that says so, which no other run has."""

    start: int
    end: int
    pos: int
    ref: Ref | None = None


class Extents:
    """An ordered map of disjoint runs. Not thread-safe; snapshots (`runs`) are plain lists. `total` counts
    the bytes that are in the log."""

    __slots__ = ("_ends", "_pos", "_refs", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pos: list[int] = []
        # Of runs with `ref`, by `pos`: what they name, and the file offset that its `boff` is at.
        self._refs: dict[int, tuple[Ref, int]] = {}
        self.total = 0

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Run]:
        return map(self._run, self._starts, self._ends, self._pos)

    def _run(self, start: int, end: int, pos: int) -> Run:
        if pos not in self._refs:
            return Run(start, end, pos)
        ref, at = self._refs[pos]
        return Run(start, end, pos, Ref(ref.hash, ref.boff + start - at) if ref.hash else ref)

    def put(self, start: int, end: int, pos: int, ref: Ref | None = None) -> None:
        """[start, end) was written; its bytes are at `pos`, or what `ref` says. Hides what was there."""
        if ref is None:
            self.total += end - start
        else:
            self._refs[pos] = ref, start
            if len(self._refs) > 2 * len(self._pos) + HIDDEN_REFS_MAX:  # most are hidden
                self._refs = {at: self._refs[at] for at in (*self._pos, pos) if at in self._refs}
        if not self._starts or start >= self._ends[-1]:
            self._starts.append(start)
            self._ends.append(end)
            self._pos.append(pos)
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        starts, ends, positions = [start], [end], [pos]
        for at in range(first, last):
            if self._pos[at] not in self._refs:
                self.total -= min(end, self._ends[at]) - max(start, self._starts[at])
        if first < last:
            left, right = self._starts[first], self._ends[last - 1]
            if left < start:
                starts.insert(0, left)
                ends.insert(0, start)
                positions.insert(0, self._pos[first])
            if right > end:
                starts.append(end)
                ends.append(right)
                before = self._pos[last - 1]
                positions.append(before if before in self._refs else before + end - self._starts[last - 1])
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._pos[first:last] = positions

    def cut(self, size: int) -> None:
        """Forget everything at and behind `size`."""
        while self._starts and self._starts[-1] >= size:
            length = self._ends.pop() - self._starts.pop()
            if self._pos.pop() not in self._refs:
                self.total -= length
        if self._starts and self._ends[-1] > size:
            if self._pos[-1] not in self._refs:
                self.total -= self._ends[-1] - size
            self._ends[-1] = size
        if not self._starts:
            self._refs.clear()

    def drop_before(self, pos: int) -> None:
        """Forget the runs whose bytes lie before `pos` in the log (they are committed)."""
        if self._pos and max(self._pos) < pos:  # all of them, as of a file nobody writes to any more
            self._starts, self._ends, self._pos, self._refs, self.total = [], [], [], {}, 0
            return
        kept = [at for at, where in enumerate(self._pos) if where >= pos]
        self._starts = [self._starts[at] for at in kept]
        self._ends = [self._ends[at] for at in kept]
        self._pos = [self._pos[at] for at in kept]
        self._refs = {where: self._refs[where] for where in self._pos if where in self._refs}
        self.total = sum(
            end - start
            for start, end, where in zip(self._starts, self._ends, self._pos)
            if where not in self._refs
        )

    def runs(self, start: int, end: int) -> list[Run]:
        """The parts of runs inside [start, end), in order."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        found = []
        for at in range(first, last):
            low, high = max(start, self._starts[at]), min(end, self._ends[at])
            pos = self._pos[at]
            if pos in self._refs:
                found.append(self._run(low, high, pos))
            else:
                found.append(Run(low, high, pos + low - self._starts[at]))
        return found

    def since(self, pos: int) -> list[Run]:
        """The runs whose bytes lie at or behind `pos` in the log, in file order."""
        if len(self._pos) == 1:
            where = self._pos[0]
            return [self._run(self._starts[0], self._ends[0], where)] if where >= pos else []
        return [run for run in self if run.pos >= pos]

    def refs(self) -> Iterator[Ref]:
        """What runs name of stored blobs, or named until they were hidden."""
        return (ref for ref, _ in self._refs.values() if ref.hash)

    def oldest(self) -> int | None:
        """The smallest log position in use."""
        return min(self._pos) if self._pos else None
