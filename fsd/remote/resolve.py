"""Names to addresses without ever hanging on it.

`getaddrinfo` has no time limit and cannot be interrupted, so it runs in a thread of its own, one at a time
for a server; callers wait as long as they have. The last known addresses are used while the name does not
resolve: a name service that goes away later stops nothing.
"""

from __future__ import annotations

import socket
import threading
from typing import Any, NamedTuple

from fsd.model.errors import Unavailable


class Address(NamedTuple):
    family: int
    sockaddr: Any


class _Flight:
    """One lookup under way; `error` is for people, None when it found addresses."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None


class Resolver:
    """The addresses of one host. Any thread."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._flight: _Flight | None = None
        self._known: list[Address] = self._literal()
        self._fresh = self._numeric = bool(self._known)

    def _literal(self) -> list[Address]:
        try:
            found = socket.getaddrinfo(
                self._plain(), self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except (OSError, UnicodeError):
            return []  # a name, not a number
        return [Address(row[0], row[4]) for row in found]

    def _plain(self) -> str | bytes:
        """The name. As bytes where that is the same: of a text Python loads the codec of foreign names first,
        which takes longer than a lookup."""
        return self._host.encode() if self._host.isascii() else self._host

    def addresses(self, timeout: float) -> list[Address]:
        """Where to connect, best first; raises `Unavailable` when nothing is known within `timeout`."""
        with self._lock:
            if self._fresh:
                return self._known
            flight = self._flight or self._begin()
        flight.done.wait(max(0.0, timeout))
        with self._lock:
            if self._known:
                return self._known
        raise Unavailable(
            f"the name {self._host!r} does not resolve: {flight.error or 'no answer in time'}",
            hint="check the endpoint's name and the resolver (/etc/resolv.conf)",
        )

    def _begin(self) -> _Flight:
        """A lookup under way; one that has failed where the system has no thread to give. Under the lock."""
        flight = _Flight()
        thread = threading.Thread(target=self._look_up, args=(flight,), name="fsd-resolve", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            flight.error = str(exc)
            flight.done.set()
            return flight
        self._flight = flight
        return flight

    def doubt(self) -> None:
        """Connecting to what was returned failed: ask anew next time."""
        with self._lock:
            self._fresh = self._numeric

    def _look_up(self, flight: _Flight) -> None:
        found: list[Address] = []
        try:
            rows = socket.getaddrinfo(self._plain(), self._port, type=socket.SOCK_STREAM)
            found = [Address(row[0], row[4]) for row in rows]
        except (OSError, UnicodeError) as exc:
            flight.error = str(exc)
        with self._lock:
            if found:
                self._known, self._fresh = found, True
            self._flight = None
        flight.done.set()
