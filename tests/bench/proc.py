"""What /proc says of processes: CPU time, memory; and dropping the kernel's caches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def cpu(pids: Iterable[int]) -> float:
    """Seconds of CPU the processes have used, ended threads included. Grain: two ticks a process."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def memory(pids: Iterable[int], key: str) -> float:
    """MiB of `VmRSS` or `VmHWM`, summed."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(key + ":"):
                    total += int(line.split()[1]) / 1024
    return total


def running(binary: Path) -> set[int]:
    """Processes of a program. Not by their command lines: JuiceFS rewrites its own."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if os.readlink(f"/proc/{entry}/exe") == os.fspath(binary.resolve()):
                    found.add(int(entry))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_end(pids: Iterable[int], timeout: float) -> None:
    """Raises `TimeoutError` when one still lives after `timeout`."""
    until = time.monotonic() + timeout
    for pid in pids:
        while alive(pid):
            if time.monotonic() > until:
                raise TimeoutError(f"process {pid} still runs after {timeout:.0f} s")
            time.sleep(0.005)


def await_true(what: str, holds: Callable[[], bool], timeout: float) -> None:
    until = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.005)


def can_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    """Needs root: without it "cold" means mounted anew only, which the report says. What a peer left unsynced
    stays in the cache, to its advantage: a sync of the whole disk would wait for everybody else's."""
    if can_drop_caches():
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
