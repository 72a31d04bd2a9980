"""`fsd mount`: check the place, start supervisor and daemon, wait until the mount answers.

The supervisor is a small parent (neither pyfuse3 nor trio is imported here). It starts the daemon by fork,
so that the token passes in memory. When the daemon dies unasked it starts another one on the same state
directory, at most RESTARTS_MAX times in RESTART_WINDOW; the dead mount stays in place until that one mounts.
An exit of 0 or 6, an unmount by anybody and a signal are wanted stops.

SIGTERM and SIGINT are forwarded through a pipe, one byte each, not as signals: a group signal (a terminal, a
service manager) reaches both processes, and the daemon must not count it twice.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import shlex
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from fsd.host import threads
from fsd.host.files import make_dirs_durable
from fsd.host.heap import give_back
from fsd.kernel import fresh, namespace, remains, runtime
from fsd.kernel.channel import Channel, read_until_ready
from fsd.kernel.mountpoint import check_place, clear_dead, detach, require_fuse, resolve, still_listed
from fsd.kernel.options import MountOptions
from fsd.kernel.prune import prune
from fsd.kernel.runtime import Record, RuntimeDir
from fsd.model.errors import (
    Busy,
    DiskFailed,
    FsdError,
    InternalError,
    NoSpace,
    NotFound,
    Unavailable,
    UsageError,
)
from fsd.model.limits import RESTART_WINDOW, RESTARTS_MAX
from fsd.model.plain import replace

EXIT_LEFT: Final = 6
# A daemon that broke and wants a fresh process ends with this.
EXIT_CRASHED: Final = 70
# SIGHUP: the terminal of a mount in the foreground is gone.
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How often the supervisor looks whether its daemon was killed and cannot end.
LOOK: Final = 1.0
RESTART_PAUSE: Final = 5.0

Say = Callable[[str], None]
_pace = threading.Event()


def stop_signals() -> list[signal.Signals]:
    """What ends a mount. Not SIGHUP where whoever started it ignores that (nohup): it outlives a terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


class Start(NamedTuple):
    """What a daemon process needs beside its options."""

    place: Path
    directory: RuntimeDir
    channel: Channel
    stop_pipe: int | None  # a byte for each stop the supervisor was asked for
    restarts: int
    supervisor_pid: int
    loaded: fresh.Prints  # the supervisor's modules, as their files were when it began


class Child(NamedTuple):
    """A daemon that runs, and where it is told of stops."""

    pid: int
    stop_pipe: int


def to_stderr(text: str) -> None:
    os.write(2, f"fsd: {text}\n".encode("utf-8", "backslashreplace"))


# Takes options, lock and channel. False: there is no supervisor that waits for them.
Order = Callable[[MountOptions, int, int], bool]


def mount(options: MountOptions, say: Say = to_stderr, order: Order | None = None) -> int:
    """Mount; returns 0 when a stat through the mount was answered; with `foreground`, the exit code when it
    has ended. The record in the runtime directory then tells pids, log and socket. `order` is how a
    supervisor is told that was begun already.

    Raises `Busy` when the place is mounted or being restarted, `Unsupported` where mounting is impossible,
    `UsageError` and `NotFound` for a wrong place, and what the server said.
    """
    require_fuse()
    place = resolve(options.mountpoint)
    options = replace(options, mountpoint=place)
    directory = RuntimeDir(options.runtime_dir, options.host)
    _make_runtime(directory)
    lock = _lock(options, directory, say)
    try:
        _prepare(options, place, directory, say)
        if options.foreground:
            _tidy(directory)
            return _foreground(options, place, directory, say)
        read_end, write_end = os.pipe()
        if order is None or not order(options, lock, write_end):
            _fork_supervisor(options, directory, read_end, write_end)
        os.close(write_end)
        _wait_ready(directory, read_end, say)
        return 0
    finally:
        os.close(lock)


def _lock(options: MountOptions, directory: RuntimeDir, say: Say) -> int:
    """The family lock. Waits, with a message, for a daemon that is detached and still sending."""
    begun = options.host.monotonic()
    told = False
    while True:
        fd = directory.lock(options.mount_id)
        if fd is not None:
            return fd
        state, pid = _holder(options, directory)
        if pid and remains.cannot_end(pid):
            remains.free(pid, options.mountpoint, options.source)
            continue
        waited = options.host.monotonic() - begun
        sending = state in (runtime.DETACHED, runtime.ENDED)
        # A command that asks whether the mount lives holds the lock for a moment as well.
        if waited > (options.ready_timeout if sending else 0.3):
            raise _held(options, directory, "still sending what was left" if sending else state, pid)
        if sending and not told:
            told = True
            say(f"waiting for the previous daemon (pid {pid}) to send what was left")
        _pace.wait(0.05)


def _holder(options: MountOptions, directory: RuntimeDir) -> tuple[str, int]:
    """State and daemon of the mount that holds the lock."""
    try:
        record = directory.read(options.mount_id)
    except NotFound:
        return runtime.STARTING, 0
    return record.state, record.pid


def _held(options: MountOptions, directory: RuntimeDir, doing: str, pid: int) -> Busy:
    """The place is taken: by a mount that this namespace lists, or another one."""
    place = options.mountpoint
    record = directory.load(options.mount_id)
    where, hint = namespace.told(record, f"fsd unmount {place}") if record is not None else ("", "")
    if where:
        return Busy(f"the mount at {place} is {where}", hint=hint)
    return Busy(
        f"the mount at {place} is {doing}" + (f" (daemon {pid})" if pid else ""),
        hint=f"`fsd status {place}`, `fsd unmount {place}`",
    )


def _make_runtime(directory: RuntimeDir) -> None:
    try:
        directory.make()
        if not os.access(directory.path, os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError as exc:
        raise UsageError(
            f"the runtime directory {directory.path} cannot be written: {exc.strerror}",
            hint="set XDG_RUNTIME_DIR to a directory of yours that can be",
        ) from exc


def _prepare(options: MountOptions, place: Path, directory: RuntimeDir, say: Say) -> None:
    """Clean up dead mounts, check the place, make the state directory and the record."""
    kept = clear_dead(place, keep=options.source)
    check_place(
        place,
        {
            "the state directory": options.state_dir,
            "the runtime directory": options.runtime_dir,
            "the working directory": _working_directory(),
        },
        covered=kept,
    )
    own = options.state_dir / "mounts" / options.mount_id
    try:
        make_dirs_durable(own)  # nobody else's, whatever the umask
        os.chmod(own, 0o700)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"the disk under {options.state_dir} is full") from exc
        raise UsageError(
            f"the state directory {own} cannot be made: {exc.strerror}",
            hint=DiskFailed.way_out(shlex.quote(str(options.state_dir)))
            if exc.errno in (errno.EROFS, errno.EIO) and own.exists()
            else "choose --state-dir, or set HOME or XDG_STATE_HOME to a directory of yours",
        ) from exc
    record = Record(
        mount_id=options.mount_id,
        file_system_id=options.token.file_system_id,
        mountpoint=str(place),
        socket=str(directory.socket_path(options.mount_id)),
        state_dir=str(own),
        log=str(own / "daemon.log"),
        endpoint=options.endpoint,
        remote_path=options.remote_path.decode("utf-8", "backslashreplace"),
        runtime_dir=str(directory.path),
        shown=options.state,
    )
    directory.write(record)
    try:
        directory.point(record)
    except (OSError, FsdError) as exc:  # a root that is read-only: whoever has this environment finds it
        say(f"note: commands with another XDG_RUNTIME_DIR will not find this mount: {exc}")


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def _fork_supervisor(options: MountOptions, directory: RuntimeDir, read_end: int, write_end: int) -> None:
    middle = _fork()
    if middle == 0:
        in_child(lambda: _detached(options, directory, read_end, write_end))
    os.waitpid(middle, 0)


def _wait_ready(directory: RuntimeDir, read_end: int, say: Say) -> None:
    started: list[int] = []

    def begun(pid: int) -> None:
        started.append(pid)
        _tidy(directory)  # the daemon takes longer to start

    try:
        read_until_ready(read_end, say, begun)
    except KeyboardInterrupt:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGTERM)
        raise


def _tidy(directory: RuntimeDir) -> None:
    """No mount fails for the records of others: they go another time."""
    with contextlib.suppress(OSError, FsdError):
        prune(directory)


def _fork() -> int:
    """`os.fork`. Raises `Unavailable` where a limit leaves no process."""
    try:
        return os.fork()
    except OSError as exc:
        raise threads.failure(exc, f"no process can be started: {exc.strerror}") from exc


def fork_small() -> int:
    """Fork who becomes the supervisor. What the command loaded with is free by now; a copy of it would be the
    supervisor's for good. The more where modules were compiled first."""
    give_back()
    return _fork()


def in_child(body: Callable[[], int]) -> None:
    """Run `body` in this forked process and end it, whatever happens."""
    code = EXIT_CRASHED
    try:
        code = body()
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _detached(options: MountOptions, directory: RuntimeDir, read_end: int, write_end: int) -> int:
    os.setsid()
    channel = Channel(write_end)
    try:
        if fork_small() != 0:
            return 0
        os.close(read_end)
        os.chdir("/")
        directory.log_here(options.mount_id)
    except FsdError as exc:
        channel.failed(exc)
        return exc.exit_code
    channel.supervisor(os.getpid())
    return _serve(options, options.mountpoint, directory, channel)


def _serve(options: MountOptions, place: Path, directory: RuntimeDir, channel: Channel) -> int:
    if not options.supervised:
        daemon(options, Start(place, directory, channel, None, 0, 0, {}))
    return Supervisor(options, place, directory, channel).run()


def alone() -> None:
    """A daemon's process: a group of its own, since the terminal's Ctrl-C is to reach it once, through the
    supervisor, and signals as if there were none."""
    os.setpgid(0, 0)
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def daemon(options: MountOptions, start: Start) -> NoReturn:
    if fresh.changed(start.loaded):
        fresh.load_anew()
        options, start = fresh.carried(options), _carried(start, fresh.carried(options))
    load_daemon()(options, start)


def load_daemon() -> Callable[[MountOptions, Start], NoReturn]:
    """What only the daemon needs: the supervisor itself stays small. The first ones have to come before
    pyfuse3."""
    for name in ("requests", "replies", "extra"):
        importlib.import_module(f"fsd.kernel.{name}")
    importlib.import_module("fsd.kernel.lean").load_pyfuse3()
    from fsd.kernel.daemon import run

    return run


def _carried(start: Start, options: MountOptions) -> Start:
    """`start` as the version of `options`, which is installed by now, knows it."""
    again = importlib.import_module(__name__)
    directory = importlib.import_module(RuntimeDir.__module__).RuntimeDir(options.runtime_dir, options.host)
    channel = importlib.import_module(Channel.__module__).Channel(start.channel.fd)
    told = start._replace(directory=directory, channel=channel, loaded={})._asdict()
    made: Start = again.Start(**{name: told[name] for name in again.Start._fields if name in told})
    return made


def _foreground(options: MountOptions, place: Path, directory: RuntimeDir, say: Say) -> int:
    read_end, write_end = os.pipe()
    failed: list[FsdError] = []

    def listen() -> None:
        try:
            read_until_ready(read_end, say, lambda pid: None)
            say(f"mounted {place}")
        except FsdError as exc:
            failed.append(exc)

    reader = threading.Thread(target=listen, daemon=True)
    channel = Channel(write_end)
    if not options.supervised:
        # The daemon ends this process itself; the reader shows its messages until then.
        reader.start()
        daemon(options, Start(place, directory, channel, None, 0, 0, {}))
    code = Supervisor(options, place, directory, channel, reader).run()
    channel.close()
    reader.join(5)
    if failed:
        raise failed[0]
    return code


class Supervisor:
    """The parent. Single-threaded until the first daemon runs, since it forks."""

    def __init__(
        self,
        options: MountOptions,
        place: Path,
        directory: RuntimeDir,
        channel: Channel,
        reader: threading.Thread | None = None,
        *,
        first: Child | None = None,
        loaded: fresh.Prints | None = None,
    ) -> None:
        self._options = options
        self._place = place
        self._directory = directory
        self._channel = channel
        self._reader = reader
        self._stops = self._told = 0
        self._pipe: int | None = None
        self._restarts = 0
        self._helped = 0  # the last daemon that could not end by itself
        self._recent: deque[float] = deque()
        self._known = directory.read(options.mount_id)
        self._lock: int | None = None
        self._first = first
        self._loaded = fresh.prints() if loaded is None else loaded

    def run(self) -> int:
        self._signals = stop_signals()
        for number in self._signals:
            signal.signal(number, self._on_stop)
        while True:
            status = self._one_daemon()
            code = self._after(status)
            if code is not None:
                self._notify("STOPPING=1")
                return code

    def _on_stop(self, number: int, frame: object) -> None:
        self._stops += 1
        self._tell_stops()

    def _tell_stops(self) -> None:
        """A byte for each stop this daemon was not told of. A signal may come between any two steps here, and
        one stop must not be told twice: two mean "at once"."""
        while self._pipe is not None and self._told < self._stops:
            self._told += 1
            with contextlib.suppress(OSError):  # a daemon that has ended needs no telling
                os.write(self._pipe, b"s")

    def _one_daemon(self) -> int:
        # Blocked until the daemon has let go of our handler: one that comes between would be lost with it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid, write_end = self._first or self._fork_daemon()
        except FsdError as exc:
            return self._no_daemon(exc)
        self._first = None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._told = 0
        self._pipe = write_end
        self._tell_stops()
        if self._reader is not None and not self._reader.ident:
            self._reader.start()
        self._notify(f"MAINPID={os.getpid()}")
        status = self._wait_for(pid)
        self._pipe = None
        os.close(write_end)
        return status

    def _fork_daemon(self) -> Child:
        read_end, write_end = os.pipe()
        options = self._options
        try:
            pid = _fork()
        except FsdError:
            os.close(read_end)
            os.close(write_end)
            raise
        if pid == 0:
            os.close(write_end)
            alone()
            where = self._place, self._directory, self._channel
            start = Start(*where, read_end, self._restarts, os.getppid(), self._loaded)
            in_child(lambda: daemon(options, start))
        os.close(read_end)
        return Child(pid, write_end)

    def _no_daemon(self, error: FsdError) -> int:
        """No process could be started. Raises at the first mount; one that was there is not given up for a
        limit that is met for a moment: the status counts as that of a daemon which died at once."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not self._restarts:
            self._channel.failed(error)
            raise error
        _log(self._known, error.message)
        return EXIT_CRASHED << 8  # as waitpid tells it

    def _wait_for(self, pid: int) -> int:
        """The status of the daemon `pid` when it has ended. One that was killed and cannot end is helped."""
        try:
            ended = os.pidfd_open(pid)
        except OSError:  # before Linux 5.3: what needs help waits for the next `fsd mount`
            return os.waitpid(pid, 0)[1]
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            while not poll.poll(LOOK * 1000):
                if remains.cannot_end(pid) and not poll.poll(remains.ENDING * 1000):
                    self._help(pid)
        finally:
            os.close(ended)
        return os.waitpid(pid, 0)[1]

    def _help(self, pid: int) -> None:
        """The threads of `pid` go when the connection is ended. Told once: that, or what to do by hand."""
        done = remains.end_connections(self._place, self._known.source)
        if pid != self._helped:
            self._helped = pid
            how = "its connection was ended" if done else remains.by_hand(self._place)
            text = f"the daemon (pid {pid}) was killed and a thread of it waits in the kernel; {how}"
            _log(self._known, text)

    def _after(self, status: int) -> int | None:
        """The exit code after the daemon ended with `status`, or None: start another."""
        code = os.waitstatus_to_exitcode(status)
        record = self._record()
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        if code >= 0 and code != EXIT_CRASHED:
            return code
        # A daemon takes stop signals itself, but for its first and last moments: they end it then, as asked.
        stopped = self._stops > 0 or -code in STOP_SIGNALS
        if record.state == runtime.STARTING:
            if stopped:
                self._channel.failed(Unavailable("stopped before it was mounted"))
            else:
                self._channel.failed(
                    InternalError(f"the daemon died ({how}) before it was mounted", hint=f"see {record.log}")
                )
            self._clean(record)
            return EXIT_LEFT if stopped else 1
        # The dead mount stays until the next daemon mounts: a write meets ENOTCONN, not the directory below.
        if stopped or record.state == runtime.DETACHED or not still_listed(self._place, record.source):
            self._clean(record)
            when = "when it was told to stop" if stopped else "after the unmount, while it was sending"
            return self._give_up(record, f"the daemon died ({how}) {when}")
        now = self._options.host.monotonic()
        while self._recent and now - self._recent[0] > RESTART_WINDOW:
            self._recent.popleft()
        if len(self._recent) >= RESTARTS_MAX:
            # It stays dead for the next `fsd mount`: who writes on must not fill the directory below.
            return self._give_up(record, f"the daemon died {RESTARTS_MAX + 1} times in 10 minutes ({how})")
        self._recent.append(now)
        self._restarts += 1
        soon = record.state == runtime.RESTARTING  # after one that did not come so far as to mount
        self._update(record, state=runtime.RESTARTING, restarts=self._restarts)
        _log(record, f"the daemon died ({how}); restart {self._restarts}")
        if soon:
            _pace.wait(RESTART_PAUSE)  # what it lacked may be there by then
        return None

    def _clean(self, record: Record) -> None:
        if still_listed(self._place, record.source):
            try:
                detach(self._place, lazy=True)
            except FsdError as exc:
                _log(record, f"cleaning up the dead mount failed: {exc}")

    def _give_up(self, record: Record, reason: str) -> int:
        _log(record, reason)
        ended = {"exit": EXIT_LEFT, "status": "not_drained", "reason": reason}
        self._update(record, state=runtime.ENDED, ended=ended)
        return EXIT_LEFT

    def _record(self) -> Record:
        """The mount's record. Its directory may be gone (a user's ends with the login): it is made again,
        with the family lock, which the next daemon inherits, and what was known before."""
        try:
            self._known = self._directory.read(self._options.mount_id)
        except NotFound:
            state = runtime.MOUNTED if still_listed(self._place, self._known.source) else runtime.DETACHED
            self._known = replace(self._known, state=state)
            try:
                self._directory.make()
                self._lock = self._lock or self._directory.lock(self._options.mount_id)
            except (OSError, FsdError) as exc:
                _log(self._known, f"the runtime directory cannot be made again: {exc}")
        return self._known

    def _update(self, record: Record, **changes: Any) -> None:
        """Change the record; one that cannot be written must not end the supervisor."""
        self._known = replace(record, **changes)
        try:
            self._directory.make()
            self._directory.write(self._known)
        except (OSError, FsdError) as exc:
            _log(record, f"the mount's record cannot be written: {exc}")

    def _notify(self, text: str) -> None:
        notify(self._options.notify_socket, text)


def _log(record: Record, text: str) -> None:
    try:
        with open(record.log, "a") as log:
            log.write(f"supervisor: {text}\n")
    except OSError:
        os.write(2, f"fsd supervisor: {text}\n".encode())


def notify(address: str | None, text: str) -> None:
    """sd_notify: tell the service manager; nothing when there is none."""
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as exc:
            os.write(2, f"fsd: the service manager cannot be told {text!r}: {exc}\n".encode())
