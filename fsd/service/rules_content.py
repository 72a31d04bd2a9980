"""What becomes of a content operation: stored, appended behind the other's bytes, or a copy beside it.

Part of `rules` (design section 3, Sharing, rules 1, 4, 5, 8, 9), in a module of its own for its size.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from fsd.model import blocks
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Part, Parts
from fsd.model.limits import BLOCK, FILE_MAX, PATCHES_MAX
from fsd.model.ops import Content, Outcome
from fsd.service.rules import NeedFull, Refuse, Rules
from fsd.service.view import Name, Node, View


class NeedFold(Exception):
    """An append would give a block more parts than it may have: `parts` must become one blob first."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts


def content(rules: Rules, op: Content) -> Outcome | None:
    """Apply one content operation. Its parts were decoded and checked by the caller (`check`)."""
    ino = rules.real(op.ino)
    node = rules.view.node(ino)
    if node is None:
        return _come_back(rules, op, ino)
    if not node.is_file:
        raise Refuse(errno.EINVAL, "only a regular file has content")
    if not rules.changed_since(node, op.base):
        _store(rules, node, op)
        return None
    if op.full and _same(rules, node, op):
        return None
    if rules.folds is not None and _can_append(node, op):  # rule 5
        return _append(rules, node, op)
    if not op.full:
        raise NeedFull(op.opno)
    return _copy(rules, node, op)  # rule 4


def check(op: Content) -> list[Parts]:
    """The decoded parts of `op`'s blocks in order. Raises `Refuse` (range) and `UsageError` (damaged)."""
    if not 0 <= op.size <= FILE_MAX:
        raise Refuse(errno.EFBIG, "a file has at most 16 TiB")
    if op.appended_from is not None and not 0 <= op.appended_from <= op.size:
        raise Refuse(errno.EINVAL, "an append makes a file longer")
    count = (op.size + BLOCK - 1) // BLOCK
    found, before = [], -1
    for pair in op.blocks:
        idx, raw = _pair(pair)
        if not before < idx < count:
            raise Refuse(errno.EINVAL, "block numbers rise and lie inside the file")
        before = idx
        found.append(blocks.decode(raw))
    return found


def _pair(pair: object) -> tuple[int, bytes | None]:
    if isinstance(pair, tuple) and len(pair) == 2:
        idx, raw = pair
        if type(idx) is int and (raw is None or type(raw) is bytes):
            return idx, raw
    raise Refuse(errno.EINVAL, "a block is named by its number and its parts")


def _clipped(idx: int, raw: bytes | None, size: int) -> bytes | None:
    """The stored form without bytes behind the end of the file: growing it later must show zeros there."""
    room = size - idx * BLOCK
    if raw is None or room >= BLOCK:
        return raw
    parts = blocks.decode(raw)
    if all(part.off + part.length <= room for part in parts):
        return raw
    return blocks.encode(blocks.clip(parts, room))


def _store(rules: Rules, node: Node, op: Content) -> None:
    """The operation's content becomes the file's."""
    view = rules.view
    if op.appended_from is None or op.appended_from != node.size or op.size < node.size:
        node.grown = rules.seq
    held = node.size - node.rdev
    named = dict(op.blocks)
    edge = op.size // BLOCK  # the first block that is not whole
    if node.size > BLOCK or op.size > BLOCK:
        keep_below = 1 if op.full else edge
        for idx, row in list(view.blocks(node, list(named), keep_below).items()):
            if idx in named or row.parts is None:
                continue
            if op.full or idx * BLOCK >= op.size:
                held += _put(view, node, idx, None)
            elif idx == edge:
                held += _put(view, node, idx, _clipped(idx, row.parts, op.size))
    if 0 not in named and node.parts is not None:
        left = None if op.full or op.size == 0 else _clipped(0, node.parts, op.size)
        held += _put(view, node, 0, left)
    for idx, raw in op.blocks:
        held += _put(view, node, idx, _clipped(idx, raw, op.size))
    node.size, node.mtime, node.ctime = op.size, op.mtime, op.ctime
    node.rdev = max(0, op.size - held)
    node.cseq, node.writer = rules.seq, rules.me
    node.changed = True


def _put(view: View, node: Node, idx: int, raw: bytes | None) -> int:
    """Give a block, which is loaded, new parts; by how many bytes that is more than it held."""
    before = view.get_block(node, idx)
    view.set_block(node, idx, raw)
    if before == raw:
        return 0
    return blocks.covered(blocks.decode(raw)) - blocks.covered(blocks.decode(before))


def _same(rules: Rules, node: Node, op: Content) -> bool:
    """Whether a full operation says what is there already."""
    if node.size != op.size:
        return False
    there = {idx: row.parts for idx, row in rules.view.blocks(node, (), 1).items() if row.parts is not None}
    if node.parts is not None:
        there[0] = node.parts
    return there == {idx: raw for idx, raw in op.blocks if raw is not None}


def _copy(rules: Rules, node: Node, op: Content) -> Outcome:
    """The loser's content as a file of its own beside the winner's; the session goes on with it."""
    names = rules.view.names_of(node.ino)
    if names:
        parent, name = names[0].parent, names[0].name
    else:
        parent, name = rules.lost_dir(op.ctime).ino, b"inode-%x" % node.ino
    slot = rules.free_name(parent, name, op.ctime)
    made = _new_file(rules, slot, node.mode, node.uid, node.gid, node.xattrs, op)
    for other in names:
        rules.remember_move(other.parent, other.name, made.ino, (slot.parent, slot.name))
    rules.redirects.redirect(node.ino, made.ino)
    rules.beside(slot, parent, name, "the other's content came first")
    return rules.told(op, errno.EEXIST, "the other's content came first", made.ino, slot.parent, slot.name)


def _new_file(
    rules: Rules, slot: Name, mode: int, uid: int, gid: int, xattrs: bytes | None, op: Content
) -> Node:
    made = rules.make_node(rules.new_ino(), mode, uid, gid, op.ctime)
    made.xattrs = xattrs
    rules.view.add_node(made)
    rules.enter(slot, made, op.ctime)
    _store(rules, made, op)
    return made


def _come_back(rules: Rules, op: Content, ino: int) -> Outcome | None:
    """Content of a file that the other removed: it comes back (rules 8 and 9), as a new inode, since the
    other may still hold the old one open."""
    gone = rules.view.gone(ino)
    if not rules.me:
        raise Refuse(errno.ENOENT, "the file was removed")
    if not op.full:
        raise NeedFull(op.opno)
    mode, uid, gid, xattrs = 0o100600, 0, 0, None
    parent, name = 0, b"inode-%x" % ino
    if gone is not None:
        mode, uid, gid, xattrs = gone.mode, gone.uid, gone.gid, gone.xattrs
        parent, name = gone.parent, gone.name
    directory = rules.directory(parent) if parent else None
    slot = rules.view.slot((directory or rules.lost_dir(op.ctime)).ino, name)
    if slot.ino:
        slot = rules.free_name(slot.parent, name, op.ctime)
    made = _new_file(rules, slot, mode, uid, gid, xattrs, op)
    rules.redirects.redirect(ino, made.ino)
    rules.beside(slot, parent, name, "the other removed it, and its place was taken or gone")
    if (slot.parent, slot.name) != (parent, name):
        rules.remember_move(parent or ROOT_INO, name, made.ino, (slot.parent, slot.name))
    return rules.told(
        op, errno.ENOENT, "the other removed it: it came back", made.ino, slot.parent, slot.name
    )


# Append on append.


def _can_append(node: Node, op: Content) -> bool:
    """Whether both sides only appended since `op.base`."""
    return op.appended_from is not None and node.grown <= op.base and op.appended_from <= node.size


def _append(rules: Rules, node: Node, op: Content) -> Outcome:
    """Add the operation's new bytes behind what is there.

    The file's writer becomes 0 (the service): what the session holds is not what is stored now, so its next
    content on the old base must come here again instead of passing as its own.
    """
    folds = rules.folds
    assert op.appended_from is not None
    assert folds is not None
    shift = node.size - op.appended_from
    if op.size + shift > FILE_MAX:
        raise Refuse(errno.EFBIG, "a file has at most 16 TiB")
    changed: dict[int, Parts] = {}
    for at, part in _shifted(op, op.appended_from, shift):
        if at not in changed:
            changed[at] = blocks.decode(rules.view.get_block(node, at))
        if len(changed[at]) > PATCHES_MAX:
            if changed[at] not in folds:
                raise NeedFold(changed[at])
            changed[at] = folds[changed[at]]
        changed[at] = blocks.overlay(changed[at], part)
    held = node.size - node.rdev
    for at, parts in changed.items():
        held += _put(rules.view, node, at, blocks.encode(parts))
    node.size = op.size + shift
    node.rdev = max(0, node.size - held)
    node.mtime, node.ctime = op.mtime, op.ctime
    node.cseq, node.writer = rules.seq, 0
    node.changed = True
    return rules.told(op, errno.EEXIST, "appended behind what the other wrote", node.ino)


def _shifted(op: Content, start: int, shift: int) -> Iterator[tuple[int, Part]]:
    """The parts of bytes [start, size) of `op`, moved by `shift`: (block index, part), later ones on top."""
    for idx, raw in op.blocks:
        first = max(start - idx * BLOCK, 0)
        last = min(op.size - idx * BLOCK, BLOCK)
        if first >= last:
            continue
        for piece in blocks.pieces(blocks.decode(raw), first, last - first):
            at = idx * BLOCK + first + piece.at + shift
            boff, left = piece.boff, piece.length
            while left:
                off = at % BLOCK
                length = min(left, BLOCK - off)
                yield at // BLOCK, Part(off, length, boff, piece.hash)
                at, boff, left = at + length, boff + length, left - length
