"""The system calls a mount is made and moved with since Linux 5.2; the C library has no names for them yet.

Imports neither pyfuse3 nor trio. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from typing import Final

# These numbers are the same on every architecture Linux has gained since.
MOVE_MOUNT: Final = 429
FSOPEN: Final = 430
FSCONFIG: Final = 431
FSMOUNT: Final = 432
CLOEXEC: Final = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
SET_FLAG: Final = 0
SET_STRING: Final = 1
CREATE: Final = 6
ATTR_RDONLY: Final = 1
ATTR_NOSUID: Final = 2
ATTR_NODEV: Final = 4
EMPTY_PATH: Final = 4  # MOVE_MOUNT_F_EMPTY_PATH
BENEATH: Final = 0x200
AT_FDCWD: Final = -100
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def opened(name: bytes) -> Iterator[int]:
    """A context in which a filesystem of type `name` can be made."""
    context = call(FSOPEN, name, CLOEXEC)
    try:
        yield context
    finally:
        os.close(context)


def call(number: int, *args: int | bytes | None) -> int:
    """A system call. Raises OSError."""
    given = [ctypes.c_long(arg) if isinstance(arg, int) else ctypes.c_char_p(arg) for arg in args]
    result: int = _libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.ENOSYS, os.strerror(number or errno.ENOSYS))
    return result
