"""The server killed at the durable step of each write of the checkpoint contract: all of it or nothing; and
the same request again, under its key, has the effect exactly once."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.contract import (
    Json,
    Store,
    artifact,
    audit_stopped,
    checkpoint,
    file,
    fork_body,
    key_for,
    writer,
)
from support.postgres import database_of
from support.server import Server
from support.wait import wait_for

from fsd.model.limits import SWEEP_NAMES

LONG = 3_600_000  # a lease that outlasts the test
THREADS = ("src", "dst", "head", "chain", "grow")


class Scene:
    """A filesystem with a thread for each write, and what each write is."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.store = Store(server, lease_duration_ms=LONG, renew_after_ms=LONG / 2)
        self.store.now = None
        self.leases = {name: self.store.acquire(name) for name in THREADS}
        many = [file(f"f{number}") for number in range(300)]
        for name in ("src", "head", "chain"):
            names = [f"{name}{number}" for number in range(4)]
            self.store.grow(name, *names, lease=self.leases[name], files=many, artifacts=[artifact("p")])
        self.many = many

    def state(self) -> Json:
        return self.store.state(*THREADS)

    def write(self, name: str) -> tuple[str, Json]:
        """Method and body."""
        lease = writer(self.leases.get(name, self.leases["src"]))
        bodies: dict[str, tuple[str, Json]] = {
            "dst": (
                "forkFromCheckpoint",
                fork_body(("src", "src1"), ("dst", "fork"), self.leases["dst"]),
            ),
            "head": ("deleteHead", {"threadId": "head", "checkpointId": "head3", "writer": lease}),
            "chain": ("deleteCheckpoints", {"threadId": "chain", "keep": 2, "writer": lease}),
            "grow": (
                "append",
                {
                    "checkpoint": checkpoint("grow0", "grow", files=self.many),
                    "expectedHeadId": None,
                    "writer": lease,
                },
            ),
            "acquire": ("acquireWriter", {"threadId": "fresh"}),
            "save": ("saveThread", {"threadId": "src", "messages": [{"n": 1}]}),
        }
        return bodies[name]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, str | None]]:
    url = database_of(request)
    options = ["--database", url] if url else []
    server = Server(tmp_path / "server", *options)
    try:
        yield server.start(), url
    finally:
        server.end()


def start(store: Store, env: dict[str, str]) -> None:
    """Start the server anew, with `env`."""
    store.close()
    store.server.end()
    store.server.env = env
    store.server.start()


class Killer:
    """Kills the server at the commit that an act makes: the first one after those of its start, whose number
    is found once. Then it runs again, unharmed."""

    def __init__(self) -> None:
        self.first = 1

    def kill(self, store: Store, point: str, act: Callable[[], Any]) -> None:
        for count in range(self.first, 8):
            if died(store, f"{point}:{count}", act):
                self.first = count
                return
        raise AssertionError("the server never died")


def died(store: Store, point: str, act: Callable[[], Any]) -> bool:
    """Whether `act` met the server's death."""
    try:
        start(store, {"FSD_CRASH": point})
    except AssertionError:
        return False  # it needed that many to start
    try:
        act()
    except (OSError, http.client.HTTPException):
        process = store.server.process
        wait_for(lambda: process and process.poll() is not None, 30, "the server to die")
        start(store, {})
        return True
    return False


@pytest.mark.parametrize("point", [pytest.param("db.commit", marks=pytest.mark.long), "db.committed"])
def test_a_write_is_whole_or_none(served: tuple[Server, str | None], point: str) -> None:
    server, url = served
    scene = Scene(server)
    store = scene.store
    crashed, killer = [], Killer()
    for name in ("grow", "dst", "head", "chain", "acquire", "save"):
        op, body = scene.write(name)
        before = scene.state()
        killer.kill(store, point, lambda op=op, body=body: store.call(op, body, Idempotency_Key=op))  # type: ignore[misc]
        found = scene.state()
        first = store.call(op, body, Idempotency_Key=op)
        done = scene.state()
        assert done != before or name == "acquire"
        assert found in (before, done), name
        crashed.append(found)
        assert store.call(op, body, Idempotency_Key=op) == first
        assert scene.state() == done
        # A commit of the server's own may have been the one it died at: then the write had not begun.
        if point == "db.commit":
            assert found == before
    if point == "db.committed":
        assert crashed[-1] == scene.state() or crashed[0] != crashed[1], "some were done before the crash"
    store.close()
    server.stop()
    assert audit_stopped(server, url) == []


@pytest.mark.parametrize("point", ["db.commit", "db.committed"])
def test_a_put_and_a_sweep_are_whole_or_none(served: tuple[Server, str | None], point: str) -> None:
    server, url = served
    store = Scene(server).store
    data = bytes(range(256)) * 1000
    key, killer = key_for(data), Killer()
    killer.kill(store, point, lambda: store.put(data))
    assert store.blob(key) in (None, data)
    assert store.put(data) == key
    assert store.blob(key) == data
    killer.kill(store, point, lambda: store.sweep(0))
    assert store.blob(key) in (None, data)
    store.sweep(0)
    assert store.blob(key) is None
    store.close()
    server.stop()
    assert audit_stopped(server, url) == []


def test_a_sweep_killed_between_two_steps_is_gone_on_with(served: tuple[Server, str | None]) -> None:
    server, url = served
    store = Scene(server).store
    keys = sorted(store.put(b"%d" % number) for number in range(SWEEP_NAMES + 20))
    assert died(store, "names.swept:1", lambda: store.sweep(0))
    left = [blob["key"] for blob in store.blobs()]
    assert left == keys[SWEEP_NAMES:], "whole steps are done, in order"
    assert store.sweep(0) == left
    store.close()
    server.stop()
    assert audit_stopped(server, url) == []
