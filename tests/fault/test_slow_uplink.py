"""A way up that is slow: what arrives there in time counts, and what does not move at all does not."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.badserver import reply, serving
from support.certificate import self_signed
from support.wait import wait_for

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
    return self_signed(tmp_path)


def leisurely(left: int) -> bool:
    time.sleep(0.05)
    return True


def slow(sock: socket.socket, stop: threading.Event, ready: Callable[[int], bool] = leisurely) -> None:
    """Takes a request piece by piece, each when it is `ready` with so much left of it, and answers it."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(PIECE)
    start, _, rest = head.partition(b"\r\n\r\n")
    left = int(start.lower().split(b"content-length:")[1].split()[0]) - len(rest)
    while left:
        if ready(left):
            got = sock.recv(min(PIECE, left))
            left -= len(got)
            if not got:
                return  # the client has given up
        elif stop.is_set():
            return
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


@pytest.mark.parametrize("tls", [False, True])
def test_what_moves_is_waited_for_while_the_kernel_takes_no_more(
    tls: bool, secure: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes more when a third of its buffer went. Here the other side takes a little each time that
    somebody asks whether it goes on, and nothing else."""
    asked, sent, goes_on = threading.Semaphore(0), transport._Clock.sent, transport._Clock._goes_on
    looks = [0]

    def take(sock: socket.socket, stop: threading.Event) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        slow(sock, stop, lambda left: left < 8 * PIECE or asked.acquire(timeout=0.1))

    def hurried(clock: transport._Clock, sock: socket.socket) -> None:
        clock._patience = 0.01
        sent(clock, sock)

    def seen(clock: transport._Clock) -> bool:
        looks[0] += 1
        assert clock._sock is not None
        before = transport._unsent(clock._sock)

        def less() -> bool:
            asked.release()
            return transport._unsent(clock._sock) < before  # type: ignore[arg-type]

        if before:
            wait_for(less, 30, "the other side to take some", every=0.002)
        return not before or goes_on(clock)

    monkeypatch.setattr(transport._Clock, "sent", hurried)
    monkeypatch.setattr(transport._Clock, "_goes_on", seen)
    with serving_tls(*secure, take) if tls else serving(lambda peer: take(peer.sock, peer.stop)) as url:
        remote_to(url, secure[0] if tls else None).upload(blobs()[:6], 60.0)
    assert looks[0] > 1, "nobody waited"


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
