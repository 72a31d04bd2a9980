"""Operations to the server, strictly in order, one commit outstanding, and what its answers do.

A commit that was sent is sent again unchanged until it is answered. Answers are logged before anything is
freed because of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fsd.model.errors import (
    FsdError,
    HistoryChanged,
    IntegrityError,
    LeaseHeld,
    LeaseLost,
    NoSpace,
    NotAuthenticated,
    NotPermitted,
    QuotaExceeded,
    SessionForked,
    SessionUnknown,
    TooLarge,
    Unavailable,
    UsageError,
)
from fsd.model.limits import COMMIT_OPS_MAX
from fsd.model.ops import REFUSED, SETATTR, Content, Create, Op, Outcome, Setattr
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.build import ResendJob, Source, first_sources
from fsd.vfs.content import operation
from fsd.vfs.core import Core
from fsd.vfs.cut import Cutter
from fsd.vfs.flush import Flusher
from fsd.vfs.log import ACK, CANCEL, CONTENT, OP
from fsd.vfs.lost import put_off
from fsd.vfs.node import Inode
from fsd.vfs.outcomes import LATE, done
from fsd.vfs.queue import Queued, Touched, touched
from fsd.vfs.records import Ack, Cancel, Flown, packb
from fsd.vfs.refused import Refusal, SalvageJob
from fsd.vfs.resession import SessionJob, session_info, switch
from fsd.vfs.twins import meet
from fsd.vfs.types import FAST, Cache
from fsd.wire.frame import Blob
from fsd.wire.messages import Commit, CommitAnswer, Mark, make_commit

COMMIT_TIMEOUT: Final = 60.0
RETRY_FIRST: Final = 0.1
RETRY_MAX: Final = 2.0
RETRY_DENIED: Final = 15.0
RESEND_AT_ONCE: Final = 3
BACKLOG_OPS: Final = 2000  # so many operations are sent without waiting for their age


@dataclass(frozen=True, slots=True, eq=False)
class CommitJob:
    """Send one commit."""

    commit: Commit
    lane: str = FAST

    def run(self, remote: Remote, cache: Cache) -> CommitAnswer:
        return remote.commit(self.commit, COMMIT_TIMEOUT)


CommitterJob = CommitJob | SessionJob | ResendJob | SalvageJob


class Committer:
    """See the module. `pending` gives (operations, files, bytes) for the server's record."""

    def __init__(self, core: Core, pending: Callable[[], tuple[int, int, int]]) -> None:
        self.core = core
        self.flusher = Flusher(core, self.kick)
        self.cutter = Cutter(core, self.flusher)
        self.pending = pending
        self.out: CommitterJob | None = None
        self.commit: Commit | None = None  # what was sent and is not answered
        self.answer: CommitAnswer | None = None  # waits for what was refused to be put aside
        self.retry_at: float | None = None
        self.denied: float | None = None  # when the server did not take the token; the retry waits
        self.delay = RETRY_FIRST
        self.most = COMMIT_OPS_MAX
        self.urgent = 0  # send at once up to this operation
        self.forked = False
        self.unlogged = False  # a new session that is not in the log yet
        self.resent = 0
        self.committed_ops = 0
        self.tell: Callable[[int, FsdError], None] = lambda ino, error: None
        self.joined: Callable[[Inode, Inode], None] = lambda node, stays: None  # handles move

    # queueing ----------------------------------------------------------------------------------------
    def add(self, op: Op, *, drops: int = 0) -> None:
        """Log and queue a namespace operation; what it touches shows local state until it is done. `drops`:
        the file whose last name goes with it, in the same record, so that no end comes between the two."""
        self.enqueue(op, self.write(op, drops=drops))

    def write(self, op: Op, *, drops: int = 0) -> int:
        """Log an operation; nothing else changed if this raises `NoSpace`."""
        return self.core.record(OP, op.ino, drops, [packb(op)])

    def enqueue(self, op: Op, pos: int) -> None:
        """Queue a logged operation, once what it makes is in memory."""
        about = touched(op)
        self.core.queue.add(Queued(op.opno, op, pos, self.core.now()), about[0])
        self.core.stir()
        self._mark(about, 1)

    def mark(self, op: Op, by: int) -> None:
        self._mark(touched(op), by)

    def _mark(self, about: Touched, by: int) -> None:
        inos, names = about
        core = self.core
        nodes = core.nodes
        by_ino = nodes.by_ino
        for ino in inos:
            node = by_ino.get(ino)
            if node is not None:
                node.pending += by
                if by < 0 and node.pending == 0 and node.lookups == 0:
                    core.unused[ino] = None
        for parent, name in names:
            nodes.mark_names(parent, name, by)

    def cancel(self, opnos: list[int], ino: int, parent: int, time: int) -> None:
        """These operations never leave this machine; of what they did, the directory's times remain."""
        core = self.core
        last = core.queue.last(parent, but=opnos)
        if last is not None and last.opno > core.queue.fixed() and isinstance(last.op, Setattr):
            # One such operation is enough for a run of temporary files.
            times = last.op._replace(mtime=time, ctime=time)
        else:
            last = None
            times = Setattr(core.take_opno(), SETATTR, parent, None, None, None, None, time, time)
        pos = core.record(CANCEL, ino, 0, [packb(Cancel(tuple(opnos), times))])
        for opno in opnos:
            queued = core.queue.remove(opno)
            self.forget(queued)
            if queued.flight is not None:
                self.flusher.discard(core.nodes.get(ino).file(), queued.flight)
        if last is not None:
            last.op = times
        else:
            self.enqueue(times, pos)
        core.check_wants()

    def forget(self, queued: Queued, about: Touched | None = None) -> None:
        """A queued operation is gone, done or not: what it touched is no longer pending because of it.
        `about`: that, where it is known already."""
        self.flusher.sent_bytes(queued)
        if queued.flight is not None:
            node = self.core.nodes.by_ino.get(queued.flight.ino)
            if node is not None:
                node.pending -= 1
        elif queued.op is not None:
            self._mark(about or touched(queued.op), -1)

    # sending -----------------------------------------------------------------------------------------
    def due(self, now: float) -> bool:
        """Whether what is at the head should go now."""
        head = self.core.queue.head()
        if head is None or head.op is None or self.core.queue.waits(head):
            return False
        return (
            max(self.urgent, self.core.demanded()) >= head.opno
            or len(self.core.queue) >= BACKLOG_OPS
            or now - head.at >= 3 * self.core.options.flush_age
        )

    def let_go(self, now: float) -> None:
        """See whether a checkpoint is made or given up: then what waited for it goes on. A commit that is
        still to be sent again then does so without asking for it."""
        cut = self.cutter.cut
        self.cutter.advance(now)
        if cut is not None and self.cutter.cut is None and self.commit is not None:
            self.commit = self.commit._replace(checkpoint=None)

    def kick(self) -> None:
        """Send what is due, unless a commit is out or its retry has to wait."""
        if self.denied is not None and self.retry_at is not None and self.core.demanded():
            # Nobody who waits now was told of the denial yet: they need not wait for the usual retry.
            self.retry_at = min(self.retry_at, self.denied + RETRY_MAX / 2)
            if self.retry_at <= self.core.now():
                self.retry_at, self.denied = None, None
        if self.out is not None or self.retry_at is not None or self.answer is not None or self.core.met:
            return
        if self.core.fenced is not None:
            return
        if self.forked:
            self.out = SessionJob(session_info(self.core))
            self.core.jobs.append(self.out)
            return
        if self.commit is None:
            if not self.due(self.core.now()):
                return
            self.make()
            if self.commit is None:
                return  # the head is being put aside
        self.out = CommitJob(self.commit)
        self.core.jobs.append(self.out)

    def make(self) -> None:
        """The next commit; none where what is first can only be put aside."""
        core = self.core
        head = core.queue.head()
        last = head and (core.queue.partner(head) or head)
        if head is not None and last is not None and last.broken:
            assert last.flight is not None
            assert last.flight.unmade is not None
            core.queue.sent = [head] if last is head else [head, last]
            self.split(last.flight.unmade)
            return
        batch = core.queue.batch(self.most)
        ops = [core.wire.op(queued.op, core.shift) for queued in batch if queued.op is not None]
        blobs: dict[bytes, Blob] = {blob.hash: blob for queued in batch for blob in queued.blobs}
        core.queue.sent = batch
        self.commit = make_commit(
            core.session,
            core.ticket,
            ops,
            self.pending(),
            list(blobs.values()),
            self.cutter.asked_with(batch),
            core.fence,
            core.mark,
        )

    # answers -----------------------------------------------------------------------------------------
    def heard(self, answer: CommitAnswer) -> bool:
        """Before `finish`: let go who waits for what a plain answer says is committed; whether anybody did.
        What follows from the answer takes as long as the program needs to be woken, and the log need not have
        it first: what was sent and not logged as answered is sent again, and known to the server."""
        if answer.outcomes or answer.missing or answer.need_full or not self.answers(answer):
            return False
        return self.core.end_calls(answer.next_op + self.core.shift - 1)

    def finish(self, job: CommitterJob, result: Any) -> None:
        """One of this part's jobs ended with `result` or an error."""
        self.out = None
        if isinstance(result, FsdError):
            self.failed(job, result)
        elif isinstance(job, CommitJob) and not self.answers(result):
            self.failed(job, Unavailable("the answer to a commit is about other operations than were sent"))
        elif isinstance(job, CommitJob):
            self.answered(result)
        elif isinstance(job, SalvageJob):
            assert self.answer is not None
            self.apply(self.answer)
        elif isinstance(job, SessionJob):
            self.forked = False
            switch(self.core, result)
            self.log_session()
        self.kick()

    def failed(self, job: CommitterJob, error: FsdError) -> None:
        core = self.core
        core.reason = error.message
        delay = self.delay
        self.delay = min(RETRY_MAX, self.delay * 2)
        if isinstance(error, LeaseLost | HistoryChanged):
            core.fence_off(error)
            return
        if isinstance(job, SessionJob) and isinstance(error, LeaseHeld):
            # A copy of this mount, or whoever came while this session was lost, is the writer now.
            core.fence_off(LeaseLost(f"the writer lease was lost: {error.message}"))
            return
        if isinstance(job, CommitJob):
            if isinstance(error, SessionForked) and self.core.lost_after and put_off(self):
                return
            if isinstance(error, SessionForked | SessionUnknown):
                self.forked = True
                self.commit = None
                core.queue.sent = []
                return
            if isinstance(error, UsageError | TooLarge):
                self.split(error)
                return
        if isinstance(job, ResendJob) and isinstance(error, IntegrityError):
            self.split(error)
            return
        if isinstance(error, NotAuthenticated | NotPermitted):
            core.fail_commit_wants(error)
            delay, self.denied = RETRY_DENIED, core.now()
        elif isinstance(error, NoSpace | QuotaExceeded):
            # The server's disk is full: who waits is told so now; the changes go on being tried.
            core.fail_commit_wants(error)
            delay = RETRY_MAX
        self.retry_at = core.now() + delay

    def renumber(self, queued: Queued, op: Op | None) -> None:
        """Move an operation that was not sent to the end of the queue, as `op`."""
        core = self.core
        core.queue.remove(queued.opno)
        if queued.flight is None and queued.op is not None:
            self.mark(queued.op, -1)
        queued.opno = core.take_opno()
        queued.op = None if op is None else op._replace(opno=queued.opno)
        if queued.flight is not None:
            queued.flight.opno = queued.opno
        elif queued.op is not None:
            self.mark(queued.op, 1)
        core.queue.add(queued)

    def split(self, error: FsdError) -> None:
        """The server will not take this commit: find the operation and put that one aside, or two that go
        together."""
        core, sent = self.core, self.core.queue.sent
        self.commit = None
        if len(sent) > 2 or (len(sent) == 2 and core.queue.partner(sent[0]) is not sent[1]):
            core.queue.sent = []
            self.most = max(1, len(sent) // 2)
            return
        numbers = [queued.opno - core.shift for queued in sent]
        outcomes = tuple(Outcome(n, REFUSED, error.errno, 0, 0, b"", error.message) for n in numbers)
        # Nothing was applied: the ticket stays, and the numbers are simply never used.
        self.settle(CommitAnswer(core.seq, core.ticket, numbers[-1] + 1, outcomes, (), 0))

    def answers(self, answer: CommitAnswer) -> bool:
        """Whether an answer is about what was sent: an operation is taken for done by its number alone."""
        numbers = {queued.opno - self.core.shift: queued for queued in self.core.queue.sent}
        if answer.missing or not numbers:
            return True
        if answer.need_full:
            asked = numbers.get(answer.need_full)
            op = None if asked is None or asked.flight is None else asked.op
            return isinstance(op, Content) and not op.full and answer.next_op <= answer.need_full
        return min(numbers) < answer.next_op <= max(numbers) + 1

    def answered(self, answer: CommitAnswer) -> None:
        self.delay = RETRY_FIRST
        if answer.missing:
            self.resend(answer.missing)
            return
        self.core.reason = ""
        self.resent = 0
        self.settle(answer)

    def resend(self, missing: tuple[bytes, ...]) -> None:
        """The server lacks blobs of this commit: make them again from the log, then the same commit."""
        known = first_sources(source for queued in self.core.queue for source in queued.sources)
        sources = []
        for digest in missing:
            # A blob this session did not make: perhaps the cache still has it.
            sources.append(known.get(digest) or Source(digest, ((1, digest, 0, 1 << 20),)))
        self.resent += 1
        if self.resent > RESEND_AT_ONCE:
            self.core.reason = "the server goes on missing blobs that were sent"
            self.retry_at = self.core.now() + RETRY_MAX
        self.out = ResendJob(tuple(sources), self.core.log, known)
        self.core.jobs.append(self.out)

    def settle(self, answer: CommitAnswer) -> None:
        """Put aside what was refused, then apply the answer."""
        self.answer = answer
        refused = [o for o in answer.outcomes if o.status == REFUSED and self.kept(o)]
        if not refused:
            self.apply(answer)
            return
        refusals = self.refusals(refused)
        self.cutter.note_refused(refusals)
        options = self.core.options
        job = SalvageJob(options.state_dir, self.core.host, self.core.log, refusals, options.remote_path)
        self.out = job
        self.core.jobs.append(job)

    def kept(self, outcome: Outcome) -> bool:
        """Whether something is lost unless a refused operation is put aside: its data, or a change that quota
        or scope forbade. A rename, link or removal that came too late (sharing rule 7) is only reported."""
        queued = self.core.queue.get(outcome.opno + self.core.shift)
        if queued is None or queued.op is None:
            return False
        return isinstance(queued.op, Content | Create) or outcome.errno not in LATE

    def refusals(self, outcomes: list[Outcome]) -> tuple[Refusal, ...]:
        """What has to be kept of refused operations, and of those that depend on them."""
        core = self.core
        found: list[Refusal] = []
        by_opno = {o.opno + core.shift: o for o in outcomes}
        for queued in core.queue.sent:
            outcome = by_opno.get(queued.opno)
            if outcome is not None:
                found.append(self.refusal(queued, outcome.errno, outcome.reason))
        return tuple(found)

    def refusal(self, queued: Queued, number: int, reason: str) -> Refusal:
        core = self.core
        assert queued.op is not None
        node = core.nodes.by_ino.get(queued.op.ino)
        top, names = core.nodes.place(queued.op.ino, core.root_ino)
        return Refusal(
            core.session,
            queued.opno - core.shift,
            tuple(queued.op),
            number,
            reason,
            core.nodes.path(queued.op.ino, core.root_ino),
            node.mode if node is not None else 0o100600,
            node.uid if node is not None else 0,
            node.gid if node is not None else 0,
            queued.flight.size if queued.flight is not None else 0,
            tuple(sorted(queued.flight.blocks.items())) if queued.flight is not None else (),
            tuple(queued.sources),
            core.wire.out(top) if top != core.root_ino else 0,
            names,
        )

    def apply(self, answer: CommitAnswer) -> None:
        """Log the answer, then everything that follows from it."""
        core = self.core
        self.answer = answer
        acked = answer.next_op + core.shift
        outcomes = {o.opno + core.shift: o for o in answer.outcomes}
        local = tuple(o._replace(opno=o.opno + core.shift) for o in answer.outcomes)
        if answer.need_full:
            acked = min(acked, answer.need_full + core.shift)
        try:
            core.record(ACK, 0, 0, [packb(Ack(answer.seq, answer.ticket, acked, local, answer.at))])
        except NoSpace as exc:
            self.on_full_disk(exc)
            return
        self.answer = self.commit = None
        core.ticket, core.acked = answer.ticket, max(core.acked, acked)
        core.seq = max(core.seq, answer.seq)
        if answer.at and answer.seq > core.mark.seq:
            core.mark = Mark(answer.seq, answer.at)
        if outcomes:
            core.surprises.add(answer.seq)
            core.feed_seq = min(core.feed_seq, answer.seq - 1)  # read again if it was read as known
        elif answer.at:
            core.knows(answer.seq)
        sent, core.queue.sent = core.queue.sent, []
        switch = False
        for queued in sent:
            if queued.opno >= acked:
                break
            assert queued.op is not None
            about = touched(queued.op)
            core.queue.remove(queued.opno, about[0])
            switch |= done(self, queued, about, outcomes.get(queued.opno), answer.seq)
        for ino in {queued.flight.ino for queued in sent if queued.flight is not None}:
            self.flusher.say_base(ino)
        self.most = COMMIT_OPS_MAX
        if answer.need_full:
            self.make_full(answer.need_full + core.shift)
        if switch:
            self.forked = True
        if core.met:
            meet(self)
        self.cutter.committed(answer.checkpoint)
        core.check_wants()
        core.trim()

    def on_full_disk(self, exc: NoSpace) -> None:
        """What has to be logged before going on cannot be: try again later."""
        self.core.disk_full(exc)
        self.retry_at = self.core.now() + RETRY_MAX

    def log_session(self) -> None:
        """Make the new session and what it changed of the queue durable; nothing is sent before."""
        core = self.core
        self.unlogged = True
        try:
            core.record_state()
            for queued in core.queue:
                if queued.op is not None and not queued.broken:
                    core.record(*self.recorded(queued))
            core.log.sync()
        except NoSpace as exc:
            self.on_full_disk(exc)
            return
        except OSError as exc:
            self.on_full_disk(core.disk_failed(exc))
            return
        self.unlogged = False

    def make_full(self, opno: int) -> None:
        """The server needs the whole block list of this content operation: log and queue it again so."""
        queued = self.core.queue.get(opno)
        assert queued is not None
        assert queued.flight is not None
        assert isinstance(queued.op, Content)
        partial = queued.op
        queued.op = operation(queued.flight, partial.base, full=True)
        try:
            self.core.record(*self.recorded(queued))
        except NoSpace as exc:
            # What is sent must be what a recovery would send: as it was, until the server asks again.
            queued.op = partial
            self.on_full_disk(exc)

    @staticmethod
    def recorded(queued: Queued) -> tuple[int, int, int, list[bytes]]:
        """The record of a queued operation: kind, inode, offset, payload."""
        op = queued.op
        assert op is not None
        if queued.flight is None:
            return OP, 0, 0, [packb(op)]
        assert isinstance(op, Content)
        flown = Flown(op, queued.flight.frozen, tuple(queued.sources))
        return CONTENT, queued.flight.ino, 0, [packb(flown)]

    def wake(self, now: float) -> None:
        """The retry's time has come."""
        if self.retry_at is not None and self.retry_at <= now:
            self.retry_at, self.denied = None, None
            if self.core.met and not meet(self):
                return
            if self.unlogged:
                self.log_session()
            if self.answer is not None and self.out is None:
                self.settle(self.answer)
        self.kick()
