"""A system that has no thread to give for a moment (a limit on processes): it costs that moment alone."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from support.wait import wait_for

from fsd.client.watchdog import Watchdog
from fsd.model.errors import Unavailable
from fsd.remote.resolve import Resolver


class Threads:
    """Threads that cannot be started while there are `none`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.none = False
        start = threading.Thread.start

        def perhaps(thread: threading.Thread) -> None:
            if self.none:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", perhaps)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_a_name_is_looked_up_again(threads: Threads) -> None:
    """The lookup that never began counted as under way for good: no call found an address any more."""
    resolver = Resolver("localhost", 80)
    threads.none = True
    with pytest.raises(Unavailable, match="thread"):
        resolver.addresses(0.0)
    threads.none = False
    assert resolver.addresses(60.0)


def test_what_is_known_serves_meanwhile(threads: Threads) -> None:
    """Each call waited its whole time for the lookup that never began."""
    resolver = Resolver("localhost", 80)
    known = resolver.addresses(60.0)
    resolver.doubt()
    threads.none = True
    began = time.monotonic()
    assert resolver.addresses(100.0) == known
    assert time.monotonic() - began < 50


def test_what_is_late_is_ended_again(threads: Threads) -> None:
    """After it, an answer that drips was never ended, whatever its time."""
    watchdog = Watchdog(time.monotonic)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threads.none = True
        with watchdog.within(ours, 0.01):
            pass
        threads.none = False
        ours.setblocking(False)

        def ended() -> bool:
            try:
                return ours.recv(1) == b""
            except BlockingIOError:
                return False

        with watchdog.within(ours, 0.01):
            wait_for(ended, 30, "the connection to be ended")
    watchdog.close()
