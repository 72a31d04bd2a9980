"""Long polls without a thread each: a poll waits here for its subject to change, then asks the service.

A change made through this process wakes its waiters at once. Changes of other replicas are found by asking
the database for the heads of what is waited for, `CHECK_EVERY` seconds apart; on SQLite there are no others.
Everything but `waiting` here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Final

from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import POLLS_MAX

CHECK_EVERY: Final = 0.2
# Woken polls ask a little later, so that a burst of commits costs each reader one question, not hundreds.
GATHER: Final = 0.05
# What a session committed itself tells its poll nothing, unless a copy of its sandbox goes on under the same
# session: that must hear in time. Each answer and the next question cost as much as a commit.
GATHER_OWN: Final = 0.25
log = logging.getLogger(__name__)

Heads = Callable[[list[Hashable]], Awaitable[dict[Hashable, int]]]


class Waiter:
    """One poll: `of` is the session that polls, 0: none. `some` is set at the first change, `others` at the
    first that it did not make itself."""

    __slots__ = ("of", "others", "some")

    def __init__(self, of: int) -> None:
        self.of = of
        self.some, self.others = asyncio.Event(), asyncio.Event()

    def woken(self, by: int) -> bool:
        """Whether a change by `by` (0: not known) says nothing new to it."""
        return self.some.is_set() if by and by == self.of else self.others.is_set()

    def wake(self, by: int) -> None:
        self.some.set()
        if not by or by != self.of:
            self.others.set()


class Waiters:
    """`heads` answers the current number of each subject; None when no other process can change them.
    `count`: how many polls there are."""

    def __init__(self, heads: Heads | None) -> None:
        self._heads = heads
        self._waiting: dict[Hashable, set[Waiter]] = {}
        self.count = 0
        self._stopping = False
        self._checker: asyncio.Task[None] | None = None

    def waiting(self, subject: Hashable, by: int = 0) -> bool:
        """Whether anybody waits for `subject` whom a change by the session `by` has to wake: who was woken
        looks later. Any thread, after the change."""
        return not all(one.woken(by) for one in list(self._waiting.get(subject, ())))

    def register(self, subject: Hashable, of: int = 0) -> Waiter:
        """A poll of the session `of`. Register before the first look at the subject, so that no change falls
        in between; give it back with `forget`. Raises `Unavailable` at POLLS_MAX."""
        if self.count >= POLLS_MAX:
            raise Unavailable("the server has too many long polls")
        waiter = Waiter(of)
        if self._stopping:
            waiter.wake(0)
        self._waiting.setdefault(subject, set()).add(waiter)
        self.count += 1
        if self._heads is not None and self._checker is None:
            self._checker = asyncio.create_task(self._check())
        return waiter

    def forget(self, subject: Hashable, waiter: Waiter) -> None:
        waiters = self._waiting.get(subject, set())
        waiters.discard(waiter)
        self.count -= 1
        if not waiters:
            self._waiting.pop(subject, None)

    async def wait(self, waiter: Waiter, seconds: float) -> bool:
        """Whether a change came in time; also true at once while the server stops."""
        try:
            await asyncio.wait_for(waiter.some.wait(), seconds)
        except TimeoutError:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(waiter.others.wait(), GATHER_OWN - GATHER)
        if not self._stopping:
            await asyncio.sleep(GATHER)
        waiter.some.clear()
        waiter.others.clear()
        return True

    @property
    def stopping(self) -> bool:
        return self._stopping

    def wake(self, subject: Hashable, by: int = 0) -> None:
        """`subject` changed; `by`: the session that made the change and knows all of it."""
        for waiter in self._waiting.get(subject, ()):
            waiter.wake(by)

    def stop(self) -> None:
        """End every long poll now; later ones do not wait."""
        self._stopping = True
        if self._checker is not None:
            self._checker.cancel()
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.wake(0)

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
