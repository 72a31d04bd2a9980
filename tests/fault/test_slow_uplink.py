"""A way up that is slow: what arrives there in time counts, and what does not move at all does not."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.badserver import reply, serving

from fsd.host.seam import Host
from fsd.model.errors import Unavailable
from fsd.model.limits import MIB
from fsd.model.token import make
from fsd.remote import transport
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.wire.frame import Blob, make_blob
from fsd.wire.messages import packb

BLOBS = 16
PIECE = 64 << 10


def blobs() -> list[Blob]:
    return [make_blob(os.urandom(MIB), compress=False) for _ in range(BLOBS)]


def remote_to(url: str, ca_file: Path | None = None) -> HttpRemote:
    token = make(Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": url})
    return HttpRemote(RemoteOptions(url, token, ca_file=ca_file), Host())


@pytest.fixture(name="secure")
def secure_fixture(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    certificate, key = tmp_path / "cert", tmp_path / "key"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    subprocess.run(
        [*words.split(), "-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    return certificate, key


def slow(sock: socket.socket, stop: threading.Event) -> None:
    """Takes a request at its leisure, and answers it."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(PIECE)
    start, _, rest = head.partition(b"\r\n\r\n")
    left = int(start.lower().split(b"content-length:")[1].split()[0]) - len(rest)
    while left:
        stop.wait(0.05)
        left -= len(sock.recv(min(PIECE, left)))
    sock.sendall(reply(packb({"stored": BLOBS})))


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, True])
def test_a_body_that_takes_longer_than_the_time_out_arrives_as_long_as_it_moves(
    tls: bool, secure: tuple[Path, Path]
) -> None:
    """It was given up, and begun anew for ever: below some 70 KB a second a mount sent nothing any more."""
    with serving_tls(*secure, slow) if tls else serving(lambda peer: slow(peer.sock, peer.stop)) as url:
        began = time.monotonic()
        remote_to(url, secure[0] if tls else None).upload(blobs(), 5.0)
        assert time.monotonic() - began > 5.0, "this was not slow"


@pytest.mark.parametrize("moves", [False, True])
def test_over_tls_too_the_time_is_that_of_the_whole_body(
    moves: bool, secure: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it takes nothing, or a little now and then: at this pace all of it would take minutes."""
    monkeypatch.setattr(transport, "BODY_RATE", 1 << 40)

    def take(sock: socket.socket, stop: threading.Event) -> None:
        sock.recv(16 << 10)
        while not stop.wait(0.1):
            if moves:
                sock.recv(16 << 10)

    with serving_tls(*secure, take) as url:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            remote_to(url, secure[0]).upload(blobs(), 2.0)
        assert time.monotonic() - began < 60


@contextmanager
def serving_tls(
    certificate: Path, key: Path, take: Callable[[socket.socket, threading.Event], None]
) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as sock:
                    take(sock, stop)
            except OSError:
                return  # the client has given up

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join(30)
