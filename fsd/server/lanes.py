"""Lanes: a connection that brings one small commit, or one question for content, after the other is served by
a thread of its own.

An fsync waits for each thread on its way to be woken. By the event loop a commit wakes the loop, then a
worker, then the loop again for the answer, and is carried by a task, a request, a response and four messages.
A lane's thread waits in `recv`, commits, answers with one `send` and waits again. Content takes two workers
by the loop, 17 of its turns and a poll whenever the connection is full; here the thread has the kernel pass
it on, and waits in there. A lane does only what is usual: whole small requests of these two kinds, one at a
time. With whatever else comes, or when nothing comes for a while, the connection goes back to the loop, what
was read of it included, and is served as if it had never been away.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from fsd.blobs.store import Stretch
from fsd.model.errors import IntegrityError
from fsd.model.limits import BODY_IDLE, KIB, LANE_IDLE, LANE_IDLE_FULL, LANES_MAX, MIB, SENT_AT_ONCE_MAX

log = logging.getLogger(__name__)

LANES: Final = "fsd.lanes"  # in a request's scope: who may serve the next ones of its connection
LANE_AFTER: Final = 3  # such requests in a row: a connection that brings all kinds of requests stays
_LAST_WORD: Final = 1.0  # seconds an answer may wait to be taken when the server ends
_ROOM: Final = SENT_AT_ONCE_MAX + 8 * KIB  # of a request, its head included

Headers = list[tuple[bytes, bytes]]


class Told(NamedTuple):
    """An answer, what follows from it that its client need not wait for, and content that it ends with."""

    answer: bytes
    later: Sequence[Callable[[], object]]
    content: Sequence[bytes | memoryview | Stretch] = ()


class Serving(Protocol):
    """What a lane says to requests. Any thread."""

    def part(self, data: bytes) -> bool:
        """Whether `data` is the beginning of a request that may become one of these."""

    def answer(self, data: bytes, default: Headers) -> Told | None:
        """The answer to the request that `data` is, with `default` among its headers; None: it is another
        kind of request, or not just one."""


class Lane:
    """One connection on loan. `back` is called on the lane's thread, at its end, with what was read and not
    answered, and whether the connection is over."""

    def __init__(
        self,
        sock: socket.socket,
        serving: Serving,
        default: Callable[[], Headers],
        back: Callable[[bytes, bool], None],
        ended: Callable[[Lane], None],
        idle: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._sock, self._serving, self._default, self._monotonic = sock, serving, default, monotonic
        self._idle = idle
        self._back, self._ended = back, ended
        self._mutex = threading.Lock()
        self._closed = False
        self.busy = False
        self.thread = threading.Thread(target=self._run, name="lane", daemon=True)

    def end(self, *, now: bool = False) -> None:
        """Nothing more is read; what is being answered still is, and `now` nobody is waited for any more who
        does not take an answer. Any thread."""
        with self._mutex:
            if not self._closed:
                try:
                    if now:
                        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _span(_LAST_WORD))
                    self._sock.shutdown(socket.SHUT_RDWR if now and not self.busy else socket.SHUT_RD)
                except OSError:
                    log.debug("a connection that is to end has ended")

    def discard(self) -> None:
        """Instead of its thread's end, where that never began."""
        with self._mutex:
            self._closed = True
            self._sock.close()

    def _run(self) -> None:
        data, over = b"", True
        try:
            _wait_at_most(self._sock)
            data, over = self._serve()
            # The loop has the same open file, and does not wait in its calls.
            self._sock.setblocking(False)
        except OSError as exc:
            log.debug("a lane's connection broke: %s", exc)
        except Exception:
            log.exception("a lane failed; its connection is closed")
        finally:
            self.discard()
            self._ended(self)
            self._back(data, over)

    def _serve(self) -> tuple[bytes, bool]:
        room = bytearray(_ROOM)
        view = memoryview(room)
        have, until, waits, reads = 0, 0.0, 0.0, False
        while True:
            # Who reads does so for a while and then no more; commits come now and then for hours.
            if not have and (idle := LANE_IDLE_FULL if reads else self._idle()) != waits:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _span(idle))
                waits = idle
            try:
                got = self._sock.recv_into(view[have:])
            except BlockingIOError:  # nothing came for as long as it waits
                return bytes(view[:have]), False
            have += got
            if not got:
                return b"", True  # whoever had begun a request does not wait for an answer
            data = bytes(view[:have])
            if self._serving.part(data):
                now = self._monotonic()
                if have == got:
                    until = now + LANE_IDLE
                if have < _ROOM and now < until:
                    continue
                return data, False  # one that drips the loop gives up in its time
            self.busy = True
            try:
                told = self._serving.answer(data, self._default())
            finally:
                self.busy = False
            if told is None:
                return data, False
            have, reads = 0, bool(told.content)
            self._tell(told)
            del data, told  # nothing of a request outlives it

    def _tell(self, told: Told) -> None:
        """What follows waits for nobody who does not take the answer. Raises `OSError` when nobody does."""
        left: bytes | memoryview = told.answer
        try:
            sent = self._sock.send(left, socket.MSG_DONTWAIT | (socket.MSG_MORE if told.content else 0))
            left = memoryview(left)[sent:] if sent < len(left) else b""
        except BlockingIOError:
            log.debug("an answer waits for room")
        finally:
            for call in told.later:
                _follow(call)
        if left:
            self._sock.sendall(left)
        for piece in told.content:
            if isinstance(piece, Stretch):
                _pass_on(self._sock, piece)
            else:
                self._sock.sendall(piece)


def _follow(call: Callable[[], object]) -> None:
    """One that fails keeps no other from being called, nor the connection from its next request."""
    try:
        call()
    except Exception:
        log.exception("what follows an answer failed")


def lanes_of(scope: Mapping[str, Any]) -> Lanes | None:
    """Who may serve the next requests of the connection that brought this one; None: the loop alone."""
    found: Lanes | None = scope.get(LANES)
    return found


class Lanes:
    """The lanes of a server, at most `most`."""

    def __init__(self, serving: Serving, monotonic: Callable[[], float], most: int = LANES_MAX) -> None:
        self._serving, self._monotonic, self._most = serving, monotonic, most
        self._mutex = threading.Lock()
        self._all: set[Lane] = set()
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def busy(self) -> int:
        """How many serve a request now. Any thread; a moment's figure."""
        with self._mutex:
            return sum(lane.busy for lane in self._all)

    def idle(self) -> float:
        """Seconds a lane waits for a request now. With more than half of them in use, those whose clients
        commit now and then are given back soon: others commit all the time, and gain by them. Any thread."""
        return LANE_IDLE if len(self._all) <= self._most // 2 else LANE_IDLE_FULL

    def lend(
        self, fd: int, default: Callable[[], Headers], back: Callable[[bytes, bool], None]
    ) -> Lane | None:
        """Serve the connection `fd`, which the caller keeps open and leaves alone until `back` was called.
        None: not now."""
        with self._mutex:
            if self._closed or len(self._all) >= self._most:
                return None
            try:
                sock = socket.socket(fileno=os.dup(fd))
            except OSError as exc:  # no more descriptors are to be had
                log.debug("no lane: %s", exc)
                return None
            lane = Lane(sock, self._serving, default, back, self._forget, self.idle, self._monotonic)
            self._all.add(lane)
        try:
            lane.thread.start()
        except RuntimeError as exc:  # no more threads are to be had
            log.debug("no lane: %s", exc)
            self._forget(lane)
            lane.discard()
            return None
        return lane

    def _forget(self, lane: Lane) -> None:
        with self._mutex:
            self._all.discard(lane)

    def shutdown(self) -> None:
        """End all and wait for what they answer. After the event loop's end, which waits for those that end
        in time."""
        with self._mutex:
            self._closed = True
            left = list(self._all)
        for lane in left:
            lane.end(now=True)
        for lane in left:
            lane.thread.join()


def _pass_on(sock: socket.socket, stretch: Stretch) -> None:
    """Send it without reading it, where its filesystem can."""
    while stretch:
        try:
            done = os.sendfile(sock.fileno(), stretch.file.fd, stretch.offset, len(stretch))
        except (BlockingIOError, ConnectionError, TimeoutError):
            raise
        except OSError:  # it cannot be done with this file, or its disk gives nothing: reading tells which
            data = _read(stretch[:MIB])
            sock.sendall(data)
            done = len(data)
        if not done:
            raise IntegrityError("an object became shorter while it was sent")
        stretch = stretch[done:]


def _read(stretch: Stretch) -> bytes:
    """A disk's error is not taken for one of the connection, which nobody has to know of."""
    try:
        return stretch.read()
    except OSError as exc:
        raise IntegrityError(f"an object cannot be read: {exc.strerror}") from exc


def _wait_at_most(sock: socket.socket) -> None:
    """Calls wait in the kernel, by its own timers: a poll before each costs a call and a timer more."""
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _span(BODY_IDLE))


def _span(seconds: float) -> bytes:
    """As a `struct timeval`."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
