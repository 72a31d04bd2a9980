"""The files of a log by their names, for whoever only looks: `fsd mount` does before the daemon exists."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path
from typing import Final

from fsd.host.crc import crc32

# The header of a record: magic, kind, flags, length, number, inode, offset, CRC of the payload; its own CRC.
HEAD: Final = struct.Struct(">HBBIQQQI")
HEAD_CRC: Final = struct.Struct(">I")
HEAD_LEN: Final = HEAD.size + HEAD_CRC.size
STATE: Final = 1  # msgpack: session, ticket, … (records.State); first in every segment
NAME: Final = "log.%016x"
_SEGMENT: Final = re.compile(r"log\.([0-9a-f]{16})")
_PAGE: Final = 4096  # what a disk cannot read together
MARKER: Final = "log-retired"  # holds the last segment's number of a log that is being deleted


def legible(fd: int, size: int, at: int) -> bytes:
    """As pread, with zeros for the pages that the disk cannot read."""
    try:
        return os.pread(fd, size, at)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
    size = max(0, min(size, os.fstat(fd).st_size - at))
    out = []
    while size:
        step = min(size, _PAGE - at % _PAGE)
        try:
            out.append(os.pread(fd, step, at))
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            out.append(bytes(step))
        at, size = at + step, size - step
    return b"".join(out)


def segments(directory: Path) -> list[int]:
    """The segment numbers present, rising."""
    found = []
    for path in directory.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match is not None:
            found.append(int(match[1], 16))
    return sorted(found)


def replayed_bytes(directory: Path) -> int:
    """The size of the log that would be replayed; what a clean end has not erased yet is not, nor one of a
    mount that did nothing, as one of a checkpoint."""
    marker = directory / MARKER
    retired = int(marker.read_bytes()) if marker.exists() else 0
    left = [directory / (NAME % n) for n in segments(directory) if n > retired]
    return sum(path.stat().st_size for path in left) if any(_says_more(path) for path in left) else 0


def _says_more(segment: Path) -> bool:
    """Whether it holds something else than which session it belongs to. A damaged header counts, and so does
    what cannot be read: whoever opens the log says what is wrong."""
    try:
        with open(segment, "rb") as file:
            return _records_more(file.fileno())
    except OSError:
        return True


def _records_more(fd: int) -> bool:
    at = 0
    while head := os.pread(fd, HEAD_LEN, at):
        if not head.strip(b"\0"):
            return False  # allocated ahead
        if len(head) < HEAD_LEN or HEAD_CRC.unpack_from(head, HEAD.size)[0] != crc32(head[: HEAD.size]):
            return True
        kind, length = HEAD.unpack_from(head)[1:4:2]
        if kind != STATE:
            return True
        at += HEAD_LEN + length
    return False
