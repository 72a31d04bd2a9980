"""How long something may take, as long as this process runs. Main thread.

A paused sandbox (SIGSTOP, a snapshot) is no time-out: what was waited for did not run either, or answered
while nobody could look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from fsd.kernel import tasks
from fsd.model.errors import Unavailable

PIECE: Final = 1.0  # seconds waited at a time
MOST: Final = 2.0  # what counts of the time between two looks: beyond it the process did not run


class Limit:
    """`within` seconds (None: for ever) from now, and from whatever goes on: an earlier run's log that is
    being sent takes as long as it takes. `left` is what is left of them; `doing` what went on last."""

    def __init__(self, within: float | None) -> None:
        self.left = float("inf") if within is None else within
        self.doing = ""
        self._counted_to = tasks.current_time()

    async def covers(self, work: Callable[[], Awaitable[object]]) -> bool:
        """Do `work`, cancelled at the limit, also when that moves meanwhile. False: it was cancelled. Raises
        what `work` raised."""
        done: list[Exception | None] = []
        async with tasks.open_nursery() as nursery:

            async def whole() -> None:
                try:
                    await work()
                except Exception as exc:  # noqa: BLE001 - raised below, on its own and not in a group
                    done.append(exc)
                else:
                    done.append(None)
                nursery.cancel_scope.cancel()

            nursery.start_soon(whole)
            await self._reached()
            nursery.cancel_scope.cancel()
        for error in done:
            if error is not None:
                raise error
        return bool(done)

    def reaches(self, seconds: float) -> bool:
        """Whether so much is left."""
        self._count()
        return seconds <= self.left

    async def pause(self, seconds: float) -> bool:
        """Sleep, unless that goes beyond the limit: then False at once."""
        if not self.reaches(seconds):
            return False
        await tasks.sleep(seconds)
        return True

    def went_on(self, doing: str, within: float) -> None:
        """Something was done: from now on it is `within` seconds again."""
        self.doing = doing
        self._count()
        self.left = max(self.left, within)

    def over(self, place: Path, within: float) -> Unavailable:
        """What is told at the limit."""
        text = f"{place} could not be mounted within {within:g} s"
        if self.doing:
            text = f"{place} could not be mounted: nothing went on for {within:g} s ({self.doing})"
        return Unavailable(text, hint="does the server answer? or give --ready-timeout")

    async def _reached(self) -> None:
        self._count()
        while self.left > 0:
            await tasks.sleep(min(self.left, PIECE))
            self._count()

    def _count(self) -> None:
        now = tasks.current_time()
        self.left -= min(now - self._counted_to, MOST)
        self._counted_to = now
