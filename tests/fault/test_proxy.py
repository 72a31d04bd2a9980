"""The fault proxy does what its faults say: else tests that use it would prove nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from support import proxy as faults
from support.badserver import Peer, serving
from support.proxy import FaultProxy, on
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.model.errors import Unavailable
from fsd.model.token import make
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.wire.messages import CommitAnswer, make_commit, packb, read_commit

ANSWER = CommitAnswer(7, b"t" * 16, 3, (), (), 0)
COMMIT = make_commit(5, b"ticket", [], (0, 0, 0), [])


@dataclass
class Rig:
    proxy: FaultProxy
    remote: HttpRemote
    arrived: list[int] = field(default_factory=list)


@pytest.fixture
def rig() -> Iterator[Rig]:
    arrived: list[int] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            call = next(line for line in got[0].split("\r\n") if line.startswith("X-Fsd-Call")) + "\r\n"
            if "/commits" in got[0]:
                arrived.append(read_commit(got[1]).session)
                peer.answer(ANSWER.encode(), extra=call)
            else:
                peer.answer(packb({"seq": 1, "answers": [None]}), extra=call)

    with serving(behave) as url, FaultProxy(url) as proxy:
        token = make(Host(), "fs_a", "tok", {})
        yield Rig(proxy, HttpRemote(RemoteOptions(proxy.url, token), Host()), arrived)


def test_without_faults_everything_passes_and_is_counted_by_route(rig: Rig) -> None:
    for _ in range(5):
        assert rig.remote.commit(COMMIT, 60) == ANSWER
    rig.remote.ask([("list", 1, b"", 10)], 60)
    assert rig.proxy.count("commits") == 5 == len(rig.arrived)
    assert rig.proxy.count("ns") == 1 and rig.proxy.count("packs") == 0
    rig.proxy.reset_counts()
    assert rig.proxy.count("commits") == 0


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        (faults.LOSE_REPLY, 1),
        (faults.CUT_REQUEST, 0),
        (faults.SWALLOW_REPLY, 1),
        (faults.BLACK_HOLE, 0),
        (faults.HTML_502, 0),
        (faults.HTML_502_AFTER, 1),
        (faults.EMPTY_200, 0),
        (faults.EMPTY_200_AFTER, 1),
        (faults.truncate(60), 1),
        (faults.truncate(100), 1),
    ],
)
def test_a_faulty_request_fails_once_and_reaches_the_server_or_not(
    rig: Rig, fault: faults.Fault, arrives: int
) -> None:
    rig.proxy.next(fault, on("commits"))
    rig.remote.ask([("list", 1, b"", 10)], 60)  # another route does not meet it
    rig.remote.close()
    remote = HttpRemote(rig.remote._options, Host())
    if fault.kind == "silence":  # the client gives up when its request has arrived
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(remote.commit, COMMIT, 60)
            wait_for(lambda: not rig.proxy.pending())
            remote.close()
            assert isinstance(asked.exception(60), Unavailable)
        remote = HttpRemote(rig.remote._options, Host())
    else:
        with pytest.raises(Unavailable):
            remote.commit(COMMIT, 60)
    wait_for(lambda: len(rig.arrived) == arrives, 30, "the request at the server")
    assert rig.proxy.pending() == 0
    assert remote.commit(COMMIT, 60) == ANSWER


def test_doubled_requests_and_replies(rig: Rig) -> None:
    rig.proxy.next(faults.DOUBLE_REQUEST)
    assert rig.remote.commit(COMMIT, 60) == ANSWER
    assert rig.arrived == [5, 5]
    rig.proxy.always(faults.DOUBLE_REPLY)
    answered = 0
    for _ in range(10):
        try:
            answered += rig.remote.commit(COMMIT, 60) == ANSWER
        except Unavailable:
            continue  # the reply before came late: told, and never taken for this one's
    assert answered >= 5


def test_delays(rig: Rig) -> None:
    for fault in (faults.delay(0.3), faults.delay_reply(0.3)):
        rig.proxy.next(fault)
        began = time.monotonic()
        assert rig.remote.commit(COMMIT, 60) == ANSWER
        assert 0.3 <= time.monotonic() - began < 20


def test_refuse_and_accept_on_the_same_port(rig: Rig) -> None:
    assert rig.remote.commit(COMMIT, 60) == ANSWER
    rig.proxy.refuse()
    with pytest.raises(Unavailable, match="refused"):
        rig.remote.commit(COMMIT, 60)
    rig.proxy.accept()
    assert rig.remote.commit(COMMIT, 60) == ANSWER


def test_cut_all_ends_a_call_under_way(rig: Rig) -> None:
    rig.proxy.always(faults.BLACK_HOLE)
    ended: list[float] = []

    def call() -> None:
        try:
            rig.remote.commit(COMMIT, 30)
        except Unavailable:
            ended.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    wait_for(lambda: rig.proxy.count("commits") == 1, 30)
    rig.proxy.cut_all()
    thread.join(20)
    assert ended
