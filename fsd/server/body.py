"""A large body on its way into memory, past uvicorn's buffer.

uvicorn collects 64 KiB, stops reading, wakes the request, and that takes a copy: for each MiB of an upload
some ten wake-ups, changes of what is polled, and two copies. A body whose length is declared and allowed ends
in memory whatever it does, so the connection hands its pieces over as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ARRIVING: Final = "fsd.arriving"  # in a request's scope: where the connection puts what comes


class Arriving:
    """What came so far. Event loop's thread. `heard` is when the last piece came, in the loop's time."""

    def __init__(self, now: float) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.heard = now

    def take(self, piece: bytes, now: float) -> None:
        self.pieces.append(piece)
        self.size += len(piece)
        self.heard = now

    def whole(self) -> bytes:
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


def arriving(scope: Mapping[str, Any]) -> Arriving | None:
    """Where the next piece of a request's body goes; None: uvicorn's buffer."""
    found: Arriving | None = scope.get(ARRIVING)
    return found
