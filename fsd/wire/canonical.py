"""The canonical form of a journal's JSON and the hashes over it, as docs/journals.md describes them.

RFC 8785 (by the `rfc8785` library) with one extension: an integer literal outside ±(2^53−1) is written as it
came. Other numbers have their RFC 8785 form, that of the nearest IEEE 754 double. Values are those of
`strictjson.loads(…, exact=True)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import rfc8785

from fsd.model.errors import UsageError
from fsd.wire.strictjson import Number, step

_SAFE: Final = 2**53 - 1
_SAFE_DIGITS: Final = 16  # 2^53−1 has 16 digits: a longer literal need not be converted to know its side
GENESIS_FIELDS: Final = ("file_system_id", "journal_id", "kind", "title", "actor", "labels", "created_at")


def canonical(value: Any, where: str = "the value") -> bytes:
    """The canonical bytes; raises `UsageError` naming the field for a number no double can hold."""
    out: list[bytes] = []
    try:
        _write(value, out)
    except _NoForm as no:
        at = where + "".join(step(key) for key in reversed(no.keys))
        raise UsageError(f"{at} cannot be written in canonical JSON: {no}") from no.__cause__
    return b"".join(out)


class Member(NamedTuple):
    """A field of an object in canonical form. Members sort as RFC 8785 3.2.3 wants: by UTF-16 code units."""

    order: bytes
    form: bytes


def member(key: str, value: Any, where: str = "the value") -> Member:
    """`"key":value` in canonical form, for `join`: an object's fields can be made at different times."""
    return Member(key.encode("utf-16-be"), rfc8785.dumps(key) + b":" + canonical(value, where))


def join(members: Iterable[Member]) -> bytes:
    """The canonical form of the object with these fields."""
    return b"{" + b",".join(one.form for one in sorted(members)) + b"}"


def digest(value: Any, where: str = "the value") -> str:
    """Hex SHA-256 of the canonical form."""
    return hashlib.sha256(canonical(value, where)).hexdigest()


def entry_hash(entry: dict[str, Any]) -> str:
    """The hash of an entry as it is given back: over every field but `entry_hash` itself."""
    return digest({k: v for k, v in entry.items() if k != "entry_hash"}, "entry")


def genesis_hash(journal: dict[str, Any]) -> str:
    """The `prev_hash` of a journal's first entry: over its immutable fields."""
    return digest({name: journal[name] for name in GENESIS_FIELDS}, "journal")


class _NoForm(Exception):
    """A value has none. `keys` lead to it, the innermost first: they are gathered on the way out alone, since
    a name for each value would cost as much as all keys above it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.keys: list[str | int] = []


def _write(value: Any, out: list[bytes]) -> None:
    if isinstance(value, dict):
        out.append(b"{")
        # RFC 8785 3.2.3: keys in the order of their UTF-16 code units.
        for at, key in enumerate(sorted(value, key=lambda k: k.encode("utf-16-be"))):
            out.append(b"," if at else b"")
            out.append(rfc8785.dumps(key))
            out.append(b":")
            _write_below(value[key], key, out)
        out.append(b"}")
    elif isinstance(value, (list, tuple)):
        out.append(b"[")
        for at, inner in enumerate(value):
            out.append(b"," if at else b"")
            _write_below(inner, at, out)
        out.append(b"]")
    elif isinstance(value, Number):
        out.append(_number(value))
    elif isinstance(value, int) and not isinstance(value, bool):
        out.append(b"%d" % value)
    else:
        out.append(_scalar(value))


def _write_below(value: Any, key: str | int, out: list[bytes]) -> None:
    try:
        _write(value, out)
    except _NoForm as no:
        no.keys.append(key)
        raise


def _number(value: Number) -> bytes:
    if not value.is_integer:
        return _scalar(float(value.text))
    digits = value.text.lstrip("-")
    if len(digits) > _SAFE_DIGITS or abs(int(value.text)) > _SAFE:
        return value.text.encode()
    return rfc8785.dumps(int(value.text))


def _scalar(value: Any) -> bytes:
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as exc:
        raise _NoForm(str(exc)) from exc
