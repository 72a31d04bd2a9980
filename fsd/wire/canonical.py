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
from fsd.wire.strictjson import Number

_SAFE: Final = 2**53 - 1
_SAFE_DIGITS: Final = 16  # 2^53−1 has 16 digits: a longer literal need not be converted to know its side
GENESIS_FIELDS: Final = ("file_system_id", "journal_id", "kind", "title", "actor", "labels", "created_at")


def canonical(value: Any, where: str = "the value") -> bytes:
    """The canonical bytes; raises `UsageError` naming the field for a number no double can hold."""
    out: list[bytes] = []
    _write(value, where, out)
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


def _write(value: Any, where: str, out: list[bytes]) -> None:
    if isinstance(value, dict):
        out.append(b"{")
        # RFC 8785 3.2.3: keys in the order of their UTF-16 code units.
        for at, key in enumerate(sorted(value, key=lambda k: k.encode("utf-16-be"))):
            out.append(b"," if at else b"")
            out.append(rfc8785.dumps(key))
            out.append(b":")
            _write(value[key], f"{where}.{key}", out)
        out.append(b"}")
    elif isinstance(value, (list, tuple)):
        out.append(b"[")
        for at, inner in enumerate(value):
            out.append(b"," if at else b"")
            _write(inner, f"{where}[{at}]", out)
        out.append(b"]")
    elif isinstance(value, Number):
        out.append(_number(value, where))
    elif isinstance(value, int) and not isinstance(value, bool):
        out.append(b"%d" % value)
    else:
        out.append(_scalar(value, where))


def _number(value: Number, where: str) -> bytes:
    if not value.is_integer:
        return _scalar(float(value.text), where)
    digits = value.text.lstrip("-")
    if len(digits) > _SAFE_DIGITS or abs(int(value.text)) > _SAFE:
        return value.text.encode()
    return rfc8785.dumps(int(value.text))


def _scalar(value: Any, where: str) -> bytes:
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as exc:
        raise UsageError(f"{where} cannot be written in canonical JSON: {exc}") from exc
