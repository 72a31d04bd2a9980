"""Where the process begins. Loads next to nothing: Ctrl-C while the rest is loaded must be no traceback."""

from __future__ import annotations

import signal

INTERRUPTED = 130


def main() -> int:
    """The entry point. Until there is somebody to tell, Ctrl-C ends the process as it ends any other."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fsd.cli import main as program

    try:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return program.main()
    except KeyboardInterrupt:
        # In the few instructions around `run`, which tells it with words.
        return INTERRUPTED
