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
    ended = []
    for mount_id in _ids(directory.path):
        if mount_id not in listed and not _needed(directory.load(mount_id)):
            ended.append((_changed(directory, mount_id), mount_id))
    old = directory.host.wall_ns() / 1e9 - RECORDS_KEPT
    ended.sort()
    beyond = len(ended) - RECORDS_MAX
    gone = sum(
        _remove(directory, mount_id)
        for at, (changed, mount_id) in enumerate(ended)
        if changed < old or at < beyond
    )
    _prune_pointers(RuntimeDir(fixed_directory(os.geteuid()), directory.host))
    return gone


def _ids(path: Path) -> set[str]:
    try:
        names = os.listdir(path)
    except OSError:
        return set()
    return {match[1] for name in names if (match := _NAME.fullmatch(name))}


def _files(directory: RuntimeDir, mount_id: str) -> list[Path]:
    return [
        *directory.path.glob(f".{mount_id}.json.*"),
        *directory.files(mount_id),
    ]


def _changed(directory: RuntimeDir, mount_id: str) -> float:
    """When anything of it was last written."""
    times = [0.0]
    for file in _files(directory, mount_id):
        try:
            times.append(file.lstat().st_mtime)
        except OSError:
            continue  # that one does not exist, or went meanwhile
    return max(times)


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
    for mount_id in _ids(fixed.path):
        pointer = fixed.load(mount_id)
        if pointer is None or Path(pointer.runtime_dir) == fixed.path:
            continue
        try:
            if RuntimeDir(Path(pointer.runtime_dir), fixed.host).load(mount_id) is None:
                fixed.record_path(mount_id).unlink(missing_ok=True)
        except (OSError, FsdError):
            continue  # another user's
