"""How a command that could not be started is told: as a shell does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NOT_FOUND: Final = 127
CANNOT_EXECUTE: Final = 126


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
