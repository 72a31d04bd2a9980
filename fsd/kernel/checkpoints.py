"""Checkpoints made through this mount. Main thread.

First what was stored through shared mappings is fetched from the kernel (`syncer`), then the volume cuts
(one moment of the FUSE thread, see `fsd.vfs.cut`), then all that is in the cut is committed and the
checkpoint made.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsd.kernel import syncer, tasks
from fsd.kernel.blocking import blocking
from fsd.kernel.machine import ANSWER, silent
from fsd.kernel.opening import Limit
from fsd.kernel.stop import quiet, sizes
from fsd.kernel.streams import Gone, start
from fsd.model.errors import FsdError, NotDrained, Unavailable
from fsd.model.limits import (
    BARRIERS_MAX,
    CUT_FILES_MAX,
    FLUSH_BYTES,
    NOT_FLUSHED_BYTES,
    NOT_FLUSHED_MAX,
    PATH_TRIES,
)
from fsd.model.words import counted
from fsd.vfs.decide import kept
from fsd.vfs.types import Want
from fsd.wire.messages import BarrierAsk

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon

log = logging.getLogger(__name__)

Tell = Callable[[str], Awaitable[None]]
SYNC_TIMEOUT: Final = 20.0
TOLD_EVERY: Final = 1.0
MAPPINGS: Final = "what was stored through shared mappings could not be fetched from the kernel in time"


class Checkpoints:
    """One daemon's checkpoints, one at a time; the next waits. `last` is the newest one that was made."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._turn = tasks.Lock()
        self.last: dict[str, Any] | None = None
        self._asks: deque[BarrierAsk] = deque()
        self._asked = tasks.Event()

    async def create(
        self, ask: dict[str, Any], *, partial_too: bool, within: float | None, tell: Tell
    ) -> dict[str, Any]:
        """Make one: the server's answer, with `not_flushed`. Raises `NotDrained` when something that is to be
        in it could not be committed (its details name refused changes), and what the server said."""
        end = tasks.current_time() + (float("inf") if within is None else within)
        await self._my_turn(tell)
        try:
            await self._send_most(end, tell)
            missing = await self._refused()
            if missing and not partial_too:
                raise NotDrained(
                    f"{counted(len(missing), 'change', 'was', 'were')} refused by the server and would be "
                    "missing",
                    hint="`fsd recover` says what to do with them; --partial makes the checkpoint without",
                    details=_undrained(missing),
                )
            limit = Limit(min(end - tasks.current_time(), SYNC_TIMEOUT))
            if not await limit.covers(self._empty_mappings):
                missing.append({"path": "", "reason": MAPPINGS})
                if not partial_too:
                    raise NotDrained(MAPPINGS, details=_undrained(missing))
            left = None if within is None else max(0.1, end - tasks.current_time())
            made = await self._cut(ask, partial_too, left, tell)
            missing += made["not_flushed"]
            made |= {"not_flushed": _named(missing), "not_flushed_total": len(missing)}
            self.last = {name: made.get(name) for name in ("checkpoint_id", "fs_seq", "label", "created_at")}
            return made
        finally:
            self._turn.release()

    # barriers for checkpoints from outside

    def take_ask(self, ask: BarrierAsk) -> None:
        if len(self._asks) < BARRIERS_MAX:
            self._asks.append(ask)
            self._asked.set()
        else:
            log.warning("too many checkpoints are being made from outside; one goes without this mount")

    async def answer_asks(self) -> None:
        """For ever: place each barrier that is asked for, and say what became of it."""
        async with tasks.open_nursery() as nursery:
            while True:
                await self._asked.wait()
                self._asked = tasks.Event()
                while self._asks:
                    nursery.start_soon(self._answer, self._asks.popleft())

    async def _answer(self, ask: BarrierAsk) -> None:
        """Whatever goes wrong with it, the mount goes on; who asked finds that this mount did not answer."""
        try:
            await self._place(ask)
        except Exception:
            log.exception("the barrier %d was not placed", ask.id)

    async def _place(self, ask: BarrierAsk) -> None:
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        within = ask.left_ms / 1000
        whole = False
        try:
            with tasks.move_on_after(within / 2):
                await self._empty_mappings()
                whole = True
        except Unavailable as exc:
            log.warning("mappings were not emptied for the barrier %d: %s", ask.id, exc)
        drained = await daemon.stopper.drain(within, quiet)
        left = tuple(sizes(drained.left).values())
        reason = str(drained.error) if drained.error is not None else "" if whole else MAPPINGS
        answer = partial(
            daemon.remote.answer_barrier,
            machine.volume.session,
            ask.id,
            included=not reason,
            seq=machine.volume.core.seq,
            pending=(left[0], left[1], left[2]),
            reason=reason,
        )
        try:
            await blocking(answer)
        except FsdError as exc:
            log.info("nobody waits for the barrier %d any more: %s", ask.id, exc)

    async def _my_turn(self, tell: Tell) -> None:
        while True:
            with tasks.move_on_after(TOLD_EVERY):
                await self._turn.acquire()
                return
            await tell("waiting for another checkpoint of this mount")

    def status(self) -> dict[str, Any]:
        """For `fsd status`."""
        return {"last": self.last}

    async def _send_most(self, end: float, tell: Tell) -> None:
        """From the cut on later commits wait, so what takes long is sent before it. What goes wrong here is
        told by the cut."""
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        before = await daemon.call(machine.volume.pending)
        if before is not None and (before.bytes > FLUSH_BYTES or before.files > CUT_FILES_MAX):
            left = end - tasks.current_time()
            await daemon.stopper.drain(None if left == float("inf") else max(0.1, left), tell)

    async def _refused(self) -> list[dict[str, str]]:
        """Changes the server refused before, which therefore no checkpoint holds."""
        machine = self._daemon.machine
        assert machine is not None
        found = await blocking(partial(kept, machine.volume.core.options.state_dir), abandon=False)
        return [{"path": row["path"], "reason": row["reason"]} for row in (one.to_json() for one in found)]

    async def _cut(
        self, ask: dict[str, Any], partial_too: bool, within: float | None, tell: Tell
    ) -> dict[str, Any]:
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        token = tasks.current_loop()
        ended = tasks.Event()
        errors: list[BaseException] = []

        def wake(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            with contextlib.suppress(tasks.RunFinished):  # nobody waits any more
                token.post(ended.set)

        def begin() -> tuple[Want, Callable[[], object]]:
            want = machine.volume.checkpoint(ask, partial=partial_too, within=within)
            forget = machine.watch(want, wake, within=None, request=False)
            machine.pump()
            return want, forget

        begun = await daemon.call(begin, ANSWER)
        if begun is None:
            raise silent()
        want, forget = begun
        try:
            while not ended.is_set():
                with tasks.move_on_after(TOLD_EVERY):
                    await ended.wait()
                    continue
                left = await daemon.call(machine.volume.pending)
                if left is not None:
                    text = f"{counted(left.files, 'file')}, {counted(left.bytes, 'byte')} not committed yet"
                    await tell(text + (f" ({left.reason})" if left.reason else ""))
        finally:
            machine.post(forget)
        for error in (*errors, want.error):
            if isinstance(error, FsdError) and "not_flushed" in error.details:
                error.details = _undrained(error.details["not_flushed"])
            if error is not None:
                raise error
        assert isinstance(want.result, dict)
        return dict(want.result)

    # mappings

    async def _empty_mappings(self) -> None:
        """Have the kernel write what was stored through mappings of files that are open for writing."""
        machine = self._daemon.machine
        assert machine is not None
        again: set[int] | None = None
        for _ in range(PATH_TRIES):
            found = await self._daemon.call(machine.volume.writable_files, ANSWER)
            if found is None:
                raise silent()
            files = [(ino, path) for ino, path in found if again is None or ino in again]
            if not files:
                return
            answers = await self._sync(files)
            failed = [ino for (ino, _), how in zip(files, answers) if how == syncer.FAILED[0]]
            await self._push_out(failed)
            again = {ino for (ino, _), how in zip(files, answers) if how == syncer.MOVED[0]}
            if not again:
                return
        await self._push_out(sorted(again or ()))

    async def _push_out(self, inos: list[int]) -> None:
        """The other way, for what cannot be opened by its name: before the kernel forgets an inode's pages it
        writes those that were stored to."""
        token = tasks.current_loop()
        for ino in inos:
            gone = tasks.Event()
            self._daemon.notifier.drop_pages(ino, partial(token.post, gone.set))
            await gone.wait()

    async def _sync(self, files: list[tuple[int, bytes]]) -> bytes:
        """What the helper says of each file. Its own fsyncs are answered at once: everything is committed by
        the cut that follows, and its waiting for that would be for nothing."""
        own = self._daemon.operations.own
        script = Path(syncer.__file__)
        try:
            process = await start([sys.executable, "-I", "-S", script])
        except OSError as exc:
            log.warning("the helper that empties mappings cannot be started: %s", exc)
            return syncer.FAILED * len(files)
        own.add(process.pid)
        try:
            pairs = b"".join(b"%d\0%s\0" % pair for pair in files)
            await process.stdin.send(bytes(self._daemon.place) + b"\0" + pairs)
            process.stdin.close()
            answers = b""
            async for piece in process.stdout.pieces():
                answers += piece
            await process.wait()
        except Gone as exc:
            log.warning("the helper that empties mappings failed: %s", exc)
            answers = b""
        finally:
            process.close()
            own.discard(process.pid)
        return answers.ljust(len(files), syncer.FAILED)


def _named(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """As many of them as an answer holds."""
    found, room = [], NOT_FLUSHED_BYTES
    for row in rows[:NOT_FLUSHED_MAX]:
        room -= len(json.dumps(row))
        if room < 0:
            break
        found.append(row)
    return found


def _undrained(rows: list[dict[str, str]]) -> dict[str, Any]:
    """The details of `NotDrained`."""
    return {"status": "not_drained", "not_flushed": _named(rows), "not_flushed_total": len(rows)}
