"""`--loop trio`: the FUSE thread on stock trio, which nobody else loads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pyfuse3
import trio

from fsd.kernel.machine import LoopWait

log = logging.getLogger(__name__)


class _TrioWait:
    """`LoopWait` on a trio event."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._error: BaseException | None = None

    def fire(self) -> None:
        self._event.set()

    def fail(self, error: BaseException) -> None:
        if not self._event.is_set():
            self._error = error
            self._event.set()

    def __await__(self) -> Any:
        yield from self._event.wait().__await__()
        if self._error is not None:
            raise self._error


class TrioLoop:
    """The fallback, `--loop trio`: pyfuse3 as its authors run it, several times the CPU a request."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._early: list[Callable[[], object]] = []
        self._guard = threading.Lock()
        self._on_idle: Callable[[], None] | None = None

    def post(self, func: Callable[[], object]) -> None:
        with self._guard:
            if self._token is None:
                self._early.append(func)
                return
        try:
            self._token.run_sync_soon(self._call, func)
        except trio.RunFinishedError:
            log.debug("a call came after the loop had ended")

    def _call(self, func: Callable[[], object]) -> None:
        try:
            func()
        except Exception:
            log.exception("a call posted to the FUSE thread failed")

    def make_wait(self) -> LoopWait:
        return _TrioWait()

    def spawn(self, func: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        return trio.lowlevel.spawn_system_task(func, name=name)

    def install(self) -> None:
        pyfuse3.trio = trio  # type: ignore[attr-defined]

    def hook(self, on_idle: Callable[[], None], on_hangup: Callable[[], None]) -> None:
        self._on_idle = on_idle

    async def _pump(self) -> None:
        # Stock trio has no idle hook worth its price; 5 ms is the fallback's flush latency.
        while True:
            await trio.sleep(0.005)
            if self._on_idle is not None:
                self._on_idle()

    def run(self, func: Callable[[], Any]) -> None:
        async def main() -> None:
            with self._guard:
                self._token = trio.lowlevel.current_trio_token()
                early, self._early = self._early, []
            for one in early:
                self._call(one)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump)
                await func()
                nursery.cancel_scope.cancel()

        trio.run(main)
