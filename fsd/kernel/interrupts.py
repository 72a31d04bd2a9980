"""`kill -9` of a program whose request is parked.

pyfuse3 hides FUSE_INTERRUPT, so the kernel keeps the killed program waiting for our answer. Once a request
has been parked for a second, whether SIGKILL is pending for its caller is looked up in /proc, and the
request is answered EINTR.

For read, write and other calls on a handle pyfuse3 tells no caller, only the process that opened the handle
is known. When that one is gone the handle was inherited and somebody else waits: such a request is left
alone, since an EINTR would hit a healthy program.
"""

from __future__ import annotations

from fsd.kernel.machine import Machine
from fsd.kernel.operations import interrupted

PATIENCE = 1.0
_SIGKILL_BIT = 1 << 8


def killed(pid: int) -> bool | None:
    """Whether SIGKILL is pending for `pid` (a thread's id); None when there is no such process. What may not
    be looked at is taken as healthy."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL_BIT:
                    return True
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return False
    return False


def look_for_killed(machine: Machine) -> None:
    """Answer the parked requests of killed callers. Any thread but the FUSE one; some 30 µs a request."""
    now = machine.host.monotonic()
    for parked in machine.snapshot():
        if parked.pid == 0 or parked.woken or now - parked.since < PATIENCE:
            continue
        state = killed(parked.pid)
        if state or (state is None and not parked.inherited):
            machine.post(lambda parked=parked: machine.wake(parked, interrupted()))  # type: ignore[misc]
