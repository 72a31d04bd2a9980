"""Invalidations to the kernel, from a thread of their own: the call blocks while a request holds the
directory it names (`sender` has what makes it, so that a killed daemon does not stay in it).

What the kernel was answered within the last 100 ms may reach its caches only after the invalidation; such a
one is sent again 200 ms later. Equal invalidations that wait are one, which bounds the queue by what exists.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Final

from fsd.host.seam import Host
from fsd.kernel.sender import BATCH, Sender
from fsd.vfs.types import Invalidation

log = logging.getLogger(__name__)

RECENT: Final = 0.1
AGAIN_AFTER: Final = 0.2
# Not known to the kernel (any more): nothing to forget. The others: the connection has ended.
_FINE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENOTCONN, errno.ENODEV, errno.EBADF, errno.ENOTEMPTY)


class Notifier:
    """`submit` from any thread. `answered`: the monotonic time of the last answer the kernel may keep."""

    def __init__(
        self,
        root_ino: int,
        answered: Callable[[], float],
        host: Host,
    ) -> None:
        self._root = root_ino
        self._answered = answered
        self._host = host
        self._sender = Sender()
        self._changed = threading.Condition()
        self._waiting: dict[Invalidation, None] = {}
        self._again: deque[tuple[float, Invalidation]] = deque()
        self._awaited: deque[tuple[int, Callable[[], None]]] = deque()
        self._thread = threading.Thread(target=self._work, name="fsd-notify", daemon=True)

    def start(self, connection: int) -> None:
        """`connection`: the descriptor of the FUSE session, which must be under way."""
        self._sender.start(connection)
        self._thread.start()

    def submit(self, ones: Iterable[Invalidation]) -> None:
        with self._changed:
            before = len(self._waiting)
            self._waiting.update(dict.fromkeys(ones))
            if len(self._waiting) != before:
                self._changed.notify()

    def drop_pages(self, ino: int, done: Callable[[], None]) -> None:
        """Before everything else: have the kernel drop the pages of `ino`; `done` is called when it has, on
        this thread. As many wait as requests do."""
        with self._changed:
            self._awaited.append((ino, done))
            self._changed.notify()

    def take(self, now: float) -> Invalidation | None:
        """The next one due at `now`; the caller sends it."""
        if self._again and self._again[0][0] <= now:
            return self._again.popleft()[1]
        if self._waiting:
            one = next(iter(self._waiting))
            del self._waiting[one]
            if now - self._answered() < RECENT:
                self._again.append((now + AGAIN_AFTER, one))
            return one
        return None

    def _due(self, now: float) -> list[Invalidation]:
        """As many as go at once."""
        return list(islice(iter(partial(self.take, now), None), BATCH))

    def _work(self) -> None:
        while True:
            while self._awaited:
                ino, done = self._awaited.popleft()
                self._send([Invalidation(ino, None)])
                done()
            with self._changed:
                if self._awaited:
                    continue
                ones = self._due(self._host.monotonic())
                if not ones:
                    pause = self._again[0][0] - self._host.monotonic() if self._again else None
                    self._changed.wait(pause)
                    continue
            self._send(ones)

    def _send(self, ones: list[Invalidation]) -> None:
        """Now; may block."""
        for one, error in zip(ones, self._sender.invalidate(self._root, ones), strict=True):
            if error and error not in _FINE:
                log.warning("invalidating %r failed: %s", one, os.strerror(error))
