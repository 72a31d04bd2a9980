"""Commits that are sent without waiting, against servers that misbehave, and on the loop of a mount."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

import pytest
from support.badserver import Peer, reply, serving

from fsd.host.seam import Host
from fsd.kernel.atonce import AtOnce
from fsd.kernel.mini import Scheduler
from fsd.model.errors import FsdError, SessionForked, Unavailable
from fsd.model.limits import SENT_AT_ONCE_MAX
from fsd.model.token import make
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.remote.sent import SentCommit
from fsd.remote.transport import Stale
from fsd.vfs.commit import CommitJob
from fsd.vfs.types import Job
from fsd.wire.frame import make_blob
from fsd.wire.messages import CommitAnswer, make_commit

ANSWER = CommitAnswer(7, b"t" * 16, 3, (), (), 0)
GOOD = ANSWER.encode()
COMMIT = make_commit(5, b"ticket", [], (0, 0, 0), [make_blob(b"some bytes")])
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
ENOUGH = 20.0


def remote_to(url: str) -> HttpRemote:
    token = make(Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": url})
    return HttpRemote(RemoteOptions(url, token), Host())


def second(act: Callable[[Peer], None]) -> Callable[[Peer], None]:
    """The second request on the first connection meets `act`; everything else is answered well."""

    def behave(peer: Peer) -> None:
        count = 0
        while peer.request() is not None:
            count += 1
            if (peer.number, count) == (0, 2):
                act(peer)
                return
            peer.answer(GOOD)

    return behave


def well(peer: Peer) -> None:
    while peer.request() is not None:
        peer.answer(GOOD)


def in_pieces(peer: Peer) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + reply(GOOD)
    for at in range(0, len(whole), 7):
        peer.sock.sendall(whole[at : at + 7])
        time.sleep(0.001)
    well(peer)


def drip(peer: Peer) -> None:
    for byte in reply(GOOD):
        if peer.stop.wait(0.1):
            return
        peer.sock.sendall(bytes([byte]))


def begun(remote: HttpRemote, timeout: float = 60.0) -> SentCommit:
    assert remote.commit(COMMIT, 60) == ANSWER  # makes the connection
    sent = remote.begin_commit(COMMIT, timeout)
    assert sent is not None
    return sent


def outcome(sent: SentCommit) -> CommitAnswer:
    """As the loop does: look when something comes, and now and then."""
    poll = select.poll()
    poll.register(sent.fileno, select.POLLIN)
    until = time.monotonic() + ENOUGH
    while time.monotonic() < until:
        poll.poll(100)
        answer = sent.step()
        if answer is not None:
            return answer
    raise AssertionError("neither an answer nor its absence was noticed")


def test_a_commit_of_very_many_pieces_goes_at_once_too() -> None:
    """More than the 1,024 that one sendmsg takes, on the connection there is."""
    blobs = [make_blob(b"%d" % number) for number in range(1200)]
    asked: list[bytes | None] = []

    def behave(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            asked.append(request)
            peer.answer(GOOD)

    with serving(behave) as url:
        remote = remote_to(url)
        try:
            assert remote.commit(COMMIT, 60) == ANSWER
            sent = remote.begin_commit(make_commit(5, b"ticket", [], (0, 0, 0), blobs), 60)
            assert sent is not None
            assert outcome(sent) == ANSWER
        finally:
            remote.close()
    assert len(asked) == 2


WAYS: dict[str, tuple[Callable[[Peer], None], type[Exception]]] = {
    "hangs": (Peer.hang, Unavailable),
    "drips": (drip, Unavailable),
    "closes without a word": (lambda peer: None, Stale),
    "resets": (Peer.reset, Stale),
    "truncated body": (lambda p: p.sock.sendall(reply(GOOD)[:-1]), Unavailable),
    "truncated header": (lambda p: p.sock.sendall(reply(GOOD)[:20]), Unavailable),
    "garbage": (lambda p: p.sock.sendall(bytes(range(256)) * 10 + b"\r\n\r\n"), Unavailable),
    "garbage body": (lambda p: p.answer(b"\xc1" * 40), Unavailable),
    "502 with HTML": (lambda p: p.answer(b"<html>", "502 Bad Gateway", "text/html"), Unavailable),
    "header without end": (
        lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20000),
        Unavailable,
    ),
    "somebody else's reply": (
        lambda p: p.answer(GOOD, extra="X-Fsd-Call: 0000000000000000\r\n"),
        Unavailable,
    ),
    "chunked": (lambda p: p.sock.sendall(CHUNKED), Stale),
    "no length": (lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD), Stale),
    "too long": (lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), Stale),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_answer_is_noticed_and_the_next_commit_works(way: str) -> None:
    act, error = WAYS[way]
    with serving(second(act)) as url:
        remote = remote_to(url)
        with pytest.raises(error):
            outcome(begun(remote, 0.6 if act in (Peer.hang, drip) else 60.0))
        assert remote.commit(COMMIT, 60) == ANSWER
        assert remote.health().reachable


def test_an_answer_in_pieces_behind_an_interim_one_is_one_answer() -> None:
    with serving(second(in_pieces)) as url:
        remote = remote_to(url)
        assert outcome(begun(remote)) == ANSWER
        again = remote.begin_commit(COMMIT, 60)  # on the same connection
        assert again is not None and outcome(again) == ANSWER


def test_what_the_server_says_is_raised_and_the_connection_stays() -> None:
    body = b'{"error": {"code": "session_forked", "message": "m", "retryable": false, "request_id": "r"}}'

    def refuse(peer: Peer) -> None:
        peer.answer(body, "409 Conflict", "application/json")
        well(peer)

    with serving(second(refuse)) as url:
        remote = remote_to(url)
        with pytest.raises(SessionForked):
            outcome(begun(remote))
        again = remote.begin_commit(COMMIT, 60)
        assert again is not None and outcome(again) == ANSWER


def test_what_needs_waiting_is_not_sent_at_once() -> None:
    with serving(well) as url:
        remote = remote_to(url)
        assert remote.begin_commit(COMMIT, 60) is None  # no connection yet
        sent = begun(remote)
        assert remote.begin_commit(COMMIT, 60) is None  # one is under way
        assert outcome(sent) == ANSWER
        large = make_commit(5, b"t", [], (0, 0, 0), [make_blob(bytes(range(256)) * 512, compress=False)])
        assert len(large.blobs[0].stored) > SENT_AT_ONCE_MAX
        assert remote.begin_commit(large, 60) is None
        assert remote.commit(large, 60) == ANSWER


def test_a_commit_that_is_given_up_is_nobodys_and_frees_the_connection() -> None:
    with serving(second(Peer.hang)) as url:
        remote = remote_to(url)
        begun(remote).give_up()
        assert remote.commit(COMMIT, 60) == ANSWER


def test_a_client_that_is_closed_sends_no_more() -> None:
    with serving(second(Peer.hang)) as url:
        remote = remote_to(url)
        sent = begun(remote)
        remote.close()
        with pytest.raises((Stale, Unavailable)):
            outcome(sent)
        with pytest.raises(Unavailable):
            remote.commit(COMMIT, 60)


def on_loop(act: Callable[[Peer], None]) -> tuple[list[object], list[Job], AtOnce]:
    """A second commit is taken by the loop; what it ended with, and what was left to workers."""
    results: list[object] = []
    left: list[Job] = []
    loop = Scheduler()
    with serving(second(act)) as url:
        remote = remote_to(url)
        at_once = AtOnce(
            remote,
            loop,
            lambda job, result: (results.append(result), over[0].fire())[0],
            lambda job: (left.append(job), over[0].fire())[0],
        )
        assert not at_once.take(CommitJob(COMMIT))  # no connection yet
        assert remote.commit(COMMIT, 60) == ANSWER
        over = [loop.make_wait()]

        async def main() -> None:
            assert at_once.take(CommitJob(COMMIT))
            assert not at_once.take(CommitJob(COMMIT))  # one at a time
            await over[0]

        timer = threading.Timer(ENOUGH, lambda: loop.post(lambda: over[0].fail(TimeoutError("no outcome"))))
        timer.start()
        try:
            loop.run(main)
        finally:
            timer.cancel()
            at_once.stop()
            loop.close()
    return results, left, at_once


def test_the_loop_sends_a_commit_and_is_told_of_its_answer() -> None:
    results, left, at_once = on_loop(lambda peer: peer.answer(GOOD))
    assert (results, left, at_once.count) == ([ANSWER], [], 1)


def test_a_commit_whose_connection_was_closed_is_left_to_a_worker() -> None:
    results, left, _ = on_loop(lambda peer: None)
    assert not results and len(left) == 1


def test_an_error_is_the_jobs_outcome() -> None:
    results, left, _ = on_loop(lambda peer: peer.answer(b"\xc1" * 40))
    assert isinstance(results[0], FsdError) and not left
