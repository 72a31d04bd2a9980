"""Reading an earlier run's log in order: which operations and which changes of files are left of it.

After a power cut (another boot id) the log's tail may be lost, and single payloads in it damaged.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import Final

from fsd.host.seam import Host
from fsd.model.ops import CONFLICT, REFUSED, RENAME_EXCHANGE, Content, Create, Op, Rename, Setattr
from fsd.model.plain import dataclass, field
from fsd.vfs import log as logs
from fsd.vfs.content import Blocks
from fsd.vfs.extents import HOLE, Ref
from fsd.vfs.log import Log, Record
from fsd.vfs.queue import redirected
from fsd.vfs.records import (
    LENGTH,
    TIME,
    Ack,
    Apart,
    Base,
    Flown,
    Reserved,
    State,
    blocks_of,
    read_ack,
    read_apart,
    read_base,
    read_cancel,
    read_flown,
    read_op,
    read_reserved,
    read_shared,
    read_state,
    result_of,
)
from fsd.vfs.types import Told
from fsd.vfs.wiremap import WireMap

TOLD_EVERY: Final = 1000  # records
_OF_FILES: Final = (logs.WRITE, logs.TRUNC, logs.BASE, logs.PUNCH, logs.SHARE)


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a file's content in the log. `end` < 0: a truncation to `start`."""

    pos: int
    start: int
    end: int
    time: int
    append: bool
    bad: bool = False  # its bytes in the log are not what was written
    ref: Ref | None = None  # its bytes are not in the log


@dataclass(slots=True)
class Past:
    """What the log tells of one file. `changes` since `base`, oldest first."""

    base: Blocks = field(default_factory=dict)
    base_size: int = 0
    cseq: int = 0
    frozen: int = 0
    mtime: int = 0
    ctime: int = 0
    mode: int = stat.S_IFREG | 0o600
    uid: int = 0
    gid: int = 0
    where: tuple[int, bytes] | None = None
    first: int | None = None
    changes: list[Event] = field(default_factory=list)
    created: bool = False
    full: bool = False  # the next operation must carry the whole block list

    @property
    def bad(self) -> bool:
        """Whether a change that is still to be sent was damaged."""
        return any(event.bad for event in self.changes)


class Replay:
    """See the module. One use."""

    def __init__(self, log: Log, host: Host, aside: Callable[[], None], told: Told | None = None) -> None:
        """`aside` is called, before anything of the log is changed, when it is damaged in the middle. `told`
        hears that it is being read."""
        self.log = log
        self.host = host
        self._aside = aside
        self._told = told
        self.state: State | None = None
        self.wire = WireMap()
        self.files: dict[int, Past] = {}
        self.ops: dict[int, Op | Flown | Reserved] = {}
        # Content operations by file, also those that are not in `ops` any more: `contents` is asked for each
        # file, and a look through all operations each time took hours for a hundred thousand files.
        self._contents: dict[int, set[int]] = {}
        self.positions: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.unnamed: dict[int, Past] = {}  # made without a name; what they were is lost if they get none
        self.named: set[int] = set()  # the operations that gave such files their names
        self.sessions: set[int] = set()  # all this log was written under
        # The session cannot name a file any more (`differ.becomes`), and ended before there was another.
        self.forked = False
        self.made: dict[tuple[int, bytes], int] = {}  # inodes made under a name, by operations in this log
        self.top = 0  # newest operation number seen
        self.acked = 1
        self.settled = 0  # what lies before this position in the log was followed by something of ours
        self.newest = 0  # time of the newest change in the log, in ns
        self.doubtful = False  # another boot: payloads may be damaged, the tail may be lost
        self.damaged: list[tuple[int, int]] = []  # log ranges that are not what was written

    def run(self) -> None:
        for count, record in enumerate(self.log.scan()):
            if self._told is not None and count % TOLD_EVERY == 0:
                self._told("reading the log of an earlier run")
            if not record.whole and not (self.doubtful and record.kind == logs.WRITE):
                if not self.doubtful:
                    self._aside()
                self.log.cut(record)  # the order of operations ends here
                return
            self._apply(record)
        # After a power cut pages reach the disk in any order: there what lies behind a hole may be lost.
        if not self.doubtful and (self.log.goes_on() or self.log.end_damaged()):
            self._aside()

    def _payload(self, record: Record) -> bytes:
        return self.log.read(record.pos, record.length)

    def _apply(self, record: Record) -> None:
        kind = record.kind
        if record.ino in self.dropped and kind in _OF_FILES:
            return  # changes of a file without a name, for its open handles only
        if kind == logs.WRITE:
            self._write(record)
        elif kind == logs.TRUNC:
            past = self._file(record)
            time, _ = TIME.unpack(self._payload(record))
            past.changes.append(Event(record.pos, record.offset, -1, time, False))
            self.newest = max(self.newest, time)
            past.mtime = past.ctime = time
        elif kind == logs.PUNCH or kind == logs.SHARE:
            self._without_bytes(record)
        elif kind == logs.OP:
            self._op(read_op(self._payload(record)), record)
            if record.offset:
                self._dropped(record.offset)
        elif kind == logs.STATE:
            self._state(read_state(self._payload(record)))
            self.settled = record.pos
        elif kind == logs.BASE:
            self._base(read_base(self._payload(record)), record)
        elif kind == logs.RESERVED:
            self._queue(read_reserved(self._payload(record)), record)
        elif kind == logs.CONTENT:
            self._queue(read_flown(self._payload(record)), record)
        elif kind == logs.ACK:
            self._ack(read_ack(self._payload(record)))
        elif kind == logs.CANCEL:
            cancel = read_cancel(self._payload(record))
            for opno in cancel.opnos:
                self.ops.pop(opno, None)
            self._op(cancel.times, record)
            self.files.pop(record.ino, None)
            self.dropped.add(record.ino)
        elif kind == logs.DROP:
            self.unnamed.pop(record.ino, None)
            self._dropped(record.ino)
        elif kind == logs.UNNAMED:
            self._unnamed(record)
        elif kind == logs.APART:
            self._set_apart(read_apart(self._payload(record)), record)

    def _set_apart(self, apart: Apart, record: Record) -> None:
        for opno in apart.opnos:
            self.ops.pop(opno, None)
        for opno, op in self.ops.items():
            if not isinstance(op, Flown | Reserved):
                self.ops[opno] = redirected(op, apart.ino, apart.other)
        self.wire.put(apart.ino, apart.wire)
        create = apart.create
        past = self.files.setdefault(apart.ino, Past())
        past.where, past.cseq, past.full = (create.parent, create.name), 0, True
        self._number(create.opno, create, record)

    def _dropped(self, ino: int) -> None:
        """The file's last name went: only what has an operation number is still to be sent."""
        self.dropped.add(ino)
        past = self.files.get(ino)
        if past is None:
            return
        keep = max((item.frozen for item in self.contents(ino)), default=past.frozen)
        past.changes = [event for event in past.changes if event.pos < keep]
        past.where = None

    def contents(self, ino: int) -> list[Flown | Reserved]:
        """The content operations of a file that are not acknowledged, in order."""
        found: list[Flown | Reserved] = []
        for opno in sorted(self._contents.get(ino, ())):
            item = self.ops.get(opno)
            if (isinstance(item, Flown) and item.op.ino == ino) or (
                isinstance(item, Reserved) and item.ino == ino
            ):
                found.append(item)
        return found

    def _state(self, state: State) -> None:
        if self.state is None or state.session != self.state.session:
            self.wire = WireMap(state.wire)
            self.forked = False
        for local, wire in state.wire:
            self.wire.put(local, wire)
        self.state = state
        self.sessions.add(state.session)
        self.acked = max(self.acked, state.acked)
        # Once for all: a recovery that ended too has written behind what is doubtful, under this boot id.
        self.doubtful = self.doubtful or state.boot != self.host.boot_id()

    def _file(self, record: Record) -> Past:
        past = self.unnamed.get(record.ino)
        if past is None:
            past = self.files.setdefault(record.ino, Past())
        if past.first is None:
            past.first = record.pos
        return past

    def _unnamed(self, record: Record) -> None:
        """Its first record, or the first that is left: then changes from before may stand in front of it."""
        past = self._file(record)
        self.unnamed[record.ino] = past
        self.files.pop(record.ino, None)
        time, _ = TIME.unpack(self._payload(record))
        past.mtime = past.ctime = time
        if record.offset:
            past.changes.append(Event(record.pos, record.offset, -1, time, False))

    def _write(self, record: Record) -> None:
        past = self._file(record)
        start, end = record.offset, record.offset + record.length - TIME.size
        if not record.whole:
            self.damaged.append((record.pos, record.pos + record.length))
            past.changes.append(Event(record.pos + TIME.size, start, end, past.mtime, False, True))
            return
        time, append = TIME.unpack(self.log.read(record.pos, TIME.size))
        past.changes.append(Event(record.pos + TIME.size, start, end, time, bool(append)))
        self.newest = max(self.newest, time)
        past.mtime = past.ctime = time

    def _without_bytes(self, record: Record) -> None:
        """Changes whose bytes are not in the log."""
        past = self._file(record)
        payload = self._payload(record)
        time, _ = TIME.unpack_from(payload)
        if record.kind == logs.PUNCH:
            (length,) = LENGTH.unpack_from(payload, TIME.size)
            past.changes.append(
                Event(record.pos, record.offset, record.offset + length, time, False, ref=HOLE)
            )
        else:
            for number, one in enumerate(read_shared(payload[TIME.size :])):
                ref = Ref(one.hash, one.boff)
                past.changes.append(Event(record.pos + number, one.start, one.end, time, False, ref=ref))
        self.newest = max(self.newest, time)
        past.mtime = past.ctime = time

    def _base(self, base: Base, record: Record) -> None:
        past = self._file(record)
        past.base, past.base_size, past.cseq = blocks_of(base.blocks), base.size, base.cseq
        past.frozen, past.first = base.frozen, record.pos
        past.changes = [e for e in past.changes if e.pos >= base.frozen]
        past.mode, past.uid, past.gid = base.mode, base.uid, base.gid
        if not past.changes:
            past.mtime, past.ctime = base.mtime, base.ctime
        if base.parent:
            past.where = (base.parent, base.name)

    def _op(self, op: Op, record: Record) -> None:
        self.newest = max(self.newest, op.ctime if isinstance(op, Setattr | Content) else op.time)
        self._number(op.opno, op, record)
        if isinstance(op, Create):
            self.made[op.parent, op.name] = op.ino
            if op.ino in self.unnamed:
                self.named.add(op.opno)
                named = self.files[op.ino] = self.unnamed.pop(op.ino)
                named.mode, named.uid, named.gid = op.mode, op.uid, op.gid
                named.where, named.created = (op.parent, op.name), True
            # Logged again at a change of session: what was written meanwhile stays.
            elif stat.S_ISREG(op.mode) and op.ino not in self.files:
                self.files[op.ino] = Past(
                    mtime=op.time,
                    ctime=op.time,
                    mode=op.mode,
                    uid=op.uid,
                    gid=op.gid,
                    where=(op.parent, op.name),
                    first=record.pos,
                    created=True,
                )
            return
        past = self.files.get(op.ino)
        if isinstance(op, Rename):
            self._moved(op, past)
        if past is None:
            return
        if isinstance(op, Setattr):
            past.mtime = past.mtime if op.mtime is None else op.mtime
            past.mode = past.mode if op.mode is None else stat.S_IFMT(past.mode) | op.mode
            past.uid = past.uid if op.uid is None else op.uid
            past.gid = past.gid if op.gid is None else op.gid
        # What is still to be sent of its content comes behind this, and must not set it back.
        past.ctime = op.ctime if isinstance(op, Setattr | Content) else op.time

    def _moved(self, op: Rename, past: Past | None) -> None:
        if past is not None:
            past.where = (op.new_parent, op.new_name)
        over = self.files.get(op.over)
        if over is not None:
            over.ctime = op.time
            if op.flags & RENAME_EXCHANGE:
                over.where = (op.parent, op.name)

    def _number(self, opno: int, op: Op | Flown | Reserved, record: Record) -> None:
        self.ops[opno] = op
        if isinstance(op, Flown | Reserved):
            self._contents.setdefault(op.op.ino if isinstance(op, Flown) else op.ino, set()).add(opno)
        self.positions.setdefault(opno, record.pos)
        self.top = max(self.top, opno)

    def _queue(self, item: Flown | Reserved, record: Record) -> None:
        opno = item.opno if isinstance(item, Reserved) else item.op.opno
        self.files.setdefault(record.ino, Past())
        if isinstance(item, Reserved):
            # A content record of the same number may already be there: then it is made.
            if not isinstance(self.ops.get(opno), Flown):
                self._number(opno, item, record)
        else:
            self._number(opno, item, record)

    def _ack(self, ack: Ack) -> None:
        assert self.state is not None, "a log begins with its state"
        self.state = self.state._replace(ticket=ack.ticket)
        if ack.at > 0 and ack.seq > self.state.mark[0]:
            self.state = self.state._replace(mark=(ack.seq, ack.at))
        outcomes = {o.opno: o for o in ack.outcomes}
        for opno in sorted(self.ops):
            if opno >= ack.acked:
                break
            item = self.ops.pop(opno)
            op = item.op if isinstance(item, Flown) else item
            outcome = outcomes.get(opno)
            moved = (
                outcome is not None
                and outcome.status == CONFLICT
                and outcome.ino not in (0, self.wire.out(op.ino))
            )
            if isinstance(op, Create) and outcome is None and op.ino in self.files:
                past = self.files[op.ino]
                past.cseq = past.cseq or ack.seq
            if isinstance(item, Flown | Reserved) and outcome is not None and outcome.status == REFUSED:
                self._refused(item)
            elif isinstance(item, Flown):
                self._landed(item, ack.seq, kept=outcome is not None and not moved)
            if moved and outcome is not None:
                self.wire.put(op.ino, outcome.ino)
                self.forked |= isinstance(item, Flown) and outcome.errno == errno.EEXIST
        self.acked = max(self.acked, ack.acked)

    def _refused(self, item: Flown | Reserved) -> None:
        """What came after it takes its changes along; without such they are in `refused/` alone. Of what
        could not be made only the number is known."""
        ino = item.op.ino if isinstance(item, Flown) else item.ino
        past = self.files.get(ino)
        if past is None:
            return
        if not self.contents(ino) and all(event.pos < item.frozen for event in past.changes):
            past.changes = []

    def _landed(self, item: Flown, seq: int, *, kept: bool) -> None:
        past = self.files.get(item.op.ino)
        if past is None:
            return
        past.base = result_of(past.base, item.op)
        past.base_size, past.frozen = item.op.size, item.frozen
        past.cseq = past.cseq if kept else seq
        past.changes = [e for e in past.changes if e.pos >= item.frozen]
        past.created = False
