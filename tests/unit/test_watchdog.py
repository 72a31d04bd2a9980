"""`Watchdog`: what is late is ended, and no thread of it stays with a client that nobody closes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.wait import wait_for

from fsd.client import watchdog
from fsd.client.watchdog import Watchdog


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def timing() -> int:
    return sum(thread.name == "watchdog" for thread in threading.enumerate())


def test_clients_nobody_closes_leave_no_threads(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "IDLE", 0.05)
    before = timing()
    made = [Watchdog(time.monotonic) for _ in range(40)]
    with contextlib.ExitStack() as stack:
        for one in made:
            stack.enter_context(one.within(pair[0], 60))
        assert timing() >= before + 40  # each is at work while something is timed
    wait_for(lambda: timing() <= before, 30, "the threads to end")
    with made[0].within(pair[0], 0.1):  # and it is there again when it is needed
        pair[1].settimeout(60)
        assert pair[1].recv(1) == b""


def test_a_socket_that_is_late_is_ended_while_others_come_in_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    dog = Watchdog(time.monotonic)
    other, theirs = socket.socketpair()
    with other, theirs:
        with dog.within(other, 60):
            pass
        with dog.within(pair[0], 0.2):
            pair[1].settimeout(60)
            assert pair[1].recv(1) == b""
        other.send(b"x")
        assert theirs.recv(1) == b"x"
    dog.close()
    with dog.within(pair[0], 60):
        wait_for(lambda: dog._thread is None, 30, "the thread to end")
