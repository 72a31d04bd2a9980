"""Tasks of the daemon's main thread: what is cancelled ends, what fails is told, nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.clock import MadeUp

from fsd.kernel import heads, streams, tasks
from fsd.model.errors import Unavailable
from fsd.model.limits import CALLS_MAX, CONTROL_CLIENTS_MAX


def play(main: Callable[[], Any]) -> Any:
    """In made-up time."""
    return tasks.run(main, clock=MadeUp())


async def never() -> None:
    await tasks.Event().wait()


class TestScopes:
    def test_a_deadline_ends_every_wait_in_it(self) -> None:
        async def main() -> list[object]:
            found: list[object] = []
            with tasks.move_on_after(3) as scope:
                try:
                    await never()
                finally:
                    with tasks.CancelScope(shield=True):
                        await tasks.sleep(2)  # tidying up takes its time
                    found.append(tasks.current_time())
                    with pytest.raises(tasks.Cancelled):
                        await tasks.sleep(1)
            return [*found, scope.cancelled_caught, tasks.current_time()]

        assert play(main) == [5.0, True, 5.0]

    def test_one_that_is_over_before_it_begins(self) -> None:
        async def main() -> bool:
            with tasks.move_on_at(tasks.current_time() - 1) as scope:
                await tasks.sleep(0)
            return scope.cancelled_caught

        assert play(main)

    def test_the_outer_of_two_catches_where_both_are_over(self) -> None:
        async def main() -> tuple[bool, bool]:
            with tasks.move_on_after(1) as outer, tasks.move_on_after(1) as inner:
                await never()
            return outer.cancelled_caught, inner.cancelled_caught

        assert play(main) == (True, False)

    def test_what_ends_in_time_is_left_alone(self) -> None:
        async def main() -> float:
            with tasks.fail_after(3):
                await tasks.sleep(2)
            with pytest.raises(tasks.TooSlow), tasks.fail_after(3):
                await never()
            await tasks.sleep(10)  # nothing of them is left
            return tasks.current_time()

        assert play(main) == 15

    def test_what_happened_at_the_deadline_has_happened(self) -> None:
        async def main() -> bool:
            event = tasks.Event()
            async with tasks.open_nursery() as nursery:

                async def late() -> None:
                    await tasks.sleep(1)
                    event.set()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(late)
                await event.wait()
                return True
            raise AssertionError

        assert play(main)


class TestNurseries:
    def test_it_ends_when_its_tasks_have_ended(self) -> None:
        async def main() -> float:
            async with tasks.open_nursery() as nursery:
                for seconds in (3, 1, 2):
                    nursery.start_soon(tasks.sleep, seconds)
            return tasks.current_time()

        assert play(main) == 3

    def test_an_error_cancels_the_others_and_is_raised(self) -> None:
        ended: list[str] = []

        async def other() -> None:
            try:
                await never()
            finally:
                ended.append("other")

        async def fails() -> None:
            await tasks.sleep(1)
            raise ValueError("a defect")

        async def main() -> None:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(other)
                nursery.start_soon(fails)
                await never()

        with pytest.raises(ValueError, match="a defect"):
            play(main)
        assert ended == ["other"]

    def test_of_two_errors_none_is_lost(self) -> None:
        async def fails(error: Exception) -> None:
            try:
                await tasks.sleep(1)
            finally:
                raise error

        async def main() -> None:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(fails, ValueError())
                nursery.start_soon(fails, KeyError())

        with pytest.raises(BaseExceptionGroup) as told:
            play(main)
        assert [type(one) for one in told.value.exceptions] == [ValueError, KeyError]

    def test_one_that_is_cancelled_waits_for_what_tidies_up(self) -> None:
        async def slow() -> None:
            try:
                await never()
            finally:
                with tasks.CancelScope(shield=True):
                    await tasks.sleep(5)

        async def main() -> tuple[bool, float]:
            with tasks.move_on_after(1) as scope:
                async with tasks.open_nursery() as nursery:
                    nursery.start_soon(slow)
            return scope.cancelled_caught, tasks.current_time()

        assert play(main) == (True, 6)

    def test_its_own_cancel_goes_no_further(self) -> None:
        async def main() -> str:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(never)
                nursery.cancel_scope.cancel()
                await never()
            await tasks.sleep(1)
            return "on"

        assert play(main) == "on"

    def test_the_body_s_error_is_raised_as_it_is(self) -> None:
        async def main() -> None:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(never)
                raise OSError(5, "told")

        with pytest.raises(OSError, match="told") as told:
            play(main)
        assert told.value.__cause__ is None


def test_a_lock_goes_to_who_waited_first() -> None:
    had: list[int] = []

    async def main() -> None:
        lock = tasks.Lock()

        async def one(number: int, within: float) -> None:
            with tasks.move_on_after(within):
                await lock.acquire()
                had.append(number)
                await tasks.sleep(2)
                lock.release()

        async with tasks.open_nursery() as nursery:
            for number, within in ((1, 99), (2, 1), (3, 99), (4, 99)):
                nursery.start_soon(one, number, within)

    play(main)
    assert had == [1, 3, 4]  # the second gave up


class TestThreads:
    def test_its_result_and_its_error(self) -> None:
        async def main() -> int:
            with pytest.raises(ZeroDivisionError):
                await tasks.in_thread(lambda: 1 // 0, abandon=True)
            return await tasks.in_thread(threading.get_ident, abandon=False)

        assert tasks.run(main) != threading.get_ident()

    def test_one_that_hangs_is_left_behind(self) -> None:
        goes_on, ended = threading.Event(), threading.Event()

        def hang() -> None:
            goes_on.wait(60)
            ended.set()

        async def main() -> bool:
            with tasks.move_on_after(0.01) as scope:
                await tasks.in_thread(hang, abandon=True)
            return scope.cancelled_caught

        assert tasks.run(main)
        goes_on.set()  # its answer finds nobody
        assert ended.wait(60)

    def test_one_that_must_not_be_is_waited_for(self) -> None:
        async def main() -> int:
            went_on = threading.Event()
            async with tasks.open_nursery() as nursery:

                async def cancel() -> None:
                    nursery.cancel_scope.cancel()
                    went_on.set()

                nursery.start_soon(cancel)
                return await tasks.in_thread(lambda: (went_on.wait(60) and 7) or 0, abandon=False)
            raise AssertionError

        assert tasks.run(main) == 7

    def test_there_are_at_most_so_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that were left behind and hang count, until they end."""
        monkeypatch.setattr(tasks, "CALLS_MAX", 2)
        goes_on = threading.Event()

        async def main() -> int:
            for _ in range(2):
                with tasks.move_on_after(0.01):
                    await tasks.in_thread(lambda: goes_on.wait(60), abandon=True)
            with pytest.raises(Unavailable, match="2 calls"):
                await tasks.in_thread(threading.get_ident, abandon=True)
            goes_on.set()
            while True:
                try:
                    return await tasks.in_thread(threading.get_ident, abandon=True)
                except Unavailable:
                    await tasks.sleep(0.01)

        assert tasks.run(main) != threading.get_ident()
        assert CALLS_MAX > CONTROL_CLIENTS_MAX

    def test_one_that_never_began_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks, "CALLS_MAX", 1)

        def none_left(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        async def main() -> int:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", none_left)
                with pytest.raises(RuntimeError):
                    await tasks.in_thread(threading.get_ident, abandon=True)
            return await tasks.in_thread(threading.get_ident, abandon=True)

        assert tasks.run(main) != threading.get_ident()

    def test_a_post_is_called_by_the_loop_and_refused_once_that_has_ended(self) -> None:
        async def main() -> tasks.Loop:
            loop, event = tasks.current_loop(), tasks.Event()
            threading.Thread(target=lambda: loop.post(event.set)).start()
            await event.wait()
            return loop

        loop = tasks.run(main)
        with pytest.raises(tasks.RunFinished):
            loop.post(print)


def test_signals_come_one_after_the_other_and_go_where_they_went_before() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    async def main() -> list[int]:
        with tasks.Signals(signal.SIGUSR2, signal.SIGTERM) as arrived:
            for number in (signal.SIGTERM, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            found = [await arrived.next(), await arrived.next()]
            pid = os.getpid()
            threading.Thread(target=lambda: os.kill(pid, signal.SIGUSR2)).start()
            return [*found, await arrived.next()]

    assert sorted(tasks.run(main)[:2]) == [signal.SIGUSR2, signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR2) is before
    assert signal.set_wakeup_fd(-1) == -1


class TestStreams:
    def test_more_than_fits_goes_through(self) -> None:
        data = os.urandom(3_000_000)

        async def main() -> bytes:
            left, right = (streams.Stream(one.detach()) for one in socket.socketpair())
            found = b""
            async with left, right, tasks.open_nursery() as nursery:

                async def send() -> None:
                    await left.send(data)
                    left.close()

                nursery.start_soon(send)
                async for piece in right.pieces():
                    found += piece
            return found

        assert tasks.run(main) == data

    def test_nobody_at_the_other_end(self) -> None:
        async def main() -> None:
            left, right = (streams.Stream(one.detach()) for one in socket.socketpair())
            right.close()
            async with left:
                with pytest.raises(streams.Gone):
                    await left.send(b"x")

        tasks.run(main)

    def test_a_process_is_asked_and_answers(self) -> None:
        async def main() -> tuple[bytes, int, bool]:
            process = await streams.start([sys.executable, "-c", "print(input()[::-1]); exit(3)"])
            await process.stdin.send(b"abc\n")
            process.stdin.close()
            said = b"".join([piece async for piece in process.stdout.pieces()])
            status = await process.wait()
            process.close()
            return said, status, process.running()

        assert tasks.run(main) == (b"cba\n", 3, False)


@pytest.mark.parametrize("had", [0, 1])
def test_a_process_that_gets_no_descriptors_is_ended(had: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran on, and nobody could end it."""
    begun: list[subprocess.Popen[bytes]] = []
    before = set(os.listdir("/proc/self/fd"))
    real, popen = os.dup, subprocess.Popen

    def noted(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        begun.append(popen(*args, **more))
        return begun[-1]

    def dup(fd: int) -> int:
        if len(copies) == had:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        copies.append(real(fd))
        return copies[-1]

    copies: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(streams.os, "dup", dup)
    with pytest.raises(OSError, match="open files"):
        tasks.run(lambda: streams.start([sys.executable, "-c", "import signal; signal.pause()"]))
    assert begun[0].returncode == -signal.SIGKILL
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_restore_that_does_not_listen_has_ended_when_it_is_taken_as_ended() -> None:
    """The place it writes into is detached next."""
    program = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); "
    program += "signal.pause()"

    async def main() -> int:
        process = await streams.start([sys.executable, "-c", program])
        assert await process.stdout.receive()
        await heads._end(process, 0.01)
        return process.pid

    assert not os.path.exists(f"/proc/{tasks.run(main)}")


def test_a_daemon_loads_neither_trio_nor_what_pyfuse3_would() -> None:
    """Half of what a daemon would load, in time and in memory."""
    program = "import sys; from fsd.kernel import lean; lean.load_pyfuse3(); import fsd.kernel.daemon; "
    program += "print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    loaded = set(run.stdout.split())
    assert {"pyfuse3", "fsd.kernel.daemon"} <= loaded, run.stderr
    assert not loaded & {"trio", "attr", "importlib.metadata", "email", "asyncio"}
