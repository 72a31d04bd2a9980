"""Durable files: the one helper that writes, renames and syncs, and the advisory lock on a directory.

Durable replace: temporary name in the same directory, write, fsync, rename, fsync of the directory. Crash
points are named `<what>.written`, `<what>.synced`, `<what>.renamed`, `<what>.durable`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fsd.host.direct import write_past_cache
from fsd.host.seam import Host
from fsd.model.errors import Busy, NoSpace

# How fallocate is refused where it is not to be had: an old emulated kernel, a filter of system calls. (The C
# library makes up for a filesystem without it, EOPNOTSUPP, itself.)
_NO_FALLOCATE: Final = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
_ZEROS_AT_ONCE: Final = 1 << 18


def allocate(fd: int, at: int, size: int) -> None:
    """posix_fallocate, also where the system refuses the call: zeros are written then behind the file's end,
    where all that is to be allocated must lie. Raises OSError; the file is as long as it was then."""
    try:
        os.posix_fallocate(fd, at, size)
        return
    except OSError as exc:
        if exc.errno not in _NO_FALLOCATE:
            raise
    before = os.fstat(fd).st_size
    done, end = max(at, before), at + size
    zeros = memoryview(bytes(_ZEROS_AT_ONCE))  # made here: each process of fsd loads this module
    try:
        while done < end:
            done += os.pwrite(fd, zeros[: end - done], done)
    except OSError:
        os.ftruncate(fd, before)
        raise


def no_space(exc: OSError, log: Path) -> NoSpace:
    """That the log in a state directory cannot grow: the disk is full, or this process's files may not."""
    if exc.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return NoSpace(
            f"the log under {log} may not grow: this process may write {most} bytes a file",
            hint="raise RLIMIT_FSIZE (`ulimit -f`) where `fsd mount` is called, and mount again",
        )
    return NoSpace(
        f"the disk under the state directory {log} is full",
        hint=f"free space under {log}; what is written goes on being sent",
    )


def fsync_dir(path: Path) -> None:
    """Make the directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs_durable(path: Path, mode: int = 0o700) -> None:
    """Make `path` and what is missing above it, each with a durable entry. What is there is left as it is. A
    `mode` that gives others nothing holds whatever the umask takes off."""
    missing: list[Path] = []
    at = path
    while not at.is_dir():
        missing.append(at)
        at = at.parent
    for one in reversed(missing):
        one.mkdir(mode=mode, exist_ok=True)
        if not mode & 0o077:
            os.chmod(one, mode)
        fsync_dir(one.parent)


def write_durable(
    host: Host,
    path: Path,
    data: bytes | Sequence[bytes | memoryview],
    what: str,
    *,
    mode: int = 0o600,
    scratch: Path | None = None,
    past_cache: bool = False,
) -> None:
    """Replace `path` with `data`, whole or not at all, durable on return.

    Raises `NoSpace` naming the directory when its disk is full, else the OSError. `what` names the crash
    points. The temporary file lies in `scratch`, a directory of the same filesystem, or else beside `path`.
    `past_cache`: see `fsd.host.direct`.
    """
    pieces = [data] if isinstance(data, bytes) else data
    temporary = (scratch or path.parent) / (f".{path.name}.{os.getpid()}.{host.token_bytes(4).hex()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if past_cache:
                write_past_cache(fd, pieces)
            else:
                for piece in pieces:
                    write_all(fd, piece)
            host.crash_point(f"{what}.written")
            os.fsync(fd)
        finally:
            os.close(fd)
        host.crash_point(f"{what}.synced")
        os.rename(temporary, path)
        host.crash_point(f"{what}.renamed")
        fsync_dir(path.parent)
        host.crash_point(f"{what}.durable")
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"the disk under {path.parent} is full", hint=f"free space under {path.parent}"
            ) from exc
        raise


def write_all(fd: int, data: bytes | memoryview) -> None:
    """write(2) until all of `data` is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def lock_directory(path: Path, what: str) -> int:
    """Lock `path`/lock for this process's life; returns the fd to keep open.

    Raises `Busy` naming the holder.
    """
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        holder = os.read(fd, 64).decode("ascii", "replace").strip() or "another process"
        os.close(fd)
        raise Busy(
            f"{what} {path} is in use by {holder}", hint="stop it first, or use another directory"
        ) from exc
    holder_line = f"pid {os.getpid()}\n".encode()
    try:
        # In this order an old line's space is used again: it works on a full disk too.
        os.pwrite(fd, holder_line, 0)
        os.ftruncate(fd, len(holder_line))
    except OSError:
        os.close(fd)
        raise
    return fd
