"""Random operations in two directories, by the same identities, compared one by one; and whole trees.

The reference is a directory of a local filesystem. Operations are made from a seed alone, so that a failure
is found again with it; `shortest` takes away what a failure does not need.
"""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fsd.host.seam import CLOCK_REALTIME_COARSE
from support.fileops import EXCHANGE, NOREPLACE, Actor, Identity, Op, shown
from support.wait import wait_for

NAMES: Final = (b"a", b"b", b"c", b"d", b"\xff\xfe", b"-x y\n", "ü".encode())
ROOTS_OWN: Final = Identity("root", 0, 0)
ALICE: Final = Identity("alice", 4001, 4001, (4003,))
BOB: Final = Identity("bob", 4002, 4002)
# Times below are set by operations; what is above was made by the clock.
CLOCK: Final = 1_600_000_000 * 10**9
# Operations that change no time.
LOOKS: Final = frozenset(
    ("read", "read_on", "seek", "fstat", "listfd", "readlink", "lstat", "stat", "access", "listdir")
)
Step = tuple[int, Op]  # which identity does what


def identities() -> tuple[Identity | None, ...]:
    """Who takes part: root and two others, or only the user that runs the tests."""
    return (ROOTS_OWN, ALICE, BOB) if os.geteuid() == 0 else (None,)


class Maker:
    """Operations from a seed."""

    def __init__(self, seed: int, people: int) -> None:
        self.random = random.Random(seed)
        self.people = people
        self.makers = [self._open] * 8 + [self._on_handle] * 12 + [self._on_path] * 22 + [self._on_link] * 8

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    def step(self) -> Step:
        return self.random.randrange(self.people), self.random.choice(self.makers)()

    def _path(self) -> bytes:
        rare = self.random.randrange(60)
        if rare == 0:
            return self.random.choice(
                (b"", b".", b"..x", b"a/..", b"a/.", b"./a", b"a//b", b"n" * 256, b"n" * 255)
            )
        if rare == 1:
            return b"/".join([b"n" * 255, b"a"])
        depth = self.random.choice((1, 1, 1, 2, 2, 3))
        path = b"/".join(self.random.choice(NAMES[: 3 if at else 7]) for at in range(depth))
        return path + b"/" if rare == 2 else path

    def _slot(self) -> int:
        return self.random.randrange(4)

    def _mode(self) -> int:
        choose = self.random.choice
        return choose((0, 0, 0, 0o1000, 0o2000, 0o4000)) | choose(
            (0o777, 0o755, 0o700, 0o644, 0o600, 0o666, 0o070, 0o007, 0)
        )

    def _owner(self) -> int:
        return self.random.choice((-1, -1, 0, 4001, 4002, 4003))

    def _size(self) -> int:
        return self.random.choice((0, 0, 1, 10, 4095, 4096, 5000, 70_000, 1 << 20, (1 << 20) + 7))

    def _data(self) -> tuple[int, int]:
        """A byte and how many of it."""
        return self.random.randrange(256), self.random.choice((0, 1, 7, 100, 4096, 9000))

    def _open(self) -> Op:
        choose, flags = (
            self.random.choice,
            self.random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR)),
        )
        flags |= choose((0, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL))
        flags |= choose(
            (
                0,
                0,
                0,
                os.O_TRUNC,
                os.O_APPEND,
                os.O_TRUNC | os.O_APPEND,
                os.O_DIRECTORY,
                os.O_NOFOLLOW,
                os.O_PATH,
            )
        )
        if flags & os.O_CREAT and flags & os.O_DIRECTORY:
            flags &= ~os.O_CREAT & ~os.O_EXCL  # the kernel's own rules for that changed over the years
        if self.random.randrange(20) == 0:
            return (
                "open",
                self._path(),
                os.O_TMPFILE | choose((os.O_RDWR, os.O_WRONLY)),
                self._mode(),
                self._slot(),
            )
        if self.random.randrange(6) == 0:
            return "openat", self._slot(), choose((*NAMES, b".")), flags, self._mode(), self._slot()
        return "open", self._path(), flags, self._mode(), self._slot()

    def _on_handle(self) -> Op:
        slot, size = self._slot(), self._size()
        return self.random.choice(
            (
                ("write", slot, *self._data(), size),
                ("write", slot, *self._data(), size),
                ("write_on", slot, *self._data()),
                ("write_on", slot, *self._data()),
                ("read", slot, 5000, size),
                ("read_on", slot, 5000),
                ("seek", slot, size, self.random.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))),
                ("fsync", slot) if self.random.randrange(4) == 0 else ("fstat", slot),
                ("ftruncate", slot, size),
                ("fallocate", slot, self.random.choice((0, 1, 3, 16, 17)), size, self._size()),
                ("copy_range", slot, size, self._slot(), self._size(), self._size()),
                ("fstat", slot),
                ("fchmod", slot, self._mode()),
                ("fchown", slot, self._owner(), self._owner()),
                ("close_slot", slot),
                ("mkdirat", slot, self.random.choice(NAMES), self._mode()),
                ("unlinkat", slot, self.random.choice(NAMES)),
                ("name_slot", slot, self._path()),
                ("listfd", slot),
            )
        )

    def _on_path(self) -> Op:
        choose, path = self.random.choice, self._path()
        times = choose((None, (0, 0), (1, 999_999_999), (10**18 + 7, 123_456_789_123_456_789)))
        kinds = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFDIR)
        xattr = choose(("user.a", "user.b", "trusted.t", "user.", "nothing.x", "user." + "n" * 251))
        follow = choose((True, False))
        return choose(
            (
                ("mkdir", path, self._mode()),
                ("mkdir", path, 0o777),
                ("mkdir", path, 0o777),
                ("rmdir", path),
                ("unlink", path),
                ("unlink", path),
                ("mknod", path, choose(kinds) | self._mode(), os.makedev(4, 77)),
                ("chmod", path, self._mode()),
                ("chmod", path, self._mode()),
                ("chown", path, self._owner(), self._owner(), follow),
                ("utime", path, times, follow),
                ("truncate", path, self._size()),
                ("lstat", path),
                ("stat", path),
                ("access", path, choose((os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK))),
                ("listdir", choose((path, b"."))),
                (
                    "setxattr",
                    path,
                    xattr,
                    self.random.randrange(200),
                    choose((0, 0, os.XATTR_CREATE, os.XATTR_REPLACE)),
                    follow,
                ),
                ("getxattr", path, xattr, follow),
                ("listxattr", path, follow),
                ("removexattr", path, xattr, follow),
                ("umask", choose((0, 0o022, 0o077, 0o027))),
            )
        )

    def _on_link(self) -> Op:
        old, new = self._path(), self._path()
        target = self.random.choice(
            (b"a", b"../a", b"a/b", b"nowhere", b".", b"..", b"t" * 4000, b"t" * 4096, b"")
        )
        return self.random.choice(
            (
                ("rename", old, new, 0),
                ("rename", old, new, 0),
                (
                    "rename",
                    old,
                    new,
                    self.random.choice((NOREPLACE, EXCHANGE, EXCHANGE, NOREPLACE | EXCHANGE)),
                ),
                ("link", old, new),
                ("link", old, new),
                ("symlink", target, new),
                ("symlink", target, new),
                ("readlink", new),
            )
        )


def until_the_clock_moves() -> None:
    """What is done now gets other times than what was done before: files are stamped by a clock of ticks."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    wait_for(lambda: time.clock_gettime_ns(CLOCK_REALTIME_COARSE) != before, 30, "the clock", every=0.0005)


class Pair:
    """The same identities in two new directories, `out/in` of those given, so that `..` shows the same too.

    Close it always.
    """

    def __init__(self, reference: Path, tried: Path) -> None:
        self.tops = (reference / "out" / "in", tried / "out" / "in")
        for top in self.tops:
            top.mkdir(parents=True)
            for above in (top.parent, top.parent.parent):
                above.chmod(0o755)
            top.chmod(0o1777)
        people = identities()
        self.sides = tuple([Actor(top, who) for who in people] for top in self.tops)

    def play(self, steps: Sequence[Step]) -> None:
        """Raises AssertionError at the first difference."""
        for number, (who, op) in enumerate(steps):
            if op[0] not in LOOKS:
                until_the_clock_moves()
            wanted, got = (side[who].do(op) for side in self.sides)
            if got != wanted:
                raise AssertionError(
                    f"step {number}, {identities()[who]}: {op}\nthere: {wanted}\nhere:  {got}"
                )

    def close(self) -> None:
        for side in self.sides:
            for actor in side:
                actor.close()


def shortest(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """A part of `steps` that still fails and from which no single step can be left out."""
    kept, size = list(steps), max(1, len(steps) // 2)
    while True:
        at = 0
        while at < len(kept):
            less = kept[:at] + kept[at + size :]
            if fails(less):
                kept = less
            else:
                at += size
        if size == 1:
            return kept
        size //= 2


def _xattrs(path: bytes) -> dict[str, bytes]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}


def tree(top: Path, *, exact: bool = False) -> dict[bytes, tuple[object, ...]]:
    """Everything below `top`, by path. `exact` adds the times the clock made and the inode numbers."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}
    base = os.fsencode(top)
    for directory, names, files in os.walk(base):
        names.sort()
        for name in sorted([b"", *names, *files]) if directory == base else sorted([*names, *files]):
            path = os.path.join(directory, name)
            info = os.lstat(path)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            shortened = os.path.relpath(path, base)
            first.setdefault(info.st_ino, shortened)
            mtime = info.st_mtime_ns
            more: Any = (info.st_ino, mtime, info.st_ctime_ns) if exact else min(mtime, CLOCK)
            found[shortened] = (*shown(info), content, _xattrs(path), first[info.st_ino], more)
    return found


def differences(
    wanted: dict[bytes, tuple[object, ...]], got: dict[bytes, tuple[object, ...]]
) -> dict[bytes, tuple[object, object]]:
    paths = sorted(wanted.keys() | got.keys())
    return {path: (wanted.get(path), got.get(path)) for path in paths if wanted.get(path) != got.get(path)}
