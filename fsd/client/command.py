"""A command that is run for its caller: its end, and how one that could not be started is told."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

NOT_FOUND: Final = 127
CANNOT_EXECUTE: Final = 126


def not_ignored(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those that are for a command and who runs it. What whoever started both ignores (nohup, a job in the
    background of a script) is for neither: a handler here would take that from the command as well."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The code `child` ended with; None after `seconds`. `Popen.wait` with a time looks twenty times a
    second, and tells of the end up to 50 ms late."""
    if child.returncode is not None:
        return child.returncode  # who sent it a signal found it ended: the number may be another's by now
    try:
        end = os.pidfd_open(child.pid)
    except OSError:  # before Linux 5.3
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return child.wait() if poll.poll(seconds * 1000) else None
    finally:
        os.close(end)


def not_started(
    error: OSError, name: str, env: Mapping[str, str], cwd: Path | None = None
) -> tuple[int, str]:
    """The exit code and the reason. Of a directory in PATH that cannot be entered the system says the same as
    of a file that must not be run; only the latter is the command."""
    if isinstance(error, FileNotFoundError):
        return NOT_FOUND, error.strerror or "not found"
    if "/" not in name and not _is_there(name, env, cwd):
        return NOT_FOUND, "not found"
    return CANNOT_EXECUTE, error.strerror or str(error)


def _is_there(name: str, env: Mapping[str, str], cwd: Path | None) -> bool:
    return any(os.path.isfile(os.path.join(cwd or "", place, name)) for place in os.get_exec_path(env))
