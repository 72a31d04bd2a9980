"""util-linux's own table of mounts, so that `umount PATH` calls our helper.

umount(8) asks `statfs` for the type first and then only knows "fuse": it would look for `umount.fuse` and,
without one, detach at once. For a mount that /run/mount/utab lists it reads the mount table instead, finds
`fuse.fsd`, and calls /sbin/umount.fuse.fsd, which returns when everything is on the server (measured here,
util-linux 2.38.1). The entry is made and removed by mount(8) and umount(8) themselves, faked, under their
own lock. Root only; where something is missing, `umount` stays what it is: it detaches at once.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from fsd.host.programs import program

log = logging.getLogger(__name__)

HELPER: Final = Path("/sbin/umount.fuse.fsd")
UTAB: Final = Path("/run/mount/utab")
TIMEOUT: Final = 10.0


def enter(source: str, place: Path) -> None:
    """Have `umount PLACE` call the helper; after mounting. May block on a stat of the mount: any thread
    but the FUSE thread."""
    if os.geteuid() == 0 and HELPER.exists():
        leave(place)  # what a killed daemon left
        _run(["mount", "-i", "-f", "-t", "fuse.fsd", "-o", "uhelper=fuse.fsd", source, str(place)])


def leave(place: Path) -> None:
    """Remove the entries of `place`, if there are any; after the mount is gone."""
    if os.geteuid() != 0:
        return
    # One call removes one entry.
    for _ in range(_entries(place)):
        _run(["umount", "--fake", "-i", str(place)])


def _entries(place: Path) -> int:
    try:
        listed = UTAB.read_bytes()
    except FileNotFoundError:
        return 0
    return listed.count(b" TARGET=" + _escaped(place) + b" ")


def _escaped(place: Path) -> bytes:
    raw = os.fsencode(place)
    for char in b"\\ \t\n":
        raw = raw.replace(bytes([char]), b"\\%03o" % char)
    return raw


def _run(command: list[str]) -> None:
    """A failure costs the convenience alone, so it is only logged."""
    import subprocess  # beside what the mount waits for

    try:
        done = subprocess.run(
            [program(command[0]), *command[1:]], capture_output=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        log.warning("%s: %s", command[0], exc)
        return
    if done.returncode:
        log.warning("%s: %s", " ".join(command), done.stderr.decode(errors="replace").strip())
