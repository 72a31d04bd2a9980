"""Which proxy the environment names for an endpoint, and what is said to it."""

from __future__ import annotations

import base64
import socket

import pytest

from fsd.model.endpoint import parse_endpoint
from fsd.model.errors import Unavailable, UsageError
from fsd.remote.proxy import Proxy, ProxyRefused, open_tunnel, proxy_for

SERVER = "https://fsd.example.org:8443"


def chosen(environ: dict[str, str], url: str = SERVER) -> Proxy | None:
    return proxy_for(parse_endpoint(url), environ)


@pytest.mark.parametrize(
    ("environ", "host", "port", "name"),
    [
        ({"HTTPS_PROXY": "http://p.example:3128"}, "p.example", 3128, "HTTPS_PROXY"),
        ({"https_proxy": "http://p.example:3128/"}, "p.example", 3128, "https_proxy"),
        ({"https_proxy": "low", "HTTPS_PROXY": "up"}, "low", 80, "https_proxy"),
        ({"https_proxy": "", "HTTPS_PROXY": " up:1 "}, "up", 1, "HTTPS_PROXY"),
        ({"ALL_PROXY": "HTTP://any:8080"}, "any", 8080, "ALL_PROXY"),
        ({"ALL_PROXY": "socks5://any", "HTTPS_PROXY": "p"}, "p", 80, "HTTPS_PROXY"),
        ({"HTTPS_PROXY": "http://[::1]:3128"}, "::1", 3128, "HTTPS_PROXY"),
    ],
)
def test_the_first_named_counts(environ: dict[str, str], host: str, port: int, name: str) -> None:
    assert chosen(environ) == Proxy(host, port, name)


@pytest.mark.parametrize("environ", [{}, {"HTTPS_PROXY": ""}, {"HTTP_PROXY": "http://p"}, {"NO_PROXY": "x"}])
def test_none_is_named(environ: dict[str, str]) -> None:
    assert chosen(environ) is None


def test_credentials_are_decoded_and_not_shown() -> None:
    proxy = chosen({"HTTPS_PROXY": "http://me:p%40%3Ass@p:1"})
    assert proxy is not None and proxy.credentials == "Basic bWU6cEA6c3M="  # me:p@:ss
    assert "bWU6" not in repr(proxy) and proxy.shown == "the proxy http://p:1 (HTTPS_PROXY)"


@pytest.mark.parametrize(
    ("user", "shown"),
    [
        ("me:p%E9ss", b"me:p\xe9ss"),  # of a proxy whose users are not written in UTF-8
        ("me:p\udce9ss", b"me:p\xe9ss"),
        ("me:p\xe9ss", "me:p\xe9ss".encode()),
        ("me", b"me:"),
        ("me:", b"me:"),
        ("me:a:b%", b"me:a:b%"),
    ],
)
def test_credentials_are_the_bytes_that_were_written(user: str, shown: bytes) -> None:
    proxy = chosen({"HTTPS_PROXY": f"http://{user}@p:1"})
    assert proxy is not None and base64.b64decode(proxy.credentials.removeprefix("Basic ")) == shown


@pytest.mark.parametrize(
    "url",
    [
        "socks5://p:1080",
        "socks5h://p",
        "https://p",
        "p:0",
        "p:65536",
        "http://",
        "p q",
        "http://p/x",
        "a@b@c",
    ],
)
def test_one_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="HTTPS_PROXY"):
        chosen({"HTTPS_PROXY": url})


@pytest.mark.parametrize(
    "exceptions",
    [
        "*",
        "fsd.example.org",
        "FSD.Example.ORG",
        "a, fsd.example.org ,b",
        "x example.org",
        ".example.org",
        "*.example.org",
        "fsd.example.org:8443",
        ".org",
    ],
)
def test_an_exception_by_name(exceptions: str) -> None:
    assert chosen({"HTTPS_PROXY": "p", "NO_PROXY": exceptions}) is None
    assert chosen({"HTTPS_PROXY": "socks5://p", "no_proxy": exceptions}) is None


@pytest.mark.parametrize(
    "exceptions", ["", ",", "xample.org", "fsd", "fsd.example.org:443", "10.0.0.0/8", "d.example.org"]
)
def test_no_exception_by_name(exceptions: str) -> None:
    assert chosen({"HTTPS_PROXY": "p", "NO_PROXY": exceptions}) is not None


@pytest.mark.parametrize(
    ("exceptions", "url", "straight"),
    [
        ("10.0.0.0/8", "https://10.1.2.3", True),
        ("10.0.0.0/8", "https://11.1.2.3", False),
        ("10.1.2.3", "https://10.1.2.3", True),
        ("10.1.2.3:443", "https://10.1.2.3", True),
        ("10.1.2.3:444", "https://10.1.2.3", False),
        ("fd00::/8", "https://[fd00::1]", True),
        ("fd00::1", "https://[fd00::1]", True),
        ("[fd00::1]:443", "https://[fd00::1]", True),
        ("[fd00::1]:444", "https://[fd00::1]", False),
        ("fe00::/8", "https://[fd00::1]", False),
    ],
)
def test_an_exception_by_address(exceptions: str, url: str, straight: bool) -> None:
    assert (chosen({"HTTPS_PROXY": "p", "NO_PROXY": exceptions}, url) is None) is straight


def tunnel(answer: bytes, left: float = 30.0) -> bytes:
    """Open a tunnel where the proxy says `answer` and no more; what it was told."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(answer)
        there.shutdown(socket.SHUT_WR)
        open_tunnel(here, Proxy("p", 1, "HTTPS_PROXY", "Basic eA=="), "fsd:443", lambda: left)
        return there.recv(1000)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 204 x\r\nA: b\r\n\r\n", b"HTTP/1.1 200\r\n\r\n"]
)
def test_a_tunnel(answer: bytes) -> None:
    told = b"CONNECT fsd:443 HTTP/1.1\r\nHost: fsd:443\r\nProxy-Authorization: Basic eA==\r\n\r\n"
    assert tunnel(answer) == told


@pytest.mark.parametrize(
    ("answer", "told", "for_ever"),
    [
        (b"", "closed the connection", False),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n", "closed the connection", False),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "spoke before", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20000, "spoke before", False),
        (b"220 mail.example ESMTP\r\n\r\n", "is no HTTP", False),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "refuses to connect to fsd:443: 502 Bad Gateway", False),
        (b"HTTP/1.1 403 \r\n\r\n", "refuses to connect to fsd:443: 403", True),
        (b"HTTP/1.1 407 Who?\r\n\r\n", "407 Who?", True),
        (b"HTTP/1.1 302 Found\r\nLocation: http://login\r\n\r\n", "302 Found", True),
    ],
)
def test_no_tunnel(answer: bytes, told: str, for_ever: bool) -> None:
    with pytest.raises(Unavailable, match="HTTPS_PROXY") as failed:
        tunnel(answer)
    assert told in failed.value.message
    assert isinstance(failed.value.__cause__, ProxyRefused) is for_ever


def test_of_what_it_says_a_line_is_told() -> None:
    with pytest.raises(Unavailable) as failed:
        tunnel(b"HTTP/1.1 403 " + b"no " * 4000 + b"\r\n\r\n")
    assert failed.value.message.count("no ") in range(10, 100)


def test_a_tunnel_has_its_time_in_all() -> None:
    """A proxy that drips does not get more by it."""
    left = iter([5.0, 5.0, 5.0])

    def seconds() -> float:
        if (found := next(left, None)) is None:
            raise TimeoutError
        there.sendall(b"x")
        return found

    here, there = socket.socketpair()
    with here, there, pytest.raises(Unavailable, match="no answer from the proxy http://p:1"):
        open_tunnel(here, Proxy("p", 1, "HTTPS_PROXY"), "fsd:443", seconds)
