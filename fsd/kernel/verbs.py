"""The verbs of the control socket. Main thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fsd.kernel import tasks
from fsd.kernel.blocking import blocking
from fsd.kernel.control import Tell, Verb
from fsd.kernel.machine import ANSWER, silent
from fsd.model.errors import FsdError, Unavailable, UsageError

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon

Answer = tuple[dict[str, Any], Callable[[], None] | None]
PACE: Final = 0.02
STATUS_WAIT: Final = 2.0
log = logging.getLogger(__name__)


def _seconds(args: dict[str, Any], name: str = "timeout") -> float | None:
    value = args.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or value < 0:
        raise UsageError(f"{name} is a number of seconds")
    return float(value)


class Verbs:
    """Each takes the request's arguments and a way to tell progress; returns the answer and what is to be
    done once it is sent."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._counted: tuple[int, int] | None = None  # seq, conflicts then

    def table(self) -> dict[str, Verb]:
        return {
            "status": self.status,
            "drain": self.drain,
            "unmount": self.unmount,
            "wait": self.wait,
            "checkpoint": self.checkpoint,
        }

    def _within(self, args: dict[str, Any]) -> float | None:
        """The time a command gave, else what an fsync gets: without a server nothing waits for ever."""
        within = _seconds(args)
        return within if within is not None else self._daemon.options.io_timeout or None

    async def status(self, args: dict[str, Any], tell: Tell) -> Answer:
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        volume = machine.volume
        found = await daemon.call(
            lambda: (volume.pending(), volume.status(), volume.session, volume.feed_seq)
        )
        if found is None:
            raise silent()
        pending, own, session, seq = found
        events = volume.core.conflicts
        own = {**own, "conflict_events": events, "conflicts": await self._conflicts(seq, events)}
        stats = daemon.cache.stats()
        health = daemon.remote.health()
        rtt = health.rtt_ms if health.rtt_ms is None else round(health.rtt_ms, 3)
        answer: dict[str, Any] = {
            "mount_path": str(daemon.place),
            "state": "mounted" if not daemon.kernel_gone.is_set() else "detached",
            "pid": os.getpid(),
            "supervisor_pid": daemon.start.supervisor_pid or None,
            "restarts": daemon.start.restarts,
            "mount_id": daemon.options.mount_id,
            "mount_session_id": session,
            "file_system_id": daemon.options.token.file_system_id,
            "remote_path": daemon.options.remote_path.decode("utf-8", "backslashreplace"),
            "endpoint": daemon.remote.endpoint,
            "read_only": daemon.read_only() or volume.core.fenced is not None,
            "shown_state": daemon.shown.status(),
            "durability": daemon.options.durability,
            "consistency": daemon.options.consistency,
            "loop": daemon.options.loop,
            "fs_seq": seq,
            "pending": {
                "operations": pending.operations,
                "files": pending.files,
                "bytes": pending.bytes,
            },
            "oldest_pending_s": round(pending.oldest_s, 3),
            "first_pending_path": pending.first_path.decode("utf-8", "backslashreplace") or None,
            "reason": pending.reason or daemon.feed.refused or None,
            "cache": {"bytes": stats.bytes, "hits": stats.hits, "misses": stats.misses},
            "server": {"reachable": health.reachable, "rtt_ms": rtt},
            "checkpoint": {**daemon.checkpoints.status(), "automatic": daemon.automatic.status()},
            "parked": len(machine.snapshot()),
            "state_dir": str(daemon.start.directory.read(daemon.options.mount_id).state_dir),
        }
        return {**_jsonable(own), **answer}, None

    async def _conflicts(self, seq: int, events: int) -> int:
        """How many conflicts nobody has taken care of yet, as `fsd conflicts` lists them. While the server
        does not answer, how many there were when it last did; where it never did, this mount's `events`."""
        daemon = self._daemon
        stale = self._counted is None or self._counted[0] != seq
        if stale and daemon.remote.health().reachable:
            ask = partial(daemon.remote.count_conflicts, daemon.options.remote_path, STATUS_WAIT)
            try:
                with tasks.move_on_after(STATUS_WAIT):
                    count = await blocking(ask)
                    self._counted = (seq, count)
            except FsdError as exc:
                log.info("conflicts were not counted: %s", exc)
        return events if self._counted is None else self._counted[1]

    async def drain(self, args: dict[str, Any], tell: Tell) -> Answer:
        drained = await self._daemon.stopper.drain(self._within(args), tell)
        machine = self._daemon.machine
        if drained.error is None and machine is not None:
            # A power cut that took the answers from the log's end would leave recovery to guess which of what
            # it finds there was sent, changed or removed since.
            try:
                await self._daemon.call(machine.volume.sync, ANSWER)
            except (OSError, FsdError) as exc:
                log.error("the log could not be made durable: %s", exc)
        answer = drained.answer("drained")
        answer["mount_path"] = str(self._daemon.place)
        if machine is not None:
            # With the commits just made, of which the feed may not have told yet: one waits for it elsewhere.
            answer["fs_seq"] = await self._daemon.call(lambda: machine.volume.status()["fs_seq"], ANSWER)
            if answer["fs_seq"] is None:
                raise silent()
        return answer, None

    async def unmount(self, args: dict[str, Any], tell: Tell) -> Answer:
        return await self._daemon.stopper.unmount(self._within(args), bool(args.get("lazy")), tell)

    async def wait(self, args: dict[str, Any], tell: Tell) -> Answer:
        """Until the mount shows commit `seq` of the filesystem."""
        machine = self._daemon.machine
        assert machine is not None
        seq = args.get("seq")
        if not isinstance(seq, int):
            raise UsageError("seq is a commit number")
        if self._daemon.options.state and machine.volume.feed_seq < seq:
            raise UsageError(
                f"this mount shows commit {machine.volume.feed_seq} for good, never {seq}",
                hint="wait for a mount of the live tree",
            )
        within = _seconds(args)
        end = tasks.current_time() + (float("inf") if within is None else within)
        told = tasks.current_time()
        while machine.volume.feed_seq < seq:
            now = tasks.current_time()
            if now >= end:
                raise Unavailable(f"the mount shows commit {machine.volume.feed_seq}, not yet {seq}")
            if now - told > 1:
                told = now
                await tell(f"at commit {machine.volume.feed_seq}, waiting for {seq}")
            await tasks.sleep(PACE)
        return {"status": "reached", "fs_seq": machine.volume.feed_seq}, None

    async def checkpoint(self, args: dict[str, Any], tell: Tell) -> Answer:
        """A checkpoint of what the mount shows now; `ask` holds its fields (label, …)."""
        ask = args.get("ask")
        if not isinstance(ask, dict):
            raise UsageError("ask holds the checkpoint's fields")
        if self._daemon.options.state:
            raise UsageError(
                "this mount shows a state that is kept, which never changes",
                hint="a checkpoint of the live tree is made through a mount of that, or with --remote",
            )
        within = _seconds(args) if "timeout" in args else self._within(args)  # null: however long it takes
        made = await self._daemon.checkpoints.create(
            ask, partial_too=bool(args.get("partial")), within=within, tell=tell
        )
        return {**made, "mount_path": str(self._daemon.place)}, None


def _jsonable(value: Any) -> Any:
    """Bytes as text, everything else as it is, so that a status can be printed."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {str(_jsonable(name)): _jsonable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(one) for one in value]
    return value
