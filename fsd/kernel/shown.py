"""A mount of a retained state: which one, and that the server keeps it while it is mounted. Main thread."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, Final

from fsd.host.files import write_durable
from fsd.kernel import tasks
from fsd.kernel.blocking import blocking
from fsd.kernel.options import MountOptions
from fsd.kernel.supervisor import Start
from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import MOUNT_PIN
from fsd.remote.hot import HttpRemote

log = logging.getLogger(__name__)

FILE: Final = "shown-seq"
RETRY: Final = 20.0
AGAIN: Final = 1.0


def shown_state(options: MountOptions, start: Start) -> str:
    """The state to ask about, as in a query string. A daemon that was started again goes on with the state
    the one before it showed: its checkpoint may be gone."""
    if not options.state or not start.restarts:
        return options.state
    try:
        seq = (options.state_dir / "mounts" / options.mount_id / FILE).read_text()
    except FileNotFoundError:
        return options.state
    return f"fs_seq={int(seq)}"


class ShownState:
    """Keeps the state of one mount."""

    def __init__(self, remote: HttpRemote, options: MountOptions, start: Start, directory: Path) -> None:
        self._remote, self._options, self._start, self._directory = remote, options, start, directory
        self._seq: int | None = None
        self._lost = ""

    async def take(self, session: int, stopped: tasks.Event) -> int:
        """Have the server keep the state for this session, asked again while it is away: for `ready_timeout`,
        and for ever on a restart; until a stop is asked for (`stopped`) in any case. Raises what it says when
        it does not have it."""
        failed: list[FsdError] = []

        async def take(scope: tasks.CancelScope) -> None:
            try:
                self._seq = await self._patiently(session)
            except FsdError as exc:  # raised below, on its own and not in a group
                failed.append(exc)
            scope.cancel()

        async with tasks.open_nursery() as nursery:
            nursery.start_soon(take, nursery.cancel_scope)
            await stopped.wait()
            nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]
        if self._seq is not None:
            write_durable(self._options.host, self._directory / FILE, b"%d" % self._seq, "shown")
        return session

    async def _patiently(self, session: int) -> int:
        within = math.inf if self._start.restarts else self._options.ready_timeout
        end = tasks.current_time() + within
        said = ""
        while True:
            try:
                return await self._ask(session)
            except Unavailable as exc:
                if tasks.current_time() + AGAIN > end:
                    raise
                if exc.message != said:
                    said = exc.message
                    self._start.channel.say(f"waiting: {said}")
                    log.warning("waiting: %s", said)
                await tasks.sleep(AGAIN)

    async def _ask(self, session: int) -> int:
        return await blocking(partial(self._remote.keep_state, session))

    async def keep(self, session: int) -> None:
        """Ask again, well before the server would let the state go."""
        pause = MOUNT_PIN / 3
        while True:
            await tasks.sleep(pause)
            try:
                await self._ask(session)
                self._lost, pause = "", MOUNT_PIN / 3
            except FsdError as exc:
                # Without the server nothing can be read but what is cached; with it, the reason is told.
                self._lost, pause = exc.message, RETRY
                log.warning("the server did not say that it keeps the state shown: %s", exc)

    def status(self) -> dict[str, Any] | None:
        """For `fsd status`; None for a mount of the live tree."""
        if not self._options.state:
            return None
        return {"state": self._options.state, "fs_seq": self._seq, "problem": self._lost or None}
