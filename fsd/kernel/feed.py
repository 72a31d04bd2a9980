"""The change feed: a thread that long-polls, has each page applied on the FUSE thread, and sends what the
kernel must forget.

An answer comes at least every `WAIT` seconds, with or without a change, so that silence is noticed within
`SILENT`: then every answer to the kernel gets time-out 0 and the volume asks again before it uses what it
knows, until an answer comes that was not itself on its way for so long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from fsd.kernel.entries import Entries
from fsd.kernel.machine import Machine
from fsd.kernel.notify import Notifier
from fsd.model.errors import FsdError, HistoryChanged, NotAuthenticated, NotPermitted
from fsd.remote.api import Remote
from fsd.vfs.types import Invalidation
from fsd.wire.messages import BarrierAsk, FeedPage

log = logging.getLogger(__name__)

WAIT: Final = 1.5
SILENT: Final = 3.0
RETRY: Final = 0.5
_pace = threading.Event()  # never set: the time between two tries


class Feed:
    """One mount's feed. `start` once; `look` from the timer."""

    def __init__(self, machine: Machine, remote: Remote, entries: Entries, notifier: Notifier) -> None:
        self._machine = machine
        self._remote = remote
        self._entries = entries
        self._notifier = notifier
        self._silent = False
        self.last_answer = machine.host.monotonic()
        self.refused = ""  # why the service does not take this mount's token; empty: it does
        # Takes barriers a checkpoint from outside asks for; called on the feed's thread.
        self.asked: Callable[[BarrierAsk], object] | None = None
        self._newest_ask = 0
        self._thread = threading.Thread(target=self._work, name="fsd-feed", daemon=True)

    def start(self) -> None:
        self._machine.volume.core.take_absent = self._absent
        self._thread.start()

    def look(self) -> None:
        """Notice silence; any thread."""
        silent = self._machine.host.monotonic() - self.last_answer > SILENT
        if silent and not self._silent:
            self._silent = True
            log.warning("the change feed has been silent for %.0f s: caches are checked before use", SILENT)
            self._machine.post(lambda: self._set_silent(True))

    def _set_silent(self, silent: bool) -> None:
        self._machine.volume.feed_silent(silent)
        self._entries.silent(silent)
        if silent:
            # What the kernel was told before would be good for a minute still.
            self._notifier.submit([*self._machine.volume.kernel_holds(), *self._absent()])
        self._machine.pump()

    def _absent(self) -> list[Invalidation]:
        """What the kernel was told does not exist, to be forgotten."""
        return list(self._machine.volume.still_absent(self._entries.take_absent()))

    def _work(self) -> None:
        while True:
            volume, now = self._machine.volume, self._machine.host.monotonic
            asked, wait = now(), 0.0 if self._silent else WAIT
            try:
                page = self._remote.changes(
                    volume.feed_seq, volume.session, wait, volume.root_ino, self._newest_ask, volume.core.mark
                )
            except HistoryChanged as exc:
                log.error("%s; this mount is read-only now, and keeps what it has not sent", exc)
                self._cut_off(exc)
                return
            except FsdError as exc:
                refused = exc.message if isinstance(exc, NotAuthenticated | NotPermitted) else ""
                if refused and not self.refused:
                    log.warning("the change feed is refused: %s", refused)
                self.refused = refused
                log.debug("change feed: %s", exc)
                _pace.wait(RETRY)
                continue
            except Exception:
                log.exception("the change feed failed unexpectedly")
                _pace.wait(RETRY)
                continue
            self.refused = ""
            # One that was longer on its way may tell how things were that long ago: it ends no silence.
            timely = now() - asked <= SILENT
            if timely:
                self.last_answer = now()
            for ask in page.asks:
                self._newest_ask = max(self._newest_ask, ask.id)
                if self.asked is not None:
                    self.asked(ask)
            if page.changes or page.reset or page.head > volume.feed_seq or volume.told_more(page):
                self._have_applied(page)
            if self._silent and timely:
                self._silent = False
                log.info("the change feed answers again")
                self._machine.post(lambda: self._set_silent(False))

    def _cut_off(self, error: HistoryChanged) -> None:
        """The service went back to an older copy: there is nothing more to hear of it."""

        def apply() -> None:
            self._machine.volume.history_changed(error)
            self._machine.settle()
            self._machine.pump()

        self._machine.post(apply)

    def _have_applied(self, page: FeedPage) -> None:
        """Returns when the FUSE thread has applied `page`: the next question starts behind it. Of one that
        could not be applied the log tells, and it is asked for again, not at once."""
        applied = threading.Event()
        done: list[bool] = []

        def apply() -> None:
            try:
                self._notifier.submit(self._machine.volume.apply_feed(page))
                self._machine.settle()
                self._machine.pump()
                done.append(True)
            finally:
                applied.set()

        self._machine.post(apply)
        applied.wait()
        if not done:
            _pace.wait(RETRY)
