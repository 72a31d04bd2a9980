"""Mounts of this user's and mount namespaces: one that was made in a container or under `unshare -m`, found
from outside by the same records; and one that a namespace made later has a copy of. Imports neither pyfuse3
nor trio.
"""

from __future__ import annotations

import os
from pathlib import Path

from fsd.kernel.mountpoint import parse_mountinfo, places
from fsd.kernel.runtime import Record


def enter(record: Record) -> str:
    """How a command line begins that runs where the mount of `record` is listed: `nsenter -t PID -m`. Empty
    where it is listed here, or not known to be listed anywhere."""
    if places(record.source):
        return ""
    for pid in (record.pid, record.supervisor_pid):
        if pid and _lists(pid, record.source):
            return f"nsenter -t {pid} -m" + (" -U --preserve-credentials" if _other_users(pid) else "")
    return ""


def told(record: Record, command: str) -> tuple[str, str]:
    """That it is mounted elsewhere, and the hint with `command` (of fsd, with its operand); empty where it is
    not."""
    way = enter(record)
    if not way:
        return "", ""
    return f"mounted in another mount namespace (daemon {record.pid})", f"`{way} {command}`"


def is_copy(record: Record) -> bool:
    """Whether the daemon has its mount in a namespace of its own, so that the one listed here is a copy."""
    try:
        apart = os.readlink(f"/proc/{record.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except OSError:
        return False  # it has ended, or cannot be seen from here
    return apart and _lists(record.pid, record.source)


def goes_on(record: Record) -> bool:
    """Whether the daemon's own namespace lists the mount."""
    return _lists(record.pid, record.source)


def _lists(pid: int, source: str) -> bool:
    """A number that is somebody else's by now, or of another pid namespace, lists other things."""
    try:
        raw = Path(f"/proc/{pid}/mountinfo").read_bytes()
    except OSError:
        return False  # it has ended, or is not ours to look at
    return any(entry.source == source for entry in parse_mountinfo(raw))


def _other_users(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
    except OSError:
        return False
