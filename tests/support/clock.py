"""Made-up time for tasks: it passes when nothing is left to do."""

from __future__ import annotations

import select

from fsd.kernel import tasks


class MadeUp(tasks.Clock):
    """Begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def wait(self, poll: select.poll, seconds: float) -> list[tuple[int, int]]:
        ready = poll.poll(None if seconds == tasks.FOREVER else 0)
        if not ready:
            self.jump(seconds)
        return ready
