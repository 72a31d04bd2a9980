"""POSIX ACLs as the kernel hands them over: the value of `system.posix_acl_access` and `…_default`.

Version 2 of the format: a version (u32), then entries of tag (u16), permissions (u16) and number (u32), all
little-endian. An inode's mode holds the three classes that everybody knows: its owner's bits are the owner's
entry, its group bits the mask (the owning group's entry where there is no mask), its others' bits the entry
of all others. They count as the mode has them: it is laid over what is stored whenever that is shown, so a
change of the mode needs no change of the ACL, whoever makes it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"
NAMES: Final = (ACCESS, DEFAULT)

OWNER: Final = 0x01
USER: Final = 0x02
GROUP_OWNER: Final = 0x04
GROUP: Final = 0x08
MASK: Final = 0x10
OTHERS: Final = 0x20
NOBODY: Final = 0xFFFFFFFF  # the number of entries that name nobody

_VERSION: Final = 2
_HEAD: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")
_TEXT: Final = {
    OWNER: "user",
    USER: "user",
    GROUP_OWNER: "group",
    GROUP: "group",
    MASK: "mask",
    OTHERS: "other",
}


class AclEntry(NamedTuple):
    tag: int
    perm: int
    number: int


Acl = tuple[AclEntry, ...]


class Inherited(NamedTuple):
    """What a new inode takes from its directory, whose default ACL is `default`. `mode` is the st_mode it
    gets, `safe` the one to begin with: it allows nobody more while the ACL is not there yet. `access` is None
    where the mode says all."""

    mode: int
    safe: int
    access: bytes | None
    default: bytes

    @property
    def length(self) -> int:
        return len(self.access or b"") + len(self.default)


def decode(value: bytes) -> Acl:
    """The entries of an ACL; raises ValueError when it is none that Linux takes."""
    if len(value) < _HEAD.size or (len(value) - _HEAD.size) % _ENTRY.size:
        raise ValueError("not an ACL: its length is wrong")
    if _HEAD.unpack_from(value)[0] != _VERSION:
        raise ValueError("an ACL of another version")
    acl = tuple(AclEntry(*row) for row in _ENTRY.iter_unpack(value[_HEAD.size :]))
    tags = [entry.tag for entry in acl]
    once = (OWNER, GROUP_OWNER, OTHERS)
    if any(tags.count(tag) != 1 for tag in once) or tags.count(MASK) > 1:
        raise ValueError("an ACL has one entry each for the owner, the group and all others")
    if any(tag not in _TEXT or entry.perm & ~7 for tag, entry in zip(tags, acl)):
        raise ValueError("an entry of the ACL is of an unknown kind")
    if MASK not in tags and (USER in tags or GROUP in tags):
        raise ValueError("an ACL that names somebody has a mask")
    if tags != sorted(tags):
        raise ValueError("the ACL's entries are out of order")
    named = [(entry.tag, entry.number) for entry in acl if entry.tag in (USER, GROUP)]
    if len(set(named)) != len(named):
        raise ValueError("an ACL names somebody twice")
    return acl


def encode(acl: Acl) -> bytes:
    return _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in acl)


def is_mode(acl: Acl) -> bool:
    """Whether three mode classes say all there is."""
    return len(acl) == 3


def mode_of(acl: Acl) -> int:
    """The nine permission bits the ACL shows as."""
    perms = {entry.tag: entry.perm for entry in acl}
    return perms[OWNER] << 6 | perms.get(MASK, perms[GROUP_OWNER]) << 3 | perms[OTHERS]


def safe_mode(acl: Acl) -> int:
    """`mode_of`, as far as it may be set before the ACL is: whom an entry names belongs to the others till
    then, and the mask's bits are the group's."""
    return mode_of(acl) if is_mode(acl) else mode_of(acl) & 0o700


def _classes(acl: Acl, mode: int) -> dict[int, int]:
    """The permissions of the three classes of `mode`, by the tags of the entries that stand for them."""
    group = MASK if any(entry.tag == MASK for entry in acl) else GROUP_OWNER
    return {OWNER: mode >> 6 & 7, group: mode >> 3 & 7, OTHERS: mode & 7}


def checked(stored: bytes) -> bytes | None:
    """`stored`, if it is an ACL."""
    try:
        decode(stored)
    except ValueError:
        return None
    return stored


def shown(stored: bytes, mode: int) -> bytes | None:
    """An access ACL as programs read it, its three classes taken from `mode`; None when what is stored is
    no ACL (another client may have stored anything)."""
    try:
        acl = decode(stored)
    except ValueError:
        return None
    classes = _classes(acl, mode)
    return encode(tuple(entry._replace(perm=classes.get(entry.tag, entry.perm)) for entry in acl))


def inherit(default: bytes, mode: int) -> Inherited | None:
    """What an inode that is asked for with `mode` (no umask taken off) becomes in a directory with this
    default ACL; None when it is no ACL."""
    try:
        acl = decode(default)
    except ValueError:
        return None
    asked = _classes(acl, mode)
    made = tuple(entry._replace(perm=entry.perm & asked.get(entry.tag, 7)) for entry in acl)
    kept = mode & ~0o777
    access = None if is_mode(made) else encode(made)
    return Inherited(kept | mode_of(made), kept | safe_mode(made), access, default)


def text(value: bytes) -> str:
    """The short text form (`user::rw-,user:1000:r--,…`), which tar archives carry; raises ValueError."""
    return ",".join(
        f"{_TEXT[tag]}:{number if tag in (USER, GROUP) else ''}:{_letters(perm)}"
        for tag, perm, number in decode(value)
    )


def _letters(perm: int) -> str:
    return "".join(letter if perm & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1)))
