"""`fsd run`: a command in a copy of a remote subtree, for sandboxes without /dev/fuse.

Pull the subtree into a work directory, run the command there, push what changed, whatever the command's end:
also after a failure or a signal. What the push could not bring to the server stays in the work directory with
the record of what was pulled (`state`), and `push_left` sends it later, also after this process was killed.
A directory in which processes are still at work that outlived the command stays as well (`RunResult.kept`).
Nothing is pushed while the command runs: if this machine is lost before the end, so is what it wrote.

Main thread only (signals).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgpack

from fsd.client.command import not_ignored, not_started, wait
from fsd.client.download import get_tree
from fsd.client.files import Files, JsonObject
from fsd.client.leases import Leases, nobody_writes
from fsd.client.push import Base, Pushed, differs, push, signature
from fsd.client.sources import local_error, told
from fsd.client.transfer import CopyOptions, CopyResult, Meter, ProgressFn, normal, real_path, stat_or_none
from fsd.host.files import lock_directory, make_dirs_durable, write_durable
from fsd.host.processes import users
from fsd.host.seam import Host
from fsd.model.errors import Busy, FsdError, NotDrained, PosixError, UsageError
from fsd.model.limits import PUSHES_MAX
from fsd.model.names import show
from fsd.model.plain import dataclass, field

STATE: Final = "state"
TREE: Final = "tree"
LOCK: Final = "lock"
STATE_FORMAT: Final = 1
LOOK_AFTER: Final = 1.0
KILL_AFTER: Final = 3.0  # seconds a command has to end after a signal was passed on to it
PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
LEASED: Final = "nothing was run: its changes could not be pushed; `fsd cp -r` copies the tree out to read"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`path` is the remote subtree, `command` with its arguments, `env` all of its environment. `work_dir`:
    where to work, empty or absent; None makes one below `base` and removes it when all is pushed. `label`
    goes into the names of conflict copies."""

    path: bytes
    command: Sequence[str]
    env: Mapping[str, str]
    base: Path
    work_dir: Path | None = None
    label: str = "run"


@dataclass(slots=True)
class RunResult:
    """What became of a run. `left` is the work directory when something is only there."""

    command_exit: int | None
    pulled: CopyResult | None
    pushed: Pushed
    left: Path | None = None
    error: FsdError | None = None
    not_started: str = ""  # why the command could not be run
    at_work: list[tuple[int, str]] = field(default_factory=list)  # (pid, name) of who outlived the command
    kept: Path | None = None  # the work directory, all of it pushed, that stays for what they write in it

    @property
    def exit_code(self) -> int:
        """6 when something is only here, else the command's, else 1 after conflicts."""
        if self.left is not None:
            return NotDrained.exit_code
        return self.command_exit or (1 if self.pushed.conflicts else 0)

    def to_json(self) -> JsonObject:
        return {
            "exit_code": self.exit_code,
            "command_exit": self.command_exit,
            "pulled_files": self.pulled.files if self.pulled else 0,
            **self.pushed.to_json(),
            "status": "pushed" if self.left is None else "incomplete",
            "at_work": [pid for pid, _ in self.at_work],
            "kept": None if self.kept is None else str(self.kept),
            "left": None if self.left is None else str(self.left),
            "reason": None if self.error is None else self.error.message,
        }


@dataclass(slots=True)
class _Signals:
    """Signals while a run goes on: the pull is given up, the command gets them, and of the push only a second
    one is the end."""

    pulling: bool = False
    child: subprocess.Popen[bytes] | None = None
    count: int = 0
    last: int = 0
    timers: list[threading.Timer] = field(default_factory=list)

    def arrived(self) -> int:
        """The last signal there was, 0 for none."""
        return self.last

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        child = self.child
        if number == signal.SIGQUIT and child is not None:
            if not os.isatty(0):
                child.send_signal(number)
            return  # programs that tell their stacks and go on get it any number of times
        self.count += 1
        self.last = number
        if child is None:
            if self.pulling or self.count > 1:
                raise KeyboardInterrupt
            return
        # A terminal sends ^C to the command itself; everything else reaches only this process.
        if number != signal.SIGINT or not os.isatty(0):
            child.send_signal(number)
        if self.count > 1:
            child.kill()
        elif number != signal.SIGINT:
            timer = threading.Timer(KILL_AFTER, child.kill)
            timer.daemon = True
            timer.start()
            self.timers.append(timer)


@contextmanager
def _handled() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals) for number in not_ignored(PASSED_ON)}
    try:
        yield signals
    finally:
        for timer in signals.timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True)
class _Work:
    """A work directory and what it was made from: the record in `state`. `temporary`: it goes when all is
    pushed."""

    directory: Path
    file_system_id: str
    remote: bytes
    label: str
    temporary: bool
    base: dict[bytes, Base] = field(default_factory=dict)
    moved: dict[bytes, bytes] = field(default_factory=dict)  # what a push kept under another name there

    @property
    def tree(self) -> bytes:
        return os.fsencode(self.directory / TREE)

    def remember(self, host: Host) -> None:
        """Write the record from which a later push goes on."""
        packed: bytes = msgpack.packb(
            {
                "v": STATE_FORMAT,
                "fs": self.file_system_id,
                "remote": self.remote,
                "label": self.label,
                "temporary": self.temporary,
                # Copies: a job that an interruption left alone may still add to them.
                "base": {below: tuple(one) for below, one in list(self.base.items())},
                "moved": dict(self.moved),
            },
            use_bin_type=True,
        )
        write_durable(host, self.directory / STATE, packed, "run.state")

    def finish(self) -> None:
        """All is pushed."""
        if self.temporary:
            _remove_tree(self.directory)
        else:
            (self.directory / STATE).unlink()


def run(
    files: Files,
    options: RunOptions,
    progress: ProgressFn | None = None,
    say: Callable[[str], None] | None = None,
) -> RunResult:
    """The whole of it. Raises `FsdError` only before the command has begun: `LeaseHeld` where nothing could
    be pushed at its end. `say` hears what its user should know before that."""
    host, owner = files.http.host, files.http.identity.file_system_id
    remote = real_path(files, normal(options.path))
    nobody_writes(Leases(files.http), remote, below=False, hint=LEASED)
    with _handled() as signals, _work_directory(options) as directory:
        work = _Work(directory, owner, remote, options.label, options.work_dir is None)
        try:
            signals.pulling = True
            pulled = _pull(files, work, progress)
            work.remember(host)
            signals.pulling = False
            if pulled is None and say is not None:
                say(f"{show(remote)} does not exist: it begins empty, and is made if anything is left in it")
        except BaseException:
            _remove_tree(directory if work.temporary else directory / TREE)
            raise
        result = RunResult(None, pulled, Pushed())
        result.command_exit = _execute(options, directory / TREE, signals, result)
        _push(files, work, result)
    return result


def _remove_tree(directory: Path) -> None:
    """Remove a work directory, read-only directories in it too. Raises `FsdError`."""

    def again(call: Callable[[str], object], path: str, _error: object) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            call(path)

    if directory.exists():
        with told(os.fsencode(directory)):
            shutil.rmtree(directory, onerror=again)


def push_left(files: Files, directory: Path) -> RunResult:
    """Send what an earlier run left in `directory`. Raises `UsageError` when it holds no such thing."""
    result = RunResult(None, None, Pushed())
    work = _recall(directory, files)
    with _handled(), _locked(directory):
        if not os.path.lexists(directory / TREE):
            # Whoever removed it, the run was over: that says nothing about the files on the server.
            raise UsageError(
                f"{directory / TREE} is gone: nothing is left of what was to be pushed",
                hint=f"remove {directory}; on the server everything is as it was",
            )
        _push(files, work, result)
    return result


def left_overs(base: Path) -> list[Path]:
    """Work directories below `base` that a run left behind: its push was incomplete, or it was killed."""
    found = []
    for directory in sorted(base.glob("run-*")):
        if (directory / STATE).exists():
            try:
                with _locked(directory):
                    found.append(directory)
            except Busy:
                continue  # a run is at work there
    return found


def _push(files: Files, work: _Work, result: RunResult) -> None:
    """Push; what goes wrong is told in `result`, which then says where everything still is."""
    try:
        settled = _push_until_settled(files, work, result)
        if not settled and not result.at_work:
            result.error = NotDrained("its files go on changing")
    except KeyboardInterrupt:
        result.error = NotDrained("the push was abandoned by a second signal")
    except FsdError as exc:
        result.error = exc
    except BaseException:
        # What arrived is known to be there: `push_left` would take it for somebody else's.
        if work.directory.exists():
            work.remember(files.http.host)
        raise
    if result.error is None and result.pushed.failed:
        first = result.pushed.failed[0]
        result.error = NotDrained(f"{first.path} could not be pushed: {first.message}")
    if result.error is not None:
        result.left = work.directory
        if work.directory.exists():
            work.remember(files.http.host)
        else:
            result.error = NotDrained(f"{work.directory} was removed meanwhile: nothing was pushed")
        return
    if result.at_work and work.temporary:
        result.kept = work.directory
        work.remember(files.http.host)
        return
    try:
        work.finish()
    except FsdError as exc:
        result.error = exc  # everything is on the server; only its copy here could not be removed


def _have_top(tree: Path) -> None:
    """The copy's own directory, made again where the command removed it (`rm -rf "$PWD"`): as through a
    mount, whose top cannot be removed, what was below it was. Raises where something else is in its place,
    and where the whole work directory is gone."""
    with told(os.fsencode(tree)):
        if not os.path.lexists(tree):
            os.mkdir(tree, 0o755)
        elif not stat.S_ISDIR(os.lstat(tree).st_mode):
            raise NotDrained(f"{tree} is no directory any more: nothing of it was pushed")


def _push_until_settled(files: Files, work: _Work, result: RunResult) -> bool:
    """Push, again where processes that outlived the command wrote meanwhile; False: they go on."""
    for _ in range(PUSHES_MAX):
        _have_top(work.directory / TREE)
        push(files, work.remote, work.tree, work.base, work.moved, work.label, result.pushed)
        # First who is at work, then what is there: of who ended in between, all that was written is seen.
        result.at_work = users(work.directory / TREE)
        if result.pushed.failed or not differs(work.tree, work.base):
            return True
    return False


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The directory for this process alone; raises `Busy`."""
    fd = lock_directory(directory, "the work directory")
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def _work_directory(options: RunOptions) -> Iterator[Path]:
    """The directory to work in, locked."""
    if options.work_dir is None:
        try:
            make_dirs_durable(options.base)  # nobody else's, whatever the umask
            made = Path(tempfile.mkdtemp(prefix="run-", dir=options.base))
        except OSError as exc:
            error = local_error(exc, os.fsencode(options.base))
            error.hint = (
                error.hint or "choose --work-dir, or set HOME or XDG_STATE_HOME to a directory of yours"
            )
            raise error from exc
        with _locked(made):
            yield made
        return
    directory = options.work_dir
    with told(os.fsencode(directory)):
        make_dirs_durable(directory)
        names = set(os.listdir(directory))
    if not names <= {STATE, TREE, LOCK}:
        raise UsageError(f"{directory} is not empty")
    with _locked(directory):
        if (directory / STATE).exists():
            raise Busy(
                f"{directory} holds what an earlier run could not push",
                hint=f"push it first: fsd run --push-left {directory}",
            )
        _remove_tree(directory / TREE)  # all of an earlier run's was pushed
        yield directory


def _pull(files: Files, work: _Work, progress: ProgressFn | None) -> CopyResult | None:
    """The subtree in the work directory, and in its record what it was. None, and an empty directory: it does
    not exist."""
    result = CopyResult("pull", show(work.remote), show(work.tree))
    top = stat_or_none(files, work.remote)
    if top is None:
        with told(work.tree):
            os.mkdir(work.tree, 0o755)
        return None
    if not top["is_dir"]:
        raise UsageError(f"{show(work.remote)} is no directory", hint="--path takes a directory")
    base = work.base

    def got(below: bytes, entry: JsonObject, revision: str) -> None:
        base[below] = Base(entry["kind"], revision, ())

    options = CopyOptions(recursive=True, owner=os.geteuid() == 0)
    get_tree(files, work.remote, work.tree, options, Meter(result, progress), got)
    if result.failed:
        first = result.failed[0]
        raise PosixError(errno.EIO, f"{first.path} could not be pulled: {first.message}")
    for below in base:
        base[below] = base[below]._replace(signature=signature(os.path.join(work.tree, below)))
    return result


def _execute(options: RunOptions, cwd: Path, signals: _Signals, result: RunResult) -> int:
    """Run the command to its end; its exit code as a shell would tell it."""
    if signals.arrived():
        return 128 + signals.arrived()
    try:
        child = subprocess.Popen(list(options.command), cwd=cwd, env=dict(options.env))
    except OSError as exc:
        code, reason = not_started(exc, options.command[0], options.env, cwd)
        result.not_started = f"{options.command[0]} cannot be run: {reason}"
        return code
    signals.child = child
    if signals.arrived():
        child.send_signal(signals.arrived())  # it came while the command was being started
    code = _ended(child)
    signals.child = None
    return 128 - code if code < 0 else code


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end. In pieces: a signal that the kernel gave to another thread (the main one had just got
    one) does not end the main thread's wait, and would be handled at the command's end only."""
    while (code := wait(child, LOOK_AFTER)) is None:
        pass
    return code


def _recall(directory: Path, files: Files) -> _Work:
    """The record an earlier run left. Raises `UsageError`."""
    try:
        raw = (directory / STATE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise UsageError(f"{directory} holds nothing that a run left") from exc
    try:
        found: dict[str, Any] = msgpack.unpackb(raw, raw=False, use_list=False, strict_map_key=False)
        version = found["v"]
        base = {bytes(below): Base(*one) for below, one in found["base"].items()}
        work = _Work(
            directory,
            str(found["fs"]),
            bytes(found["remote"]),
            str(found["label"]),
            bool(found["temporary"]),
            base,
            {bytes(below): bytes(there) for below, there in found.get("moved", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.exceptions.UnpackException) as exc:
        raise UsageError(f"{directory / STATE} is damaged; copy the files under {TREE} yourself") from exc
    if version != STATE_FORMAT:
        raise UsageError(f"{directory / STATE} was written by another version of fsd")
    if work.file_system_id != files.http.identity.file_system_id:
        raise UsageError(f"{directory} belongs to {work.file_system_id}, the token to another filesystem")
    return work
