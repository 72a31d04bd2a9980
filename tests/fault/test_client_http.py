"""Direct commands' transport against servers that misbehave: told, in time, never another's answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from support.badserver import Peer, reply, serving

from fsd.client.contract import Contract
from fsd.client.files import Files
from fsd.client.http import BytesBody, Http, HttpOptions
from fsd.client.identity import Claim, data_identity
from fsd.host.seam import Host
from fsd.model.errors import PosixError, Unavailable, from_body
from fsd.model.token import make

GOOD = b'{"kind": "directory", "is_dir": true}'
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
JSON = "application/json"


def client(url: str, **options: float) -> Http:
    token = make(Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": url})
    limits = {"timeout": 20.0, "connect_timeout": 20.0, "retry_for": 0.0, **options}
    return Http(data_identity(Claim(token=token.text())), Host(), HttpOptions(**limits))


def drip(peer: Peer) -> None:
    for byte in reply(GOOD, media=JSON):
        if peer.stop.wait(0.05):
            return
        peer.sock.sendall(bytes([byte]))


def drip_body(peer: Peer) -> None:
    peer.sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nContent-Length: 1000\r\n\r\n".encode())
    while not peer.stop.wait(0.05):
        peer.sock.sendall(b" ")


WAYS: dict[str, Callable[[Peer], None]] = {
    "accepts and hangs": Peer.hang,
    "closes without a word": lambda peer: None,
    "resets": Peer.reset,
    "502 with HTML": lambda p: p.answer(HTML, "502 Bad Gateway", "text/html"),
    "200 with HTML": lambda p: p.answer(HTML, media="text/html"),
    "empty 200": lambda p: p.answer(b"", media=JSON),
    "a redirect": lambda p: p.answer(b"", "302 Found", extra="Location: http://127.0.0.1:1/\r\n"),
    "truncated body": lambda p: p.sock.sendall(reply(GOOD, media=JSON)[:-1]),
    "truncated header": lambda p: p.sock.sendall(reply(GOOD, media=JSON)[:20]),
    "reset in the body": lambda p: (p.sock.sendall(reply(GOOD, media=JSON)[:-3]), p.reset())[0],
    "garbage": lambda p: p.sock.sendall(bytes(range(256)) * 10 + b"\r\n\r\n"),
    "broken JSON": lambda p: p.answer(GOOD[:-1], media=JSON),
    "a JSON list": lambda p: p.answer(b"[1]", media=JSON),
    "JSON without an error": lambda p: p.answer(b'{"hello": 1}', "500 Oops", JSON),
    "chunk cut": lambda p: p.sock.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc"
    ),
    "drips": drip,
    "drips the body": drip_body,
    "somebody else's reply": lambda p: p.answer(GOOD, media=JSON, extra="X-Fsd-Call: 0000000000000000\r\n"),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_answer_is_unavailable_in_time_and_the_next_call_works(way: str) -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            if peer.number == 0:
                WAYS[way](peer)
                return
            peer.answer(GOOD, media=JSON)

    with serving(behave) as url:
        files = Files(client(url, timeout=0.5))
        began = time.monotonic()
        with pytest.raises(Unavailable) as told:
            files.stat(b"/")
        assert time.monotonic() - began < 20
        assert "fsd1" not in told.value.message
        files.http.options = replace(files.http.options, timeout=60.0)
        assert files.stat(b"/")["is_dir"]


@pytest.mark.parametrize(
    "way", [w for w in WAYS if w not in ("accepts and hangs", "drips", "drips the body")]
)
def test_a_bad_answer_is_asked_again_with_the_same_key(way: str) -> None:
    keys: list[str] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            keys.append(next(line for line in got[0].splitlines() if line.startswith("Idempotency-Key")))
            if peer.number == 0:
                WAYS[way](peer)
                return
            peer.answer(GOOD, media=JSON)

    with serving(behave) as url:
        assert Files(client(url, retry_for=60.0)).mkdir(b"/d")["is_dir"]
    assert len(keys) == 2 and len(set(keys)) == 1


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_a_reply_that_comes_twice_is_never_another_requests_answer(pause: float) -> None:
    """As the server's, replies name their request; the second comes at once or while the next is asked."""
    served: list[str] = []

    def behave(peer: Peer) -> None:
        while (got := peer.request()) is not None:
            path = got[0].split()[1]
            call = next(line for line in got[0].splitlines() if line.startswith("X-Fsd-Call"))
            served.append(path)
            for _ in range(2):
                peer.answer(json.dumps({"path": path}).encode(), media=JSON, extra=call + "\r\n")
                peer.stop.wait(pause)

    with serving(behave) as url:
        http = client(url, retry_for=60.0)
        for at in range(8):
            assert http.json("GET", f"/{at}") == {"path": f"/{at}"}
    assert len(served) >= 8


def test_a_kept_connection_the_server_closed_is_replaced_unseen() -> None:
    def behave(peer: Peer) -> None:
        if peer.request() is not None:
            peer.answer(GOOD, media=JSON)

    with serving(behave) as url:
        http = client(url)
        for _ in range(4):
            assert http.json("GET", "/x")["is_dir"]


def test_questions_about_content_share_a_connection() -> None:
    """A capture asks one for each file: each made a connection of its own."""
    connections: list[int] = []

    def behave(peer: Peer) -> None:
        connections.append(peer.number)
        while (got := peer.request()) is not None:
            found = "200 OK" if got[0].split()[1].endswith("1") else "404 Not Found"
            peer.sock.sendall(f"HTTP/1.1 {found}\r\nContent-Length: 45\r\n\r\n".encode())

    with serving(behave) as url:
        contract = Contract(client(url))
        asked = [contract.has(f"sandbox-files/sha256/{at:064x}") for at in range(4)]
    assert asked == [False, True, False, False]
    assert len(connections) == 1


@pytest.mark.parametrize("what", ["has", "fetch"])
def test_a_question_about_content_that_is_swallowed_is_asked_again(what: str) -> None:
    """Within the patience for a word, not only at the end of all time there is: then nothing asks again."""

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            if peer.number == first[0]:
                peer.hang()
                return
            peer.sock.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + (b"" if what == "has" else b"whole")
            )

    first: list[int] = []
    with serving(lambda peer: (first or first.append(peer.number), behave(peer))[1]) as url:
        http = client(url, timeout=3600.0, retry_for=60.0)
        http.options = replace(http.options, patience=0.1)
        contract, key = Contract(http), f"sandbox-files/sha256/{1:064x}"
        assert contract.has(key) if what == "has" else b"".join(contract.fetch(key)) == b"whole"


def test_an_error_while_a_large_body_is_being_sent_is_heard() -> None:
    body = json.dumps(
        {"error": {"code": "fs_error", "message": "no: EDQUOT", "details": {"errno": "EDQUOT"}}}
    )

    def behave(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.answer(body.encode(), "409 Conflict", JSON)
        peer.hang()

    class Endless:
        length = None
        repeatable = False

        def pieces(self) -> Iterator[bytes]:
            while True:
                yield bytes(1 << 20)

    with serving(behave) as url, pytest.raises(PosixError, match="EDQUOT"):
        Files(client(url)).write(b"/f", Endless())


def test_an_endpoint_that_is_no_fsd_server() -> None:
    """Nor is a gateway's 404 an answer about a file, which a copy of a tree would leave out, say."""

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(HTML, "404 Not Found", "text/html")

    with serving(behave) as url, pytest.raises(Unavailable, match="404 with text/html, which is no"):
        Files(client(url)).stat(b"/")


def test_a_proxys_limit_of_bodies_is_told_as_one() -> None:
    """Of nginx it is 1 MiB unless somebody sets it: a commit of a mount is larger."""

    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(HTML, "413 Request Entity Too Large", "text/html")

    with serving(behave) as url, pytest.raises(Unavailable, match="413 with text/html") as caught:
        Files(client(url)).write(b"/f", BytesBody(b"x"))
    assert "client_max_body_size" in caught.value.hint
    told = from_body(None, 413)  # as a mount's routes tell it
    assert isinstance(told, Unavailable) and told.hint == caught.value.hint
    assert "no body of this size" in told.message


def test_a_file_answer_without_its_headers_is_no_file() -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(b"hello", media="text/plain")

    with serving(behave) as url, pytest.raises(Unavailable):
        list(Files(client(url)).read(b"/f"))


def test_close_ends_the_waiting_between_tries() -> None:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            peer.answer(HTML, "502 Bad Gateway", "text/html")

    with serving(behave) as url:
        http = client(url, retry_for=60.0)
        http.close()
        with pytest.raises(Unavailable):
            http.send("PUT", "/x", BytesBody(b"x"), headers={})


def test_a_long_try_that_fails_is_tried_again() -> None:
    """It was at work, or the sandbox stood still meanwhile: how long failed tries go on is another time."""
    now = [1000.0]
    host = replace(Host(), monotonic=lambda: now[0])
    token = make(host, "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": "http://127.0.0.1:1"})
    http = Http(data_identity(Claim(token=token.text())), host, HttpOptions(retry_for=8.0))
    tries: list[float] = []

    def once(takes: float, fails: int) -> str:
        tries.append(now[0])
        now[0] += takes
        if len(tries) <= fails:
            raise Unavailable("the connection was cut")
        return "done"

    assert http.retried(lambda: once(600.0 if not tries else 0.1, 2)) == "done"
    tries.clear()
    with pytest.raises(Unavailable):
        http.retried(lambda: once(5.0, 100))
    assert len(tries) == 3, "the first fails at 5 s, the third at 15: more than 8 s later"
