"""One file operation at a time, done in a directory by an identity of its own; what it returned and changed.

An `Actor` is a forked process that stands in a directory, perhaps as another user, and does what it is told.
Answers are plain values, comparable between filesystems: errnos by name, attributes without what belongs to
one filesystem alone, and for each object an operation concerned, which of its times moved.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from support.moreops import MoreOps
from support.processes import die_with_parent

Op = tuple[Any, ...]
NOREPLACE: Final = 1
EXCHANGE: Final = 2
AT_FDCWD: Final = -100
ANSWER_WITHIN: Final = 60.0
# Python's audit events of calls that make, take away or change what a path names.
CHANGES: Final = frozenset(
    ("open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.chmod", "os.chown", "os.utime")
) | {"os.truncate", "os.setxattr", "os.removexattr"}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an actor is."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def shown(info: os.stat_result) -> tuple[object, ...]:
    """What stat says and filesystems must agree on."""
    size = None if stat.S_ISDIR(info.st_mode) else info.st_size
    return oct(info.st_mode), info.st_nlink, info.st_uid, info.st_gid, size, info.st_rdev


def _digest(data: bytes) -> list[tuple[int, int]]:
    """Runs of equal bytes, as (byte, how many): short enough to be read in a message."""
    return [(byte, len(list(run))) for byte, run in itertools.groupby(data)]


def renameat2(old: bytes, new: bytes, flags: int) -> None:
    if _libc.renameat2(AT_FDCWD, old, AT_FDCWD, new, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def parent(path: bytes) -> bytes:
    return os.path.dirname(path.rstrip(b"/")) or b"."


class Worker(MoreOps):
    """The operations. `slots` are open descriptors by number; a missing one is told as `no slot`."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.home = os.open(".", os.O_RDONLY | os.O_DIRECTORY)

    def do(self, op: Op) -> tuple[object, ...]:
        """(result or errno's name, what moved)."""
        name, *args = op
        call: Callable[..., object] = getattr(self, name)
        before = self._times(args)
        try:
            result: object = call(*args)
        except OSError as exc:
            result = errno.errorcode.get(exc.errno or 0, str(exc))
        except KeyError:
            result = "no slot"
        return result, self._moved(before, self._times(args))

    def _times(self, args: Sequence[object]) -> list[tuple[int, int, int] | None]:
        """Of every path an operation names and its directory, and of the descriptor it uses."""
        found: list[tuple[int, int, int] | None] = []
        for arg in args:
            if isinstance(arg, bytes) and arg and b"\0" not in arg:
                found += [self._time(arg), self._time(parent(arg))]
        if args and type(args[0]) is int and args[0] in self.slots:
            found.append(self._time(self.slots[args[0]]))
        return found

    def _time(self, what: bytes | int) -> tuple[int, int, int] | None:
        try:
            info = os.stat(what, follow_symlinks=isinstance(what, int))
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_ctime_ns

    def _moved(
        self, before: list[tuple[int, int, int] | None], after: list[tuple[int, int, int] | None]
    ) -> list[str]:
        told = []
        for old, new in zip(before, after):
            if old is None or new is None:
                told.append("absent" if new is None else "new")
            elif old[0] != new[0]:
                told.append("other")
            else:
                told.append(("m" if old[1] != new[1] else "") + ("c" if old[2] != new[2] else ""))
        return told

    # descriptors -------------------------------------------------------------------------------------
    def _put(self, slot: int, fd: int) -> str:
        self.close_slot(slot)
        self.slots[slot] = fd
        return "opened"

    def close_slot(self, slot: int) -> object:
        fd = self.slots.pop(slot, None)
        return None if fd is None else os.close(fd)

    def open(self, path: bytes, flags: int, mode: int, slot: int) -> object:
        with suppress(OSError):
            if stat.S_ISCHR(os.stat(path).st_mode):
                return "a device"  # what opening gives depends on the mount's options
        # Never wait for the other end of a FIFO.
        return self._put(slot, os.open(path, flags | os.O_NONBLOCK, mode))

    def openat(self, where: int, path: bytes, flags: int, mode: int, slot: int) -> object:
        """Relative to a directory that is open, and may be gone."""
        directory = self.slots[where]
        with suppress(OSError):
            if stat.S_ISCHR(os.stat(path, dir_fd=directory).st_mode):
                return "a device"
        return self._put(slot, os.open(path, flags | os.O_NONBLOCK, mode, dir_fd=directory))

    def mkdirat(self, where: int, path: bytes, mode: int) -> object:
        return os.mkdir(path, mode, dir_fd=self.slots[where])

    def unlinkat(self, where: int, path: bytes) -> object:
        return os.unlink(path, dir_fd=self.slots[where])

    def listfd(self, where: int) -> object:
        return sorted(os.fsencode(name) for name in os.listdir(self.slots[where]))

    def read(self, slot: int, size: int, offset: int) -> object:
        return _digest(os.pread(self.slots[slot], size, offset))

    def read_on(self, slot: int, size: int) -> object:
        return _digest(os.read(self.slots[slot], size))

    def write(self, slot: int, fill: int, size: int, offset: int) -> object:
        return os.pwrite(self.slots[slot], bytes([fill]) * size, offset)

    def write_on(self, slot: int, fill: int, size: int) -> object:
        if stat.S_ISFIFO(os.fstat(self.slots[slot]).st_mode):
            return "a fifo"  # the kernel tells a FUSE filesystem nothing of it, so its times stand still
        return os.write(self.slots[slot], bytes([fill]) * size)

    def seek(self, slot: int, offset: int, whence: int) -> object:
        if stat.S_ISDIR(os.fstat(self.slots[slot]).st_mode):
            return "a directory"  # its offsets belong to its filesystem
        return os.lseek(self.slots[slot], offset, whence)

    def fsync(self, slot: int) -> object:
        return os.fsync(self.slots[slot])

    def ftruncate(self, slot: int, size: int) -> object:
        return os.ftruncate(self.slots[slot], size)

    def fstat(self, slot: int) -> object:
        return shown(os.fstat(self.slots[slot]))

    def fchmod(self, slot: int, mode: int) -> object:
        return os.fchmod(self.slots[slot], mode)

    def fchown(self, slot: int, uid: int, gid: int) -> object:
        return os.fchown(self.slots[slot], uid, gid)

    # paths -------------------------------------------------------------------------------------------
    def mkdir(self, path: bytes, mode: int) -> object:
        return os.mkdir(path, mode)

    def rmdir(self, path: bytes) -> object:
        return os.rmdir(path)

    def unlink(self, path: bytes) -> object:
        return os.unlink(path)

    def rename(self, old: bytes, new: bytes, flags: int) -> object:
        return renameat2(old, new, flags)

    def link(self, old: bytes, new: bytes) -> object:
        return os.link(old, new, follow_symlinks=False)

    def symlink(self, target: bytes, path: bytes) -> object:
        return os.symlink(target, path)

    def readlink(self, path: bytes) -> object:
        return os.readlink(path)

    def mknod(self, path: bytes, mode: int, device: int) -> object:
        return os.mknod(path, mode, device)

    def chmod(self, path: bytes, mode: int) -> object:
        return os.chmod(path, mode)

    def chown(self, path: bytes, uid: int, gid: int, follow: bool) -> object:
        return os.chown(path, uid, gid, follow_symlinks=follow)

    def utime(self, path: bytes, times: tuple[int, int] | None, follow: bool) -> object:
        if times is None:
            return os.utime(path, follow_symlinks=follow)
        os.utime(path, ns=times, follow_symlinks=follow)
        info = os.stat(path, follow_symlinks=follow)
        # A symlink's own access time moves when the path to it leads through it.
        return info.st_atime_ns if follow else None, info.st_mtime_ns

    def truncate(self, path: bytes, size: int) -> object:
        return os.truncate(path, size)

    def lstat(self, path: bytes) -> object:
        return shown(os.lstat(path))

    def stat(self, path: bytes) -> object:
        return shown(os.stat(path))

    def access(self, path: bytes, mode: int) -> object:
        return os.access(path, mode, effective_ids=True)

    def listdir(self, path: bytes) -> object:
        with os.scandir(path) as entries:
            kinds = [(e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries]
        return sorted(kinds)

    def setxattr(self, path: bytes, name: str, size: int, flags: int, follow: bool) -> object:
        return os.setxattr(path, name, b"v" * size, flags, follow_symlinks=follow)

    def getxattr(self, path: bytes, name: str, follow: bool) -> object:
        return os.getxattr(path, name, follow_symlinks=follow)

    def listxattr(self, path: bytes, follow: bool) -> object:
        return sorted(os.listxattr(path, follow_symlinks=follow))

    def removexattr(self, path: bytes, name: str, follow: bool) -> object:
        return os.removexattr(path, name, follow_symlinks=follow)

    def umask(self, mask: int) -> object:
        return os.umask(mask)


def _stays_below(event: str, args: tuple[object, ...]) -> None:
    """Of an actor: both sides would meet at an absolute path, and root's operations would change the machine.
    Operations name paths by bytes; what Python itself opens has names of text."""
    if event in CHANGES and any(isinstance(arg, bytes) and arg.startswith(b"/") for arg in args[:2]):
        raise RuntimeError(f"{event} of {args}: no operation has an absolute path")


def _serve(channel: Connection, top: Path, who: Identity | None) -> None:
    die_with_parent()
    os.umask(0o022)
    os.chdir(top)
    if who is not None:
        os.setgroups(who.groups)
        os.setresgid(who.gid, who.gid, who.gid)
        os.setresuid(who.uid, who.uid, who.uid)
    worker = Worker()
    sys.addaudithook(_stays_below)
    channel.send("ready")
    while True:
        op = channel.recv()
        if op is None:
            return
        channel.send(worker.do(op))


class Actor:
    """A process in `top`, as `who` (None: as this one). Close it always, and before its mount goes."""

    def __init__(self, top: Path, who: Identity | None) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _serve(theirs, top, who)
            except Exception as exc:  # noqa: BLE001 - told, and the parent misses an answer
                print(f"actor in {top}: {exc!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        theirs.close()
        self._receive("start")

    def _receive(self, what: object) -> Any:
        if not self._channel.poll(ANSWER_WITHIN):
            raise AssertionError(f"no answer within {ANSWER_WITHIN:g} s to {what}")
        return self._channel.recv()

    def do(self, op: Op) -> Any:
        self._channel.send(op)
        return self._receive(op)

    def close(self) -> None:
        """The process ends by itself, since others forked later hold its channel's ends too."""
        with suppress(BrokenPipeError):
            self._channel.send(None)
        self._channel.close()
        os.waitpid(self._pid, 0)
