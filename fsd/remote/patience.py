"""How long to wait for the first byte of an answer before the same request is sent again.

A connection can stay open while nothing comes: the answer, or the request, was swallowed on the way, or
whoever held it died. Waiting out the whole time-out makes an fsync take a minute for one lost answer; a retry
is safe, since every request may arrive twice. Too little patience would make a slow server slower: so it
follows what such requests lately took, allows for the size of the body, and doubles with each silence.
"""

from __future__ import annotations

from fsd.model.limits import PATIENCE_BYTES, PATIENCE_FIRST, PATIENCE_OF_TOOK

FADE = 0.3  # how much of `took` each quicker answer takes away
DOUBLINGS = 8


class Patience:
    """For one kind of request. Any thread: a lost update costs a wrong guess."""

    def __init__(self, took: float = 0.0) -> None:
        """`took`: seconds an answer of another kind lately took, which is all that is known of this one."""
        self._took = took  # seconds; rises at once, falls slowly
        self._silences = 0

    def within(self, size: int) -> float:
        """Seconds for a request with a body of `size` bytes."""
        usual = max(PATIENCE_FIRST, PATIENCE_OF_TOOK * self._took) + size / PATIENCE_BYTES
        return float(usual * 2 ** min(self._silences, DOUBLINGS))

    def answered(self, took: float) -> None:
        """An answer came after `took` seconds."""
        self._took = max(took, self._took + FADE * (took - self._took))
        self._silences = 0

    def silent(self) -> None:
        """None came in time."""
        self._silences += 1
