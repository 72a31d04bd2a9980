"""SHA-256 of several messages, those of one length at once where `_sha256.c` was built and the processor can.

Blocks of a large file are such messages, and hashing them is a third of the CPU of writing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from fsd.model.limits import KIB

Messages: TypeAlias = Sequence[bytes | bytearray | memoryview]
AT_ONCE: Final = 8  # so many are worth being brought together
_LEAST: Final = 4 * KIB  # each; below, OpenSSL's alone is as fast as it is to ask


def _best() -> Callable[[Messages], list[bytes]] | None:
    try:
        from fsd.wire import _sha256
    except ImportError:  # it was not built: it is optional
        return None
    return _sha256.many if _sha256.FAST and _right(_sha256.many) else None


def _right(many: Callable[[Messages], list[bytes]]) -> bool:
    """Whether it gives what OpenSSL does on this processor: eight, two and one at once, with one block and
    with two after the last whole one. 0.1 ms, once; a wrong digest would name content wrongly for ever."""
    some = bytes(range(256)) * 2
    for length in (0, 119, 4 * 64 + 60):
        messages = [some[seed : seed + length] for seed in range(AT_ONCE + 3)]
        if many(messages) != [hashlib.sha256(one).digest() for one in messages]:
            return False
    return True


_many: Final = _best()


def sha256_all(messages: Messages) -> list[bytes]:
    """The digest of each. Any thread; others run meanwhile."""
    if len(messages) == 1:
        return [hashlib.sha256(messages[0]).digest()]
    digests: list[bytes] = []
    at = 0
    while at < len(messages):
        length, end = len(messages[at]), at + 1
        while end < len(messages) and end - at < AT_ONCE and len(messages[end]) == length:
            end += 1
        if _many is not None and end - at > 1 and length >= _LEAST:
            digests += _many(messages[at:end])
        else:
            digests += [hashlib.sha256(one).digest() for one in messages[at:end]]
        at = end
    return digests
