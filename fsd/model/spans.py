"""Where the data of a sparse file is: spans [start, end) that rise and do not overlap; the rest is zeros.

As text `0-4095,1048576-1052671`, with the last byte as in HTTP's ranges, and `none` for no data at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsd.model.errors import UsageError
from fsd.model.limits import KIB, SPANS_MAX

Span = tuple[int, int]
_NONE = "none"
_ONE = re.compile(r"([0-9]{1,16})-([0-9]{1,16})")
_GAP = 64 * KIB  # a shorter hole is sent as zeros


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in order of their starts, those with little between them as one; at most SPANS_MAX."""
    found: list[Span] = []
    gap = _GAP
    for start, end in spans:
        if found and start - found[-1][1] < gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
        while len(found) > SPANS_MAX:
            gap *= 2
            found = _joined(found, gap)
    return found


def _joined(spans: Sequence[Span], gap: int) -> list[Span]:
    found = [spans[0]]
    for start, end in spans[1:]:
        if start - found[-1][1] < gap:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def write_spans(spans: Sequence[Span]) -> str:
    return ",".join(f"{start}-{end - 1}" for start, end in spans) or _NONE


def read_spans(text: str, first: int, last: int) -> list[Span]:
    """Spans inside [first, last); raises `UsageError`."""
    found: list[Span] = []
    pieces = [] if text == _NONE else text.split(",")
    at = first
    for piece in pieces:
        match = _ONE.fullmatch(piece)
        start, end = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
        if not at <= start < end <= last or len(found) == SPANS_MAX:
            raise UsageError(
                f"data is {_NONE}, or at most {SPANS_MAX} ranges FIRST-LAST that rise and lie in the file"
            )
        found.append((start, end))
        at = end
    return found
