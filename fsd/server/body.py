"""A large body on its way into memory, past uvicorn's buffer.

uvicorn collects 64 KiB, stops reading, wakes the request, and that takes a copy: for each MiB of an upload
some ten wake-ups, changes of what is polled, and two copies. A body whose length is declared and allowed ends
in memory whatever it does, so the connection hands its pieces over as they come; and what is still to come of
a large one is received where it will lie (`Landing`), past the HTTP parser too: no copy, no pieces to join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from fsd.model.limits import KIB

ARRIVING: Final = "fsd.arriving"  # in a request's scope: where the connection puts what comes
LAND_LEAST: Final = 256 * KIB  # so much must be to come: a piece or two are not worth another protocol
_SCRATCH: Final = 64 * KIB


class Arriving:
    """What came so far of a body of `declared` bytes (None: chunked). Event loop's thread. `heard` is when
    the last of it came, in the loop's time."""

    def __init__(self, now: float, declared: int | None) -> None:
        self._pieces: list[bytes] = []
        self._room: bytearray | None = None  # the whole body's, once it lands
        self._declared = declared
        self.size = 0
        self.heard = now

    @property
    def left(self) -> int:
        """How much is to come."""
        return 0 if self._declared is None else self._declared - self.size

    def take(self, piece: bytes, now: float) -> None:
        """Another piece; none comes any more after `make_room` but empty ones."""
        if piece:
            self._pieces.append(piece)
        self.size += len(piece)
        self.heard = now

    def make_room(self) -> None:
        """From now on it is received in place."""
        assert self._declared is not None
        room = bytearray(self._declared)
        at = 0
        for piece in self._pieces:
            room[at : at + len(piece)] = piece
            at += len(piece)
        self._room, self._pieces = room, []

    def room(self) -> memoryview | None:
        """Where the next bytes go; None when nobody wants them any more."""
        return None if self._room is None else memoryview(self._room)[self.size :]

    def landed(self, size: int, now: float) -> None:
        self.size += size
        self.heard = now

    def whole(self) -> bytes | bytearray:
        if self._room is not None:
            return self._room
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def drop(self) -> None:
        """Nobody wants it any more: its memory goes, though its connection may still send it."""
        self._room, self._pieces = None, []


class Landing(asyncio.BufferedProtocol):
    """A connection's protocol until the rest of `body` has come; then `done` is called, which gives it back.
    All but what is received goes to `back`, the protocol it had."""

    def __init__(self, body: Arriving, back: asyncio.Protocol, done: Callable[[], None]) -> None:
        self._body, self._back, self._done = body, back, done
        self._left = body.left
        self._clock = asyncio.get_running_loop().time
        self._scratch: bytearray | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._body.room()
        if room is not None:
            return room
        if self._scratch is None:
            self._scratch = bytearray(_SCRATCH)
        return memoryview(self._scratch)[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self._body.landed(nbytes, self._clock())
        if not self._left:
            self._done()

    def eof_received(self) -> bool | None:
        return self._back.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._back.connection_lost(exc)

    def pause_writing(self) -> None:
        self._back.pause_writing()

    def resume_writing(self) -> None:
        self._back.resume_writing()


def arriving(scope: Mapping[str, Any]) -> Arriving | None:
    """Where the next piece of a request's body goes; None: uvicorn's buffer."""
    found: Arriving | None = scope.get(ARRIVING)
    return found
