"""Bytes of an answer that the kernel passes from an object's file to the connection (sendfile).

Read into memory and written they are copied twice, by two threads. Only where the answer so far is on its
way, and not over TLS. Who takes it slowly keeps no thread: after a moment the rest goes the usual way.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from fsd.blobs.store import OpenFile, Stretch

OUTLET: Final = "fsd.outlet"  # in a request's scope: where its answer can be sent past the connection
_WAIT: Final = 0.1  # seconds a thread waits for room in a connection, and
_WAIT_ALL: Final = 1.0  # for all of a stretch


class Outlet(Protocol):
    """A request whose answer can be sent past its connection. Event loop's thread."""

    def descriptor(self) -> int | None:
        """The connection's descriptor, where all that was written is on its way; None: not now."""

    def passed(self, size: int) -> None:
        """So much of the answer's body was sent past it."""


def outlet_of(scope: Mapping[str, Any]) -> Outlet | None:
    """Where a request's answer can be sent past its connection; None: it can only be written."""
    found: Outlet | None = scope.get(OUTLET)
    return found


def copied(descriptor: int) -> OpenFile | None:
    """Another descriptor of the same, which stays whatever becomes of the connection; None: there is none."""
    try:
        return OpenFile(os.dup(descriptor))
    except OSError:
        return None


def pass_on(out: OpenFile, stretch: Stretch, monotonic: Callable[[], float]) -> int:
    """How many bytes of `stretch` went: fewer where nobody takes them, the connection is over, or it cannot
    be done. Blocks for a moment; any thread."""
    done, end = 0, monotonic() + _WAIT_ALL
    while done < len(stretch):
        try:
            some = os.sendfile(out.fd, stretch.file.fd, stretch.offset + done, len(stretch) - done)
        except BlockingIOError:
            if monotonic() < end and _room(out.fd):
                continue
            break
        except OSError:
            break  # the usual way says why
        if not some:
            break
        done += some
    return done


def _room(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(_WAIT * 1000))
