"""Mode, owner, group and extended attributes in a merge: each is three-way for itself. Pure."""

from __future__ import annotations

import stat
from typing import Final

from fsd.model.attrs import Attr
from fsd.service.mergewords import Edit
from fsd.service.view import Node, decode_xattrs

ORDINARY: Final = 0o755  # the mode of a directory nobody gave another


def attributes(of: Attr | Node) -> tuple[object, ...]:
    """What `take` looks at, to be compared."""
    return of.mode, of.uid, of.gid, xattrs(of)


def xattrs(of: Attr | Node) -> dict[bytes, bytes]:
    return decode_xattrs(of.xattrs) if isinstance(of, Node) else of.xattrs or {}


def take(edit: Edit, was: Attr, one: Attr | Node, other: Attr | Node) -> bool:
    """Have `edit` bring to `other` what `one` made of the attributes of `was`; whether `other` made something
    else of one of them."""
    clash = False
    for name in ("mode", "uid", "gid"):
        before, wanted, there = getattr(was, name), getattr(one, name), getattr(other, name)
        if wanted not in (before, there):
            clash |= there != before
            edit.fields[name] = wanted
    old, new, theirs = xattrs(was), xattrs(one), xattrs(other)
    for key in sorted(old.keys() | new.keys()):
        if new.get(key) not in (old.get(key), theirs.get(key)):
            clash |= theirs.get(key) != old.get(key)
            edit.xattrs[key] = new.get(key)
    return clash


def ordinary(now: Attr) -> Attr:
    """What `take` starts from where both sides made the same thing and there was none before: what programs
    make without being asked for more. So an attribute that one side alone gave it is taken, and root's (who
    may do everything in either case) gives way to whom the other side made it for. Files are only the same
    with one mode."""
    mode = stat.S_IFDIR | ORDINARY if now.is_dir else now.mode
    return now._replace(mode=mode, uid=0, gid=0, xattrs=None)
