"""uvicorn's HTTP protocol with the bounds it lacks, the size of a request's head and the time it may take,
and a short way for large bodies (`body`).

Without them one connection that drips a header could hold memory and a descriptor for ever. Event loop's
thread.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fsd.model.errors import UsageError
from fsd.model.limits import HEAD_MAX, HEAD_TIMEOUT
from fsd.server.body import LAND_LEAST, Landing, arriving


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it; one that is no HTTP is told so in the same
    error body as everything else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_open = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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

    def send_400_response(self, msg: str) -> None:
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
