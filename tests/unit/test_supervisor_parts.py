"""The supervisor's steps and the routes of a stop, without processes."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsd.host.seam import Host
from fsd.kernel import supervisor
from fsd.kernel.channel import Channel
from fsd.kernel.stop import MERGE, Stopper
from fsd.kernel.supervisor import Supervisor
from fsd.model.errors import Unavailable
from fsd.model.limits import RESTARTS_MAX


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeNursery:
    def __init__(self) -> None:
        self.started: list[str] = []

    def start_soon(self, func: Any) -> None:
        self.started.append(func.__name__)


class TestSupervisor:
    @pytest.mark.parametrize("early", [True, False])
    def test_a_stop_while_a_daemon_is_started_is_told_once(
        self, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before or after the pipe is there: the second byte of one Ctrl-C would end it unflushed."""
        read_end, write_end = os.pipe()
        directory = SimpleNamespace(read=lambda mount_id: None)
        made = Supervisor(
            cast(Any, SimpleNamespace(mount_id="m", notify_socket=None)),
            tmp_path,
            cast(Any, directory),
            Channel(None),
        )
        told: list[bytes] = []

        def ends(pid: int, how: int) -> tuple[int, int]:
            told.append(os.read(read_end, 16))
            return pid, 0

        def set_pipe(name: str, value: object) -> None:
            object.__setattr__(made, name, value)
            if name == "_pipe" and value is not None and not early:
                made._on_stop(15, None)  # the signal comes right here

        monkeypatch.setattr(os, "pipe", lambda: (os.dup(read_end), os.dup(write_end)))
        monkeypatch.setattr(os, "fork", lambda: 1 << 22)
        monkeypatch.setattr(os, "waitpid", ends)
        monkeypatch.setattr(Supervisor, "__setattr__", lambda self, name, value: set_pipe(name, value))
        if early:
            made._on_stop(15, None)
        made._one_daemon()
        assert told == [b"s"]
        os.close(read_end)
        os.close(write_end)

    def test_a_restart_for_which_there_is_no_process_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A limit on processes that is met for a moment ends no mount; nor does it leave pipes open."""
        record = SimpleNamespace(log=os.fspath(tmp_path / "log"), source="fsd:x", state="mounted")
        directory = SimpleNamespace(read=lambda mount_id: record)
        options = SimpleNamespace(mount_id="m", notify_socket=None, host=Host())
        made = Supervisor(cast(Any, options), tmp_path, cast(Any, directory), Channel(None))
        asked: list[int] = []

        def none_left() -> int:
            asked.append(1)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(os, "fork", none_left)
        monkeypatch.setattr(supervisor, "RESTART_PAUSE", 0.0)
        monkeypatch.setattr(supervisor, "still_listed", lambda place, source: True)
        monkeypatch.setattr(Supervisor, "_update", lambda *args, **more: None)
        given_up: list[str] = []
        monkeypatch.setattr(Supervisor, "_give_up", lambda self, record, how: given_up.append(how) or 1)
        made._restarts = 1
        before = len(os.listdir("/proc/self/fd"))
        while (code := made._after(made._one_daemon())) is None:
            pass
        assert code == 1
        assert len(asked) == RESTARTS_MAX + 1 and "times in 10 minutes" in given_up[0]
        assert len(os.listdir("/proc/self/fd")) == before
        text = (tmp_path / "log").read_text()
        assert text.count("no thread or process to give") == RESTARTS_MAX + 1
        made._restarts = 0
        with pytest.raises(Unavailable, match="no thread or process"):
            made._one_daemon()


class TestStopRoutes:
    """A group signal reaches supervisor and daemon; it is one stop. Two signals by one route are two."""

    def stops(self, *events: tuple[str, float]) -> list[str]:
        clock = Clock()

        class Options:
            host = replace(Host(), monotonic=clock)

        class Daemon:
            options = Options

        stopper, nursery = Stopper(cast(Any, Daemon)), FakeNursery()
        for route, later in events:
            clock.now += later
            stopper.stop_asked(route, cast(Any, nursery))
        return nursery.started

    def test_a_group_signal_is_one_stop(self) -> None:
        assert self.stops(("signal", 0), ("pipe", 0.01)) == ["_graceful"]
        assert self.stops(("pipe", 0), ("signal", 0.01)) == ["_graceful"]

    def test_two_group_signals_are_two(self) -> None:
        got = self.stops(("signal", 0), ("pipe", 0.01), ("pipe", 0.2), ("signal", 0.01))
        assert got == ["_graceful", "_at_once"]

    def test_two_signals_by_one_route_are_two_however_quick(self) -> None:
        assert self.stops(("signal", 0), ("signal", 0.001)) == ["_graceful", "_at_once"]

    def test_different_routes_far_apart_are_two(self) -> None:
        assert self.stops(("signal", 0), ("pipe", MERGE + 0.1)) == ["_graceful", "_at_once"]
