"""A small ext4 of its own whose disk can die: what a state directory sees when the machine restarts.

`restart` ends it with ext4's shutdown ioctl without writing the journal out, so that everything not synced
is gone, and mounts it again: the journal is replayed as after a power cut. Needs root and loop devices;
`available` says why not, and a test then plays the restart through the `Host` seam alone.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path
from types import TracebackType

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NOLOGFLUSH = 2
_MIB = 1 << 20


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def available(directory: Path) -> str | None:
    """None when a loop-mounted ext4 works here, else the reason."""
    try:
        with LoopDisk(directory / "probe", 8):
            return None
    except (OSError, RuntimeError) as exc:
        return str(exc)


class LoopDisk:
    """An ext4 of `mib` MiB mounted at `base`/disk. Use as a context: always unmounted and deleted."""

    def __init__(self, base: Path, mib: int) -> None:
        self._image = base / "image"
        self.path = base / "disk"
        self._size = mib * _MIB
        self._mounted = False
        self._device = ""

    def __enter__(self) -> LoopDisk:
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            image.truncate(self._size)
        try:
            self._must("mkfs.ext4", "-q", "-F", "-m", "0", os.fspath(self._image))
            self._mount()
        except BaseException:
            self._cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup()

    def die(self) -> None:
        """The disk stops at once: nothing unsynced is written any more, every call answers EIO."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(fd)

    def turn_read_only(self) -> None:
        """What ext4 does on most machines when it meets an error: everything can be read, nothing written."""
        self._must("mount", "-o", "remount,errors=remount-ro", os.fspath(self.path))
        Path(f"/sys/fs/ext4/{os.path.basename(self._device)}/trigger_fs_error").write_text("1")

    def remount(self) -> None:
        """After `die`: the machine is up again. Nothing may have files open on it."""
        self._must("umount", os.fspath(self.path))
        self._detach()
        self._mount()

    def restart(self) -> None:
        self.die()
        self.remount()

    def _mount(self) -> None:
        # A loop device of its own each time: the old one may live on in somebody's mount namespace, dead.
        self._device = self._must("losetup", "--find", "--show", os.fspath(self._image)).strip()
        self._must("mount", self._device, os.fspath(self.path))
        self._mounted = True

    def _detach(self) -> None:
        self._mounted = False
        device, self._device = self._device, ""
        if device:
            self._must("losetup", "--detach", device)

    def _must(self, *command: str) -> str:
        env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def _cleanup(self) -> None:
        if self._mounted and _run("umount", os.fspath(self.path)).returncode:
            _run("umount", "-l", os.fspath(self.path))
        self._detach()
        self._image.unlink(missing_ok=True)
