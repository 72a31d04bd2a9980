"""fallocate(2) by its number, and what it did: for tests that compare a mount with a local disk."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path
from typing import Final

KEEP: Final = 1
PUNCH: Final = 2
COLLAPSE: Final = 8
ZERO: Final = 16
INSERT: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Raises `OSError`."""
    if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def outcome(fd: int, mode: int, offset: int, length: int) -> tuple[str, int, bytes, bool]:
    """Errno's name, size, content and whether the times moved, after one call."""
    os.utime(fd, ns=(10**18, 10**18))
    told = ""
    try:
        fallocate(fd, mode, offset, length)
    except OSError as exc:
        told = errno.errorcode[exc.errno or 0]
    stat = os.fstat(fd)
    return told, stat.st_size, os.pread(fd, 1 << 20, 0), stat.st_mtime_ns != 10**18


class Twice:
    """The same random calls on a file of both directories; after each the same must be read."""

    def __init__(self, ours: Path, theirs: Path, seed: int, size: int) -> None:
        self.rng, self.size = random.Random(seed), size
        self.paths = (ours, theirs)
        self.fds = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in self.paths]
        self.history: list[str] = []

    def step(self) -> None:
        rng = self.rng
        kind = rng.choice(("write", "punch", "zero", "grow", "keep", "truncate", "copy"))
        start, length = rng.randrange(self.size), rng.choice((1, 4096, 70_000, 1 << 20, 3 << 20))
        length, to = min(length, self.size - start), rng.randrange(self.size)
        data = rng.randbytes(length)
        self.history.append(f"{kind} {start} {length} {to}")
        got = [self._do(fd, kind, start, length, to, data) for fd in self.fds]
        assert got[0] == got[1], "\n".join(self.history[-25:])

    def _do(self, fd: int, kind: str, start: int, length: int, to: int, data: bytes) -> object:
        if kind == "write":
            os.pwrite(fd, data, start)
        elif kind == "truncate":
            os.ftruncate(fd, start)
        elif kind == "copy":
            return self._copy(fd, start, length, to)
        else:
            modes = {"punch": PUNCH | KEEP, "zero": ZERO, "grow": 0, "keep": ZERO | KEEP}
            fallocate(fd, modes[kind], start, length)
        low = max(0, start - 5000)
        return os.fstat(fd).st_size, os.pread(fd, length + 10_000, low)

    @staticmethod
    def _copy(fd: int, start: int, length: int, to: int) -> object:
        """Until all is copied: one call may do less. Ranges that overlap are left out."""
        if start < to + length and to < start + length:
            return None
        done = 0
        while done < length:
            some = os.copy_file_range(fd, fd, length - done, start + done, to + done)
            if not some:
                break
            done += some
        return done, os.fstat(fd).st_size, os.pread(fd, length + 100, to)

    def check(self) -> None:
        ours, theirs = (path.read_bytes() for path in self.paths)
        assert ours == theirs, "\n".join(self.history[-25:])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def open(self, ours: Path) -> None:
        """Go on where the file is found again."""
        self.paths = (ours, self.paths[1])
        self.fds = [os.open(path, os.O_RDWR) for path in self.paths]
        self.check()
