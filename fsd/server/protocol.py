"""uvicorn's HTTP protocol with the bounds it lacks, the size of a request's head and the time it may take,
a short way for large bodies (`body`), and lending a connection to a lane (`lanes`).

Without them one connection that drips a header could hold memory and a descriptor for ever. Event loop's
thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from functools import partial
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fsd.model.errors import UsageError
from fsd.model.limits import HEAD_MAX, HEAD_TIMEOUT
from fsd.server.body import LAND_LEAST, Landing, arriving
from fsd.server.lanes import LANE_AFTER, Headers, Lane, Lanes, lanes_of
from fsd.server.passing import OUTLET

log = logging.getLogger(__name__)


class _Answer:
    """See `passing.Outlet`. Of this request, which need not be the newest of its connection; its scope has
    this, which must not keep it."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)

    def descriptor(self) -> int | None:
        cycle = self._cycle()
        if cycle is None or cycle.transport.is_closing() or cycle.transport.get_write_buffer_size():
            return None
        found: int = cycle.transport.get_extra_info("socket").fileno()
        return found

    def passed(self, size: int) -> None:
        cycle = self._cycle()
        if cycle is not None:
            cycle.expected_content_length -= size


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it; one that is no HTTP is told so in the same
    error body as everything else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_open = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._small = 0  # small commits in a row
        self._lane: Lane | None = None
        self._stopping = False
        self._running: RequestResponseCycle | None = None  # the oldest that has no whole answer
        self._senseless = False  # what came last is no HTTP: nothing is read any more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        # Of several at once uvicorn tells the last alone that nobody takes their answers.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._senseless:
            return
        super().data_received(data)
        if self._head_open and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX:
                self.send_400_response(f"a request's head has more than {HEAD_MAX} bytes")
        self._land()

    def _land(self) -> None:
        """Receive what is to come of a large body in place. Over TLS it comes decrypted, in copies anyway."""
        there = None if self.cycle is None else arriving(self.cycle.scope)
        if there is None or there.left < LAND_LEAST or self.scheme == "https":
            return
        if self.transport.is_closing() or self.parser.should_upgrade():
            return
        there.make_room()
        self.transport.set_protocol(Landing(there, self, self._landed))

    def _landed(self) -> None:
        """The parser did not see the body: it still waits for it, and a new one takes the next request."""
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open, self._head_bytes = True, 0
        self._arm()

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._disarm()
        super().on_headers_complete()
        if self.cycle is not None and self.scheme != "https":
            self.cycle.scope[OUTLET] = _Answer(self.cycle)  # type: ignore[typeddict-unknown-key]
        if self.parser.should_upgrade() and self.cycle is not None:
            # The parser takes what follows for another protocol: no further request can come this way, which
            # the answer tells.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        there = None if self.cycle is None else arriving(self.cycle.scope)
        if there is None:
            super().on_body(body)
        else:
            there.take(body, self.loop.time())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        lanes = None if self.cycle is None else lanes_of(self.cycle.scope)
        self._small = 0 if lanes is None else self._small + 1
        if lanes is not None and self._small >= LANE_AFTER:
            # The answer is written at the end of the loop's turn; what comes is read after its next begins.
            self.loop.call_soon(partial(self._lend, lanes))

    def _lend(self, lanes: Lanes) -> None:
        """Have the next requests served by a thread, if nothing of one has come and nothing is to be sent."""
        cycle, transport = self.cycle, self.transport
        if self._lane is not None or self._head_open or self.scheme == "https" or transport.is_closing():
            return
        if not cycle.response_complete or cycle.more_body or not cycle.keep_alive or self.pipeline:
            return
        if transport.get_write_buffer_size() or self._stopping:
            return
        self._small = 0
        self.flow.pause_reading()
        sock = transport.get_extra_info("socket")
        self._lane = lanes.lend(sock.fileno(), self._default_headers, self._lane_ended)
        if self._lane is None:
            self.flow.resume_reading()
        else:
            self._unset_keepalive_if_required()

    def _default_headers(self) -> Headers:
        return self.server_state.default_headers

    def _lane_ended(self, data: bytes, over: bool) -> None:
        """On the lane's thread."""
        try:
            self.loop.call_soon_threadsafe(partial(self._back, data, over))
        except RuntimeError:
            log.debug("a lane ended after the event loop")

    def _back(self, data: bytes, over: bool) -> None:
        """The connection is the loop's again, with what the lane has read of a request."""
        self._lane = None
        if self.transport.is_closing():
            return
        if over or (self._stopping and not data):
            self.transport.close()
            return
        if data:
            self.data_received(data)
            if self._stopping:
                super().shutdown()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self.flow.resume_reading()

    def shutdown(self) -> None:
        self._stopping = True
        if self._lane is None:
            super().shutdown()
        else:
            self._lane.end()

    def send_400_response(self, msg: str) -> None:
        self._senseless = True
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            # What came whole before is answered; a 400 would be taken for that answer.
            self._disarm()
            self.cycle.keep_alive = False
            return
        running = self._running
        waiting = running is not None and not running.response_complete
        if waiting and (running is not self.cycle or self.cycle.response_started):
            self.transport.close()  # a 400 would be taken for that answer, or for a part of it
            return
        error = UsageError("that is no HTTP request" if msg.startswith("Invalid") else msg)
        body = json.dumps(error.body("none")).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self.transport.close()
