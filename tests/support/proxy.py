"""A proxy between client and server that loses, doubles, delays, truncates and cuts, request by request.

It understands just enough HTTP/1.1 to know where a request and a reply end; bytes pass unchanged. A thread
for each connection. What happens to a request is decided when it has arrived whole: the first matching entry
queued by `next`, else the standing rule set by `always`, else it passes.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from support.processes import free_ports, give_back

_ROUTE = re.compile(r"^/v1/file-systems(?:/[^/?]+(?:/([^/?]+))?)?")
HTML = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived. `route` is the path's word behind the filesystem's id ("commits", "ns", …)."""

    method: str
    path: str
    route: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request. `acts`: whether the server gets the request at all before the fault."""

    kind: str
    acts: bool = True
    amount: float = 0.0


LOSE_REPLY = Fault("cut")  # the server acted; the connection ends without a word
CUT_REQUEST = Fault("cut", acts=False)
SWALLOW_REPLY = Fault("silence")  # the server acted; nothing comes until the client gives up
BLACK_HOLE = Fault("silence", acts=False)
DAMAGE_REQUEST = Fault("damage")  # the server gets it with one bit of its body changed
DOUBLE_REQUEST = Fault("double request")
DOUBLE_REPLY = Fault("double reply")
HTML_502 = Fault("html", acts=False)
HTML_502_AFTER = Fault("html")
EMPTY_200 = Fault("empty", acts=False)
EMPTY_200_AFTER = Fault("empty")


def truncate(count: int) -> Fault:
    """The reply's first `count` bytes, then the end of the connection."""
    return Fault("truncate", amount=count)


def delay(seconds: float) -> Fault:
    """The request waits so long before the server sees it."""
    return Fault("delay", amount=seconds)


def delay_reply(seconds: float) -> Fault:
    """The server acts at once, its reply waits so long."""
    return Fault("delay reply", amount=seconds)


Matcher = Callable[[Request], bool]


def on(route: str) -> Matcher:
    return lambda request: request.route == route


def everything(request: Request) -> bool:
    return True


class FaultProxy:
    """A proxy on a free port of 127.0.0.1 before `upstream` ("http://host:port"). Any thread."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").rstrip("/").partition(":")
        self.upstream = (host, int(port))
        self._lock = threading.Lock()
        self._queue: list[tuple[Matcher, Fault]] = []
        self._standing: tuple[Matcher, Fault] | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._listener: socket.socket | None = None
        self.requests: Counter[str] = Counter()
        self.log: list[Request] = []
        [self.port] = free_ports(1)
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # Faults.

    def next(self, fault: Fault, match: Matcher = everything, times: int = 1) -> None:
        """The next `times` requests that match meet `fault`."""
        with self._lock:
            self._queue += [(match, fault)] * times

    def always(self, fault: Fault, match: Matcher = everything) -> None:
        """Every matching request meets `fault` until `clear`."""
        with self._lock:
            self._standing = (match, fault)

    def clear(self) -> None:
        """From now on requests pass; those held in a silence stay so."""
        with self._lock:
            self._queue.clear()
            self._standing = None

    def pending(self) -> int:
        """How many queued faults no request has met yet."""
        with self._lock:
            return len(self._queue)

    def refuse(self) -> None:
        """Refuse connections, and cut those there are: the server is gone."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut_all()

    def accept(self) -> None:
        """Listen (again), on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        with self._lock:
            self._listener = listener
        self._spawn(self._accept, listener)

    def cut_all(self) -> None:
        """Cut every connection in the middle of whatever it does."""
        with self._lock:
            open_now = list(self._open)
        for sock in open_now:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def count(self, route: str) -> int:
        """Requests of `route` that arrived since the last `reset_counts`."""
        with self._lock:
            return self.requests[route]

    def reset_counts(self) -> None:
        with self._lock:
            self.requests.clear()
            self.log.clear()

    def close(self) -> None:
        self._stop.set()
        self.refuse()
        give_back(self.port)
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The machine.

    def _spawn(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed by `refuse`
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._serve, sock)

    def _serve(self, client: socket.socket) -> None:
        with self._tracked(client):
            try:
                reader = _Messages(client)
                while (raw := reader.message()) is not None and self._one(client, raw):
                    continue
            except OSError:
                return  # either side went away; the client sees its connection end

    @contextlib.contextmanager
    def _tracked(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _ask(self, raw: bytes, bodiless: bool) -> bytes | None:
        """The server's reply to a request, over a connection of its own: none is ever stale."""
        upstream = socket.create_connection(self.upstream, timeout=120)
        with self._tracked(upstream):
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            upstream.sendall(raw)
            return _Messages(upstream).message(reply=True, bodiless=bodiless)

    def _decide(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests[request.route] += 1
            self.log.append(request)
            for at, (match, fault) in enumerate(self._queue):
                if match(request):
                    del self._queue[at]
                    return fault
            if self._standing is not None and self._standing[0](request):
                return self._standing[1]
        return None

    def _one(self, client: socket.socket, raw: bytes) -> bool:
        """One request; False when the client's connection ends with it."""
        method, path = raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ")[:2]
        match = _ROUTE.match(path)
        request = Request(method, path, (match[1] or "file-systems") if match else path)
        fault = self._decide(request)
        kind = fault.kind if fault else ""
        amount = fault.amount if fault else 0.0
        reply: bytes | None = b""
        if kind == "delay" and self._stop.wait(amount):
            return False
        if kind == "damage":
            raw = _damaged(raw)
        if fault is None or fault.acts:
            for _ in range(2 if kind == "double request" else 1):
                reply = self._ask(raw, bodiless=method == "HEAD")
                if reply is None:
                    return False
        assert reply is not None
        if kind == "delay reply" and self._stop.wait(amount):
            return False
        if kind == "cut":
            return False
        if kind == "silence":
            self._silence(client)
            return False
        if kind == "truncate":
            client.sendall(reply[: int(amount)])
            return False
        if kind == "html":
            head = (
                f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: {len(HTML)}\r\n\r\n"
            )
            reply = head.encode() + HTML
        if kind == "empty":
            reply = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        client.sendall(reply * 2 if kind == "double reply" else reply)
        return True

    def _silence(self, client: socket.socket) -> None:
        """Say nothing until the client closes, `cut_all` or the end."""
        client.settimeout(0.2)
        while not self._stop.is_set():
            try:
                if not client.recv(65536):
                    return
            except TimeoutError:
                continue


def _damaged(raw: bytes) -> bytes:
    """`raw` with one bit in the middle of its body changed, if it has a body."""
    changed = bytearray(raw)
    body = raw.index(b"\r\n\r\n") + 4
    if body < len(raw):
        changed[(body + len(raw)) // 2] ^= 0x10
    return bytes(changed)


class _Messages:
    """Whole HTTP messages from a socket, as the bytes they came in."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def message(self, *, reply: bool = False, bodiless: bool = False) -> bytes | None:
        """The next message; None at the end of the stream (a cut one is None too)."""
        end = self._until(b"\r\n\r\n", 0)
        if end is None:
            return None
        head = bytes(self._buffer[:end]).lower()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        status = head[9:12]
        if bodiless or (reply and status in (b"204", b"304")):
            stop: int | None = end
        elif b"\r\ntransfer-encoding: chunked" in head:
            stop = self._chunks(end)
        elif length:
            stop = end + int(length[1])
        elif reply:
            while self._fill():
                continue
            stop = len(self._buffer)
        else:
            stop = end
        if stop is None:
            return None
        while len(self._buffer) < stop:
            if not self._fill():
                return None
        raw = bytes(self._buffer[:stop])
        del self._buffer[:stop]
        return raw

    def _chunks(self, at: int) -> int | None:
        while True:
            line_end = self._until(b"\r\n", at)
            if line_end is None:
                return None
            size = int(bytes(self._buffer[at:line_end]).split(b";")[0], 16)
            at = line_end + size + 2
            if size == 0:
                return at
            while len(self._buffer) < at:
                if not self._fill():
                    return None

    def _until(self, mark: bytes, start: int) -> int | None:
        """Where `mark` ends behind `start`."""
        while (found := self._buffer.find(mark, start)) < 0:
            if not self._fill():
                return None
        return found + len(mark)

    def _fill(self) -> bool:
        got = self._sock.recv(1 << 18)
        self._buffer += got
        return bool(got)
