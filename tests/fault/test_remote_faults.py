"""`HttpRemote` against servers that misbehave: each way is `Unavailable`, bounded in time, and survived."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.badserver import Peer, reply, serving

from fsd.host.seam import Host
from fsd.model.attrs import Attr, Entry
from fsd.model.errors import (
    FsdError,
    NotAuthenticated,
    PosixError,
    QuotaExceeded,
    SessionForked,
    Unavailable,
    UsageError,
)
from fsd.model.limits import (
    BLOBS_GET_MAX,
    FEED_ANSWER_MAX,
    FEED_TOLD_MAX,
    MIB,
    NS_ANSWER_MAX,
    NS_BATCH_MAX,
    NS_BYTES_MAX,
    UPLOAD_MAX,
)
from fsd.model.token import make
from fsd.remote.api import SessionInfo
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.wire.frame import Blob, make_blob, pack, unpack
from fsd.wire.messages import ATTRS, LOOKUP, CommitAnswer, Mark, make_commit, packb, read_commit, unpackb

ANSWER = CommitAnswer(7, b"t" * 16, 3, (), (), 0)
COMMIT = make_commit(5, b"ticket", [], (0, 0, 0), [make_blob(b"some bytes")])
INFO = SessionInfo("m", "host", "/mnt", "/", False, "0")
STARTED = {
    "session": 8,
    "ticket": "dGlja2V0",
    "seq": 4,
    "server_version": "1",
    "block_size": 1 << 20,
    "previous": {"ended": "lost", "last_commit_at": None, "pending_at_last_report": [1, 2, 3]},
}


# Soon, on a machine that is busy with other things too; whatever hangs here would take half a minute.
ENOUGH = 20.0


def remote_to(url: str, **options: float) -> HttpRemote:
    token = make(Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": url})
    return HttpRemote(RemoteOptions(url, token, **options), Host())  # type: ignore[arg-type]


def once(act: Callable[[Peer], None]) -> Callable[[Peer], None]:
    """The first connection's first request meets `act`; everything else is answered well."""

    def behave(peer: Peer) -> None:
        first = peer.number == 0
        while peer.request() is not None:
            if first:
                act(peer)
                return
            peer.answer(ANSWER.encode())

    return behave


def drip(peer: Peer) -> None:
    for byte in reply(ANSWER.encode()):
        if peer.stop.wait(0.05):
            return
        peer.sock.sendall(bytes([byte]))


GOOD = ANSWER.encode()
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
WAYS: dict[str, Callable[[Peer], None]] = {
    "accepts and hangs": Peer.hang,
    "closes without a word": lambda peer: None,
    "resets": Peer.reset,
    "502 with HTML": lambda p: p.answer(HTML, "502 Bad Gateway", "text/html"),
    "200 with HTML": lambda p: p.answer(HTML, media="text/html"),
    "empty 200": lambda p: p.answer(b""),
    "204": lambda p: p.sock.sendall(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "a redirect": lambda p: p.answer(b"", "302 Found", extra="Location: http://127.0.0.1:1/\r\n"),
    "no length": lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD),
    "truncated body": lambda p: p.sock.sendall(reply(GOOD)[:-1]),
    "truncated header": lambda p: p.sock.sendall(reply(GOOD)[:20]),
    "reset in the body": lambda p: (p.sock.sendall(reply(GOOD)[:-3]), p.reset())[0],
    "garbage": lambda p: p.sock.sendall(bytes(range(256)) * 10 + b"\r\n\r\n"),
    "garbage body": lambda p: p.answer(b"\xc1" * 40),
    "JSON without an error": lambda p: p.answer(b'{"hello": 1}', "500 Oops", "application/json"),
    "too long": lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"),
    "negative length": lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
    "header without end": lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20000),
    "chunk cut": lambda p: p.sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc"),
    "chunk size signed": lambda p: p.sock.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n"
    ),
    "chunk size with a prefix": lambda p: p.sock.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n"
    ),
    "chunk size no number": lambda p: p.sock.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"
    ),
    "another encoding": lambda p: p.sock.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n" + GOOD
    ),
    "drips": drip,
    "only interim answers": lambda p: p.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 20),
    "somebody else's reply": lambda p: p.answer(GOOD, extra="X-Fsd-Call: 0000000000000000\r\n"),
}


@pytest.mark.parametrize("kind", ["feed", "questions"])
def test_an_answer_larger_than_a_server_makes_is_not_read(kind: str) -> None:
    """Nested, it takes 28 times as much memory as it has bytes."""
    bound = FEED_ANSWER_MAX if kind == "feed" else NS_ANSWER_MAX
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (bound + 1)
    with serving(once(lambda p: p.sock.sendall(head))) as url:
        remote = remote_to(url)
        asks = {
            "feed": lambda: remote.changes(0, 1, 0.0),
            "questions": lambda: remote.ask([(ATTRS, (1,))], 60),
        }
        with pytest.raises(Unavailable, match=f"at most {bound} were expected"):
            asks[kind]()
    assert NS_ANSWER_MAX >= 2 * NS_BYTES_MAX and FEED_ANSWER_MAX >= 4 * MIB + 2 * FEED_TOLD_MAX * 270


@pytest.mark.parametrize("way", WAYS)
def test_no_answer_is_unavailable_in_time_and_the_next_call_works(way: str) -> None:
    with serving(once(WAYS[way])) as url:
        remote = remote_to(url)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            remote.commit(COMMIT, timeout=0.6)
        assert time.monotonic() - began < ENOUGH
        assert not remote.health().reachable
        assert remote.commit(COMMIT, timeout=60) == ANSWER
        assert remote.health().reachable


def test_a_refused_connection_is_unavailable_at_once() -> None:
    with socket.socket() as nobody:  # holds the port, so that nobody else gets it
        nobody.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(Unavailable, match="refused"):
            remote_to(f"http://127.0.0.1:{nobody.getsockname()[1]}").commit(COMMIT, timeout=60)
        assert time.monotonic() - began < ENOUGH


def test_a_name_that_does_not_resolve_is_unavailable_within_the_limit() -> None:
    token = make(Host(), "fs_a", "tok", {})
    remote = HttpRemote(RemoteOptions("https://no-such-host.invalid", token, connect_timeout=2), Host())
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        remote.commit(COMMIT, timeout=2)
    assert time.monotonic() - began < ENOUGH


def test_a_listener_that_never_accepts_is_bounded_by_the_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = []
        for _ in range(4):  # fill the backlog: further connects get no answer
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fillers.append(filler)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            remote_to(f"http://127.0.0.1:{address[1]}", connect_timeout=0.5).commit(COMMIT, timeout=60)
        assert time.monotonic() - began < ENOUGH
        for filler in fillers:
            filler.close()


def test_a_kept_connection_the_server_closed_is_replaced_unseen() -> None:
    seen: list[int] = []

    def behave(peer: Peer) -> None:
        if peer.request() is not None:
            seen.append(peer.number)
            peer.answer(GOOD)

    with serving(behave) as url:
        remote = remote_to(url)
        for _ in range(5):
            assert remote.commit(COMMIT, timeout=60) == ANSWER
        assert seen == [0, 1, 2, 3, 4]


def test_a_kept_connection_reset_after_the_request_is_tried_once_more() -> None:
    requests: list[int] = []

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            requests.append(peer.number)
            if len(requests) == 2:
                peer.reset()
                return
            peer.answer(GOOD)

    with serving(behave) as url:
        remote = remote_to(url)
        assert remote.commit(COMMIT, timeout=60) == ANSWER
        assert remote.commit(COMMIT, timeout=60) == ANSWER
        assert requests == [0, 0, 1]


def test_a_reply_that_comes_twice_is_never_another_requests_answer() -> None:
    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            commit = read_commit(got[1])
            peer.sock.sendall(reply(ANSWER._replace(seq=commit.session).encode()) * 2)

    with serving(behave) as url:
        remote = remote_to(url)
        for session in range(1, 20):
            assert remote.commit(COMMIT._replace(session=session), timeout=60).seq == session


def test_a_late_second_reply_is_recognised_by_its_call_id() -> None:
    def behave(peer: Peer) -> None:
        late = b""
        while (got := peer.request()) is not None:
            commit = read_commit(got[1])
            mine = next(line for line in got[0].split("\r\n") if line.startswith("X-Fsd-Call"))
            one = reply(ANSWER._replace(seq=commit.session).encode(), extra=mine + "\r\n")
            # The reply before arrives again only when the next request is under way.
            peer.sock.sendall(late + one)
            late = one

    with serving(behave) as url:
        remote = remote_to(url)
        for session in range(1, 20):
            try:
                answer = remote.commit(COMMIT._replace(session=session), timeout=60)
            except Unavailable:
                answer = remote.commit(COMMIT._replace(session=session), timeout=60)
            assert answer.seq == session


def test_an_error_while_a_large_body_is_still_being_sent_is_heard() -> None:
    body = json.dumps(QuotaExceeded("the quota is used up").body("r-1")).encode()

    def behave(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.answer(body, "409 Conflict", "application/json")
        peer.sock.shutdown(socket.SHUT_WR)
        # The rest is read, as servers do that want their answer to arrive.
        while peer.sock.recv(1 << 20):
            continue

    blobs = [make_blob(os.urandom(1 << 20)) for _ in range(8)]
    with serving(behave) as url, pytest.raises(QuotaExceeded, match="used up") as caught:
        remote_to(url).upload(blobs, timeout=60)
    assert caught.value.request_id == "r-1"


@pytest.mark.parametrize(
    "error",
    [
        NotAuthenticated("no"),
        SessionForked("a copy"),
        PosixError(39, "full of entries"),
        QuotaExceeded("no"),
        UsageError("wrong"),
    ],
)
def test_what_the_server_says_is_raised_as_it_was(error: FsdError) -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(json.dumps(error.body("r-9")).encode(), f"{error.status} x", "application/json")

    with serving(behave) as url:
        remote = remote_to(url)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                remote.commit(COMMIT, timeout=60)
            assert caught.value.errno == error.errno
            assert caught.value.request_id == "r-9"
        assert remote.health().reachable


def test_tokens_never_stand_in_messages() -> None:
    secret: list[str] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            secret.append(got[0].split("Bearer ")[1].split("\r\n")[0])
            body = json.dumps(NotAuthenticated(f"bad token {secret[0]}").body("r")).encode()
            peer.answer(body, "401 x", "application/json")

    with serving(behave) as url:
        remote = remote_to(url)
        with pytest.raises(NotAuthenticated) as caught:
            remote.commit(COMMIT, timeout=60)
        assert secret[0].startswith("fsd1.")
        assert secret[0] not in str(caught.value) and secret[0] not in repr(remote._options)


def test_chunked_answers_are_read_and_the_connection_kept() -> None:
    connections: set[int] = set()

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            connections.add(peer.number)
            halves = GOOD[:3], GOOD[3:]
            peer.sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for half in halves:
                peer.sock.sendall(b"%x;x=y\r\n%s\r\n" % (len(half), half))
            peer.sock.sendall(b"0\r\nTrailer: x\r\n\r\n")

    with serving(behave) as url:
        remote = remote_to(url)
        for _ in range(3):
            assert remote.commit(COMMIT, timeout=60) == ANSWER
    assert connections == {0}


def test_close_ends_a_call_under_way_and_later_ones() -> None:
    reached = threading.Event()

    def behave(peer: Peer) -> None:
        peer.request()
        reached.set()
        peer.hang()

    with serving(behave) as url:
        remote = remote_to(url)
        ended: list[BaseException] = []

        def poll() -> None:
            try:
                remote.changes(0, 1, 25)
            except Unavailable as exc:
                ended.append(exc)

        thread = threading.Thread(target=poll)
        thread.start()
        assert reached.wait(60)
        remote.close()
        thread.join(ENOUGH)
        assert not thread.is_alive() and ended
        with pytest.raises(Unavailable):
            remote.commit(COMMIT, timeout=60)


def test_uploads_are_cut_at_the_bound_and_arrive_whole() -> None:
    sizes: list[int] = []
    arrived: list[bytes] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            _, blobs = unpack(got[1], blobs_max=4096, bytes_max=UPLOAD_MAX)
            sizes.append(len(blobs))
            arrived.extend(blob.hash for blob in blobs)
            peer.answer(packb({"stored": len(blobs)}))

    blobs = [make_blob(os.urandom(1 << 20)) for _ in range(17)]
    small = [make_blob(b"%d" % n) for n in range(4100)]
    with serving(behave) as url:
        remote = remote_to(url)
        remote.upload(blobs, timeout=30)
        assert sizes == [16, 1] and arrived == [b.hash for b in blobs]
        sizes.clear(), arrived.clear()
        remote.upload(small, timeout=30)
        assert sizes == [4096, 4] and arrived == [b.hash for b in small]


def test_blobs_are_asked_for_until_all_are_answered() -> None:
    have = {blob.hash: blob for blob in (make_blob(b"%d" % n) for n in range(600))}

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            asked = unpackb(got[1], "hashes")
            assert len(asked) <= BLOBS_GET_MAX
            served = [have[h] for h in asked if h in have][:100]
            last = asked.index(served[-1].hash) if served else len(asked)
            peer.answer(pack({"absent": [h for h in asked[:last] if h not in have]}, served))

    wanted = [*have, b"x" * 32]
    with serving(behave) as url:
        found, absent = remote_to(url).blobs(wanted, timeout=60)
    assert [b.hash for b in found] == list(have) and absent == [b"x" * 32]


def test_an_answer_with_blobs_nobody_asked_for_is_no_answer() -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(pack({"absent": []}, [make_blob(b"other")]))

    with serving(behave) as url, pytest.raises(Unavailable):
        remote_to(url).blobs([b"x" * 32], timeout=60)


@pytest.mark.parametrize("absent", [[2**40], 2**40, [b"y" * 32], [b"x" * 32] * 2, ["x" * 32], None, {}])
def test_what_is_absent_is_some_of_what_was_asked_for(absent: object) -> None:
    """A number there was taken for so many bytes of memory."""

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(pack({"absent": absent}, []))

    with serving(behave) as url:
        remote = remote_to(url)
        for ask in (remote.blobs, remote.keep):
            with pytest.raises(Unavailable):
                ask([b"x" * 32], 60)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b"[]", b"{", b"1" * 5000])
@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_json_that_no_parser_takes_is_no_answer(body: bytes, status: str) -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(body, status, "application/json")

    with serving(behave) as url:
        remote = remote_to(url)
        for ask in (
            lambda: remote.start_session(INFO),
            lambda: remote.renew_lease(1, 1, 30.0),
            lambda: remote.count_conflicts(b"/", 60),
            lambda: remote.keep_state(1),
            lambda: remote.prune("1d"),
            remote.newest_checkpoint,
        ):
            with pytest.raises(Unavailable):
                ask()


@pytest.mark.parametrize("number", [0, -1, 2**23, 1.5, "8", None, True])
def test_a_session_has_a_number_that_one_can_have(number: object) -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(json.dumps({**STARTED, "session": number}).encode())

    with serving(behave) as url, pytest.raises(Unavailable):
        remote_to(url).start_session(INFO)


def test_questions_come_back_as_attributes_and_entries() -> None:
    attr = Attr(9, 0o100644, 1, 0, 0, 3, 1, 2, 3, 0, None, 0, None, {b"user.a": b"b"}, 4, 5, 6)
    entry = Entry(b"name", attr, 6)

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            assert unpackb(got[1], "questions")[0][0] == LOOKUP
            peer.answer(packb({"seq": 12, "answers": [(entry, [entry, entry]), [attr, None]]}))

    with serving(behave) as url:
        remote = remote_to(url)
        seq, answers = remote.ask([(LOOKUP, 1, b"name", 10), (ATTRS, (9, 10))], timeout=60)
        assert seq == 12 and answers == [(entry, [entry, entry]), [attr, None]]
        assert isinstance(answers[0][0].attr, Attr)
        with pytest.raises(Unavailable):  # the answer has two, the question is one
            remote.ask([(LOOKUP, 1, b"name", 10)], timeout=60)
        with pytest.raises(UsageError):
            remote.ask([(ATTRS, (1,))] * (NS_BATCH_MAX + 1), timeout=60)


def test_a_session_start_whose_answer_was_lost_is_the_same_start_again() -> None:
    keys: list[str] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            keys.append(got[0].split("Idempotency-Key: ")[1].split("\r\n")[0])
            if len(keys) == 1:
                return
            peer.answer(json.dumps(STARTED).encode(), "201 Created", "application/json")

    with serving(behave) as url:
        remote = remote_to(url)
        with pytest.raises(Unavailable):
            remote.start_session(INFO)
        started = remote.start_session(INFO)
        assert (started.session, started.ticket, started.seq) == (8, b"ticket", 4)
        assert started.previous is not None and started.previous.pending_at_last_report == (1, 2, 3)
        remote.start_session(INFO)
        assert keys[0] == keys[1] != keys[2]


def test_each_thread_has_a_connection_of_its_own() -> None:
    seen: set[int] = set()
    together = threading.Barrier(4, timeout=60)

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            seen.add(peer.number)
            together.wait()
            peer.answer(GOOD)

    with serving(behave) as url:
        remote = remote_to(url)
        answers: list[CommitAnswer] = []
        threads = [
            threading.Thread(target=lambda: answers.append(remote.commit(COMMIT, timeout=60)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == [ANSWER] * 4 and len(seen) == 4


@pytest.mark.parametrize("lost", [False, True])
def test_an_older_server_starts_a_session_without_the_mark_it_does_not_know(lost: bool) -> None:
    keys: list[tuple[bool, str]] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            key = next(line for line in got[0].split("\r\n") if line.startswith("Idempotency-Key"))
            known = "known" in json.loads(got[1])
            keys.append((known, key))
            if known:
                told = "unknown field 'known'; this route takes mount_id, host, path"
                refusal = {"error": {"code": "invalid_argument", "message": told}}
                peer.answer(json.dumps(refusal).encode(), status="400 Bad Request")
            elif lost and len(keys) == 2:
                return
            else:
                peer.answer(json.dumps(STARTED).encode())

    with serving(behave) as url:
        remote = remote_to(url)
        assert remote.start_session(replace(INFO, known=Mark(7, 1))).session == 8
    assert [known for known, _ in keys] == [True, False] + [False] * lost
    # The second asks for something else, so it has a key of its own; a repetition has the same.
    assert len(set(keys)) == 2 and keys[0][1] != keys[1][1]


def refused(peer: Peer) -> None:
    body = b'{"error":{"code":"unavailable","message":"m","hint":"","retryable":true,"request_id":"r"}}'
    while peer.request() is not None:
        peer.answer(body, "503 Service Unavailable", "application/json")


class Sent(list[Blob]):
    """What a weak reference can be made to."""


def test_what_could_not_be_sent_is_not_kept_by_its_error() -> None:
    """Megabytes a try, and a mount tries for as long as the server is away; the collector comes seldom."""
    with socket.socket() as nobody, serving(refused) as url:
        nobody.bind(("127.0.0.1", 0))
        for where in (url, f"http://127.0.0.1:{nobody.getsockname()[1]}"):
            remote = remote_to(where)
            blobs = Sent([make_blob(b"some bytes")])
            kept = weakref.ref(blobs)
            gc.disable()
            try:
                with pytest.raises(Unavailable):
                    remote.commit(make_commit(5, b"ticket", [], (0, 0, 0), blobs), timeout=60)
                del blobs
                assert kept() is None, where
            finally:
                gc.enable()
