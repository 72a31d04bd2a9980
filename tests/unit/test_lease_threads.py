"""A lease that nobody could renew, for want of a thread, is given up at once: others need not wait for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsd.client.contract import Contract, Writer
from fsd.client.leases import LockOptions, hold
from fsd.model.errors import Unavailable


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_threads_writer() -> None:
    called: list[str] = []
    lease = {"threadId": "t", "ownerToken": "x", "fence": 1, "renewAfterMs": 1000}

    def call(op: str, _body: object) -> object:
        called.append(op)
        return lease

    with (
        pytest.raises(Unavailable, match="no thread"),
        Writer(cast(Contract, SimpleNamespace(call=call)), "t"),
    ):
        pytest.fail("it is not held")
    assert called == ["acquireWriter", "release"]


def test_a_lock() -> None:
    given_up: list[int] = []
    leases: Any = SimpleNamespace(
        http=SimpleNamespace(host=SimpleNamespace(monotonic=lambda: 0.0)),
        lock=lambda *_asked: {"fence": 7},
        release=given_up.append,
    )
    with pytest.raises(Unavailable, match="no thread"):
        hold(leases, LockOptions(b"/l", ["true"], {}, "here", 0, 30.0), print)
    assert given_up == [7]
