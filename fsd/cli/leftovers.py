"""What ended mounts left in a state directory: found, and named with the command that sends it."""

from __future__ import annotations

import fcntl
import shlex
from pathlib import Path

from fsd.cli import local
from fsd.cli.context import Context
from fsd.model.errors import FsdError
from fsd.model.plain import dataclass
from fsd.vfs.segments import replayed_bytes


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A log of `size` bytes in `place` that no running mount holds. `command` sends it, in words where it is
    not known any more (after a restart of the machine) which mount point it was."""

    place: Path
    size: int
    command: str

    @property
    def told(self) -> str:
        return f"{self.place}: {self.size} bytes of log that no running mount holds"


def find(context: Context, root: Path) -> list[LeftOver]:
    """The left-overs under the state root `root`. Changes nothing."""
    found = []
    directory = local.runtime(context)
    for place in sorted(root.glob("mounts/*")):
        size = replayed_bytes(place)
        # Asked first: a mount that just starts must not meet our hand on its lock.
        if size and not directory.alive(place.name) and not _held(place / "lock"):
            found.append(LeftOver(place, size, _command(context, place, root)))
    return found


def _held(lock: Path) -> bool:
    """Whether a running mount holds the state directory's lock."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _command(context: Context, place: Path, root: Path) -> str:
    try:
        record = local.runtime(context).read(place.name)
    except FsdError:
        return "`fsd mount` or `fsd recover` of the same place sends it"
    words = ["fsd", "recover", record.mountpoint]
    if record.remote_path != "/":
        words += ["--remote-path", record.remote_path]
    if root != context.env.state_root():
        words += ["--state-dir", str(root)]
    token = ""
    if record.file_system_id != _filesystem(context):
        token = f" with a token for {record.file_system_id}"
    return f"`{shlex.join(words)}`{token} sends it, as the next mount of that place does"


def _filesystem(context: Context) -> str:
    """What the token in hand is for; empty: there is none."""
    try:
        return context.data().file_system_id
    except FsdError:
        return ""
