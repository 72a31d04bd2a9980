"""Payloads of the log's records, msgpack. Format version in `State`; N reads N and N-1, refuses N+1."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import msgpack

from fsd.model.blocks import clip
from fsd.model.blocks import decode as decode_parts
from fsd.model.errors import FormatTooNew, IntegrityError, UsageError
from fsd.model.limits import BLOCK
from fsd.model.ops import Content as ContentOp
from fsd.model.ops import Create, Op, Outcome, decode_one
from fsd.model.packing import packb as packb
from fsd.vfs.build import Source
from fsd.vfs.content import Blocks

FORMAT: Final = 4  # 2: `State.fence`; 3: `State.mark`, `Ack.at`; 4: PUNCH, SHARE, UNNAMED
TIME: Final = struct.Struct(">QB")  # before the data of a WRITE: time of the change, 1 for an append
LENGTH: Final = struct.Struct(">Q")  # of a PUNCH, behind its time


class State(NamedTuple):
    """The session a log belongs to; first record of every segment and at every change of session.

    `ticket` is the next commit's; `shift` is what to subtract from a local operation number to get the one on
    the wire; `wire` maps local inode numbers to those on the wire where they differ. `acked` is one more
    than the newest acknowledged operation (local number). `boot` is the kernel's boot id. `fence` is that of
    the writer lease the operations are made under, 0: under none. `mark` is the newest commit seen, and its
    time: what shows a service that went back to an older copy.
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
    fence: int = 0
    mark: tuple[int, int] = (0, 0)


class Base(NamedTuple):
    """What the server had when a file's changes began, or when a flight of it landed and more was left.

    `frozen`: changes before this log position are in it. `parent`, `name`: where it was, as far as known.
    `blocks` is the complete block list.
    """

    cseq: int
    size: int
    mtime: int
    ctime: int
    frozen: int
    parent: int
    name: bytes
    mode: int
    uid: int
    gid: int
    blocks: tuple[tuple[int, bytes | None], ...]


class Flown(NamedTuple):
    """A content operation as it will be sent, however often. `frozen`: it covers changes before this log
    position. Its block list is what it names, on the list before it where it is not full."""

    op: ContentOp
    frozen: int
    sources: tuple[Source, ...]


class Reserved(NamedTuple):
    """An operation number kept for a file's content as it was at log position `frozen`."""

    opno: int
    ino: int
    frozen: int
    size: int
    mtime: int
    ctime: int
    appended_from: int | None


class Ack(NamedTuple):
    """A commit was answered: operations below `acked` (local number) are done, as of `seq`, which was made
    `at` (0: it was not made by this commit)."""

    seq: int
    ticket: bytes
    acked: int
    outcomes: tuple[Outcome, ...]
    at: int = 0


class Cancel(NamedTuple):
    """Operations that are never sent, all there were of one inode, and what of them remains: the directory's
    times, an operation of its own (or a later form of one that was logged before)."""

    opnos: tuple[int, ...]
    times: Op


class Apart(NamedTuple):
    """`ino` is the file `other` on the server, and both were changed here: what `ino` holds becomes a file of
    its own, made by `create` (whose inode is `ino`, `wire` on the wire), its content operations `opnos` are
    never sent, and what else was done to it was done to `other`."""

    ino: int
    other: int
    opnos: tuple[int, ...]
    create: Create
    wire: int


def time_of_nameless(mtime: int) -> bytes:
    """What stands before a change, for a file that has no name, whose time a user may have set. One before
    1970, for which TIME has no sign, is written as 1970: a name comes with the file's own times in an
    operation behind it, and without a name nobody asks."""
    return TIME.pack(max(0, mtime), 0)


class Shared(NamedTuple):
    """Bytes [start, end) of a file are those of the stored blob `hash` from `boff` on."""

    start: int
    end: int
    hash: bytes
    boff: int


def read_shared(raw: bytes) -> list[Shared]:
    """What a SHARE says behind its time. The position of piece n is that of its payload, and n: as a run's it
    is no other's."""
    return [Shared._make(row) for row in _load(raw)]


def blocks_of(rows: tuple[tuple[int, bytes | None], ...]) -> Blocks:
    """A complete block list from a record or a full operation."""
    return {index: decode_parts(raw) for index, raw in rows if raw is not None}


def result_of(before: Blocks, op: ContentOp) -> Blocks:
    """The block list a content operation leads to."""
    if op.full:
        return blocks_of(op.blocks)
    after: Blocks = {}
    for index, parts in before.items():
        room = op.size - index * BLOCK
        kept = clip(parts, room) if room > 0 else ()
        if kept:
            after[index] = kept
    for index, raw in op.blocks:
        parts = decode_parts(raw)
        if parts:
            after[index] = parts
        else:
            after.pop(index, None)
    return after


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
    return State(*row)


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
    op, frozen, sources = _load(raw)
    content = _op(op)
    if not isinstance(content, ContentOp):
        raise IntegrityError("a content record holds another operation")
    return Flown(content, frozen, tuple(Source._make(s) for s in sources))


def read_reserved(raw: bytes) -> Reserved:
    return Reserved._make(_load(raw))


def read_ack(raw: bytes) -> Ack:
    seq, ticket, acked, outcomes, *at = _load(raw)
    return Ack(seq, ticket, acked, tuple(Outcome._make(o) for o in outcomes), *at)


def read_cancel(raw: bytes) -> Cancel:
    opnos, times = _load(raw)
    return Cancel(tuple(opnos), _op(times))


def read_apart(raw: bytes) -> Apart:
    ino, other, opnos, create, wire = _load(raw)
    op = _op(create)
    if not isinstance(op, Create):
        raise IntegrityError("a file is set apart by another operation than its making")
    return Apart(ino, other, tuple(opnos), op, wire)
