"""The bodies of the mount's hot routes, msgpack. Routes and JSON bodies are listed in docs/protocol.md.

Everything here is checked on arrival: a wrong type or range is a `UsageError`, never a traceback.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgpack

from fsd.model.errors import DamagedBody, TooLarge, Unavailable, UsageError
from fsd.model.limits import COMMIT_BLOBS_MAX, COMMIT_OPS_MAX, DRAIN_MAX, UPLOAD_BLOBS_MAX
from fsd.model.ops import CONFLICT, REFUSED, Op, Outcome, decode_all, encode_all
from fsd.model.space import Space
from fsd.wire.frame import Blob, pack_pieces, unpack
from fsd.wire.received import is_name

PROTOCOL: Final = 1
MEDIA_TYPE: Final = "application/x-fsd"
_COUNT_MAX: Final = 2**62
_ROWS_MAX: Final = 65_536  # of one list: more than a page of entries, a commit's outcomes or a change's names
_TICKET_MAX: Final = 64  # bytes; each record of the log's state has one
_ANSWER_TABLES: Final = 1000  # a commit's answer has those of its checkpoint


def packb(value: object) -> bytes:
    raw: bytes = msgpack.packb(value, use_bin_type=True)
    return raw


def unpackb(raw: bytes | bytearray, what: str, tables: int = 1) -> Any:
    """Decode a received body of at most `tables` maps; raises `UsageError` naming `what`."""
    try:
        return _unpacked(raw, tables)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise UsageError(f"{what} cannot be read") from exc


def _unpacked(raw: bytes | bytearray, tables: int) -> Any:
    """An empty map is one byte there and 64 in memory: a body that is full of them would take gigabytes."""
    left = tables

    def counted(table: dict[Any, Any]) -> dict[Any, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("more tables than the body can need")
        return table

    return msgpack.unpackb(
        raw, raw=False, use_list=False, object_hook=counted, max_array_len=_ROWS_MAX, max_map_len=_ROWS_MAX
    )


class Mark(NamedTuple):
    """A commit of the filesystem and when it was made, ns. Whoever shows it proves to have seen this very
    history, and not one that ended when the service went back to an older copy of its data. `seq` 0: it has
    seen none."""

    seq: int
    at: int


NO_MARK: Final = Mark(0, 0)


class Commit(NamedTuple):
    """A commit request. `ticket` is the one the last commit (or the session's start) answered; `ops_raw` the
    encoded operations, which `ops` are; `digest` SHA-256 over it. `pending` is (operations, files, bytes)
    left behind it, for the server's record of the session. `blobs` travel in the same body, at most
    COMMIT_BLOBS_MAX.
    `checkpoint` asks for one of the state after it: the fields of POST …/checkpoints, and `partial`, which
    allows it though operations were refused. It is made in the same transaction, if all were done. `fence`:
    that of the writer lease the operations were made under, 0: under none. `known`: the newest commit they
    were made on; None: an older client's."""

    session: int
    ticket: bytes
    ops_raw: bytes
    digest: bytes
    pending: tuple[int, int, int]
    blobs: list[Blob]
    ops: list[Op]
    checkpoint: dict[str, Any] | None = None
    fence: int = 0
    known: Mark | None = None


def make_commit(
    session: int,
    ticket: bytes,
    ops: list[Op],
    pending: tuple[int, int, int],
    blobs: list[Blob],
    checkpoint: dict[str, Any] | None = None,
    fence: int = 0,
    known: Mark | None = None,
) -> Commit:
    raw = encode_all(ops)
    digest = hashlib.sha256(raw).digest()
    return Commit(session, ticket, raw, digest, pending, blobs, ops, checkpoint, fence, known)


def commit_pieces(commit: Commit) -> list[bytes | memoryview]:
    """The body of POST …/commits as pieces for `sendmsg`."""
    header: dict[str, Any] = {
        "v": PROTOCOL,
        "session": commit.session,
        "ticket": commit.ticket,
        "ops": commit.ops_raw,
        "digest": commit.digest,
        "pending": commit.pending,
    }
    if commit.checkpoint is not None:
        header["checkpoint"] = commit.checkpoint
    if commit.fence:
        header["fence"] = commit.fence
    if commit.known is not None:
        header["known"] = commit.known
    return pack_pieces(header, commit.blobs)


def read_frame(
    body: bytes | bytearray, *, blobs_max: int, bytes_max: int, views: bool = False
) -> tuple[dict[str, Any], list[Blob]]:
    """`unpack` for the receiver of a request: raises `TooLarge`, and `DamagedBody` for what is no frame."""
    try:
        return unpack(body, blobs_max=blobs_max, bytes_max=bytes_max, views=views)
    except TooLarge:
        raise
    except UsageError as exc:
        raise DamagedBody(exc.message) from exc


def read_commit(body: bytes | bytearray) -> Commit:
    """The commit in a received body, its operations decoded and counted; raises `UsageError`, `TooLarge`,
    `DamagedBody`."""
    header, blobs = read_frame(body, blobs_max=UPLOAD_BLOBS_MAX, bytes_max=COMMIT_BLOBS_MAX)
    try:
        operations, files, size = header["pending"]
        commit = Commit(
            _count(header["session"]),
            _exact(header["ticket"], bytes),
            _exact(header["ops"], bytes),
            _exact(header["digest"], bytes),
            (_count(operations), _count(files), _count(size)),
            blobs,
            [],
            _asked(header.get("checkpoint")),
            _count(header.get("fence", 0)),
            _mark(header.get("known")),
        )
        version = header["v"]
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError("the commit's header lacks a field or has one of a wrong type") from exc
    if version != PROTOCOL:
        raise UsageError(f"protocol version {version}, this server speaks {PROTOCOL}")
    if hashlib.sha256(commit.ops_raw).digest() != commit.digest:
        raise DamagedBody("the commit's operations do not match their digest")
    ops = decode_all(commit.ops_raw)
    if len(ops) > COMMIT_OPS_MAX:
        raise TooLarge(f"{len(ops)} operations in one commit, at most {COMMIT_OPS_MAX}")
    return commit._replace(ops=ops)


class CommitAnswer(NamedTuple):
    """What a commit was answered.

    Applied: `seq` is the filesystem's new seq (unchanged when nothing changed), `ticket` the next commit's,
    `next_op` one more than the last operation that has an outcome now, `outcomes` those not simply applied.
    Every row an applied operation touched has `born` = `seq` afterwards; a content operation's new content
    seq is `seq` too. `missing` not empty: nothing was applied, send these blobs first (ticket unchanged).
    `need_full`: operations before this number were applied as told; this content operation meets a
    conflict and must be sent again with its full block list; 0 otherwise. `checkpoint`: the one that was
    asked for, or {"error": …} why it was not made; None: not asked for, or not everything was done. `at`:
    when `seq` was made, ns, for `Mark`; 0: this commit did not make it, or the client is an older one.
    """

    seq: int
    ticket: bytes
    next_op: int
    outcomes: tuple[Outcome, ...]
    missing: tuple[bytes, ...]
    need_full: int
    checkpoint: dict[str, Any] | None = None
    at: int = 0

    def encode(self) -> bytes:
        # What stands at the end is left out where there is nothing to say: an older client reads that.
        said = 8 if self.at else 7 if self.checkpoint is not None else 6
        return packb(self[:said])


def read_answer(raw: bytes) -> CommitAnswer:
    """A received commit answer; raises `Unavailable` when the body is none (empty, truncated, HTML)."""
    try:
        seq, ticket, next_op, outcomes, missing, need_full, *more = _unpacked(raw, _ANSWER_TABLES)
        return CommitAnswer(
            _count(seq),
            _ticket(ticket),
            _count(next_op),
            tuple(_outcome(one) for one in _exact(outcomes, tuple)),
            tuple(_digest(one) for one in _exact(missing, tuple)),
            _count(need_full),
            _asked(more[0]) if more else None,
            _count(more[1]) if len(more) > 1 else 0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise Unavailable("the answer to a commit is no answer (cut or changed on the way)") from exc


def _ticket(value: Any) -> bytes:
    if type(value) is not bytes or len(value) > _TICKET_MAX:
        raise TypeError("a ticket expected")
    return value


def _outcome(row: Any) -> Outcome:
    """Raises `TypeError`, `ValueError`."""
    made = Outcome._make(_exact(row, tuple))
    for number in (made.opno, made.errno, made.ino, made.parent):
        _count(number)
    if made.status not in (CONFLICT, REFUSED) or type(made.name) is not bytes or type(made.reason) is not str:
        raise TypeError("an outcome has other types")
    if made.name and not is_name(made.name):
        raise ValueError("an outcome's name is none")
    return made


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise TypeError("a hash expected")
    return value


def _count(value: Any) -> int:
    """A number that a database column holds."""
    if type(value) is not int or not 0 <= value < _COUNT_MAX:
        raise ValueError("a count is out of range")
    return value


def _mark(value: Any) -> Mark | None:
    if value is None:
        return None
    seq, at = value
    return Mark(_count(seq), _count(at))


def _asked(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError("the fields of a checkpoint expected")
    return value


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    return value


# Namespace questions: POST …/ns with a list of rows, answered with a list of the same length, all read in
# one transaction: {"seq": int, "answers": [...]}. An answer that cannot be given is None where said.
LOOKUP: Final = "lookup"  # (LOOKUP, parent, name, dir_max) -> (Entry|None, [Entry…]|None)
#   the second is the whole directory when it has at most dir_max entries, else None. Parent gone: None.
LIST: Final = "list"  # (LIST, ino, after_name, limit) -> ([Entry…], more: bool); ino gone: None
ATTRS: Final = "attrs"  # (ATTRS, (ino, …)) -> [Attr|None, …]
BLOCKS: Final = "blocks"  # (BLOCKS, ino, first, count) -> (cseq, [(index, parts)…]); ino gone: None
TREE: Final = "tree"  # (TREE, ino, limit) -> [(dir ino, [Entry…])…]: whole directories, breadth first, while
#   at most limit entries in all (the first one always, up to DIR_INLINE_MAX); ino gone: None
PATH: Final = "path"  # (PATH, (name, …)) -> [Entry|None, …]: each component from the root, None from the
#   first that does not exist


class Change(NamedTuple):
    """One commit as the change feed tells it. `session` made it (0: a direct command or the server).
    `inodes`: attributes or content changed or the inode went; `names`: (parent, name) added, moved, removed.
    """

    seq: int
    session: int
    inodes: tuple[int, ...]
    names: tuple[tuple[int, bytes], ...]


class LeaseSeen(NamedTuple):
    """A writer lease as the change feed tells it. `ino` is the top of its subtree, `session` whose it is,
    `told` says so to people. `above`: the reader's whole mount lies in that subtree."""

    fence: int
    ino: int
    session: int
    told: str
    above: bool


class BarrierAsk(NamedTuple):
    """Somebody makes a checkpoint from outside and wants in it what this mount holds: the mount commits all
    that was written before and answers `POST …/sessions/{n}/barrier` with `id`, within `left_ms`."""

    id: int
    left_ms: int


class FeedPage(NamedTuple):
    """`head` is the filesystem's seq when read. `reset`: the reader is too far behind; it forgets what it
    knows and continues from `head`. `leases`: the writer leases that bind now, all of them. `asks`: barriers
    the reader's session is asked for and has not answered, those it has not seen (its `asked`). `space`: the
    room the server has for bytes; None: it does not say. `mark`: the newest commit the page tells of, where
    the reader does not know it."""

    head: int
    changes: tuple[Change, ...]
    reset: bool
    leases: tuple[LeaseSeen, ...] = ()
    asks: tuple[BarrierAsk, ...] = ()
    space: Space | None = None
    mark: Mark | None = None

    def encode(self) -> bytes:
        # What stands at the end is left out where there is nothing to say.
        said = 7 if self.mark else 6 if self.space else 5 if self.asks else 4 if self.leases else 3
        return packb(self[:said])


def _change(row: Any) -> Change:
    seq, session, inodes, names = _exact(row, tuple)
    told = []
    for parent, name in _exact(names, tuple):
        if not is_name(name):
            raise ValueError("a name of a change is none")
        told.append((_count(parent), name))
    return Change(
        _count(seq), _count(session), tuple(_count(ino) for ino in _exact(inodes, tuple)), tuple(told)
    )


def _lease(row: Any) -> LeaseSeen:
    fence, ino, session, told, above = _exact(row, tuple)
    return LeaseSeen(_count(fence), _count(ino), _count(session), _exact(told, str), _exact(above, bool))


def _ask(row: Any) -> BarrierAsk:
    """Never longer than may be asked for. A replica whose clock is behind that of the one that asked says
    more: that is no reason to go without the page."""
    number, left_ms = _exact(row, tuple)
    return BarrierAsk(_count(number), min(_count(left_ms), int(1000 * DRAIN_MAX)))


def read_feed(raw: bytes) -> FeedPage:
    """A received feed page; raises `Unavailable`."""
    try:
        head, changes, reset, *more = _unpacked(raw, 0)
        return FeedPage(
            _count(head),
            tuple(_change(one) for one in _exact(changes, tuple)),
            _exact(reset, bool),
            tuple(_lease(one) for one in _exact(more[0], tuple)) if more else (),
            tuple(_ask(one) for one in _exact(more[1], tuple)) if len(more) > 1 else (),
            Space._make(_count(one) for one in more[2]) if len(more) > 2 and more[2] is not None else None,
            _mark(more[3]) if len(more) > 3 else None,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as exc:
        raise Unavailable("a page of the change feed is no answer (cut or changed on the way)") from exc
