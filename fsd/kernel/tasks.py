"""Tasks of the daemon's main thread: nurseries, cancel scopes, timers, descriptors.

The rules are trio's, as far as they go; trio itself is not loaded, since it is half of what a daemon would
load (docs/decisions.md):

- A task runs until it waits. Every wait is one `park`; who ends it calls `Loop.wake`, once.
- Unlike trio's, a call that need not wait does not: what has happened by a deadline (an `Event` is set, a
  `Lock` is free) has happened, and is not cancelled. A loop around such calls must wait somewhere.
- A cancel scope that is cancelled, or whose deadline is over, raises `Cancelled` in every wait within it,
  again and again, until its `with` catches it. A shielded scope keeps out what is cancelled around it.
- A nursery ends when its tasks have ended. What one of them raises cancels the others and is raised by it: as
  it is, or several as a group.

One loop a process at a time. All but `Loop.post` is for its thread alone.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import threading
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from itertools import count
from typing import Any, Final, TypeVar

from fsd.model.errors import Unavailable
from fsd.model.limits import CALLS_MAX

T = TypeVar("T")
FOREVER: Final = float("inf")
# `poll` takes milliseconds in 31 bits.
LONGEST: Final = 86_400.0


class Cancelled(BaseException):
    """A scope around this wait is over. For scopes to catch."""


class TooSlow(Exception):
    """`fail_after` or `fail_at` was over before what it covers."""


class RunFinished(RuntimeError):
    """The loop has ended."""


class Clock:
    """Time as tasks see it, and how it passes while there is nothing to do."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, poll: select.poll, seconds: float) -> list[tuple[int, int]]:
        """Until a descriptor is ready, at most so long."""
        return poll.poll(None if seconds == FOREVER else min(seconds, LONGEST) * 1000)


class Task:
    """One coroutine. `abort` takes it out of where it waits; None: it does not, or cannot be cancelled."""

    __slots__ = ("abort", "coroutine", "nursery", "scope")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], nursery: Nursery | None, scope: CancelScope | None
    ) -> None:
        self.coroutine = coroutine
        self.nursery = nursery
        self.scope = scope
        self.abort: Callable[[], object] | None = None


class Loop:
    """Runs the tasks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.current: Task | None = None
        self._tasks: set[Task] = set()
        self._ready: deque[tuple[Task, Any, BaseException | None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()
        self._posted: deque[Callable[[], object]] = deque()
        self._guard = threading.Lock()
        self._finished = False
        self._result: list[tuple[Any, BaseException | None]] = []
        self._poll = select.poll()
        self._waiting: dict[int, Task] = {}
        self._calls = 0  # of `in_thread` whose thread has not ended
        self._wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wakes, select.POLLIN)

    # what other threads call

    def post(self, func: Callable[..., object], *args: Any) -> None:
        """Have `func` called by the loop; it must not raise. Raises `RunFinished` when nobody calls it any
        more."""
        with self._guard:
            if self._finished:
                raise RunFinished("the loop has ended")
            self._posted.append(lambda: func(*args))
            self._stir()

    def _stir(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it wakes as it is
            os.write(self._waker, b"w")

    def on_signal(self, func: Callable[[], object]) -> None:
        """`post` from a signal handler, which may have interrupted one."""
        self._posted.append(func)
        self._stir()

    # tasks

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], nursery: Nursery | None, scope: CancelScope | None
    ) -> Task:
        task = Task(coroutine, nursery, scope)
        self._tasks.add(task)
        self._ready.append((task, None, None))
        return task

    def wake(self, task: Task, value: Any = None, error: BaseException | None = None) -> None:
        """End the wait of `task`, which waits."""
        task.abort = None
        self._ready.append((task, value, error))

    def look_for_cancelled(self) -> None:
        """A scope was cancelled: end the waits in it."""
        for task in [one for one in self._tasks if one.abort is not None and over(one.scope)]:
            self._cancel(task)

    def _cancel(self, task: Task) -> None:
        assert task.abort is not None
        task.abort()
        self.wake(task, error=Cancelled())

    def _step(self, task: Task, value: Any, error: BaseException | None) -> None:
        self.current = task
        try:
            coroutine = task.coroutine
            task.abort = coroutine.throw(error) if error is not None else coroutine.send(value)
        except StopIteration as ended:
            self._ended(task, ended.value, None)
        except BaseException as exc:  # noqa: BLE001 - raised by the nursery, or by `run`
            self._ended(task, None, exc)
        else:
            if task.abort is not None and over(task.scope):
                self._cancel(task)
        finally:
            self.current = None

    def _ended(self, task: Task, value: Any, error: BaseException | None) -> None:
        self._tasks.discard(task)
        if task.nursery is None:
            self._result.append((value, error))
        else:
            task.nursery.child_ended(task, error)

    # timers

    def at(self, when: float, func: Callable[[], object]) -> Callable[[], None]:
        """Call `func` then; what is returned takes that back."""
        timer = (when, next(self._number), func)
        heapq.heappush(self._timers, timer)

        def take_back() -> None:
            if timer in self._timers:
                self._timers.remove(timer)
                heapq.heapify(self._timers)

        return take_back

    # the loop

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        self.spawn(main, None, None)
        try:
            while not self._result:
                self._turn()
        finally:
            with self._guard:
                self._finished = True
                os.close(self._waker)
                os.close(self._wakes)
        value, error = self._result[0]
        if error is not None:
            raise error
        result: T = value
        return result

    def _turn(self) -> None:
        for _ in range(len(self._ready)):
            self._step(*self._ready.popleft())
        if self._result:
            return
        idle = not self._ready and not self._posted
        until = self._timers[0][0] - self.clock.now() if self._timers else FOREVER
        for fd, _events in self.clock.wait(self._poll, max(0.0, until) if idle else 0.0):
            if fd == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd in self._waiting:
                self.wake(self._waited(fd))
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        now = self.clock.now()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    # threads, descriptors and signals

    async def call(self, work: Callable[[], T], abandon: bool) -> T:
        """See `in_thread`."""
        task, given_up = _this_task()[1], False

        def ended(value: Any, error: BaseException | None) -> None:
            self._calls -= 1
            if not given_up:
                self.wake(task, value, error)

        def run() -> None:
            value, error = None, None
            try:
                value = work()
            except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
                error = exc
            with contextlib.suppress(RunFinished):
                self.post(ended, value, error)

        def give_up() -> None:
            nonlocal given_up
            given_up = True

        if self._calls >= CALLS_MAX:
            raise Unavailable(f"{CALLS_MAX} calls of this process have not ended", hint="try again later")
        threading.Thread(target=run, name="fsd-call", daemon=True).start()
        self._calls += 1
        result: T = await park(give_up if abandon else None)
        return result

    async def until_ready(self, fd: int, events: int) -> None:
        assert self.current is not None
        assert fd not in self._waiting, "one task waits for a descriptor"
        self._waiting[fd] = self.current
        self._poll.register(fd, events)
        await park(lambda: self._waited(fd))

    def _waited(self, fd: int) -> Task:
        self._poll.unregister(fd)
        return self._waiting.pop(fd)

    @contextlib.contextmanager
    def waking_signals(self) -> Iterator[None]:
        """A signal ends the loop's wait, whichever thread it reached."""
        before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)


_loop: Loop | None = None


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any, clock: Clock | None = None) -> T:
    """What `main` returns, run here with all tasks it starts."""
    global _loop
    before, _loop = _loop, Loop(clock or Clock())
    try:
        return _loop.run(main(*args))
    finally:
        _loop = before


def current_loop() -> Loop:
    assert _loop is not None, "outside of tasks.run"
    return _loop


def current_time() -> float:
    return current_loop().clock.now()


def _this_task() -> tuple[Loop, Task]:
    loop = current_loop()
    assert loop.current is not None
    return loop, loop.current


@types.coroutine
def park(abort: Callable[[], object] | None) -> Generator[Callable[[], object] | None, Any, Any]:
    """Wait for `Loop.wake`. When a scope ends it, `abort` is called first, so that nobody wakes it a second
    time; None: it cannot be cancelled."""
    return (yield abort)


# scopes


def over(scope: CancelScope | None) -> bool:
    """Whether `scope` or one around it is cancelled, as far as no shield is between."""
    while scope is not None:
        if scope.cancel_called:
            return True
        if scope.shield:
            return False
        scope = scope.around
    return False


class CancelScope:
    """`with CancelScope()`: what waits in it can be cancelled, by `cancel` and by `deadline`."""

    def __init__(self, *, deadline: float = FOREVER, shield: bool = False) -> None:
        self.deadline = deadline
        self.shield = shield
        self.cancel_called = False
        self.cancelled_caught = False
        self.around: CancelScope | None = None
        self._task: Task | None = None
        self._take_back: Callable[[], None] | None = None

    def cancel(self) -> None:
        if not self.cancel_called:
            self.cancel_called = True
            current_loop().look_for_cancelled()

    def __enter__(self) -> CancelScope:
        loop, task = _this_task()
        self._task, self.around, task.scope = task, task.scope, self
        if self.deadline <= loop.clock.now():
            self.cancel()
        elif self.deadline != FOREVER:
            self._take_back = loop.at(self.deadline, self.cancel)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        assert self._task is not None
        self._task.scope = self.around
        if self._take_back is not None:
            self._take_back()
        # A scope around it that is cancelled too catches it instead, and waits end at once until it does.
        if isinstance(error, Cancelled) and self.cancel_called and not over(self.around):
            self.cancelled_caught = True
        return self.cancelled_caught


def move_on_at(deadline: float) -> CancelScope:
    return CancelScope(deadline=deadline)


def move_on_after(seconds: float) -> CancelScope:
    return move_on_at(current_time() + seconds)


@contextlib.contextmanager
def fail_at(deadline: float) -> Iterator[CancelScope]:
    with move_on_at(deadline) as scope:
        yield scope
    if scope.cancelled_caught:
        raise TooSlow


def fail_after(seconds: float) -> contextlib.AbstractContextManager[CancelScope]:
    return fail_at(current_time() + seconds)


class Nursery:
    """`async with open_nursery()`: tasks that end before it does."""

    def __init__(self) -> None:
        self.cancel_scope = CancelScope()
        self._children: set[Task] = set()
        self._errors: list[BaseException] = []
        self._parent: Task | None = None

    def start_soon(self, func: Callable[..., Awaitable[object]], *args: Any) -> None:
        async def child() -> None:
            await func(*args)

        self._children.add(current_loop().spawn(child(), self, self.cancel_scope))

    def child_ended(self, task: Task, error: BaseException | None) -> None:
        self._children.discard(task)
        if error is not None and not isinstance(error, Cancelled):
            self._errors.append(error)
            self.cancel_scope.cancel()
        if not self._children and self._parent is not None:
            parent, self._parent = self._parent, None
            current_loop().wake(parent)

    async def __aenter__(self) -> Nursery:
        self.cancel_scope.__enter__()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            if not isinstance(error, Cancelled):
                self._errors.append(error)
            self.cancel_scope.cancel()
        await self._children_ended()
        self.cancel_scope.__exit__(None, None, None)
        if len(self._errors) > 1:
            raise BaseExceptionGroup("several tasks failed", self._errors)
        if self._errors:
            if self._errors[0] is error:
                return False
            raise self._errors[0]
        if over(self.cancel_scope.around):
            if isinstance(error, Cancelled):
                return False
            if self.cancel_scope.cancel_called:
                raise Cancelled
        return True

    async def _children_ended(self) -> None:
        abort: Callable[[], object] | None = self._no_parent
        while self._children:
            self._parent = _this_task()[1]
            try:
                await park(abort)
            except Cancelled:  # they are told themselves; they are waited for all the same
                abort = None
                self.cancel_scope.cancel()

    def _no_parent(self) -> None:
        self._parent = None


def open_nursery() -> Nursery:
    return Nursery()


# what tasks wait for


class Event:
    """Happens once."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            current_loop().wake(task)

    async def wait(self) -> None:
        if not self._set:
            task = _this_task()[1]
            self._waiting.append(task)
            await park(lambda: self._waiting.remove(task))


class Lock:
    """Who waits first has it first."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Task] = deque()

    async def acquire(self) -> None:
        if self._held:
            task = _this_task()[1]
            self._waiting.append(task)
            await park(lambda: self._waiting.remove(task))
        self._held = True

    def release(self) -> None:
        if self._waiting:  # it stays held: nobody comes between
            current_loop().wake(self._waiting.popleft())
        else:
            self._held = False


async def sleep_until(deadline: float) -> None:
    loop, task = _this_task()
    await park(loop.at(deadline, lambda: loop.wake(task)))


async def sleep(seconds: float) -> None:
    await sleep_until(current_time() + seconds)


async def wait_readable(fd: int) -> None:
    await current_loop().until_ready(fd, select.POLLIN)


async def wait_writable(fd: int) -> None:
    await current_loop().until_ready(fd, select.POLLOUT)


async def in_thread(call: Callable[[], T], *, abandon: bool) -> T:
    """`call()` on a thread of its own; with `abandon` who is cancelled does not wait for its end. Raises what
    it raises, `RuntimeError` where the system has no thread, and `Unavailable` where CALLS_MAX have not
    ended, those left behind included."""
    return await current_loop().call(call, abandon)


class Signals:
    """`with Signals(…) as arrived: await arrived.next()`: the signals that came, one after the other. Main
    thread."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._came: deque[int] = deque()
        self._news = Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        loop = current_loop()

        def handle(number: int, frame: object) -> None:
            loop.on_signal(lambda: self._take(number))

        self._stack.enter_context(loop.waking_signals())
        for number in self._numbers:
            self._stack.callback(signal.signal, number, signal.signal(number, handle))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _take(self, number: int) -> None:
        self._came.append(number)
        self._news.set()

    async def next(self) -> int:
        while not self._came:
            self._news = Event()
            await self._news.wait()
        return self._came.popleft()
