"""HTTP/1.1 over a plain socket: one connection, one request at a time, one deadline for the whole of it.

Why not `http.client`: its reads have a timeout each and none in all (a server that drips a byte a second
holds a worker for ever), it sends a body either joined or piece by piece, and it parses headers with the
e-mail package, under the interpreter lock that the FUSE thread needs: 61–70 µs CPU a small call, here 45.
Here the request's head and the blobs go out by `sendmsg` unjoined, and a large body is received in place.

Strict about answers: a status line, bounded headers, a body by Content-Length or chunked. Everything else is
`Unavailable`, and the connection is never used again. Bytes waiting before a request is sent (a reply too
many) make the connection unusable too, so that one call never gets another's answer.
"""

from __future__ import annotations

import fcntl
import re
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

from fsd.model.endpoint import Endpoint
from fsd.model.errors import Unavailable
from fsd.model.limits import BODY_RATE, ERROR_BODY_MAX, INTERIM_MAX, KIB
from fsd.remote.failures import unavailable
from fsd.remote.proxy import Proxy, open_tunnel, within
from fsd.remote.resolve import Address, Resolver

if TYPE_CHECKING:
    import ssl

_HEAD_MAX: Final = 64 * KIB
_LINE_MAX: Final = 4 * KIB
_GROUP: Final = 1000  # pieces in one sendmsg; IOV_MAX is 1024
_TLS_PIECE: Final = 256 * KIB
_RECV: Final = 64 * KIB  # larger buffers are mapped and unmapped for each call
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;|$)")
_LARGE: Final = 256 * KIB  # of a body that may come in pieces
_LOOK: Final = 4 * KIB
# How long the next piece of a body is to be, of the pieces there are and the bytes to come; 0: all of them.
Cut: TypeAlias = Callable[[Sequence[bytes], int], int]
_SPACES: Final = " \t\n\r\v\f"
_STATUS: Final = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: |$)")


class Answer(NamedTuple):
    """A complete answer. Header names are lower case; the body is nobody else's."""

    status: int
    headers: dict[str, str]
    body: bytes | bytearray
    pieces: Sequence[bytes] = ()  # of a body that was received in pieces, and is empty then


class Stale(Exception):
    """A kept connection was closed by the other side before it answered anything: connect and send again.
    From `Connection.step` also: what comes can only be read by `exchange`."""


class _Clock:
    """What is left of a call's time: `timeout` seconds, and what a body of `size` bytes takes at the slowest
    rate a server waits for. Until the first byte of an answer `patience` bounds it too, counted from when
    some of the request last went: `silent` is set when that ended it."""

    def __init__(
        self, monotonic: Callable[[], float], timeout: float, patience: float | None, size: int
    ) -> None:
        self._monotonic, self._timeout = monotonic, timeout + size / BODY_RATE
        now = monotonic()
        self._end = now + self._timeout
        self._patience = None if patience is None else min(patience, timeout)
        self._first = None if self._patience is None else now + self._patience
        self._large = size > _RECV
        self._sock: socket.socket | None = None
        self._unsent = 0  # what the kernel had of a large body when it last took some
        self.silent = False

    def sent(self, sock: socket.socket) -> None:
        """The kernel took some more of the request."""
        if self._patience is not None and self._large:
            self._sock, self._unsent = sock, _unsent(sock)
            self._first = self._monotonic() + self._patience

    def heard(self) -> None:
        """A byte of the answer came."""
        self._first = None

    def left(self) -> float:
        now = self._monotonic()
        left = self._end - now
        if left <= 0:
            raise Unavailable(f"no complete answer within {self._timeout:g} s")
        if self._first is not None:
            if self._first <= now and self._goes_on():
                self._first = now + (self._patience or 0.0)
            left = min(left, self._first - now)
            if left <= 0:
                self.silent = True
                raise Unavailable(f"not a word of an answer within {self._patience:g} s")
        return left

    def _goes_on(self) -> bool:
        """Whether the other side took some of what the kernel has since the last look."""
        if self._sock is None:
            return False
        before, self._unsent = self._unsent, _unsent(self._sock)
        return self._unsent < before


def _unsent(sock: socket.socket) -> int:
    """Bytes the kernel has that the other side did not acknowledge."""
    found = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def _span(seconds: float) -> bytes:
    """As a `struct timeval`, in which 0 is for ever."""
    return struct.pack("ll", int(seconds), max(1000, int(seconds % 1 * 1e6)))


class Connection:
    """One connection to a server. One thread at a time, except `abort`, which any thread may call."""

    def __init__(
        self,
        endpoint: Endpoint,
        resolver: Resolver,
        context: ssl.SSLContext | None,
        monotonic: Callable[[], float],
        connect_timeout: float,
        proxy: Proxy | None = None,
    ) -> None:
        """`resolver` knows the proxy, where there is one, else the endpoint."""
        self._endpoint, self._resolver, self._context = endpoint, resolver, context
        self._proxy = proxy
        self._monotonic, self._connect_timeout = monotonic, connect_timeout
        self._sock: socket.socket | None = None
        self._buffer = bytearray()
        self._aborted = False
        self._begun: tuple[_Clock, int] | None = None  # of `begin`: its time, and the bound of the answer
        self._got: tuple[int, dict[str, str], bool] | None = None  # the answer's head, once it is here
        self._steps = True  # answers come as `step` reads them
        self.silent = False  # the last exchange ended because not a byte came within its patience

    def exchange(
        self,
        head: bytes,
        pieces: Sequence[bytes | memoryview],
        timeout: float,
        body_max: int,
        patience: float | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """Send a request and receive its answer, a large body in pieces as `cut` says (not over TLS). Raises
        `Unavailable`, `patience` seconds after the last of it went when nothing of an answer came, else after
        `timeout` (see `_Clock`). Repeats it once on a new connection when a kept one turns out to be closed,
        so the request must be one that may arrive twice.
        """
        clock = _Clock(self._monotonic, timeout, patience, sum(map(len, pieces)))
        try:
            return self._exchange(head, pieces, clock, body_max, cut)
        finally:
            self.silent = clock.silent

    def _exchange(
        self,
        head: bytes,
        pieces: Sequence[bytes | memoryview],
        clock: _Clock,
        body_max: int,
        cut: Cut | None,
    ) -> Answer:
        reused = self._sock is not None and self._quiet()
        try:
            return self._once(head, pieces, clock, body_max, cut, reused)
        except Stale:
            return self._once(head, pieces, clock, body_max, cut, False)

    def _once(
        self,
        head: bytes,
        pieces: Sequence[bytes | memoryview],
        clock: _Clock,
        body_max: int,
        cut: Cut | None,
        reused: bool,
    ) -> Answer:
        done = False
        try:
            if not reused:
                self._connect(clock)
            sent_all = self._send([head, *pieces], clock)
            answer, keep = self._receive(clock, body_max, cut, reused)
            # An answer before the request was whole (an error) leaves the connection unusable.
            done = keep and sent_all and not self._buffer
            return answer
        except (OSError, ValueError) as exc:
            if isinstance(exc, TimeoutError):
                clock.left()  # says so itself when the time is over
            raise unavailable(self._endpoint.shown, exc) from exc
        finally:
            if not done:
                self.close()

    def begin(
        self,
        head: bytes,
        pieces: Sequence[bytes | memoryview],
        timeout: float,
        body_max: int,
        patience: float | None = None,
    ) -> bool:
        """Send a request without waiting for anything; then `step` until there is an answer. False, and
        nothing has happened that matters: there is no kept connection, it is TLS, or the kernel does not take
        the request whole. `exchange` it then."""
        sock = self._sock
        if sock is None or not self._steps or self._context is not None or not self._quiet():
            return False
        try:
            sock.settimeout(0)
            sent = sock.send(b"".join([head, *pieces]))  # small, and of more pieces than one sendmsg may take
        except BlockingIOError:
            return False
        except OSError:
            sent = -1
        size = sum(map(len, pieces))
        if sent != len(head) + size:
            self.close()
            return False
        self._begun, self._got = (_Clock(self._monotonic, timeout, patience, size), body_max), None
        return True

    def fileno(self) -> int:
        """What becomes readable when `step` has something to do."""
        return -1 if self._sock is None else self._sock.fileno()

    def step(self) -> Answer | None:
        """Of the request begun: its answer, None while it is not whole. Never waits. Raises `Unavailable`,
        also when its time is over, and `Stale`: then it is for `exchange`."""
        assert self._begun is not None, "nothing was begun"
        clock, body_max = self._begun
        done = False
        try:
            answer = self._step(clock, body_max)
            done = answer is None or (self._got is not None and self._got[2] and not self._buffer)
            return answer
        except (OSError, ValueError) as exc:
            raise unavailable(self._endpoint.shown, exc) from exc
        finally:
            self.silent = clock.silent
            if not done:
                self.close()

    def _step(self, clock: _Clock, body_max: int) -> Answer | None:
        sock = self._sock
        if sock is None:
            raise Stale
        clock.left()
        try:
            got = sock.recv(_RECV)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            got = b""
        if not got:
            if not self._buffer and self._got is None:
                raise Stale
            raise ValueError("the connection was closed before the whole answer")
        clock.heard()
        self._buffer += got
        while self._got is None:
            found = self._taken()
            if found is None:
                return None
            if found[0] >= 200:
                self._got = found
        status, headers, _ = self._got
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() else -1
        if headers.get("transfer-encoding") or not 0 <= size <= (
            body_max if status < 300 else ERROR_BODY_MAX
        ):
            self._steps = False
            raise Stale
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return Answer(status, headers, body)

    def close(self) -> None:
        """End the connection; the next request makes a new one. The owning thread only."""
        sock, self._sock = self._sock, None
        self._buffer.clear()
        if sock is not None:
            sock.close()

    def abort(self) -> None:
        """From any thread: the request under way ends with `Unavailable`, and so does every later one."""
        self._aborted = True
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # not connected any more, which is what was wanted

    def _quiet(self) -> bool:
        """Whether the kept connection has nothing to read: neither its end nor a reply nobody asked for."""
        sock = self._sock
        if sock is None or self._buffer:
            return False
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLRDHUP)
        if poll.poll(0) or (self._context is not None and cast("ssl.SSLSocket", sock).pending()):
            self.close()
            return False
        return True

    def _connect(self, clock: _Clock) -> None:
        self.close()
        if self._aborted:
            raise Unavailable("this client was closed")
        failed: OSError | None = None
        for address in self._resolver.addresses(min(clock.left(), self._connect_timeout)):
            try:
                sock = self._connect_to(address, clock)
            except OSError as exc:
                failed = exc
                continue
            self._sock = sock
            if self._aborted:  # an abort that came while there was no socket to shut down
                raise Unavailable("this client was closed")
            return
        self._resolver.doubt()
        reached = self._proxy or self._endpoint
        if failed is None:
            raise Unavailable(f"{reached.host} has no address")
        try:
            # TLS speaks with the server itself, whoever leads there.
            where = self._endpoint if self._of_tls(failed) else reached
            raise unavailable(where.shown, failed) from failed
        finally:
            del failed  # it came through this frame: a circle, as in `HttpRemote._refusal`

    def _of_tls(self, exc: OSError) -> bool:
        if self._context is None:
            return False
        import ssl

        return isinstance(exc, ssl.SSLError)

    def _connect_to(self, address: Address, clock: _Clock) -> socket.socket:
        left = within(self._monotonic, self._connect_timeout, clock.left)
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left())
            sock.connect(address.sockaddr)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._proxy is not None:
                open_tunnel(sock, self._proxy, self._endpoint.authority, left)
            if self._context is not None:
                sock.settimeout(left())
                return self._context.wrap_socket(sock, server_hostname=self._endpoint.host)
        except BaseException:
            sock.close()
            raise
        return sock

    def _send(self, pieces: Sequence[bytes | memoryview], clock: _Clock) -> bool:
        """Send everything. False when the server stopped reading: it may have answered already."""
        sock = self._sock
        assert sock is not None
        try:
            if self._context is not None:
                # TLS has no sendmsg; joining small pieces saves a record each.
                for at in range(0, len(pieces), _GROUP):
                    view = memoryview(b"".join(pieces[at : at + _GROUP]))
                    while view:  # in pieces, since TLS says nothing of what went before all did
                        sock.settimeout(clock.left())
                        try:
                            view = view[sock.send(view[:_TLS_PIECE]) :]
                        except TimeoutError:
                            continue  # as below
                        clock.sent(sock)
                return True
            for at in range(0, len(pieces), _GROUP):
                views = [memoryview(p) for p in pieces[at : at + _GROUP] if p]
                while views:
                    sock.settimeout(clock.left())
                    try:
                        sent = sock.sendmsg(views)
                    except TimeoutError:
                        # The kernel takes no more before a third of its buffer went, which is megabytes;
                        # `left` knows whether some of it did.
                        continue
                    clock.sent(sock)
                    while views and sent >= len(views[0]):
                        sent -= len(views.pop(0))
                    if sent:
                        views[0] = views[0][sent:]
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _receive(self, clock: _Clock, body_max: int, cut: Cut | None, reused: bool) -> tuple[Answer, bool]:
        cut = cut if self._context is None else None
        for _ in range(INTERIM_MAX):
            status, headers, keep = self._head(clock, reused, alone=cut is not None)
            if status >= 200:
                break
        else:
            raise ValueError("only interim answers")
        bound = body_max if status < 300 else ERROR_BODY_MAX
        length = headers.get("content-length")
        if headers.get("transfer-encoding"):
            if headers["transfer-encoding"].lower() != "chunked" or length is not None:
                raise ValueError("an answer framed in an unknown way")
            return Answer(status, headers, self._chunked(clock, bound)), keep
        if status in (204, 304):
            return Answer(status, headers, b""), keep
        if length is None or not length.isdecimal():
            raise ValueError(f"an answer with status {status} that does not say how long it is")
        size = int(length)
        if size > bound:
            if status >= 300:
                # Not an fsd error body, whatever it is; the status alone says enough.
                return Answer(status, headers, b""), False
            raise ValueError(f"an answer of {size} bytes, at most {bound} were expected")
        if cut is not None and status < 300 and size >= _LARGE:
            return Answer(status, headers, b"", self._cut(size, clock, cut)), keep
        return Answer(status, headers, self._exactly(size, clock)), keep

    def _cut(self, size: int, clock: _Clock, cut: Cut) -> list[bytes]:
        pieces: list[bytes] = []
        while size:
            pieces.append(self._piece(min(size, cut(pieces, size) or size), clock))
            size -= len(pieces[-1])
        return pieces

    def _piece(self, size: int, clock: _Clock) -> bytes:
        """The next `size` bytes, received where they stay, and with one call: it waits in the kernel, and
        wants the interpreter once."""
        sock = self._sock
        assert sock is not None
        have = min(size, len(self._buffer))
        parts = [bytes(self._buffer[:have])] if have else []
        del self._buffer[:have]
        while have < size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _span(clock.left()))
            sock.settimeout(None)
            try:
                got = sock.recv(size - have, socket.MSG_WAITALL)
            except BlockingIOError:
                continue  # `left` says that it is over
            if not got:
                raise ValueError(f"the answer was cut after {have} of {size} bytes")
            parts.append(got)
            have += len(got)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _head(self, clock: _Clock, reused: bool, *, alone: bool) -> tuple[int, dict[str, str], bool]:
        """`alone`: nothing behind it is received, which is to be received elsewhere."""
        while (found := self._taken()) is None:
            try:
                got = self._fill(clock, head=alone)
            except ConnectionResetError:
                if reused and not self._buffer:
                    raise Stale from None
                raise
            if not got:
                if reused and not self._buffer and not self._aborted:
                    raise Stale
                raise ValueError("the connection was closed before the answer")
        return found

    def _taken(self) -> tuple[int, dict[str, str], bool] | None:
        """Status and headers of the answer at the buffer's front, and whether the connection can be kept;
        None while they are not whole."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_MAX:
                raise ValueError("an answer whose header does not end")
            return None
        status, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        match = _STATUS.match(status)
        if not match:
            raise ValueError("what came is no HTTP answer")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError("a damaged header line")
            name, value = name.lower(), value.strip(_SPACES)
            if name == "content-length" and headers.get(name, value) != value:
                raise ValueError("two different lengths")
            headers[name] = value
        keep = match[1] == "1" and headers.get("connection", "").lower() != "close"
        return int(match[2]), headers, keep

    def _fill(self, clock: _Clock, *, head: bool = False) -> bool:
        """Receive some bytes into the buffer, of a head no more than that; False at the end of the stream."""
        sock = self._sock
        assert sock is not None
        while True:
            sock.settimeout(clock.left())
            try:
                got = self._recv_head(sock) if head else sock.recv(_RECV)
                break
            except TimeoutError:
                continue  # `left` knows whether it is over, or some of the request went meanwhile
        clock.heard()
        self._buffer += got
        return bool(got)

    def _recv_head(self, sock: socket.socket) -> bytes:
        """Some more of a head, and nothing of what is behind it."""
        there = sock.recv(_LOOK, socket.MSG_PEEK)
        end = (self._buffer + there).find(b"\r\n\r\n")
        return sock.recv(len(there) if end < 0 else end + 4 - len(self._buffer)) if there else b""

    def _exactly(self, size: int, clock: _Clock) -> bytearray:
        """The next `size` bytes; large bodies are received in place."""
        have = min(size, len(self._buffer))
        body = bytearray(size)
        body[:have] = self._buffer[:have]
        del self._buffer[:have]
        sock = self._sock
        assert sock is not None
        with memoryview(body) as view:
            while have < size:
                sock.settimeout(clock.left())
                got = sock.recv_into(view[have:])
                if not got:
                    raise ValueError(f"the answer was cut after {have} of {size} bytes")
                have += got
        return body

    def _line(self, clock: _Clock) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _LINE_MAX or not self._fill(clock):
                raise ValueError("the answer was cut inside a chunk")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _chunked(self, clock: _Clock, bound: int) -> bytearray:
        body = bytearray()
        while True:
            match = _CHUNK.match(self._line(clock))
            if match is None:
                raise ValueError("a chunk that does not say how long it is")
            size = int(match[1], 16)
            if len(body) + size > bound:
                raise ValueError(f"an answer of more than the {bound} bytes that were expected")
            if size == 0:
                break
            body += self._exactly(size, clock)
            if self._line(clock):
                raise ValueError("a chunk longer than it says")
        for _ in range(100):
            if not self._line(clock):
                return body
        raise ValueError("trailers without end")
