"""Where the process begins and ends. Loads next to nothing: Ctrl-C while the rest is loaded must be no
traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

INTERRUPTED = 130
MOUNTS = (("mount",), ("fs", "mount"), ("fs", "mount-file-system"), ("checkpoint", "mount"))
# With one of these among the words there is no daemon, or it is this process's own.
NOT_AHEAD = {"--foreground", "--no-supervisor", "--dry-run", "--help", "-h", "help", "--version"}


def main() -> int:
    """The entry point. Until there is somebody to tell, Ctrl-C ends the process as it ends any other."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.warnoptions:
        # Python's warnings are for who writes a program. PYTHONWARNINGS and PYTHONDEVMODE are meant for the
        # user's own: here they are lines nobody can do anything about, and with `error` failures.
        import warnings

        warnings.simplefilter("ignore")
    # Whoever started this may ignore it: then the kernel would keep from it how its children ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    hold_numbers()
    if _mounts(sys.argv[1:]):
        from fsd.kernel import ahead

        ahead.begin()
    from fsd.cli import main as program

    try:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = program.main()
    except KeyboardInterrupt:
        # In the few instructions around `run`, which tells it with words.
        code = INTERRUPTED
    return _leave(code)


def _mounts(words: list[str]) -> bool:
    """Whether a daemon will be needed, as far as can be told by now. One that is not needed costs its
    loading; a mount without one begun takes longer."""
    lead = tuple(words[:2])
    return (lead[:1] in MOUNTS or lead in MOUNTS) and not NOT_AHEAD.intersection(words)


def hold_numbers() -> None:
    """Before anything is opened: numbers 0 to 2 that are closed would go to it, and a pipe between supervisor
    and daemon, say, be overwritten by what a daemon makes of its streams. They are held; using them fails as
    before, and programs started from here do not inherit them."""
    for number, wrong_way in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, wrong_way)  # gets the lowest number that is free: this one


def _leave(code: int) -> int:
    """End at once where nothing is left to wait for: taking 150 modules apart is a seventh of the CPU of most
    commands."""
    if threading.active_count() > 1:
        return code  # one that still works is joined as ever
    for stream in (sys.stdout, sys.stderr):
        # None, closed, or nobody reads: what the command ends with is known.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
