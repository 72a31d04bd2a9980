"""Ends a connection that is not done in time, however busily it drips.

A socket's own time-out begins anew with every byte, so it bounds silence, not an answer. One thread, started
when it is needed, serves all connections of an `Http`. It ends when nothing was timed for IDLE seconds: a
program that makes clients and never closes them would gather threads otherwise, and from some ten thousand on
their looks at the clock alone take all of the interpreter's time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

IDLE: Final = 1.0


class Watchdog:
    """Any thread. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[socket.socket, float] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def close(self) -> None:
        """End the thread; what is being timed is not bounded any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def forked(self) -> None:
        """In a forked child: the thread and what it timed are the parent's."""
        self._changed, self._due, self._thread = threading.Condition(), {}, None

    @contextlib.contextmanager
    def within(self, sock: socket.socket, seconds: float) -> Iterator[None]:
        """Shut `sock` down when the block is not left within `seconds`."""
        with self._changed:
            self._due[sock] = self._clock() + seconds
            if self._thread is None and not self._closed:
                self._begin()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(sock, None)

    def _begin(self) -> None:
        """Where the system has no thread to give, what is timed now has the socket's own time-out alone; the
        next tries again."""
        thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        with self._changed:
            while not self._closed:
                now = self._clock()
                for sock in [one for one, due in self._due.items() if due <= now]:
                    del self._due[sock]
                    _shut(sock)
                if self._due:
                    # Bounded: an answer that came in time does not wake it.
                    self._changed.wait(min(IDLE, max(0.01, min(self._due.values()) - now)))
                elif not self._changed.wait(IDLE) and not self._due:
                    break
            self._thread = None


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already
