"""Where the process begins and ends. Loads next to nothing: Ctrl-C while the rest is loaded must be no
traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

INTERRUPTED = 130


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
    from fsd.cli import main as program

    try:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = program.main()
    except KeyboardInterrupt:
        # In the few instructions around `run`, which tells it with words.
        code = INTERRUPTED
    return _leave(code)


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
