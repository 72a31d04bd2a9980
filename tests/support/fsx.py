"""A checker of file content: random operations on one file through two handles, each compared with a model.

The model is a `bytearray`. Every read, mapped or not, must show exactly it, and so must the size. Offsets are
odd or sit at the edges of pages and of the service's blocks. A failure names seed, mode and the newest
operations. Works on any directory; knows nothing of mounts: `close` before one goes and `open` where the file
is found again.
"""

from __future__ import annotations

import mmap
import os
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.ranges import KEEP, PUNCH, ZERO, fallocate

PAGE: Final = mmap.PAGESIZE
BLOCK: Final = 1 << 20
HISTORY: Final = 25


@dataclass(frozen=True, slots=True)
class Mode:
    """`flags` are given to each open of the first handle; `align` is what its offsets and lengths obey."""

    name: str
    flags: int = 0
    align: int = 1
    mapped: bool = False


PLAIN: Final = Mode("plain", mapped=True)
MODES: Final = (
    PLAIN,
    Mode("unmapped"),
    Mode("direct", os.O_DIRECT, align=512),
    Mode("append", os.O_APPEND, mapped=True),
    Mode("sync", os.O_SYNC),
)


class Fsx:
    """One file. Close it always."""

    def __init__(self, path: Path, seed: int, mode: Mode, size_max: int = 5 * BLOCK // 2) -> None:
        self.path, self.seed, self.mode, self.size_max = path, seed, mode, size_max
        self.model = bytearray()
        self.done = 0
        self._random = random.Random(f"{seed} {mode.name}")
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._fds: list[int] = []
        self._steps = self._weighted()
        # What O_DIRECT needs, and page-aligned memory is fine for everything else.
        self._memory = mmap.mmap(-1, size_max)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        self.open(path)

    def _weighted(self) -> list[Callable[[], None]]:
        steps = [self._read] * 6 + [self._write] * 7 + [self._truncate] * 2
        steps += [self._fsync, self._reopen, self._copy, self._empty, self._pieces, self._hole, self._hole]
        if self.mode.mapped:
            steps += [self._map_read] * 3 + [self._map_write] * 4
        return steps

    # the file's handles ------------------------------------------------------------------------------
    def open(self, path: Path) -> None:
        """Open both handles at `path`, and look at all of it."""
        self.path = path
        self._fds = [self._open(0), self._open(1)]
        self.check()

    def _open(self, which: int, more: int = 0) -> int:
        return os.open(self.path, os.O_RDWR | more | (0 if which else self.mode.flags))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def close_broken(self) -> None:
        """Close handles of a filesystem that is gone: the descriptors go, whatever their flush says."""
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds = []

    # checking ----------------------------------------------------------------------------------------
    def step(self, count: int = 1) -> None:
        for _ in range(count):
            step = self._random.choice(self._steps)
            try:
                step()
                size = os.fstat(self._random.choice(self._fds)).st_size
            except OSError as exc:
                raise AssertionError(f"{exc}\n{self._told(step.__name__)}") from exc
            self.done += 1
            assert size == len(self.model), f"size {size}, not {len(self.model)}\n{self._told()}"

    def check(self) -> None:
        """The whole content, through a new handle."""
        self._note("check")
        with open(self.path, "rb") as whole:
            self._same(whole.read(), 0, len(self.model))
        assert os.stat(self.path).st_size == len(self.model), self._told()

    def _same(self, got: bytes, start: int, end: int) -> None:
        want = bytes(self.model[start:end])
        if got == want:
            return
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        raise AssertionError(
            f"{len(got)} bytes from {start}, {len(want)} expected; byte {start + at} differs: "
            f"{got[at : at + 8].hex()!r}, not {want[at : at + 8].hex()!r}\n{self._told()}"
        )

    def _note(self, text: str) -> None:
        self._history.append(f"{self.done}: {text}")

    def _told(self, during: str = "") -> str:
        return f"mode {self.mode.name}, seed {self.seed} {during}\n" + "\n".join(self._history)

    # choosing ----------------------------------------------------------------------------------------
    def _offset(self, end: int) -> int:
        """0…end: anything, or an edge of a page or block, or one beside it."""
        kind = self._random.randrange(6)
        if kind == 0:
            at = self._random.randrange(end // BLOCK + 1) * BLOCK + self._random.randint(-1, 1)
        elif kind == 1:
            at = self._random.randrange(end // PAGE + 1) * PAGE + self._random.randint(-1, 1)
        elif kind == 2:
            at = len(self.model) + self._random.randint(-1, 1)
        else:
            at = self._random.randint(0, end)
        return max(0, min(end, at))

    def _length(self) -> int:
        """Mostly small; now and then more than the kernel sends in one request."""
        return self._random.randint(1, self._random.choice((16, 512, PAGE, 3 * PAGE, 200_000, 700_000)))

    def _range(self, which: int, limit: int) -> tuple[int, int]:
        """Start and end below `limit`, as the handle needs them."""
        start = self._offset(limit)
        end = min(limit, start + self._length())
        if which == 0 and self.mode.align > 1:
            start -= start % self.mode.align
            end -= end % self.mode.align
        return start, max(start, end)

    def _data(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def _which(self) -> int:
        return self._random.randrange(2)

    # steps -------------------------------------------------------------------------------------------
    def _read(self) -> None:
        which = self._which()
        start, end = self._range(which, self.size_max)
        self._note(f"read {start}…{end} by {which}")
        view = memoryview(self._memory)[: end - start]
        got = os.preadv(self._fds[which], [view], start)
        self._same(bytes(view[:got]), start, min(end, len(self.model)))

    def _put(self, start: int, data: bytes) -> None:
        if len(self.model) < start + len(data):
            self.model.extend(bytes(start + len(data) - len(self.model)))
        self.model[start : start + len(data)] = data

    def _write(self) -> None:
        which = self._which()
        start, end = self._range(which, self.size_max)
        if end == start:
            return
        data = self._data(end - start)
        if which == 0 and self.mode.flags & os.O_APPEND:
            if len(self.model) + len(data) > self.size_max:
                return
            self._note(f"append {len(data)} at {len(self.model)}")
            start = len(self.model)
            wrote = os.write(self._fds[0], data)
        else:
            self._note(f"write {start}…{end} by {which}")
            self._memory[: len(data)] = data
            wrote = os.pwritev(self._fds[which], [memoryview(self._memory)[: len(data)]], start)
        assert wrote == len(data), f"wrote {wrote} of {len(data)}\n{self._told()}"
        self._put(start, data)

    def _pieces(self) -> None:
        """One call with several buffers, through the handle without flags."""
        start, end = self._range(1, self.size_max)
        data = self._data(end - start)
        cuts = sorted(self._random.randint(0, len(data)) for _ in range(3))
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        self._note(f"pwritev {start}…{end}")
        if data:
            assert os.pwritev(self._fds[1], parts, start) == len(data), self._told()
            self._put(start, data)

    def _truncate(self) -> None:
        size = self._offset(self.size_max)
        which = self._which()
        self._note(f"truncate {len(self.model)} to {size} by {'path' if which else 'handle'}")
        if which:
            os.truncate(self.path, size)
        else:
            os.ftruncate(self._fds[0], size)
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def _hole(self) -> None:
        """A hole or zeros by fallocate, which may reach beyond the end."""
        start, end = self._range(1, self.size_max)
        mode = self._random.choice((PUNCH | KEEP, ZERO, ZERO | KEEP, 0))
        if start == end:
            return
        self._note(f"fallocate {mode} {start}…{end}")
        fallocate(self._fds[self._which()], mode, start, end - start)
        if not mode & KEEP and end > len(self.model):
            self.model.extend(bytes(end - len(self.model)))
        inside = min(end, len(self.model))
        if mode and start < inside:
            self.model[start:inside] = bytes(inside - start)

    def _fsync(self) -> None:
        which = self._which()
        self._note(f"fsync by {which}")
        (os.fsync if self._random.randrange(2) else os.fdatasync)(self._fds[which])

    def _reopen(self) -> None:
        which = self._which()
        self._note(f"close and open {which}")
        os.close(self._fds[which])
        self._fds[which] = self._open(which)

    def _empty(self) -> None:
        """Rarely, since little survives it: opened with O_TRUNC."""
        if self._random.randrange(4):
            return
        self._note("open with O_TRUNC")
        os.close(self._fds[1])
        self._fds[1] = self._open(1, os.O_TRUNC)
        self.model.clear()

    def _copy(self) -> None:
        """copy_file_range within the file, behind or before; the kernel may copy less."""
        start, end = self._range(1, len(self.model))
        length = end - start
        to = self._offset(self.size_max - length)
        if length == 0 or (start < to + length and to < end):
            return
        self._note(f"copy {start}…{end} to {to}")
        done = os.copy_file_range(self._fds[1], self._fds[1], length, start, to)
        assert 0 < done <= length, f"copied {done} of {length}\n{self._told()}"
        self._put(to, bytes(self.model[start : start + done]))

    def _mapped(self, write: bool) -> tuple[int, int, int, mmap.mmap] | None:
        """A range, the offset its mapping begins at, and that mapping."""
        start, end = self._range(1, len(self.model))
        if start == end:
            return None
        base = start - start % mmap.ALLOCATIONGRANULARITY
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        return start, end, base, mmap.mmap(self._fds[1], end - base, mmap.MAP_SHARED, prot, offset=base)

    def _map_read(self) -> None:
        found = self._mapped(write=False)
        if found is None:
            return
        start, end, base, area = found
        self._note(f"mapped read {start}…{end}")
        with area:
            self._same(area[start - base : end - base], start, end)

    def _map_write(self) -> None:
        found = self._mapped(write=True)
        if found is None:
            return
        start, end, base, area = found
        synced = bool(self._random.randrange(2))
        self._note(f"mapped write {start}…{end}{', synced' if synced else ''}")
        data = self._data(end - start)
        with area:
            area[start - base : end - base] = data
            self._put(start, data)
            if synced:
                area.flush()
            else:
                # Seen through a handle while it is mapped and dirty.
                self._same(os.pread(self._fds[1], end - start, start), start, end)
