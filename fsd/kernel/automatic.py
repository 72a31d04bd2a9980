"""Checkpoints on a schedule, thinned by a rule of the user's. Main thread.

One that would show what the newest one shows is skipped. What goes wrong is told by `fsd status` and tried
again at the next turn; it never stops the mount.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fsd.kernel import tasks
from fsd.kernel.blocking import blocking
from fsd.kernel.stop import quiet
from fsd.model.errors import FsdError, UsageError
from fsd.model.limits import THINNING_STEPS
from fsd.model.times import rfc3339

if TYPE_CHECKING:
    from fsd.kernel.daemon import Daemon

log = logging.getLogger(__name__)

REASON: Final = "automatic"
TIMEOUT: Final = 300.0


class Automatic:
    """One daemon's schedule."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._seq: int | None = None  # what the newest checkpoint shows
        self._made = self._skipped = 0
        self._last_at: str | None = None
        self._problem = ""

    async def check(self) -> None:
        """Before the mount is ready: the server has to understand the rule. Raises `UsageError`."""
        keep = self._daemon.options.keep
        if keep:
            try:
                await self._there(partial(self._daemon.remote.prune, keep, dry_run=True))
            except UsageError:
                raise
            except FsdError as exc:
                self._problem = exc.message

    async def run(self) -> None:
        """For ever; returns at once where there is no schedule."""
        every = self._daemon.options.auto_checkpoint
        if not every:
            return
        while True:
            await tasks.sleep(every)
            try:
                await self._turn(min(every, TIMEOUT))
                self._problem = ""
            except (FsdError, OSError) as exc:
                self._problem = exc.message if isinstance(exc, FsdError) else str(exc)
                log.warning("no automatic checkpoint this time: %s", exc)
            except Exception as exc:
                self._problem = f"a defect: {exc!r}"
                log.exception("no automatic checkpoint this time")

    async def _turn(self, within: float) -> None:
        daemon = self._daemon
        machine = daemon.machine
        assert machine is not None
        found = await daemon.call(lambda: (machine.volume.pending(), machine.volume.core.seq))
        if found is None:
            return
        pending, seq = found
        if self._seq is None:
            newest = await self._there(daemon.remote.newest_checkpoint)
            self._seq = newest.get("fs_seq") if newest else None
        if self._seq == seq and not pending.operations and not pending.files:
            self._skipped += 1
        else:
            made = await daemon.checkpoints.create(
                {"reason": REASON}, partial_too=True, within=within, tell=quiet
            )
            self._seq = made["fs_seq"]
            self._made += 1
            self._last_at = rfc3339(daemon.options.host.wall_ns())
        keep = daemon.options.keep
        for _ in range(THINNING_STEPS if keep else 0):
            if not await self._there(partial(daemon.remote.prune, keep)):
                return

    @staticmethod
    async def _there(call: Any) -> Any:
        return await blocking(call)

    def status(self) -> dict[str, Any] | None:
        """For `fsd status`; None without a schedule."""
        options = self._daemon.options
        if not options.auto_checkpoint:
            return None
        return {
            "every_s": options.auto_checkpoint,
            "keep": options.keep or None,
            "made": self._made,
            "skipped": self._skipped,
            "last_at": self._last_at,
            "problem": self._problem or None,
        }
