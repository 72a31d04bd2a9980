"""What the daemon does by itself beside the files never ends the mount, whatever goes wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import MadeUp

from fsd.host.seam import Host
from fsd.kernel import stop, tasks
from fsd.kernel.automatic import Automatic
from fsd.kernel.blocking import blocking, in_passing
from fsd.kernel.checkpoints import Checkpoints
from fsd.kernel.daemon import Daemon
from fsd.kernel.mountpoint import MountEntry
from fsd.kernel.stop import Ending, Stopper
from fsd.model.errors import Unavailable
from fsd.wire.messages import BarrierAsk


def daemon_of(**parts: Any) -> Any:
    pending = SimpleNamespace(operations=1, files=1)
    volume = SimpleNamespace(pending=lambda: pending, core=SimpleNamespace(seq=7), session=3)
    volume.writable_files = list
    machine = SimpleNamespace(volume=volume)

    async def call(func: Callable[[], object], within: float = 5.0) -> object:
        return func()

    return SimpleNamespace(machine=machine, call=call, **parts)


async def directly(call: Callable[[], object]) -> object:
    return call()


def test_a_schedule_goes_on_behind_a_defect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    async def create(ask: object, **_how: object) -> dict[str, Any]:
        tries.append(ask)
        if len(tries) == 1:
            raise ValueError("a defect")
        return {"fs_seq": 7}

    async def act() -> None:
        host = replace(Host(), wall_ns=lambda: 0)
        made = daemon_of(
            options=SimpleNamespace(auto_checkpoint=60.0, keep="", host=host),
            remote=SimpleNamespace(newest_checkpoint=lambda: None),
            checkpoints=SimpleNamespace(create=create),
        )
        automatic = Automatic(cast(Any, made))
        # Made-up time passes while a thread is at work.
        monkeypatch.setattr(automatic, "_there", directly)
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(automatic.run)
            await tasks.sleep(90)
            status = automatic.status()
            assert status is not None and "a defect" in status["problem"] and status["made"] == 0
            await tasks.sleep(60)
            status = automatic.status()
            assert status is not None and status["problem"] is None and status["made"] == 1
            nursery.cancel_scope.cancel()

    tasks.run(act, clock=MadeUp())
    assert len(tries) == 2
    assert "no automatic checkpoint this time" in caplog.text


def test_barriers_are_placed_behind_one_that_met_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    answered: list[int] = []

    async def drain(within: float, tell: object) -> Any:
        if within == 1.0:
            raise KeyError("a defect")
        return SimpleNamespace(error=None, left=None)

    async def act() -> None:
        made = daemon_of(
            stopper=SimpleNamespace(drain=drain),
            remote=SimpleNamespace(answer_barrier=lambda session, ask, **_how: answered.append(ask)),
        )
        checkpoints = Checkpoints(cast(Any, made))
        async with tasks.open_nursery() as nursery:
            nursery.start_soon(checkpoints.answer_asks)
            for number, left_ms in ((1, 1000), (2, 2000)):
                checkpoints.take_ask(BarrierAsk(number, left_ms))
            with tasks.fail_after(30):
                while 2 not in answered:
                    await tasks.sleep(0)
            nursery.cancel_scope.cancel()

    tasks.run(act)
    assert answered == [2]
    assert "the barrier 1 was not placed" in caplog.text


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has none to give: a limit of processes, which `make -j` meets for a moment."""

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.usefixtures("no_thread")
def test_where_no_thread_is_to_be_had() -> None:
    async def reported() -> bool:
        daemon = SimpleNamespace(remote=SimpleNamespace(report=print))
        return await Daemon._report(cast(Any, daemon), 3, (0, 0, 0))

    async def renewed() -> None:
        daemon = SimpleNamespace(
            remote=SimpleNamespace(renew_lease=print), options=SimpleNamespace(lease_ttl=9.0)
        )
        volume = SimpleNamespace(session=3, core=SimpleNamespace(fence=1))
        await Daemon._renew_lease(cast(Any, daemon), cast(Any, volume))

    async def ended() -> None:
        remote = SimpleNamespace(health=lambda: SimpleNamespace(reachable=True))
        machine = SimpleNamespace(volume=SimpleNamespace(session=3, core=SimpleNamespace(fence=0)))
        daemon = SimpleNamespace(remote=remote, machine=machine)
        await Daemon._tell_server(cast(Any, daemon), Ending(0, None, ""))

    with pytest.raises(Unavailable, match="no thread or process to give"):
        tasks.run(partial(blocking, list))
    assert tasks.run(reported) is False  # and again when it is time
    tasks.run(renewed)
    tasks.run(ended)  # it broke: what had ended well was told as a loss, exit 6
    tasks.run(partial(in_passing, list, "what the mount does without"))


@pytest.mark.usefixtures("no_thread")
def test_a_mount_is_detached_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    place, detached = Path("/nowhere"), list[Path]()
    entry = MountEntry("0:1", place, "fuse.fsd", "fsd:a:b")
    monkeypatch.setattr(stop, "list_mounts", lambda: [entry])
    monkeypatch.setattr(stop, "mounted_at", lambda _path: entry)
    monkeypatch.setattr(stop, "detach", lambda path, lazy: detached.append(path))

    async def act() -> None:
        daemon = SimpleNamespace(place=place, options=SimpleNamespace(source=entry.source))
        await Stopper(cast(Any, daemon))._detach(lazy=True)

    tasks.run(act)
    assert detached == [place]


def test_another_error_is_told_as_it_is() -> None:
    def defect() -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        tasks.run(partial(blocking, defect))


def test_no_call_goes_to_a_thread_another_way() -> None:
    kernel = Path(stop.__file__).parent
    found = [path.name for path in kernel.glob("*.py") if "in_thread" in path.read_text()]
    assert sorted(found) == ["blocking.py", "tasks.py"]


def test_an_error_nobody_told_is_a_crash_and_no_wanted_end() -> None:
    """By its own exit code the supervisor would take it for one, and leave a dead mount."""

    class Fails(Daemon):
        def __init__(self) -> None:
            pass

        async def _main(self) -> Ending:
            async with tasks.open_nursery() as nursery:
                nursery.start_soon(directly, self._defect)
                await tasks.Event().wait()
            raise AssertionError

        def _defect(self) -> None:
            raise Unavailable("for nobody")

    with pytest.raises(RuntimeError) as told:
        Fails().run()
    assert isinstance(told.value.__cause__, Unavailable)
