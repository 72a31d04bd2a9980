"""What the outcome of an operation does to the inodes it was about.

Functions of a `Committer`, which has logged the answer before it calls them; the volume's thread.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from fsd.model.errors import PosixError
from fsd.model.ops import CONFLICT, REFUSED, Content, Create, Op, Outcome
from fsd.vfs.content import Flight, operation
from fsd.vfs.core import Core
from fsd.vfs.differ import becomes, stale, stale_name
from fsd.vfs.lost import came_back
from fsd.vfs.node import Inode
from fsd.vfs.queue import Queued, Touched, touched

if TYPE_CHECKING:
    from fsd.vfs.commit import Committer

COMMITTED: Final = -1  # `born` of an inode the server has, in a version not read yet
# What a change of names is refused with when another mount was there first.
LATE: Final = frozenset(
    (
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EINVAL,
        errno.EBUSY,
        errno.EMLINK,
    )
)


def done(committer: Committer, queued: Queued, about: Touched, outcome: Outcome | None, seq: int) -> bool:
    """One operation, which touches `about`, has its outcome. True: a new session is needed to go on (see
    `switch`)."""
    core = committer.core
    op = queued.op
    assert op is not None
    inos, names = about
    if core.asking:
        where = ((core.local(outcome.parent), outcome.name),) if outcome and outcome.parent else ()
        core.meanwhile.append((seq, names + where, inos, True))
    committer.committed_ops += 1
    committer.forget(queued, about)
    if queued.flight is not None:
        core.flights.pop(queued.flight.key, None)
    by_ino, same = core.nodes.by_ino, core.wire.empty
    for ino in inos:
        node = by_ino.get(ino)
        if node is not None and not node.born:
            # Not `seq`: the row is of that commit now, but others may have changed other fields of it
            # before, and an answer with the same `born` would be taken for known.
            node.born = COMMITTED
        if not same:
            also = core.local(core.wire.out(ino))
            if also != ino:
                stale(core, also)  # the same inode under another number
    if isinstance(op, Create) and outcome is None:
        _created(core, op.ino, seq)
    if isinstance(op, Content):
        _landed(committer, queued, outcome, seq)
    return outcome is not None and _differs(committer, op, outcome)


def _created(core: Core, ino: int, seq: int) -> None:
    """The server's (empty) content of a new file is of that commit: the base of what follows."""
    node = core.nodes.by_ino.get(ino)
    if node is not None and not node.cseq:
        node.cseq = seq
        if node.content is not None:
            node.content.cseq = max(node.content.cseq, seq)


def _landed(committer: Committer, queued: Queued, outcome: Outcome | None, seq: int) -> None:
    """A content operation is done: the file's base is now what it said."""
    core = committer.core
    flight = queued.flight
    assert flight is not None
    node = core.nodes.by_ino.get(flight.ino)
    if node is None or node.content is None or flight not in node.content.flights:
        return
    content = node.content
    if outcome is not None and outcome.status == REFUSED:
        _refused_content(committer, node, flight)
        return
    # Not simply stored: what the server has is something else, so the base it counts from stays.
    applied = outcome is None
    base = content.cseq
    # A dense file may get holes too: blocks of zeros are none of the list's.
    counts = bool(node.rdev) or any(index not in flight.blocks for index in flight.touched)
    held = content.held(flight.touched, node.size) if counts else 0
    content.landed(flight, seq if applied else base)
    committer.flusher.told_base(flight.ino, base, seq if applied else None)
    if applied:
        node.cseq = seq
        fewer = held - content.held(flight.touched, node.size) if counts else 0
        if fewer:  # what was made whole has none of its small holes any more, what is all zeros is one
            node.rdev += fewer
            node.stamp += 1
        core.recent.made(queued.sources)
    if outcome is not None and outcome.ino and outcome.ino != core.wire.out(flight.ino):
        content.cseq = node.cseq = seq  # it is a file of its own now
    if node.gone:
        if not content.flights:
            core.dirty.pop(node.ino, None)
    elif not content.unclean:
        core.dirty.pop(node.ino, None)
    core.settle(node)
    core.forget_if_unused(node)


def _refused_content(committer: Committer, node: Inode, flight: Flight) -> None:
    """The server did not take a flight. What came after it takes its changes along; without such, the
    file is what the server has again."""
    content = node.file()
    after = content.refused(flight)
    queued = committer.core.queue.get(after.opno) if after is not None else None
    if after is not None and queued is not None:
        queued.sources = after.sources
    if after is not None and queued is not None and isinstance(queued.op, Content) and not after.broken:
        queued.op = operation(after, queued.op.base, full=True)
        kind, ino, _, pieces = committer.recorded(queued)
        committer.core.record_if_room(kind, ino, pieces)
    if not content.unclean:
        committer.core.dirty.pop(node.ino, None)
        committer.core.settle(node)
        committer.core.forget_if_unused(node)


def _differs(committer: Committer, op: Op, outcome: Outcome) -> bool:
    """An outcome other than applied: the names and inodes in it are asked for again."""
    core = committer.core
    if outcome.status == CONFLICT or not (isinstance(op, Content | Create) or outcome.errno not in LATE):
        core.conflicts += 1
    else:
        core.refused += 1
        committer.tell(op.ino, PosixError(outcome.errno, f"the server refused it ({outcome.reason})"))
    if core.lost_after:
        came_back(committer, op, outcome)
    switch = False
    if outcome.status == CONFLICT and outcome.ino and outcome.ino != core.wire.out(op.ino):
        switch = becomes(core, op, outcome)
    inos, names = touched(op)
    for ino in inos:
        stale(core, ino)
    for parent, name in names:
        stale_name(core, parent, name)
    if outcome.parent:
        parent = core.local(outcome.parent)
        stale(core, parent)
        stale_name(core, parent, outcome.name)
    return switch
