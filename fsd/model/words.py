"""Counted things in messages: `1 file`, `2 files`, `1 entry lies`, `2 entries lie`."""

from __future__ import annotations


def counted(count: int, noun: str, one: str = "", more: str = "") -> str:
    """The number with its noun, which is given in the singular, and the verb that agrees with it."""
    if count == 1:
        return f"1 {noun} {one}".rstrip()
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{count} {plural} {more}".rstrip()
