"""The clearing up after test runs touches only what it may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import leftovers


def test_marked_processes_are_found_and_ended_and_others_are_not() -> None:
    env = dict(os.environ)
    mine = subprocess.Popen(["sleep", "60"], env={**env, leftovers.MARK: "a-run-of-its-own"})
    other = subprocess.Popen(["sleep", "60"], env={**env, leftovers.MARK: "another-run"})
    try:
        found = leftovers.marked_processes("a-run-of-its-own")
        assert list(found) == [mine.pid] and "sleep 60" in found[mine.pid]
        leftovers.end_processes(list(found))
        assert mine.wait(60) < 0
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_only_runs_whose_process_is_gone_are_dead(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    dead = tmp_path / f"fsd-test.{ended.stdout.strip()}.abc"
    alive = tmp_path / f"fsd-test.{os.getpid()}.abc"
    odd = tmp_path / "fsd-test.x.abc"
    for work in (dead, alive, odd):
        work.mkdir()
    assert leftovers.dead_runs(tmp_path) == [dead]
    leftovers.clear_run(dead)
    assert not dead.exists() and alive.exists()
