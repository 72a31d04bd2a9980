"""The files of a log by their names, for whoever only looks: `fsd mount` does before the daemon exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

NAME: Final = "log.%016x"
_SEGMENT: Final = re.compile(r"log\.([0-9a-f]{16})")
MARKER: Final = "log-retired"  # holds the last segment's number of a log that is being deleted


def segments(directory: Path) -> list[int]:
    """The segment numbers present, rising."""
    found = []
    for path in directory.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match is not None:
            found.append(int(match[1], 16))
    return sorted(found)


def replayed_bytes(directory: Path) -> int:
    """The size of the log that would be replayed; what a clean end has not erased yet is not."""
    marker = directory / MARKER
    retired = int(marker.read_bytes()) if marker.exists() else 0
    return sum((directory / (NAME % n)).stat().st_size for n in segments(directory) if n > retired)
