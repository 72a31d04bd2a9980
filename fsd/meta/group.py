"""Group commit: callers that wait are run together by one of them, in one transaction.

There is no writer thread: an idle database runs a request on the thread that brought it, which saves two
thread switches (200–340 us measured on a busy interpreter) of every small fsync. While `leaders` callers
run, others queue; a leader takes what queues up into its transaction, at most DB_GROUP_MAX and for
DB_GROUP_TIME, and hands leadership to the first one left over. So an answer never waits for a later
transaction, and a small one not for many large ones.

An error that is raised on the caller's thread leads, by the frames it came through, to those of the leader
and of the engine. Where one of them had a name for it left, that circle would keep all that the request
holds, the body of a commit among it, until the collector comes, which is seldom: so they let go of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar, cast

from fsd.meta.database import Tx
from fsd.model.errors import InternalError, Unavailable
from fsd.model.limits import DB_GROUP_MAX, DB_GROUP_TIME, DB_QUEUE_MAX

T = TypeVar("T")


class Request:
    """One call of `write`. A leader sets `value` or `error` and `settled`, and then releases `ready`, once;
    nobody else touches them."""

    __slots__ = ("error", "fn", "lead", "ready", "settled", "value")

    def __init__(self, fn: Callable[[Tx], Any]) -> None:
        self.fn = fn
        self.value: Any = None
        self.error: BaseException | None = None
        self.settled = False
        self.lead = False
        self.ready = threading.Lock()  # an event makes and takes more of them
        self.ready.acquire()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.settled = True

    def succeed(self, value: Any) -> None:
        self.value = value
        self.error = None
        self.settled = True


Ended: TypeAlias = list[tuple[Request, Any, BaseException | None]]  # with the value or the error


def settle(ended: Ended) -> None:
    """Tell each how it ended, once all of it is durable."""
    for request, value, error in ended:
        if error is None:
            request.succeed(value)
        else:
            request.fail(error)


class Gathering:
    """What a leader runs: iterating gives its own request first, then those that wait meanwhile, which are
    then the leader's to settle. Iterating again gives the same ones first."""

    def __init__(self, first: Request, take: Callable[[], Request | None]) -> None:
        self.taken = [first]
        self._take = take

    def __iter__(self) -> Iterator[Request]:
        at = 0
        while at < len(self.taken):
            yield self.taken[at]
            at += 1
            if at == len(self.taken) and at < DB_GROUP_MAX:
                request = self._take()
                if request is not None:
                    self.taken.append(request)


class GroupCommit:
    """`run(gathering)` is called by at most `leaders` threads at a time and settles all it took."""

    def __init__(
        self, run: Callable[[Gathering], None], leaders: int, monotonic: Callable[[], float]
    ) -> None:
        self._run = run
        self._monotonic = monotonic
        self._leaders = leaders
        self._mutex = threading.Lock()
        self._idle = threading.Condition(self._mutex)
        self._queue: deque[Request] = deque()
        self._busy = 0
        self._closed = False
        self._inside = threading.local()

    def submit(self, fn: Callable[[Tx], T]) -> T:
        """The value of `fn`, run in a transaction; raises what it raised, `Unavailable` when the queue is
        full or the database closed."""
        if getattr(self._inside, "running", False):
            raise InternalError("a transaction was begun inside a transaction")
        request = Request(fn)
        with self._mutex:
            if self._closed:
                raise Unavailable("the database is closed", hint="the server is stopping; try again")
            if self._busy < self._leaders:
                self._busy += 1
                request.lead = True
            elif len(self._queue) >= DB_QUEUE_MAX:
                raise Unavailable(f"{DB_QUEUE_MAX} writes are waiting", hint="try again in a moment")
            else:
                self._queue.append(request)
        if not request.lead:
            request.ready.acquire()
        if not request.settled:
            self._lead(request)
        error, request.error = request.error, None
        if error is None:
            return cast(T, request.value)
        try:
            raise error
        finally:
            del error

    def _lead(self, request: Request) -> None:
        end = self._monotonic() + DB_GROUP_TIME
        gathering = Gathering(request, lambda: self._take() if self._monotonic() < end else None)
        self._inside.running = True
        try:
            self._run(gathering)
        finally:
            self._inside.running = False
            for one in gathering.taken:
                if not one.settled:  # only after a KeyboardInterrupt or the like on this thread
                    one.fail(Unavailable("the write was interrupted"))
                if one is not request:
                    one.ready.release()
            self._hand_over()

    def _take(self) -> Request | None:
        with self._mutex:
            return self._queue.popleft() if self._queue else None

    def _hand_over(self) -> None:
        with self._mutex:
            if self._queue:
                heir = self._queue.popleft()
                heir.ready.release()
            else:
                self._busy -= 1
                if self._closed:  # else nobody waits for that
                    self._idle.notify_all()

    def close(self) -> None:
        """Refuse new requests and wait for those that run or wait."""
        with self._mutex:
            self._closed = True
            while self._busy:
                self._idle.wait()
