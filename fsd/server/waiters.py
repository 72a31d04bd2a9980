"""Long polls without a thread each: a poll waits here for its subject to change, then asks the service.

A change made through this process wakes its waiters at once. Changes of other replicas are found by asking
the database for the heads of what is waited for, `CHECK_EVERY` seconds apart; on SQLite there are no others.
Everything but `waiting` here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import POLLS_MAX

CHECK_EVERY: Final = 0.2
# Woken polls ask a little later, so that a burst of commits costs each reader one question, not hundreds. A
# mount that commits all the time wakes its own poll, whose answer and next question cost as much as a commit.
GATHER: Final = 0.05
log = logging.getLogger(__name__)

Heads = Callable[[list[Hashable]], Awaitable[dict[Hashable, int]]]


class Waiters:
    """`heads` answers the current number of each subject; None when no other process can change them.
    `count`: how many polls there are."""

    def __init__(self, heads: Heads | None) -> None:
        self._heads = heads
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}
        self.count = 0
        self._stopping = False
        self._checker: asyncio.Task[None] | None = None

    def waiting(self, subject: Hashable) -> bool:
        """Whether anybody waits for `subject` who was not woken yet: who was looks later. Any thread, after
        the change."""
        return not all(event.is_set() for event in list(self._waiting.get(subject, ())))

    def register(self, subject: Hashable) -> asyncio.Event:
        """An event that is set at the next change. Register before the first look at the subject, so that
        no change falls in between; give it back with `forget`. Raises `Unavailable` at POLLS_MAX."""
        if self.count >= POLLS_MAX:
            raise Unavailable("the server has too many long polls")
        event = asyncio.Event()
        if self._stopping:
            event.set()
        self._waiting.setdefault(subject, set()).add(event)
        self.count += 1
        if self._heads is not None and self._checker is None:
            self._checker = asyncio.create_task(self._check())
        return event

    def forget(self, subject: Hashable, event: asyncio.Event) -> None:
        events = self._waiting.get(subject, set())
        events.discard(event)
        self.count -= 1
        if not events:
            self._waiting.pop(subject, None)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Whether the event came in time; also true at once while the server stops."""
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        if not self._stopping:
            await asyncio.sleep(GATHER)
        event.clear()
        return True

    @property
    def stopping(self) -> bool:
        return self._stopping

    def wake(self, subject: Hashable) -> None:
        """`subject` changed."""
        for event in self._waiting.get(subject, ()):
            event.set()

    def stop(self) -> None:
        """End every long poll now; later ones do not wait."""
        self._stopping = True
        if self._checker is not None:
            self._checker.cancel()
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def _check(self) -> None:
        try:
            await self._follow()
        finally:
            self._checker = None  # the next poll begins another

    async def _follow(self) -> None:
        assert self._heads is not None
        known: dict[Hashable, int] = {}
        while self._waiting:
            await asyncio.sleep(CHECK_EVERY)
            try:
                now = await self._heads(list(self._waiting))
            except FsdError as exc:
                # The polls themselves tell their callers; here it only delays other replicas' changes.
                log.warning("long polls: cannot ask for heads: %s", exc)
                continue
            for subject, head in now.items():
                # One not seen before may have changed since its poll looked: it looks once more.
                if known.get(subject) != head:
                    self.wake(subject)
            known = now
