"""The stacks of all threads into the log: on SIGUSR1, and when one of the two main threads stands still.

Threads of their own write them, with the interpreter's lock. `faulthandler` can do it without, from
a signal handler or from a timer of its own, but then it walks the frames of threads that run meanwhile: one
signal in about sixty ended a daemon at work with SIGSEGV. And its timer fires whenever the process was
stopped for longer than that (a paused sandbox), at the moment when everything runs on. Where the lock itself
is not given away, SIGABRT is left: it writes the stacks and ends the daemon, which is started again then.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Final

from fsd.host.seam import Host
from fsd.kernel.logfile import LogFile

log = logging.getLogger(__name__)

_pace = threading.Event()  # never set: the time between two looks
HANG: Final = 10.0  # so long a thread that should turn ten times a second may not


class Stacks:
    """One daemon's. Made in the main thread before there is any other: they inherit its signal mask."""

    def __init__(self, handler: LogFile, host: Host) -> None:
        self._handler = handler
        self._now = host.monotonic
        self._beats: dict[str, Callable[[], float]] = {}
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        for work, name in ((self._answer, "fsd-stacks"), (self._look, "fsd-hang")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def watch(self, thread: str, beat: Callable[[], float]) -> None:
        """Tell when `thread` stands still: `beat` says when it turned last (monotonic). Any thread."""
        self._beats[thread] = beat

    def _answer(self) -> None:
        # Not `sigtimedwait`: stopped for longer than its time, it returns a signal that nobody sent.
        while True:
            signal.sigwait({signal.SIGUSR1})
            self._handler.dump_stacks()

    def _look(self) -> None:
        looked, dumped, seen = self._now(), 0.0, 0
        while True:
            _pace.wait(HANG / 4)
            now = self._now()
            late = {name: now - beat() for name, beat in list(self._beats.items()) if now - beat() > HANG}
            # A look that comes late itself says that the whole process was stopped.
            seen = seen + 1 if late and now - looked < HANG else 0
            looked = now
            if seen >= 2 and now - dumped > 6 * HANG:
                dumped = now
                for name, seconds in late.items():
                    log.error("the %s thread has not turned for %.0f s; all stacks follow", name, seconds)
                self._handler.dump_stacks()
