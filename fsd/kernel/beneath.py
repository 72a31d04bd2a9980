"""A new mount in the place of a dead one, with no moment in which the directory below lies open.

The dead mount of a killed daemon keeps writes away from the directory below: they meet ENOTCONN. Mounting on
top of it is no way out, since the lower of two cannot be taken away alone; taking it away first leaves
milliseconds in which a write lands in the bare directory. So the new mount is made detached and put *beneath*
the dead one (`MOVE_MOUNT_BENEATH`, Linux 6.5), and the dead one is taken away then. Root only; without the
kernel, the rights or a place that allows it the caller does it the other way round.

Imports neither pyfuse3 nor trio. Main thread of the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from fsd.kernel.mountpoint import DEVICE, detach, list_mounts

log = logging.getLogger(__name__)

# System calls since 5.2; these numbers are the same on every architecture Linux has gained since.
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_CLOEXEC: Final = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CREATE: Final = 6
_ATTR_RDONLY: Final = 1
_ATTR_NOSUID: Final = 2
_ATTR_NODEV: Final = 4
_EMPTY_PATH: Final = 4  # MOVE_MOUNT_F_EMPTY_PATH
_BENEATH: Final = 0x200
_AT_FDCWD: Final = -100
_ROOT_MODE: Final = "40000"
_libc = ctypes.CDLL(None, use_errno=True)


class Detached:
    """A FUSE mount that is nowhere yet. `fuse_fd` is its connection, for whoever serves it."""

    def __init__(self, fuse_fd: int, mount_fd: int) -> None:
        self.fuse_fd = fuse_fd
        self._mount_fd = mount_fd

    def replace(self, place: Path, source: str) -> bool:
        """Take the place of the dead mount of `source` at `place`, which must be listed there. False, with
        nothing changed, where the kernel does not let a mount be put beneath it. Raises what detaching the
        dead one does."""
        while _count(place, source) > 1:
            detach(place, lazy=True, dead=True)  # the one below it is as dead
        try:
            _call(
                _MOVE_MOUNT,
                self._mount_fd,
                b"",
                _AT_FDCWD,
                os.fsencode(place),
                _EMPTY_PATH | _BENEATH,
            )
        except OSError as exc:
            log.info("no mount goes beneath the dead one at %s: %s", place, exc.strerror)
            return False
        detach(place, lazy=True, dead=True)
        return True

    def put(self, place: Path) -> None:
        """Mount at `place`, where nothing of ours is mounted any more. Raises OSError."""
        _call(_MOVE_MOUNT, self._mount_fd, b"", _AT_FDCWD, os.fsencode(place), _EMPTY_PATH)

    def close(self) -> None:
        """Forget the mount's own descriptor: a mount that was put somewhere stays, another one ends. The
        connection is the server's."""
        os.close(self._mount_fd)


def make(source: str, flags: Collection[str], *, read_only: bool) -> Detached | None:
    """A detached mount with the kernel's options `flags` (`allow_other`, …); None where that is not possible
    here, which the log says."""
    if os.geteuid() != 0:
        return None
    with contextlib.ExitStack() as made:
        try:
            fuse = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
            made.callback(os.close, fuse)
            with _opened(b"fuse") as context:
                options = {
                    "source": source,
                    "subtype": "fsd",
                    "fd": str(fuse),
                    "rootmode": _ROOT_MODE,
                    "user_id": str(os.getuid()),
                    "group_id": str(os.getgid()),
                }
                for key, value in options.items():
                    _call(_FSCONFIG, context, _SET_STRING, key.encode(), os.fsencode(value), 0)
                for flag in [*flags, *(["ro"] if read_only else [])]:
                    _call(_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0)
                _call(_FSCONFIG, context, _CREATE, None, None, 0)
                attributes = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0)
                mount = _call(_FSMOUNT, context, _CLOEXEC, attributes)
        except OSError as exc:
            log.info("a mount cannot be made apart from its place here: %s", exc.strerror)
            return None
        made.pop_all()
    return Detached(fuse, mount)


@contextlib.contextmanager
def _opened(name: bytes) -> Iterator[int]:
    context = _call(_FSOPEN, name, _CLOEXEC)
    try:
        yield context
    finally:
        os.close(context)


def _count(place: Path, source: str) -> int:
    return sum(1 for entry in list_mounts() if entry.path == place and entry.source == source)


def _call(number: int, *args: int | bytes | None) -> int:
    """A system call. Raises OSError."""
    given = [ctypes.c_long(arg) if isinstance(arg, int) else ctypes.c_char_p(arg) for arg in args]
    result: int = _libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.ENOSYS, os.strerror(number or errno.ENOSYS))
    return result
