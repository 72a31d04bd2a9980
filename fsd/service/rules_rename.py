"""Rename and exchange (design section 3, Sharing, rules 2, 6, 7); the contract is that of `rules`."""

from __future__ import annotations

import errno

from fsd.model.ops import RENAME_EXCHANGE, RENAME_NOREPLACE, Outcome, Rename
from fsd.service.rules import Refuse, Rules, check_new_name
from fsd.service.view import Name, Node


def rename(rules: Rules, op: Rename) -> Outcome | None:
    check_new_name(op.new_name)
    if op.flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        raise Refuse(errno.EINVAL, "unknown flags")
    ino, over = rules.real(op.ino), rules.real(op.over)
    parent_ino, new_ino = rules.real(op.parent), rules.real(op.new_parent)
    source, node = rules.locate(parent_ino, op.name, ino), rules.view.node(ino)
    if source is None or node is None:  # rule 7
        at = rules.view.names_of(ino) if node is not None else []
        raise Refuse(errno.ENOENT, "the source was removed or moved first", at[0] if at else None)
    if rules.directory(new_ino) is None:
        # The file keeps its old name: nothing is lost, and later operations find it there.
        if not rules.me:
            raise Refuse(errno.ENOENT, "the target's directory does not exist")
        rules.remember_move(new_ino, op.new_name, ino, (source.parent, source.name))
        return rules.told(
            op, errno.ENOENT, "the target's directory was removed", ino, source.parent, source.name
        )
    if node.is_dir and rules.view.inside(new_ino, ino):
        raise _below_itself(source)
    if op.flags == RENAME_EXCHANGE:
        return _exchange(rules, op, source, node, new_ino, over)
    return _rename_to(rules, op, source, node, new_ino, over)


def _below_itself(source: Name) -> Refuse:
    """Rule 7."""
    return Refuse(errno.EINVAL, "a directory cannot move below itself", source)


def _check_above(rules: Rules, node: Node, target: Name, source: Name) -> None:
    """The target may be where a conflict put it, in another directory than the operation says."""
    if node.is_dir and rules.view.inside(target.parent, node.ino):
        raise _below_itself(source)


def _rename_to(rules: Rules, op: Rename, source: Name, node: Node, new_ino: int, over: int) -> Outcome | None:
    target = rules.view.slot(new_ino, op.new_name)
    if target is source:
        return None
    if target.ino == node.ino:
        # Two names of one file: POSIX says that nothing happens. Where the session did not know of the
        # second (the other linked it just there), its file is at the target already.
        if rules.me and over != node.ino:
            rules.leave(source, node, op.time)
        return None
    if target.ino and target.ino != over and over:
        # The session's own idea of the target may live under a conflict name.
        target = rules.locate(new_ino, op.new_name, over) or target
        if target is source:
            return None  # what it would replace went to a conflict name, and is what moves
        _check_above(rules, node, target, source)
    why = None if not target.ino else _not_replaced(rules, op, node, target, over)
    if why is None:
        if target.ino:
            replaced = rules.view.node(target.ino)
            assert replaced is not None, "an entry names an inode that exists"
            rules.leave(target, replaced, op.time)
        _move(rules, source, target, node, op.time)
        if (target.parent, target.name) == (new_ino, op.new_name):
            return None
        rules.remember_move(new_ino, op.new_name, node.ino, (target.parent, target.name))
        why = errno.EEXIST, "the name was taken first"
    elif not rules.me:
        raise Refuse(*why)
    else:  # rules 2 and 6
        target = rules.free_name(new_ino, op.new_name, op.time)
        _move(rules, source, target, node, op.time)
        rules.remember_move(new_ino, op.new_name, node.ino, (target.parent, target.name))
    rules.beside(target, new_ino, op.new_name, why[1])
    return rules.told(op, *why, node.ino, target.parent, target.name)


def _not_replaced(rules: Rules, op: Rename, node: Node, target: Name, over: int) -> tuple[int, str] | None:
    """Why the present target stays; None when it is to be replaced."""
    there = rules.view.node(target.ino)
    assert there is not None, "an entry names an inode that exists"
    if op.flags == RENAME_NOREPLACE:
        return errno.EEXIST, "the name was taken first"
    if there.is_dir != node.is_dir:
        return (errno.EISDIR if there.is_dir else errno.ENOTDIR), "the target is of another kind"
    if target.ino != over:
        return errno.EEXIST, "the name was taken first"
    if there.is_dir and not rules.view.is_empty(there.ino):
        return errno.ENOTEMPTY, "the target directory is not empty"
    if there.is_file and there.nlink == 1 and rules.changed_since(there, op.over_base):
        return errno.EBUSY, "the other changed the target"
    return None


def _move(rules: Rules, source: Name, target: Name, node: Node, time: int) -> None:
    """The entry goes from `source` to the absent `target`; the inode's links stay as they are."""
    rules.view.take(source)
    rules.view.place(target, node.ino, rules.me)
    links = 1 if node.is_dir and source.parent != target.parent else 0
    rules.touch_parent(source.parent, time, -links)
    rules.touch_parent(target.parent, time, links)
    node.ctime = time
    node.changed = True
    if node.is_dir:
        node.parent = target.parent


def _exchange(rules: Rules, op: Rename, source: Name, node: Node, new_ino: int, over: int) -> Outcome | None:
    target = rules.locate(new_ino, op.new_name, over) if over else rules.view.name(new_ino, op.new_name)
    other = None if target is None else rules.view.node(target.ino)
    if target is None or other is None:
        there = rules.view.name(new_ino, op.new_name)
        if there is None or not rules.me:
            raise Refuse(errno.ENOENT, "the other name is not there", source)
        return rules.told(
            op,
            errno.EEXIST,
            "not exchanged: the name was taken first",
            node.ino,
            source.parent,
            source.name,
        )
    if target is source:
        return None
    _check_above(rules, node, target, source)
    if other.is_dir and rules.view.inside(source.parent, other.ino):
        raise _below_itself(source)
    rules.view.take(source)
    rules.view.take(target)
    rules.view.place(source, other.ino, rules.me)
    rules.view.place(target, node.ino, rules.me)
    apart = source.parent != target.parent
    rules.touch_parent(source.parent, op.time, (other.is_dir - node.is_dir) if apart else 0)
    rules.touch_parent(target.parent, op.time, (node.is_dir - other.is_dir) if apart else 0)
    for moved, slot in ((node, target), (other, source)):
        moved.ctime = op.time
        moved.changed = True
        if moved.is_dir:
            moved.parent = slot.parent
    return None
