"""How the daemon's memory is managed: garbage collector and heap of the C library, set once at its start."""

from __future__ import annotations

import gc
import logging
import os
from typing import Final

from fsd.host.heap import few_heaps, give_back
from fsd.model.limits import MIB

log = logging.getLogger(__name__)

# A collection looks at every inode in memory (30 ms at 100,000); what is made here is freed by its counts.
_COLLECT_AFTER: Final = (20_000, 20, 50)
GROWN: Final = 4 * MIB  # since the last look: then what is free is given back


def tune() -> None:
    """Few heaps, which give memory back: thresholds that grow with the largest buffer freed would keep it."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    few_heaps(mapped_from=4 * MIB, keep=8 * MIB)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class GiveBack:
    """Gives pages back that were freed among others that stay, which the C library keeps for good: a flush
    would leave a third of the memory of a mount behind. One thread.

    A call costs 0.1 to 1 ms, in which threads that allocate wait: only where the process has grown. A look
    that fails (no descriptor left) is left out: the daemon must not end for it.
    """

    def __init__(self) -> None:
        self._last = 0

    def look(self) -> None:
        """To be called now and then."""
        try:
            now = resident()
            if now > self._last + GROWN:
                give_back()
                self._last = resident()
        except OSError as exc:
            log.debug("how large the process is cannot be read: %s", exc)
            return
        self._last = min(now, self._last)
