"""A block of content: up to 1 MiB of a file, a base blob and up to 16 patches.

A `Part` says: bytes [off, off+length) of the block are bytes [boff, boff+length) of the blob `hash`.
Later parts win. Bytes no part covers are zero (a hole). Offsets are inside the block. A part may use only
a piece of its blob, so a truncation or an append elsewhere never needs the bytes again.

Stored and sent as msgpack bytes (`encode`); equal bytes mean equal content by construction, not the reverse.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgpack

from fsd.model.errors import UsageError
from fsd.model.limits import BLOCK, PATCHES_MAX
from fsd.model.packing import packb

HASH_LEN = 32


class Part(NamedTuple):
    """One piece of a block. `off`, `length`, `boff` in bytes; `hash` is the blob's SHA-256."""

    off: int
    length: int
    boff: int
    hash: bytes


Parts = tuple[Part, ...]
HOLE: Parts = ()


def encode(parts: Parts) -> bytes | None:
    """The stored form; None for a hole."""
    if not parts:
        return None
    return packb(parts)


def decode(raw: bytes | None) -> Parts:
    """The parts of a stored or received block; raises `UsageError` when they break a rule above."""
    if raw is None:
        return HOLE
    return _recently(raw) if type(raw) is bytes else _decoded(raw)


def _decoded(raw: bytes) -> Parts:
    try:
        rows = msgpack.unpackb(raw, raw=False, use_list=False)
        parts = tuple(Part(*row) for row in rows)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise UsageError("a block's parts cannot be read") from exc
    if len(parts) > PATCHES_MAX + 1:
        raise UsageError(f"a block has {len(parts)} parts, at most {PATCHES_MAX + 1}")
    for off, length, boff, digest in parts:
        if not (isinstance(off, int) and isinstance(length, int) and isinstance(boff, int)):
            raise UsageError("a part's offsets are integers")
        if not (off >= 0 and boff >= 0 and length > 0 and off + length <= BLOCK and boff + length <= BLOCK):
            raise UsageError("a part lies outside its block")
        if not isinstance(digest, bytes) or len(digest) != HASH_LEN:
            raise UsageError("a part's hash has not 32 bytes")
    return parts


# A commit looks at the parts of a block five times, and the next one of the file at the same again: a
# database on a rollback journal has up to 17 of them.
_recently = functools.lru_cache(maxsize=256)(_decoded)


def hashes(parts: Parts) -> set[bytes]:
    """The distinct blobs named; each counts as one reference of the row that holds the parts."""
    return {part.hash for part in parts}


def clip(parts: Parts, length: int) -> Parts:
    """The same block cut to its first `length` bytes: what lies behind never comes back."""
    kept = []
    for part in parts:
        if part.off >= length:
            continue
        kept.append(part if part.off + part.length <= length else part._replace(length=length - part.off))
    return tuple(kept)


def overlay(parts: Parts, patch: Part) -> Parts:
    """`parts` with `patch` on top; parts it hides whole are dropped. May exceed the limit: fold then."""
    end = patch.off + patch.length
    kept = [p for p in parts if not (p.off >= patch.off and p.off + p.length <= end)]
    kept.append(patch)
    return tuple(kept)


def without(parts: Parts, off: int, length: int) -> Parts:
    """`parts` with nothing in [off, off+length): a hole there. May exceed the limit: fold then."""
    end = off + length
    kept = []
    for part in parts:
        stop = part.off + part.length
        if part.off >= end or stop <= off:
            kept.append(part)
            continue
        if part.off < off:
            kept.append(part._replace(length=off - part.off))
        if stop > end:
            kept.append(Part(end, stop - end, part.boff + end - part.off, part.hash))
    return tuple(kept)


class Piece(NamedTuple):
    """`length` bytes at `at` of the wanted range come from the blob at `boff`."""

    at: int
    length: int
    boff: int
    hash: bytes


def pieces(parts: Parts, off: int, length: int) -> list[Piece]:
    """What to copy, in order, onto zeros to get bytes [off, off+length) of the block; later ones win."""
    found = []
    for part in parts:
        start = max(off, part.off)
        stop = min(off + length, part.off + part.length)
        if start < stop:
            found.append(Piece(start - off, stop - start, part.boff + start - part.off, part.hash))
    return found


def seen(found: list[Piece]) -> list[Piece]:
    """Of `pieces` those that no single later one hides whole: the blobs of others are not needed."""
    if len(found) < 2:
        return found
    kept: list[Piece] = []
    for piece in reversed(found):
        end = piece.at + piece.length
        if not any(k.at <= piece.at and end <= k.at + k.length for k in kept):
            kept.append(piece)
    return kept[::-1]


def covered(parts: Parts, start: int = 0, stop: int = BLOCK) -> int:
    """Bytes of [start, stop) of the block that some part covers: the rest is a hole."""
    total, done = 0, start
    for off, length, _, _ in sorted(parts) if len(parts) > 1 else parts:
        end = min(off + length, stop)
        total += max(0, end - max(off, done))
        done = max(done, end)
    return total


def stored_bytes(parts: Parts) -> int:
    """Bytes the parts cover, holes apart (an upper bound where patches overlap their base)."""
    return min(BLOCK, sum(part.length for part in parts))
