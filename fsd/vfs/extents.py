"""`Extents`: which bytes of a file lie where in the log; the newest write wins."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """File bytes [start, end) are the log's bytes from `pos` on."""

    start: int
    end: int
    pos: int


class Extents:
    """An ordered map of disjoint runs. Not thread-safe; snapshots (`runs`) are plain lists."""

    __slots__ = ("_ends", "_pos", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pos: list[int] = []
        self.total = 0

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self._starts, self._ends, self._pos)

    def put(self, start: int, end: int, pos: int) -> None:
        """[start, end) was written; its bytes are at `pos`. Hides what was there."""
        if not self._starts or start >= self._ends[-1]:
            self._starts.append(start)
            self._ends.append(end)
            self._pos.append(pos)
            self.total += end - start
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        starts, ends, positions = [start], [end], [pos]
        removed = 0
        for at in range(first, last):
            removed += self._ends[at] - self._starts[at]
        if first < last:
            left, right = self._starts[first], self._ends[last - 1]
            if left < start:
                starts.insert(0, left)
                ends.insert(0, start)
                positions.insert(0, self._pos[first])
                removed -= start - left
            if right > end:
                starts.append(end)
                ends.append(right)
                positions.append(self._pos[last - 1] + end - self._starts[last - 1])
                removed -= right - end
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._pos[first:last] = positions
        self.total += end - start - removed

    def cut(self, size: int) -> None:
        """Forget everything at and behind `size`."""
        while self._starts and self._starts[-1] >= size:
            self.total -= self._ends.pop() - self._starts.pop()
            self._pos.pop()
        if self._starts and self._ends[-1] > size:
            self.total -= self._ends[-1] - size
            self._ends[-1] = size

    def drop_before(self, pos: int) -> None:
        """Forget the runs whose bytes lie before `pos` in the log (they are committed)."""
        kept = [run for run in self if run.pos >= pos]
        self._starts = [run.start for run in kept]
        self._ends = [run.end for run in kept]
        self._pos = [run.pos for run in kept]
        self.total = sum(run.end - run.start for run in kept)

    def runs(self, start: int, end: int) -> list[Run]:
        """The parts of runs inside [start, end), in order."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        found = []
        for at in range(first, last):
            low, high = max(start, self._starts[at]), min(end, self._ends[at])
            found.append(Run(low, high, self._pos[at] + low - self._starts[at]))
        return found

    def since(self, pos: int) -> list[Run]:
        """The runs whose bytes lie at or behind `pos` in the log, in file order."""
        return [run for run in self if run.pos >= pos]

    def oldest(self) -> int | None:
        """The smallest log position in use."""
        return min(self._pos) if self._pos else None
