"""What the parts of the volume share: options, log, numbers, the inodes, wants and jobs.

One thread. The parts (loads, flush, commit, feed, the calls) each hold the core and never each other's
insides; whatever has to be known twice is here.
"""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Callable
from typing import Final

from fsd.host.seam import Host
from fsd.model.attrs import Attr, make_ino
from fsd.model.errors import DiskFailed, FsdError, HistoryChanged, LeaseLost, NoSpace
from fsd.model.limits import BLOCK, MIB, SEGMENT
from fsd.model.plain import dataclass, field
from fsd.model.space import NOMINAL
from fsd.vfs.blocklists import BlockLists
from fsd.vfs.content import Flight
from fsd.vfs.log import DROP, STATE, UNNAMED, Log, SyncJob, segment_of
from fsd.vfs.node import Inode, Nodes
from fsd.vfs.queue import CommitQueue
from fsd.vfs.recent import Recent
from fsd.vfs.records import FORMAT, State, packb, time_of_nameless
from fsd.vfs.types import Invalidation, Job, VolumeOptions, Want, timed_out
from fsd.vfs.wiremap import WireMap
from fsd.wire.messages import NO_MARK, LeaseSeen

RENEW: Final = 8 * MIB  # a log of which nothing is needed begins anew above this
AHEAD_MAX: Final = 10_000


@dataclass(slots=True, eq=False)
class CommitWant:
    """A want that ends when operations up to `opno` are committed and the flights in `flights` too."""

    want: Want
    opno: int
    flights: set[int] = field(default_factory=set)
    ino: int = 0  # the file it is about; 0: everything
    fh: int = 0


class Core:
    """See the module. `session`, `ticket`, `shift`: how operations travel (wire number = local - shift)."""

    def __init__(self, options: VolumeOptions, host: Host, log: Log) -> None:
        self.options = options
        self.host = host
        self.log = log
        self.nodes = Nodes()
        self.lists = BlockLists()
        self.queue = CommitQueue()
        self.wire = WireMap()
        self.session = 0
        self.ticket = b""
        self.shift = 0
        self.acked = 1  # one more than the newest acknowledged operation
        self.next_op = 1
        self.counter = 0
        self.seq = 0  # newest seq heard of
        self.feed_seq = 0  # the change feed is applied up to here
        self.mark = NO_MARK  # the newest commit seen, shown with what is sent: no other history takes it
        self.ahead: set[int] = set()  # own commits behind `feed_seq` that the feed need not tell of
        self.surprises: set[int] = set()  # own commits of which the server made something else
        # Pairs of inodes that turned out to be one: the second is still to be joined or set apart (`twins`).
        self.met: list[tuple[int, int]] = []
        self.unsaid = False  # wire numbers changed, and the log does not say so yet
        self.forget = False  # everything known of the server has to be asked for again
        # The kernel layer's: what it was told does not exist. Nothing here says so of each name.
        self.take_absent: Callable[[], list[Invalidation]] = list
        self.root_ino = 0
        self.dirty: dict[int, None] = {}  # inodes with content the server does not have
        # Of files with long block lists: where the log says it, and for which content a replay knows it now.
        self.told: dict[int, tuple[int, int]] = {}
        self.flights: dict[int, Flight] = {}
        self.flight_key = 0
        self.wants: list[Want] = []
        self.commit_wants: list[CommitWant] = []
        self.jobs: deque[Job] = deque()
        self.invalidations: list[Invalidation] = []
        self.unused: dict[int, None] = {}  # perhaps needed by nobody since their last operation was told
        self.orphans: dict[int, None] = {}  # no name left, still open
        self.unnamed: set[int] = set()  # those of them that never had a name, and may get one
        self.sharing: dict[int, None] = {}  # perhaps files whose changes name blobs of others
        # Closed without a name, and the log does not say so yet (full disk): their oldest record.
        self.undropped: dict[int, int] = {}
        self.holder = 0  # the file that held the oldest segment when last looked; 0: operation `holding`
        self.holding = 0
        self.reason = ""  # why the last attempt to send failed
        self.no_space: NoSpace | None = None  # the last time the disk under the log was full
        self.down = False  # the last question or commit found no server
        self.fence = 0  # of this mount's writer lease, 0: it has none
        # The lease is somebody else's, or the server's history is another one: nothing is sent any more.
        self.fenced: LeaseLost | HistoryChanged | None = None
        # Writer leases of others: tops of subtrees in local numbers, and what lies all of this mount under.
        self.leases: dict[int, str] = {}
        self.leases_told: tuple[LeaseSeen, ...] = ()
        self.leased = ""
        self.guarded = False  # some of this: changes are looked at before they are made
        self.space = NOMINAL  # the server's room, as the change feed tells it
        self.recovering = False
        # Recovering after a power cut: the newest operation in the log, whose tail may be lost. Else 0.
        self.lost_after = 0
        self.put_off: set[int] = set()  # inodes whose making was perhaps undone in the lost tail
        self.age_at: float | None = None  # when what changed since the last age flush is old enough
        self.conflicts = 0
        self.refused = 0
        self.recent = Recent(log)
        self.ticks = 0
        self.asking = 0  # namespace questions on their way
        # While questions are on their way: (seq, names, inodes, own) committed meanwhile, so that an older
        # answer does not undo them.
        self.meanwhile: list[tuple[int, tuple[tuple[int, bytes], ...], tuple[int, ...], bool]] = []
        self.forgotten = 0  # everything was, at this seq: answers older than it say nothing for good
        self.sync_job: SyncJob | None = None
        self.free_to = 0
        self.renew_at = RENEW
        self.lazy = SEGMENT  # bytes of the log above which it is freed while changes are on their way
        self.dead_jobs = 0  # running jobs whose flight was given up: they may still read the log

    # time and numbers --------------------------------------------------------------------------------
    def now(self) -> float:
        return self.host.monotonic()

    def stamp(self) -> int:
        """The time a change is stamped with, ns."""
        return self.host.wall_ns()

    def stir(self) -> None:
        """Something changed: flush it when it is old enough."""
        if self.age_at is None:
            self.age_at = self.host.monotonic() + self.options.flush_age

    def new_ino(self) -> int:
        self.counter += 1
        return make_ino(self.session, self.counter)

    def take_opno(self) -> int:
        opno = self.next_op
        self.next_op += 1
        return opno

    def local(self, wire: int) -> int:
        """The local number of an inode of the server; a number of its own where it would collide."""
        found = self.wire.known(wire)
        if found is None:
            found = self.new_ino()
            self.alias(found, wire)
        return found

    def alias(self, local: int, wire: int) -> None:
        """`local` is `wire` from now on. The log says so before anything that is done to it."""
        self.wire.put(local, wire)
        self.unsaid = True

    def local_attr(self, attr: Attr) -> Attr:
        if self.wire.empty:
            return attr
        if attr.parent:
            self.local(attr.parent)
        return self.wire.attr(attr, self.local(attr.ino))

    # log ---------------------------------------------------------------------------------------------
    def state(self) -> bytes:
        """The payload of a STATE record."""
        return packb(
            State(
                FORMAT,
                self.session,
                self.ticket,
                self.shift,
                self.acked,
                self.wire.pairs(),
                self.host.boot_id(),
                self.options.file_system,
                self.options.mount_id,
                self.fence,
                self.mark,
            )
        )

    def record(self, kind: int, ino: int, offset: int, pieces: list[bytes], *, spare: bool = True) -> int:
        """Append to the log, in a new segment where this one is full. Raises `NoSpace`, also where the disk
        fails (`DiskFailed`)."""
        length = sum(map(len, pieces))
        if self.unsaid:
            self.say_state()
        try:
            if self.log.must_rotate(length):
                self.log.rotate(self.state())
            return self.log.append(kind, ino, offset, pieces, spare=spare)
        except OSError as exc:
            raise self.disk_failed(exc) from exc

    def prepare(self, length: int) -> None:
        """The records that follow, `length` bytes together, will find room on the disk. Raises `NoSpace`: a
        call of several records ends before its first where it cannot be done whole."""
        if self.unsaid:
            self.say_state()
        try:
            if self.log.must_rotate(length):
                self.log.rotate(self.state())
            self.log.prepare(length)
        except OSError as exc:
            raise self.disk_failed(exc) from exc

    def say_state(self) -> None:
        """A STATE record with the wire numbers that changed since the last one."""
        self.unsaid = False
        try:
            self.record(STATE, 0, 0, [self.state()])
        except NoSpace:
            self.unsaid = True
            raise

    def record_nameless(self, node: Inode) -> int:
        """Say that the changes that follow are of a file without a name: without that a recovery would bring
        it back. Raises `NoSpace`."""
        if node.ino in self.unnamed:
            return self.record(UNNAMED, node.ino, node.size, [time_of_nameless(node.mtime)])
        return self.record(DROP, node.ino, 0, [])

    def record_state(self) -> None:
        self.record(STATE, 0, 0, [self.state()])

    def record_if_room(self, kind: int, ino: int, pieces: list[bytes]) -> int | None:
        """Append what a recovery can do without; None on a full disk."""
        try:
            return self.record(kind, ino, 0, pieces)
        except NoSpace as exc:
            self.disk_full(exc)
            return None

    def needed(self, *, orphans: bool = True) -> int:
        """The oldest log position anything still needs; without `orphans` what has a name."""
        oldest = self.log.tail
        queued = self.queue.oldest()
        if queued is not None and queued.pos < oldest:
            oldest, self.holder, self.holding = queued.pos, 0, queued.opno
        for ino in (*self.dirty, *self.orphans) if orphans else self.dirty:
            first = self._first(ino)
            if first is not None and first < oldest:
                oldest, self.holder = first, ino
        return min(oldest, *self.undropped.values()) if self.undropped else oldest

    def _first(self, ino: int) -> int | None:
        """The oldest record a changed file needs."""
        node = self.nodes.by_ino.get(ino)
        return node.content.first if node is not None and node.content is not None else None

    def _held(self) -> bool:
        """Whether what held the oldest segment when all was looked at still does: that costs work
        proportional to what is not committed, and is asked after every commit."""
        first = self._first(self.holder) if self.holder in self.dirty or self.holder in self.orphans else None
        queued = self.queue.get(self.holding) if not self.holder else None
        pos = first if queued is None else queued.pos
        return pos is not None and segment_of(pos) <= self.log.oldest

    def say_dropped(self) -> None:
        """A DROP behind the last change of each file that is nobody's any more. What said so before its last
        changes may be freed while they are still in the log, and a recovery would bring the file back."""
        for ino in list(self.undropped):
            if self.record_if_room(DROP, ino, []) is None:
                return
            del self.undropped[ino]

    def trim(self, renew_at: int | None = None) -> None:
        """Free the segments nothing needs any more. They are deleted when what allows it is durable."""
        if self.dead_jobs or self.recovering or self.sync_job is not None:
            return
        renew = self.log.used > (self.renew_at if renew_at is None else renew_at)
        if self.log.oldest == segment_of(self.log.tail) and (not renew or self.dirty or len(self.queue)):
            return  # one segment, and it is needed or small
        if self._held():
            return
        oldest = self.needed()
        if oldest >= self.log.tail and renew:
            # Nothing is needed at all: begin anew, so that the space of this segment is freed as well.
            try:
                self.log.rotate(self.state())
            except NoSpace as exc:
                self.disk_full(exc)
                return
            except OSError as exc:
                self.disk_full(self.disk_failed(exc))
                return
            oldest = self.log.tail
        if self.log.freeable(oldest) and (renew_at is not None or self._worth_a_sync()):
            self.sync_job = self.log.begin_sync()
            self.free_to = oldest
            self.jobs.append(self.sync_job)

    def _worth_a_sync(self) -> bool:
        """Whether segments are to be freed now. Before that the whole log is made durable: what a disk takes
        for 64 MiB and more, on one that the server may share, by a worker that could send something. While
        changes are on their way that waits until much has come together, or the room is needed."""
        busy = bool(self.dirty) or len(self.queue) > 0
        return not busy or self.no_space is not None or self.log.used > min(self.lazy, self.log.much)

    def synced(self, job: SyncJob, error: FsdError | None) -> None:
        """A sync ended: what it made unneeded goes."""
        self.sync_job = None
        self.log.end_sync(job, failed=error is not None)
        if error is None:
            try:
                if self.log.freeable(self.free_to):  # the kernel may have told another sync what failed
                    self.log.free_before(self.free_to)
            except OSError as exc:
                self.disk_full(self.disk_failed(exc))
            return
        self.reason = error.message
        try:
            # Answers from now on are in a segment that can be trusted.
            self.log.rotate(self.state())
        except NoSpace as exc:
            self.disk_full(exc)
        except OSError as exc:
            self.disk_full(self.disk_failed(exc))

    def capacity(self) -> int:
        """The bound of the log, `--buffer-size`."""
        if self.options.buffer_size is not None:
            return self.options.buffer_size
        disk = os.statvfs(self.options.state_dir)
        return min(self.options.buffer_max, (disk.f_bavail * disk.f_frsize + self.log.used) // 2)

    def disk_failed(self, exc: OSError) -> DiskFailed:
        """The disk under the log takes nothing, and it is not for want of room."""
        return DiskFailed(
            f"the disk under the state directory {self.options.state_dir} fails: {exc.strerror}",
            hint=DiskFailed.way_out(shlex.quote(str(self.options.state_dir.parent.parent))),
        )

    def disk_full(self, exc: NoSpace) -> None:
        self.reason = exc.message
        self.no_space = exc

    # wants -------------------------------------------------------------------------------------------
    def want(self, what: str, *, limited: bool = True) -> Want:
        """A new want; `limited`: it ends with EIO after the I/O time-out."""
        limit = self.options.io_timeout
        want = Want(what, self.now() + limit if limited and limit else None)
        if want.deadline is not None:
            self.wants.append(want)
        return want

    def commit_want(
        self, what: str, flights: list[Flight], *, limited: bool = True, ino: int = 0, fh: int = 0
    ) -> Want:
        """Ends when all operations so far and the flights are committed."""
        want = self.want(what, limited=limited)
        waiting = CommitWant(want, self.next_op - 1, ino=ino, fh=fh)
        for flight in flights:
            if flight.opno:
                waiting.opno = max(waiting.opno, flight.opno)
            else:
                waiting.flights.add(flight.key)
        self.commit_wants.append(waiting)
        self.check_wants()
        if self.fenced is not None:
            self.fail_commit_wants(self.fenced)
        return want

    def numbered(self, flight: Flight) -> None:
        """A flight got its operation number: those who wait for it wait for that number."""
        for waiting in self.commit_wants:
            if flight.key in waiting.flights:
                waiting.flights.discard(flight.key)
                waiting.opno = max(waiting.opno, flight.opno)

    def replaced(self, old: Flight, new: Flight | None) -> None:
        """A flight was given up; `new` (if any) covers all of it."""
        for waiting in self.commit_wants:
            if old.key in waiting.flights:
                waiting.flights.discard(old.key)
                if new is not None:
                    waiting.flights.add(new.key)

    def demanded(self) -> int:
        """The newest operation number somebody waits for; 0: none. Who waits for blocks to be made gets
        everything in one request when they are."""
        return max((w.opno for w in self.commit_wants if not w.want.finished and not w.flights), default=0)

    def check_wants(self) -> None:
        """End what has been reached."""
        if not self.commit_wants:
            return
        head = self.queue.head()
        done_to = self.next_op - 1 if head is None else head.opno - 1
        left = []
        for waiting in self.commit_wants:
            if waiting.want.finished:
                continue
            if not waiting.flights and waiting.opno <= done_to:
                waiting.want.end()
            else:
                left.append(waiting)
        self.commit_wants = left

    def end_calls(self, opno: int) -> bool:
        """End the calls on a handle that wait for operations up to `opno` and no others; whether there were
        any. The queue may not know yet that those are committed."""
        reached = [w for w in self.commit_wants if w.fh and not w.flights and w.opno <= opno]
        for waiting in reached:
            waiting.want.end()
        return bool(reached)

    def knows(self, seq: int) -> None:
        """A commit of this mount's own was made as it was asked for: the feed has nothing to tell of it."""
        if seq > self.feed_seq and len(self.ahead) < AHEAD_MAX:
            self.ahead.add(seq)
        self.feed_goes_on()

    def feed_goes_on(self) -> None:
        """`feed_seq` goes over what is known of commits that follow it."""
        while self.feed_seq + 1 in self.ahead:
            self.feed_seq += 1
            self.ahead.discard(self.feed_seq)

    def fail_commit_wants(self, error: FsdError) -> None:
        """What waits for a commit gets the error; the changes stay."""
        for waiting in self.commit_wants:
            waiting.want.end(error)
        self.commit_wants = []

    def fence_off(self, error: LeaseLost | HistoryChanged) -> None:
        """The writer lease is somebody else's now, or the service went back to an older copy. What is here
        stays here, and nothing more comes to it."""
        self.fenced, self.guarded = error, True
        self.reason = error.message
        self.fail_commit_wants(error)

    def see_leases(self, leases: tuple[LeaseSeen, ...]) -> None:
        """The writer leases there are, as the change feed tells them."""
        self.leases_told = leases
        others = [one for one in leases if one.session != self.session]
        self.leased = next((one.told for one in others if one.above), "")
        self.leases = {self.local(one.ino): one.told for one in others}
        self.guarded = bool(others) or self.fenced is not None

    def expire(self, now: float) -> None:
        """End the wants whose deadline has passed."""
        left = []
        for want in self.wants:
            if want.finished:
                continue
            if want.deadline is not None and want.deadline <= now:
                want.end(want.late or timed_out(want.what))
            else:
                left.append(want)
        self.wants = left

    def invalidate(self, ino: int, name: bytes | None = None) -> None:
        node = self.nodes.by_ino.get(ino)
        if node is not None:
            if name is None:
                node.unpage()
            self.invalidations.extend(Invalidation(number, name) for number in self.nodes.numbers(node))

    def drop_unused(self) -> None:
        """Drop what the kernel forgot while its last operation was on its way. Between events only."""
        while self.unused:
            node = self.nodes.by_ino.get(self.unused.popitem()[0])
            if node is not None:
                self.forget_if_unused(node)

    def settle(self, node: Inode) -> None:
        """Of a file that may be closed and clean now only what is needed stays in memory."""
        content = node.content
        if content is not None and content.base is not None and node.size > BLOCK and not content.void:
            self.lists.keep(node.ino, content.cseq, content.base)
        node.settle()

    def forget_if_unused(self, node: Inode) -> None:
        if self.nodes.droppable(node):
            self.nodes.drop(node)
