"""A reply that never comes while the connection is open: asked for again soon, done once, in the budget."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import proxy as faults
from support.proxy import FaultProxy, on
from support.reading import committed_tree, remote_for
from support.sandbox import Sandbox
from support.server import Server, TestFs

import fsd.remote.patience
from fsd.client.files import Files
from fsd.client.http import BytesBody, Http, HttpOptions
from fsd.client.identity import Claim, data_identity
from fsd.client.journals import Journals
from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Unavailable
from fsd.model.limits import CALL_PATIENCE, PATIENCE_FIRST, PATIENCE_OF_TOOK
from fsd.model.ops import CREATE, Create
from fsd.remote.api import SessionInfo
from fsd.remote.hot import HttpRemote
from fsd.remote.patience import Patience
from fsd.wire.frame import make_blob
from fsd.wire.messages import LIST, Commit, make_commit

QUICK = 0.3
ENOUGH = 30.0  # below any time-out, far above QUICK on a loaded machine


@pytest.fixture
def fs(trusted: Server) -> TestFs:
    return trusted.create()


@pytest.fixture
def proxy(trusted: Server) -> Iterator[FaultProxy]:
    with FaultProxy(trusted.url) as made:
        yield made


@pytest.fixture
def remote(
    fs: TestFs,
    proxy: FaultProxy,
) -> HttpRemote:
    return remote_for(fs.token, proxy.url)


def quick(act: Callable[[], object]) -> object:
    """`act` with little patience, which has to come back soon, whatever it does."""
    begun = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsd.remote.patience, "PATIENCE_FIRST", QUICK)
            return act()
    except Unavailable as exc:
        return exc
    finally:
        assert time.monotonic() - begun < ENOUGH


def a_commit(remote: HttpRemote, name: bytes) -> Commit:
    start = remote.start_session(SessionInfo("mount-1", "box", "/mnt", "/", False, "0.1.0"))
    ino = start.session << 40 | 1
    create = Create(1, CREATE, ROOT_INO, name, ino, 0o40755, 0, 0, 0, None, 1_700_000_000_000_000_000)
    return make_commit(start.session, start.ticket, [create], (0, 0, 0), [])


@pytest.mark.parametrize("fault", [faults.SWALLOW_REPLY, faults.BLACK_HOLE])
def test_a_commit_is_given_up_soon_and_the_same_again_is_one(
    remote: HttpRemote,
    proxy: FaultProxy,
    fs: TestFs,
    fault: faults.Fault,
) -> None:
    commit = a_commit(remote, b"made once")
    proxy.next(fault, on("commits"))
    told = quick(lambda: remote.commit(commit, 60))
    assert isinstance(told, Unavailable)
    assert "not a word" in told.message
    answer = remote.commit(commit, 60)
    assert answer.next_op == 2
    assert not answer.outcomes
    assert committed_tree(fs.token)["made once"]


def test_the_first_arrives_after_its_repetition(
    remote: HttpRemote,
    proxy: FaultProxy,
    fs: TestFs,
) -> None:
    commit = a_commit(remote, b"late")
    proxy.next(faults.delay(4 * QUICK), on("commits"))
    assert isinstance(quick(lambda: remote.commit(commit, 60)), Unavailable)
    answer = remote.commit(commit, 60)
    before = remote.ask([(LIST, ROOT_INO, b"", 10)], 60)[0]
    threading.Event().wait(6 * QUICK)  # the late one has nothing to be waited for by
    assert remote.ask([(LIST, ROOT_INO, b"", 10)], 60)[0] == before == answer.seq


def test_every_other_call_of_a_mount_is_as_quick(remote: HttpRemote, proxy: FaultProxy) -> None:
    blob = make_blob(b"swallowed")
    calls: dict[str, Callable[[], object]] = {
        "packs": lambda: remote.upload([blob], 60),
        "ns": lambda: remote.ask([(LIST, ROOT_INO, b"", 10)], 60),
        "blobs": lambda: remote.blobs([blob.hash], 60),
    }
    for route, call in calls.items():
        proxy.next(faults.SWALLOW_REPLY, on(route))
        assert isinstance(quick(call), Unavailable), route
        assert not isinstance(call(), Unavailable)
    polled = quick(lambda: remote.changes(0, 0, 3 * QUICK))
    assert not isinstance(polled, Unavailable), "a poll is silent on purpose"


def test_who_answered_slowly_is_given_more_time(
    remote: HttpRemote, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    real = Patience.within
    monkeypatch.setattr(fsd.remote.patience, "PATIENCE_FIRST", QUICK)
    monkeypatch.setattr(Patience, "within", lambda self, size: allowed.append(real(self, size)) or 60.0)
    proxy.next(faults.delay_reply(0.5), on("ns"))
    for _ in range(2):
        remote.ask([(LIST, ROOT_INO, b"", 10)], 60)
    assert allowed[-2] < 2 * QUICK < PATIENCE_OF_TOOK * 0.5 <= allowed[-1]


def direct(fs: TestFs, url: str, **options: float) -> Http:
    return Http(data_identity(Claim(token=fs.token, endpoint=url)), Host(), HttpOptions(**options))


def test_a_direct_command_asks_again_and_its_change_is_made_once(
    fs: TestFs,
    proxy: FaultProxy,
) -> None:
    http = direct(fs, proxy.url, patience=QUICK)
    files, journals = Files(http), Journals(http)
    journals.create("swallowed", title="t", actor="a:b")
    calls: dict[str, Callable[[], object]] = {
        "mkdir": lambda: files.mkdir(b"/d", parents=False),
        "write": lambda: files.write(b"/d/f", BytesBody(b"content")),
        "read": lambda: b"".join(files.read(b"/d/f")),
        "stat": lambda: files.stat(b"/d/f"),
        "append": lambda: journals.append("swallowed", ['{"type":"x"}']),
    }
    for what, call in calls.items():
        proxy.next(faults.SWALLOW_REPLY)
        found = quick(call)
        assert not isinstance(found, Unavailable), what
        if what == "read":
            assert found == b"content"
    assert len(list(journals.entries("swallowed"))) == 1


def test_a_direct_command_ends_when_all_the_silence_was_as_long_as_it_may(
    fs: TestFs,
    proxy: FaultProxy,
) -> None:
    proxy.always(faults.BLACK_HOLE)
    http = direct(fs, proxy.url, patience=0.2, timeout=1.4, retry_for=0.5)
    for turn in range(5):
        proxy.reset_counts()
        begun = time.monotonic()
        with pytest.raises(Unavailable):
            Files(http).mkdir(b"/never")
        assert 1.3 < time.monotonic() - begun < ENOUGH
        assert len(proxy.log) <= 5, "0.2, 0.4, 0.8 s, and what retry_for allows"
        if len(proxy.log) >= 3:
            break  # else all of it stood still meanwhile, and there was less time for tries
        assert turn < 4


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_an_fsync_and_a_command_as_they_are_used(fs: TestFs, trusted: Server, tmp_path: Path) -> None:
    with FaultProxy(trusted.url) as proxy:
        box = Sandbox(tmp_path / "box", fs, endpoint=proxy.url)
        try:
            box.mount()
            (box.mountpoint / "known").write_bytes(b"x")
            box.fsd("drain", os.fspath(box.mountpoint))
            took: dict[str, float] = {}

            def fsync() -> None:
                begun = time.monotonic()
                with open(box.mountpoint / "f", "wb") as file:
                    file.write(b"kept")
                    file.flush()
                    os.fsync(file.fileno())
                took["fsync"] = time.monotonic() - begun

            proxy.next(faults.SWALLOW_REPLY, on("commits"))
            proxy.next(faults.SWALLOW_REPLY, on("actions"))
            thread = threading.Thread(target=fsync)
            thread.start()
            begun = time.monotonic()
            box.fsd("mkdir", "/made")
            took["mkdir"] = time.monotonic() - begun
            thread.join(100)
            # A try in vain, and the next at once; the old time-outs were a minute each.
            assert PATIENCE_FIRST < took["fsync"] < PATIENCE_FIRST + 45
            assert CALL_PATIENCE < took["mkdir"] < CALL_PATIENCE + 45
            assert proxy.pending() == 0
            assert set(committed_tree(fs.token)) >= {"f", "made", "known"}
        finally:
            box.close()
