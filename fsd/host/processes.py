"""Processes of this machine: who is at work below a directory, as /proc tells it; this one's streams."""

from __future__ import annotations

import os
from pathlib import Path


def users(place: Path) -> list[tuple[int, str]]:
    """(pid, name) of processes with a directory, file or mapping below `place`. Reads links only, so a stuck
    mount cannot block it. Processes that may not be looked at are left out."""
    prefix = os.fsencode(place)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and _uses(entry, prefix):
            try:
                name = Path(f"/proc/{entry}/comm").read_text().strip()
            except OSError:
                name = "?"
            found.append((int(entry), name))
    return sorted(found)


def _uses(pid: str, prefix: bytes) -> bool:
    base = f"/proc/{pid}".encode()

    def inside(path: bytes) -> bool:
        return path == prefix or path.startswith(prefix + b"/")

    try:
        links = [base + b"/cwd", base + b"/root", base + b"/exe"]
        links += [base + b"/fd/" + name for name in os.listdir(base + b"/fd")]
        for link in links:
            try:
                if inside(os.readlink(link)):
                    return True
            except OSError:
                # Closed meanwhile, or a kernel thread.
                continue
        with open(base + b"/maps", "rb") as maps:
            return any(inside(line[73:].rstrip(b"\n")) for line in maps if len(line) > 73)
    except OSError:
        return False


def set_streams(output: str) -> None:
    """Nothing to read, and what is written goes to the end of the file `output`."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    for source in (null, log):
        os.close(source)
