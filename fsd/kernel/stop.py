"""How a mount ends, as the table in the design says. Main thread.

- SIGTERM, SIGINT: barrier, detach (a clean unmount if possible, else lazily), flush, exit within
  `stop_timeout`: 0 when everything is committed, else 6. A second signal exits at once, 6.
- `fsd unmount`: barrier, clean unmount (busy: nothing ends), flush, exit.
- The kernel's side is gone (umount(8), fusermount3 -u, umount -f): flush for up to `io_timeout`, exit.

Both kinds of signal routes, the signal itself and a byte in the supervisor's pipe, may tell of one and the
same stop (a group signal): two by different routes within MERGE are one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fsd.kernel import runtime, tasks
from fsd.kernel.blocking import blocking
from fsd.kernel.machine import ANSWER, silent
from fsd.kernel.mountpoint import detach, list_mounts, mounted_at
from fsd.kernel.streams import Gone
from fsd.kernel.supervisor import stop_signals
from fsd.model.errors import FsdError, NotDrained, Unavailable
from fsd.model.names import show
from fsd.model.words import counted
from fsd.vfs.types import Pending, Want

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon
    from fsd.kernel.machine import Machine

log = logging.getLogger(__name__)

MERGE: Final = 0.5
EXIT_CLEAN: Final = 0
EXIT_LEFT: Final = 6
# Of `--stop-timeout`: what a restore gets to end, what the first barrier gets, until when it and then the
# clean unmount end in any case.
RESTORE_MOST: Final = 0.3
BARRIER: Final = 0.6
BARRIER_MOST: Final = 0.7
CLEAN_MOST: Final = 0.85
DETACH_MOST: Final = 2.0
CUT_OFF: Final = 0.2  # so long after a lazy detach users may still end by themselves
LAST: Final = 0.5  # what the last barrier gets at least
ROUND: Final = (
    10.0  # a drain's round in which the FUSE thread does not answer takes less, or the sandbox was paused
)
SOON: Final = 5.0  # for what is only told in passing
NOTHING: Final = {"operations": 0, "files": 0, "bytes": 0}

Tell = Callable[[str], Awaitable[None]]


async def quiet(text: str) -> None:
    log.info("%s", text)


def _while_heard(tell: Tell) -> Tell:
    """`tell` until the command it tells goes away (Ctrl-C); nothing from then on."""
    gone = False

    async def maybe(text: str) -> None:
        nonlocal gone
        if not gone:
            try:
                await tell(text)
            except Gone:
                gone = True

    return maybe


def sizes(pending: Pending | None) -> dict[str, int]:
    if pending is None:
        return dict(NOTHING)
    return {"operations": pending.operations, "files": pending.files, "bytes": pending.bytes}


class Ending(NamedTuple):
    """`pending` None with a code other than 0: nobody could ask what is left."""

    code: int
    pending: Pending | None
    reason: str


class Drained(NamedTuple):
    """What a barrier did. `error` is why it did not get there; `left` what is pending now."""

    error: Exception | None
    before: Pending | None
    left: Pending | None
    took: float

    def answer(self, status: str) -> dict[str, Any]:
        """As `fsd drain` prints it. What was written after the barrier began is not its business."""
        answer: dict[str, Any] = {
            "status": status if self.error is None else "not_drained",
            "flushed": {"files": 0, "bytes": 0},
            "pending": dict(NOTHING),
            "first_failed_path": None,
            "reason": None,
            "duration_ms": round(self.took * 1000),
        }
        before, left = sizes(self.before), sizes(self.left)
        if self.error is not None:
            answer["pending"] = left
            answer["reason"] = str(self.error)
            if self.left is not None:
                answer["first_failed_path"] = show(self.left.first_path) or None
                answer["reason"] = self.left.reason or str(self.error)
        else:
            left = dict(NOTHING)
        for name in ("files", "bytes"):
            answer["flushed"][name] = max(0, before[name] - left[name])
        return answer


class Stopper:
    """One daemon's ending. The first `end` decides."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.asked = tasks.Event()
        self._decided = tasks.Event()
        self._ending: Ending | None = None
        self._stops = 0
        self._last: tuple[str, float] | None = None
        self._in_hand = 0
        self.restoring: tasks.Event | None = None  # a restore of the head that goes on; set when it has ended

    # the decision

    def end(self, ending: Ending) -> None:
        if self._ending is None:
            self._ending = ending
            self._decided.set()

    async def wait(self) -> Ending:
        await self._decided.wait()
        assert self._ending is not None
        return self._ending

    # signals

    async def listen(self) -> None:
        """Signals and the supervisor's pipe, until cancelled."""
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(self._pipe, nursery)
            with tasks.Signals(*stop_signals()) as arrived:
                while True:
                    log.info("signal %s", signal.Signals(await arrived.next()).name)
                    self.stop_asked("signal", nursery)

    async def _pipe(self, nursery: tasks.Nursery) -> None:
        fd = self._daemon.start.stop_pipe
        if fd is None:
            return
        while True:
            await tasks.wait_readable(fd)
            got = os.read(fd, 16)
            if not got:
                log.warning("the supervisor is gone; nobody restarts this daemon any more")
                return
            for _ in got:
                self.stop_asked("pipe", nursery)

    def stop_asked(self, route: str, nursery: tasks.Nursery) -> None:
        """One stop request by `route`."""
        now = self._daemon.options.host.monotonic()
        last, self._last = self._last, (route, now)
        if last is not None and last[0] != route and now - last[1] < MERGE:
            # The other half of one group signal; a further one counts again.
            self._last = None
            return
        self._stops += 1
        self.asked.set()
        nursery.start_soon(self._graceful if self._stops == 1 else self._at_once)

    async def _at_once(self) -> None:
        log.warning("second stop signal: leaving at once")
        await self._detach_anyhow()
        self.end(Ending(EXIT_LEFT, None, "stopped twice"))

    async def _graceful(self) -> None:
        daemon = self._daemon
        if daemon.machine is None:
            self.end(Ending(EXIT_LEFT, None, "stopped before it was mounted"))
            daemon.start.channel.failed(Unavailable("stopped before it was mounted"))
            return
        limit, began = daemon.options.stop_timeout, tasks.current_time()
        deadline = began + limit
        self._in_hand += 1
        if self.restoring is not None:  # it takes away what it fetched
            with tasks.move_on_at(began + limit * RESTORE_MOST):
                await self.restoring.wait()
        # However slow machine or server are, time for the detach is left: who is cut off without one meets a
        # dead mount, and so does the next program.
        with tasks.move_on_at(began + limit * BARRIER_MOST):
            await self.drain(max(0.3, limit * BARRIER), quiet)
        await self._clean_or_lazy(began + limit * CLEAN_MOST)
        # What came between the barrier and the end of the session.
        with tasks.move_on_at(max(deadline, tasks.current_time() + LAST)):
            rest = await self.drain(max(0.2, deadline - tasks.current_time() - 1.0), quiet)
            self.end(self._ending_of(rest))
        self.end(Ending(EXIT_LEFT, None, f"not done within {limit:g} s"))

    # the other ways

    async def watch_kernel(self) -> None:
        """An unmount by anybody: flush what is left, then end."""
        daemon = self._daemon
        await daemon.kernel_gone.wait()
        if daemon.machine is not None:
            # `umount` has returned, or is about to: what is not sent yet must outlive this machine's restart.
            try:
                await daemon.call(daemon.machine.volume.sync, ANSWER)
            except (OSError, FsdError) as exc:
                log.error("the log could not be made durable: %s", exc)
        daemon.update(state=runtime.DETACHED)
        if self._in_hand:
            return
        log.info("unmounted; sending the rest")
        limit = daemon.options.io_timeout
        rest = await self.drain(limit if limit else None, quiet)
        self.end(self._ending_of(rest))

    async def unmount(
        self, within: float | None, lazy: bool, tell: Tell
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Barrier, detach, flush. The answer, and what ends the daemon once it is sent. Raises `Busy`."""
        began = tasks.current_time()
        first = await self.drain(within, tell)
        self._in_hand += 1
        try:
            await self._detach(lazy=lazy)
        except BaseException:  # no process to be had for fusermount3, say: whoever unmounts later ends it
            self._in_hand -= 1
            raise
        await self._session_over(CUT_OFF if lazy else 5.0)
        left = None if within is None else max(1.0, within - (tasks.current_time() - began))
        # It is unmounted: whoever asked may have gone, the rest is sent and the daemon ends all the same.
        rest = await self.drain(left, _while_heard(tell))
        took = tasks.current_time() - began
        answer = Drained(rest.error, first.before, rest.left, took).answer("unmounted")
        answer["mount_path"] = str(self._daemon.place)
        return answer, lambda: self.end(self._ending_of(rest))

    async def _detach(self, *, lazy: bool) -> None:
        """From wherever it is listed, as often as it is: it may have been moved, or bound to other places or
        onto itself, which would be left dead. Its own place comes last: where another one is busy, that one
        still is there."""
        own, source = self._daemon.place, self._daemon.options.source

        def from_all() -> None:
            # The last mounted first: one may lie on another, or below it.
            listed = [entry.path for entry in reversed(list_mounts()) if entry.source == source]
            for place in sorted(listed, key=lambda path: path == own) or [own]:
                entry = mounted_at(place)
                if entry is None or entry.source == source:  # not under another mount
                    detach(place, lazy=lazy)

        try:
            await blocking(from_all)
        except Unavailable as exc:
            # A mount that stays is dead when this process has ended.
            log.warning("%s is detached without a thread: %s", own, exc)
            from_all()

    async def _detach_anyhow(self) -> None:
        """Lazily. A mount that stays all the same must not keep a stop from its end: it is dead then, and the
        next mount of the place cleans it up."""
        try:
            with tasks.fail_after(DETACH_MOST):
                await self._detach(lazy=True)
        except (FsdError, OSError, tasks.TooSlow) as exc:
            log.error("%s stays mounted: %r", self._daemon.place, exc)

    async def _clean_or_lazy(self, until: float) -> None:
        """Detach; what it takes to find out who uses the mount (a look at every process) ends at `until`."""
        if self._daemon.kernel_gone.is_set():
            return
        try:
            with tasks.fail_at(until):
                await self._detach(lazy=False)
            await self._session_over(max(CUT_OFF, until - tasks.current_time()))
        except (FsdError, OSError, tasks.TooSlow) as exc:
            log.warning("a clean unmount failed (%r); detaching lazily", exc)
            await self._detach_anyhow()
            await self._session_over(CUT_OFF)

    async def _session_over(self, within: float) -> None:
        """Until no further request comes. The users that are left then (of a lazy detach) are cut off."""
        daemon = self._daemon
        with tasks.move_on_after(within):
            await daemon.kernel_gone.wait()
        if not daemon.kernel_gone.is_set():
            assert daemon.machine is not None
            daemon.machine.post(daemon.operations.abort)
            daemon.session.terminate()
            with tasks.move_on_after(1.0):
                await daemon.kernel_gone.wait()

    def _ending_of(self, rest: Drained) -> Ending:
        if rest.error is None and rest.left is not None and rest.left.clean:
            return Ending(EXIT_CLEAN, rest.left, "")
        reason = (rest.left.reason if rest.left else "") or str(rest.error or "something is left")
        return Ending(EXIT_LEFT, rest.left, reason)

    async def drain(self, within: float | None, tell: Tell) -> Drained:
        """A barrier: everything up to now is committed, or why not. Tells progress every second."""
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        began = tasks.current_time()
        barrier = _Barrier(machine, within)
        before = await daemon.call(machine.volume.pending)
        if before is not None and not before.clean:
            await tell(f"sending {counted(before.files, 'file')}, {counted(before.bytes, 'byte')}")
        machine.post(barrier.begin)
        try:
            await self._ended(barrier, within, tell)
        finally:
            machine.post(barrier.forget)
        # No answer is none, not a "nothing".
        error = barrier.error()
        found = await daemon.call(
            lambda: (machine.volume.pending(), machine.volume.status().get("refused", 0)),
            ANSWER if error is None else SOON,
        )
        if error is None and found is None:
            error = silent()
        left, refused = found if found is not None else (None, 0)
        if error is None and isinstance(refused, int) and refused:
            what = counted(refused, "operation")
            error = NotDrained(f"the server refused {what}", hint="`fsd recover`")
        return Drained(error, before, left, tasks.current_time() - began)

    async def _ended(self, barrier: _Barrier, within: float | None, tell: Tell) -> None:
        """Until the barrier has ended, or the FUSE thread did not say so in time."""
        daemon, machine = self._daemon, self._daemon.machine
        assert machine is not None
        rest = within + 2.0 if within is not None else float("inf")
        last, counted_to = tasks.current_time(), machine.clock()
        while not barrier.ended.is_set() and rest > 0:
            with tasks.move_on_after(1.0):
                await barrier.ended.wait()
                continue
            now = await daemon.call(machine.volume.pending)
            # A pause of the sandbox is no time-out: the machine's clock, by which the barrier ends, leaves it
            # out. It stands still where the FUSE thread does.
            turned, last = last, tasks.current_time()
            waited, counted_to = counted_to, machine.clock()
            rest -= counted_to - waited if now is not None else min(last - turned, ROUND)
            if now is not None:
                text = f"{counted(now.files, 'file')}, {counted(now.bytes, 'byte')} to send"
                await tell(text + (f" ({now.reason})" if now.reason else ""))


class _Barrier:
    """One barrier of the volume and who waits for it in the main thread, where it is made. `begin` and
    `forget` are posted to the FUSE thread, in this order: what is begun late, after the waiting was given up,
    is forgotten all the same."""

    def __init__(self, machine: Machine, within: float | None) -> None:
        self.ended = tasks.Event()
        self._machine, self._within = machine, within
        self._token = tasks.current_loop()
        self._want: Want | None = None
        self._errors: list[BaseException] = []
        self._forget: Callable[[], object] | None = None

    def begin(self) -> None:
        machine = self._machine
        try:
            self._want = machine.volume.barrier()
            self._forget = machine.watch(self._want, self._wake, within=self._within, request=False)
        except Exception as exc:
            self._wake(exc)
            raise
        machine.pump()

    def _wake(self, error: BaseException | None) -> None:
        if error is not None:
            self._errors.append(error)
        with contextlib.suppress(tasks.RunFinished):  # nobody waits any more
            self._token.post(self.ended.set)

    def forget(self) -> None:
        if self._forget is not None:
            self._forget()

    def error(self) -> Exception | None:
        """Why not everything is committed; None when it is."""
        for error in self._errors:
            return error if isinstance(error, Exception) else RuntimeError(str(error))
        if self._want is None or not self.ended.is_set():
            return silent()
        return self._want.error
