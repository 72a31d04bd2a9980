"""Which checkpoints stay: the newest so many, and one of each of the newest hours, days, weeks, months that
have one, as backups are kept. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from fsd.model.errors import UsageError

_RULE: Final = re.compile(r"(last|hourly|daily|weekly|monthly|yearly)=([0-9]{1,6})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Point(NamedTuple):
    """A checkpoint: its id, and its time in ns."""

    name: str
    at: int


def read_keep(text: str) -> dict[str, int]:
    """`hourly=24,daily=7`, or a number for the newest so many. Raises `UsageError`."""
    if re.fullmatch(r"[0-9]{1,6}", text):
        text = f"last={text}"
    kept: dict[str, int] = {}
    for rule in text.split(","):
        match = _RULE.fullmatch(rule.strip())
        if match is None or match.group(1) in kept:
            raise UsageError(
                f"not a rule of what to keep: {rule.strip()[:40]!r}",
                hint="for example 10, or hourly=24,daily=7,weekly=4,monthly=12",
                details={"field": "keep"},
            )
        kept[match.group(1)] = int(match.group(2))
    if not any(kept.values()):
        raise UsageError("that would keep none", hint="delete them by id", details={"field": "keep"})
    return kept


def doomed(points: Sequence[Point], keep: dict[str, int]) -> list[str]:
    """The ids that no rule keeps, oldest first, of `points` in the order they were made: a clock that was set
    back does not make the newest old. Of each period the newest stays; periods without any do not count."""
    newest_first = points[::-1]
    stay = {point.name for point in newest_first[: keep.get("last", 0)]}
    for rule, count in keep.items():
        if rule == "last":
            continue
        seen: set[tuple[int, ...]] = set()
        for point in newest_first:
            period = _period(rule, point.at)
            if period in seen:
                continue
            if len(seen) == count:
                break
            seen.add(period)
            stay.add(point.name)
    return [point.name for point in reversed(newest_first) if point.name not in stay]


def _period(rule: str, at: int) -> tuple[int, ...]:
    when = _EPOCH + timedelta(microseconds=at // 1000)
    if rule == "hourly":
        return (when.year, when.month, when.day, when.hour)
    if rule == "daily":
        return (when.year, when.month, when.day)
    if rule == "weekly":
        return when.isocalendar()[:2]
    if rule == "monthly":
        return (when.year, when.month)
    return (when.year,)
