"""Ids the service makes, and checks of short texts people give things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fsd.host.seam import Host
from fsd.model.errors import UsageError
from fsd.model.limits import LABELS_MAX

ID_CHARS: Final = 20
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz234567"
_TWO: Final = [one + two for one in _LETTERS for two in _LETTERS]
_SHIFTS: Final = range(5 * ID_CHARS - 10, -1, -10)
DISPLAY_NAME_MAX: Final = 256
LABEL_KEY_MAX: Final = 128
LABEL_VALUE_MAX: Final = 1024


def new_id(host: Host, prefix: str) -> str:
    """`prefix` + 20 characters of a–z, 2–7: 100 random bits. (`base64` takes five times as long, and each
    request has an id.)"""
    bits = int.from_bytes(host.token_bytes(15), "big") >> 20
    return prefix + "".join([_TWO[bits >> shift & 1023] for shift in _SHIFTS])


def check_line(text: Any, where: str, limit: int) -> str:
    """`text` if it is one line of at most `limit` characters; raises `UsageError` naming `where`.

    Control characters are refused because the text is shown on terminals and in logs.
    """
    if not isinstance(text, str):
        raise UsageError(f"{where} is not a string")
    if len(text) > limit:
        raise UsageError(f"{where} has {len(text)} characters, at most {limit}")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise UsageError(f"{where} holds a control character")
    return text


def check_labels(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[str, str]]:
    """Sorted unique labels; raises `UsageError`."""
    if len(pairs) > LABELS_MAX:
        raise UsageError(f"{len(pairs)} labels, at most {LABELS_MAX}")
    made: dict[str, str] = {}
    for key, value in pairs:
        check_line(key, "a label's key", LABEL_KEY_MAX)
        check_line(value, f"the label {key}", LABEL_VALUE_MAX)
        if not key or "=" in key:
            raise UsageError("a label's key is not empty and holds no '='")
        if key in made:
            raise UsageError(f"the label {key} is given twice")
        made[key] = value
    return sorted(made.items())
