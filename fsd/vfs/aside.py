"""Copies of damaged logs.

A log that is damaged in the middle (a disk that gives back other bytes) is read only up to there, and deleted
when that was sent: what lies behind may be somebody's only copy, so it is put aside first, whole, under
`damaged/` in the state directory, for a person to look at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fsd.host.files import fsync_dir
from fsd.host.seam import Host
from fsd.model.errors import NoSpace
from fsd.model.limits import MIB
from fsd.vfs.log import FULL, Log
from fsd.vfs.segments import NAME, legible

DIRECTORY: Final = "damaged"


def put_aside(directory: Path, log: Log, host: Host) -> Path:
    """A durable copy of every segment of `log`, which was scanned, with zeros where the disk cannot read it;
    where it is. The same damage found again is the same copy. Raises `NoSpace` when there is no room: then
    nothing of the log may be changed."""
    numbers = Log.segments(directory)
    name = f"log-{numbers[0]:x}-{log.last_number}"
    target, part = directory / DIRECTORY / name, directory / DIRECTORY / f"{name}.part"
    if target.exists():
        return target
    try:
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in numbers:
            copy = part / (NAME % number)
            with open(directory / (NAME % number), "rb") as source, open(copy, "wb") as file:
                at = 0
                while piece := legible(source.fileno(), MIB, at):
                    file.write(piece)
                    at += len(piece)
                file.flush()
                os.fsync(file.fileno())
        fsync_dir(part)
        host.crash_point("log.aside")
        os.rename(part, target)
        fsync_dir(target.parent)
        fsync_dir(directory)
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        import shutil  # here alone: see `decide`

        shutil.rmtree(part, ignore_errors=True)
        raise NoSpace(
            f"the log in {directory} is damaged, and there is no space for the copy that is kept of it",
            hint=f"free space under {directory}, or copy {directory}/log.* elsewhere and delete them",
        ) from exc
    host.crash_point("log.aside.kept")
    return target


def kept(directory: Path) -> list[Path]:
    """The copies there are."""
    return sorted(path for path in (directory / DIRECTORY).glob("log-*") if path.suffix != ".part")
