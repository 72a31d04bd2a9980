"""Signals for a program whose request is parked: `kill -9`, and what it would end by itself for.

pyfuse3 hides FUSE_INTERRUPT, so the kernel keeps the program waiting for our answer. Once a request has been
parked for a second, the signals that wait for its caller are looked up in /proc. SIGKILL, which also stands
there when another signal is about to end the program, is answered EINTR whatever the request was. A signal
that asks a program to end (Ctrl-C, say) and that it handles itself is answered EINTR where nothing of the
call has been done yet: a program in Python or a shell would else hang for as long as the server does. Not so
an fsync or a close: databases take an error there for lost data.

For read, write and other calls on a handle pyfuse3 tells no caller: who that is `requests` has seen, and what
the kernel writes from pages is nobody's call. When that thread is gone nobody waits in it: such a request was
asynchronous (io_submit, pages read ahead) and is left alone, since an EINTR could hit a healthy program.
Where requests are not seen only the process that opened the handle is known, and the same holds of it.
"""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

from fsd.kernel.handlers import interrupted
from fsd.kernel.machine import Machine

PATIENCE = 1.0
_KILL: Final = 1 << signal.SIGKILL - 1
_ENDS: Final = sum(1 << s - 1 for s in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))


class Pending(NamedTuple):
    """What waits for a thread: SIGKILL; a signal that asks its program to end, which the program handles."""

    killed: bool
    asked: bool


def pending(pid: int) -> Pending | None:
    """What waits for `pid` (a thread's id); None when there is no such thread. What may not be looked at is
    taken as healthy."""
    found = dict.fromkeys((b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt"), 0)
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                name, _, value = line.partition(b":")
                if name in found:
                    found[name] = int(value, 16)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return Pending(False, False)
    waits = found[b"SigPnd"] | found[b"ShdPnd"]
    return Pending(bool(waits & _KILL), bool(waits & ~found[b"SigBlk"] & found[b"SigCgt"] & _ENDS))


def look_for_killed(machine: Machine) -> None:
    """Answer the parked requests of callers that are to end. Any thread but the FUSE one; some 40 µs a
    request."""
    now = machine.clock()
    for parked in machine.snapshot():
        if parked.pid == 0 or parked.woken or now - parked.since < PATIENCE:
            continue
        state = pending(parked.pid)
        gone = not parked.inherited if state is None else state.killed or (state.asked and parked.undone)
        if gone:
            machine.post(lambda parked=parked: machine.wake(parked, interrupted()))  # type: ignore[misc]
