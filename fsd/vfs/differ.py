"""What an outcome other than applied does to what is in memory. One thread."""

from __future__ import annotations

import errno

from fsd.model.ops import Content, Op, Outcome
from fsd.vfs.core import Core
from fsd.vfs.log import STATE


def becomes(core: Core, op: Op, outcome: Outcome) -> bool:
    """`op`'s inode is another one on the server now. Programs go on with it under the number they know.

    True when the old number still exists there and is the other's: this session cannot name that file any
    more (the server takes its number for the copy), so a new session is needed.
    """
    here = core.nodes.by_ino.get(op.ino)
    if here is not None and here.is_dir:
        here.complete = False  # it has whatever the other put into it
        here.names_stale.update(here.entries)
    twin = core.wire.known(outcome.ino)
    core.wire.put(op.ino, outcome.ino)
    core.record_if_room(STATE, 0, [core.state()])  # a replay finds it in the answer too
    if twin is not None and twin != op.ino and twin in core.nodes.by_ino:
        # The one inode was in memory under both numbers: the one programs may hold open stays. So does the
        # other while it has changes of its own or is open: its operations go to the same inode.
        core.invalidate(twin)
        there = core.nodes.by_ino[twin]
        if there.where is not None:
            stale_name(core, *there.where)
        if there.busy or there.handles:
            there.stale = True
        else:
            del core.nodes.by_ino[twin]
    _stale_names_of(core, op.ino)
    return isinstance(op, Content) and outcome.errno == errno.EEXIST


def _stale_names_of(core: Core, ino: int) -> None:
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
