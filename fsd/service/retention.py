"""`Retention`: how long the server keeps what nothing shows any more, in one place.

Options of `fsd serve`; `docs/operations.md` says what each means for users.
"""

from __future__ import annotations

from typing import Final

from fsd.model.errors import UsageError
from fsd.model.limits import FEED_KEEP, GRACE, GRACE_LEAST, HISTORY, SESSION_KEEP, SWEEP_EVERY
from fsd.model.plain import dataclass
from fsd.model.times import NS

_LEAST: Final = 3600.0  # of what a client that was away comes back to


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds. `grace`: content nothing refers to stays so long, and so does an object whose content moved.
    `history`: soft pins of journal entries. `feed`: change rows and where removed files were. `sessions`:
    what repeats of an ended mount session need. `every`: pause between two rounds of the sweep over a
    filesystem, 0: only when asked."""

    grace: float = GRACE
    history: float = HISTORY
    feed: float = FEED_KEEP
    sessions: float = SESSION_KEEP
    every: float = SWEEP_EVERY

    def __post_init__(self) -> None:
        """Raises `UsageError` for values under which clients would lose what they count on."""
        for name, value, least in (
            ("grace", self.grace, GRACE_LEAST),
            ("feed", self.feed, _LEAST),
            ("sessions", self.sessions, _LEAST),
            ("history", self.history, 0.0),
            ("every", self.every, 0.0),
        ):
            if value < least:
                raise UsageError(f"the retention {name} is at least {least:.0f} s")

    def before(self, now: int, seconds: float) -> int:
        """ns of the moment `seconds` before `now` (ns)."""
        return now - int(seconds * NS)
