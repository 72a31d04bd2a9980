"""Copying the rows of a fork from its origin, in chunks that are complete in themselves.

A chunk is one transaction: the next rows of a table as they were at the seq of the fork, their blobs' rows
and counts, and how far the copy is (`fork.stage`, `key_a`, `key_b`). Whoever does the next one begins there,
so a crash or another process loses and doubles nothing. Rows keep `born`: what sessions know of them stays
true, and "changed since the fork" is an ordinary difference.

Blob rows of a fork point into packs that its ancestors wrote. A chunk holds the lock of the filesystem it
reads from: whoever removes blob rows of that one holds it too, so at any time one of the rows is there to
see, and no pack goes in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from fsd.meta.database import Tx
from fsd.meta.sql import MAX
from fsd.model import blocks
from fsd.model.limits import FORK_CHUNK
from fsd.model.plain import dataclass

# The state at the seq. `fs` is only compared together with the key: a plain `fs=?` leads PostgreSQL to the
# index of births, and through the whole filesystem for each chunk.
_SEEN: Final = "+born<=? AND +died>?"


@dataclass(frozen=True, slots=True)
class _Stage:
    """One table's copy. `select` gives the next keys and parts of a chunk (source, the last key, source + 1,
    seq twice, limit); `insert` copies the rows between two keys (fork, then source and key twice, seq
    twice)."""

    select: str
    insert: str


def _stage(table: str, key: str, values: str, parts: str) -> _Stage:
    first = key.partition(",")[0]
    marks = "(" + ",".join("?" * (key.count(",") + 2)) + ")"
    return _Stage(
        f"SELECT {key}, {parts} FROM {table} WHERE (fs, {key})>{marks} AND (fs, {first})<(?, 0) "
        f"AND {_SEEN} ORDER BY fs, {key} LIMIT ?",
        f"INSERT INTO {table} (fs, {key}, {values}, born, died) "
        f"SELECT CAST(? AS BIGINT), {key}, {values}, born, {MAX} FROM {table} "
        f"WHERE (fs, {key})>{marks} AND (fs, {key})<={marks} AND {_SEEN}",
    )


STAGES: Final = (
    _stage(
        "inode",
        "ino",
        "mode, nlink, uid, gid, size, atime, mtime, ctime, rdev, target, parent, parts, xattrs, cseq, "
        "writer, grown",
        "parts",
    ),
    _stage("block", "ino, idx", "parts", "parts"),
    _stage("dentry", "parent, name", "ino, writer", "NULL"),
)
BLOB: Final = (
    "INSERT INTO blob (fs, hash, pack, off, raw_len, stored_len, codec, refs, fresh) "
    "SELECT CAST(? AS BIGINT), hash, pack, off, raw_len, stored_len, codec, CAST(? AS BIGINT), "
    "CAST(? AS BIGINT) FROM blob WHERE fs=? AND hash=? "
    "ON CONFLICT (fs, hash) DO UPDATE SET refs=blob.refs+excluded.refs, fresh=excluded.fresh"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a copy is: `stage` is a number of STAGES, or past them; the key it got to."""

    stage: int
    key_a: int
    key_b: bytes


START: Final = Progress(0, 0, b"")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one chunk copied, and where the next begins."""

    next: Progress
    rows: int
    inodes: int
    storage_bytes: int


def copy_chunk(tx: Tx, source: int, fork: int, seq: int, at: Progress, now: int) -> Chunk:
    """Copy the next rows of `source` at `seq`; the caller holds both locks and stores the progress."""
    stage = STAGES[at.stage]
    last = _key(at)
    found = tx.all(stage.select, (source, *last, source + 1, seq, seq, FORK_CHUNK))
    if not found:
        return Chunk(Progress(at.stage + 1, 0, b""), 0, 0, 0)
    end = found[-1][:-1]
    tx.execute(stage.insert, (fork, source, *last, source, *end, seq, seq))
    refs, stored = _count(row[-1] for row in found)
    copy_blobs(tx, source, fork, refs, now)
    following = _progress(at.stage, end)
    if len(found) < FORK_CHUNK:
        following = Progress(at.stage + 1, 0, b"")
    return Chunk(following, len(found), len(found) if at.stage == 0 else 0, stored)


def copy_blobs(tx: Tx, source: int, target: int, refs: dict[bytes, int], now: int) -> None:
    """Rows for blobs of `source` in `target`, counted as often as `refs` says more, in order of hash."""
    if refs:
        tx.many(BLOB, [(target, refs[digest], now, source, digest) for digest in sorted(refs)])


def _count(parts: Any) -> tuple[dict[bytes, int], int]:
    """The references of rows with these parts, and the bytes they name."""
    refs: dict[bytes, int] = defaultdict(int)
    stored = 0
    for raw in parts:
        if raw is not None:
            decoded = blocks.decode(raw)
            stored += blocks.stored_bytes(decoded)
            for digest in blocks.hashes(decoded):
                refs[digest] += 1
    return refs, stored


def _key(at: Progress) -> tuple[object, ...]:
    """The last key copied, as the stage's columns."""
    if at.stage == 0:
        return (at.key_a,)
    if at.stage == 1:
        return (at.key_a, int.from_bytes(at.key_b))
    return (at.key_a, at.key_b)


def _progress(stage: int, key: Sequence[Any]) -> Progress:
    if stage == 0:
        return Progress(stage, int(key[0]), b"")
    if stage == 1:
        return Progress(stage, int(key[0]), int(key[1]).to_bytes(8))
    return Progress(stage, int(key[0]), key[1])
