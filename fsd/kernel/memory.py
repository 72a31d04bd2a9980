"""How the daemon's memory is managed: garbage collector and heap of the C library, set once at its start."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

from fsd.model.limits import MIB

# A collection looks at every inode in memory (30 ms at 100,000); what is made here is freed by its counts.
_COLLECT_AFTER: Final = (20_000, 20, 50)
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def tune() -> None:
    """Few heaps, which give memory back: with one for each thread and thresholds that grow with the largest
    buffer freed, RSS stays at the sum of all threads' peaks."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)
        mallopt(_M_MMAP_THRESHOLD, 4 * MIB)
        mallopt(_M_TRIM_THRESHOLD, 8 * MIB)
