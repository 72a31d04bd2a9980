"""*mini*: the small scheduler that takes the place of `trio` inside pyfuse3.

pyfuse3 looks its module global `trio` up at run time (the hook its own asyncio layer uses). Stock trio costs
78 µs of CPU a lookup, this 11–21. The whole FUSE session runs on one thread inside `Scheduler.run`; handlers
run inline and may await nothing but a `Wait` of this scheduler.

Rules that are not obvious, each from a fault that was seen:

- The read lock is just freed on release; a waiter is woken only before the loop would sleep, that is when
  the holder has really parked. Handing it on makes two workers alternate on every request.
- What is ready runs before polling, never the other way round.
- A worker that would wait polls itself, in the place where it stands, and goes on when its request is there:
  being parked, the turn of the loop and being resumed were a sixth of the CPU of a request. It is parked as
  soon as something else is ready, which then runs. Where the receiving function can wait (`may_wait`), even
  the poll is left to it.
- The FUSE descriptor is non-blocking: the kernel drops a killed client's unread request, and a blocking read
  would then hold the GIL for ever. The EAGAIN that follows ends pyfuse3's worker; the nursery starts the same
  worker again, so pyfuse3's own count stays right.
- POLLERR (unmounted, aborted) is reported as readable: the read gets ENODEV and libfuse ends the session.
  With no reader left the loop itself sees it and calls `on_hangup`.
- Waits end only by being fired; nothing can be cancelled. At shutdown every outstanding one is failed.
- Other threads append to a deque and then write the eventfd unless it is armed; the loop disarms, reads the
  eventfd, then drains, and only on its own thread, so an answer cannot overtake the handler's own park.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, Final

from fsd.model.limits import WORKER_DEATHS_MAX

log = logging.getLogger(__name__)

_GONE: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


class ClosedResourceError(Exception):
    """What `wait_readable` raises after `notify_closing`; pyfuse3 looks for this name."""


class Wait:
    """A one-shot event a handler awaits. Created, fired and awaited on the scheduler's thread only; other
    threads use `Scheduler.post` to get there. The first `fire` or `fail` counts, later ones do nothing."""

    __slots__ = ("_error", "_fired", "_scheduler", "_task", "_value")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._task: Task | None = None
        self._fired = False
        self._error: BaseException | None = None
        self._value: object = None

    @property
    def fired(self) -> bool:
        return self._fired

    def fire(self, value: object = None) -> None:
        if not self._fired:
            self._fired = True
            self._value = value
            if self._task is not None:
                self._scheduler.resume(self._task)

    def fail(self, error: BaseException) -> None:
        if not self._fired:
            self._error = error
            self.fire()

    def __await__(self) -> Generator[Wait, None, Any]:
        if not self._fired:
            yield self
        if self._error is not None:
            raise self._error
        return self._value

    def parked_by(self, task: Task) -> None:
        """Called by the scheduler when `task` has yielded this wait."""
        self._task = task
        if self._fired:
            self._scheduler.resume(task)


_ENDED: Final[Any] = iter(())


class _Nothing:
    """To await it takes no waiting, and makes no coroutine."""

    __slots__ = ()

    def __await__(self) -> Generator[Wait, None, None]:
        return _ENDED  # type: ignore[no-any-return]


_NOTHING: Final = _Nothing()


class Task:
    """One coroutine the scheduler steps. `name` is what pyfuse3 asks for."""

    __slots__ = ("call", "coro", "name", "nursery")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        name: str,
        nursery: Nursery | None,
        call: tuple[Callable[..., Any], tuple[Any, ...]],
    ) -> None:
        self.coro = coro
        self.name = name
        self.nursery = nursery
        self.call = call


class Lock:
    """pyfuse3's read lock. Barging: `release` only clears it. Not a general lock: its users must be
    interchangeable, as pyfuse3's workers are."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.locked = False
        self.waiters: deque[Wait] = deque()

    def __aenter__(self) -> Awaitable[None]:
        if self.locked:
            return self._freed()
        self.locked = True
        return _NOTHING

    async def _freed(self) -> None:
        while self.locked:
            wait = Wait(self._scheduler)
            self.waiters.append(wait)
            await wait
        self.locked = True

    def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> Awaitable[None]:
        self.locked = False
        return _NOTHING


class Nursery:
    """Counts its children; leaving the block waits until there are none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._children = 0
        self._parent: Wait | None = None

    async def __aenter__(self) -> Nursery:
        return self

    def start_soon(self, func: Callable[..., Any], *args: Any, name: str | None = None) -> None:
        self._children += 1
        self._scheduler.start(func, args, name or str(getattr(func, "__name__", "task")), self)

    def child_ended(self) -> None:
        self._children -= 1
        if self._children == 0 and self._parent is not None:
            self._parent.fire()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._children:
            self._parent = Wait(self._scheduler)
            await self._parent


class Scheduler:
    """The run loop. One per FUSE session, run once, on one thread.

    `on_idle` is called on that thread whenever everything ready has run and the loop is about to sleep; it
    may start tasks and fire waits. `on_news` is called before anything is done but go on from one request to
    the next: before a task begins or is resumed, and before the call of a post or of a watched descriptor.
    `may_wait` is told a descriptor where whoever reads next may wait itself, until there is something to read
    or that descriptor is readable. `on_hangup` is called once when the FUSE descriptor reports an error while
    no worker reads it. `before_read` is a hook for tests, between poll and read.
    """

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] | None = None
        self.on_news: Callable[[], None] | None = None
        self.may_wait: Callable[[int], None] | None = None
        self.on_hangup: Callable[[], None] | None = None
        self.before_read: Callable[[], None] | None = None
        self._ready: deque[tuple[Task, BaseException | None]] = deque()
        self._inbox: deque[Callable[[], object]] = deque()
        self._armed = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readers: dict[int, Wait] = {}
        self._known: set[int] = set()
        self._closed: set[int] = set()
        self._hung: set[int] = set()
        self._watched: dict[int, Callable[[], object]] = {}
        self._locks: list[Lock] = []
        self._current: Task | None = None
        self._thread: int | None = None
        self._deaths = 0
        self._ended = False
        self._failure: BaseException | None = None
        # Two pollers, so that going from "reading" to "all parked" changes no set: the second asks for
        # nothing on the FUSE descriptor and is still told of errors there.
        self._poll_reading = select.poll()
        self._poll_parked = select.poll()
        for poller in (self._poll_reading, self._poll_parked):
            poller.register(self._eventfd, select.POLLIN)

    # -- from any thread

    def post(self, func: Callable[[], object]) -> None:
        """Have `func` called on the scheduler's thread soon. Its exceptions are logged."""
        self._inbox.append(func)
        if not self._armed:
            self._armed = True
            os.eventfd_write(self._eventfd, 1)

    def notify_closing(self, fd: int) -> None:
        """Make every present and later `wait_readable(fd)` raise `ClosedResourceError`."""
        self._closed.add(fd)
        self.post(lambda: self._close_reader(fd))

    # -- on the scheduler's thread

    def make_wait(self) -> Wait:
        return Wait(self)

    def watch(self, fd: int, func: Callable[[], object]) -> None:
        """Call `func` whenever `fd` is readable or in error, until `unwatch`. Its exceptions are logged."""
        self._watched[fd] = func
        self._poll_reading.register(fd, select.POLLIN)
        self._poll_parked.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Also after `fd` was closed, before the loop goes on."""
        if self._watched.pop(fd, None) is not None:
            self._poll_reading.unregister(fd)
            self._poll_parked.unregister(fd)

    def make_lock(self) -> Lock:
        lock = Lock(self)
        self._locks.append(lock)
        return lock

    def open_nursery(self) -> Nursery:
        return Nursery(self)

    def start(
        self, func: Callable[..., Any], args: tuple[Any, ...], name: str, nursery: Nursery | None
    ) -> Task:
        task = Task(func(*args), name, nursery, (func, args))
        self._ready.append((task, None))
        return task

    def resume(self, task: Task) -> None:
        self._ready.append((task, None))

    def current_task(self) -> Task:
        assert self._current is not None, "outside of a task"
        return self._current

    def wait_readable(self, fd: int) -> Awaitable[None]:
        """Until `fd` is readable or in error. The first call makes it non-blocking. Polls before it returns:
        to be awaited at once."""
        if fd not in self._known:
            self._adopt(fd)
        if self._ready or not self._polled(fd):
            return self._parked(fd)
        if self.before_read is not None:
            self.before_read()
        return _NOTHING

    def _polled(self, fd: int) -> bool:
        """Poll until `fd` is readable (True) or the worker has to be parked: for what is ready, or because of
        an end. What breaks here breaks the loop, as in its own turn, and not the worker."""
        try:
            while fd not in self._closed and fd not in self._hung:
                if self.on_idle is not None:
                    self.on_idle()
                if self._ready:
                    return False
                if self._may_wait():
                    return True
                if self._poll(self._poll_reading, fd):
                    return True
                if self._ready:
                    return False
        except BaseException as exc:  # noqa: BLE001 - `run` raises it
            self._failure = exc
        return False

    def _may_wait(self) -> bool:
        """Leave the waiting to the next read, where nothing but a post can end it too."""
        if self.may_wait is None or self._armed or self._watched or self.before_read is not None:
            return False
        self.may_wait(self._eventfd)
        return True

    async def _parked(self, fd: int) -> None:
        if fd in self._closed:
            raise ClosedResourceError
        if fd not in self._hung:
            wait = Wait(self)
            self._readers[fd] = wait
            await wait
        if self.before_read is not None:
            self.before_read()

    def run(self, func: Callable[[], Awaitable[Any]]) -> None:
        """Run `func()` to its end. Raises what it raised, or the error that made workers die for good."""
        self._thread = threading.get_ident()
        failed: list[BaseException] = []

        async def main() -> None:
            try:
                await func()
            except Exception as exc:  # noqa: BLE001 - handed to the caller below
                failed.append(exc)
            self._ended = True

        self.start(main, (), "main", None)
        while not self._over():
            self._turn()
        if failed or self._failure is not None:
            raise failed[0] if failed else (self._failure or RuntimeError("unreachable"))

    def _over(self) -> bool:
        return self._ended or self._failure is not None

    def _turn(self) -> None:
        ready = self._ready
        while ready:
            self._step(*ready.popleft())
        # A request that a task ended without answering fails when it is dropped, so nothing here keeps one.
        self._current = None
        if self._over():
            return
        if self.on_idle is not None:
            self.on_idle()
        if not ready:
            self._wake_a_worker()
        if not ready:
            self._sleep()

    def _step(self, task: Task, error: BaseException | None) -> None:
        self._current = task
        if self.on_news is not None:
            self.on_news()
        try:
            trap = task.coro.send(None) if error is None else task.coro.throw(error)
        except StopIteration:
            if task.nursery is not None:
                task.nursery.child_ended()
        except Exception as exc:  # noqa: BLE001 - decided in _died
            self._died(task, exc)
        else:
            if type(trap) is Wait:
                trap.parked_by(task)
            else:
                text = f"{task.name} awaited {trap!r}: on the FUSE thread only mini's own waits work"
                self._ready.append((task, RuntimeError(text)))

    def _died(self, task: Task, exc: Exception) -> None:
        if task.nursery is None:
            self._failure = exc
            return
        again = isinstance(exc, OSError) and exc.errno == errno.EAGAIN
        if not again:
            self._deaths += 1
            log.error("%s ended by an exception; its request is lost", task.name, exc_info=exc)
            if self._deaths > WORKER_DEATHS_MAX:
                self._failure = exc
                return
        func, args = task.call
        self.start(func, args, task.name, task.nursery)

    def _wake_a_worker(self) -> None:
        for lock in self._locks:
            if not lock.locked and lock.waiters:
                lock.waiters.popleft().fire()

    def _sleep(self) -> None:
        self._poll(self._poll_reading if self._readers else self._poll_parked)

    def _poll(self, poller: select.poll, mine: int = -1) -> bool:
        """Do what has come, but for `mine`: whether that is readable or in error."""
        found = False
        for fd, event in poller.poll():
            if fd == mine:
                found = True
                continue
            if self.on_news is not None:
                self.on_news()
            if fd == self._eventfd:
                self._drain()
            elif (watching := self._watched.get(fd)) is not None:
                self._call(watching)
            elif (wait := self._readers.pop(fd, None)) is not None:
                wait.fire()
            elif event & _GONE and fd in self._known:
                self._hangup(fd)
        return found

    def _drain(self) -> None:
        # Read before disarming: a post between the two finds it armed and writes nothing, and its call is in
        # the inbox already. The other way round the read could swallow the write of a post that had armed it
        # again, and no later post would ever write.
        os.eventfd_read(self._eventfd)
        self._armed = False
        inbox = self._inbox
        while inbox:
            self._call(inbox.popleft())

    @staticmethod
    def _call(func: Callable[[], object]) -> None:
        try:
            func()
        except Exception:
            log.exception("a call posted to the FUSE thread failed")

    def _adopt(self, fd: int) -> None:
        self._known.add(fd)
        os.set_blocking(fd, False)
        self._poll_reading.register(fd, select.POLLIN)
        self._poll_parked.register(fd, 0)

    def _close_reader(self, fd: int) -> None:
        wait = self._readers.pop(fd, None)
        if wait is not None:
            wait.fail(ClosedResourceError())

    def _hangup(self, fd: int) -> None:
        self._hung.add(fd)
        self._poll_reading.unregister(fd)
        self._poll_parked.unregister(fd)
        if self.on_hangup is not None:
            self.on_hangup()

    def close(self) -> None:
        """Free the eventfd; after `run` has returned and no thread posts any more."""
        # Who posts all the same writes to no descriptor: the number may be another file's by then.
        self._armed = True
        os.close(self._eventfd)

    def as_trio(self) -> SimpleNamespace:
        """The names pyfuse3 3.5.0 uses of `trio`; tests/unit/test_mini.py checks the list."""
        return SimpleNamespace(
            Lock=self.make_lock,
            open_nursery=self.open_nursery,
            ClosedResourceError=ClosedResourceError,
            lowlevel=SimpleNamespace(
                current_task=self.current_task,
                current_trio_token=lambda: self,
                wait_readable=self.wait_readable,
                notify_closing=self.notify_closing,
            ),
        )

    def install(self, pyfuse3: ModuleType) -> None:
        """Take trio's place in `pyfuse3`; before `pyfuse3.init`."""
        pyfuse3.trio = self.as_trio()  # type: ignore[attr-defined]
