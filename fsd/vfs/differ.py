"""What an outcome other than applied does to what is in memory. One thread."""

from __future__ import annotations

import errno

from fsd.model.ops import Content, Op, Outcome
from fsd.vfs.core import Core
from fsd.vfs.log import STATE
from fsd.vfs.queue import touched


def becomes(core: Core, op: Op, outcome: Outcome) -> bool:
    """`op`'s inode is another one on the server now. Programs go on with it under the number they know.

    True when the old number still exists there and is the other's: this session cannot name that file any
    more (the server takes its number for the copy), so a new session is needed.
    """
    here = core.nodes.by_ino.get(op.ino)
    if here is not None and here.is_dir:
        here.complete = False  # it has whatever the other put into it
        here.names_stale.update(here.entries)
    numbers = (op.ino,) if here is None else core.nodes.numbers(here)
    was, twin = core.wire.out(op.ino), core.wire.known(outcome.ino)
    core.wire.put(op.ino, outcome.ino)
    if core.wire.known(was) in numbers:
        # A copy that was found as another file and joined loses again: its number on the wire means the file
        # that stays there, and here still this one, so that one needs another.
        core.alias(core.new_ino(), was)
    core.record_if_room(STATE, 0, [core.state()])  # a replay finds it in the answer too
    if twin is not None and twin != op.ino and twin in core.nodes.by_ino:
        core.invalidate(twin)
        core.met.append((op.ino, twin))
    for number in numbers:
        stale_names_of(core, number)
    for later in core.queue.of(op.ino):
        # The server does it to a file that has another name there: the old name may still mean the other's.
        if later.op is not None:
            for parent, name in touched(later.op)[1]:
                stale_name(core, parent, name)
    return isinstance(op, Content) and outcome.errno == errno.EEXIST


def stale_names_of(core: Core, ino: int) -> None:
    """Every name an inode is known under is asked for again."""
    for node in list(core.nodes.by_ino.values()):
        if node.is_dir:
            for name in [name for name, child in node.entries.items() if child == ino]:
                stale_name(core, node.ino, name)


def stale(core: Core, ino: int) -> None:
    """Ask for the inode's attributes before they are shown again."""
    node = core.nodes.by_ino.get(ino)
    if node is not None:
        node.stale = True
        node.seen = min(node.seen, core.seq)
        core.invalidate(ino)


def stale_name(core: Core, parent: int, name: bytes) -> None:
    """Ask what the name means before it is used again."""
    node = core.nodes.by_ino.get(parent)
    if node is not None and node.is_dir:
        node.names_stale.add(name)
        core.invalidate(parent, name)
