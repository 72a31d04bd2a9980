"""One inode of the server in memory under two numbers.

A commit makes a conflict copy of a file, and its answer is lost. Before the same commit is answered, a
program finds that copy under its new name, as another file with a number of its own. With the answer the two
are one. While only one of them has changes they become one inode, which both numbers mean. Where both were
changed neither may replace the other (programs took them for different files, and a flush of each would win
whole): the second goes on as a file of its own beside the copy. One thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsd.model.errors import NoSpace
from fsd.model.names import conflict_name
from fsd.model.ops import CREATE, Create
from fsd.vfs.differ import stale, stale_names_of
from fsd.vfs.log import APART
from fsd.vfs.node import Inode
from fsd.vfs.records import Apart, packb

if TYPE_CHECKING:
    from fsd.vfs.commit import Committer


def meet(committer: Committer) -> bool:
    """Deal with all that met. False: the disk under the log is full, nothing may be sent before."""
    core = committer.core
    while core.met:
        first, second = core.met[0]
        try:
            _meet(committer, first, second)
        except NoSpace as exc:
            committer.on_full_disk(exc)
            return False
        core.met.pop(0)
    return True


def _meet(committer: Committer, first: int, second: int) -> None:
    """`first` has the number on the wire that `second` had."""
    core = committer.core
    one, two = core.nodes.by_ino.get(first), core.nodes.by_ino.get(second)
    if one is two or two is None:
        return
    if one is None:
        core.alias(second, core.wire.out(first))
        stale(core, second)
    elif one.gone or two.gone or not (one.is_file and two.is_file):
        # What has no name is for its open handles alone, and directories hold nothing that could be lost.
        if two.busy or two.handles:
            two.stale = True
        else:
            core.nodes.drop(two)
    elif not one.file().unclean:
        _join(committer, one, two)
        core.alias(second, core.wire.out(first))
    elif not two.file().unclean:
        one.where = two.where or one.where
        _join(committer, two, one)
    else:
        apart(committer, two, one)


def _join(committer: Committer, node: Inode, stays: Inode) -> None:
    """Whoever has `node`, which has no changes of content, goes on with `stays`."""
    core = committer.core
    stays.file().writers += node.file().writers
    core.nodes.join(node, stays)
    committer.joined(node, stays)
    stale_names_of(core, stays.ino)
    stale(core, stays.ino)


def apart(committer: Committer, node: Inode, other: Inode) -> None:
    """What programs made of `node` becomes a file of its own beside `other`, which keeps the name and what
    was done to it. Raises `NoSpace`; then nothing changed."""
    core = committer.core
    content = node.file()
    parent, name = node.where or other.where or (core.root_ino, b"inode-%x" % node.ino)
    copy = conflict_name(name, core.options.hostname, core.stamp())
    create = Create(
        core.next_op, CREATE, parent, copy, node.ino, node.mode, node.uid, node.gid, 0, None, node.mtime
    )
    numbered = tuple(queued.opno for queued in core.queue.of(node.ino) if queued.flight is not None)
    record = Apart(node.ino, other.ino, numbered, create, core.new_ino())
    pos = core.record(APART, node.ino, 0, [packb(record)])
    core.take_opno()
    core.wire.put(node.ino, record.wire)
    keys = {flight.key for flight in content.flights}
    waiting = [
        one for one in core.commit_wants if one.flights & keys or (numbered and one.opno >= numbered[0])
    ]
    _leave(committer, node, other, numbered)
    node.nlink, node.born, node.cseq = 1, 0, 0
    node.stamp += 1
    content.cseq = 0
    content.frozen, content.window, content.full, content.append_from = content.acked, True, True, None
    directory = core.nodes.by_ino.get(parent)
    if directory is not None and directory.is_dir:
        core.nodes.enter(directory, copy, node.ino)
        core.invalidate(parent, copy)
    node.where = (parent, copy)
    committer.enqueue(create, pos)
    try:
        committer.flusher.reserve(node)
    except NoSpace as exc:
        core.disk_full(exc)  # it gets its number when it is made
    for flight in content.flights:
        for one in waiting:
            if flight.opno:
                one.opno = max(one.opno, flight.opno)
            else:
                one.flights.add(flight.key)
    committer.cutter.stretch()
    core.conflicts += 1


def _leave(committer: Committer, node: Inode, other: Inode, numbered: tuple[int, ...]) -> None:
    """Its content operations so far are never sent; its names, and what else is queued for it, are those of
    `other`."""
    core = committer.core
    for opno in numbered:
        committer.forget(core.queue.remove(opno))
    content = node.file()
    for flight in list(content.flights):
        committer.flusher.discard(content, flight)
    moved = core.queue.of(node.ino)
    for queued in moved:
        if queued.op is not None:
            committer.mark(queued.op, -1)
    core.queue.redirect(node.ino, other.ino)
    for queued in moved:
        if queued.op is not None:
            committer.mark(queued.op, 1)
    other.where = node.where or other.where
    stale_names_of(core, node.ino)
    core.nodes.mean({node.ino}, other.ino)
