"""Records of mounts that ended long ago go: without this each mount point ever used leaves one for good.

A record is kept after the end so that `fsd wait-exit` tells how it went, and as long as the state directory
holds something of that mount, since it names the command that sends it. Imports neither pyfuse3 nor trio.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from fsd.kernel.mountpoint import list_mounts
from fsd.kernel.runtime import Record, RuntimeDir, fixed_directory
from fsd.model.errors import FsdError
from fsd.model.limits import RECORDS_KEPT, RECORDS_MAX

# What in a mount's own directory is somebody's only copy (vfs.log, vfs.refused, vfs.aside).
_LEFT: Final = ("log.*", "refused/*", "damaged/*")


# A write that was killed leaves `.<id>.json.<random>`.
_NAME: Final = re.compile(r"\.?([0-9a-f]{16})\.(?:json|sock|lock|json\.[0-9a-f]+)")


def prune(directory: RuntimeDir) -> int:
    """Remove what is left of mounts that nobody serves and the kernel does not list: record, socket and lock.
    How many. Leaves alone what another process is about to use."""
    listed = {entry.ids[1] for entry in list_mounts() if entry.ids}
    old = directory.host.wall_ns() / 1e9 - RECORDS_KEPT
    found = [(changed, one) for one, changed in _changed(directory.path).items() if one not in listed]
    if len(found) <= RECORDS_MAX:  # then none goes that is young
        found = [(changed, one) for changed, one in found if changed < old]
    ended = sorted((changed, one) for changed, one in found if not _needed(directory.load(one)))
    beyond = len(ended) - RECORDS_MAX
    gone = sum(
        _remove(directory, mount_id)
        for at, (changed, mount_id) in enumerate(ended)
        if changed < old or at < beyond
    )
    _prune_pointers(RuntimeDir(fixed_directory(os.geteuid()), directory.host))
    return gone


def _changed(path: Path) -> dict[str, float]:
    """The mounts something lies there of, and when any of it was last written."""
    found: dict[str, float] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    found[match[1]] = max(found.get(match[1], 0.0), _written(entry))
    except OSError:
        pass  # what was read by then; nothing where there is no directory
    return found


def _written(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0  # it went meanwhile


def _files(directory: RuntimeDir, mount_id: str) -> list[Path]:
    return [
        *directory.path.glob(f".{mount_id}.json.*"),
        *directory.files(mount_id),
    ]


def _needed(record: Record | None) -> bool:
    """Whether something of the mount waits in its state directory."""
    if record is None:
        return False
    own = Path(record.state_dir)
    return any(next(own.glob(pattern), None) is not None for pattern in _LEFT)


def _remove(directory: RuntimeDir, mount_id: str) -> bool:
    try:
        lock = directory.lock(mount_id)
    except OSError:
        return False  # another user's, or gone meanwhile
    if lock is None:
        return False  # it lives
    try:
        for file in _files(directory, mount_id):  # the lock is the last
            file.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _prune_pointers(fixed: RuntimeDir) -> None:
    """Those that lead to no record."""
    for mount_id in _changed(fixed.path):
        pointer = fixed.load(mount_id)
        if pointer is None or Path(pointer.runtime_dir) == fixed.path:
            continue
        try:
            if RuntimeDir(Path(pointer.runtime_dir), fixed.host).load(mount_id) is None:
                fixed.record_path(mount_id).unlink(missing_ok=True)
        except (OSError, FsdError):
            continue  # another user's
