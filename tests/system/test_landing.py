"""Large bodies that are received where they will lie, past the HTTP parser, and sent past it, on real
connections."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.server import TestFs

from fsd.model.limits import KIB, MIB
from fsd.wire.frame import Blob, make_blob, pack, unpack
from fsd.wire.messages import packb


class Client:
    """One connection whose answers are read one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file = sock, sock.makefile("rb")

    def answer(self) -> tuple[int, bytes]:
        status = int(self.file.readline().split()[1])
        headers = {}
        while (line := self.file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            headers[name.lower()] = value
        return status, self.file.read(int(headers[b"content-length"]))


@contextmanager
def connected(fs: TestFs) -> Iterator[Client]:
    with socket.create_connection(("127.0.0.1", fs.server.port), 30) as sock:
        sock.settimeout(60)
        yield Client(sock)


def head(fs: TestFs, method: str, path: str, length: int) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {fs.token}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def blobs(count: int) -> list[Blob]:
    return [make_blob(os.urandom(MIB)) for _ in range(count)]


def stored(fs: TestFs, made: list[Blob]) -> bool:
    got = fs.ask("POST", "/blobs", packb([one.hash for one in made]))
    assert got.status == 200
    _, there = unpack(got.body, blobs_max=64, bytes_max=64 * MIB)
    return sorted(there) == sorted(made)


@pytest.mark.parametrize("piece", [64 * KIB - 1, 700 * KIB, 16 * MIB])
def test_a_landed_body_is_whole_and_what_follows_it_is_the_next_request(
    shared_fs: TestFs, piece: int
) -> None:
    made = blobs(5)
    body = pack({}, made)
    path = f"/v1/file-systems/{shared_fs.id}/packs"
    whole = head(shared_fs, "POST", path, len(body)) + body + head(shared_fs, "GET", "/healthz", 0)
    with connected(shared_fs) as client:
        for _ in range(2):  # and once more on the same connection
            for at in range(0, len(whole), piece):
                client.sock.sendall(whole[at : at + piece])
            assert client.answer()[0] == 200
            assert client.answer() == (200, b'{"status": "ok"}')
    assert stored(shared_fs, made)


def test_a_landed_body_that_is_refused_leaves_the_connection_usable(shared_fs: TestFs) -> None:
    path = f"/v1/file-systems/{shared_fs.id}/packs"
    made = blobs(3)
    wrong = pack({}, [made[0], made[1], made[2]._replace(hash=bytes(32))])
    with connected(shared_fs) as client:
        for body, status in ((bytes(3 * MIB), 400), (wrong, 400), (pack({}, made), 200)):
            client.sock.sendall(head(shared_fs, "POST", path, len(body)) + body)
            assert client.answer()[0] == status
    assert stored(shared_fs, made)


def test_a_landed_body_that_is_cut_changes_nothing(shared_fs: TestFs) -> None:
    made = blobs(4)
    body = pack({}, made)
    with connected(shared_fs) as client:
        client.sock.sendall(
            head(shared_fs, "POST", f"/v1/file-systems/{shared_fs.id}/packs", len(body)) + body[:-1]
        )
        client.sock.shutdown(socket.SHUT_WR)
        while client.sock.recv(MIB):
            continue
    assert shared_fs.ask("GET", "").status == 200
    got = shared_fs.ask("POST", "/blobs", packb([made[0].hash]))
    assert unpack(got.body, blobs_max=1, bytes_max=MIB)[1] == []


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_what_the_kernel_passes_on_is_whole_and_in_order(shared_fs: TestFs, pause: float) -> None:
    """Two requests at once, small and large blobs; who pauses has the rest of each answer written to it."""
    large, small = blobs(12), [make_blob(os.urandom(5000)) for _ in range(3)]
    for some in (large[:6], large[6:], small):
        assert shared_fs.ask("POST", "/packs", pack({}, some)).status == 200
    asked = [*large[:5], small[0], *large[5:], *small[1:]]
    body = packb([one.hash for one in asked])
    path = f"/v1/file-systems/{shared_fs.id}/blobs"
    with connected(shared_fs) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        client.sock.sendall((head(shared_fs, "POST", path, len(body)) + body) * 2)
        for _ in range(2):
            time.sleep(pause)
            status, got = client.answer()
            assert status == 200
            assert unpack(got, blobs_max=64, bytes_max=64 * MIB)[1] == asked
    with connected(shared_fs) as client:  # one that goes away in the middle harms nobody
        client.sock.sendall(head(shared_fs, "POST", path, len(body)) + body)
        client.sock.recv(1000)
    assert stored(shared_fs, asked)
