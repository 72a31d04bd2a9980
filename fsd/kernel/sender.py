"""Invalidations as messages to the kernel, written by a thread that cannot keep a killed daemon alive.

`_sender.c` says why and how. Where it was not built, or there is no second device (before Linux 4.2, or
/dev/fuse cannot be opened), pyfuse3 sends: a daemon that is killed in such a wait then needs its supervisor,
or the next `fsd mount`, to end (`remains.py`). The thread fsd-notify alone calls `invalidate_*`.
"""

from __future__ import annotations

import logging
import os
import struct
from typing import Final

import pyfuse3

log = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("=IiQ")  # length, what it is, 0: no answer to a request
_INODE: Final = struct.Struct("=Qqq")  # inode, offset, length
_ENTRY: Final = struct.Struct("=QII")  # directory, length of the name, flags
_INVAL_INODE: Final = 2
_INVAL_ENTRY: Final = 3


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

    def invalidate_inode(self, node: int, *, attr_only: bool) -> None:
        """Raises OSError."""
        if self._apart:
            self._write(_INVAL_INODE, _INODE.pack(node, -1 if attr_only else 0, 0))
        else:
            pyfuse3.invalidate_inode(node, attr_only=attr_only)

    def invalidate_entry(self, node: int, name: bytes) -> None:
        """Raises OSError."""
        if self._apart:
            self._write(_INVAL_ENTRY, _ENTRY.pack(node, len(name), 0) + name + b"\0")
        else:
            pyfuse3.invalidate_entry(node, name)

    def _write(self, what: int, body: bytes) -> None:
        error = self._send(_HEAD.pack(_HEAD.size + len(body), what, 0) + body)
        if error:
            raise OSError(error, os.strerror(error))
