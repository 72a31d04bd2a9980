"""The mount table, mount points and detaching. Imports neither pyfuse3 nor trio.

The kernel lists a mount of ours as type `fuse.fsd` with source `fsd:<filesystem id>:<mount id>`. Nothing in
here touches a path inside a mount except `answers`, which does so in a thread with a time limit: the daemon
behind it may be dead or stuck.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import threading
from pathlib import Path
from typing import Final, NamedTuple

from fsd.host.processes import users
from fsd.host.programs import installed, program
from fsd.model.errors import Busy, FsdError, NotFound, NotPermitted, Unsupported, UsageError
from fsd.model.limits import UNMOUNT_TRIES

FSTYPE: Final = "fuse.fsd"
DEVICE: Final = Path("/dev/fuse")
BUSY_PACE: Final = 0.1
_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
MTAB: Final = "/etc/mtab"
MTAB_HINT: Final = f"as root: ln -s ../proc/self/mounts {MTAB}"
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_libc = ctypes.CDLL(None, use_errno=True)
_pace = threading.Event()  # never set: the time between two tries


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo. `device` is "major:minor"; `read_only` as the kernel enforces it, for
    this place or for the whole filesystem."""

    device: str
    path: Path
    fstype: str
    source: str
    read_only: bool = False

    @property
    def ids(self) -> tuple[str, str] | None:
        """(filesystem id, mount id) when it is a mount of ours."""
        parts = self.source.split(":")
        if self.fstype == FSTYPE and len(parts) == 3 and parts[0] == "fsd":
            return parts[1], parts[2]
        return None


def _unescape(raw: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda m: bytes([int(m[1], 8)]), raw) if b"\\" in raw else raw)


def parse_mountinfo(raw: bytes) -> list[MountEntry]:
    """The entries in the kernel's order: a later one at the same path lies on top."""
    found = []
    for line in raw.splitlines():
        left, _, right = line.partition(b" - ")
        fields, more = left.split(b" "), right.split(b" ")
        if len(fields) < 6 or len(more) < 2:
            continue
        options = b",".join((fields[5], *more[2:3])).split(b",")
        path, fstype, source = (_unescape(raw) for raw in (fields[4], more[0], more[1]))
        found.append(MountEntry(fields[2].decode(), Path(path), fstype, source, b"ro" in options))
    return found


def list_mounts() -> list[MountEntry]:
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def mounted_at(path: Path) -> MountEntry | None:
    """What is mounted on top at `path` (absolute, resolved), if anything."""
    for entry in reversed(list_mounts()):
        if entry.path == path:
            return entry
    return None


def still_listed(path: Path, source: str) -> bool:
    return count_at(path, source) > 0


def count_at(path: Path, source: str) -> int:
    """How often `source` is listed at `path`: more than once where it was bound onto itself."""
    return sum(entry.source == source and entry.path == path for entry in list_mounts())


def places(source: str) -> list[Path]:
    """Where `source` is listed, in the kernel's order: once, unless it was bound to other places as well."""
    return list(dict.fromkeys(entry.path for entry in list_mounts() if entry.source == source))


def resolve(path: Path) -> Path:
    """`path` absolute and without symlinks, without touching what is mounted at it."""
    absolute = os.path.abspath(path)
    parent, name = os.path.split(absolute)
    place = Path(os.path.join(os.path.realpath(parent), name)) if name else Path(parent)
    if mounted_at(place) is not None:
        return place
    return Path(os.path.realpath(absolute))


def answers(path: Path, within: float = 5.0) -> OSError | bool | None:
    """Ask the filesystem at `path` in a thread: True when it answered, its error, None when nothing came.

    statfs, since the attributes of a dead mount's root may still be in the kernel's cache.
    """
    result: list[OSError | bool] = []

    def look() -> None:
        try:
            os.statvfs(path)
            result.append(True)
        except OSError as exc:
            result.append(exc)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(within)
    return result[0] if result else None


def require_fuse() -> None:
    """Raises `Unsupported` saying what is missing for any mount here."""
    instead = "`fsd run -- CMD` works without it; `fsd doctor` tells more"
    try:
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        os.close(fd)
    except FileNotFoundError as exc:
        raise Unsupported(f"there is no {DEVICE} here: this machine cannot mount", hint=instead) from exc
    except OSError as exc:
        raise Unsupported(
            f"{DEVICE} cannot be opened: {exc.strerror}",
            hint=f"ask for access to it (as root: chmod 666 {DEVICE}, as Debian has it; containers: "
            f"--device {DEVICE} --cap-add SYS_ADMIN). {instead}",
        ) from exc
    if os.geteuid() != 0 and installed("fusermount3") is None:
        raise Unsupported(
            "fusermount3 is not installed; without root it is what mounts",
            hint=f"as root: apt-get install -y fuse3. {instead}",
        )
    if os.geteuid() != 0 and not _has_name(os.getuid()):
        line = f"me:x:{os.getuid()}:{os.getgid()}::/:/bin/sh"
        raise Unsupported(
            f"uid {os.getuid()} has no name here, and fusermount3 mounts for no user without one",
            hint=f"as root: echo {line} >>/etc/passwd (containers: a user of the image). {instead}",
        )


def _has_name(uid: int) -> bool:
    import pwd  # what it brings would stay in the supervisor

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def check_place(place: Path, outside: dict[str, Path], *, covered: bool = False) -> None:
    """Raises when a mount at `place` (resolved) would be wrong. `outside` names what must not lie in it.

    A dead mount of ours at the place must have been cleaned up before (`clear_dead`); `covered`: it was kept,
    so the directory below cannot be looked at; it was when that mount was made.
    """
    entry = None if covered else mounted_at(place)
    if entry is not None and (entry.ids or entry.fstype.startswith("fuse")):
        raise Busy(
            f"{place} is mounted already ({entry.source})",
            hint=f"use it, or `fsd unmount {place}` first" if entry.ids else "unmount it first",
        )
    for what, path in outside.items():
        inner = Path(os.path.realpath(path))
        if inner == place or place in inner.parents:
            raise UsageError(
                f"{what} {path} lies inside the mount point {place}: the mount would wait for itself",
                hint="choose one outside",
            )
    if covered:
        return
    try:
        info = os.stat(place)
        names = os.listdir(place) if stat.S_ISDIR(info.st_mode) else []
    except FileNotFoundError as exc:
        raise NotFound(f"the mount point {place} does not exist", hint=f"mkdir -p {place}") from exc
    except OSError as exc:
        raise UsageError(f"the mount point {place} cannot be used: {exc.strerror}") from exc
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"the mount point {place} is not a directory", hint="give a directory")
    if names:
        raise UsageError(
            f"the mount point {place} is not empty: a mount would hide what is in it "
            f"({len(names)}: {names[0]!r}{', …' if len(names) > 1 else ''})",
            hint="use an empty directory",
        )
    if not os.access(place, os.W_OK) and os.geteuid() != 0:
        raise NotPermitted(f"{place} is not writable by you, so you may not mount there")


def clear_dead(place: Path, keep: str = "") -> bool:
    """Detach the dead mounts of ours at `place`. Raises `Busy` when one is alive.

    One whose source is `keep` stays, and True is returned: who mounts there next takes it away right before,
    so that until then a write meets ENOTCONN and not the directory below.
    """
    while True:
        entry = mounted_at(place)
        if entry is None or entry.ids is None:
            return False
        answer = answers(place)
        if not isinstance(answer, OSError) or answer.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            state = "does not answer" if answer is None else "is alive"
            raise Busy(
                f"{place} is mounted already ({entry.source}) and {state}",
                hint=f"use it, or `fsd unmount {place}` first",
            )
        if entry.source == keep:
            return True
        detach(place, lazy=True, dead=True)


def detach(place: Path, *, lazy: bool, dead: bool = False) -> None:
    """Unmount `place`: umount2 as root, else fusermount3. Raises `Busy` (naming the users) or `FsdError`.

    `dead`: its daemon was killed. A thread of that one may wait in the kernel, holding the connection, for
    the lock of a directory that a reader has who waits for the daemon: unless the connection is ended (root
    alone can), both stay for good.

    No error when nothing is mounted there. Busy without anybody to name is tried again for half a second: who
    looked at it in passing (df, an indexer) is gone by then.
    """
    for left in reversed(range(UNMOUNT_TRIES)):
        try:
            _detach(place, lazy=lazy, dead=dead)
            return
        except Busy as exc:
            if exc.details["pids"] or not left:
                raise
            _pace.wait(BUSY_PACE)


def _detach(place: Path, *, lazy: bool, dead: bool) -> None:
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if dead else 0)
        if _libc.umount2(os.fsencode(place), flags) == 0:
            return
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return
        if number == errno.EBUSY:
            raise busy(place)
        if number != errno.EPERM:
            raise FsdError(f"{place} cannot be unmounted: {os.strerror(number)}")
    import subprocess  # here alone: the supervisor would keep it

    command = ["-u", *(["-z"] if lazy else []), "--", str(place)]
    try:
        done = subprocess.run(
            [program("fusermount3"), *command], capture_output=True, timeout=30, check=False
        )
    except FileNotFoundError as exc:
        raise Unsupported("fusermount3 is not installed", hint="apt-get install -y fuse3") from exc
    except subprocess.TimeoutExpired as exc:
        raise FsdError(f"fusermount3 did not unmount {place} within 30 s") from exc
    if done.returncode != 0 and mounted_at(place) is not None:
        text = done.stderr.decode("utf-8", "replace").strip()
        if "busy" in text.lower():
            raise busy(place)
        # What no init prepared (a bare chroot) has none; fusermount3 mounts without it and cannot unmount.
        hint = f"{MTAB_HINT}; until then `fsd drain` sends everything" if not os.path.exists(MTAB) else ""
        raise FsdError(f"{place} cannot be unmounted: {text}", hint=hint)


def force(place: Path) -> int:
    """A forced unmount of `place`, not a lazy one; 0 or the errno. It ends the FUSE connection even where the
    mount is busy and stays."""
    if _libc.umount2(os.fsencode(place), _UMOUNT_NOFOLLOW | _MNT_FORCE) == 0:
        return 0
    return ctypes.get_errno()


def busy(place: Path) -> Busy:
    """The error that names who uses the mount at `place`."""
    who = users(place)
    below = [str(entry.path) for entry in list_mounts() if place in entry.path.parents]
    named = ", ".join(f"{pid} ({name})" for pid, name in who[:20])
    parts = [f"in use by pid {named}"] if named else []
    ways = ["end them or change their directory"] if named or not below else []
    if below:
        parts.append("mounts below it: " + ", ".join(below[:5]))
        ways.append("unmount those below it")
    return Busy(
        f"{place} is busy: " + ("; ".join(parts) or "in use by a process that cannot be seen from here"),
        hint="; ".join(ways) + "; `--lazy` detaches it under them",
        details={"pids": [pid for pid, _ in who]},
    )


def set_read_ahead(place: Path, kib: int) -> bool:
    """Let the kernel ask for up to `kib` KiB at once; root only. False when it cannot be set."""
    entry = mounted_at(place)
    if entry is None:
        return False
    try:
        Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb").write_text(str(kib))
    except OSError:
        return False
    return True
