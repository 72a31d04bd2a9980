"""Several requests sent at once on one connection, and what is no request behind them."""

from __future__ import annotations

import socket

import pytest
from support.server import Server
from support.wait import wait_for

from fsd.model.limits import MIB

LONG = 60.0
SENSELESS = b"\x00\x01 senseless\r\n\r\n"
NO_HTTP = "Invalid HTTP request received."
LARGE = 24 * MIB


class Sender:
    """Writes requests of a filesystem's owner as bytes."""

    def __init__(self, server: Server) -> None:
        self._server, fs = server, server.create()
        assert fs.ask("PUT", "/files/large", bytes(LARGE)).status == 200
        self._base = f"/v1/file-systems/{fs.id}"
        self._headers = f"Host: x\r\nAuthorization: Bearer {fs.token}\r\n"
        self._told = len(server.log.read_text())

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server.port), LONG)

    def answers(self, *sent: bytes) -> bytes:
        """All that comes when these were sent, each behind the beginning of an answer to the one before."""
        got = b""
        with self.connect() as sock:
            for piece in sent:
                if piece is not sent[0]:
                    got += sock.recv(1)
                sock.sendall(piece)
            while data := sock.recv(MIB):
                got += data
        return got

    def logged(self) -> str:
        """What the server wrote since it was asked last."""
        self._server.ask("GET", "/healthz")
        text = self._server.log.read_text()
        before, self._told = self._told, len(text)
        return text[before:]


@pytest.fixture
def sender(server: Server) -> Sender:
    return Sender(server)


def test_what_came_whole_is_answered_and_then_it_ends(sender: Sender) -> None:
    """The first was told 400, done or not; the log got a traceback for each that answered too late."""
    listing, large = sender.request("GET", "/list/"), sender.request("GET", "/files/large")
    for requests in ([listing], [listing] * 20, [large] * 2, [sender.request("PUT", "/files/a", b"abc")]):
        got = sender.answers(b"".join(requests) + SENSELESS)
        assert got.count(b"HTTP/1.1 200 OK\r\n") == len(requests), got[:200]
        assert b"400 Bad" not in got and got.count(b"connection: close") == 1
        assert sender.logged() == NO_HTTP + "\n"
    assert b"abc" in sender.answers(sender.request("GET", "/files/a") + SENSELESS)


def test_what_is_alone_is_told_so(sender: Sender) -> None:
    cut = sender.request("PUT", "/files/b", b"abc").replace(
        b"Content-Length: 3", b"Transfer-Encoding: chunked"
    )
    for sent in ([SENSELESS], [cut + SENSELESS]):
        got = sender.answers(*sent)
        assert got.startswith(b"HTTP/1.1 400 Bad Request\r\n") and got.count(b"HTTP/1.1") == 1, got
        lines = sender.logged().splitlines()
        assert lines[0] == NO_HTTP and "Traceback" not in lines, lines


def test_no_word_comes_into_an_answer_that_has_begun(sender: Sender) -> None:
    """What was written there counted as bytes of the file."""
    large = sender.request("GET", "/files/large")
    unfinished = sender.request("PUT", "/files/c", b"abc")[:-1]
    for behind in (
        SENSELESS,
        unfinished.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked") + SENSELESS,
    ):
        got = sender.answers(large, behind)
        assert b"400 Bad" not in got and b"senseless" not in got
        assert not got.partition(b"\r\n\r\n")[2].strip(b"\0")
        lines = sender.logged().splitlines()
        assert lines[0] == NO_HTTP and "Traceback" not in "".join(lines), lines


def test_no_word_is_taken_for_the_answer_to_one_that_came_whole_before(sender: Sender) -> None:
    """A change that was done was told 400, because of the unfinished request behind it."""
    unfinished = sender.request("PUT", "/files/e", b"abc")[:-1]
    cut = unfinished.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked") + SENSELESS
    assert b"400 Bad" not in sender.answers(sender.request("PUT", "/files/d", b"abc") + cut)
    assert "Traceback" not in sender.logged()


def test_who_goes_while_several_are_asked_for_leaves_no_traceback(sender: Sender, server: Server) -> None:
    for _ in range(5):
        with sender.connect() as sock:
            sock.sendall(sender.request("GET", "/list/") * 40 + sender.request("GET", "/files/large") * 2)
            assert sock.recv(100)

    def idle() -> bool:
        text = server.ask("GET", "/metrics").body.decode()
        return "fsd_requests_in_flight 1" in text

    wait_for(idle, LONG, "the requests to end")
    assert "Traceback" not in sender.logged()
