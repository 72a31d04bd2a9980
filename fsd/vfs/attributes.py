"""Attributes and extended attributes, POSIX ACLs among them.

An access ACL is stored beside the mode, which holds three of its entries (`model.acl`): changing it changes
both, in operations whose every prefix allows nobody more than the ACL before or the one after, since a crash
or the end of a commit may come between them.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Final

from fsd.model import acl
from fsd.model.errors import PosixError
from fsd.model.limits import XATTR_NAME_MAX, XATTR_VALUE_MAX, XATTRS_TOTAL_MAX
from fsd.model.ops import SETATTR, SETXATTR, Setattr, Setxattr
from fsd.model.times import storable
from fsd.vfs.calls import Calls
from fsd.vfs.node import Inode

RECORD_ROOM: Final = 1024  # about what an operation's record takes
CAPABILITY: Final = b"security.capability"


class AttributeCalls(Calls):
    """See the module."""

    def set_attributes(
        self,
        node: Inode,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime: int | None = None,
        mtime: int | None = None,
    ) -> None:
        """Everything of setattr but the size."""
        core = self.core
        atime = None if atime is None else storable(atime)
        mtime = None if mtime is None else storable(mtime)
        time = core.stamp()
        if not node.gone:
            self.room(RECORD_ROOM)
            bits = None if mode is None else mode & 0o7777
            self.do(Setattr(core.take_opno(), SETATTR, node.ino, bits, uid, gid, atime, mtime, time))
        if mode is not None:
            node.mode = stat.S_IFMT(node.mode) | mode & 0o7777
        if uid is not None:
            node.uid = uid
        if gid is not None:
            node.gid = gid
        if atime is not None:
            node.atime = atime
        if mtime is not None:
            node.mtime = mtime
        self.changed(node, time)

    def getxattr(self, ino: int, name: bytes) -> bytes:
        node = self.current(self.core.nodes.get(ino))
        value = None if node.xattrs is None else node.xattrs.get(name)
        if value is not None and name == acl.ACCESS:
            value = acl.shown(value, node.mode)
        if value is None:
            raise PosixError(errno.ENODATA, "no such extended attribute")
        return value

    def listxattr(self, ino: int, uid: int = 0) -> Sequence[bytes]:
        """Names a caller of this uid may see: `trusted.` ones are root's, and the kernel keeps only their
        values from others. ACLs are shown by a mount that has them."""
        node = self.current(self.core.nodes.get(ino))
        hidden: tuple[bytes, ...] = () if uid == 0 else (b"trusted.",)
        if not self.core.options.acl:
            hidden += (b"system.",)
        return [name for name in node.xattrs or () if not name.startswith(hidden)]

    def setxattr(
        self,
        ino: int,
        name: bytes,
        value: bytes,
        by: int = 0,
        groups: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """`by` and `groups` are the caller's, as for setattr: an ACL set by somebody outside of the file's
        group takes the set-group-ID bit away."""
        self.must_be_writable(self.core.nodes.get(ino))
        if not 0 < len(name) <= XATTR_NAME_MAX:
            raise PosixError(errno.ERANGE, "the attribute's name is too long")
        if len(value) > XATTR_VALUE_MAX:
            raise PosixError(errno.E2BIG, f"a value of {len(value)} bytes, at most {XATTR_VALUE_MAX}")
        node = self.current(self.core.nodes.get(ino))
        others = sum(len(k) + len(v) for k, v in (node.xattrs or {}).items() if k != name)
        if others + len(name) + len(value) > XATTRS_TOTAL_MAX:
            raise PosixError(errno.ENOSPC, "too many extended attributes")
        if name in acl.NAMES:
            self._set_acl(node, name, value, by == 0 or node.gid in groups())
        else:
            self._xattr(node, name, value)

    def removexattr(self, ino: int, name: bytes) -> None:
        node = self.core.nodes.get(ino)
        self.must_be_writable(node)
        self.current(node)
        if node.xattrs is None or name not in node.xattrs:
            if name in acl.NAMES:
                return  # every inode has an ACL, if only its mode: taking the rest away is no error
            raise PosixError(errno.ENODATA, "no such extended attribute")
        self._xattr(node, name, None)

    def drop_capability(self, node: Inode) -> None:
        """A program's capabilities end with a change of its content or its owner, whoever makes it."""
        if node.xattrs and CAPABILITY in node.xattrs:
            self._xattr(node, CAPABILITY, None)

    def _xattr(self, node: Inode, name: bytes, value: bytes | None) -> None:
        if value is not None and (node.xattrs or {}).get(name) == value:
            return  # as on a disk: nothing changes, no time either
        if not node.gone:
            self.room(RECORD_ROOM + len(value or b""))
        time = self.core.stamp()
        self._put(node, name, value, time)
        self.changed(node, time)

    def _put(self, node: Inode, name: bytes, value: bytes | None, time: int) -> None:
        """Log, queue and remember an attribute; room was made for it."""
        if not node.gone:
            self.do(Setxattr(self.core.take_opno(), SETXATTR, node.ino, name, value, time))
        node.xattrs = dict(node.xattrs or {})
        if value is None:
            node.xattrs.pop(name, None)
        else:
            node.xattrs[name] = value

    def _put_mode(self, node: Inode, mode: int, time: int) -> None:
        if mode == node.mode:
            return
        if not node.gone:
            op = Setattr(
                self.core.take_opno(), SETATTR, node.ino, mode & 0o7777, None, None, None, None, time
            )
            self.do(op)
        node.mode = mode

    # ACLs --------------------------------------------------------------------------------------------
    def _set_acl(self, node: Inode, name: bytes, value: bytes, keeps_set_gid: bool) -> None:
        try:
            given = acl.decode(value)
        except ValueError as exc:
            raise PosixError(errno.EINVAL, str(exc)) from exc
        if name == acl.DEFAULT:
            if not node.is_dir:
                raise PosixError(errno.EACCES, "only a directory has a default ACL")
            self._xattr(node, name, value)
            return
        mode = node.mode & ~0o777 | acl.mode_of(given)
        if not keeps_set_gid:
            mode &= ~stat.S_ISGID
        stored = None if acl.is_mode(given) else value
        before = (node.xattrs or {}).get(name)
        puts = stored is not None or before is not None
        same = not puts or (before is not None and acl.shown(before, node.mode) == stored)
        if same and mode == node.mode:
            return  # no record, so no new ctime: a disk moves none either
        if not node.gone:
            self.room(3 * RECORD_ROOM + len(value))
        time = self.core.stamp()
        self._put_mode(node, mode & node.mode, time)
        if puts:
            self._put(node, name, stored, time)
        self._put_mode(node, mode, time)
        self.changed(node, time)

    def inherited(self, directory: Inode, mode: int) -> acl.Inherited | None:
        """What is made in a directory with `mode` takes over; None where it has no default ACL."""
        self.current(directory)
        default = (directory.xattrs or {}).get(acl.DEFAULT)
        return None if default is None else acl.inherit(default, mode)

    def take_over(self, node: Inode, given: acl.Inherited) -> None:
        """Give a new inode, made with `given.safe`, the rest of what it inherits; room was made for it."""
        if node.is_dir:
            self._put(node, acl.DEFAULT, given.default, node.ctime)
        if given.access is not None:
            self._put(node, acl.ACCESS, given.access, node.ctime)
        self._put_mode(node, node.mode & ~0o777 | given.mode & 0o777, node.ctime)
