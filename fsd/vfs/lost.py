"""Recovery after a power cut took the end of the log, where the server had committed what was in it.

The server then passed over operations that the log still has, and removed files that the log still changes.
Nothing of that comes back under its own name, and nothing is lost: it is put beside, as NAME.recovered-….
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from fsd.model.names import recovered_name
from fsd.model.ops import (
    CONFLICT,
    RENAME,
    RENAME_NOREPLACE,
    Content,
    Create,
    Op,
    Outcome,
    Rename,
    Setattr,
    Setxattr,
)

if TYPE_CHECKING:
    from fsd.vfs.commit import Committer
    from fsd.vfs.replay import Replay

# Who empties a file to fill it anew writes within so many ns.
REPLACED_WITHIN: Final = 5_000_000_000


def leave_whole(replay: Replay) -> None:
    """A file that was emptied in the last seconds before the end of the log, and has nothing written to it
    behind that, has most likely lost the content it was emptied for: it stays as it was before.

    What was sent stays as sent, what was synced (a STATE follows it) as synced; and who emptied it long
    before the end meant it: the log would have had the rest."""
    for ino, past in replay.files.items():
        rest = list(past.changes)
        while rest and rest[-1].end < 0 == rest[-1].start:
            if replay.newest - rest[-1].time >= REPLACED_WITHIN:
                break
            rest.pop()
        if len(rest) == len(past.changes) or not (rest or past.base_size):
            continue
        frozen = max((item.frozen for item in replay.contents(ino)), default=past.frozen)
        if past.changes[len(rest)].pos < max(frozen, replay.settled):
            continue
        past.changes = rest
        if rest:
            past.mtime = past.ctime = rest[-1].time


def put_off(committer: Committer) -> bool:
    """The server does not know the first operation it was sent: it was cancelled in the lost end of the log
    (made and removed before it was sent), or this is a copy of a machine where that was done. It goes last,
    under a new number, and its name says that it is doubtful. Or the server knows a later form of it: a
    directory's times move in the operation that holds them already (`Committer.cancel`). Then what is here is
    nothing new. False: another kind of difference."""
    core = committer.core
    first = core.queue.sent[0]
    op = first.op
    if op is None or first.opno > core.lost_after:
        return False
    if isinstance(op, Setattr) and op.ino not in core.put_off:
        committer.commit = None
        core.queue.sent = []
        committer.forget(core.queue.remove(op.opno))
        core.check_wants()
        return True
    if isinstance(op, Create):
        core.put_off.add(op.ino)
        op = op._replace(name=recovered_name(op.name, core.options.hostname, op.time))
    elif not (isinstance(op, Setattr | Setxattr | Content) and op.ino in core.put_off):
        return False
    committer.commit = None
    core.queue.sent = []
    committer.renumber(first, op)
    # What was made for the file meanwhile follows its making.
    for later in core.queue.of(op.ino):
        if core.lost_after < later.opno < first.opno:
            committer.renumber(later, later.op)
    core.check_wants()  # who waits for the old number waits for nothing any more
    return True


def came_back(committer: Committer, op: Op, outcome: Outcome) -> None:
    """Content met a file that is gone, and the server brought it back: it was most likely removed in the
    lost end of the log."""
    core = committer.core
    if not (isinstance(op, Content) and outcome.status == CONFLICT and outcome.errno == errno.ENOENT):
        return
    if not outcome.ino or b".recovered-" in outcome.name:
        return
    parent = core.local(outcome.parent)
    name = recovered_name(outcome.name, core.options.hostname, op.mtime)
    committer.add(
        Rename(
            core.take_opno(),
            RENAME,
            parent,
            outcome.name,
            core.local(outcome.ino),
            parent,
            name,
            RENAME_NOREPLACE,
            0,
            0,
            op.mtime,
        )
    )
