"""Payloads of the log's records, msgpack. Format version in `State`; N reads N and N-1, refuses N+1."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgpack

from fsd.model.blocks import decode as decode_parts
from fsd.model.errors import FormatTooNew, IntegrityError, UsageError
from fsd.model.ops import Content as ContentOp
from fsd.model.ops import Op, Outcome, decode_one
from fsd.vfs.build import Source
from fsd.vfs.content import Blocks, part_rows

FORMAT: Final = 1


class State(NamedTuple):
    """The session a log belongs to; first record of every segment and at every change of session.

    `ticket` is the next commit's; `shift` is what to subtract from a local operation number to get the one on
    the wire; `wire` maps local inode numbers to those on the wire where they differ. `acked` is one more
    than the newest acknowledged operation (local number). `boot` is the kernel's boot id.
    """

    format: int
    session: int
    ticket: bytes
    shift: int
    acked: int
    wire: tuple[tuple[int, int], ...]
    boot: str
    file_system: str
    mount_id: str


class Base(NamedTuple):
    """What the server had when a file's changes began, or when a flight of it landed and more was left.

    `frozen`: changes before this log position are in it. `blocks` None: too many to write down.
    """

    cseq: int
    size: int
    mtime: int
    ctime: int
    frozen: int
    blocks: tuple[tuple[int, bytes | None], ...] | None


class Flown(NamedTuple):
    """A content operation as it will be sent, however often. `frozen`: it covers changes before this log
    position. `blocks` is the complete new list (None: too many)."""

    op: ContentOp
    frozen: int
    sources: tuple[Source, ...]
    blocks: tuple[tuple[int, bytes | None], ...] | None


class Ack(NamedTuple):
    """A commit was answered: operations below `acked` (local number) are done, as of `seq`."""

    seq: int
    ticket: bytes
    acked: int
    outcomes: tuple[Outcome, ...]


BASE_BLOCKS_MAX: Final = 4096


def packb(value: object) -> bytes:
    raw: bytes = msgpack.packb(value, use_bin_type=True)
    return raw


def listed(blocks: Blocks) -> tuple[tuple[int, bytes | None], ...] | None:
    """A block list for a record; None above BASE_BLOCKS_MAX."""
    return tuple(part_rows(blocks)) if len(blocks) <= BASE_BLOCKS_MAX else None


def blocks_of(rows: tuple[tuple[int, bytes | None], ...] | None) -> Blocks | None:
    return None if rows is None else {index: decode_parts(raw) for index, raw in rows}


def _load(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(raw, raw=False, use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise IntegrityError("a record of the log cannot be read") from exc


def read_state(raw: bytes) -> State:
    """Raises `FormatTooNew`, `IntegrityError`."""
    row = _load(raw)
    if row[0] > FORMAT:
        raise FormatTooNew(f"the state directory has format {row[0]}, this version reads {FORMAT}")
    return State._make(row)


def read_op(raw: bytes) -> Op:
    return _op(_load(raw))


def _op(row: object) -> Op:
    try:
        return decode_one(row)
    except UsageError as exc:
        raise IntegrityError("an operation in the log cannot be read") from exc


def read_base(raw: bytes) -> Base:
    return Base._make(_load(raw))


def read_flown(raw: bytes) -> Flown:
    op, frozen, sources, blocks = _load(raw)
    content = _op(op)
    if not isinstance(content, ContentOp):
        raise IntegrityError("a content record holds another operation")
    return Flown(content, frozen, tuple(Source._make(s) for s in sources), blocks)


def read_ack(raw: bytes) -> Ack:
    seq, ticket, acked, outcomes = _load(raw)
    return Ack(seq, ticket, acked, tuple(Outcome._make(o) for o in outcomes))


def read_numbers(raw: bytes) -> tuple[int, ...]:
    return tuple(_load(raw))
