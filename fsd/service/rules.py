"""The rules that decide every operation of a commit, in memory and without I/O of their own.

`Rules` applies operations in order to a `View`. `apply` returns None when the operation was simply applied,
else the `Outcome` that tells where the change went (CONFLICT) or why it was not done (REFUSED). It raises
`NeedFull` when a content operation meets a conflict and does not carry its whole block list; the view is then
as it was before that operation. The rules are those of design section 3 (Sharing), numbered in comments; the
why of each is in DESIGN.md.

An operation either changes the view completely or not at all: all checks come before the first change.

`folds` maps the parts of a block to equal ones in one blob, for appends (None: do not append). `me` is the
session (0: a direct command, built on the locked state). Numbers a session uses may have been
redirected: `redirects` maps its inode numbers, `moved` its names (parent, name, ino) to where they went.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import Final, TypeVar

from fsd.model.attrs import ROOT_INO, session_of
from fsd.model.blocks import Parts
from fsd.model.errors import PosixError
from fsd.model.limits import (
    LINK_MAX,
    SYMLINK_MAX,
    XATTR_NAME_MAX,
    XATTR_VALUE_MAX,
    XATTRS_TOTAL_MAX,
)
from fsd.model.names import LOST_DIR, check_name, conflict_name, show
from fsd.model.ops import (
    CONFLICT,
    REFUSED,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Content,
    Create,
    Link,
    Op,
    Outcome,
    Rename,
    Rmdir,
    Setattr,
    Setxattr,
    Unlink,
)
from fsd.service.view import GoneFile, Name, NameKey, Node, View, decode_xattrs, encode_xattrs

_TYPES: Final = {
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFCHR,
    stat.S_IFBLK,
}
_ID_MAX: Final = 2**32 - 1
_NAME_TRIES: Final = 10_000
_O = TypeVar("_O", bound=Op)


class Refuse(Exception):
    """The operation is not done; `errno` and a reason for people. `at`: where the inode lives instead."""

    def __init__(self, number: int, reason: str, at: Name | None = None) -> None:
        super().__init__(reason)
        self.errno, self.reason, self.at = number, reason, at


class NeedFull(Exception):
    """Content operation `opno` must come again with its full block list."""

    def __init__(self, opno: int) -> None:
        super().__init__(opno)
        self.opno = opno


class Rules:
    """The state of one commit's application. One thread, one commit."""

    def __init__(
        self,
        view: View,
        *,
        me: int,
        mount: str,
        redirects: dict[int, int] | None = None,
        moved: dict[tuple[int, bytes, int], NameKey] | None = None,
        folds: dict[Parts, Parts] | None = None,
    ) -> None:
        self.view, self.me, self.mount = view, me, mount
        self.seq = view.seq
        self.new_ino = view.new_ino
        self.redirects = {} if redirects is None else redirects
        self.moved = {} if moved is None else moved
        self.folds = folds
        self.redirects_new: dict[int, int] = {}
        self.moved_new: dict[tuple[int, bytes, int], NameKey] = {}
        self._by_kind: dict[int, Callable[[object], Outcome | None]] = _bind(self)

    def apply(self, op: Op) -> Outcome | None:
        """Apply one operation; see the module."""
        try:
            return self._by_kind[op.kind](op)
        except Refuse as no:
            at = no.at
            return Outcome(
                op.opno,
                REFUSED,
                no.errno,
                0 if at is None else at.ino,
                0 if at is None else at.parent,
                b"" if at is None else at.name,
                no.reason,
            )

    # Words used by several rules.

    def real(self, ino: int) -> int:
        """The inode a session's number means now."""
        return self.redirects.get(ino, ino)

    def redirect(self, ino: int, to: int) -> None:
        """From now on the session's `ino`, and whatever already meant it, means `to`."""
        for old, target in self.redirects.items():
            if target == ino:
                self.redirects_new[old] = to
        self.redirects_new[ino] = to
        self.redirects.update(self.redirects_new)

    def remember_move(self, parent: int, name: bytes, ino: int, to: NameKey) -> None:
        key = (parent, name, ino)
        self.moved[key] = self.moved_new[key] = to

    def locate(self, parent: int, name: bytes, ino: int) -> Name | None:
        """The entry a session means by (parent, name) of `ino`: there, or where a conflict moved it."""
        slot = self.view.name(parent, name)
        if slot is not None and slot.ino == ino:
            return slot
        to = self.moved.get((parent, name, ino))
        if to is None:
            return None
        slot = self.view.name(*to)
        return slot if slot is not None and slot.ino == ino else None

    def directory(self, ino: int) -> Node | None:
        node = self.view.node(ino)
        return node if node is not None and node.is_dir else None

    def free_name(self, parent: int, name: bytes, time: int) -> Name:
        """An absent entry called NAME.conflict-… in `parent`."""
        for attempt in range(_NAME_TRIES):
            slot = self.view.slot(parent, conflict_name(name, self.mount, time, attempt))
            if not slot.ino:
                return slot
        raise Refuse(errno.EEXIST, f"no free conflict name for {show(name)}")

    def lost_dir(self, time: int) -> Node:
        """`.fsd-lost` at the root, made when it is not there. World-writable like /tmp: whoever lost
        something must be able to take it out. Where the name is no directory, the root itself."""
        slot = self.view.slot(ROOT_INO, LOST_DIR)
        root = self.view.node(ROOT_INO)
        assert root is not None, "a filesystem has a root"
        if slot.ino:
            return self.directory(slot.ino) or root
        node = self.make_node(self.new_ino(), stat.S_IFDIR | 0o1777, 0, 0, time)
        node.parent = ROOT_INO
        self.view.add_node(node)
        self.enter(slot, node, time)
        return node

    def make_node(self, ino: int, mode: int, uid: int, gid: int, time: int) -> Node:
        """A new inode without a name yet (`nlink` 0)."""
        return Node(
            ino,
            mode,
            1 if stat.S_ISDIR(mode) else 0,
            uid,
            gid,
            0,
            time,
            time,
            time,
            0,
            None,
            0,
            None,
            None,
            self.seq,
            self.me,
            self.seq,
            self.seq,
            stored=False,
        )

    def enter(self, slot: Name, node: Node, time: int) -> None:
        """Give `node` the absent name `slot`: links, parent's times and links."""
        self.view.place(slot, node.ino, self.me)
        node.nlink += 1
        node.changed = True
        if node.is_dir:
            node.parent = slot.parent
        self.touch_parent(slot.parent, time, 1 if node.is_dir else 0)

    def leave(self, slot: Name, node: Node, time: int) -> None:
        """Take the name `slot` from `node`; with its last one the inode goes."""
        self.view.take(slot)
        self.touch_parent(slot.parent, time, -1 if node.is_dir else 0)
        node.nlink -= 1
        node.ctime = time
        node.changed = True
        if node.is_dir:
            self.view.drop(node, None)
        elif node.nlink == 0:
            gone = GoneFile(slot.parent, slot.name, node.mode, node.uid, node.gid, node.xattrs, self.me)
            self.view.drop(node, gone if node.is_file else None)

    def touch_parent(self, ino: int, time: int, links: int) -> None:
        parent = self.view.node(ino)
        assert parent is not None, "an entry's parent exists"
        parent.mtime = parent.ctime = time
        parent.nlink += links
        parent.changed = True

    def changed_since(self, node: Node, base: int) -> bool:
        """Whether another session changed the content after `base`."""
        return node.cseq > base and node.writer != self.me

    def told(
        self, op: Op, number: int, reason: str, ino: int = 0, parent: int = 0, name: bytes = b""
    ) -> Outcome:
        return Outcome(op.opno, CONFLICT, number, ino, parent, name, reason)

    # Names.

    def create(self, op: Create) -> Outcome | None:
        _check(op.name)
        _check_new(op)
        if self.me and session_of(op.ino) != self.me:
            raise Refuse(errno.EINVAL, "an inode number of another session")
        if self.view.node(op.ino) is not None:
            raise Refuse(errno.EEXIST, "the inode exists already")
        parent_ino = self.real(op.parent)
        parent = self.directory(parent_ino)
        name = op.name
        told: tuple[int, str] | None = None
        if parent is None:  # rule 9
            if not self.me:
                raise Refuse(errno.ENOENT, "the directory does not exist")
            parent = self.lost_dir(op.time)
            told = errno.ENOENT, "its directory was removed"
        slot = self.view.slot(parent.ino, name)
        if slot.ino:  # rule 2
            told = told or (errno.EEXIST, "the name was taken first")
            merged = self._merge(op, slot)
            if merged is not None:
                return merged
            slot = self.free_name(parent.ino, name, op.time)
        if stat.S_ISDIR(op.mode) and parent.nlink >= LINK_MAX:
            raise Refuse(errno.EMLINK, "too many directories in one")
        node = self.make_node(op.ino, op.mode, op.uid, op.gid, op.time)
        node.rdev, node.target = op.rdev, op.target
        node.size = len(op.target or b"")
        self.view.add_node(node)
        self.enter(slot, node, op.time)
        if told is None:
            return None
        self.remember_move(parent_ino, name, node.ino, (slot.parent, slot.name))
        return self.told(op, *told, node.ino, slot.parent, slot.name)

    def _merge(self, op: Create, slot: Name) -> Outcome | None:
        """Two directories of one name are one; so are two equal symlinks."""
        there = self.view.node(slot.ino)
        if there is None or not self.me:
            return None
        same_dir = there.is_dir and stat.S_ISDIR(op.mode)
        same_link = stat.S_ISLNK(op.mode) and stat.S_ISLNK(there.mode) and there.target == op.target
        if not (same_dir or same_link):
            return None
        self.redirect(op.ino, there.ino)
        return self.told(op, errno.EEXIST, "it exists already", there.ino, slot.parent, slot.name)

    def link(self, op: Link) -> Outcome | None:
        _check(op.name)
        node = self.view.node(self.real(op.ino))
        if node is None:
            raise Refuse(errno.ENOENT, "the file was removed")
        if node.is_dir:
            raise Refuse(errno.EPERM, "a directory has one name")
        if node.nlink >= LINK_MAX:
            raise Refuse(errno.EMLINK, "too many names")
        parent_ino = self.real(op.parent)
        if self.directory(parent_ino) is None:
            # The file has another name, so nothing is lost by leaving this one out.
            if not self.me:
                raise Refuse(errno.ENOENT, "the directory does not exist")
            return self.told(op, errno.ENOENT, "its directory was removed")
        slot = self.view.slot(parent_ino, op.name)
        told = None
        if slot.ino == node.ino and self.me:
            return None  # both made the same name for the same file
        if slot.ino:
            slot = self.free_name(parent_ino, op.name, op.time)
            self.remember_move(parent_ino, op.name, node.ino, (slot.parent, slot.name))
            told = self.told(op, errno.EEXIST, "the name was taken first", node.ino, slot.parent, slot.name)
        self.enter(slot, node, op.time)
        node.ctime = op.time
        return told

    def unlink(self, op: Unlink) -> Outcome | None:
        parent_ino, ino = self.real(op.parent), self.real(op.ino)
        slot = self.locate(parent_ino, op.name, ino)
        node = self.view.node(ino)
        if slot is None:
            return self._removed_elsewhere(op, node, parent_ino)
        assert node is not None, "an entry names an inode that exists"
        if node.is_dir:
            raise Refuse(errno.EISDIR, "it is a directory")
        if node.nlink == 1 and node.is_file and self.changed_since(node, op.base):  # rule 8
            return self.told(op, errno.EBUSY, "kept: the other changed it", 0, slot.parent, slot.name)
        self.leave(slot, node, op.time)
        return None

    def rmdir(self, op: Rmdir) -> Outcome | None:
        parent_ino, ino = self.real(op.parent), self.real(op.ino)
        slot = self.locate(parent_ino, op.name, ino)
        node = self.view.node(ino)
        if slot is None:
            return self._removed_elsewhere(op, node, parent_ino)
        assert node is not None, "an entry names an inode that exists"
        if not node.is_dir:
            raise Refuse(errno.ENOTDIR, "it is no directory")
        if ino == ROOT_INO:
            raise Refuse(errno.EBUSY, "it is the root")
        if not self.view.is_empty(ino):  # rule 8
            return self.told(op, errno.ENOTEMPTY, "kept: it is not empty", 0, slot.parent, slot.name)
        if self.me and ino != op.ino and slot.writer != self.me:
            # The other made it too (mkdir against mkdir): it is not this session's alone to remove.
            return self.told(op, errno.EBUSY, "kept: the other made it too", 0, slot.parent, slot.name)
        self.leave(slot, node, op.time)
        return None

    def _removed_elsewhere(self, op: Unlink | Rmdir, node: Node | None, parent_ino: int) -> Outcome | None:
        """The name is not there any more, or means something else: rules 2 and 8."""
        there = self.view.name(parent_ino, op.name)
        if not self.me:
            raise Refuse(errno.ENOENT if there is None else errno.EBUSY, "it was removed or replaced")
        if there is None and node is None:
            return None  # both removed it
        if there is not None:
            return self.told(op, errno.EBUSY, "kept: the other replaced it", 0, there.parent, there.name)
        assert node is not None
        at = self.view.names_of(node.ino)
        where = (at[0].parent, at[0].name) if at else (0, b"")
        return self.told(op, errno.ENOENT, "kept: the other moved it", 0, *where)

    # Rename.

    def rename(self, op: Rename) -> Outcome | None:
        _check(op.new_name)
        if op.flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise Refuse(errno.EINVAL, "unknown flags")
        ino, over = self.real(op.ino), self.real(op.over)
        parent_ino, new_ino = self.real(op.parent), self.real(op.new_parent)
        source, node = self.locate(parent_ino, op.name, ino), self.view.node(ino)
        if source is None or node is None:  # rule 7
            at = self.view.names_of(ino) if node is not None else []
            raise Refuse(errno.ENOENT, "the source was removed or moved first", at[0] if at else None)
        if self.directory(new_ino) is None:
            # The file keeps its old name: nothing is lost, and later operations find it there.
            if not self.me:
                raise Refuse(errno.ENOENT, "the target's directory does not exist")
            self.remember_move(new_ino, op.new_name, ino, (source.parent, source.name))
            return self.told(
                op, errno.ENOENT, "the target's directory was removed", ino, source.parent, source.name
            )
        if node.is_dir and self.view.inside(new_ino, ino):  # rule 7
            raise Refuse(errno.EINVAL, "a directory cannot move below itself", source)
        if op.flags == RENAME_EXCHANGE:
            return self._exchange(op, source, node, new_ino, over)
        return self._rename_to(op, source, node, new_ino, over)

    def _rename_to(self, op: Rename, source: Name, node: Node, new_ino: int, over: int) -> Outcome | None:
        target = self.view.slot(new_ino, op.new_name)
        if target is source:
            return None
        if target.ino == node.ino:
            # Two names of one file: POSIX says that nothing happens. Where the session did not know of the
            # second (the other linked it just there), its file is at the target already.
            if self.me and over != node.ino:
                self.leave(source, node, op.time)
            return None
        if target.ino and target.ino != over and over:
            # The session's own idea of the target may live under a conflict name.
            target = self.locate(new_ino, op.new_name, over) or target
        why = None if not target.ino else self._not_replaced(op, node, target, over)
        if why is None:
            if target.ino:
                replaced = self.view.node(target.ino)
                assert replaced is not None, "an entry names an inode that exists"
                self.leave(target, replaced, op.time)
            self._move(source, target, node, op.time)
            if (target.parent, target.name) == (new_ino, op.new_name):
                return None
            self.remember_move(new_ino, op.new_name, node.ino, (target.parent, target.name))
            why = errno.EEXIST, "the name was taken first"
        elif not self.me:
            raise Refuse(*why)
        else:  # rules 2 and 6
            target = self.free_name(new_ino, op.new_name, op.time)
            self._move(source, target, node, op.time)
            self.remember_move(new_ino, op.new_name, node.ino, (target.parent, target.name))
        return self.told(op, *why, node.ino, target.parent, target.name)

    def _not_replaced(self, op: Rename, node: Node, target: Name, over: int) -> tuple[int, str] | None:
        """Why the present target stays; None when it is to be replaced."""
        there = self.view.node(target.ino)
        assert there is not None, "an entry names an inode that exists"
        if op.flags == RENAME_NOREPLACE:
            return errno.EEXIST, "the name was taken first"
        if there.is_dir != node.is_dir:
            return (errno.EISDIR if there.is_dir else errno.ENOTDIR), "the target is of another kind"
        if target.ino != over:
            return errno.EEXIST, "the name was taken first"
        if there.is_dir and not self.view.is_empty(there.ino):
            return errno.ENOTEMPTY, "the target directory is not empty"
        if there.is_file and there.nlink == 1 and self.changed_since(there, op.over_base):
            return errno.EBUSY, "the other changed the target"
        return None

    def _move(self, source: Name, target: Name, node: Node, time: int) -> None:
        """The entry goes from `source` to the absent `target`; the inode's links stay as they are."""
        self.view.take(source)
        self.view.place(target, node.ino, self.me)
        links = 1 if node.is_dir and source.parent != target.parent else 0
        self.touch_parent(source.parent, time, -links)
        self.touch_parent(target.parent, time, links)
        node.ctime = time
        node.changed = True
        if node.is_dir:
            node.parent = target.parent

    def _exchange(self, op: Rename, source: Name, node: Node, new_ino: int, over: int) -> Outcome | None:
        target = self.locate(new_ino, op.new_name, over) if over else self.view.name(new_ino, op.new_name)
        other = None if target is None else self.view.node(target.ino)
        if target is None or other is None:
            there = self.view.name(new_ino, op.new_name)
            if there is None or not self.me:
                raise Refuse(errno.ENOENT, "the other name is not there", source)
            return self.told(
                op,
                errno.EEXIST,
                "not exchanged: the name was taken first",
                node.ino,
                source.parent,
                source.name,
            )
        if target is source:
            return None
        if other.is_dir and self.view.inside(source.parent, other.ino):
            raise Refuse(errno.EINVAL, "a directory cannot move below itself", source)
        self.view.take(source)
        self.view.take(target)
        self.view.place(source, other.ino, self.me)
        self.view.place(target, node.ino, self.me)
        apart = source.parent != target.parent
        self.touch_parent(source.parent, op.time, (other.is_dir - node.is_dir) if apart else 0)
        self.touch_parent(target.parent, op.time, (node.is_dir - other.is_dir) if apart else 0)
        for moved, slot in ((node, target), (other, source)):
            moved.ctime = op.time
            moved.changed = True
            if moved.is_dir:
                moved.parent = slot.parent
        return None

    # Attributes: rule 3, the last commit wins, field by field.

    def setattr(self, op: Setattr) -> Outcome | None:
        for value in (op.uid, op.gid):
            if value is not None and not 0 <= value <= _ID_MAX:
                raise Refuse(errno.EINVAL, "a user or group number is out of range")
        node = self.view.node(self.real(op.ino))
        if node is None:
            return self._attr_of_gone(op)
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

    def setxattr(self, op: Setxattr) -> Outcome | None:
        if not op.name or len(op.name) > XATTR_NAME_MAX or b"\0" in op.name:
            raise Refuse(errno.ERANGE, "an attribute's name has 1 to 255 bytes")
        if op.value is not None and len(op.value) > XATTR_VALUE_MAX:
            raise Refuse(errno.E2BIG, "an attribute's value is too long")
        node = self.view.node(self.real(op.ino))
        if node is None:
            return self._attr_of_gone(op)
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

    def _attr_of_gone(self, op: Setattr | Setxattr) -> Outcome | None:
        if not self.me:
            raise Refuse(errno.ENOENT, "it was removed")
        return self.told(op, errno.ENOENT, "dropped: it was removed")

    def content(self, op: Content) -> Outcome | None:
        from fsd.service.rules_content import content

        return content(self, op)


def _bind(rules: Rules) -> dict[int, Callable[[object], Outcome | None]]:
    from fsd.model import ops

    table: dict[int, object] = {
        ops.CREATE: rules.create,
        ops.LINK: rules.link,
        ops.UNLINK: rules.unlink,
        ops.RMDIR: rules.rmdir,
        ops.RENAME: rules.rename,
        ops.SETATTR: rules.setattr,
        ops.SETXATTR: rules.setxattr,
        ops.CONTENT: rules.content,
    }
    return table  # type: ignore[return-value]  # each method takes the kind it is filed under


def _check(name: bytes) -> None:
    try:
        check_name(name)
    except PosixError as exc:
        raise Refuse(exc.errno, exc.message) from exc


def _check_new(op: Create) -> None:
    kind = stat.S_IFMT(op.mode)
    if kind not in _TYPES or not 0 <= op.mode <= 0o177777:
        raise Refuse(errno.EINVAL, "no such type of file")
    if not (0 <= op.uid <= _ID_MAX and 0 <= op.gid <= _ID_MAX) or op.ino <= ROOT_INO:
        raise Refuse(errno.EINVAL, "a number is out of range")
    if (kind == stat.S_IFLNK) != (op.target is not None):
        raise Refuse(errno.EINVAL, "a symlink, and only that, has a target")
    if op.target is not None and not 0 < len(op.target) <= SYMLINK_MAX:
        raise Refuse(errno.ENAMETOOLONG if op.target else errno.ENOENT, "a target has 1 to 4095 bytes")
