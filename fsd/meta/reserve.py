"""Room kept back on SQLite's disk for what makes room: without it nothing could be removed from a full disk.

A removal writes too (rows, the change feed, the WAL). When such a write finds the disk full, the reserve is
given up; from then on only writes that make room are let through, until the reserve can be had again. So
what it left can not be used up by others. Any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Final

from fsd.host.files import allocate
from fsd.model.errors import NoSpace
from fsd.model.limits import DISK_RESERVE

log = logging.getLogger(__name__)

FILE: Final = "reserve"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def give_up_to_open(directory: Path) -> bool:
    """Before there is a `Reserve`: opening the database found the disk full. Whether there was something to
    give up."""
    try:
        size = os.stat(directory / FILE).st_size
    except FileNotFoundError:
        return False
    if size:
        log.warning("the disk is full: %s is given up to open the database", directory / FILE)
        os.truncate(directory / FILE, 0)
    return size > 0


class Reserve:
    """DISK_RESERVE bytes in `directory`. `held`: they are there. An empty file says that they were given up,
    also to the next start; where they never fitted there is no file, and writes go on without them."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._given_up = self._path.exists()
        self.held = self._take()
        if not self.held and not self._given_up:
            log.warning("%s does not fit: nothing is kept back for what makes room", self._path)
            self._path.unlink()

    def check(self) -> None:
        """Before a write that makes no room: raises `NoSpace` while the reserve was given up and cannot be
        had again."""
        if self.held or not self._given_up:
            return
        directory = self._path.parent
        with self._lock:
            disk = os.statvfs(directory)
            if not self.held and disk.f_bavail * disk.f_frsize >= DISK_RESERVE:
                self.held = self._take()
        if not self.held:
            raise NoSpace(f"the disk under {directory} is full", hint=f"free space under {directory}")

    def give_up(self) -> None:
        """The disk is full and something wants to make room."""
        with self._lock:
            if self.held:
                log.warning("the disk is full: %s is given up for what makes room", self._path)
                self.held, self._given_up = False, True
                os.truncate(self._path, 0)

    def _take(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            allocate(fd, 0, DISK_RESERVE)
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            os.ftruncate(fd, 0)
            return False
        finally:
            os.close(fd)
        return True
