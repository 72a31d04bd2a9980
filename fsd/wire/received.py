"""Inodes and directory entries as they arrive from a server, checked field by field.

What a broken or hostile server says becomes numbers in the kernel's hands, keys of tables and names on local
disks: nothing goes further that could not be what it says it is.
"""

from __future__ import annotations

import stat
import struct
from typing import Any, Final

from fsd.model.attrs import Attr, Entry
from fsd.model.blocks import decode as decode_parts
from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import (
    FILE_MAX,
    NAME_MAX,
    SYMLINK_MAX,
    XATTR_NAME_MAX,
    XATTR_VALUE_MAX,
    XATTRS_TOTAL_MAX,
)

_COUNT_MAX: Final = 2**63  # what a column of the database holds, and one more
# An inode's numbers as a row has them, one call for types and ranges: number, mode, links, owner, group,
# size, three times, device, parent, and seqs.
_NUMBERS: Final = struct.Struct("<QHIIIQqqqQQQQQ")
_LINK: Final = stat.S_IFLNK
_KINDS: Final = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
)


def attr_from(row: Any) -> Attr:
    """An `Attr` from its wire row; raises `Unavailable` when it is none. Some 2 us: listings are of
    thousands."""
    if type(row) is not tuple or len(row) != len(Attr._fields):
        raise Unavailable("an inode in the answer cannot be read")
    ino, mode, _, _, _, size, _, _, _, rdev, target, parent, parts, xattrs, cseq, writer, born = row
    try:
        _NUMBERS.pack(*row[:10], parent, cseq, writer, born)
    except struct.error as exc:
        raise Unavailable("a number of an inode in the answer is none that can be") from exc
    if not ino or size > FILE_MAX or max(ino, rdev, parent, cseq, writer, born) >= _COUNT_MAX:
        raise Unavailable("a number of an inode in the answer is none that can be")
    kind = mode & 0o170000
    if kind not in _KINDS or (target is None) is (kind == _LINK):
        raise Unavailable(f"the inode {ino} in the answer is of no type there is")
    if target is not None and (type(target) is not bytes or b"\0" in target or not _has(target, SYMLINK_MAX)):
        raise Unavailable(f"the target of the link {ino} in the answer is none that can be")
    if parts is not None:
        _check_parts(parts)
    if xattrs is not None:
        _check_xattrs(xattrs)
    return Attr._make(row)


def _has(value: bytes, most: int) -> bool:
    return 0 < len(value) <= most


def _check_parts(parts: Any) -> None:
    if type(parts) is not bytes:
        raise Unavailable("the content of an inode in the answer cannot be read")
    try:
        decode_parts(parts)
    except FsdError as exc:
        raise Unavailable("the content of an inode in the answer cannot be read") from exc


def _check_xattrs(xattrs: Any) -> None:
    if type(xattrs) is not dict:
        raise Unavailable("the attributes of an inode in the answer cannot be read")
    total = 0
    for name, value in xattrs.items():
        if type(name) is not bytes or type(value) is not bytes:
            raise Unavailable("an attribute in the answer cannot be read")
        if not _has(name, XATTR_NAME_MAX) or b"\0" in name or len(value) > XATTR_VALUE_MAX:
            raise Unavailable("an attribute in the answer is none that can be")
        total += len(name) + len(value)
    if total > XATTRS_TOTAL_MAX:
        raise Unavailable("an inode in the answer has more attributes than one can have")


def entry_from(row: Any) -> Entry:
    """An `Entry` from its wire row, its name one that a directory can have; raises `Unavailable`."""
    if type(row) is not tuple or len(row) != 3 or not is_name(row[0]):
        raise Unavailable("a directory entry in the answer cannot be read")
    if type(row[2]) is not int or not 0 <= row[2] < _COUNT_MAX:
        raise Unavailable("a directory entry in the answer cannot be read")
    return Entry(row[0], attr_from(row[1]), row[2])


def is_name(value: Any) -> bool:
    """Whether `value` can be one name in a directory, and so joined to a path."""
    return (
        type(value) is bytes
        and 0 < len(value) <= NAME_MAX
        and b"/" not in value
        and b"\0" not in value
        and value not in (b".", b"..")
    )
