"""The FUSE session: pyfuse3 on its own thread, on *mini* or on stock trio.

The thread outlives the session: after the kernel is gone the same loop carries the last flush, until `stop`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

import pyfuse3

from fsd.kernel.extra import serve
from fsd.kernel.further import Further
from fsd.kernel.handshake import CACHE_SYMLINKS, DONT_MASK, KILLPRIV, PARALLEL, Handshake, connections
from fsd.kernel.machine import LoopWait
from fsd.kernel.mini import Scheduler
from fsd.kernel.operations import FsdOperations
from fsd.kernel.requests import INIT, keep_forgotten, may_wait, seen
from fsd.model.errors import FsdError, InternalError, Unsupported
from fsd.model.limits import PARKED_MAX

log = logging.getLogger(__name__)

# Readers kept waiting beside the one that polls; one more than are parked always exists.
MIN_TASKS: Final = 4
MAX_TASKS: Final = PARKED_MAX + MIN_TASKS + 20


class SessionLoop(Protocol):
    """Both loops: run an async function on the calling thread, take calls from other threads. `spawn` begins
    a task beside it, on the loop's thread; it raises nothing."""

    def post(self, func: Callable[[], object]) -> None: ...
    def make_wait(self) -> LoopWait: ...
    def spawn(self, func: Callable[[], Coroutine[Any, Any, None]], name: str) -> object: ...
    def run(self, func: Callable[[], Any]) -> None: ...
    def install(self) -> None: ...
    def hook(self, on_idle: Callable[[], None], on_hangup: Callable[[], None]) -> None: ...


class MiniLoop:
    """The default."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.post = self.scheduler.post
        self.make_wait = self.scheduler.make_wait
        self.run = self.scheduler.run

    def spawn(self, func: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        return self.scheduler.start(func, (), name, None)

    def install(self) -> None:
        self.scheduler.install(pyfuse3)

    def hook(self, on_idle: Callable[[], None], on_hangup: Callable[[], None]) -> None:
        self.scheduler.on_idle = on_idle
        self.scheduler.on_hangup = on_hangup


def make_loop(name: str) -> SessionLoop:
    if name == "trio":
        from fsd.kernel.trioloop import TrioLoop

        return TrioLoop()
    return MiniLoop()


class FuseSession:
    """One mounted session. `ended` is called on the FUSE thread when the kernel's side is gone, `died` when
    the loop broke; both at most once. `mount` and `start` are called on the main thread."""

    def __init__(
        self,
        loop: SessionLoop,
        operations: FsdOperations,
        mountpoint: Path,
        options: set[str],
        *,
        ended: Callable[[], None],
        died: Callable[[BaseException], None],
        own_umask: bool = False,
    ) -> None:
        """`own_umask`: the kernel is to leave the umask to the handlers."""
        self._loop = loop
        self._operations = operations
        self._mountpoint = mountpoint
        self._options = options
        self._ended = ended
        self._died = died
        self._own_umask = own_umask
        self._handshake: Handshake | None = None
        self._stop: LoopWait | None = None
        self._stop_asked = False
        self.connection = -1  # its descriptor, from `mount` on
        self.thread = threading.Thread(target=self._run, name="fsd-fuse", daemon=True)

    def mount(self, fd: int | None = None) -> None:
        """Ask the kernel for the mount. `fd`: the connection of one that is made already, or will be by the
        caller. Raises `Unsupported` with what to do when the kernel refuses."""
        self._loop.install()
        serve(Further(self._operations, self._loop.spawn).start)
        options = {*pyfuse3.default_options, *self._options}
        # libfuse takes this name for a connection that is open.
        where = str(self._mountpoint) if fd is None else f"/dev/fd/{fd}"
        others = connections()
        try:
            pyfuse3.init(self._operations, where, options)
        except FsdError:
            raise
        except RuntimeError as exc:
            raise Unsupported(
                f"the kernel refused to mount at {self._mountpoint} ({exc})",
                hint="see the log for libfuse's own words; `fsd doctor` says what is missing here",
            ) from exc
        made = connections() - others if fd is None else {fd}
        self.connection = made.pop() if made else -1
        self._handshake = Handshake(self.connection, self._choose)

    def _choose(self, offered: int) -> int:
        """What is asked of the kernel beside what libfuse asks."""
        wanted = PARALLEL | CACHE_SYMLINKS
        if self._own_umask:
            wanted |= DONT_MASK
        if seen(INIT):
            wanted |= KILLPRIV
            if isinstance(self._loop, MiniLoop):  # it reads without blocking
                keep_forgotten()
                self._loop.scheduler.on_news = self._operations.answer_ahead()
                self._loop.scheduler.may_wait = may_wait()
        self._operations.told_of_privileges = bool(wanted & offered & KILLPRIV)
        return wanted

    def start(self) -> None:
        self.thread.start()
        if self._handshake is not None:
            self._handshake.start()

    def answered(self) -> None:
        """A request was answered: the session is under way."""
        if self._handshake is not None:
            self._handshake.close()
            self._handshake = None

    def terminate(self) -> None:
        """End the session from this side, whatever the kernel thinks; any thread."""
        self._loop.post(pyfuse3.terminate)

    def stop(self) -> None:
        """End the loop once the session is over; any thread."""
        self._loop.post(self._stop_now)

    def _stop_now(self) -> None:
        self._stop_asked = True
        if self._stop is not None:
            self._stop.fire()

    def _run(self) -> None:
        try:
            self._loop.run(self._main)
        except BaseException as exc:
            log.critical("the FUSE loop broke", exc_info=exc)
            self._died(exc if isinstance(exc, Exception) else InternalError(str(exc)))

    async def _main(self) -> None:
        await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
        self._stop = self._loop.make_wait()
        self._ended()
        if not self._stop_asked:
            await self._stop
