"""A daemon that was killed and cannot end.

A thread of it may wait in the kernel for the lock of a directory (or of a page) that belongs to a request the
daemon has not answered, and nothing interrupts that wait. The leader is a zombie then, `waitpid` does not
return, and the open /dev/fuse of that thread keeps the connection, and with it the request, alive: both wait
for good unless the connection is ended from outside. `sender.py` keeps ours out of that as far as it can.

Imports neither pyfuse3 nor trio. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Final

from fsd.kernel import mountapi
from fsd.kernel.mountpoint import MountEntry, force, list_mounts, mounted_at
from fsd.model.errors import Busy

PACE: Final = 0.05
ENDING: Final = 0.3  # so long threads may take to end without anybody's help
TRIES: Final = 100  # 5 s of PACE: threads that were freed end within milliseconds
_pace = threading.Event()  # never set: the time between two looks
_CONTROL: Final = "/sys/fs/fuse/connections"  # where fusectl is mounted, if it is


def cannot_end(pid: int) -> bool:
    """Whether process `pid` was killed while a thread of it still is in the kernel."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state == b"Z" and len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False  # gone


def end_connections(place: Path, source: str) -> bool:
    """End the connections of the dead mounts of `source` at `place`, which stay mounted and answer ENOTCONN
    from then on. Only to be called when their daemon is dead. False when there is none that could be ended:
    `by_hand` says what to do then."""
    found = [entry for entry in list_mounts() if entry.path == place and entry.source == source]
    return any([_end(entry) for entry in found])


def by_hand(place: Path) -> str:
    """A hint."""
    return f"as root: `umount -f {place}`, which ends the connection it waits in"


def free(pid: int, place: Path, source: str) -> None:
    """Let the daemon `pid` of `source` at `place` end, if it was killed and cannot. Raises `Busy` with what
    to do by hand; a daemon that lives, or has ended, is no error."""
    helped = False
    for turn in range(TRIES):
        if not cannot_end(pid):
            return
        if turn * PACE >= ENDING:
            helped = end_connections(place, source) or helped
            if not helped:
                break
        _pace.wait(PACE)
    raise Busy(
        f"the daemon of {place} (pid {pid}) was killed, and a thread of it waits in the kernel",
        hint=by_hand(place),
    )


def _end(entry: MountEntry) -> bool:
    """Whoever mounted may write into fusectl's file, where that is mounted; root can always have it."""
    abort = f"{entry.device.partition(':')[2]}/abort"
    try:
        _write(os.open(f"{_CONTROL}/{abort}", os.O_WRONLY | os.O_CLOEXEC))
        return True
    except OSError:
        if os.geteuid() != 0:
            return False
    try:
        with mountapi.opened(b"fusectl") as context:
            mountapi.call(mountapi.FSCONFIG, context, mountapi.CREATE, None, None, 0)
            control = mountapi.call(mountapi.FSMOUNT, context, mountapi.CLOEXEC, 0)
        try:
            _write(os.open(abort, os.O_WRONLY | os.O_CLOEXEC, dir_fd=control))
        finally:
            os.close(control)
        return True
    except OSError:
        return _force(entry)


def _write(fd: int) -> None:
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


def _force(entry: MountEntry) -> bool:
    """In a user namespace, or before Linux 5.2: a forced unmount ends the connection, and fails while
    somebody has the mount open."""
    if mounted_at(entry.path) != entry:
        return False
    with contextlib.ExitStack() as held:
        try:
            fd = os.open(entry.path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        held.callback(os.close, fd)
        return force(entry.path) in (0, errno.EBUSY)
