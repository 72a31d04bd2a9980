"""Invalidations as messages to the kernel, written by a thread that cannot keep a killed daemon alive.

`_sender.c` says why and how. Where it was not built, or there is no second device (before Linux 4.2, or
/dev/fuse cannot be opened), pyfuse3 sends: a daemon that is killed in such a wait then needs its supervisor,
or the next `fsd mount`, to end (`remains.py`). Several go at once, since each time two threads change places:
one by one 17 µs of CPU an invalidation, so 6 (20,000 names at once), where pyfuse3 sends 7.

The thread fsd-notify alone calls `invalidate`.
"""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Sequence
from typing import Final

import pyfuse3

from fsd.vfs.types import Invalidation

log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("=IiQ")  # length, what it is, 0: no answer to a request
_INODE: Final = struct.Struct("=Qqq")  # inode, offset, length
_ENTRY: Final = struct.Struct("=QII")  # directory, length of the name, flags
BATCH: Final = 64
_INVAL_INODE: Final = 2
_INVAL_ENTRY: Final = 3
_EXPIRE_ONLY: Final = 1  # known since Linux 6.2, not looked at before: there the name goes, and mounts on it


class Sender:
    """One connection's. Before `start` pyfuse3 sends."""

    def __init__(self) -> None:
        self._apart = False

    def start(self, connection: int) -> None:
        """Have the thread; `connection` must be under way. Once in a process."""
        try:
            from fsd.kernel import _sender

            _sender.start(connection)
        except (ImportError, OSError) as exc:
            log.info("invalidations are sent by a thread of the daemon's own: %s", exc)
            return
        self._send = _sender.send
        self._apart = True

    def invalidate(self, root_ino: int, ones: Sequence[Invalidation]) -> list[int]:
        """0 or the errno of each of at most BATCH; may block."""
        if self._apart:
            return self._send(b"".join(_message(root_ino, one) for one in ones))
        return [_plainly(root_ino, one) for one in ones]


def _message(root_ino: int, one: Invalidation) -> bytes:
    node = 1 if one.ino == root_ino else one.ino
    if one.name is None:
        body, what = _INODE.pack(node, -1 if one.attr_only else 0, 0), _INVAL_INODE
    else:
        head = _ENTRY.pack(node, len(one.name), _EXPIRE_ONLY if one.ask else 0)
        body, what = head + one.name + b"\0", _INVAL_ENTRY
    return _HEAD.pack(_HEAD.size + len(body), what, 0) + body


def _plainly(root_ino: int, one: Invalidation) -> int:
    node = 1 if one.ino == root_ino else one.ino
    try:
        if one.name is None:
            pyfuse3.invalidate_inode(node, attr_only=one.attr_only)
        else:
            pyfuse3.invalidate_entry(node, one.name)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0
