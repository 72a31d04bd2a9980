"""Modes as `chmod` takes them: octal digits, or changes such as `u+x`, `go-w`, `a=rX`."""

from __future__ import annotations

import os
import re
from typing import Final

from fsd.cli import values
from fsd.model.errors import UsageError

_CLAUSE: Final = re.compile(r"([ugoa]*)((?:[-+=](?:[ugo]|[rwxXst]*))+)")
_STEP: Final = re.compile(r"([-+=])([ugo]|[rwxXst]*)")
_OF: Final = {"u": 0o4700, "g": 0o2070, "o": 0o1007, "a": 0o7777}
_BITS: Final = {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}
_SHIFT: Final = {"u": 6, "g": 3, "o": 0}


def change(raw: str) -> str:
    """A converter: the text of a mode `applied` takes. Raises `UsageError`."""
    if re.fullmatch(r"[0-7o]+", raw):
        values.mode(raw)
    elif not all(_CLAUSE.fullmatch(clause) for clause in raw.split(",")):
        raise UsageError(f"{raw!r} is no mode (644, 0755, u+x, go-w, a=rX)")
    return raw


def absolute(text: str) -> int | None:
    """The bits of an octal mode; None of one that says what to change."""
    return values.mode(text) if text[0].isdigit() or (text[0] == "o" and text[1:].isdigit()) else None


def applied(text: str, bits: int, *, directory: bool) -> int:
    """The mode of something that has `bits` after the change. Where nobody is named (`+x`) it is everybody,
    but for what the umask holds back."""
    for clause in text.split(","):
        match = _CLAUSE.fullmatch(clause)
        assert match is not None
        who = match[1]
        reach = 0
        for letter in who or "a":
            reach |= _OF[letter]
        free = reach if who else reach & ~_umask()
        for sign, what in _STEP.findall(match[2]):
            given = _given(what, bits, directory) & free
            if "t" in what and not who:
                given |= 0o1000
            if sign == "+":
                bits |= given
            elif sign == "-":
                bits &= ~given
            else:
                # `=` keeps a directory's set-id bits that it does not name, as GNU's does.
                kept = bits & 0o6000 if directory and "s" not in what else 0
                bits = bits & ~reach | given | kept
    return bits


def _given(what: str, bits: int, directory: bool) -> int:
    if what in _SHIFT and what:
        three = bits >> _SHIFT[what] & 0o7
        return three * 0o111
    found = 0
    for letter in what:
        if letter == "X":
            found |= 0o111 if directory or bits & 0o111 else 0
        else:
            found |= _BITS[letter]
    return found


def _umask() -> int:
    """Of this process, which has one thread when it asks."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
