"""An earlier run's log becomes a volume again, under that run's session, and is sent.

The volume made here has stubs for inodes (only what the log tells) and is good for nothing but being
drained. After a power cut the server may have more than the log tells: content the same session committed
later is newer than what is left here, and stays. A file with a damaged range is committed beside its name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.blocks import Parts, decode
from fsd.model.errors import NotDrained, Unavailable, UsageError
from fsd.model.names import recovered_name, show
from fsd.model.ops import CREATE, Create, Setattr
from fsd.model.plain import dataclass, field
from fsd.model.words import counted
from fsd.remote.api import Remote
from fsd.vfs.aside import put_aside
from fsd.vfs.build import FROM_LOG
from fsd.vfs.content import READY, Content, Flight
from fsd.vfs.core import Core
from fsd.vfs.drive import Driver
from fsd.vfs.log import Log
from fsd.vfs.lost import leave_whole
from fsd.vfs.node import Inode
from fsd.vfs.queue import Queued
from fsd.vfs.records import Flown, Reserved, State, result_of
from fsd.vfs.replay import Event, Past, Replay
from fsd.vfs.twins import apart
from fsd.vfs.types import Cache, Told, VolumeOptions
from fsd.vfs.volume import Volume
from fsd.wire.messages import ATTRS, BLOCKS, Mark

# Inode numbers made by a recovery: far above those the run itself can have used.
RECOVERY_COUNTER: Final = 1 << 39
# Operation numbers after a power cut: above those that were in the lost tail.
LOST_NUMBERS: Final = 1 << 20
ASK_TIMEOUT: Final = 30.0
AGAIN: Final = 0.2  # seconds until a server that is away is asked again
ASK_AT_ONCE: Final = 1000
BLOCKS_AT_ONCE: Final = 1024


@dataclass(slots=True)
class Report:
    """What a recovery did. `operations` and `files` were sent; `damaged` are the names under which files
    with ranges lost in a power cut were put; `kept` counts files of which the server had newer content."""

    session: int
    operations: int = 0
    files: int = 0
    conflicts: int = 0
    refused: int = 0
    kept: int = 0
    damaged: list[str] = field(default_factory=list)
    log_copy: Path | None = None  # of a log that could be read only in part

    def notes(self) -> list[str]:
        """What people have to know of it."""
        found = []
        if self.log_copy is not None:
            found.append(
                f"the log of an earlier run is damaged, and was read only in part; "
                f"it is kept in {self.log_copy}"
            )
        if self.damaged:
            found.append(
                f"{len(self.damaged)} files lost bytes when the machine stopped: {self.damaged[0]}, …"
            )
        if self.refused:
            what = counted(self.refused, "change")
            verb = "is" if self.refused == 1 else "are"
            found.append(
                f"{what} of an earlier run could not be sent and {verb} kept: `fsd recover` with this "
                f"mount's path says more"
            )
        return found


class Held(NamedTuple):
    """A writer lease that a log was written under, as it was when the log was sent."""

    session: int
    ticket: bytes
    next_op: int  # on the wire
    fence: int


class Recovery:
    """One recovery. `run` blocks (network, disk). `shared`: the operations claim no writer lease. `held` is
    the lease they were sent under."""

    def __init__(
        self,
        options: VolumeOptions,
        host: Host,
        remote: Remote,
        cache: Cache,
        *,
        patience: float = 60.0,
        shared: bool = False,
        told: Told | None = None,
    ) -> None:
        self.options, self.host, self.remote, self.cache = options, host, remote, cache
        self.patience = patience
        self.shared = shared
        self.told = told
        self.held: Held | None = None
        self.session = 0  # the one the log was written under, or that went on for it

    def run(self) -> tuple[Report | None, int]:
        """Send what is left and delete the log. Returns what was done (None: nothing was left) and the
        number to begin the next log with. Raises `NotDrained` or what the server said; then the log stays."""
        log = Log.reopen(self.options.state_dir, self.host, segment_size=self.options.segment_size)
        try:
            aside: list[Path] = []
            replay = Replay(log, self.host, lambda: self._put_aside(log, aside), self.told)
            replay.run()
            report = Report(0, log_copy=aside[0]) if aside else None
            if replay.state is None:
                return report, log.retire()
            self._check(replay)
            if replay.doubtful:
                leave_whole(replay)
            self.session = replay.state.session
            if self.shared:
                replay.state = replay.state._replace(fence=0)
            if replay.state.fence:
                state = replay.state
                self.held = Held(state.session, state.ticket, replay.acked - state.shift, state.fence)
            if not replay.ops and not any(p.changes for p in replay.files.values()):
                return report, log.retire()
            log.cut_tails()
            report = self._send(log, replay)
            report.log_copy = aside[0] if aside else None
            return report, log.retire()
        except BaseException:
            log.abandon()
            raise

    def _put_aside(self, log: Log, aside: list[Path]) -> None:
        aside.append(put_aside(self.options.state_dir, log, self.host))

    def _check(self, replay: Replay) -> None:
        assert replay.state is not None
        mine = self.options.file_system
        if mine and replay.state.file_system and replay.state.file_system != mine:
            raise UsageError(
                f"the state directory {self.options.state_dir} belongs to filesystem "
                f"{replay.state.file_system}, not {mine}",
                hint="use another --state-dir, or recover it with that filesystem's token",
            )

    def _send(self, log: Log, replay: Replay) -> Report:
        assert replay.state is not None
        report = Report(replay.state.session)
        self._look_at_history(replay.state)
        if replay.doubtful:
            self._drop_older(replay, report)
        volume = rebuild(self.options, self.host, log, replay, report)
        report.operations = len(volume.core.queue)
        report.files = len(volume.core.dirty)
        driver = Driver(volume, self.remote, self.cache, patience=self.patience, told=self.told)
        for flight in list(volume.core.flights.values()):
            volume.flusher.start(volume.core.nodes.get(flight.ino).file())
        driver.until(volume.barrier())
        while volume.core.lost_after and len(volume.core.queue):
            # What comes beside has numbers behind the barrier's.
            driver.until(volume.barrier())
        report.conflicts, report.refused = volume.core.conflicts, volume.core.refused
        self.session = volume.core.session
        if self.held is not None:
            core = volume.core
            self.held = Held(core.session, core.ticket, core.acked - core.shift, core.fence)
        if len(volume.core.queue) or volume.core.dirty:
            left = volume.pending()
            raise NotDrained(f"{left.operations} operations, {left.files} files left: {left.reason}")
        return report

    def _look_at_history(self, state: State) -> None:
        """Before anything is made of the log: `HistoryChanged` is the reason, not what is missing for it.
        A server that is away is waited for, as for what follows."""
        mark, since = Mark(*state.mark), self.host.monotonic()
        while mark.seq:
            try:
                self.remote.changes(mark.seq, state.session, 0.0, known=mark)
                return
            except Unavailable:
                if self.host.monotonic() - since >= self.patience:
                    raise
            time.sleep(AGAIN)

    def _drop_older(self, replay: Replay, report: Report) -> None:
        """Content this session committed after the last record that reached the disk is newer than what
        the log has."""
        assert replay.state is not None
        inos = [ino for ino, past in replay.files.items() if past.changes]
        for at in range(0, len(inos), ASK_AT_ONCE):
            some = inos[at : at + ASK_AT_ONCE]
            question = (ATTRS, tuple(replay.wire.out(ino) for ino in some))
            _, answers = self.remote.ask([question], ASK_TIMEOUT)
            for ino, attr in zip(some, answers[0]):
                past = replay.files[ino]
                if attr is not None and attr.writer in replay.sessions and attr.cseq > past.cseq:
                    self._catch_up(replay, ino, attr, report)

    def _catch_up(self, replay: Replay, ino: int, attr: Attr, report: Report) -> None:
        """The server has content of this session that the log does not know it has."""
        past = replay.files[ino]
        items = replay.contents(ino)
        same = [i for i, item in enumerate(items) if _result(item) == (attr.size, attr.mtime)]
        if same:
            done = items[: same[-1] + 1]
            if any(isinstance(item, Reserved) for item in done):
                # Made anew it would not be what was sent: its base stood in an answer that is lost.
                for item in done:
                    del replay.ops[_opno(item)]
                past.base, past.base_size = self._blocks(replay, ino, attr), attr.size
                past.frozen = done[-1].frozen
                past.changes = [e for e in past.changes if e.pos >= past.frozen]
            # The log goes on from what the server has. A lost tail may cost the session, and under another
            # this base alone prevents a conflict.
            past.cseq = attr.cseq
        elif not items and not attr.size and attr.mtime in _made_at(replay, ino):
            past.cseq = attr.cseq  # its making was sent, of its content nothing
        else:
            for item in items:
                if isinstance(item, Reserved):
                    del replay.ops[item.opno]
            newest = max((i.frozen for i in replay.contents(ino)), default=past.frozen)
            past.changes = [e for e in past.changes if e.pos < newest]
            report.kept += 1

    def _blocks(self, replay: Replay, ino: int, attr: Attr) -> dict[int, Parts]:
        """The block list the server has."""
        found = {0: attr.first_block()} if attr.parts is not None else {}
        for first in range(1, attr.blocks, BLOCKS_AT_ONCE):
            question = (BLOCKS, replay.wire.out(ino), first, BLOCKS_AT_ONCE)
            _, answers = self.remote.ask([question], ASK_TIMEOUT)
            if answers[0] is not None:
                found.update((index, decode(parts)) for index, parts in answers[0][1])
        return {index: parts for index, parts in found.items() if parts}


def _made_at(replay: Replay, ino: int) -> set[int]:
    """The times of modification a file can have of whose making no answer is known, before any content."""
    mine = [op for op in replay.ops.values() if isinstance(op, Create | Setattr) and op.ino == ino]
    if not any(isinstance(op, Create) for op in mine):
        return set()
    times = (op.time if isinstance(op, Create) else op.mtime for op in mine)
    return {time for time in times if time is not None}


def _result(item: Flown | Reserved) -> tuple[int, int]:
    """Size and mtime of the file after it."""
    return (item.op.size, item.op.mtime) if isinstance(item, Flown) else (item.size, item.mtime)


def _ino(item: Flown | Reserved) -> int:
    return item.op.ino if isinstance(item, Flown) else item.ino


def _opno(item: Flown | Reserved) -> int:
    return item.op.opno if isinstance(item, Flown) else item.opno


def rebuild(options: VolumeOptions, host: Host, log: Log, replay: Replay, report: Report) -> Volume:
    """The volume of what a replay found, with everything in it still to be sent."""
    assert replay.state is not None
    core = Core(options, host, log)
    core.recovering = True
    core.lost_after = replay.top if replay.doubtful else 0
    core.session, core.ticket = replay.state.session, replay.state.ticket
    core.fence, core.mark = replay.state.fence, Mark(*replay.state.mark)
    core.shift, core.acked, core.wire = replay.state.shift, replay.acked, replay.wire
    core.next_op = max(replay.top + 1, replay.acked)
    if replay.doubtful:
        core.next_op += LOST_NUMBERS
    core.counter = RECOVERY_COUNTER
    volume = Volume(core)
    # Nothing was sent since: what was done to the other's file must not be done to the copy.
    volume.committer.forked = replay.forked
    _take_out_damaged(replay)
    for ino, past in replay.files.items():
        items = replay.contents(ino)
        if past.changes or items:
            stub(core, ino, past)
    flights: dict[int, Flight] = {}
    for ino, past in replay.files.items():
        if ino in core.nodes.by_ino:
            refly(volume, replay, ino, past, flights)
    for opno in sorted(replay.ops):
        _requeue(volume, replay, opno, flights)
    _set_twins_apart(volume)
    for ino, past in replay.files.items():
        if past.bad:
            report.damaged.append(_beside(volume, replay, ino, past))
    return volume


def _set_twins_apart(volume: Volume) -> None:
    """Two changed files that are one on the server, where the run ended before it could do this."""
    core = volume.core
    first: dict[int, Inode] = {}
    for ino in list(core.dirty):
        node = core.nodes.get(ino)
        if node.gone or not node.file().unclean:
            continue
        other = first.setdefault(core.wire.out(ino), node)
        if other is not node:
            apart(volume.committer, node, other)


def stub(core: Core, ino: int, past: Past) -> Inode:
    """The file in memory as far as the log tells, without its changes."""
    attr = Attr(
        ino=ino,
        mode=past.mode,
        nlink=1,
        uid=past.uid,
        gid=past.gid,
        size=past.base_size,
        atime=past.mtime,
        mtime=past.mtime,
        ctime=past.ctime,
        rdev=0,
        target=None,
        parent=0,
        parts=None,
        xattrs=None,
        cseq=past.cseq,
        writer=core.session,
        born=1,
    )
    node = core.nodes.by_ino[ino] = Inode(attr, 0)
    node.where = past.where
    node.content = Content(past.base, past.base_size, past.cseq)
    node.content.frozen = node.content.acked = past.frozen
    node.content.first = past.first
    node.content.full = past.full
    node.size = past.base_size
    node.gone = past.where is None and not past.changes
    core.dirty[ino] = None
    return node


def refly(volume: Volume, replay: Replay, ino: int, past: Past, flights: dict[int, Flight]) -> None:
    """Play the file's changes again, freezing where the log says."""
    core = volume.core
    node = core.nodes.get(ino)
    content = node.file()
    events = [event for event in past.changes if event.pos >= past.frozen]
    at = 0
    before = past.base
    for item in replay.contents(ino):
        frozen = item.frozen
        while at < len(events) and events[at].pos < frozen:
            _play(node, events[at], core.now())
            at += 1
        made = isinstance(item, Flown)
        size, mtime, ctime, opno = (
            (item.op.size, item.op.mtime, item.op.ctime, item.op.opno)
            if isinstance(item, Flown)
            else (item.size, item.mtime, item.ctime, item.opno)
        )
        core.flight_key += 1
        flight = content.freeze(core.flight_key, ino, frozen, size, mtime, ctime)
        flight.opno = opno
        if isinstance(item, Flown):
            flight.state = READY
            flight.blocks = before = result_of(before, item.op)
            flight.sources = list(item.sources)
            flight.touched = {index for index, _ in item.op.blocks}
        else:
            flight.appended_from = item.appended_from
        core.flights[flight.key] = flight
        flights[opno] = flight
        if not made:
            before = {}
    for event in events[at:]:
        _play(node, event, core.now())


def _play(node: Inode, event: Event, now: float) -> None:
    content = node.file()
    if event.end < 0:
        content.cut(event.start, event.pos, now)
        node.size = event.start
    else:
        content.wrote(event.start, event.end, event.pos, now, append=event.append, ref=event.ref)
        node.size = max(node.size, event.end)


def _requeue(volume: Volume, replay: Replay, opno: int, flights: dict[int, Flight]) -> None:
    core = volume.core
    item = replay.ops[opno]
    pos, now = replay.positions[opno], core.now()
    if isinstance(item, Reserved):
        core.queue.add(Queued(opno, None, pos, now, flights[opno]))
    elif isinstance(item, Flown):
        core.queue.add(Queued(opno, item.op, pos, now, flights[opno], [], list(item.sources)))
    else:
        core.queue.add(Queued(opno, item, pos, now, with_next=opno in replay.named))
        volume.committer.mark(item, 1)
        return
    core.nodes.get(flights[opno].ino).pending += 1


def _beside(volume: Volume, replay: Replay, ino: int, past: Past) -> str:
    """Put the file with its damaged ranges under another name; the file itself stays as the server has it. A
    recovery that ended may have begun this: then it is the same name and the same inode."""
    core = volume.core
    content = core.nodes.get(ino).file()
    parent, name = past.where if past.where is not None else (ROOT_INO, b"inode-%x" % ino)
    copy = recovered_name(name, core.options.hostname, past.mtime)
    made = replay.made.get((parent, copy))
    new = core.new_ino() if made is None else made
    if made is None:
        create = Create(
            core.take_opno(), CREATE, parent, copy, new, past.mode, past.uid, past.gid, 0, None, past.mtime
        )
        volume.committer.add(create)
    begun = replay.files.get(new, Past())
    if content.window and not begun.frozen and not replay.contents(new):
        # The copy takes over everything the file was to become.
        twin = stub(core, new, past)
        twin.where = (parent, copy)
        twin.content = Content(dict(content.tip()), content.base_size, 0)
        for event in past.changes:
            if event.pos >= content.frozen:
                _play(twin, event, core.now())
        twin.content.first = content.first
        twin.content.full = True
        volume.flusher.freeze(twin)
    content.window = False
    if not content.flights:
        core.dirty.pop(ino, None)
    return show(copy)


def _take_out_damaged(replay: Replay) -> None:
    """Content with damaged bytes cannot be sent as it was: its changes count as not frozen."""
    for opno, item in list(replay.ops.items()):
        if isinstance(item, Flown) and _hits(item, replay.damaged):
            del replay.ops[opno]


def _hits(item: Flown, damaged: list[tuple[int, int]]) -> bool:
    """Whether blobs of a content operation come from damaged ranges of the log."""
    for source in item.sources:
        for piece in source.pieces:
            if piece[0] != FROM_LOG or len(piece) != 3:
                continue
            if any(piece[1] < end and piece[1] + piece[2] > start for start, end in damaged):
                return True
    return False
