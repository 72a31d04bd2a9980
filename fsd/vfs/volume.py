"""`Volume`: the client's state machine (docs: DESIGN.md beside this file).

All methods run on one thread, never block on the network, and either return, raise an `FsdError` (its
`.errno` is the answer), or raise `Park`. The namespace calls are in `names`, the file calls in `files`,
`ranges` and `copying`; here is the machine around them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from fsd.host.files import lock_directory
from fsd.model.errors import FsdError, HistoryChanged, InternalError, LeaseLost, Unavailable
from fsd.vfs.asking import AskJob, BlobJob, CacheJob
from fsd.vfs.build import BuildJob, ResendJob
from fsd.vfs.commit import CommitJob, Committer
from fsd.vfs.copying import CopyCalls
from fsd.vfs.core import RENEW, Core
from fsd.vfs.cut import CheckpointJob, DropJob
from fsd.vfs.evict import Evictor
from fsd.vfs.feed import Feed
from fsd.vfs.keep import Keeper, KeepJob
from fsd.vfs.loads import Loader
from fsd.vfs.log import STATE, SyncJob
from fsd.vfs.refused import SalvageJob, count_refused
from fsd.vfs.resession import SessionJob
from fsd.vfs.types import Invalidation, Job, Pending, Want
from fsd.wire.messages import CommitAnswer, FeedPage

log = logging.getLogger(__name__)

# Jobs whose results add to what is known and change nothing that is to be sent.
READS: Final = (AskJob, BlobJob, CacheJob, KeepJob, DropJob)


class Volume(CopyCalls):
    """See the module. Node numbers are the volume's own; `root_ino` is the mount's root. Made by
    `fsd.vfs.open.open_volume`, which gives it a core with its root in memory."""

    def __init__(self, core: Core, lock: int | None = None) -> None:
        committer = Committer(core, self._reported)
        self.counted = (0, 0, 0)
        self.count_at = 0.0
        super().__init__(core, committer, Loader(core))
        committer.tell = self.tell
        committer.joined = self.move_handles
        self.feed = Feed(core)
        self.evictor = Evictor(core)
        self.keeper = Keeper(core)
        self.lock = lock
        self.limit_at = 0.0
        self.put_back_at = 0.0
        self.previous: dict[str, object] | None = None
        self.recovered: object = None  # recover.Report of what an earlier run had left

    @property
    def root_ino(self) -> int:
        return self.core.root_ino

    @property
    def session(self) -> int:
        """The mount session operations go under now."""
        return self.core.session

    @property
    def feed_seq(self) -> int:
        """Continue the change feed behind this seq."""
        return self.core.feed_seq

    # jobs --------------------------------------------------------------------------------------------
    def jobs(self) -> list[Job]:
        """Work to hand to other threads now. Ask again after every call and every `finish` and `tick`."""
        self.ask()
        found = list(self.core.jobs)
        self.core.jobs.clear()
        return found

    def ask(self) -> None:
        """Make jobs of what is to be asked for."""
        if self.loader.waiting or self.loader.blob_queue:
            self.loader.pump()

    @property
    def waiting_jobs(self) -> Collection[Job]:
        """What calls have left for `jobs` to hand out. Always the same object, of which the length counts."""
        return self.core.jobs

    def heard(self, job: Job, result: object) -> bool:
        """Whether calls end by a commit's answer as it is; `finish` comes after they were answered."""
        return (
            isinstance(job, CommitJob)
            and isinstance(result, CommitAnswer)
            and self.committer.out is job
            and self.committer.heard(result)
        )

    def finish(self, job: Job, result: object) -> None:
        """What `job.run` returned, or the exception it raised."""
        answer: Any = result
        if isinstance(result, BaseException) and not isinstance(result, FsdError):
            answer = InternalError(f"{type(job).__name__} failed: {type(result).__name__}: {result}")
            answer.__cause__ = result
        if isinstance(job, BuildJob):
            self.flusher.finish(job, answer)
        elif isinstance(job, AskJob):
            self.loader.finish_ask(job, answer)
        elif isinstance(job, BlobJob):
            self.loader.finish_blobs(job, answer)
        elif isinstance(job, CacheJob):
            self.loader.finish_cached(job, answer)
        elif isinstance(job, SyncJob):
            self.core.synced(job, answer if isinstance(answer, FsdError) else None)
        elif isinstance(job, KeepJob):
            self.keeper.finish(job, answer)
        elif isinstance(job, CheckpointJob):
            self.committer.cutter.finish(job, answer)
        elif isinstance(job, DropJob):
            pass  # done, or the checkpoint stays: one too many, and whole
        else:
            self.core.down = isinstance(answer, Unavailable)
            assert isinstance(job, CommitJob | SessionJob | ResendJob | SalvageJob)
            self.committer.finish(job, answer)
        self._advance(self.core.now())

    def _advance(self, now: float) -> None:
        """What follows when something ended or time passed."""
        if self.flusher.round_over(now):
            self.committer.urgent = self.core.next_op - 1
        self.committer.let_go(now)
        self.committer.kick()
        if self.core.forget:
            self.core.forget = False
            self.core.invalidations += self.feed.forget_everything(self.core.seq)
        self.freed()

    def done(self, want: Want) -> bool:
        """Whether `want` ended. Raises the error it ended with."""
        if want.finished and want.error is not None:
            raise want.told()
        return want.finished

    # time --------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Flush by age, retry, end what waited too long. `now` is `host.monotonic()`."""
        core = self.core
        core.ticks += 1
        core.drop_unused()
        core.expire(now)
        if self._removed():
            self._put_back(now)
        core.say_dropped()
        if now >= self.limit_at and not core.log.removed():
            self.limit_at = now + 1.0
            self.limit = core.capacity()
            core.renew_at = min(RENEW, self.limit // 4)
            core.lazy = self.limit // 2
        if core.age_at is not None and core.age_at <= now and self.flusher.round_until is None:
            core.age_at = None
            self.flusher.start_round(now, everything=False)
        elif self.flusher.early and self.flusher.round_until is None:
            self.flusher.start_round(now, everything=False, closed=True)
        self.flusher.wake(now)
        self.loader.wake(now)
        self.committer.wake(now)
        self.keeper.wake(now)
        self._advance(now)
        self.evictor.tick(now)

    def _removed(self) -> bool:
        return self.core.log.removed() or (self.lock is not None and not os.fstat(self.lock).st_nlink)

    def _put_back(self, now: float) -> None:
        """Somebody removed the state directory or files in it (tidied up, cleaned a home): what was in them
        exists in this process alone, and goes back there. The lock first: whoever has it by now keeps it."""
        if now < self.put_back_at:
            return
        self.put_back_at = now + 1.0
        directory = self.core.options.state_dir
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.lock is not None and not os.fstat(self.lock).st_nlink:
                again = lock_directory(directory, "the state directory")
                os.dup2(again, self.lock, inheritable=False)
                os.close(again)
            self.core.log.put_back()
        except (OSError, FsdError) as exc:
            self.core.reason = f"the state directory {directory} was removed and cannot be put back: {exc}"
            log.error("%s", self.core.reason)
        else:
            log.warning("the state directory %s was removed: what this mount holds is there again", directory)

    def next_deadline(self) -> float | None:
        """When to call `tick` next at the latest (monotonic); None: only after something happens."""
        times = [self.flusher.again_at(), self.loader.retry_at, self.committer.retry_at, self.keeper.at]
        cut = self.committer.cutter.cut
        times.append(cut.retry_at if cut is not None else None)
        times.append(self.flusher.round_until if self.flusher.round_until is not None else self.core.age_at)
        times.extend(want.deadline for want in self.core.wants if not want.finished)
        if self.disk_wants:
            times.append(self.disk_again)
        return min((time for time in times if time is not None), default=None)

    # the feed ----------------------------------------------------------------------------------------
    def apply_feed(self, page: FeedPage) -> list[Invalidation]:
        return self.feed.apply(page)

    def take_invalidations(self) -> list[Invalidation]:
        """What else the kernel has to forget (conflicts and refusals told by a commit's answer). Ask after
        every `finish` and `tick`."""
        found, self.core.invalidations = self.core.invalidations, []
        return found

    def kernel_holds(self) -> Iterator[Invalidation]:
        """What the kernel was told and has perhaps kept, but for absent names; of directories the attributes
        alone, since who works in one would lose its path with the name. Data stays: with the server away it
        may be nowhere else."""
        for node in list(self.core.nodes.by_ino.values()):
            if node.lookups:
                yield Invalidation(node.ino, None, attr_only=True)
                if not node.is_dir and node.where is not None:
                    yield Invalidation(*node.where, ask=True)

    def still_absent(self, ones: Iterable[Invalidation]) -> Iterator[Invalidation]:
        """Those of names the kernel was told are absent that mean no directory it knows by now: whoever works
        in one would lose its path with the name."""
        by_ino = self.core.nodes.by_ino
        for one in ones:
            above = by_ino.get(one.ino)
            child = None if above is None else by_ino.get(above.entries.get(one.name or b"") or 0)
            if child is None or not child.is_dir or not child.lookups:
                yield one

    def not_made(self, ones: Iterable[Invalidation]) -> Iterator[Invalidation]:
        """Those of names the kernel was told are absent that mean nothing it knows by now. Of the others, as
        of all that an untar made, it keeps no absence."""
        by_ino = self.core.nodes.by_ino
        for one in ones:
            above = by_ino.get(one.ino)
            child = None if above is None else by_ino.get(above.entries.get(one.name or b"") or 0)
            if child is None or not child.lookups:
                yield one

    def feed_silent(self, silent: bool) -> None:
        """While silent, cached state is asked for again before use, if the server answers at all."""
        self.silent = silent
        self.core.down = False
        self.loader.watching(silent)

    def told_more(self, page: FeedPage) -> bool:
        """Whether `page` tells other writer leases or another room than the last one applied. Any thread."""
        core = self.core
        return page.leases != core.leases_told or page.space not in (None, core.space) or bool(page.mark)

    def history_changed(self, error: HistoryChanged) -> None:
        """The service is not the one any more whose files these are. Nothing is sent or asked from now on."""
        if self.core.fenced is None:
            self.core.fence_off(error)

    # the writer lease --------------------------------------------------------------------------------
    def lease_kept(self, session: int, fence: int) -> None:
        """The lease of `session` was renewed; under a new fence where it had expired and nobody took it."""
        core = self.core
        if session == core.session and fence > core.fence:
            core.fence = fence
            core.record_if_room(STATE, 0, [core.state()])  # the old number goes on meaning it

    def lease_lost(self, session: int, error: LeaseLost) -> None:
        """The lease of `session` is somebody else's. Nothing more is sent or taken; what is here stays."""
        if session == self.core.session and self.core.fenced is None:
            self.core.fence_off(error)

    # barrier and state -------------------------------------------------------------------------------
    def barrier(self) -> Want:
        """Ends when everything done up to now is committed, or with the error that prevents it."""
        flights = []
        for ino in list(self.core.dirty):
            node = self.core.nodes.by_ino.get(ino)
            if node is not None and not node.gone:
                node.file().hold = False
                flights += self.flusher.freeze(node, pump=False)
        self.flusher.pump()
        want = self.core.commit_want("barrier", flights, limited=False)
        self.committer.kick()
        return want

    def checkpoint(self, ask: Mapping[str, Any], *, partial: bool, within: float | None) -> Want:
        """A checkpoint of everything done up to now, and of nothing done later; see `cut`. `ask` goes to the
        server as it is; the want's result is its answer, with `not_flushed`."""
        want = self.committer.cutter.begin(ask, partial=partial, within=within)
        self.committer.kick()
        return want

    def writable_files(self) -> list[tuple[int, bytes]]:
        """(inode, one path below the mount's root) of the named regular files that are open for writing. What
        was stored through a mapping of one may be in the kernel alone."""
        nodes = {h.node.ino: h.node for h in self.handles.values() if h.writable and h.node.is_file}
        root, path = self.core.root_ino, self.core.nodes.path
        return [(ino, path(ino, root)) for ino, node in nodes.items() if not node.gone]

    def _dirty_files(self) -> list[int]:
        return [ino for ino in self.core.dirty if not self.core.nodes.get(ino).gone]

    def _reported(self) -> tuple[int, int, int]:
        """The figures that travel with a commit, for `fsd mounts`: not counted anew for each of many commits,
        since that looks at every changed file."""
        now = self.core.now()
        if now >= self.count_at or len(self.core.dirty) < 100:
            self.counted, self.count_at = self._counts(), now + 1.0
        return self.counted

    def _counts(self) -> tuple[int, int, int]:
        total = 0
        files = self._dirty_files()
        for ino in files:
            content = self.core.nodes.get(ino).content
            total += content.extents.total if content is not None else 0
        return len(self.core.queue) - len(self.core.queue.sent), len(files), total

    def pending(self) -> Pending:
        """What only this machine holds, with what the server refused."""
        core = self.core
        # Without descriptors, or with a disk that fails, what was counted last holds.
        with suppress(OSError):
            core.refused = count_refused(core.options.state_dir)
        _, files, size = self._counts()
        head = core.queue.head()
        since = [head.at] if head is not None else []
        path = b""
        for ino in self._dirty_files():
            node = core.nodes.get(ino)
            if node.content is not None and node.content.window:
                since.append(node.content.since)
            path = path or core.nodes.path(ino, core.root_ino)
        if not path and head is not None and head.op is not None:
            path = core.nodes.path(head.op.ino, core.root_ino)
        reason = core.reason if head is not None or files or core.fenced is not None else ""
        if core.refused:
            reason = reason or f"the server refused {core.refused} operations (fsd recover)"
        oldest = max(0.0, core.now() - min(since)) if since else 0.0
        return Pending(len(core.queue) + core.refused, files, size, oldest, path, reason)

    def status(self) -> dict[str, object]:
        core = self.core
        pending = self.pending()
        return {
            "mount_session_id": core.session,
            "fs_seq": core.seq,
            "pending": {
                "operations": pending.operations,
                "files": pending.files,
                "bytes": pending.bytes,
            },
            "oldest_pending_s": round(pending.oldest_s, 3),
            "first_pending_path": pending.first_path.decode("utf-8", "backslashreplace"),
            "reason": pending.reason,
            "conflicts": core.conflicts,
            "refused": core.refused,
            "exclusive": self._exclusive(),
            "leases": sorted({core.leased, *core.leases.values()} - {""}),
            "inodes": len(core.nodes.by_ino),
            "log_bytes": core.log.used,
            "committed_operations": self.committer.committed_ops,
            "previous_session": self.previous,
        }

    def _exclusive(self) -> dict[str, object] | None:
        core = self.core
        if not core.options.exclusive:
            return None
        lost = core.fenced.message if core.fenced is not None else None
        return {"fence": core.fence, "state": "held" if lost is None else "lost", "reason": lost}

    def sync(self) -> None:
        """Everything accepted so far is on this machine's disk: nobody writes any more, and what is not sent
        yet must outlive a restart. Blocks on the disk. The record tells a replay that nothing is lost of what
        lies before it."""
        self.core.record_if_room(STATE, 0, [self.core.state()])
        self.core.log.sync()

    def close(self) -> None:
        """Close the log and the lock. What is pending stays in the log; without anything it is deleted."""
        core = self.core
        if core.log.open and not len(core.queue) and not core.dirty:
            core.log.retire()
        else:
            core.log.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
