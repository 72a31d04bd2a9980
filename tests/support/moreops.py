"""Rarer operations of a `Worker`: bad pointers, running programs, mappings, unbuffered handles, ACLs.

They are methods of a mixin, so that an operation is named in a sequence like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Callable
from typing import Any, Final

UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2
AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_REMOVEDIR: Final = 0x200
AT_SYMLINK_FOLLOW: Final = 0x400
# An address no process has.
NOWHERE: Final = ctypes.c_void_p(-1)
ALIGNED: Final = 4096
PROGRAM: Final = "/usr/bin/sleep"
_libc = ctypes.CDLL(None, use_errno=True)
# Entries of an ACL: (tag, permissions, id).
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NO_ID: Final = 0xFFFFFFFF


def called(name: str, *args: Any) -> int:
    """A function of the C library; raises OSError as Python's own do."""
    ctypes.set_errno(0)
    result: int = getattr(_libc, name)(*args)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def acl(entries: tuple[tuple[int, int, int], ...]) -> bytes:
    """As the kernel takes it in `system.posix_acl_*`."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def within(path: bytes, name: bytes) -> bytes:
    """`name` in the directory `path`. The empty path names none, though `/` behind it would be the root."""
    if not path:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    return path + b"/" + name


class MoreOps:
    """`slots` are open descriptors by number, as in `Worker`."""

    slots: dict[int, int]
    home: int  # the directory it was started in, open: its path may lead through what is closed to it

    def fallocate(self, slot: int, mode: int, offset: int, length: int) -> object:
        return called("fallocate", self.slots[slot], mode, ctypes.c_long(offset), ctypes.c_long(length))

    def copy_range(self, slot: int, start: int, to: int, at: int, length: int) -> object:
        return os.copy_file_range(self.slots[slot], self.slots[to], length, start, at)

    def name_slot(self, slot: int, path: bytes) -> object:
        """A name for what is open there, which only a file made without one may get."""
        of = b"/proc/self/fd/%d" % self.slots[slot]
        return called("linkat", AT_FDCWD, of, AT_FDCWD, path, AT_SYMLINK_FOLLOW)

    def enter(self, path: bytes) -> object:
        """Stands in `path` below where it was started."""
        os.fchdir(self.home)
        return os.chdir(path)

    def chdir(self, path: bytes) -> object:
        return os.chdir(path)

    def lchown(self, path: bytes, uid: int, gid: int) -> object:
        return os.lchown(path, uid, gid)

    def linkat(self, old: bytes, new: bytes, flags: int) -> object:
        return called("linkat", AT_FDCWD, old, AT_FDCWD, new, flags)

    def unlinkpath(self, path: bytes, flags: int) -> object:
        return called("unlinkat", AT_FDCWD, path, flags)

    def statfs(self, path: bytes) -> object:
        return os.statvfs(path).f_namemax

    def bind(self, path: bytes) -> object:
        with socket.socket(socket.AF_UNIX) as made:
            return made.bind(path)

    def connect(self, path: bytes) -> object:
        with socket.socket(socket.AF_UNIX) as made:
            return made.connect(path)

    def fault(self, name: str, *args: Any) -> object:
        """A call with a pointer to nowhere in the place of each None."""
        return called(name, *[NOWHERE if arg is None else arg for arg in args])

    def utimensat(self, path: bytes, times: tuple[tuple[int, int], tuple[int, int]], flags: int) -> object:
        """Seconds and nanoseconds as they are, the special values and wrong ones too."""
        raw = (ctypes.c_long * 4)(*times[0], *times[1])
        called("utimensat", AT_FDCWD, path, raw, flags)
        info = os.stat(path, follow_symlinks=not flags)
        # A time that was not given is the clock's.
        given = [nanoseconds not in (UTIME_NOW, UTIME_OMIT) and seconds for seconds, nanoseconds in times]
        if flags:
            given[0] = False  # a symlink's own access time moves when the path to it leads through it
        return [
            told if known is not False else None
            for told, known in zip((info.st_atime_ns, info.st_mtime_ns), given, strict=True)
        ]

    def futimens(self, slot: int, times: tuple[tuple[int, int], tuple[int, int]]) -> object:
        return called("futimens", self.slots[slot], (ctypes.c_long * 4)(*times[0], *times[1]))

    def posix_fallocate(self, slot: int, offset: int, length: int) -> object:
        os.posix_fallocate(self.slots[slot], offset, length)
        return os.fstat(self.slots[slot]).st_size

    def raw_open(self, path: bytes, flags: int, mode: int) -> object:
        """Closed again at once. Never waits."""
        with contextlib.suppress(OSError):
            if stat.S_IFMT(os.stat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
                return "a device"  # what opening gives depends on the mount's options
        return os.close(os.open(path, flags | os.O_NONBLOCK, mode))

    def reset(self) -> object:
        """As at the start, but for the working directory."""
        while self.slots:
            os.close(self.slots.popitem()[1])
        os.umask(0o022)
        return "reset"

    # programs --------------------------------------------------------------------------------------
    def program(self, path: bytes) -> object:
        """A program that can be run."""
        shutil.copyfile(PROGRAM, path)
        return os.chmod(path, 0o755)

    def while_it_runs(self, path: bytes, name: str, *args: Any) -> object:
        """Another operation, while the program at `path` runs."""
        with subprocess.Popen([path, b"60"], start_new_session=True) as running:
            try:
                act: Callable[..., object] = getattr(self, name)
                return act(*args)
            finally:
                running.kill()

    def execute(self, path: bytes) -> object:
        return subprocess.run([path, b"0"], check=False, timeout=30).returncode

    # mappings and unbuffered handles ---------------------------------------------------------------
    def map_write(self, slot: int, fill: int, size: int, offset: int) -> object:
        """Through a shared mapping of the whole file; flushed, so that times move at a known moment."""
        fd = self.slots[slot]
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return "no file"
        there = os.fstat(fd).st_size
        if offset >= there:
            return "beyond the end"
        with mmap.mmap(fd, there, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            count = min(size, there - offset)
            mapped[offset : offset + count] = bytes([fill]) * count
            mapped.flush()
        return count

    def map_read(self, slot: int, size: int, offset: int) -> object:
        fd = self.slots[slot]
        there = os.fstat(fd).st_size
        if not stat.S_ISREG(os.fstat(fd).st_mode) or offset >= there:
            return "nothing"
        with mmap.mmap(fd, there, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            part = mapped[offset : offset + size]
        return len(part), sorted({byte: part.count(byte) for byte in set(part)}.items())

    def _unbuffered(self, slot: int) -> int | None:
        """The descriptor with O_DIRECT set; None where it is no regular file's."""
        fd = self.slots[slot]
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_PATH:
            raise OSError(errno.EBADF, "")
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return fd

    def _buffered(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def direct_write(self, slot: int, fill: int, blocks: int, at: int) -> object:
        """Past the page cache: whole blocks at a whole block."""
        flags, size = fcntl.fcntl(self.slots[slot], fcntl.F_GETFL), os.fstat(self.slots[slot]).st_size
        if flags & os.O_APPEND and size % ALIGNED:
            return "behind half a block"  # which a disk refuses, and nothing else has to
        fd = self._unbuffered(slot)
        if fd is None:
            return "no file"
        with mmap.mmap(-1, blocks * ALIGNED) as page:
            page[:] = bytes([fill]) * len(page)
            try:
                return os.pwritev(fd, [page], at * ALIGNED)
            finally:
                self._buffered(fd)

    def direct_read(self, slot: int, blocks: int, at: int) -> object:
        fd = self._unbuffered(slot)
        if fd is None:
            return "no file"
        with mmap.mmap(-1, blocks * ALIGNED) as page:
            try:
                got = os.preadv(fd, [page], at * ALIGNED)
            finally:
                self._buffered(fd)
            part = bytes(page[:got])
        return got, sorted({byte: part.count(byte) for byte in set(part)}.items())

    # directories -----------------------------------------------------------------------------------
    def list_and_change(self, path: bytes, count: int, keep: int) -> object:
        """Makes `count` files, then a scan that removes each as it is told, but every `keep`th, and makes new
        ones meanwhile: each old name is told exactly once. What is left then is cleared."""
        names = {b"scan-%d-%s" % (number, b"x" * 100) for number in range(count)}
        for name in names:
            os.close(os.open(within(path, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        told: list[bytes] = []
        with os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                if not entry.name.startswith(b"scan-"):
                    continue
                told.append(entry.name)
                if number % keep:
                    os.unlink(entry.path)
                if number < count:
                    os.close(os.open(within(path, b"late-%d" % number), os.O_CREAT | os.O_WRONLY, 0o666))
        left = [n for n in os.listdir(path) if n.startswith((b"scan-", b"late-"))]
        for name in left:
            os.unlink(within(path, name))
        return len(told), set(told) == names

    def two_threads(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> object:
        """Two operations at once; told sorted, since either may be first. For those that do not meet, as two
        writes by a handle that appends do: theirs come in order, each from its thread."""
        told: list[str] = []

        def run(op: tuple[Any, ...]) -> None:
            try:
                told.append(repr((op[0], getattr(self, op[0])(*op[1:]))))
            except OSError as exc:
                told.append(repr((op[0], errno.errorcode[exc.errno or 0])))
            except KeyError:
                told.append(repr((op[0], "no slot")))

        threads = [threading.Thread(target=run, args=(op,)) for op in (first, second)]
        in_order = first[0] == second[0] == "write" and self._appends(first[1])
        for thread in threads:
            thread.start()
            if in_order:
                thread.join()
        for thread in threads:
            thread.join()
        return sorted(told)

    def _appends(self, slot: int) -> bool:
        return slot in self.slots and bool(fcntl.fcntl(self.slots[slot], fcntl.F_GETFL) & os.O_APPEND)

    # ACLs ------------------------------------------------------------------------------------------
    def set_acl(self, path: bytes, which: str, entries: tuple[tuple[int, int, int], ...]) -> object:
        os.setxattr(path, f"system.posix_acl_{which}", acl(entries))
        return oct(os.stat(path).st_mode)

    def get_acl(self, path: bytes, which: str) -> object:
        return os.getxattr(path, f"system.posix_acl_{which}")

    def drop_acl(self, path: bytes, which: str) -> object:
        with contextlib.suppress(KeyError):
            os.removexattr(path, f"system.posix_acl_{which}")
        return oct(os.stat(path).st_mode)
