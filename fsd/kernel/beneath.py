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
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from fsd.kernel import mountapi
from fsd.kernel.mountpoint import DEVICE, detach, list_mounts

log = logging.getLogger(__name__)

_ROOT_MODE: Final = "40000"


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
            mountapi.call(
                mountapi.MOVE_MOUNT,
                self._mount_fd,
                b"",
                mountapi.AT_FDCWD,
                os.fsencode(place),
                mountapi.EMPTY_PATH | mountapi.BENEATH,
            )
        except OSError as exc:
            log.info("no mount goes beneath the dead one at %s: %s", place, exc.strerror)
            return False
        detach(place, lazy=True, dead=True)
        return True

    def put(self, place: Path) -> None:
        """Mount at `place`, where nothing of ours is mounted any more. Raises OSError."""
        mountapi.call(
            mountapi.MOVE_MOUNT,
            self._mount_fd,
            b"",
            mountapi.AT_FDCWD,
            os.fsencode(place),
            mountapi.EMPTY_PATH,
        )

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
            with mountapi.opened(b"fuse") as context:
                options = {
                    "source": source,
                    "subtype": "fsd",
                    "fd": str(fuse),
                    "rootmode": _ROOT_MODE,
                    "user_id": str(os.getuid()),
                    "group_id": str(os.getgid()),
                }
                for key, value in options.items():
                    mountapi.call(
                        mountapi.FSCONFIG, context, mountapi.SET_STRING, key.encode(), os.fsencode(value), 0
                    )
                for flag in [*flags, *(["ro"] if read_only else [])]:
                    mountapi.call(mountapi.FSCONFIG, context, mountapi.SET_FLAG, flag.encode(), None, 0)
                mountapi.call(mountapi.FSCONFIG, context, mountapi.CREATE, None, None, 0)
                attributes = (
                    mountapi.ATTR_NOSUID | mountapi.ATTR_NODEV | (mountapi.ATTR_RDONLY if read_only else 0)
                )
                mount = mountapi.call(mountapi.FSMOUNT, context, mountapi.CLOEXEC, attributes)
        except OSError as exc:
            log.info("a mount cannot be made apart from its place here: %s", exc.strerror)
            return None
        made.pop_all()
    return Detached(fuse, mount)


def _count(place: Path, source: str) -> int:
    return sum(1 for entry in list_mounts() if entry.path == place and entry.source == source)
