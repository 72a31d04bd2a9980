"""`Host`: clock, random bytes and boot id of this machine, and the named crash points.

A crash point stands before and after every durable step. In production it costs one attribute read. A test
passes a `Crasher`, or starts a real process with `FSD_CRASH=<name>[:<count>]` read by `fsd.cli` alone, and
the process ends there as by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from fsd.model.plain import dataclass, field

# <linux/time.h>; the time module does not name it.
CLOCK_REALTIME_COARSE: Final = 5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


_WALL_NS: Final = partial(time.clock_gettime_ns, CLOCK_REALTIME_COARSE)


def _no_crash(name: str) -> None:
    return None


def read_boot_id() -> str:
    """The kernel's boot id; another one means that unsynced file bytes may be gone."""
    return BOOT_ID.read_text().strip()


@dataclass(frozen=True, slots=True)
class Host:
    """What the process asks its machine for. `wall_ns` is CLOCK_REALTIME_COARSE as the kernel stamps files;
    `monotonic` seconds for deadlines. `crash_point(name)` returns or never does."""

    wall_ns: Callable[[], int] = _WALL_NS
    monotonic: Callable[[], float] = time.monotonic
    token_bytes: Callable[[int], bytes] = os.urandom
    boot_id: Callable[[], str] = read_boot_id
    crash_point: Callable[[str], None] = _no_crash


@dataclass(slots=True)
class Crasher:
    """Ends this process by SIGKILL at the `count`-th time the point `name` is passed."""

    name: str
    count: int = 1
    seen: int = field(default=0)

    def __call__(self, name: str) -> None:
        if name != self.name:
            return
        self.seen += 1
        if self.seen >= self.count:
            os.kill(os.getpid(), signal.SIGKILL)
