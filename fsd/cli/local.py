"""The mounts of this machine, as far as the command line needs them: what is written through them is sent
before a command that is about it, and what a command had the service change is seen through them after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fsd.cli.context import Context
from fsd.model.errors import FsdError, NotDrained, Unavailable

if TYPE_CHECKING:
    from fsd.kernel.runtime import Record, RuntimeDir

MOUNTINFO: Final = Path("/proc/self/mountinfo")
SILENCE: Final = 30.0  # a daemon at work says something every second
BARRIER: Final = 300.0  # as long as a journal's append waits
LOOK: Final = 30.0  # as long a command that only looks waits for what is sent first
AT_LEAST: Final = 1.0
SHOWN: Final = 10.0  # mounts hear of a commit within a second


def runtime(context: Context) -> RuntimeDir:
    """Where the running mounts of this user are recorded."""
    from fsd.kernel.runtime import RuntimeDir

    return RuntimeDir(context.env.runtime_dir(), context.host)


def mounts_here(context: Context, file_system_id: str) -> list[Record]:
    """The live mounts of a filesystem's live tree; one of a retained state has nothing to send and shows no
    other. Looks at the mount table first: most sandboxes that use direct commands have none, and need not
    load what deals with them."""
    try:
        if b"fsd:" + file_system_id.encode() not in MOUNTINFO.read_bytes():
            return []
    except FileNotFoundError:
        return []  # no Linux mount table, so no mounts of ours
    return [one for one in runtime(context).mounts_of(file_system_id) if not one.shown]


def barrier(
    context: Context, file_system_id: str, timeout: float = BARRIER, *, undone: str = "nothing was done"
) -> bool:
    """Everything written so far through the mounts of the filesystem here is committed; False when there are
    none. Raises `NotDrained` naming the mount, and saying what was left `undone`. `timeout`: in all."""
    found = mounts_here(context, file_system_id)
    for record, within in _shared(context, found, timeout):
        _send(record, within, f"{undone}; see `fsd status {record.mountpoint}`{_way_round(context)}")
    return bool(found)


def _shared(context: Context, records: list[Record], timeout: float) -> Iterator[tuple[Record, float]]:
    """Each with what is left of the time, and a moment where nothing is: one that has nothing to send says
    so, however long another took."""
    end = context.host.monotonic() + timeout
    for record in records:
        yield record, max(min(timeout, AT_LEAST), end - context.host.monotonic())


def _send(record: Record, within: float, hint: str) -> None:
    from fsd.kernel import unmount

    try:
        unmount.barrier(record, within)
    except FsdError as exc:
        raise NotDrained(
            f"the mount at {record.mountpoint} could not send everything written before: {exc.message}",
            hint=hint,
        ) from exc


def _way_round(context: Context) -> str:
    return ", or pass --no-barrier" if hasattr(context.args, "no_barrier") else ""


def sent_if_it_can_be(context: Context, file_system_id: str) -> None:
    """Before a command that only looks: the same, but what cannot be sent is told, and no reason to fail."""
    for record, within in _shared(context, mounts_here(context, file_system_id), LOOK):
        try:
            _send(record, within, "")
        except NotDrained as exc:
            context.say(f"fsd: not looked at: what is not sent yet; {exc.message}")


def seen(context: Context, file_system_id: str, seq: int) -> None:
    """After a command whose change the service made: until the mounts here show it, so that what a script
    does next finds it. It is done in any case: a mount that is not there yet is told, and no error."""
    try:
        wait_seq(context, file_system_id, seq, SHOWN)
    except Unavailable as exc:
        context.say(f"fsd: it is done; {exc.message}")


def wait_seq(context: Context, file_system_id: str, seq: int, timeout: float) -> None:
    """Until every mount of the filesystem here shows at least commit `seq`. Raises `Unavailable`."""
    for record in mounts_here(context, file_system_id):
        from fsd.kernel.control_client import request

        try:
            request(Path(record.socket), "wait", {"seq": seq, "timeout": timeout}, timeout=SILENCE)
        except FsdError as exc:
            raise Unavailable(
                f"the mount at {record.mountpoint} does not show commit {seq} yet: {exc.message}",
                hint="--no-wait reads without waiting for it",
            ) from exc
