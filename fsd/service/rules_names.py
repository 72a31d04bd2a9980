"""Operations on names: create, link, unlink, rmdir (design section 3, Sharing, rules 2, 8, 9).

Each is `f(rules, op)` and keeps the contract of `rules`.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

from fsd.model.attrs import ROOT_INO, session_of
from fsd.model.limits import LINK_MAX, SYMLINK_MAX
from fsd.model.names import RECOVERED_MARK
from fsd.model.ops import Create, Link, Outcome, Rmdir, Unlink
from fsd.service.rules import ID_MAX, Refuse, Rules, check_new_name
from fsd.service.view import Name, Node

_TYPES: Final = {
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFCHR,
    stat.S_IFBLK,
}


def create(rules: Rules, op: Create) -> Outcome | None:
    check_new_name(op.name)
    _check_new(op)
    if rules.me and session_of(op.ino) != rules.me:
        raise Refuse(errno.EINVAL, "an inode number of another session")
    if rules.view.node(op.ino) is not None:
        raise Refuse(errno.EEXIST, "the inode exists already")
    parent_ino = rules.real(op.parent)
    parent = rules.directory(parent_ino)
    name = op.name
    told: tuple[int, str] | None = None
    if parent is None:  # rule 9
        if not rules.me:
            raise Refuse(errno.ENOENT, "the directory does not exist")
        parent = rules.lost_dir(op.time)
        told = errno.ENOENT, "its directory was removed"
    slot = rules.view.slot(parent.ino, name)
    if slot.ino:  # rule 2
        told = told or (errno.EEXIST, "the name was taken first")
        merged = _merge(rules, op, slot)
        if merged is not None:
            return merged
        slot = rules.free_name(parent.ino, name, op.time)
    if stat.S_ISDIR(op.mode) and parent.nlink >= LINK_MAX:
        raise Refuse(errno.EMLINK, "too many directories in one")
    node = rules.make_node(op.ino, op.mode, op.uid, op.gid, op.time)
    node.rdev, node.target = 0 if stat.S_ISREG(op.mode) else op.rdev, op.target
    node.size = len(op.target or b"")
    rules.view.add_node(node)
    rules.enter(slot, node, op.time)
    if told is None:
        if RECOVERED_MARK in name:
            rules.beside(slot, parent_ino, name.split(RECOVERED_MARK)[0], "a power cut left it in doubt")
        return None
    rules.remember_move(parent_ino, name, node.ino, (slot.parent, slot.name))
    rules.beside(slot, parent_ino, name, told[1])
    return rules.told(op, *told, node.ino, slot.parent, slot.name)


def _merge(rules: Rules, op: Create, slot: Name) -> Outcome | None:
    """Two directories of one name are one; so are two equal symlinks."""
    there = rules.view.node(slot.ino)
    if there is None or not rules.me:
        return None
    same_dir = there.is_dir and stat.S_ISDIR(op.mode)
    same_link = stat.S_ISLNK(op.mode) and stat.S_ISLNK(there.mode) and there.target == op.target
    if not (same_dir or same_link):
        return None
    rules.redirects.redirect(op.ino, there.ino)
    return rules.told(op, errno.EEXIST, "it exists already", there.ino, slot.parent, slot.name)


def link(rules: Rules, op: Link) -> Outcome | None:
    check_new_name(op.name)
    node = rules.view.node(rules.real(op.ino))
    if node is None:
        raise Refuse(errno.ENOENT, "the file was removed")
    if node.is_dir:
        raise Refuse(errno.EPERM, "a directory has one name")
    if node.nlink >= LINK_MAX:
        raise Refuse(errno.EMLINK, "too many names")
    parent_ino = rules.real(op.parent)
    if rules.directory(parent_ino) is None:
        # The file has another name, so nothing is lost by leaving this one out.
        if not rules.me:
            raise Refuse(errno.ENOENT, "the directory does not exist")
        return rules.told(op, errno.ENOENT, "its directory was removed")
    slot = rules.view.slot(parent_ino, op.name)
    told = None
    if slot.ino == node.ino and rules.me:
        return None  # both made the same name for the same file
    if slot.ino:
        slot = rules.free_name(parent_ino, op.name, op.time)
        rules.remember_move(parent_ino, op.name, node.ino, (slot.parent, slot.name))
        told = rules.told(op, errno.EEXIST, "the name was taken first", node.ino, slot.parent, slot.name)
    rules.enter(slot, node, op.time)
    node.ctime = op.time
    rules.beside(slot, parent_ino, op.name, "the name was taken first")
    return told


def unlink(rules: Rules, op: Unlink) -> Outcome | None:
    parent_ino, ino = rules.real(op.parent), rules.real(op.ino)
    slot = rules.locate(parent_ino, op.name, ino)
    node = rules.view.node(ino)
    if slot is None:
        return _removed_elsewhere(rules, op, node, parent_ino)
    assert node is not None, "an entry names an inode that exists"
    if node.is_dir:
        raise Refuse(errno.EISDIR, "it is a directory")
    if node.nlink == 1 and node.is_file and rules.changed_since(node, op.base):  # rule 8
        return rules.told(op, errno.EBUSY, "kept: the other changed it", 0, slot.parent, slot.name)
    rules.leave(slot, node, op.time)
    return None


def rmdir(rules: Rules, op: Rmdir) -> Outcome | None:
    parent_ino, ino = rules.real(op.parent), rules.real(op.ino)
    slot = rules.locate(parent_ino, op.name, ino)
    node = rules.view.node(ino)
    if slot is None:
        return _removed_elsewhere(rules, op, node, parent_ino)
    assert node is not None, "an entry names an inode that exists"
    if not node.is_dir:
        raise Refuse(errno.ENOTDIR, "it is no directory")
    if ino == ROOT_INO:
        raise Refuse(errno.EBUSY, "it is the root")
    if not rules.view.is_empty(ino):  # rule 8
        return rules.told(op, errno.ENOTEMPTY, "kept: it is not empty", 0, slot.parent, slot.name)
    if rules.me and ino != op.ino and slot.writer != rules.me:
        # The other made it too (mkdir against mkdir): it is not this session's alone to remove.
        return rules.told(op, errno.EBUSY, "kept: the other made it too", 0, slot.parent, slot.name)
    rules.leave(slot, node, op.time)
    return None


def _removed_elsewhere(
    rules: Rules, op: Unlink | Rmdir, node: Node | None, parent_ino: int
) -> Outcome | None:
    """The name is not there any more, or means something else: rules 2 and 8."""
    there = rules.view.name(parent_ino, op.name)
    if not rules.me:
        raise Refuse(errno.ENOENT if there is None else errno.EBUSY, "it was removed or replaced")
    if there is None and node is None:
        return None  # both removed it
    if there is not None:
        return rules.told(op, errno.EBUSY, "kept: the other replaced it", 0, there.parent, there.name)
    assert node is not None
    at = rules.view.names_of(node.ino)
    where = (at[0].parent, at[0].name) if at else (0, b"")
    return rules.told(op, errno.ENOENT, "kept: the other moved it", 0, *where)


def _check_new(op: Create) -> None:
    if not 0 <= op.mode <= 0o177777 or (kind := stat.S_IFMT(op.mode)) not in _TYPES:
        raise Refuse(errno.EINVAL, "no such type of file")
    if not (0 <= op.uid <= ID_MAX and 0 <= op.gid <= ID_MAX and op.rdev >= 0) or op.ino <= ROOT_INO:
        raise Refuse(errno.EINVAL, "a number is out of range")
    if (kind == stat.S_IFLNK) != (op.target is not None):
        raise Refuse(errno.EINVAL, "a symlink, and only that, has a target")
    if op.target is not None and not 0 < len(op.target) <= SYMLINK_MAX:
        raise Refuse(errno.ENAMETOOLONG if op.target else errno.ENOENT, "a target has 1 to 4095 bytes")
    if op.target is not None and b"\0" in op.target:
        raise Refuse(errno.EINVAL, "a target holds no NUL")
