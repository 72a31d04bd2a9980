"""Another mount session for the same process: what changes when operations go on under a new number.

Needed when this process turns out to be a copy of another, when the server lost the session, and when the
server takes one of this session's numbers for a conflict copy.
"""

from __future__ import annotations

from fsd.model.ops import Content, Create, Op, Rename, Unlink
from fsd.model.plain import dataclass
from fsd.remote.api import Exclusive, Remote, SessionInfo, SessionStart
from fsd.vfs.core import Core
from fsd.vfs.types import FAST, Cache


@dataclass(frozen=True, slots=True, eq=False)
class SessionJob:
    """Start another mount session."""

    info: SessionInfo
    lane: str = FAST

    def run(self, remote: Remote, cache: Cache) -> SessionStart:
        return remote.start_session(self.info)


def session_info(core: Core) -> SessionInfo:
    """What the server is told of this mount."""
    options = core.options
    exclusive = None
    if core.fence if core.recovering else options.exclusive:
        before = (core.session, core.ticket, core.acked - core.shift) if core.session else None
        # A recovery knows no top: it goes on with the lease that the log was written under.
        exclusive = Exclusive(core.wire.out(core.root_ino), options.lease_ttl, before)
    return SessionInfo(
        options.mount_id,
        options.hostname,
        options.path,
        options.remote_path.decode("utf-8", "replace"),
        options.read_only,
        options.version,
        exclusive,
        core.mark if core.mark.seq else None,
    )


def switch(core: Core, start: SessionStart) -> None:
    """Go on under the session `start`. Memory only: the caller logs it before anything is sent.

    Unacknowledged operations keep their local numbers and their bases; their wire numbers begin at 1; inodes
    the server never heard of get new numbers on the wire. In the feed, what a copy of this process did under
    the old session looked like this one's own: everything known is asked for again.
    """
    core.session, core.ticket, core.fence = start.session, start.ticket, start.fence
    core.counter = 0
    head = core.queue.head()
    core.shift = (head.opno if head is not None else core.next_op) - 1
    core.acked = max(core.acked, core.shift + 1)  # what lies below is done, or never was
    core.seq = max(core.seq, start.seq)
    core.forget = True
    core.see_leases(core.leases_told)
    for queued in core.queue:
        if isinstance(queued.op, Create):
            core.wire.put(queued.op.ino, core.new_ino())
        if queued.op is not None:
            queued.op = _rebase(core, queued.op)


def _rebase(core: Core, op: Op) -> Op:
    """`op` on what this process knows to be its own newest commit of the file: under the old session that
    needed no saying."""
    if isinstance(op, Content | Unlink):
        return op._replace(base=max(op.base, _known_base(core, op.ino)))
    if isinstance(op, Rename) and op.over:
        return op._replace(over_base=max(op.over_base, _known_base(core, op.over)))
    return op


def _known_base(core: Core, ino: int) -> int:
    node = core.nodes.by_ino.get(ino)
    if node is None:
        return 0
    return node.content.cseq if node.content is not None else node.cseq
