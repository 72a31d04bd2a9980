"""Where the system has no thread, process or file descriptor to give: which limit that is, so that it can be
raised."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsd.model.errors import FsdError, InternalError, Unavailable

RAISE: Final = "raise the limit of its processes (ulimit -u, the pids limit of its cgroup, TasksMax)"
RAISE_MEMORY: Final = "raise the limit of its memory (ulimit -v) or of its processes (ulimit -u, TasksMax)"
RAISE_FILES: Final = "raise the limit of its open files (ulimit -n, LimitNOFILE): 1024 is usual"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NONE: Final = "can't start new thread"  # Python's own words, its only sign


def told(exc: BaseException) -> Unavailable | None:
    """What to say where `exc` is, holds or came of a thread that could not be started or no descriptor left,
    or is a fork's EAGAIN (the caller knows that it is no other call's); None: it is something else."""
    if any(isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE) for one in _all(exc)):
        return _no_descriptor(exc)
    forked = isinstance(exc, OSError) and exc.errno == errno.EAGAIN
    if not forked and not any(isinstance(one, RuntimeError) and _NONE in str(one) for one in _all(exc)):
        return None
    limits = ", ".join(_limits()) or "none that this process can see"
    # Each thread's stack is so many MiB of addresses.
    hint = RAISE_MEMORY if _set(resource.RLIMIT_AS) else RAISE
    error = Unavailable(f"the system has no thread or process to give; limits: {limits}", hint=hint)
    error.__cause__ = exc
    return error


def _no_descriptor(exc: BaseException) -> Unavailable:
    limit = _set(resource.RLIMIT_NOFILE)
    own = f"{limit} of a process (RLIMIT_NOFILE)" if limit else "the system's (fs.file-max)"
    error = Unavailable(f"no file descriptor is left; limit: {own}", hint=RAISE_FILES)
    error.__cause__ = exc
    return error


def failure(exc: BaseException, otherwise: str, hint: str = "") -> FsdError:
    """`told`, or else an internal error that says `otherwise`."""
    return told(exc) or InternalError(otherwise, hint=hint or None)


def _all(exc: BaseException) -> Iterator[BaseException]:
    """It, what it is a group of, and what those were raised from."""
    look, seen = [exc], set()
    while look:
        one = look.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            look += one.exceptions
        if one.__cause__ is not None:
            look.append(one.__cause__)


def _limits() -> Iterator[str]:
    """Those that are set: the process's, the user's, and of each cgroup from this process's own upwards."""
    memory = _set(resource.RLIMIT_AS)
    if memory:
        yield f"{memory} bytes of addresses of a process (RLIMIT_AS)"
    processes = _set(resource.RLIMIT_NPROC)
    if processes is not None:
        yield f"{processes} processes and threads of this user (RLIMIT_NPROC)"
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = _CGROUPS / controllers
        own = root / path.lstrip("/")
        for place in (own, *own.parents):
            for most in _lines(place / "pids.max"):
                if most != "max":
                    yield f"{most} in {place / 'pids.max'}"
            if place == root:
                break


def _set(what: int) -> int | None:
    soft, _hard = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no cgroups here, or no pids controller in this one
        return []
