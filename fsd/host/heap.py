"""The C library's heap, for processes of many threads with large buffers. Of glibc alone; else nothing."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def few_heaps(*, mapped_from: int, keep: int) -> None:
    """Two heaps for all threads, since with one for each RSS stays at the sum of all threads' peaks. Blocks
    of at least `mapped_from` bytes (at most 32 MiB) are mapped and given back each time, with a page fault
    for each 4 KiB; others come from the heap, of which up to `keep` unused bytes at its end stay. Once, at
    the start."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)
        mallopt(_M_MMAP_THRESHOLD, mapped_from)
        mallopt(_M_TRIM_THRESHOLD, keep)


def give_back() -> None:
    """Pages that were freed among others that stay go back to the system (0.1 to 1 ms)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
