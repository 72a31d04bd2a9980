"""Attributes and extended attributes: rule 3, the last commit wins, field by field, and never conflicts."""

from __future__ import annotations

import errno

from fsd.model import acl
from fsd.model.limits import XATTR_NAME_MAX, XATTR_VALUE_MAX, XATTRS_TOTAL_MAX
from fsd.model.ops import Outcome, Setattr, Setxattr
from fsd.service.rules import ID_MAX, Refuse, Rules
from fsd.service.view import decode_xattrs, encode_xattrs


def setattr_(rules: Rules, op: Setattr) -> Outcome | None:
    for value in (op.uid, op.gid):
        if value is not None and not 0 <= value <= ID_MAX:
            raise Refuse(errno.EINVAL, "a user or group number is out of range")
    node = rules.view.node(rules.real(op.ino))
    if node is None:
        return _attr_of_gone(rules, op)
    if op.mode is not None:
        node.mode = (node.mode & ~0o7777) | (op.mode & 0o7777)
    if op.uid is not None:
        node.uid = op.uid
    if op.gid is not None:
        node.gid = op.gid
    if op.atime is not None:
        node.atime = op.atime
    if op.mtime is not None:
        node.mtime = op.mtime
    node.ctime = op.ctime
    node.changed = True
    return None


def setxattr(rules: Rules, op: Setxattr) -> Outcome | None:
    if not op.name or len(op.name) > XATTR_NAME_MAX or b"\0" in op.name:
        raise Refuse(errno.ERANGE, "an attribute's name has 1 to 255 bytes")
    if op.value is not None and len(op.value) > XATTR_VALUE_MAX:
        raise Refuse(errno.E2BIG, "an attribute's value is too long")
    if op.name in acl.NAMES and op.value is not None:
        try:
            acl.decode(op.value)
        except ValueError as exc:
            raise Refuse(errno.EINVAL, str(exc)) from exc
    node = rules.view.node(rules.real(op.ino))
    if node is None:
        return _attr_of_gone(rules, op)
    xattrs = decode_xattrs(node.xattrs)
    if op.value is None:
        xattrs.pop(op.name, None)
    else:
        xattrs[op.name] = op.value
        if sum(len(k) + len(v) for k, v in xattrs.items()) > XATTRS_TOTAL_MAX:
            raise Refuse(errno.ENOSPC, "the inode's attributes are too long together")
    node.xattrs = encode_xattrs(xattrs)
    node.ctime = op.time
    node.changed = True
    return None


def _attr_of_gone(rules: Rules, op: Setattr | Setxattr) -> Outcome | None:
    if not rules.me:
        raise Refuse(errno.ENOENT, "it was removed")
    return rules.told(op, errno.ENOENT, "dropped: it was removed")
