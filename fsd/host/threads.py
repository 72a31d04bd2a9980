"""Where the system has no thread or process to give: which limit that is, said so that it can be raised."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsd.model.errors import FsdError, InternalError, Unavailable

RAISE: Final = "raise the limit of its processes (ulimit -u, the pids limit of its cgroup, TasksMax)"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NONE: Final = "can't start new thread"  # Python's own words, its only sign


def told(exc: BaseException) -> Unavailable | None:
    """What to say where `exc` is, holds or came of a thread that could not be started, or is a fork's EAGAIN
    (the caller knows that it is no other call's); None: it is something else."""
    forked = isinstance(exc, OSError) and exc.errno == errno.EAGAIN
    if not forked and not any(isinstance(one, RuntimeError) and _NONE in str(one) for one in _all(exc)):
        return None
    limits = ", ".join(_limits()) or "none that this process can see"
    error = Unavailable(f"the system has no thread or process to give; limits: {limits}", hint=RAISE)
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
    """Those that are set: the user's, and of each cgroup from this process's own upwards."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        yield f"{soft} processes and threads of this user (RLIMIT_NPROC)"
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no cgroups here, or no pids controller in this one
        return []
