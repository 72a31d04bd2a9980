"""From dirty files to content operations: freezing, making blocks in jobs, numbering.

A content operation gets its number when its blocks are made, so that nothing waits for a slow one; only a
rename, link or exchange of a file with changes *reserves* the number before its own, so that a name is never
published with incomplete content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from fsd.model.errors import FsdError, IntegrityError, NoSpace, QuotaExceeded
from fsd.model.limits import (
    BLOCK,
    COMMIT_BLOBS_MAX,
    FLUSH_BYTES,
    FLUSH_FILES,
    HOLD_MAX,
    MIB,
    SMALL_FILE,
    UNMADE_AGAIN,
    UNMADE_MAX,
)
from fsd.vfs.build import BlockTask, BuildJob, Made, Source, build, first_sources
from fsd.vfs.content import DEAD, MAKING, READY, Content, Flight, operation, part_rows
from fsd.vfs.core import Core
from fsd.vfs.log import BASE, CONTENT, RESERVED, segment_of
from fsd.vfs.node import Inode
from fsd.vfs.queue import Queued
from fsd.vfs.records import Base, Flown, Reserved, packb

JOBS_MAX: Final = 3  # build jobs out at once: loads must not queue behind a big flush
JOB_BYTES: Final = 8 * MIB
INLINE_BUDGET: Final = 8 * MIB  # blob bytes kept in memory until their commit
RETRY_FIRST: Final = 0.2
# A block list this long is logged once a segment, not whenever a clean file is changed: 10 GiB have 460 KB.
LONG_LIST: Final = 64
TOLD_MAX: Final = 4096  # files
BASE_HEAD: Final = 1024  # bytes of a BASE record without its blocks, at most, and
BASE_ROW: Final = 16  # of what stands around each block's parts
RETRY_MAX: Final = 5.0

Unit: TypeAlias = tuple[int, tuple[BlockTask, ...], int]  # flight key, blocks to make, about how many bytes


class Flusher:
    """See the module. `kick` tells the committer that something became sendable."""

    def __init__(self, core: Core, kick: Callable[[], None]) -> None:
        self.core = core
        self.kick = kick
        self.backlog: deque[Unit] = deque()
        self.later: list[tuple[float, Unit]] = []  # something they need is gone; when to look again
        self.running: dict[BuildJob, None] = {}
        self.inline_bytes = 0
        self.unlogged: list[Flight] = []  # made, but the disk under the log is full
        self.retry_at: float | None = None
        self.delay = RETRY_FIRST
        self.round: set[int] = set()  # flights an age flush waits for before it commits
        self.round_until: float | None = None
        self.closed_bytes = self.closed_files = 0  # changed and closed since the last round
        self.early = False  # enough of that for a round now

    # changes -----------------------------------------------------------------------------------------
    def log_change(
        self, node: Inode, kind: int, offset: int, pieces: list[bytes], *, spare: bool = True
    ) -> int:
        """Log a change of the content, and before the first one what the server has. Returns the payload's
        position. Nothing changed if this raises `NoSpace`."""
        content = node.file()
        fresh = content.first is None
        if fresh:
            content.first = self.first_record(node, content)
        try:
            pos = self.core.record(kind, node.ino, offset, pieces, spare=spare)
        except (NoSpace, OSError):
            if fresh:
                content.first = None
            raise
        if not content.unclean and not node.gone:
            self.core.dirty[node.ino] = None
        self.core.stir()
        return pos

    def first_record(self, node: Inode, content: Content) -> int:
        """What a recovery has to know before a change of the file; its position."""
        if node.gone:
            return self.core.record_nameless(node)  # the record that said so may be freed by now
        if node.born:
            told = self.core.told.get(node.ino)
            if told is not None and told[1] == content.cseq and self._here(told[0]):
                return told[0]  # what the server has follows from the records since
            return self.log_base(node, content)
        # A new file: the record of its creation says the rest.
        return self.core.queue.oldest_of(node.ino, self.core.log.tail)

    def base_length(self, node: Inode) -> int:
        """At most so many bytes are logged before the next change of the content, for what the server has."""
        content = node.file()
        if content.first is not None:
            return 0
        return BASE_HEAD + sum(BASE_ROW + len(parts or b"") for _, parts in part_rows(content.base or {}))

    def log_base(self, node: Inode, content: Content) -> int:
        parent, name = node.where if node.where is not None else (0, b"")
        base = Base(
            content.cseq,
            content.base_size,
            node.mtime,
            node.ctime,
            content.acked,
            parent,
            name,
            node.mode,
            node.uid,
            node.gid,
            tuple(part_rows(content.base or {})),
        )
        pos = self.core.record(BASE, node.ino, 0, [packb(base)])
        told = self.core.told
        told.pop(node.ino, None)
        if len(base.blocks) >= LONG_LIST:
            told[node.ino] = pos, content.cseq
            while len(told) > TOLD_MAX:
                del told[next(iter(told))]
        return pos

    def _here(self, pos: int) -> bool:
        """Whether `pos` is in the segment that is being written: an older one may be about to be freed."""
        return segment_of(pos) == segment_of(self.core.log.tail)

    def told_base(self, ino: int, before: int, after: int | None) -> None:
        """A flight of content `before` landed, as content `after`; None: as something else. A replay of the
        log knows the file's blocks as long as nothing else happens to it."""
        told = self.core.told.get(ino)
        if told is None:
            return
        if after is None or told[1] != before:
            del self.core.told[ino]
        else:
            self.core.told[ino] = told[0], after

    def say_base(self, ino: int) -> None:
        """What the first record of a file that stays dirty says follows from the records since; said again,
        those before the oldest change the server lacks can be freed. Only when the whole answer is applied:
        a replay does that at the answer's record, which is before this one."""
        core = self.core
        node = core.nodes.by_ino.get(ino)
        content = node.content if node is not None else None
        if node is None or content is None or node.gone or not content.unclean or content.first is None:
            return
        if self._here(content.first):
            return
        needed = content.needed()
        try:
            first = self.log_base(node, content)
            content.first = first if needed is None else min(first, needed)
        except NoSpace as exc:
            core.disk_full(exc)  # the old one stays, and with it what follows from it

    def retime(self, node: Inode) -> None:
        """Attributes changed after a freeze: a flight without a number would undo them when it comes."""
        if node.content is not None:
            for flight in node.content.flights:
                if not flight.opno:
                    flight.mtime, flight.ctime = node.mtime, node.ctime

    # freezing ----------------------------------------------------------------------------------------
    def freeze(self, node: Inode, *, inline: bool = False, pump: bool = True) -> list[Flight]:
        """Everything of the file up to now in flights; returns those not acknowledged. `pump` False: more
        files follow, and the caller hands out the work."""
        content = node.content
        if content is None or not content.unclean:
            return []
        if content.window and not node.gone:
            core = self.core
            core.flight_key += 1
            flight = content.freeze(
                core.flight_key, node.ino, core.log.tail, node.size, node.mtime, node.ctime
            )
            core.flights[flight.key] = flight
            self.start(content, inline=inline, pump=pump)
        return list(content.flights)

    def reserve(self, node: Inode) -> None:
        """Give the file's content so far its operation numbers now, made or not."""
        if node.content is None or node.gone:
            return
        for flight in self.freeze(node):
            if flight.opno:
                continue
            opno = self.core.take_opno()
            pos = self.log_reserved(flight, opno)
            flight.opno = opno
            first = pos if node.content.first is None else min(pos, node.content.first)
            self.core.queue.add(Queued(opno, None, first, self.core.now(), flight))
            self.core.numbered(flight)
            node.pending += 1

    def log_reserved(self, flight: Flight, opno: int) -> int:
        payload = packb(
            Reserved(
                opno,
                flight.ino,
                flight.frozen,
                flight.size,
                flight.mtime,
                flight.ctime,
                flight.appended_from,
            )
        )
        return self.core.record(RESERVED, flight.ino, 0, [payload])

    def drop(self, node: Inode) -> None:
        """The file has no name any more: what has no number is never sent."""
        content = node.content
        if content is None:
            return
        for flight in [f for f in content.flights if not f.opno]:
            self.discard(content, flight)
        content.window = False
        if not content.flights:
            self.core.dirty.pop(node.ino, None)

    def discard(self, content: Content, flight: Flight) -> None:
        """A flight is never sent. Running jobs may still read the log for it."""
        core = self.core
        if core.flights.pop(flight.key, None) is None:
            return
        core.dead_jobs += sum(1 for job in self.running for key, _ in job.units if key == flight.key)
        flight.state = DEAD
        content.flights.remove(flight)
        core.replaced(flight, None)
        self.round.discard(flight.key)

    # making ------------------------------------------------------------------------------------------
    def start(self, content: Content, *, inline: bool = False, pump: bool = True) -> None:
        """Begin the flights whose predecessors are made."""
        for flight in list(content.flights):
            if not content.startable(flight):
                continue
            tasks = content.plan(flight)
            if inline or not tasks:
                small = sum(run[1] for task in tasks for run in task.runs) <= SMALL_FILE
                have = self.bases(tasks) if small else None
                if have is not None and self.made_here(content, flight, tasks, have):
                    continue
            self.queue_tasks(flight, tasks)
        if pump:
            self.pump()

    def bases(self, tasks: list[BlockTask]) -> dict[bytes, bytes] | None:
        """The blobs making these blocks needs; None unless all are at hand and little."""
        found: dict[bytes, bytes] = {}
        for task in tasks:
            if not task.needs_base():
                continue
            if task.length > SMALL_FILE:
                return None
            for part in task.parts:
                data = self.core.recent.get(part.hash)
                if data is None:
                    return None
                found[part.hash] = data
        return found

    def made_here(
        self, content: Content, flight: Flight, tasks: list[BlockTask], have: dict[bytes, bytes]
    ) -> bool:
        """Make the blocks of a small flight at once: somebody waits, and a job costs more than that. False:
        the log cannot be read."""
        try:
            made = [build(task, self.core.log, lambda wanted: have) for task in tasks]
        except IntegrityError:
            return False
        for built in made:
            for blob, data in zip(built.blobs, built.raw, strict=True):
                self.core.recent.keep(blob.hash, data)
        content.took(flight, made)
        self.made(flight)
        return True

    def queue_tasks(self, flight: Flight, tasks: list[BlockTask]) -> None:
        chunk: list[BlockTask] = []
        size = 0
        for task in tasks:
            weight = min(BLOCK, sum(run[1] for run in task.runs)) if task.patched() else task.length
            if chunk and size + weight > JOB_BYTES:
                self.backlog.append((flight.key, tuple(chunk), size))
                flight.left += 1
                chunk, size = [], 0
            chunk.append(task)
            size += weight
        self.backlog.append((flight.key, tuple(chunk), size))
        flight.left += 1

    def pump(self) -> None:
        """Hand out jobs while fewer than JOBS_MAX are out."""
        if self.retry_at is not None:
            return
        while self.backlog and len(self.running) < JOBS_MAX:
            units: list[tuple[int, tuple[BlockTask, ...]]] = []
            size = 0
            while self.backlog and (not units or size + self.backlog[0][2] <= JOB_BYTES):
                key, tasks, weight = self.backlog.popleft()
                if key not in self.core.flights:
                    continue
                units.append((key, tasks))
                size += weight
            if not units:
                continue
            # A flight in several jobs is too big to travel in a commit.
            room = self.inline_bytes + size <= INLINE_BUDGET and all(
                self.core.flights[key].left == 1 for key, _ in units
            )
            job = BuildJob(
                tuple(units),
                self.core.log,
                COMMIT_BLOBS_MAX if room else 0,
                self.uncommitted(units),
                frozenset(key for key, _ in units if self.given_up(key)),
            )
            self.running[job] = None
            self.core.jobs.append(job)

    def uncommitted(self, units: list[tuple[int, tuple[BlockTask, ...]]]) -> dict[bytes, Source]:
        """Blobs that earlier flights of these files made and whose commit is not answered."""
        known: dict[bytes, Source] = {}
        if self.core.recovering:
            # A damaged file's copy stands on what flights of the file itself made.
            return first_sources(source for f in self.core.flights.values() for source in f.sources)
        for key, tasks in units:
            content = self.core.nodes.get(self.core.flights[key].ino).content
            based = [task for task in tasks if task.needs_base()]
            if content is None or not based:
                continue
            for task in based:
                for part in task.parts:
                    source = self.core.recent.source(part.hash)
                    if source is not None:
                        known[part.hash] = source
            known.update(first_sources(source for f in content.flights for source in f.sources))
        return known

    def finish(self, job: BuildJob, result: list[Made] | FsdError) -> None:
        """A build job ended."""
        self.running.pop(job, None)
        for key, tasks in job.units:
            if key not in self.core.flights:
                self.core.dead_jobs -= 1
                if not self.core.dead_jobs:
                    self.core.trim()
            elif isinstance(result, FsdError):
                self.backlog.appendleft((key, tasks, sum(t.length for t in tasks)))
        if isinstance(result, FsdError):
            self.failed(result)
            return
        self.delay = RETRY_FIRST
        for (key, built), (_, tasks) in zip(result, job.units, strict=True):
            flight = self.core.flights.get(key)
            if flight is None:
                continue
            if isinstance(built, IntegrityError):
                self.unmade(flight, tasks, built)
                continue
            content = self.core.nodes.get(flight.ino).file()
            content.took(flight, built)
            flight.left -= 1
            if flight.left == 0:
                self.made(flight)
                if len(content.flights) > 1:
                    self.start(content)
        self.pump()
        self.kick()

    def unmade(self, flight: Flight, tasks: tuple[BlockTask, ...], error: IntegrityError) -> None:
        """Something that blocks of a flight need is gone: on the server, or the log cannot be read. Perhaps
        it comes back; after UNMADE_MAX what is here is made of it."""
        now = self.core.now()
        if flight.unmade is None:
            flight.unmade, flight.since = error, now
        self.core.reason = error.message
        self.later.append((now + UNMADE_AGAIN, (flight.key, tasks, sum(t.length for t in tasks))))

    def given_up(self, key: int) -> bool:
        flight = self.core.flights[key]
        return flight.unmade is not None and self.core.now() - flight.since >= UNMADE_MAX

    def again_at(self) -> float | None:
        """When to call `wake`."""
        times = [at for at, _ in self.later]
        return min(times if self.retry_at is None else [*times, self.retry_at], default=None)

    def failed(self, error: FsdError) -> None:
        self.core.reason = error.message
        if not error.retryable or isinstance(error, NoSpace | QuotaExceeded):
            self.core.fail_commit_wants(error)
        self.retry_at = self.core.now() + self.delay
        self.delay = min(RETRY_MAX, self.delay * 2)

    def made(self, flight: Flight) -> None:
        """All blocks are made: the operation gets its number, is logged and queued. On a full disk later."""
        core = self.core
        node = core.nodes.get(flight.ino)
        content = node.file()
        reserved = core.queue.get(flight.opno) if flight.opno else None
        opno = flight.opno or core.take_opno()
        content.look(flight)
        op = operation(flight, content.cseq, opno=opno)
        try:
            if not flight.broken:
                flown = Flown(op, flight.frozen, tuple(flight.sources))
                core.record(CONTENT, flight.ino, 0, [packb(flown)])
            elif reserved is None:
                # A recovery finds its number, and out for itself that it cannot be made.
                self.log_reserved(flight, opno)
        except NoSpace as exc:
            self.unlogged.append(flight)
            self.failed(exc)
            return
        flight.state, flight.opno = READY, opno
        if flight.broken:
            op, flight.blobs = op._replace(blocks=(), full=True), []
        self.inline_bytes += sum(len(blob.stored) for blob in flight.blobs)
        if reserved is None:
            first = content.first if content.first is not None else core.log.tail
            core.queue.add(Queued(opno, op, first, core.now(), flight, flight.blobs, flight.sources))
            node.pending += 1
            core.numbered(flight)
        else:
            reserved.op, reserved.blobs, reserved.sources = op, flight.blobs, flight.sources
        self.round.discard(flight.key)

    def sent_bytes(self, queued: Queued) -> None:
        """A content operation is done: its blobs leave memory."""
        if queued.blobs:
            self.inline_bytes -= sum(len(blob.stored) for blob in queued.blobs)

    # when --------------------------------------------------------------------------------------------
    def big(self, node: Inode) -> bool:
        """Whether a file that is being written should begin to be sent without waiting for its age."""
        content = node.content
        assert content is not None
        return (
            content.window_bytes >= FLUSH_BYTES
            and not content.hold
            and all(f.state == READY for f in content.flights)
        )

    def closed(self, content: Content) -> None:
        """The last writer of a changed file closed it. When much has come together it is not left to its age:
        at the end of a long untar nearly all of it is in the server already."""
        self.closed_bytes += content.window_bytes
        self.closed_files += 1
        if self.closed_bytes >= FLUSH_BYTES or self.closed_files >= FLUSH_FILES:
            self.early = True

    def start_round(self, now: float, *, everything: bool, closed: bool = False) -> None:
        """Freeze what is due, and commit when it is made (or after a while all the same). `closed`: only of
        files nobody has open for writing."""
        self.early = False
        self.closed_bytes = self.closed_files = 0
        keys: set[int] = set()
        for ino in list(self.core.dirty):
            node = self.core.nodes.by_ino.get(ino)
            content = node.content if node is not None else None
            if node is None or content is None:
                continue
            if content.hold and not everything:
                if now - content.since < HOLD_MAX or not node.size:
                    self.core.stir()
                    continue
                content.hold = False  # no replacement, but a stream: what is there is better than nothing
            if closed and content.writers:
                self.core.stir()
                continue
            if not content.flights or all(f.state == READY for f in content.flights):
                self.freeze(node, pump=False)
            keys.update(f.key for f in content.flights if f.state != READY)
            if content.window and not content.hold:
                self.core.stir()
        self.pump()
        self.round = keys
        self.round_until = now + self.core.options.flush_age

    def round_over(self, now: float) -> bool:
        """Whether the flights of the round are made, or it took too long. Once."""
        if self.round_until is None or (self.round and now < self.round_until):
            return False
        self.round_until = None
        self.round = set()
        return True

    def wake(self, now: float) -> None:
        """The retry's time has come."""
        self.backlog.extend(unit for at, unit in self.later if at <= now)
        self.later = [(at, unit) for at, unit in self.later if at > now]
        if self.retry_at is not None and self.retry_at <= now:
            self.retry_at = None
            again, self.unlogged = self.unlogged, []
            for flight in again:
                if flight.state == MAKING:
                    self.made(flight)
                    self.start(self.core.nodes.get(flight.ino).file())
        self.pump()
