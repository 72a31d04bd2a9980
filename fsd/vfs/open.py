"""`open_volume`: lock the mount's state, send what an earlier run left, start a new session."""

from __future__ import annotations

import errno
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fsd.host.files import lock_directory
from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO, Entry
from fsd.model.errors import DiskFailed, FsdError, NoSpace, NotFound, Unavailable, UsageError
from fsd.model.limits import DIR_INLINE_MAX, MIB
from fsd.model.names import show, split_path
from fsd.remote.api import Remote, SessionStart
from fsd.vfs.core import Core
from fsd.vfs.log import FULL, Log, finish_retiring
from fsd.vfs.recover import Held, Recovery, Report
from fsd.vfs.refused import count_refused
from fsd.vfs.resession import session_info
from fsd.vfs.types import Cache, Told, VolumeOptions
from fsd.vfs.volume import Volume
from fsd.wire.messages import ATTRS, LIST, PATH

OPEN_TIMEOUT = 30.0

log = logging.getLogger(__name__)


def open_volume(
    options: VolumeOptions,
    host: Host,
    remote: Remote,
    cache: Cache,
    *,
    patience: float = 60.0,
    told: Told | None = None,
    reached: Told | None = None,
) -> Volume:
    """Blocks (network, disk). Raises `Busy` when the state is in use, `NotDrained` or what the server said
    when an earlier run's changes cannot be sent; they stay. `patience`: seconds without progress before
    that; `told` hears of progress, `reached` of each of the few answers a mount begins with, again where it
    was called again. `volume.recovered` says what was sent for an earlier run."""
    lock = prepare(options)
    try:
        left = recover(options, host, remote, cache, patience=patience, told=told)
        with usable(options.state_dir):
            volume = _start(options, host, remote, lock, left, reached or (lambda step: None))
        volume.recovered = left.report
        return volume
    except BaseException:
        os.close(lock)
        raise


def prepare(options: VolumeOptions) -> int:
    """The state directory exists and is locked; returns the lock's fd. Raises `Busy`."""
    with usable(options.state_dir):
        options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock_directory(options.state_dir, "the state directory")


@contextmanager
def usable(state_dir: Path) -> Iterator[None]:
    """Turns an OSError about what is in the state directory into an `FsdError` that names it."""
    try:
        yield
    except OSError as exc:
        if exc.errno in FULL:
            raise NoSpace(
                f"the disk under the state directory {state_dir} is full",
                hint=f"free space under {state_dir}",
            ) from exc
        raise UsageError(
            f"the state directory {state_dir} cannot be used: "
            f"{exc.filename or 'a file in it'}: {exc.strerror}",
            hint=DiskFailed.way_out(shlex.quote(str(state_dir.parent.parent)))
            if exc.errno in (errno.EROFS, errno.EIO)
            else "look at it, or choose another --state-dir; what is in it stays",
        ) from exc


class Left(NamedTuple):
    """What became of an earlier run's log: what was sent, the number the next log begins with, and the writer
    lease it was written under, which is still there. `session`: whose log it was (0: there was none)."""

    report: Report | None
    first: int
    held: Held | None
    session: int = 0


def recover(
    options: VolumeOptions,
    host: Host,
    remote: Remote,
    cache: Cache,
    *,
    patience: float = 60.0,
    shared: bool = False,
    told: Told | None = None,
) -> Left:
    """Send what an earlier run left in a locked state directory; see `Recovery.run`. `shared`: what was
    written under a writer lease goes without it, by the rules for all."""
    with usable(options.state_dir):
        first = finish_retiring(options.state_dir, host)
        if not Log.segments(options.state_dir):
            return Left(None, first or 1, None)
        recovery = Recovery(options, host, remote, cache, patience=patience, shared=shared, told=told)
        report, first = recovery.run()
        return Left(report, first, recovery.held, recovery.session)


def give_up(remote: Remote, held: Held | None) -> None:
    """Nobody goes on under the lease: others need not wait until it expires."""
    if held is not None:
        remote.release_lease(held.fence)


def replaced(remote: Remote, session: int) -> None:
    """The earlier run's session has nothing more to send: nobody need wait for it, or take it for a writer,
    until it counts as lost. That the server does not hear of it costs no more than that wait."""
    if not session:
        return
    try:
        remote.end_session(session, "replaced", (0, 0, 0))
    except FsdError as exc:
        log.info("the server was not told that session %d is over: %s", session, exc)


def segment_size(options: VolumeOptions) -> int:
    """Segments are freed whole: several have to fit into the buffer."""
    size = options.buffer_size
    if size is None:
        disk = os.statvfs(options.state_dir)
        size = disk.f_bavail * disk.f_frsize // 2
    return min(options.segment_size, max(MIB, size // 8))


def _start(
    options: VolumeOptions, host: Host, remote: Remote, lock: int, left: Left, reached: Told
) -> Volume:
    size = segment_size(options)
    core = Core(options, host, Log.create(options.state_dir, host, left.first, segment_size=size))
    try:
        core.refused = count_refused(options.state_dir)
        listing = _find_root(core, remote)
        reached("the server answers: the directory is found")
        if options.exclusive and left.held is not None:
            # The lease passes on.
            core.session, core.ticket, core.acked = left.held.session, left.held.ticket, left.held.next_op
        started: SessionStart = remote.start_session(session_info(core))
        core.session, core.ticket, core.fence, core.acked = started.session, started.ticket, started.fence, 1
        reached("the server answers: the session has begun")
        if not options.exclusive:
            give_up(remote, left.held)
        replaced(remote, left.session)
        if not options.read_only:
            # Who else is exclusive here, what room there is: known before the first call, not a little later.
            page = remote.changes(core.feed_seq, core.session, 0.0, core.root_ino)
            core.see_leases(page.leases)
            core.mark = page.mark or core.mark
            core.space = page.space or core.space
        core.log.rotate(core.state())
        core.log.sync()
    except BaseException:
        core.log.abandon()
        raise
    volume = Volume(core, lock)
    if listing is not None:
        volume.loader.listed(core.nodes.get(core.root_ino), listing.entries, listing.seq)
    volume.previous = _previous(started)
    return volume


class _Listing(NamedTuple):
    """All names in the mount's root, as of `seq`."""

    entries: Sequence[Entry]
    seq: int


def _find_root(core: Core, remote: Remote) -> _Listing | None:
    """Have the root of the mount in memory. All its names, where one answer holds them, too: else nothing
    could be made there while the server is away, before somebody has looked."""
    names = split_path(core.options.remote_path)
    if names:
        seq, answers = remote.ask([(PATH, tuple(names))], OPEN_TIMEOUT)
        entry: Any = answers[0][-1]
        if entry is None:
            where = show(core.options.remote_path)
            raise NotFound(f"no directory {where} in the filesystem", hint=f"fsd mkdir {shlex.quote(where)}")
        attr, answers = entry.attr, answers[1:]
    else:
        seq, answers = remote.ask([(ATTRS, (ROOT_INO,)), _names_in(ROOT_INO)], OPEN_TIMEOUT)
        attr, answers = answers[0][0], answers[1:]
        if attr is None:
            raise Unavailable("the server answers that the filesystem has no root")
    if not attr.is_dir:
        raise UsageError(f"{show(core.options.remote_path)} of the filesystem is not a directory")
    core.root_ino = attr.ino
    core.seq = core.feed_seq = seq
    root = core.nodes.install(attr, seq, core.now())
    root.lookups = 1  # the kernel never forgets it
    if not answers:
        seq, answers = remote.ask([_names_in(attr.ino)], OPEN_TIMEOUT)
    entries, more = answers[0] or ((), True)
    return None if more else _Listing(entries, seq)


def _names_in(ino: int) -> tuple[Any, ...]:
    return LIST, ino, b"", DIR_INLINE_MAX


def _previous(started: SessionStart) -> dict[str, object] | None:
    before = started.previous
    if before is None:
        return None
    return {
        "ended": before.ended,
        "last_commit_at": before.last_commit_at,
        "pending_at_last_report": dict(
            zip(("operations", "files", "bytes"), before.pending_at_last_report, strict=True)
        ),
    }
