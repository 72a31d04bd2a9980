"""A forward proxy as a network's only way out: CONNECT alone, for a name that only it knows.

A thread for each direction of a connection. What it does next with a CONNECT, and what it wants to be shown,
can be set at any time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.processes import free_ports, give_back

HEAD = 16384


class Forward:
    """On a free port of 127.0.0.1. `names` maps the authorities it knows to where they are."""

    def __init__(self, names: dict[str, tuple[str, int]]) -> None:
        self.names = names
        self.wanted: str | None = None  # the value of Proxy-Authorization
        self.says: bytes | None = None  # what it answers instead of leading on, and then closes
        self.silent = False  # it answers nothing
        self.asked: list[str] = []  # authorities, as they came
        self.heads: list[str] = []
        [self.port] = free_ports(1)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self) -> None:
        """Listen (again)."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Nothing listens any more, and every tunnel ends."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        give_back(self.port)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        with client, self._listed(client):
            head = b""
            while b"\r\n\r\n" not in head:
                got = client.recv(HEAD)
                if not got:
                    return
                head += got
            text = head.decode("latin-1")
            method, authority, _ = text.split(" ", 2)
            self.heads.append(text)
            self.asked.append(authority)
            if self.silent:
                client.recv(1)
                return
            answer = self._answer(method, authority, text)
            if answer is not None:
                client.sendall(answer)
                return
            with socket.create_connection(self.names[authority], 10) as server, self._listed(server):
                server.settimeout(None)
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_carry, args=(server, client), daemon=True)
                back.start()
                _carry(client, server)
                back.join()

    def _answer(self, method: str, authority: str, head: str) -> bytes | None:
        """A refusal; None: the tunnel."""
        if self.says is not None:
            return self.says
        if method != "CONNECT" or authority not in self.names:
            return b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
        if self.wanted is not None and f"Proxy-Authorization: {self.wanted}\r\n" not in head:
            return (
                b"HTTP/1.1 407 Proxy Authentication Required\r\n"
                b"Proxy-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n"
            )
        return None

    @contextmanager
    def _listed(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(sock)
        try:
            yield
        except OSError:
            pass  # cut, by either side: what a proxy is for
        finally:
            with self._lock:
                self._open.discard(sock)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
