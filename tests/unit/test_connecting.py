"""All steps of connecting share one time: no step begins it anew."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsd.model.endpoint import parse_endpoint
from fsd.model.errors import Unavailable
from fsd.remote import transport
from fsd.remote.proxy import within
from fsd.remote.resolve import Address
from fsd.remote.transport import Connection, _Clock


class Made:
    """A clock, and a socket that connects `takes` seconds later. `given` are the times it was given."""

    def __init__(self, takes: float) -> None:
        self.now, self.takes, self.given = 100.0, takes, list[float]()

    def settimeout(self, seconds: float) -> None:
        self.given.append(seconds)

    def connect(self, _where: object) -> None:
        self.now += self.takes

    def setsockopt(self, *_option: int) -> None: ...
    def close(self) -> None: ...


def connected(monkeypatch: pytest.MonkeyPatch, takes: float, timeout: float) -> list[float]:
    """Connect with TLS, for which there are 10 s, in a call of `timeout` seconds; the times of its steps."""
    made = Made(takes)
    monkeypatch.setattr(transport.socket, "socket", lambda *_kind: made)
    tls = SimpleNamespace(wrap_socket=lambda sock, server_hostname: sock)
    where = parse_endpoint("https://fsd.example", insecure=False)
    one = Connection(where, cast(Any, None), cast(Any, tls), lambda: made.now, 10.0)
    one._connect_to(Address(socket.AF_INET, ("192.0.2.1", 443)), _Clock(lambda: made.now, timeout, None, 0))
    return made.given


def test_tls_gets_what_the_connection_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected(monkeypatch, takes=6.0, timeout=30.0) == [10.0, 4.0]
    assert connected(monkeypatch, takes=6.0, timeout=8.0) == [8.0, 2.0]


def test_nothing_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        connected(monkeypatch, takes=10.0, timeout=30.0)
    with pytest.raises(Unavailable, match="within 8 s"):
        connected(monkeypatch, takes=9.0, timeout=8.0)


def test_a_time_within_another() -> None:
    now = [0.0]
    left = within(lambda: now[0], 10.0, lambda: 12.0 - 2 * now[0])
    assert left() == 10.0
    now[0] = 4.0
    assert left() == 4.0
    now[0] = 6.0
    with pytest.raises(TimeoutError):
        left()
