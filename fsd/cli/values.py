"""Converters of flag values: text in, value out, `UsageError` naming the expected form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fsd.model.errors import UsageError
from fsd.model.limits import DURATION_MAX, GIB, KIB, LABELS_MAX, MIB, SIZE_MAX

_DURATION = re.compile(r"^(\d{1,18}(?:\.\d+)?)(ms|s|m|h|d|w|)$")
_SIZE = re.compile(r"^(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)(i?b)?$", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_LABEL_KEY = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,253}[A-Za-z0-9])?$")


def text(raw: str) -> str:
    return raw


def cursor(raw: str) -> str:
    """Where a listing goes on, as an earlier page told it."""
    if not raw.isascii():
        raise UsageError(f"{raw!a} is no cursor", hint="give what `next_after` of the page before holds")
    return raw


def output(raw: str) -> str:
    return one_of("text", "json")(raw)


def one_of(*allowed: str) -> Callable[[str], str]:
    """A converter that takes one of `allowed`."""

    def convert(raw: str) -> str:
        if raw not in allowed:
            raise UsageError(f"{raw!r} is none of {', '.join(allowed)}")
        return raw

    return convert


def integer(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """A converter for whole numbers within bounds."""

    def convert(raw: str) -> int:
        if not re.fullmatch(r"-?\d{1,19}", raw):
            raise UsageError(f"{raw!r} is no whole number")
        number = int(raw)
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise UsageError(f"{number} is out of range: {bounds}")
        return number

    return convert


def duration(raw: str) -> float:
    """Seconds from `30`, `30s`, `5m`, `2h`, `7d`, `250ms`."""
    match = _DURATION.match(raw.strip())
    if not match:
        raise UsageError(f"{raw!r} is no duration (30, 30s, 5m, 2h, 7d)")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > DURATION_MAX:
        raise UsageError(f"{raw!r} is longer than {DURATION_MAX // 86400 // 365} years")
    return seconds


def positive_duration(raw: str) -> float:
    seconds = duration(raw)
    if seconds <= 0:
        raise UsageError(f"{raw!r} must be more than zero")
    return seconds


def size(raw: str) -> int:
    """Bytes from `4096`, `64K`, `10MiB`, `2G` (powers of 1024)."""
    match = _SIZE.match(raw.strip())
    if not match:
        raise UsageError(f"{raw!r} is no size (4096, 64K, 10MiB, 2G)")
    made = int(float(match[1]) * _UNITS[match[2].lower()])
    if made > SIZE_MAX:
        raise UsageError(f"{raw!r} is more than {SIZE_MAX // 1024**5} PiB")
    return made


def positive_size(raw: str) -> int:
    bytes_ = size(raw)
    if not bytes_:
        raise UsageError(f"{raw!r} must be more than zero")
    return bytes_


def mode(raw: str) -> int:
    """Permission bits from octal digits."""
    if not re.fullmatch(r"0?o?[0-7]{1,5}", raw):
        raise UsageError(f"{raw!r} is no octal mode (644, 0755)")
    bits = int(raw.replace("o", ""), 8)
    if bits > 0o7777:
        raise UsageError(f"{raw!r} is over 7777")
    return bits


def boolean(raw: str) -> bool:
    if raw.lower() in ("true", "1", "yes", "on"):
        return True
    if raw.lower() in ("false", "0", "no", "off"):
        return False
    raise UsageError(f"{raw!r} is neither true nor false")


def pair(raw: str) -> tuple[str, str]:
    """A label `key=value`."""
    key, equals, value = raw.partition("=")
    if not equals or not _LABEL_KEY.match(key):
        raise UsageError(f"{raw!r} is no label of the form key=value")
    return key, value


def labels(pairs: list[tuple[str, str]] | None) -> dict[str, str]:
    """The labels given as a map; a key given twice is refused."""
    found: dict[str, str] = {}
    for key, value in pairs or []:
        if key in found:
            raise UsageError(f"label {key} is given twice")
        found[key] = value
    if len(found) > LABELS_MAX:
        raise UsageError(f"{len(found)} labels, at most {LABELS_MAX}")
    return found


def listen(raw: str) -> tuple[str, int]:
    """`HOST:PORT`, `[v6]:PORT` or `:PORT`; port 0 picks a free one."""
    host, colon, port = raw.rpartition(":")
    if not colon or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{raw!r} is no HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if ":" in host and not _is_v6(host):  # `::1` alone: its end would pass for a port
        raise UsageError(f"{raw!r} is no HOST:PORT", hint="an IPv6 address: [::1]:8420")
    return host or "127.0.0.1", int(port)


def _is_v6(text: str) -> bool:
    import ipaddress

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def journal_at(raw: str) -> tuple[str, int]:
    """`JOURNAL:SEQ`."""
    name, colon, number = raw.rpartition(":")
    if not colon or not name or not re.fullmatch(r"\d{1,15}", number):
        raise UsageError(f"{raw!r} is no JOURNAL:SEQ")
    return name, int(number)


def date_ns(raw: str) -> int:
    """Nanoseconds since the epoch from `YYYY-MM-DD` (UTC midnight) or an RFC 3339 time."""
    from datetime import UTC, datetime

    try:
        at = datetime.fromisoformat(raw)
    except ValueError as exc:
        raise UsageError(f"{raw!r} is no date (2026-01-31 or 2026-01-31T12:00:00Z)") from exc
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    whole = int(at.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + at.microsecond * 1000


def actor(raw: str) -> str:
    kind, colon, name = raw.partition(":")
    if not (kind and colon and name):
        raise UsageError(f"{raw!r} is no actor of the form type:id")
    return raw


def kind(raw: str) -> str:
    """What `--type` of find takes, as the server names it."""
    known: dict[str, Any] = {"f": "file", "d": "directory", "l": "symlink", "p": "fifo", "s": "socket"}
    found = str(known.get(raw, raw))
    return one_of("file", "directory", "symlink", "fifo", "socket", "char", "block")(found)
