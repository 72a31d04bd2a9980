"""Open files without a name hold old segments of the log: what they need of the oldest moves to its end.

Everything else in the log becomes unneeded when it is committed. These are never sent, so a temporary file
that stays open would hold every segment since, whatever is in them.
"""

from __future__ import annotations

from typing import Final

from fsd.model.errors import IntegrityError, NoSpace
from fsd.model.limits import MIB
from fsd.vfs.core import Core
from fsd.vfs.extents import Run
from fsd.vfs.log import PUNCH, SHARE, SHIFT, WRITE, segment_of
from fsd.vfs.node import Inode
from fsd.vfs.records import LENGTH, TIME, Shared, packb, time_of_nameless

PIECE: Final = MIB


def compact(core: Core) -> None:
    """Free the oldest segment if only open files without a name need it, unless the log is mostly theirs.
    Local I/O of at most what they have in that segment. Stops where the disk is full."""
    orphans = map(core.nodes.get, core.orphans)
    holders = [node for node in orphans if node.content is not None and _first(node) is not None]
    if not holders:
        return
    oldest = segment_of(min(_first(node) or 0 for node in holders))
    if segment_of(core.needed(orphans=False)) <= oldest or oldest == segment_of(core.log.tail):
        return
    held = [node for node in holders if segment_of(_first(node) or 0) == oldest]
    live = sum(node.file().extents.total for node in holders)
    if 4 * live > 3 * core.log.used or any(node.file().flights for node in held):
        return
    try:
        for node in held:
            _move(core, node, (oldest + 1) << SHIFT)
    except NoSpace as exc:
        core.disk_full(exc)
    except IntegrityError as exc:
        core.reason = exc.message  # it stays where it is, and is told to whoever reads it
    core.trim()


def _first(node: Inode) -> int | None:
    return node.file().first


def _move(core: Core, node: Inode, edge: int) -> None:
    """What the file has before `edge` of the log is written again at its end, behind a record that says that
    the file has no name."""
    content = node.file()
    first, time = core.record_nameless(node), time_of_nameless(node.mtime)
    for run in [run for run in content.extents if run.pos < edge]:
        if run.ref is not None:
            content.extents.put(run.start, run.end, _log_ref(core, node, run, time), run.ref)
            continue
        for start in range(run.start, run.end, PIECE):
            end = min(run.end, start + PIECE)
            data = core.log.read(run.pos + start - run.start, end - start)
            pos = core.record(WRITE, node.ino, start, [time, data], spare=False)
            content.extents.put(start, end, pos + TIME.size)
    if content.limits:
        # Without flights their order says nothing any more: all cut the base.
        content.limits = [(first, min(size for _, size in content.limits))]
    content.first = min(first, content.needed() or first)


def _log_ref(core: Core, node: Inode, run: Run, time: bytes) -> int:
    """Write a run again whose bytes are not in the log; its new position."""
    assert run.ref is not None
    if not run.ref.hash:
        body = LENGTH.pack(run.end - run.start)
        return core.record(PUNCH, node.ino, run.start, [time, body], spare=False)
    body = packb([Shared(run.start, run.end, run.ref.hash, run.ref.boff)])
    return core.record(SHARE, node.ino, 0, [time, body], spare=False)
