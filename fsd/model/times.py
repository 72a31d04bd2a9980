"""Times on the wire: RFC 3339 in UTC from nanoseconds since the epoch, and back."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from fsd.model.errors import UsageError

NS: Final = 1_000_000_000
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_DURATION = re.compile(r"(\d{1,9})(ms|s|m|h|d|w)", re.ASCII)
_NS_MAX: Final = 2**63 - 1
_UNIT_NS: Final = {
    "ms": 1_000_000,
    "s": NS,
    "m": 60 * NS,
    "h": 3600 * NS,
    "d": 86_400 * NS,
    "w": 604_800 * NS,
}


def storable(ns: int) -> int:
    """`ns` as near as a row holds it: 64 bits reach from 1677 to 2262. ext4 cuts times it cannot hold too."""
    return max(-_NS_MAX, min(ns, _NS_MAX))


def rfc3339(ns: int, digits: int = 3) -> str:
    """`ns` in UTC with `digits` (0–9) digits of a second, cut, never rounded up."""
    seconds, rest = divmod(ns, NS)
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    text = at.strftime("%Y-%m-%dT%H:%M:%S")
    # strftime does not pad years below 1000 on glibc.
    text = text.rjust(19, "0")
    return f"{text}.{rest:09d}"[: 20 + digits].rstrip(".") + "Z"


def parse_rfc3339(text: str, where: str) -> int:
    """Nanoseconds since the epoch; raises `UsageError` naming `where`."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise UsageError(f"{where} is not an RFC 3339 time: {text!r}", hint="write 2026-01-31T12:00:00Z")
    year, month, day, hour, minute, second = (int(n) for n in match.groups()[:6])
    fraction, offset = match.group(7) or "", match.group(8)
    try:
        zone = (
            UTC
            if offset in "Zz"
            else timezone(
                (1 if offset[0] == "+" else -1) * timedelta(hours=int(offset[1:3]), minutes=int(offset[4:6]))
            )
        )
        # 60 is RFC 3339's leap second; it counts as the second after 59.
        at = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=zone)
    except ValueError as exc:
        raise UsageError(f"{where} is no time that exists: {text!r}") from exc
    if second > 60 or (offset not in "Zz" and int(offset[4:6]) > 59):
        raise UsageError(f"{where} is no time that exists: {text!r}")
    whole = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1) + (second == 60)
    return whole * NS + int(fraction[:9].ljust(9, "0"))


def parse_when(text: str, now: int, where: str) -> int:
    """An RFC 3339 time, or a duration before `now` (`90s`, `15m`, `24h`, `7d`); as a row can hold it."""
    match = _DURATION.fullmatch(text)
    if match is not None:
        return storable(now - int(match.group(1)) * _UNIT_NS[match.group(2)])
    return storable(parse_rfc3339(text, where))
