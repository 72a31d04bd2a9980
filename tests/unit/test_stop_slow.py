"""How a mount ends where a step takes long: the FUSE thread stands in an fsync, a look at every process for
who uses the mount takes its time. Time is made up; it passes while nothing can go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import MadeUp
from support.tinyvolume import TinyVolume

from fsd.host.seam import Host
from fsd.kernel import stop, tasks
from fsd.kernel.checkpoints import Checkpoints
from fsd.kernel.daemon import Daemon
from fsd.kernel.machine import Machine
from fsd.kernel.mini import Scheduler
from fsd.kernel.stop import Drained, Ending, Stopper, quiet
from fsd.kernel.verbs import Verbs
from fsd.model.errors import Busy, NotDrained, Unavailable

LIMIT = 3.0  # the stop time-out


class FuseThread(Scheduler):
    """What is posted to it is done `slow(number of the post)` seconds later, in order."""

    def __init__(self, slow: Callable[[int], float], nursery: tasks.Nursery) -> None:
        super().__init__()
        self._slow, self._posts = slow, 0
        self.at_work = False
        self._inbox: deque[Callable[[], object]] = deque()
        self._news = tasks.Event()
        nursery.start_soon(self._work)

    def post(self, func: Callable[[], object]) -> None:
        self._inbox.append(func)
        self._news.set()

    async def _work(self) -> None:
        while True:
            while not self._inbox:
                self._news = tasks.Event()
                await self._news.wait()
            func = self._inbox.popleft()
            self._posts += 1
            self.at_work = True
            await tasks.sleep(self._slow(self._posts))
            func()
            self.at_work = False


class Scene:
    """A daemon's ending, on a FUSE thread as slow as told."""

    def __init__(self, slow: Callable[[int], float] = lambda number: 0.0) -> None:
        self.slow = slow
        self.volume = TinyVolume()
        self.clock = MadeUp()
        self.busy_look = 0.0  # how long it takes to find out who uses the mount
        self.used = True
        self.detached: list[float] = []

    def play(self, act: Callable[[Any], Any], limit: float = LIMIT) -> Any:
        async def main() -> Any:
            async with tasks.open_nursery() as nursery:
                loop = FuseThread(self.slow, nursery)
                host = replace(Host(), monotonic=tasks.current_time)
                made = Machine(cast(Any, self.volume), cast(Any, None), cast(Any, None), loop, host, 60.0)
                cast(Any, self.volume).sync = lambda: None
                daemon: Any = SimpleNamespace(
                    machine=made,
                    kernel_gone=tasks.Event(),
                    place="/nowhere",
                    options=SimpleNamespace(stop_timeout=limit, source="fsd:none:none", host=host),
                    operations=SimpleNamespace(abort=lambda: None),
                    session=SimpleNamespace(terminate=lambda: daemon.kernel_gone.set()),
                    update=lambda **changes: None,
                )
                daemon.call = lambda func, within=5.0: Daemon.call(daemon, func, within)
                daemon.stopper = Detaching(daemon, self)
                nursery.start_soon(self._ticks, made, loop)
                found = await act(daemon)
                nursery.cancel_scope.cancel()
            return found

        return tasks.run(main, clock=self.clock)

    async def _ticks(self, machine: Machine, loop: FuseThread) -> None:
        while True:
            await tasks.sleep(0.1)
            if not loop.at_work:
                machine.tick()

    def stopped(self, limit: float = LIMIT) -> tuple[Ending, float]:
        """How it ends after one SIGTERM, and after how long."""

        async def act(daemon: Any) -> tuple[Ending, float]:
            began = tasks.current_time()
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(daemon.stopper._graceful)
                ending = await daemon.stopper.wait()
                nursery.cancel_scope.cancel()
            return ending, tasks.current_time() - began

        found: tuple[Ending, float] = self.play(act, limit)
        return found


class Detaching(Stopper):
    """With a mount that can be detached lazily alone while it is used."""

    def __init__(self, daemon: Any, scene: Scene) -> None:
        super().__init__(daemon)
        self._scene = scene

    async def _detach(self, *, lazy: bool) -> None:
        scene = self._scene
        if scene.used and not lazy:
            await tasks.sleep(scene.busy_look)
            raise Busy("in use", details={"pids": [1]})
        scene.detached.append(tasks.current_time())
        self._daemon.kernel_gone.set()


class TestStop:
    """SIGTERM: whatever takes long, nothing is mounted afterwards."""

    def check(self, scene: Scene, limit: float = LIMIT) -> Ending:
        ending, took = scene.stopped(limit)
        assert scene.detached, "it ended and left a dead mount"
        assert took <= limit + 2 * stop.LAST
        return ending

    def test_while_the_look_for_who_uses_the_mount_takes_long(self) -> None:
        scene = Scene()
        scene.volume.stuck, scene.busy_look = 1, 3600.0
        assert self.check(scene).code == 6

    def test_while_the_fuse_thread_stands_still(self) -> None:
        scene = Scene(lambda number: 3600.0)
        assert self.check(scene).code == 6

    def test_with_a_time_out_too_short_for_anything(self) -> None:
        for used in (False, True):
            scene = Scene()
            scene.used, scene.volume.stuck = used, 1
            assert self.check(scene, 0.2).code == 6

    def test_with_everything_sent(self) -> None:
        assert self.check(Scene()).code == 0


class TestDrain:
    """A drain that says "everything" knows it."""

    def drained(self, scene: Scene, within: float | None = 60.0) -> Drained:
        async def act(daemon: Any) -> Drained:
            found: Drained = await daemon.stopper.drain(within, quiet)
            return found

        done: Drained = scene.play(act)
        return done

    @pytest.mark.parametrize("which", range(1, 8))
    def test_a_fuse_thread_that_is_late_once_is_waited_for(self, which: int) -> None:
        """It writes its log to a slow disk, at whichever step."""
        done = self.drained(Scene(lambda number: 8.0 if number == which else 0.0))
        assert done.error is None
        assert done.left is not None and done.left.clean

    @pytest.mark.parametrize("which", range(1, 6))
    def test_a_pause_of_the_sandbox_at_any_step_is_no_answer_missed(self, which: int) -> None:
        def slow(number: int) -> float:
            if number == which:
                scene.clock.jump(3600.0)
            return 0.5

        scene = Scene(slow)
        scene.volume.refused = 2
        done = self.drained(scene)
        assert isinstance(done.error, NotDrained)
        assert done.before is not None and done.left is not None

    @pytest.mark.parametrize("which", range(8))
    def test_what_the_server_refused_is_told_however_late(self, which: int) -> None:
        scene = Scene(lambda number: 8.0 if number == which else 0.0)
        scene.volume.refused = 2
        assert isinstance(self.drained(scene).error, NotDrained)

    def test_no_answer_is_no_success(self) -> None:
        """The barrier is through; what the server refused nobody says."""
        for silent_from in range(1, 6):
            scene = Scene(lambda number: 3600.0 if number >= silent_from else 0.0)  # noqa: B023
            done = self.drained(scene, 5.0)
            assert done.error is not None or done.left is not None
            assert done.took < 60

    def test_who_gave_up_is_forgotten_though_the_barrier_begins_later(self) -> None:
        scene = Scene(lambda number: 10.0 if number == 1 else 0.0)
        scene.volume.stuck = 1

        async def act(daemon: Any) -> int:
            with tasks.move_on_after(6):
                await daemon.stopper.drain(None, quiet)
            await tasks.sleep(60)
            return len(daemon.machine.snapshot())

        assert scene.play(act) == 0

    def test_the_command_is_told_a_seq_or_an_error(self) -> None:
        for which in range(1, 10):
            scene = Scene(lambda number: 8.0 if number == which else 0.0)  # noqa: B023

            async def act(daemon: Any) -> Any:
                answer, _ = await Verbs(daemon).drain({"timeout": 60}, quiet)
                return answer["fs_seq"]

            cast(Any, scene.volume).status = lambda: {"refused": 0, "fs_seq": 17}
            assert scene.play(act) == 17


class TestMappings:
    """A checkpoint for which nobody could say which files are mapped is not made without a word."""

    def test_a_fuse_thread_that_says_nothing(self) -> None:
        scene = Scene(lambda number: 3600.0)

        async def act(daemon: Any) -> None:
            cast(Any, scene.volume).writable_files = list
            with pytest.raises(Unavailable, match="FUSE thread"):
                await Checkpoints(daemon)._empty_mappings()

        scene.play(act)


def test_a_waiter_that_cannot_be_told_leaves_no_log_open() -> None:
    """Trio had ended: the log of a mount whose drain was cut off stayed open, and its next mount had to do
    what was left."""
    from fsd.vfs.types import Want

    machine = Machine(
        cast(Any, TinyVolume()), cast(Any, None), cast(Any, None), Scheduler(), Host(), io_timeout=5.0
    )

    def wake(error: BaseException | None) -> None:
        raise tasks.RunFinished("run() has exited")

    machine.watch(Want("a drain"), wake, within=None, request=False)
    with pytest.raises(tasks.RunFinished):
        machine.stop()
    assert machine.closed.is_set()
