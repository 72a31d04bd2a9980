"""Whether somebody waits in the kernel for a FUSE daemon's answer."""

from __future__ import annotations

import contextlib
from pathlib import Path


def parked(pid: int) -> bool:
    """Process or thread `pid` waits for an answer now."""
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_bytes()
        return b"fuse" in where or b"request_wait" in where
    return False
