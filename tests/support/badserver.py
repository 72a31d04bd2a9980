"""A raw TCP server that answers as a test says, for clients that must survive it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Behaviour = Callable[["Peer"], None]


class Peer:
    """One accepted connection. `request` reads one whole request; the rest answers in some way."""

    def __init__(self, sock: socket.socket, number: int, stop: threading.Event) -> None:
        self.sock, self.number, self.stop = sock, number, stop
        self._buffer = b""

    def request(self) -> tuple[str, bytes] | None:
        """(head, body) of the next request; None when the client closed."""
        while b"\r\n\r\n" not in self._buffer:
            got = self.sock.recv(65536)
            if not got:
                return None
            self._buffer += got
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        while len(rest) < length:
            got = self.sock.recv(65536)
            if not got:
                return None
            rest += got
        self._buffer = rest[length:]
        return head.decode("latin-1"), rest[:length]

    def answer(
        self, body: bytes, status: str = "200 OK", media: str = "application/x-fsd", extra: str = ""
    ) -> None:
        self.sock.sendall(reply(body, status, media, extra))

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def hang(self) -> None:
        """Nothing, until the test ends."""
        self.stop.wait(30)


def reply(body: bytes, status: str = "200 OK", media: str = "application/x-fsd", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


@contextmanager
def serving(behave: Behaviour) -> Iterator[str]:
    """A server on a free port that runs `behave` for each connection in a thread; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    threads: list[threading.Thread] = []
    peers: list[socket.socket] = []

    def one(sock: socket.socket, number: int) -> None:
        try:
            behave(Peer(sock, number, stop))
        except OSError:
            return  # the client went away, as several tests make it do
        finally:
            sock.close()

    def accept() -> None:
        number = 0
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            peers.append(sock)
            thread = threading.Thread(target=one, args=(sock, number), daemon=True)
            threads.append(thread)
            thread.start()
            number += 1

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for sock in peers:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by its thread already
        for thread in threads:
            thread.join(5)
