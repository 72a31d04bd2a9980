"""Direct commands' transport: JSON calls and streamed bodies over `http.client`, with bounded retries.

Measured on this product's 2-core reference machine: importing httpx costs 65-90 ms of a command's start,
`http.client` 12, and large bodies move 600 MB/s and more against 50-160. So it serves the control plane too.

`Http` may be used from any number of threads; each request takes a connection for itself. A connection is
used again only when nothing is readable on it, and a reply names its request (`X-Fsd-Call`): one that came
twice never answers the next request. A forked child makes connections of its own.
Every request that changes something carries one idempotency key through all its tries, so a lost reply
never does a thing twice. What is no fsd answer (refused, silent, HTML, empty, cut) is `Unavailable`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from fsd.client.atfork import watch
from fsd.client.identity import Identity
from fsd.client.tunnelled import Tunnelled
from fsd.client.watchdog import Watchdog
from fsd.host.seam import Host
from fsd.model.errors import FsdError, PosixError, Unavailable, UsageError, from_body, hint_between
from fsd.model.limits import (
    CALL_PATIENCE,
    CALL_TIMEOUT,
    CONNECT_TIMEOUT,
    ERROR_BODY_MAX,
    HEAD_MAX,
    IDLE_CONNECTIONS_MAX,
    JSON_ANSWER_MAX,
    KIB,
    PATIENCE_BYTES,
    RETRY_FOR,
    SERVER_FAULT_TRIES,
)
from fsd.model.plain import dataclass
from fsd.model.token import redact
from fsd.remote.failures import unavailable
from fsd.remote.proxy import ProxyRefused, proxy_for
from fsd.wire.strictjson import read_written

T = TypeVar("T")
Query: TypeAlias = Mapping[str, str | bytes | int | None] | Sequence[tuple[str, str | bytes | int | None]]

Loads: TypeAlias = Callable[[bytes], Any]
_LOADS: Final[Loads] = json.loads  # `Http` has a method called json

CHUNK: Final = 256 * 1024
_TARGET_MAX: Final = HEAD_MAX - 12 * KIB  # the rest of a head: the token and other headers
BACKOFF_FIRST: Final = 0.1
BACKOFF_MAX: Final = 2.0


class Body(Protocol):
    """A request body. `length` in bytes, None when not known before its end."""

    @property
    def length(self) -> int | None: ...
    @property
    def repeatable(self) -> bool:
        """Whether `pieces` can be called again: only then is a failed request tried again."""
        ...

    def pieces(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A body in memory."""

    data: bytes
    repeatable: bool = True

    @property
    def length(self) -> int | None:
        return len(self.data)

    def pieces(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), CHUNK):
            yield self.data[at : at + CHUNK]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Seconds. `timeout` is the longest silence of the server, and for the head of an answer and for one that
    is not streamed the longest time in all; `retry_for` is how long failed tries go on. A request that may
    come twice is sent again after `patience` without a word, then after twice as long, and so on, until all
    that silence was `timeout`."""

    connect_timeout: float = CONNECT_TIMEOUT
    timeout: float = CALL_TIMEOUT
    retry_for: float = RETRY_FOR
    patience: float = CALL_PATIENCE
    ca_file: str | None = None


class Reply:
    """One answer's head and its body still on the wire. Close it, or read it to its end."""

    def __init__(
        self, owner: Http, connection: HTTPConnection, sock: socket.socket, response: HTTPResponse
    ) -> None:
        self._owner = owner
        self._connection: HTTPConnection | None = connection
        self._sock = sock
        self._response = response
        self.status = response.status

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    def pieces(self, size: int = CHUNK) -> Iterator[bytes]:
        """The body as it arrives; raises `Unavailable` when it ends before its declared length."""
        declared = self._response.length  # None for a chunked body, which http.client checks itself
        got = 0
        while True:
            with self._owner.translated():
                piece = self._response.read1(size) if declared is None else self._response.read(size)
            if not piece:
                break
            got += len(piece)
            yield piece
        if declared is not None and got < declared:
            self.close()
            raise Unavailable(f"the answer ended after {got} of {declared} bytes")
        self._finish()

    def read(self, limit: int) -> bytes:
        """The whole body; raises `Unavailable` when it is cut short, late, or longer than `limit`."""
        found = bytearray()
        with self._owner.watchdog.within(self._sock, self._owner.options.timeout):
            for piece in self.pieces():
                found += piece
                if len(found) > limit:
                    self.close()
                    raise Unavailable(f"the answer is longer than {limit} bytes")
        return bytes(found)

    def _finish(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            if self._response.will_close:
                connection.close()
            else:
                self._owner.give_back(connection)

    def close(self) -> None:
        """Drop the answer; a body not read to its end costs the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Silence(TimeoutError):
    """The request was sent whole, and not a byte of an answer came in the time given."""


@dataclass(slots=True)
class Tries:
    """The tries of one request: how long the next waits for the first word, and how much more silence there
    may be beside the time for tries that fail otherwise."""

    patience: float
    left: float

    def silent(self) -> bool:
        """A try ended in silence; whether there may be more of it."""
        self.left -= self.patience
        if self.left <= 0:
            return False
        self.patience = min(2 * self.patience, self.left)
        return True


class Http:
    """Requests of one identity to one server."""

    def __init__(self, identity: Identity, host: Host, options: HttpOptions | None = None) -> None:
        self.identity = identity
        self.host = host
        self.options = options or HttpOptions()
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()
        self.watchdog = Watchdog(host.monotonic)
        self._stopped = threading.Event()
        self._tls: ssl.SSLContext | None = None
        self._server = identity.server
        if self._server.tls:
            self._tls = ssl.create_default_context(cafile=self.options.ca_file)
        self.proxy = proxy_for(self._server)
        watch(self)

    def forked(self) -> None:
        """In a forked child: the connections are the parent's, here they are only let go of."""
        idle, self._idle, self._lock = self._idle, [], threading.Lock()
        stopped, self._stopped = self._stopped.is_set(), threading.Event()
        if stopped:
            self._stopped.set()
        self.watchdog.forked()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Stop: waiting retries end with `Unavailable`, idle connections are closed."""
        self._stopped.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self.watchdog.close()

    def pause(self, seconds: float) -> None:
        """Wait, or until `close` is called."""
        self._stopped.wait(seconds)

    def new_key(self) -> str:
        """A fresh idempotency key."""
        return self.host.token_bytes(16).hex()

    # -- calls ---------------------------------------------------------------------------------------

    def json(
        self,
        method: str,
        route: str,
        *,
        query: Query = (),
        body: object = None,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        wait: float = 0.0,
        written: bool = False,
    ) -> dict[str, Any]:
        """One JSON call, tried again while the error is retryable; the answer's object.

        `raw` is a body already encoded. `key` replaces the generated idempotency key. `wait` seconds are
        added to the time-out: how long the server may hold the answer back. With `written` the answer's
        numbers keep their digits (`strictjson.read_written`). Raises any `FsdError`.
        """
        sent = raw if raw is not None else (b"" if body is None else encode_json(body))
        payload = BytesBody(sent) if method != "GET" else None
        extra = dict(headers or {})
        if sent:
            extra["Content-Type"] = "application/json"
        if method != "GET":
            extra["Idempotency-Key"] = key or self.new_key()
        loads = read_written if written else _LOADS
        tries = self.tries(len(sent))

        def once() -> dict[str, Any]:
            return self._json_once(method, route, query, extra, payload, wait, loads, tries.patience)

        return self.retried(once, tries)

    def send(
        self, method: str, route: str, body: Body, *, query: Query = (), headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """A request with a streamed body, answered with JSON. Tried again only if the body can be read again;
        the caller puts the idempotency key into `headers`."""

        tries = self.tries(body.length or 0) if body.repeatable else None

        def once() -> dict[str, Any]:
            patience = tries.patience if tries is not None else None
            return self._json_once(method, route, query, headers, body, 0.0, patience=patience)

        return self.retried(once, tries) if tries is not None else once()

    def tries(self, size: int) -> Tries:
        """For a request with a body of `size` bytes: to send a big one again costs more than to wait."""
        limit = self.options.timeout
        return Tries(min(limit, self.options.patience + size / PATIENCE_BYTES), limit)

    def open(
        self,
        route: str,
        *,
        query: Query = (),
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> Reply:
        """GET a streamed answer (status 200 or 206); not tried again here. Raises any `FsdError`."""
        reply = self.exchange(
            "GET", route, query=query, headers=headers or {}, body=None, wait=0.0, patience=patience
        )
        if reply.status not in (200, 206):
            self._raise_for(reply)
        return reply

    def retried(self, once: Callable[[], T], tries: Tries | None = None) -> T:
        """`once` again while it fails with a retryable error and time remains (tries back off, doubling),
        counted from the first that failed: a long one was at work, or paused with its sandbox. The time of
        tries that ended in silence is counted in `tries` instead."""
        deadline: float | None = None
        delay, faults = BACKOFF_FIRST, 0
        while True:
            try:
                return once()
            except FsdError as exc:
                faults += not isinstance(exc, Unavailable)
                silent = tries is not None and isinstance(exc.__cause__, Silence) and tries.silent()
                if deadline is None or silent:
                    deadline = self.host.monotonic() + self.options.retry_for
                hopeless = isinstance(exc.__cause__, (ssl.SSLCertVerificationError, ProxyRefused))
                late = self.host.monotonic() + delay > deadline
                if not exc.retryable or hopeless or late or faults >= SERVER_FAULT_TRIES:
                    raise
                jitter = 0.75 + self.host.token_bytes(1)[0] / 512
                if self._stopped.wait(delay * jitter):
                    raise
            delay = min(delay * 2, BACKOFF_MAX)

    def _json_once(
        self,
        method: str,
        route: str,
        query: Query,
        headers: Mapping[str, str],
        body: Body | None,
        wait: float,
        loads: Loads = _LOADS,
        patience: float | None = None,
    ) -> dict[str, Any]:
        reply = self.exchange(
            method, route, query=query, headers=headers, body=body, wait=wait, patience=patience
        )
        if not 200 <= reply.status < 300:
            self._raise_for(reply)
        raw = reply.read(JSON_ANSWER_MAX)
        kind = reply.header("Content-Type") or "no content type"
        if not raw:
            raise Unavailable(f"{self._where()} answered {reply.status} with nothing in it")
        if not kind.startswith("application/json"):
            raise Unavailable(f"{self._where()} answered {reply.status} with {kind}, not with JSON")
        try:
            found = loads(raw)
        except ValueError as exc:
            raise Unavailable(f"the answer of {self._where()} is cut or damaged") from exc
        if not isinstance(found, dict):
            raise Unavailable(f"the answer of {self._where()} is no JSON object")
        return found

    def _raise_for(self, reply: Reply) -> None:
        raw = reply.read(ERROR_BODY_MAX)
        kind = reply.header("Content-Type") or "no content type"
        try:
            body = json.loads(raw) if kind.startswith("application/json") else None
        except ValueError:
            body = None  # judged below: an answer that is no fsd answer
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            error = from_body(body, reply.status)
            raise error
        # A 404 too: what a gateway says while no server is behind it must not pass for "no such file".
        raise Unavailable(
            f"{self._where()} answered {reply.status} with {kind}, which is no fsd answer",
            hint=hint_between(reply.status),
        )

    # -- the wire ------------------------------------------------------------------------------------

    def exchange(
        self,
        method: str,
        route: str,
        *,
        query: Query,
        headers: Mapping[str, str],
        body: Body | None,
        wait: float,
        patience: float | None = None,
    ) -> Reply:
        """One request and the head of its answer, whatever its status. Raises `Unavailable` (caused by
        `Silence` when nothing came within `patience`), and `PosixError` for a path that no request's head can
        hold."""
        target = self._server.base + route + encode_query(query)
        if len(target) > _TARGET_MAX:
            raise PosixError(
                errno.ENAMETOOLONG,
                f"the path is too long for a request ({len(target)} bytes, at most {_TARGET_MAX})",
                hint="a mount reaches any depth, one directory after the other",
            )
        connection, used = self._take()
        sock = _socket_of(connection)
        try:
            response = self._ask(connection, method, target, headers, body, wait, patience)
        except (ConnectionResetError, BrokenPipeError, HTTPException) as exc:
            # An idle connection may have been closed by the server meanwhile: once more on a new one.
            connection.close()
            if not used or (body is not None and not body.repeatable):
                raise self._unavailable(exc) from exc
            connection = self._connect()
            sock = _socket_of(connection)
            with self.translated(connection):
                response = self._ask(connection, method, target, headers, body, wait, patience)
        except (OSError, ValueError) as exc:
            connection.close()
            raise self._unavailable(exc) from exc
        except BaseException:
            connection.close()  # the body's source failed, or Ctrl-C: the request must not look complete
            raise
        return Reply(self, connection, sock, response)

    def _ask(
        self,
        connection: HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None,
        wait: float,
        patience: float | None,
    ) -> HTTPResponse:
        connection.putrequest(method, target, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {self.identity.secret}")
        connection.putheader("Accept", "application/json, */*")
        call = self.host.token_bytes(8).hex()
        connection.putheader("X-Fsd-Call", call)
        for name, value in headers.items():
            connection.putheader(name, value)
        whole = True
        if body is None:
            connection.endheaders()
        elif body.length is None:
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            whole = self._send_pieces(connection, body, chunked=True)
        else:
            connection.putheader("Content-Length", str(body.length))
            connection.endheaders()
            whole = self._send_pieces(connection, body, chunked=False)
        sock, limit = _socket_of(connection), self.options.timeout + wait
        sock.settimeout(limit if patience is None else min(limit, patience + wait))
        with self.watchdog.within(sock, limit):
            try:
                response = connection.getresponse()
            except TimeoutError as exc:
                raise Silence("nothing came") from exc
        sock.settimeout(limit)
        if response.headers.get("X-Fsd-Call", call) != call:
            raise HTTPException("the reply to another request")
        if not whole:
            response.will_close = True  # the rest of the body never comes: nothing can follow it
        return response

    def _send_pieces(self, connection: HTTPConnection, body: Body, *, chunked: bool) -> bool:
        """Send the body; whether all of it. Stops when the server answers before its end: it refused."""
        sock = _socket_of(connection)
        for piece in body.pieces():
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
            if not self._send(sock, framed):
                return False
        return self._send(sock, b"0\r\n\r\n") if chunked else True

    def _send(self, sock: socket.socket, data: bytes) -> bool:
        """Send all of `data`, unless an answer arrives first: then the server wants no more of it."""
        try:
            if isinstance(sock, ssl.SSLSocket):
                # What arrives here may be TLS's own (session tickets): it tells nothing of an answer.
                sock.sendall(data)
                return True
            return self._send_watching(sock, data)
        except (BrokenPipeError, ConnectionResetError):
            if _readable(sock):
                return False  # the reason may still be there to read
            raise

    def _send_watching(self, sock: socket.socket, data: bytes) -> bool:
        view = memoryview(data)
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        while view:
            ready = poller.poll(self.options.timeout * 1000)
            if not ready:
                raise TimeoutError("the server takes no more of the body")
            if ready[0][1] & (select.POLLIN | select.POLLHUP):
                return False
            view = view[sock.send(view, socket.MSG_DONTWAIT) :]
        return True

    def _take(self) -> tuple[HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(), False
            if not _readable(_socket_of(connection)):
                _socket_of(connection).settimeout(self.options.timeout)
                return connection, True
            connection.close()  # closed by the server, or bytes nobody asked for

    def _connect(self) -> HTTPConnection:
        host, port = self._server.host, self._server.port
        timeout = self.options.connect_timeout
        if self._tls is None:
            connection = HTTPConnection(host, port, timeout=timeout, blocksize=CHUNK)
        elif self.proxy is None:
            connection = HTTPSConnection(host, port, timeout=timeout, blocksize=CHUNK, context=self._tls)
        else:
            connection = Tunnelled(self._server, self._tls, self.proxy, timeout, self.host.monotonic)
        with self.translated(connection):
            connection.connect()
        sock = _socket_of(connection)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(self.options.timeout)
        return connection

    def give_back(self, connection: HTTPConnection) -> None:
        """Called by `Reply` alone: its answer was read to the end."""
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS_MAX and not self._stopped.is_set():
                self._idle.append(connection)
                return
        connection.close()

    @contextlib.contextmanager
    def translated(self, connection: HTTPConnection | None = None) -> Iterator[None]:
        """Turns what sockets and `http.client` raise into `Unavailable`; closes `connection` then."""
        try:
            yield
        except (OSError, HTTPException, ValueError) as exc:
            if connection is not None:
                connection.close()
            raise self._unavailable(exc) from exc

    def _where(self) -> str:
        return redact(self.identity.endpoint)

    def _unavailable(self, exc: BaseException) -> Unavailable:
        # http.client's own errors: the answer broke off, or is another request's.
        return unavailable(self._where(), ConnectionError() if isinstance(exc, HTTPException) else exc)


def _socket_of(connection: HTTPConnection) -> socket.socket:
    sock = connection.sock
    if sock is None:
        raise ConnectionResetError("the connection is closed")
    assert isinstance(sock, socket.socket)
    return sock


def _readable(sock: socket.socket) -> bool:
    """Whether bytes, or the end, wait to be read. Takes no time."""
    poller = select.poll()  # select.select cannot do descriptors over 1023
    poller.register(sock, select.POLLIN | select.POLLHUP)
    return bool(poller.poll(0))


def encode_json(value: object) -> bytes:
    """Raises `UsageError` for what JSON cannot hold (NaN, a lone surrogate)."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as exc:
        raise UsageError(f"not expressible in JSON: {exc}") from exc


def encode_path(path: bytes) -> str:
    """A remote path for a route, any bytes; without its leading slashes."""
    return quote(path.lstrip(b"/"), safe=b"/")


def encode_query(query: Query) -> str:
    """`?a=b&…`, or nothing. None values are left out."""
    pairs = query.items() if isinstance(query, Mapping) else query
    parts = [f"{name}={_quote(value)}" for name, value in pairs if value is not None]
    return "?" + "&".join(parts) if parts else ""


def encode_name(name: str) -> str:
    """An id for a route, whatever it holds. Raises `UsageError` for what is no text (a lone surrogate)."""
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as exc:
        raise UsageError(f"{name!a} is no UTF-8 text") from exc


def _quote(value: str | bytes | int) -> str:
    return quote(value, safe="") if isinstance(value, bytes) else encode_name(str(value))
