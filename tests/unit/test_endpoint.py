"""Where a client connects, and that a token never travels readable by accident."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from fsd.client.identity import check_endpoint
from fsd.model.endpoint import parse_endpoint
from fsd.model.errors import UsageError
from fsd.remote.failures import unavailable


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://fsd.example", "https://fsd.example:443"),
        ("https://fsd.example:8443/base/", "https://fsd.example:8443/base"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://localhost", "http://localhost:80"),
        ("http://[::1]:81", "http://[::1]:81"),
        ("https://[2001:db8::1]", "https://[2001:db8::1]:443"),
    ],
)
def test_forms(url: str, shown: str) -> None:
    assert parse_endpoint(url).shown == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "fsd.example",
        "ftp://fsd.example",
        "https://",
        "https://user:pw@fsd.example",
        "https://a b",
        "https://h:0",
        "https://h:99999",
        "https://h/?q",
        "https://h/a b",
        "https://h/a\r\nX-Other: 1",
        "https://h/#f",
        "https://hö.example",
    ],
)
def test_what_is_no_endpoint(url: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(url)
    with pytest.raises(UsageError):
        check_endpoint(url, insecure=True)


@pytest.mark.parametrize(
    "url",
    ["http://fsd.example", "http://10.0.0.1:80", "http://127.0.0.1.evil.example", "http://x.localhost:1"],
)
def test_plain_http_elsewhere_needs_insecure(url: str) -> None:
    with pytest.raises(UsageError, match="plain HTTP"):
        parse_endpoint(url)
    with pytest.raises(UsageError, match="plain HTTP"):
        check_endpoint(url, insecure=False)
    assert not parse_endpoint(url, insecure=True).tls


def test_what_to_write_is_said() -> None:
    with pytest.raises(UsageError) as told:
        parse_endpoint("127.0.0.1:8333")
    assert "http:// for a server on this machine" in told.value.hint


def test_https_to_a_plain_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        place = plain.getsockname()

        def answer() -> None:
            peer = plain.accept()[0]
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        other = threading.Thread(target=answer)
        other.start()
        try:
            with pytest.raises(ssl.SSLError) as met, socket.create_connection(place, 30) as raw:
                ssl.create_default_context().wrap_socket(raw, server_hostname="127.0.0.1")
        finally:
            other.join(30)
    found = unavailable("https://127.0.0.1", met.value)
    assert "does not speak TLS" in found.message
    assert "begins with http://" in found.hint
