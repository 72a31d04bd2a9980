"""The mount daemon: one process, the FUSE thread beside the tasks of the main thread.

Order: log, volume (recovery first), record and control socket, mount, FUSE thread, a stat through the mount,
ready. The process ends by `os._exit` after the last flush was acknowledged or given up: interpreter
shutdown could wait for a thread in a dead connection.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from fsd import __version__
from fsd.cache.blobs import BlobCache
from fsd.host import threads
from fsd.kernel import beneath, runtime, tasks, utab
from fsd.kernel.automatic import Automatic
from fsd.kernel.blocking import blocking, in_passing
from fsd.kernel.checkpoints import Checkpoints
from fsd.kernel.control import ControlServer, listen
from fsd.kernel.feed import Feed
from fsd.kernel.heads import restore_head
from fsd.kernel.interrupts import look_for_killed
from fsd.kernel.logfile import start_log
from fsd.kernel.machine import Machine
from fsd.kernel.memory import GiveBack, tune
from fsd.kernel.mountpoint import detach, mounted_at, set_read_ahead, still_listed
from fsd.kernel.notify import Notifier
from fsd.kernel.opening import Limit
from fsd.kernel.operations import FsdOperations
from fsd.kernel.options import MountOptions
from fsd.kernel.session import FuseSession, MiniLoop, make_loop
from fsd.kernel.shown import ShownState, shown_state
from fsd.kernel.stacks import Stacks
from fsd.kernel.stop import Ending, Stopper, sizes
from fsd.kernel.supervisor import EXIT_CRASHED, EXIT_LEFT, Start, notify
from fsd.kernel.verbs import Verbs
from fsd.model.errors import Busy, FsdError, LeaseHeld, LeaseLost, NoSpace, Unavailable
from fsd.model.limits import CACHE_BEHIND
from fsd.model.names import show
from fsd.model.plain import replace
from fsd.model.words import counted
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.vfs.open import open_volume
from fsd.vfs.recover import Report
from fsd.vfs.types import VolumeOptions
from fsd.vfs.volume import Volume

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK: Final = 0.1
READ_AHEAD_KIB: Final = 1024
SWITCH_INTERVAL: Final = 0.0005
OPEN_RETRY: Final = 1.0
LEASE_RETRY: Final = 0.5
REPORT: Final = 5.0
FINDABLE: Final = 30.0  # how often the record, the socket and the lock are looked after
CLOSE: Final = 1.0  # so long the FUSE thread has, before the process ends, to erase a log that is done


def run(options: MountOptions, start: Start) -> NoReturn:
    """The daemon process; never returns (`os._exit`)."""
    code = EXIT_CRASHED
    try:
        os.chdir("/")
        os.umask(0o077)
        record = start.directory.read(options.mount_id)
        handler = start_log(
            Path(record.log), options.host, verbose=options.verbose, foreground=options.foreground
        )
        sys.setswitchinterval(SWITCH_INTERVAL)
        tune()
        code = Daemon(options, start, Stacks(handler, options.host)).run()
    except FsdError as exc:
        start.channel.failed(exc)
        code = exc.exit_code
    except BaseException as exc:
        log.critical("the daemon broke", exc_info=exc)
        start.channel.failed(threads.failure(exc, f"the daemon broke: {exc!r}", "see its log"))
    finally:
        logging.shutdown()
        os._exit(code)


class Daemon:
    """Composition and life of one daemon. All methods run in the main thread unless they say so."""

    def __init__(self, options: MountOptions, start: Start, stacks: Stacks) -> None:
        self.options = options
        self.start = start
        self.place = start.place
        self.stacks = stacks
        self.remote = HttpRemote(
            RemoteOptions(
                options.endpoint, options.token, insecure=options.insecure, state=shown_state(options, start)
            ),
            options.host,
        )
        self.cache = BlobCache(
            options.state_dir / "cache" / _cache_name(options),
            options.host,
            options.cache_size,
            behind=CACHE_BEHIND,
        )
        self._said = ""
        self.record = start.directory.read(options.mount_id)
        self.kernel_gone = tasks.Event()
        self.stopper = Stopper(self)
        self.checkpoints = Checkpoints(self)
        self.automatic = Automatic(self)
        self.shown = ShownState(self.remote, options, start, self._own_directory())
        self.machine: Machine | None = None

    def run(self) -> int:
        try:
            ending = tasks.run(self._main)
        except FsdError as exc:
            # Its own exit code would tell the supervisor that this end was meant: nobody would restart it.
            raise RuntimeError("a task ended by an error that was its own to tell") from exc
        self._leave(ending)
        return ending.code

    async def _main(self) -> Ending:
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(self.stopper.listen)
            keep_dead = False
            try:
                await self._mount(nursery)
            except (FsdError, OSError) as exc:
                log.error("mounting failed: %s", exc)
                if self.start.restarts and (isinstance(exc, NoSpace) or threads.told(exc) is not None):
                    raise  # a limit that is met for a moment: the supervisor tries again
                error = exc if isinstance(exc, FsdError) else threads.failure(exc, f"mounting failed: {exc}")
                # A restart that fails leaves the dead mount, so that nobody writes into the directory below.
                keep_dead = bool(self.start.restarts) and self.machine is None
                if not keep_dead:
                    await self._take_back()
                self.start.channel.failed(error)
                self.stopper.end(Ending(error.exit_code, None, str(error)))
            ending = await self.stopper.wait()
            if self.machine is None and not keep_dead:
                await self._take_back()
            await self._tell_server(ending)
            nursery.cancel_scope.cancel()
        return ending

    # mounting

    async def _mount(self, nursery: tasks.Nursery) -> None:
        volume = await self._open()
        if volume is None:
            return
        if self.options.state:
            nursery.start_soon(self.shown.keep, await self.shown.take(volume.session, self.stopper.asked))
        if self.options.auto_checkpoint:
            await self.automatic.check()
        for note in volume.recovered.notes() if isinstance(volume.recovered, Report) else ():
            self.start.channel.say(note)
            log.warning("%s", note)
        if self.stopper.asked.is_set():
            # It ended this daemon already, as one that mounted nothing.
            volume.close()
            return
        self._wire(volume)
        sock = listen(self.start.directory.socket_path(self.options.mount_id))
        self.update(pid=os.getpid(), supervisor_pid=self.start.supervisor_pid)
        if still_listed(self.place, self.options.source):
            # What the last daemon left was kept till now, so that nobody wrote into the directory below.
            await self._replace_dead()
        else:
            self.session.mount()
        self.machine.start()  # type: ignore[union-attr]
        self.session.start()
        if not self.options.state:
            self.feed.start()
        nursery.start_soon(self._ticks)
        nursery.start_soon(self._reports)
        nursery.start_soon(self.automatic.run)
        nursery.start_soon(self.checkpoints.answer_asks)
        if self.options.exclusive:
            nursery.start_soon(self._keep_lease)
        nursery.start_soon(self.stopper.watch_kernel)
        nursery.start_soon(ControlServer(sock, Verbs(self).table()).run)
        nursery.start_soon(self._stay_findable, nursery)
        async with tasks.open_nursery() as beside:
            entered = partial(utab.enter, self.options.source, self.place)
            beside.start_soon(in_passing, entered, "umount(8) will not wait")
            await self._first_stat()
            self.session.answered()
            self.notifier.start(self.session.connection)
        if not await restore_head(self, volume.session):
            return
        set_read_ahead(self.place, READ_AHEAD_KIB)
        self.update(state=runtime.MOUNTED)
        log.info("mounted %s, session %d", self.place, volume.session)
        notify(self.options.notify_socket, "READY=1")
        self.start.channel.ready(self.answer(volume))

    async def _replace_dead(self) -> None:
        """Mount where the last daemon's mount is: beneath it, where that is possible, and take it away then;
        else the other way round, with some milliseconds in which the directory below lies open."""
        flags = {"default_permissions", *(self._fuse_options() & {"allow_other"})}
        made = beneath.make(self.options.source, flags, read_only=self.read_only())
        if made is None:
            await self._take_back()
            self._tell_strays(os.listdir(self.place))
            self.session.mount()
            return
        try:
            self.session.mount(made.fuse_fd)
            if not await blocking(partial(made.replace, self.place, self.options.source), abandon=False):
                await self._take_back()
                self._tell_strays(os.listdir(self.place))
                made.put(self.place)
        finally:
            made.close()

    def _tell_strays(self, names: list[str]) -> None:
        """What was written in the moments when nothing was mounted is about to be covered."""
        if names:
            text = f"{counted(len(names), 'entry', 'lies', 'lie')} below the mount point, "
            text += "written while nothing was mounted: " + ", ".join(sorted(names)[:5])
            log.warning("%s", text)
            self.start.channel.say(f"note: {text}; unmount to see them")

    async def _take_back(self) -> None:
        """A mount that came up but does not answer is no mount, nor is one whose daemon died."""
        while still_listed(self.place, self.options.source):
            try:
                await blocking(partial(detach, self.place, lazy=True, dead=True), abandon=False)
            except FsdError as exc:
                log.error("%s stays mounted: %s", self.place, exc)
                return

    def answer(self, volume: Volume) -> dict[str, Any]:
        """What `fsd mount` prints."""
        return {
            "status": "mounted",
            "file_system_id": self.options.token.file_system_id,
            "mount_path": str(self.place),
            "remote_path": self.options.remote_path.decode("utf-8", "backslashreplace"),
            "driver": "fuse",
            "endpoint": self.remote.endpoint,
            "pid": os.getpid(),
            "mount_session_id": volume.session,
            "state_dir": str(self._own_directory()),
            "log_file": str(self._own_directory() / "daemon.log"),
            "control_socket": str(self.start.directory.socket_path(self.options.mount_id)),
        }

    def _own_directory(self) -> Path:
        return self.options.state_dir / "mounts" / self.options.mount_id

    async def _open(self) -> Volume | None:
        """The volume, retried while the server is away: until nothing went on for `ready_timeout` on the
        first start, for ever on a restart. None when a stop was asked for meanwhile."""
        options = self.options
        # A restarted daemon's own lease is at most so long in its way (a copy of the machine has it then).
        patience = options.lease_wait + (options.lease_ttl if self.start.restarts else 0.0)
        lease_deadline = options.host.monotonic() + patience
        limit = self._limit = Limit(None if self.start.restarts else patience + options.ready_timeout)
        loop = tasks.current_loop()

        def told(text: str) -> None:
            loop.post(limit.went_on, text, options.ready_timeout)

        steps: set[str] = set()

        def reached(step: str) -> None:
            if step not in steps:  # one that is only taken again is no progress
                steps.add(step)
                told(step)

        of_this = self._volume_options(), options.host, self.remote, self.cache
        opening = partial(open_volume, *of_this, told=told, reached=reached)
        opened: list[Volume] = []
        failed: list[FsdError] = []

        async def once() -> None:
            opened.append(await blocking(opening))

        async def open_it(scope: tasks.CancelScope) -> None:
            while not opened and not failed:
                try:
                    if not await limit.covers(once):
                        failed.append(limit.over(self.place, options.ready_timeout))
                except LeaseHeld as exc:
                    if options.host.monotonic() + LEASE_RETRY > lease_deadline:
                        failed.append(exc)
                        continue
                    self._waiting_for(exc)
                    await tasks.sleep(LEASE_RETRY)
                except (Unavailable, Busy) as exc:
                    if limit.reaches(OPEN_RETRY):  # else it does not wait, and is told once
                        self._waiting_for(exc)
                    if not await limit.pause(OPEN_RETRY):
                        failed.append(exc)
                except FsdError as exc:
                    failed.append(exc)
            scope.cancel()

        with tasks.CancelScope() as scope:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(self._say_waiting)
                nursery.start_soon(self._cancel_on_stop, scope)
                nursery.start_soon(open_it, scope)
        if failed:
            raise failed[0]
        return opened[0] if opened else None

    def _volume_options(self) -> VolumeOptions:
        options = self.options
        return VolumeOptions(
            state_dir=self._own_directory(),
            mount_id=options.mount_id,
            hostname=options.host_label or socket.gethostname(),
            path=str(self.place),
            file_system=options.token.file_system_id,
            remote_path=options.remote_path,
            read_only=options.read_only,
            consistency=options.consistency,
            exclusive=options.exclusive,
            lease_ttl=options.lease_ttl,
            durability=options.durability,
            flush_age=options.flush_age,
            buffer_size=options.buffer_size or None,
            buffer_max=options.buffer_max,
            io_timeout=options.io_timeout,
            acl=options.acl,
            version=__version__,
        )

    def _waiting_for(self, exc: FsdError) -> None:
        """Say why, once for each reason."""
        if exc.message != self._said:
            self._said = exc.message
            self.start.channel.say(f"waiting: {exc.message}")
            log.warning("waiting: %s", exc)

    async def _say_waiting(self) -> None:
        await tasks.sleep(3)
        while True:
            why = f": {self._said}" if self._said else f" for the server at {self.remote.endpoint}"
            doing = self._limit.doing or f"still waiting{why}"
            self.start.channel.say(doing)
            await tasks.sleep(10)

    async def _cancel_on_stop(self, scope: tasks.CancelScope) -> None:
        await self.stopper.asked.wait()
        scope.cancel()

    def _wire(self, volume: Volume) -> None:
        options = self.options
        token = tasks.current_loop()
        loop = make_loop(options.loop)
        at_once = (self.remote, loop.scheduler) if isinstance(loop, MiniLoop) else None
        self.machine = Machine(
            volume, self.remote, self.cache, loop, options.host, options.io_timeout, at_once
        )
        self.machine.broke = self._broke
        self.operations = FsdOperations(
            self.machine,
            xattr=options.xattr,
            immutable=bool(options.state),
            ask=options.consistency == "open",
            acl=options.acl,
        )
        self.session = FuseSession(
            loop,
            self.operations,
            self.place,
            self._fuse_options(),
            ended=lambda: token.post(self.kernel_gone.set),
            died=self._broke,
            own_umask=options.acl,
        )
        loop.hook(self.machine.pump, self.operations.abort)
        self.notifier = Notifier(volume.root_ino, lambda: self.operations.answered, options.host)
        self.machine.invalidated = submit = self.notifier.submit
        self.operations.entries.forget = lambda ones: submit(volume.not_made(ones))
        self.operations.direct.drop = self.notifier.drop_pages
        self.feed = Feed(self.machine, self.remote, self.operations.entries, self.notifier)
        self.feed.asked = lambda ask: token.post(self.checkpoints.take_ask, ask)

    def _fuse_options(self) -> set[str]:
        options = {f"fsname={self.options.source}", "subtype=fsd"}
        allow_other = self.options.allow_other
        if allow_other or (allow_other is None and os.geteuid() == 0):
            options.add("allow_other")
        if self.read_only():
            options.add("ro")
        return options

    def read_only(self) -> bool:
        """Asked for, or of `mount -o remount,ro`, which a daemon that was killed hands on to the next."""
        ours = self.start.restarts or self.record.state == runtime.MOUNTED  # else it is an older mount's
        there = mounted_at(self.place) if ours else None
        told = there is not None and there.source == self.options.source and there.read_only
        return self.options.read_only or told

    async def _first_stat(self) -> None:
        """The mount is ready when it answers; seen from outside the FUSE thread."""

        def look() -> bool:
            os.stat(self.place)
            return self.read_only() or os.access(self.place, os.W_OK)

        async def seen() -> None:
            if not await blocking(look):
                self.start.channel.say(
                    f"note: the top of {self.place} is not writable for you; with the token in hand, "
                    f"`fsd chmod 1777 {show(self.options.remote_path)}` changes that"
                )

        if not await Limit(self.options.ready_timeout).covers(seen):
            raise Unavailable(f"a stat of {self.place} was not answered", hint="see the log")

    def update(self, **changes: Any) -> None:
        """Change the record. The directory may be gone (a user's ends with the login): it is made again."""
        self.record = replace(self.record, **changes)
        try:
            self.start.directory.make()
            self.start.directory.write(self.record)
        except (OSError, FsdError) as exc:
            log.warning("the mount's record cannot be written: %s", exc)

    # running

    async def _ticks(self) -> None:
        machine = self.machine
        assert machine is not None
        rounds = 0
        give_back = GiveBack()
        turned = self.options.host.monotonic()
        self.stacks.watch("main", lambda: turned)
        self.stacks.watch("FUSE", lambda: machine.beat)
        while True:
            await tasks.sleep(TICK)
            turned = self.options.host.monotonic()
            machine.post(machine.tick)
            machine.post(self.operations.forget_kept)
            if not self.options.state:
                self.feed.look()
            rounds += 1
            if rounds % 5 == 0:
                look_for_killed(machine)
                give_back.look()

    async def _stay_findable(self, nursery: tasks.Nursery) -> None:
        """Commands find the mount by files that whoever tidies up may take away (/tmp by age, a runtime
        directory at the end of a login): they are kept young, and made again."""
        directory, mount_id = self.start.directory, self.options.mount_id
        path = directory.socket_path(mount_id)
        lock: int | None = None
        while True:
            await tasks.sleep(FINDABLE)
            try:
                if directory.load(mount_id) is None or not path.exists():
                    self.update()
                    nursery.start_soon(ControlServer(listen(path), Verbs(self).table()).run)
                    log.warning("record and control socket were gone; they were made again")
                lock = directory.lock(mount_id) if lock is None else lock
                for file in (directory.path, *directory.files(mount_id)):
                    os.utime(file)
            except OSError as exc:
                log.warning("the mount may not be found by commands: %s", exc)

    async def _reports(self) -> None:
        """What is pending, for the server's record of this session, whenever it changed. Should the sandbox
        be lost, `fsd mounts` says how much went with it."""
        machine = self.machine
        assert machine is not None
        told = (0, 0, 0)
        while True:
            await tasks.sleep(REPORT)
            pending = await self.call(machine.volume.pending)
            if pending is None or not self.remote.health().reachable:
                continue
            left = (pending.operations, pending.files, pending.bytes)
            if left != told and await self._report(machine.volume.session, left):
                told = left

    async def _report(self, session: int, left: tuple[int, int, int]) -> bool:
        try:
            await blocking(partial(self.remote.report, session, left))
        except FsdError as exc:
            log.debug("what is pending was not reported: %s", exc)
            return False
        return True

    async def _keep_lease(self) -> None:
        """Renew the writer lease, three times in its life; a commit's answer may tell of its loss before. A
        try that hangs is given up when the next one is due."""
        assert self.machine is not None
        volume, pace = self.machine.volume, self.options.lease_ttl / 3
        due = tasks.current_time() + pace
        while volume.core.fenced is None:
            await tasks.sleep_until(due)
            due = max(due, tasks.current_time()) + pace
            with tasks.move_on_at(due) as scope:
                await self._renew_lease(volume)
            if scope.cancelled_caught:
                log.warning("the writer lease was not renewed: no answer within %.1f s", pace)

    async def _renew_lease(self, volume: Volume) -> None:
        session, fence = volume.session, volume.core.fence
        renew = partial(self.remote.renew_lease, session, fence, self.options.lease_ttl)
        try:
            now = await blocking(renew)
        except LeaseLost as exc:
            log.error("%s; this mount is read-only now, and keeps what it has not sent", exc)
            await self.call(partial(volume.lease_lost, session, exc))
        except FsdError as exc:
            log.warning("the writer lease was not renewed: %s", exc)
        else:
            await self.call(partial(volume.lease_kept, session, now))

    def _broke(self, error: BaseException) -> None:
        """FUSE thread: its loop ended by an error, or the volume met one that leaves it nobody knows how.
        Nothing can be flushed then; the supervisor's next daemon recovers from the log."""
        log.critical("leaving for a fresh process: %r", error, exc_info=error)
        logging.shutdown()
        os._exit(EXIT_CRASHED)

    async def call(self, func: Callable[[], T], within: float = 5.0) -> T | None:
        """Run `func` on the FUSE thread; None when that does not answer within the time, pauses apart."""
        machine = self.machine
        assert machine is not None
        token = tasks.current_loop()
        done = tasks.Event()
        result: list[T] = []
        errors: list[Exception] = []

        def there() -> None:
            try:
                result.append(func())
            except Exception as exc:  # noqa: BLE001 - raised again below
                errors.append(exc)
            token.post(done.set)

        machine.post(there)
        await Limit(within).covers(done.wait)
        if errors:
            raise errors[0]
        return result[0] if result else None

    # ending

    async def _tell_server(self, ending: Ending) -> None:
        """The server's record of this session, if it answers at once."""
        if self.machine is None or not self.remote.health().reachable:
            return
        session = self.machine.volume.session
        how = "clean" if ending.code == 0 else "lost"
        left = tuple(sizes(ending.pending).values())
        fence = self.machine.volume.core.fence if ending.code == 0 else 0

        def tell() -> None:
            if fence:
                self.remote.release_lease(fence)
            self.remote.end_session(session, how, (left[0], left[1], left[2]))

        with tasks.move_on_after(1.0):
            await in_passing(tell, "the server was not told of the end")

    def _leave(self, ending: Ending) -> None:
        """Tell the server and the record how it ended. Its tasks have ended; every step is bounded."""
        log.info("ending: exit %d (%s)", ending.code, ending.reason or "clean")
        if self.machine is not None:
            self.machine.post(self.machine.stop)
        ended: dict[str, Any] = {"exit": ending.code, "reason": ending.reason}
        if ending.pending is not None:
            ended["pending"] = sizes(ending.pending)
            ended["first_failed_path"] = show(ending.pending.first_path) or None
        elif ending.code == EXIT_LEFT:
            ended["status"] = "not_drained"
        if still_listed(self.place, self.options.source):
            log.warning("the kernel still lists the mount")
        else:
            utab.leave(self.place)
        self.update(state=runtime.ENDED, ended=ended)
        self.start.directory.socket_path(self.options.mount_id).unlink(missing_ok=True)
        if self.machine is not None and not self.machine.closed.wait(CLOSE):
            log.warning("the log was not closed in time; the next mount does what is left")
        if not self.cache.close(CLOSE):
            log.info("not all that was read last is in the cache")


def _cache_name(options: MountOptions) -> str:
    """One cache per server and filesystem."""
    safe = "".join(c if c.isalnum() else "-" for c in options.endpoint)
    return f"{safe[:80]}-{options.token.file_system_id}"
