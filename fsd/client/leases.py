"""Leases and conflicts over HTTP, and `fsd lock`: a command that runs while a lock is held.

`Leases` may be used from any thread; `locked` belongs to the main thread (signals). `hold` is for who does
something itself meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

from fsd.client.command import not_ignored, not_started, wait
from fsd.client.files import json_name
from fsd.client.http import Http, encode_path
from fsd.host import threads
from fsd.model.errors import FsdError, LeaseHeld, LeaseLost, LockLost, Unavailable
from fsd.model.limits import LIST_PAGE_MAX
from fsd.model.names import show
from fsd.model.plain import dataclass

JsonObject = dict[str, Any]
PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ASK_AGAIN: Final = 0.25  # seconds, growing to
ASK_SLOWLY: Final = 2.0
LOOK: Final = 0.1
COMMAND_SHOWN: Final = 200  # characters
KILL_AFTER: Final = 10.0  # seconds a command has to end after its lock was lost


class Leases:
    """The leases of one filesystem, and what its mounts' conflicts left."""

    def __init__(self, http: Http, file_system_id: str | None = None) -> None:
        self.http = http
        self._root = f"/v1/file-systems/{file_system_id or http.identity.file_system_id}"
        self._base = f"{self._root}/leases"

    def held(self) -> list[JsonObject]:
        """Those that are held: writer leases of mounts, and locks."""
        found: list[JsonObject] = self.http.json("GET", self._base)["leases"]
        return found

    def conflicts(self, top: bytes) -> Iterator[JsonObject]:
        """What conflicts put beside below `top`, or meant for it, and nobody has taken care of since."""
        cursor: str | None = None
        while True:
            route = f"{self._root}/conflicts/{encode_path(top)}"
            page = self.http.json("GET", route, query={"limit": LIST_PAGE_MAX, "cursor": cursor})
            yield from page["conflicts"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def lock(self, path: bytes, host: str, command: str, ttl: float) -> JsonObject:
        """Take the lock called `path`. Raises `LeaseHeld`."""
        body = {"path": json_name(path), "host": host, "command": command, "ttl_s": ttl}
        return self.http.json("POST", self._base, body=body)

    def renew(self, fence: int, ttl: float) -> JsonObject:
        """Raises `LeaseLost`."""
        return self.http.json("POST", f"{self._base}/{fence}/renew", body={"ttl_s": ttl})

    def release(self, fence: int) -> None:
        self.http.json("POST", f"{self._base}/{fence}/release", body={})


def nobody_writes(leases: Leases, top: bytes, *, below: bool, hint: str) -> None:
    """Raises `LeaseHeld` with `hint` while a mount is the only writer of `top`, or (`below`) of anything
    under it: changes there would be refused."""
    mine = show(top).rstrip("/") + "/"
    for lease in leases.held():
        there = str(lease["path"]).rstrip("/") + "/"
        if lease["kind"] == "writer" and (mine.startswith(there) or (below and there.startswith(mine))):
            raise LeaseHeld(
                f"{lease['host']}:{lease['mount']} is the writer of {lease['path']} since {lease['since']}",
                hint=hint,
                details={"holder": lease},
            )


@dataclass(frozen=True, slots=True)
class LockOptions:
    """`timeout`: seconds to wait while another holds it, 0: not at all, None: for ever. `ttl`: how long the
    lock outlives this process when it is killed. `env` is the command's, without FSD_FENCE. `who` says what
    is told."""

    path: bytes
    command: Sequence[str]
    env: Mapping[str, str]
    host: str
    timeout: float | None
    ttl: float
    who: str = "fsd lock"


class _Signals:
    """Passes signals on to the command; one that comes before it runs ends the waiting."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.arrived = 0

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.arrived = number
        # Ctrl-C at a terminal goes to the whole group: the command has it already.
        if self.child is not None and (number != signal.SIGINT or not os.isatty(0)):
            self.child.send_signal(number)

    @contextmanager
    def handled(self) -> Iterator[None]:
        before = {number: signal.signal(number, self) for number in not_ignored(PASSED_ON)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def locked(leases: Leases, options: LockOptions, say: Callable[[str], None]) -> int:
    """Run the command while the lock is held; its exit code as a shell tells it. The lock is given up at its
    end, whatever that was. Raises `LeaseHeld` when it was not to be had, and `LockLost` when it was lost
    meanwhile: the command was told to end (SIGTERM) and has."""
    signals = _Signals()
    with signals.handled():
        lease = _take(leases, options, signals, say)
        if lease is None:
            return 128 + signals.arrived
        holder = Holder(leases, options, int(lease["fence"]))
        try:
            return holder.run(signals, say)
        finally:
            holder.release(say)


def hold(leases: Leases, options: LockOptions, say: Callable[[str], None]) -> Holder:
    """Take the lock, waiting for it; the caller gives it up (`release`), or leaves it to expire where what it
    guards is not as others may find it. Raises `LeaseHeld`."""
    lease = _take(leases, options, _Signals(), say)
    assert lease is not None, "no signal ends it"
    return Holder(leases, options, int(lease["fence"]))


def show_command(command: Sequence[str]) -> str:
    """What others are told of a holder; arguments are bytes."""
    return show(os.fsencode(" ".join(command)))[:COMMAND_SHOWN]


def _take(
    leases: Leases, options: LockOptions, signals: _Signals, say: Callable[[str], None]
) -> JsonObject | None:
    """The lock, or None when a signal ended the waiting."""
    host = leases.http.host
    end = None if options.timeout is None else host.monotonic() + options.timeout
    pause, said = ASK_AGAIN, ""
    while not signals.arrived:
        try:
            return leases.lock(options.path, options.host, show_command(options.command), options.ttl)
        except LeaseHeld as exc:
            if end is not None and host.monotonic() >= end:
                raise
            if exc.message != said:
                said = exc.message
                say(f"{options.who}: waiting: {said}")
        except Unavailable as exc:
            # Who was waiting goes on, through a restart of the server; a wrong address is told at once.
            if not said or (end is not None and host.monotonic() >= end):
                raise
            if exc.message != said:
                said = exc.message
                say(f"{options.who}: waiting: {said}")
        left = pause if end is None else min(pause, max(0.0, end - host.monotonic()))
        leases.http.pause(left)
        pause = min(ASK_SLOWLY, pause * 1.5)
    return None


class Holder:
    """One held lock: run the command, notice the loss. A thread of its own renews, so that a server that is
    slow to answer keeps nobody from noticing the command's end."""

    def __init__(self, leases: Leases, options: LockOptions, fence: int) -> None:
        self.leases, self.options, self.fence = leases, options, fence
        self.now = leases.http.host.monotonic
        self.kept = self.now()  # when the newest renewal that was answered began
        self.lost: FsdError | None = None
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._renew, name="fsd-lock", daemon=True).start()
        except RuntimeError as exc:
            with suppress(FsdError):  # it ends by itself; what is raised here is why there is none
                leases.release(fence)
            raise threads.failure(exc, f"the lock cannot be renewed: {exc}") from exc

    def run(self, signals: _Signals, say: Callable[[str], None]) -> int:
        env = {**self.options.env, "FSD_FENCE": str(self.fence)}
        try:
            child = subprocess.Popen(list(self.options.command), env=env)
        except OSError as exc:
            code, reason = not_started(exc, self.options.command[0], env)
            say(f"fsd lock: {self.options.command[0]} cannot be run: {reason}")
            return code
        signals.child = child
        if signals.arrived:
            child.send_signal(signals.arrived)  # it came while the command was being started
        code = self._watch(child)
        signals.child = None
        if self.lost is not None:
            raise LockLost(
                f"the lock {show(self.options.path)} was lost and the command ended: {self.lost.message}",
                hint="whatever it did last may have met another holder's changes; FSD_FENCE tells them apart",
            )
        return 128 - code if code < 0 else code

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Until the command has ended."""
        told: float | None = None
        while True:
            code = wait(child, LOOK)
            if code is not None:
                return code
            now = self.now()
            if self.lost is None and now - self.kept >= self.options.ttl:
                # It may be another's from now on.
                self.lost = Unavailable(f"no renewal was answered for {self.options.ttl:g} s")
            if self.lost is not None and told is None:
                told = now
                child.terminate()
            if told is not None and now - told >= KILL_AFTER:
                child.kill()

    def _renew(self) -> None:
        while not self._ended.wait(self.options.ttl / 3):
            began = self.now()
            try:
                self.leases.renew(self.fence, self.options.ttl)
            except FsdError as exc:
                if isinstance(exc, LeaseLost):
                    self.lost = exc
                    return
                continue  # a server that is away for a moment; `_watch` knows how long
            self.kept = began

    def check(self) -> None:
        """Raises `LeaseLost` where it went to somebody else meanwhile."""
        self.leases.renew(self.fence, self.options.ttl)

    def release(self, say: Callable[[str], None]) -> None:
        """Others need not wait until it expires; where that cannot be told, they have to."""
        self._ended.set()
        if self.lost is not None:
            return
        try:
            self.leases.release(self.fence)
        except FsdError as exc:
            say(f"{self.options.who}: not given up, others wait {self.options.ttl:g} s: {exc.message}")
