"""The kernel's table of mounts as text: mount points of other tests may have names of any bytes."""

from __future__ import annotations

import os
from pathlib import Path


def mounts() -> str:
    """/proc/self/mounts; bytes that are no UTF-8 as half characters."""
    return os.fsdecode(Path("/proc/self/mounts").read_bytes())


def mountinfo() -> list[str]:
    """The lines of /proc/self/mountinfo, likewise."""
    return os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")[:-1]
