"""The usual requests about files, past pyfuse3: names, contents, attributes and what waits for a commit.

`_shortcut.c` takes such a request apart and calls a function of `Shortcut` with plain arguments, which does
what the handler of that name does and gives the answer in the kernel's layout: without libfuse, two
coroutines and objects that are filled to be copied out again. What is not the common case (None) goes on to
the handler as if it had not been here; where something is waited for (`Park`) the handler begins with that.
`tests/kernel/test_shortcut.py` compares the answers of both, byte by byte.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Callable, Collection
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final

from fsd.kernel.callers import Caller, as_owner
from fsd.kernel.handlers import translated
from fsd.kernel.requests import (
    APPENDS,
    FROM_PAGES,
    KILLS,
    PLACED,
    Change,
    answer_late,
    call_directly,
    take_released,
    whole_directory,
)
from fsd.vfs.files import SYNC_FLAGS
from fsd.vfs.types import Park, Want

if TYPE_CHECKING:
    from fsd.kernel.operations import FsdOperations

# Operations as the kernel numbers them.
LOOKUP, GETATTR, SETATTR, UNLINK, RENAME, READ, WRITE, FSYNC = 1, 3, 4, 10, 12, 15, 16, 20
GETXATTR, FLUSH, OPENDIR, RELEASEDIR, FSYNCDIR, CREATE, RENAME2 = 22, 25, 27, 29, 30, 35, 45
# What a SETATTR says it sets. That of a size, or of nothing else, is the handler's.
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _KILLS = 1, 2, 4, 8, 16, 32, 1 << 11
_ATIME_NOW, _MTIME_NOW = 1 << 7, 1 << 8
_OWNER_OR_TIME: Final = _MODE | _UID | _GID | _ATIME | _MTIME
_SECOND: Final = 10**9

_OPENED: Final = struct.Struct("=QII")  # handle, flags
_KEEP_CACHE: Final = 1 << 1  # what pyfuse3 says of a new file
_LENGTH: Final = struct.Struct("=II")
_WRITTEN: Final = struct.Struct("=II")

Answer = bytes | int | EllipsisType | None


def _groups(pid: int, gid: int) -> Collection[int]:
    return Change(False, False, pid, gid).groups()


def _plain(handler: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """What is done around a body; see `handlers.handler`. `handler` is the name of the handler's body, which
    goes on with what this one waits for: called anew it might ask for it a second time."""

    def around(body: Callable[..., Answer]) -> Callable[..., Answer]:
        def run(self: Shortcut, *args: Any) -> Answer:
            operations = self.operations
            operations.came_to = None
            released = take_released()
            if released is not None:
                operations.were_released(released)
            try:
                return body(self, *args)
            except Park as park:
                operations.came_to = handler, park.with_traceback(None)
                return None
            except Exception as exc:  # noqa: BLE001 - translated, never swallowed
                return translated(exc, handler).errno

        return run

    return around


class Shortcut:
    """For one mount's `FsdOperations`. FUSE thread only."""

    def __init__(self, operations: FsdOperations) -> None:
        self.operations = operations
        self._volume = operations.volume

    def take(self) -> None:
        """From now on requests come here."""
        calls: dict[int, Callable[..., Answer]] = {
            UNLINK: self.unlink,
            RENAME: self.rename,
            RENAME2: self.rename,
            WRITE: self.write,
            CREATE: self.create,
            SETATTR: self.setattr,
            GETATTR: self.getattr,
            GETXATTR: self.getxattr,
            READ: self.read,
            FLUSH: self.flush,
            FSYNC: self.fsync,
            FSYNCDIR: self.fsyncdir,
            RELEASEDIR: self.releasedir,
        }
        if self._volume.core.options.consistency != "open":  # else each may ask, and is known by its context
            calls[LOOKUP] = self.lookup
            calls[OPENDIR] = self.opendir
        call_directly(calls, self._volume.waiting_jobs)

    @_plain("lookup")
    def lookup(self, parent: int, name: bytes) -> Answer:
        operations = self.operations
        where = operations.ino(parent)
        inode = self._volume.lookup(where, name)
        operations.now_answered()
        if inode is None:
            answer = operations.entries.absent_bytes(where, name)
            directory = self._volume.node(where)
            if directory.complete and not directory.names_stale and not self._volume.silent:
                whole_directory(parent, directory.entries, answer)
            return answer
        return operations.entries.entry_bytes(inode)

    @_plain("unlink")
    def unlink(self, parent: int, name: bytes) -> Answer:
        self._volume.unlink(self.operations.ino(parent), name)
        self.operations.changed_in(parent)
        return 0

    @_plain("rename")
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> Answer:
        operations = self.operations
        self._volume.rename(operations.ino(parent), name, operations.ino(new_parent), new_name, flags)
        operations.changed_in(parent)
        if new_parent != parent:
            operations.changed_in(new_parent)
        return 0

    @_plain("create")
    def create(
        self, parent: int, name: bytes, mode: int, flags: int, umask: int, uid: int, gid: int, pid: int
    ) -> Answer:
        if b"/" in name:  # O_TMPFILE
            return None
        operations = self.operations
        inode, fh = self._volume.create(operations.ino(parent), name, mode, uid, gid, flags, umask)
        operations.made_and_opened(parent, inode, fh, flags, pid)
        operations.now_answered()
        return operations.entries.entry_bytes(inode) + _OPENED.pack(fh, _KEEP_CACHE, 0)

    @_plain("write_file")
    def write(self, fh: int, offset: int, data: bytes, told: int, pid: int, gid: int) -> Answer:
        operations, volume = self.operations, self._volume
        handle = volume.handles.get(fh)
        # Where something follows the change, or the kernel does not say what it takes away.
        aside = handle is None or handle.flags & (SYNC_FLAGS | os.O_DIRECT) or operations.direct.writers
        if aside or not operations.told_of_privileges:
            return None
        appends = bool(told & APPENDS) if told & (APPENDS | PLACED) else None
        groups = functools.partial(_groups, pid, gid)
        done = volume.write(
            fh, offset, data, bool(told & KILLS), groups, mapped=bool(told & FROM_PAGES), appends=appends
        )
        operations.told_handle(fh)
        return _WRITTEN.pack(done, 0)

    @_plain("set_attributes")
    def setattr(
        self,
        nodeid: int,
        valid: int,
        owner: tuple[int, int, int],
        atime: tuple[int, int],
        mtime: tuple[int, int],
        uid: int,
        gid: int,
        pid: int,
    ) -> Answer:
        operations = self.operations
        if valid & _SIZE or not valid & _OWNER_OR_TIME or not operations.told_of_privileges:
            return None
        if valid & (_ATIME_NOW | _MTIME_NOW) and not valid & (_ATIME | _MTIME):
            return None
        inode = self._volume.setattr(
            operations.ino(nodeid),
            mode=owner[0] & 0o7777 if valid & _MODE else None,
            uid=owner[1] if valid & _UID else None,
            gid=owner[2] if valid & _GID else None,
            atime=atime[0] * _SECOND + atime[1] if valid & _ATIME else None,
            mtime=mtime[0] * _SECOND + mtime[1] if valid & _MTIME else None,
            by=uid,
            groups=functools.partial(as_owner, Caller(uid, gid, pid)),
            kills=bool(valid & _KILLS),
            chowns=None,
        )
        operations.set_already(nodeid, inode)
        operations.now_answered()
        return operations.entries.attr_bytes(inode)

    @_plain("getattr")
    def getattr(self, nodeid: int) -> Answer:
        operations = self.operations
        ino = operations.ino(nodeid)
        if self._volume.node(ino).is_dir:  # remembered as its answer goes through libfuse
            return None
        inode = self._volume.getattr(ino)
        operations.told_attributes(nodeid, inode)
        return operations.entries.attr_bytes(inode)

    @_plain("xattr")
    def getxattr(self, nodeid: int, name: bytes, size: int) -> Answer:
        value = self.operations.xattr(nodeid, name)
        if not size:
            return _LENGTH.pack(len(value), 0)
        return value if len(value) <= size else errno.ERANGE

    @_plain("read")
    def read(self, fh: int, offset: int, size: int) -> Answer:
        if self.operations.direct.writers:
            return None
        data = self._volume.read(fh, offset, size)
        self._volume.ask()  # for what it is about to read
        return data

    # What may be to wait for, and is all there is to do then.

    @_plain("flush_handle")
    def flush(self, fh: int, unique: int, pid: int) -> Answer:
        return self._waits(self.operations.flush_handle, fh, unique, pid)

    @_plain("fsync_handle")
    def fsync(self, fh: int, unique: int, pid: int) -> Answer:
        return self._waits(self.operations.fsync_handle, fh, unique, pid)

    @_plain("fsyncdir")
    def fsyncdir(self, fh: int, unique: int, pid: int) -> Answer:
        return self._waits(self._volume.fsyncdir, fh, unique, pid)

    def _waits(self, call: Callable[[int], None], fh: int, unique: int, pid: int) -> Answer:
        try:
            call(fh)
        except Park as park:
            if park.again:
                raise
            self._answer_after(park.want, unique, pid)
            return ...
        return 0

    def _answer_after(self, want: Want, unique: int, pid: int) -> None:
        """As a coroutine that waits does (`FsdOperations.parked`), without one."""
        machine = self.operations.machine

        def ended(error: BaseException | None) -> None:
            forget()
            told = error or want.error
            answer_late(unique, 0 if told is None else translated(told, want.what).errno)

        within = machine.handler_timeout()
        forget = machine.watch(want, ended, within=within, pid=pid, inherited=True)

    # directories

    @_plain("opendir")
    def opendir(self, nodeid: int, pid: int) -> Answer:
        return _OPENED.pack(self.operations.open_directory(nodeid, None, pid), 0, 0)

    @_plain("release_directory")
    def releasedir(self, fh: int, unique: int, pid: int) -> Answer:
        self.operations.release_directory(fh)
        return 0
