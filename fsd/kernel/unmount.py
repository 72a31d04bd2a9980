"""`fsd drain`, `fsd unmount`, `fsd wait`, `fsd wait-exit`, `fsd status`, `fsd checkpoint create`: the side of
the command.

Each takes the mount point and the runtime directory and returns the answer as the command prints it; what
was not drained is `NotDrained` with the same answer in its details. Success is never reported while the
kernel lists the mount.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fsd.host.seam import Host
from fsd.kernel import mountpoint, namespace, remains, runtime
from fsd.kernel.control_client import NoDaemon, connect, request
from fsd.kernel.prune import prune
from fsd.kernel.runtime import Record, RuntimeDir
from fsd.model.errors import Busy, NotDrained, NotFound, Unavailable
from fsd.model.words import counted

Say = Callable[[str], None]
# The daemon sends a progress line every second while it works; this long a silence is a hang.
SILENCE: Final = 30.0
# How long a command waits for a daemon that is being started again.
RESTART_WAIT: Final = 20.0
BEING_STARTED: Final = "has no daemon now: one is being started"
EMPTY: Final = {"operations": 0, "files": 0, "bytes": 0}
_pace = threading.Event()


def _progress(say: Say) -> Callable[[dict[str, Any]], None]:
    def tell(news: dict[str, Any]) -> None:
        say(str(news.get("text", "")))

    return tell


def left_sentence(answer: dict[str, Any]) -> str:
    """What is left, for people."""
    pending = answer.get("pending") or EMPTY
    what = [counted(pending[f"{noun}s"], noun) for noun in ("file", "byte", "operation")]
    text = f"{', '.join(what)} left"
    if answer.get("first_failed_path"):
        text += f", the first is {answer['first_failed_path']}"
    if answer.get("reason"):
        text += f" ({answer['reason']})"
    return text


def _judged(answer: dict[str, Any], what: str) -> dict[str, Any]:
    pending = answer.get("pending") or EMPTY
    if pending["operations"] or pending["files"] or answer.get("status") == "not_drained":
        raise NotDrained(f"{what}: {left_sentence(answer)}", details=answer)
    return answer


def _socket(record: Record, host: Host) -> Path:
    """The daemon's socket. While the supervisor starts another daemon this waits, up to RESTART_WAIT."""
    path, directory = Path(record.socket), RuntimeDir(Path(record.runtime_dir), host)
    deadline = host.monotonic() + RESTART_WAIT
    while True:
        try:
            connect(path).close()
            return path
        except NoDaemon:
            now = directory.read(record.mount_id)
            alive = directory.alive(record.mount_id)
            if not alive and not mountpoint.places(record.source):
                raise _gone(now) from None
            if not (alive and is_coming(now)):
                raise
            if host.monotonic() > deadline:
                raise NoDaemon(
                    f"the mount at {now.mountpoint} {BEING_STARTED}", hint=coming_hint(now)
                ) from None
            _pace.wait(0.05)


def is_coming(record: Record) -> bool:
    """Whether a daemon is being started, if somebody lives who would start one (`RuntimeDir.alive`)."""
    return record.state in (runtime.STARTING, runtime.RESTARTING)


def coming_hint(record: Record) -> str:
    """What a mount waits for while its daemon is being started."""
    return f"that needs an answer of {record.endpoint}; what was written is kept; the log is {record.log}"


def _gone(record: Record) -> NotFound:
    """The last mount at a place has ended and is detached."""
    hint = "`fsd mounts` lists what is mounted here"
    left = record.ended.get("pending", EMPTY) if record.state == runtime.ENDED else None
    if left is None or left["operations"] or left["files"]:
        hint = (
            f"what it had not sent stays in {record.state_dir} until `fsd mount` there, or `fsd recover`, "
            "sends it"
        )
    return NotFound(f"nothing is mounted at {record.mountpoint} any more", hint=hint)


def status(place: Path, directory: RuntimeDir) -> dict[str, Any]:
    """The daemon's status; raises `NotFound` when nothing is mounted there."""
    record = directory.find(place)
    return request(_socket(record, directory.host), "status", timeout=SILENCE)


def drain(place: Path, directory: RuntimeDir, within: float | None, say: Say) -> dict[str, Any]:
    """Everything written before the call is on the server when this returns."""
    record = directory.find(place)
    answer = request(
        _socket(record, directory.host),
        "drain",
        {"timeout": within},
        timeout=SILENCE,
        progress=_progress(say),
    )
    return _judged(answer, f"{record.mountpoint} is not drained")


def barrier(record: Record, within: float | None) -> dict[str, Any]:
    """A drain for another command (a journal append): quiet, the same errors."""
    answer = request(_socket(record, Host()), "drain", {"timeout": within}, timeout=SILENCE)
    return _judged(answer, f"{record.mountpoint} is not drained")


def checkpoint(
    record: Record, ask: dict[str, Any], within: float | None, say: Say, host: Host, *, partial: bool
) -> dict[str, Any]:
    """A checkpoint of what a mount shows at one moment after the call: the server's answer. Raises
    `NotDrained` with `not_flushed` in its details when something could not be brought into it; with `partial`
    changes that the server refused are only named."""
    return request(
        _socket(record, host),
        "checkpoint",
        {"ask": ask, "timeout": within, "partial": partial},
        timeout=SILENCE,
        progress=_progress(say),
    )


def wait(place: Path, directory: RuntimeDir, seq: int, within: float | None, say: Say) -> dict[str, Any]:
    """Until the mount shows commit `seq`; raises `Unavailable` when it does not within the time."""
    record = directory.find(place)
    return request(
        _socket(record, directory.host),
        "wait",
        {"seq": seq, "timeout": within},
        timeout=SILENCE,
        progress=_progress(say),
    )


def unmount(
    place: Path,
    directory: RuntimeDir,
    within: float | None,
    say: Say,
    host: Host,
    *,
    lazy: bool = False,
) -> dict[str, Any]:
    """Drain, detach, and wait until the daemon has ended. A place that a mount was bound to (`mount --bind`,
    a container's volume) is detached alone, and the answer says where the mount goes on: umount(8) comes
    here for each of them, since the kernel lists all with one source. So is a copy of the mount that a mount
    namespace made later has. The last of them, or where a mount was moved to, ends it.

    Raises `Busy` (still mounted), `NotDrained` (detached; the rest is kept), `NotFound` (nothing mounted).
    """
    resolved = mountpoint.resolve(place)
    entry = mountpoint.mounted_at(resolved)
    if entry is None:
        raise _absent(resolved, directory)
    record = directory.find(resolved)
    directory = directory.home(record)
    _step_out(resolved)
    listed = [each for each in mountpoint.list_mounts() if each.source == record.source]
    if entry.source != record.source and any(each.path == resolved for each in listed):
        raise Busy(f"{resolved} lies under another mount ({entry.source})", hint="unmount that one first")
    one_of_several = str(resolved) != record.mountpoint and len(listed) > 1
    if one_of_several or namespace.is_copy(record):
        return _unmount_one(entry, record, directory, within, say, host, lazy=lazy)
    remains.free(record.pid, resolved, record.source)
    try:
        answer = request(
            _socket(record, host),
            "unmount",
            {"timeout": within, "lazy": lazy},
            timeout=SILENCE,
            progress=_progress(say),
        )
    except NoDaemon:
        if directory.alive(record.mount_id):
            raise
        return _unmount_dead(resolved, record)
    except Busy as exc:
        if os.getppid() in exc.details.get("pids", ()):
            exc.hint = f"the shell this was typed in is one of them: `cd` out of it first; else {exc.hint}"
        raise
    _wait_gone(directory, record, host, 30.0, say)
    if mountpoint.still_listed(resolved, record.source):
        raise Busy(f"{resolved} is still listed by the kernel", hint="`fsd unmount --lazy`")
    return _judged(answer, f"{resolved} is unmounted, but not everything was sent")


def _unmount_one(
    entry: mountpoint.MountEntry,
    record: Record,
    directory: RuntimeDir,
    within: float | None,
    say: Say,
    host: Host,
    *,
    lazy: bool,
) -> dict[str, Any]:
    """Detach `entry` alone: a place the mount was bound to, which may lie on another of it at the same path,
    or this namespace's copy. Where it was the last (two namespaces share their mounts, one bound place took
    the others along): then until the daemon has sent the rest and ended."""
    place = entry.path
    # Which of several at one path is on top the order of the table does not tell: they are counted.
    before = mountpoint.count_at(place, entry.source)
    mountpoint.detach(place, lazy=lazy)
    if mountpoint.count_at(place, entry.source) >= max(before, 1):
        raise Busy(f"{place} is still listed by the kernel", hint="`fsd unmount --lazy`")
    rest = [str(path) for path in mountpoint.places(record.source)]
    if rest or namespace.goes_on(record):
        at = record.mountpoint if not rest or record.mountpoint in rest else rest[0]
        return {"status": "unmounted", "still_mounted_at": at}
    _wait_gone(directory, record, host, within, say)
    ended = directory.read(record.mount_id).ended or {"status": "not_drained"}
    return _judged({"status": "unmounted", **ended}, f"{place} is unmounted, but not everything was sent")


def _absent(place: Path, directory: RuntimeDir) -> NotFound:
    """Nothing is mounted at `place`, as far as this mount namespace goes."""
    try:
        record = directory.find(place)
    except NotFound as exc:
        return exc
    if record.mountpoint == str(place):
        where, hint = namespace.told(record, f"fsd unmount {place}")
        if where:
            return NotFound(f"{place} is {where}, not in this one", hint=hint)
    return NotFound(f"nothing is mounted at {place}", hint="`fsd mounts` lists what is mounted here")


def _step_out(place: Path) -> None:
    """Called with the mount as working directory, this process would keep it busy itself."""
    try:
        here = Path(os.readlink("/proc/self/cwd"))
    except OSError:
        return  # where it stands cannot be told: if that is the mount, it is busy, and this process named
    if here == place or place in here.parents:
        os.chdir("/")


def _unmount_dead(place: Path, record: Record) -> dict[str, Any]:
    """The daemon is dead: detach what it left. Nobody knows what is pending, so this is no success."""
    for each in reversed(mountpoint.list_mounts()):
        if each.path == place and each.source == record.source:
            mountpoint.detach(place, lazy=True)
    raise NotDrained(
        f"{place} was dead (its daemon is gone) and is detached now; what it had not sent is in "
        f"{record.state_dir}",
        hint="`fsd mount` at the same place, or `fsd recover`, sends it",
        details={"status": "dead"},
    )


def wait_exit(
    place: Path, directory: RuntimeDir, within: float | None, say: Say, host: Host
) -> dict[str, Any]:
    """Until the daemon of the last mount at `place` has ended; how it ended.

    Raises `Busy` when it is still mounted there, `Unavailable` when the time is over, `NotDrained` when
    something is left.
    """
    record = directory.find(place)
    directory = directory.home(record)
    if directory.alive(record.mount_id):
        listed = mountpoint.places(record.source)
        if listed:
            at = record.mountpoint if Path(record.mountpoint) in listed else listed[0]
            raise Busy(f"{at} is mounted", hint="unmount it first")
        elsewhere, hint = namespace.told(record, f"fsd unmount {record.mountpoint}")
        if elsewhere:
            raise Busy(f"{record.mountpoint} is {elsewhere}", hint=f"unmount it first: {hint}")
        _wait_gone(directory, record, host, within, say)
    record = directory.read(record.mount_id)
    if record.state != runtime.ENDED:
        raise NotDrained(
            f"the daemon of {record.mountpoint} was killed; what it had not sent is in {record.state_dir}",
            hint="`fsd mount` at the same place, or `fsd recover`, sends it",
            details={"status": "lost"},
        )
    return _judged({"status": "ended", **record.ended}, f"{record.mountpoint} ended undrained")


def _wait_gone(directory: RuntimeDir, record: Record, host: Host, within: float | None, say: Say) -> None:
    deadline = None if within is None else host.monotonic() + within
    said = host.monotonic()
    while directory.alive(record.mount_id):
        now = host.monotonic()
        if deadline is not None and now > deadline:
            raise Unavailable(f"the daemon of {record.mountpoint} (pid {record.pid}) has not ended yet")
        if now - said > 2:
            said = now
            say(f"waiting for the daemon of {record.mountpoint} to send the rest")
        _pace.wait(0.02)


def mounts(directory: RuntimeDir) -> list[dict[str, Any]]:
    """Every mount of ours in the kernel's table, and every daemon that is still sending."""
    prune(directory)
    found = []
    records = {record.mount_id: record for record in directory.records()}
    listed: dict[str, mountpoint.MountEntry] = {}
    for entry in mountpoint.list_mounts():
        if entry.ids is None:
            continue
        record = records.get(entry.ids[1])
        # One that was bound to other places too is told by its own.
        if entry.ids[1] not in listed or (record is not None and record.mountpoint == str(entry.path)):
            listed[entry.ids[1]] = entry
    for mount_id, entry in listed.items():
        record = records.get(mount_id)
        alive = record is not None and directory.home(record).alive(mount_id)
        row = _told(record)
        row |= {"mount_path": str(entry.path), "mount_id": mount_id}
        row["file_system_id"] = entry.ids[0] if entry.ids else ""
        if record is None:
            row["state"] = _state_without_record(entry.path)
        else:
            row["state"] = record.state if alive else "dead"
        found.append(row)
    for mount_id, record in records.items():
        if mount_id not in listed and directory.home(record).alive(mount_id):
            row = _told(record)
            row |= {"mount_path": record.mountpoint, "mount_id": mount_id}
            row |= {"file_system_id": record.file_system_id, "state": record.state}
            found.append(row)
    return found


def _state_without_record(place: Path) -> str:
    """Of a mount whose record is another user's, or below another XDG_RUNTIME_DIR: "dead" where it fails."""
    answer = mountpoint.answers(place, within=1.0)
    return "dead" if isinstance(answer, OSError) and not isinstance(answer, PermissionError) else "foreign"


def _told(record: Record | None) -> dict[str, Any]:
    """What only a mount's record knows; null where it is gone."""
    if record is None:
        return dict.fromkeys(("pid", "state_dir", "remote_path", "shown"))
    return {
        "pid": record.pid,
        "state_dir": record.state_dir,
        "remote_path": record.remote_path,
        "shown": record.shown or None,  # a retained state, as in a query string
    }
