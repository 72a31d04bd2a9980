"""`Machine`: the volume, its worker threads and its loop, tied together without knowing about FUSE.

It hands jobs out, brings results back, and keeps everybody who waits for a want: parked FUSE handlers, the
control socket, the last flush. All methods run on the loop's thread except `post`, `snapshot` and those that
say so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from fsd.host.seam import Host
from fsd.kernel.atonce import AtOnce, Begins, Watching
from fsd.kernel.runner import Runner
from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import PARKED_MAX
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.types import Cache, Invalidation, Job, Want
from fsd.vfs.volume import READS, Volume

T = TypeVar("T")
log = logging.getLogger(__name__)

# A want ends by itself at `io_timeout`; this much later the waiter ends in any case.
GRACE = 2.0
# What has to be known (that all is committed, which files are open) is waited for so long: the loop's thread
# may stand in an fsync of the log on a slow disk.
ANSWER = 20.0
# Ticks come ten times a second. What lies between two of them beyond this, the process did not run (a paused
# sandbox, SIGSTOP): nobody has waited for the server meanwhile, whose answer may be there already.
PAUSED = 2.0


def silent() -> Unavailable:
    """What is told where the loop's thread did not answer."""
    return Unavailable("the FUSE thread does not answer", hint="its stacks are in the log")


class LoopWait(Protocol):
    """What a handler awaits. `fire` and `fail` on the loop's thread only."""

    def fire(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def __await__(self) -> Any: ...


class Loop(Protocol):
    """The scheduler of the FUSE thread: mini, or stock trio."""

    def post(self, func: Callable[[], object]) -> None: ...
    def make_wait(self) -> LoopWait: ...


@dataclass(slots=True, eq=False)
class Parked:
    """One waiter. `wake(None)` when the want ended, `wake(error)` to end the waiting early; `pid` is the
    thread that waits (0: unknown), `inherited` when it may be gone and somebody wait all the same. `undone`:
    nothing of its call has happened yet. `request`: the kernel waits for the answer. `since` and `deadline`
    are seconds of `Machine.clock`."""

    want: Want
    wake: Callable[[BaseException | None], None]
    since: float
    deadline: float | None
    pid: int
    inherited: bool
    undone: bool = False
    request: bool = True
    woken: bool = False


class Machine:
    """One mount's volume at work."""

    def __init__(
        self,
        volume: Volume,
        remote: Remote,
        cache: Cache,
        loop: Loop,
        host: Host,
        io_timeout: float,
        at_once: tuple[Begins, Watching] | None = None,
    ) -> None:
        """`at_once`: who sends small commits from the loop's thread, and who waits for their answers."""
        self.volume = volume
        self.host = host
        self.loop = loop
        self.io_timeout = io_timeout
        self._runner = Runner(remote, cache, self._deliver)
        self.at_once = AtOnce(*at_once, self._heard, self._runner.submit) if at_once is not None else None
        self._rest: Callable[[], None] | None = None  # of an answer whose callers go first
        # Told before that: something is to happen in the volume that is no request.
        self.news: Callable[[], None] | None = None
        self._parked: dict[int, Parked] = {}
        self._next_key = 0
        self._stopped = False
        # Set when `stop` is done; any thread may wait for it.
        self.closed = threading.Event()
        # Told of an error in the volume after which nobody knows what it holds in memory; its log does.
        self.broke: Callable[[BaseException], object] | None = None
        # Takes what the kernel has to forget beside what the feed tells; loop's thread.
        self.invalidated: Callable[[list[Invalidation]], None] | None = None
        self.beat = host.monotonic()
        self._paused = 0.0  # how long the process did not run, as far as ticks tell

    def clock(self) -> float:
        """Seconds by which waiting is bounded: monotonic ones without those in which the process did not run.
        Any thread."""
        return min(self.host.monotonic(), self.beat + PAUSED) - self._paused

    def start(self) -> None:
        """Start the workers; any thread."""
        self._runner.start()

    def post(self, func: Callable[[], object]) -> None:
        """Run `func` on the loop's thread; any thread."""
        self.loop.post(func)

    def pump(self) -> None:
        """Hand out what the volume wants done. The loop calls it whenever it runs idle."""
        if self._rest is not None:
            self._complete()
        for job in self.volume.jobs():
            if self.at_once is None or not self.at_once.take(job):
                self._runner.submit(job)

    def _deliver(self, job: Job, result: object) -> None:
        self.loop.post(partial(self._finish, job, result))

    def _heard(self, job: Job, result: object) -> None:
        """Of a commit that this thread sent. Who waits for no more than that is answered before anything
        follows from it: the program is being woken meanwhile. The rest comes before the loop sleeps, before
        the next answer and before the volume's timers. A request or a call that comes earlier (both may be
        there already) finds the volume as it is while a commit is out."""
        self._complete()
        over = not self._stopped and self._whole(self.volume.heard, job, result)
        if over:
            self._rest = partial(self._finish, job, result)
            self.settle()
        else:
            self._finish(job, result)

    def _complete(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            try:
                if self.news is not None:
                    self.news()
                rest()
            except Exception:
                log.exception("what follows from the answer to a commit failed")

    def _finish(self, job: Job, result: object) -> None:
        self._complete()
        if self._stopped:
            return
        if isinstance(job, READS):
            self.volume.finish(job, result)
        else:
            self._whole(self.volume.finish, job, result)
        self._after()

    def _whole(self, change: Callable[..., T], *args: Any) -> T:
        """Around what changes the volume: a defect may leave it half changed, and what it sends from then on
        nobody could trust, if it sends at all. (What the disk under the log says leaves it as it was.)"""
        try:
            return change(*args)
        except (OSError, FsdError):
            raise
        except Exception as exc:
            if self.broke is not None:
                self.broke(exc)
            raise

    def tick(self) -> None:
        """Timers: called every 100 ms or so. `beat` tells the watchdog that the loop is alive."""
        now = self.host.monotonic()
        paused = now - self.beat - PAUSED
        if paused > 0:
            self._paused += paused  # before the beat: for other threads the clock never runs ahead
            self.volume.extend(paused)
        self.beat = now
        if self._stopped:
            return
        self._complete()
        if self.at_once is not None:
            self.at_once.look()
            self._complete()
        self._whole(self.volume.tick, now)
        self._after()
        waited = self.clock()
        for parked in list(self._parked.values()):
            if parked.deadline is not None and waited >= parked.deadline and not parked.woken:
                self.wake(parked, Unavailable(f"no answer in time: {parked.want.what}"))

    def _after(self) -> None:
        """What may have come of a result or a tick."""
        found = self.volume.take_invalidations()
        if found and self.invalidated is not None:
            self.invalidated(found)
        self.settle()
        self.pump()

    def settle(self) -> None:
        """Wake everybody whose want has ended."""
        if self._parked:
            for parked in list(self._parked.values()):
                if parked.want.finished and not parked.woken:
                    self.wake(parked, None)

    def wake(self, parked: Parked, error: BaseException | None) -> None:
        """End one waiting; the first call counts."""
        if not parked.woken:
            parked.woken = True
            parked.wake(error)

    def watch(
        self,
        want: Want,
        wake: Callable[[BaseException | None], None],
        *,
        within: float | None,
        since: float | None = None,
        pid: int = 0,
        inherited: bool = False,
        undone: bool = False,
        request: bool = True,
    ) -> Callable[[], object]:
        """Have `wake` called once: with None when `want` ended, with an error when `within` seconds have
        passed since `since` (of `clock`). Returns what forgets the watch. `request`: for a request of the
        kernel; these end with its connection, and over PARKED_MAX waiters raise `Unavailable`."""
        if request and len(self._parked) >= PARKED_MAX:
            raise Unavailable(f"{PARKED_MAX} requests wait for the server already")
        since = self.clock() if since is None else since
        deadline = None if within is None else since + within
        parked = Parked(want, wake, since, deadline, pid, inherited, undone, request)
        key = self._next_key = self._next_key + 1
        self._parked[key] = parked
        if want.finished:
            self.wake(parked, None)
        return partial(self._parked.pop, key, None)

    async def wait(
        self,
        want: Want,
        *,
        within: float | None,
        since: float,
        pid: int = 0,
        inherited: bool = False,
        undone: bool = False,
    ) -> None:
        """Park the calling handler until `want` has ended; raises what it ended with, or what ended the
        waiting early."""
        if not want.finished:
            wait = self.loop.make_wait()
            forget = self.watch(
                want,
                lambda error: wait.fire() if error is None else wait.fail(error),
                within=within,
                since=since,
                pid=pid,
                inherited=inherited,
                undone=undone,
            )
            self.pump()
            try:
                await wait
            finally:
                forget()
        self.volume.done(want)

    def handler_timeout(self) -> float | None:
        return self.io_timeout + GRACE if self.io_timeout else None

    def is_over(self, since: float) -> bool:
        """Whether a handler that began to wait at `since` (of `clock`) has waited as long as one may."""
        return bool(self.io_timeout) and self.clock() - since >= self.io_timeout

    def fail_requests(self, error: BaseException) -> None:
        """The connection to the kernel is gone: end all that waits for an answer to one of its requests. Who
        waits for what was written to be sent (the last flush, the control socket) waits on."""
        self._fail(error, lambda parked: parked.request)

    def _fail(self, error: BaseException, which: Callable[[Parked], bool]) -> None:
        for parked in list(self._parked.values()):
            if not parked.woken and which(parked):
                self.wake(parked, error)

    def snapshot(self) -> list[Parked]:
        """The waiters; any thread, for looking only."""
        return list(self._parked.values())

    def stop(self) -> None:
        """No further result reaches the volume; closes it. What is pending stays in its log."""
        if self._stopped:
            return
        self._complete()
        self._stopped = True
        try:
            self._fail(Unavailable("the mount ends"), lambda _: True)
        finally:  # a waiter that cannot be told must not keep the log open
            self._close()

    def _close(self) -> None:
        self._runner.stop()
        if self.at_once is not None:
            self.at_once.stop()
        try:
            self.volume.close()
        except (OSError, FsdError):
            log.exception("closing the log failed")
        finally:
            self.closed.set()
