"""One place for `tinydaemon`: its mount point, state and records, and what tests do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsd.host.seam import Host
from fsd.kernel import runtime
from fsd.kernel.runtime import Record, RuntimeDir
from fsd.model.errors import NotFound
from support import mounttable
from support.processes import die_with_parent
from support.wait import wait_for

TESTS = Path(__file__).parent.parent


class Tiny:
    """One place, its state and its records; `start` runs the command."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.place = base / "m"
        self.place.mkdir()
        self.directory = RuntimeDir(base / "run", Host())
        self.foreground: subprocess.Popen[bytes] | None = None

    def command(self, *options: str, place: Path | None = None) -> list[str]:
        return [
            sys.executable,
            "-m",
            "support.tinydaemon",
            str(place or self.place),
            str(self.base),
            *options,
        ]

    def start(
        self, *options: str, place: Path | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        return subprocess.run(
            self.command(*options, place=place),
            cwd=cwd or TESTS,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start_foreground(
        self, *options: str, env: dict[str, str] | None = None, before: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """`before` is what starts it, nohup."""
        self.foreground = subprocess.Popen(
            [*before, *self.command("foreground", *options)],
            cwd=TESTS,
            env={**os.environ, **(env or {})},
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        wait_for(lambda: self.state() == runtime.MOUNTED, 30, "the mount")
        return self.foreground

    def record(self) -> Record:
        return self.directory.find(self.place)

    def state(self) -> str:
        try:
            return self.record().state
        except NotFound:
            return ""

    def listed(self) -> bool:
        return f" {self.place} " in mounttable.mounts()

    def alive(self) -> bool:
        try:
            return self.directory.alive(self.record().mount_id)
        except NotFound:
            return False

    def kill_daemon(self) -> None:
        """SIGKILL the daemon and wait for the next one."""
        before = self.record()
        os.kill(before.pid, signal.SIGKILL)
        wait_for(
            lambda: self.record().pid != before.pid and self.state() == runtime.MOUNTED, 30, "the restart"
        )

    def close(self) -> None:
        if self.alive():
            record = self.record()
            for pid in (record.supervisor_pid, record.pid):
                if pid:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            wait_for(lambda: not self.alive(), 30, "the killed processes to go")
        while self.listed():
            subprocess.run(["fusermount3", "-uz", str(self.place)], check=True, timeout=60)
        if self.foreground is not None:
            self.foreground.kill()
            self.foreground.wait(60)
            assert self.foreground.stderr is not None
            self.foreground.stderr.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    made = Tiny(tmp_path)
    yield made
    made.close()
