"""How long the opening of a volume may take before `fsd mount` gives up. Trio's thread."""

from __future__ import annotations

from pathlib import Path

import trio

from fsd.model.errors import Unavailable


class Limit:
    """`within` seconds (None: for ever) from now, and from whatever goes on: an earlier run's log that is
    being sent takes as long as it takes. `deadline` is a time of trio's; `doing` what went on last."""

    def __init__(self, within: float | None) -> None:
        self.deadline = float("inf") if within is None else trio.current_time() + within
        self.doing = ""
        self._scope: trio.CancelScope | None = None

    def scope(self) -> trio.CancelScope:
        """Cancelled at the deadline, also when it moves meanwhile."""
        self._scope = trio.CancelScope(deadline=self.deadline)
        return self._scope

    def went_on(self, doing: str, within: float) -> None:
        """Something was done: from now on it is `within` seconds again."""
        self.doing = doing
        self.deadline = max(self.deadline, trio.current_time() + within)
        if self._scope is not None:
            self._scope.deadline = self.deadline

    def over(self, place: Path, within: float) -> Unavailable:
        """What is told at the deadline."""
        text = f"{place} could not be mounted within {within:g} s"
        if self.doing:
            text = f"{place} could not be mounted: nothing went on for {within:g} s ({self.doing})"
        return Unavailable(text, hint="does the server answer? or give --ready-timeout")
