"""Operations: what a mount session asks a commit to do, in order.

Each is a tuple `(opno, kind, …)`, the same in the log, in the digest and on the wire. `opno` rises strictly
within a session; numbers may be missing where an operation was cancelled before it was sent. Times are ns
from the clock of the machine that made the change. `base…` fields hold the seq of what the change was made
on (0: known to be absent); a version written by the same session is never a conflict, whatever the base.

The server applies an operation or gives it an outcome; it never stops at one, except that a content
operation without a full block list that meets a conflict is answered `need_full` (see wire.messages).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from fsd.model.errors import UsageError

CREATE: Final = 1
LINK: Final = 2
UNLINK: Final = 3
RMDIR: Final = 4
RENAME: Final = 5
SETATTR: Final = 6
SETXATTR: Final = 7
CONTENT: Final = 8

REMOVALS: Final = frozenset((UNLINK, RMDIR))

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2


class Create(NamedTuple):
    """A new inode of any type under a name believed free. `mode` is the whole st_mode; `rdev` for device
    nodes; `target` for symlinks. All three times are `time`. A new regular file is empty until `Content`."""

    opno: int
    kind: int
    parent: int
    name: bytes
    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    target: bytes | None
    time: int


class Link(NamedTuple):
    """A further name for `ino`."""

    opno: int
    kind: int
    ino: int
    parent: int
    name: bytes
    time: int


class Unlink(NamedTuple):
    """Remove a name of a non-directory. `ino` is what the name meant, `base` the content seq it had."""

    opno: int
    kind: int
    parent: int
    name: bytes
    ino: int
    base: int
    time: int


class Rmdir(NamedTuple):
    """Remove a directory believed empty."""

    opno: int
    kind: int
    parent: int
    name: bytes
    ino: int
    time: int


class Rename(NamedTuple):
    """`ino` moves from one name to another. `flags` as renameat2: 0, NOREPLACE, EXCHANGE. `over` is the inode
    believed at the target (0: none), `over_base` its content seq."""

    opno: int
    kind: int
    parent: int
    name: bytes
    ino: int
    new_parent: int
    new_name: bytes
    flags: int
    over: int
    over_base: int
    time: int


class Setattr(NamedTuple):
    """Attributes that changed; None leaves a field. `mode` holds permission bits (07777) only. Size is not
    among them: it belongs to `Content`."""

    opno: int
    kind: int
    ino: int
    mode: int | None
    uid: int | None
    gid: int | None
    atime: int | None
    mtime: int | None
    ctime: int


class Setxattr(NamedTuple):
    """Set one extended attribute, or remove it (`value` None)."""

    opno: int
    kind: int
    ino: int
    name: bytes
    value: bytes | None
    time: int


class Content(NamedTuple):
    """New content of a regular file, complete and consistent: size, times and blocks together.

    `base` is the content seq it was made on (0: created by this session and never flushed). `blocks` holds
    `(index, parts)` pairs, parts in stored form (None: a hole). With `full` it is the complete list: every
    block not named is a hole. Without, blocks not named keep what they had, cut to `size`. `appended_from`
    is the size before, when every change since the base was an append through O_APPEND handles, else None.
    """

    opno: int
    kind: int
    ino: int
    base: int
    size: int
    blocks: tuple[tuple[int, bytes | None], ...]
    full: bool
    appended_from: int | None
    mtime: int
    ctime: int


Op: TypeAlias = Create | Link | Unlink | Rmdir | Rename | Setattr | Setxattr | Content

_int, _bytes = (int,), (bytes,)
_none = type(None)
_FORMS: dict[int, tuple[Callable[[Any], Op], tuple[tuple[type, ...], ...]]] = {
    CREATE: (Create._make, (_int, _int, _int, _bytes, _int, _int, _int, _int, _int, (bytes, _none), _int)),
    LINK: (Link._make, (_int, _int, _int, _int, _bytes, _int)),
    UNLINK: (Unlink._make, (_int, _int, _int, _bytes, _int, _int, _int)),
    RMDIR: (Rmdir._make, (_int, _int, _int, _bytes, _int, _int)),
    RENAME: (Rename._make, (_int, _int, _int, _bytes, _int, _int, _bytes, _int, _int, _int, _int)),
    SETATTR: (Setattr._make, (_int, _int, _int, *((int, _none),) * 5, _int)),
    SETXATTR: (Setxattr._make, (_int, _int, _int, _bytes, (bytes, _none), _int)),
    CONTENT: (
        Content._make,
        (_int, _int, _int, _int, _int, (tuple,), (bool,), (int, _none), _int, _int),
    ),
}


def encode_all(ops: list[Op]) -> bytes:
    """The bytes a commit carries and its digest is taken over."""
    packed: bytes = msgpack.packb(ops, use_bin_type=True)
    return packed


def decode_one(row: object) -> Op:
    """One operation from its received or logged row; raises `UsageError` naming what is wrong."""
    if not isinstance(row, tuple) or len(row) < 2 or type(row[1]) is not int or row[1] not in _FORMS:
        raise UsageError("not an operation, or one of an unknown kind")
    make, types = _FORMS[row[1]]
    if len(row) != len(types):
        raise UsageError(f"operation kind {row[1]} has {len(types)} fields, not {len(row)}")
    for at, (value, allowed) in enumerate(zip(row, types)):
        # type(), not isinstance: a bool is no number here.
        if type(value) not in allowed or (type(value) is int and not -(2**63) <= value < 2**63):
            raise UsageError(f"field {at} of operation kind {row[1]} is of the wrong type or range")
    return make(row)


def decode_all(raw: bytes) -> list[Op]:
    """The operations in `raw` (as `encode_all` made it); raises `UsageError`."""
    try:
        rows = msgpack.unpackb(raw, raw=False, use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise UsageError("the operations cannot be read") from exc
    if not isinstance(rows, tuple):
        raise UsageError("the operations are no list")
    ops = [decode_one(row) for row in rows]
    for before, after in pairwise(ops):
        if after.opno <= before.opno:
            raise UsageError("operation numbers do not rise")
    return ops


# Outcomes: what became of one operation. Only those that were not simply applied travel.
CONFLICT: Final = "conflict"
REFUSED: Final = "refused"


class Outcome(NamedTuple):
    """What became of an operation that was not simply applied.

    CONFLICT: the change was kept, but somewhere else: under (`parent`, `name`), as inode `ino` (which may be
    the old one; 0 when the change was dropped because the other side's prevails, for example the removal of
    a file the other changed). REFUSED: `errno` says why; nothing of it was done. `reason` is for people.
    """

    opno: int
    status: str
    errno: int
    ino: int
    parent: int
    name: bytes
    reason: str
