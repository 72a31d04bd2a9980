"""Random operations as `differential` makes them, with the rarer ones among them: mappings, unbuffered
handles, sockets, ACLs, times of handles, listings during changes, two threads at once."""

from __future__ import annotations

import os

from support.differential import NAMES, Maker
from support.fileops import Op
from support.moreops import (
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    GROUP_OBJ,
    MASK,
    NO_ID,
    OTHER,
    USER,
    USER_OBJ,
    UTIME_NOW,
    UTIME_OMIT,
)


class WiderMaker(Maker):
    """For mounts and local directories without ACLs."""

    def __init__(self, seed: int, people: int) -> None:
        super().__init__(seed, people)
        self.makers += [self._unusual] * 18 + [self._at_once] * 2 + [self._removed_open] * 3

    def _time(self) -> tuple[int, int]:
        return self.random.choice(
            ((0, UTIME_NOW), (0, UTIME_OMIT), (7, 8), (10**9, 999_999_999), (-5, 1), (3, 10**9))
        )

    def _unusual(self) -> Op:
        choose, slot, path, size = self.random.choice, self._slot(), self._path(), self._size()
        fill, count = self._data()
        block = self.random.randrange(6)
        return choose(
            (
                ("map_write", slot, fill, count, size),
                ("map_write", slot, fill, count, self.random.randrange(9000)),
                ("map_read", slot, 6000, size),
                ("direct_write", slot, fill, self.random.randrange(1, 4), block),
                ("direct_write", slot, fill, self.random.randrange(1, 4), block),
                ("direct_read", slot, self.random.randrange(1, 4), block),
                ("futimens", slot, (self._time(), self._time())),
                ("utimensat", path, (self._time(), self._time()), choose((0, AT_SYMLINK_NOFOLLOW))),
                ("bind", path),
                ("linkat", path, self._path(), choose((0, AT_SYMLINK_FOLLOW))),
                ("list_and_change", path, choose((3, 40)), choose((2, 3))),
                ("raw_open", path, choose((os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC)), 0),
                ("lchown", path, self._owner(), self._owner()),
            )
        )

    def _removed_open(self) -> Op:
        """What often leaves a handle without a name."""
        slot, name = self._slot(), self.random.choice(NAMES)
        return self.random.choice(
            (
                ("open", name, os.O_RDWR | os.O_CREAT, 0o666, slot),
                ("unlink", name),
                ("ftruncate", slot, self._size()),
                ("write", slot, *self._data(), self._size()),
                ("fstat", slot),
            )
        )

    def _at_once(self) -> Op:
        """Pairs whose order nobody can tell."""
        path, slot = self._path(), self._slot()
        choose = self.random.choice
        first, second = path + b"1", path + b"2"
        made = os.O_CREAT | os.O_WRONLY
        return choose(
            (
                ("two_threads", ("raw_open", first, made, 0o644), ("raw_open", second, made, 0o644)),
                ("two_threads", ("mkdir", first, 0o755), ("mkdir", second, 0o755)),
                ("two_threads", ("unlink", first), ("unlink", second)),
                ("two_threads", ("write", slot, 3, 5000, 0), ("write", slot, 4, 5000, 8192)),
                ("two_threads", ("fsync", slot), ("chmod", path, 0o640)),
                ("two_threads", ("raw_open", first, made, 0o644), ("write", slot, 5, 100, 4096)),
            )
        )


class WidestMaker(WiderMaker):
    """For those with them."""

    def __init__(self, seed: int, people: int) -> None:
        super().__init__(seed, people)
        self.makers += [self._on_acl] * 8

    def _on_acl(self) -> Op:
        rights = [self.random.randrange(8) for _ in range(5)]
        entries = [(USER_OBJ, rights[0], NO_ID), (GROUP_OBJ, rights[1], NO_ID), (OTHER, rights[2], NO_ID)]
        if self.random.randrange(2):
            entries[1:1] = [(USER, rights[3], self.random.choice((4001, 4002)))]
            entries[3:3] = [(MASK, rights[4], NO_ID)]
        path, which = self._path(), self.random.choice(("access", "access", "default"))
        return self.random.choice(
            (
                ("set_acl", path, which, tuple(entries)),
                ("set_acl", path, which, tuple(entries)),
                ("get_acl", path, which),
                ("drop_acl", path, which),
            )
        )
