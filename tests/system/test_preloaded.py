"""A command forked by a process that has loaded fsd (support.preloaded) does what one started anew does."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import leftovers, preloaded
from support.server import TestFs
from support.wait import wait_for


def both(fs: TestFs, *argv: str | bytes, **more: Any) -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **fs.env}
    forked = preloaded.run(argv, env, **more)
    anew = preloaded.run(argv, env, anew=True, **more)
    assert (forked.returncode, forked.stdout, forked.stderr) == (anew.returncode, anew.stdout, anew.stderr)
    return forked


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were forked."""
    seen = []
    forked = preloaded._forked

    def noted(argv: list[str], *rest: Any) -> tuple[int, bytes, bytes]:
        seen.append(argv[0])
        return forked(argv, *rest)

    monkeypatch.setattr(preloaded, "enabled", True)
    monkeypatch.setattr(preloaded, "_forked", noted)
    return seen


def test_the_same_code_and_the_same_bytes(shared_fs: TestFs, tmp_path: Path, asked: list[str]) -> None:
    big = bytes(range(256)) * 4000
    (tmp_path / "big").write_bytes(big)
    assert both(shared_fs, "cp", "big", ":/big", "--query", "status", cwd=tmp_path).returncode == 0
    assert both(shared_fs, "cat", "/big").stdout == big
    assert both(shared_fs, "cp", "-", ":/in", "--query", "status", stdin=b"x" * 40_000).returncode == 0
    assert both(shared_fs, "cat", "/in").stdout == b"x" * 40_000
    assert both(shared_fs, "cp", "-", b":/\xff\xc3", "--query", "status", stdin=b"").returncode == 0
    assert both(shared_fs, "ls", "/").returncode == 0
    assert both(shared_fs, "ls", "/", "--output", "text").returncode == 0
    assert both(shared_fs, "ls", "/", "--query", "[").returncode == 2
    assert both(shared_fs, "ls", "--no-such-flag").returncode == 2
    assert both(shared_fs, "status", os.fspath(tmp_path)).returncode == 5
    assert asked == ["cp", "cat", "cp", "cat", "cp", "ls", "ls", "ls", "ls", "status"]


def test_many_at_once(shared_fs: TestFs) -> None:
    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    codes = []

    def one(number: int) -> None:
        codes.append(preloaded.run(["mkdir", f"/d{number}"], env).returncode)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8
    assert preloaded.run(["ls", "/", "--query", "length(entries)"], env).stdout == b"8\n"


def test_one_that_does_not_end_is_ended(shared_fs: TestFs, asked: list[str]) -> None:
    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    assert preloaded.run(["journal", "create", "j"], env).returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run(["journal", "follow", "j"], env, timeout=0.1)
    assert preloaded.run(["ls", "/"], env).returncode == 0
    assert asked == ["journal", "journal", "ls"]


@pytest.fixture
def commands(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """The commands that run of those that a process of the test's own forks."""
    mark = f"{__name__}-{os.getpid()}"
    monkeypatch.setenv(leftovers.MARK, mark)
    monkeypatch.setattr(preloaded, "_started", [])

    def running() -> list[int]:
        servers = [process.pid for _, _, process in preloaded._started]
        return [pid for pid in leftovers.marked_processes(mark) if pid not in servers]

    yield running
    preloaded.end()


def test_one_whose_test_is_stopped_is_ended(
    shared_fs: TestFs, commands: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, or when the time of a test is over."""

    def stopped(*_streams: object) -> tuple[bytes, bytes]:
        assert len(commands()) == 1
        raise KeyboardInterrupt

    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    assert preloaded.run(["journal", "create", "j"], env).returncode == 0
    monkeypatch.setattr(preloaded, "_read", stopped)
    with pytest.raises(KeyboardInterrupt):
        preloaded.run(["journal", "follow", "j"], env)
    wait_for(lambda: not commands(), 30, "it to be gone")


def test_one_that_is_left_is_seen(shared_fs: TestFs, commands: Callable[[], list[int]]) -> None:
    """At the end of the run, when the process that forked it is gone."""
    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    assert preloaded.run(["journal", "create", "j"], env).returncode == 0

    def follow() -> None:
        with pytest.raises(struct.error):  # nobody tells how it ended
            preloaded.run(["journal", "follow", "j"], env)

    following = threading.Thread(target=follow)
    following.start()
    found = wait_for(commands, 30, "it to be forked")
    preloaded.end()
    assert commands() == found
    leftovers.end_processes(found)
    following.join()


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (["mount", "/absent/m", "--dry-run"], {}),
        (["run", "true", "--dry-run"], {}),
        (["ls", "/", "--help"], {"PYTHONUTF8": "0"}),
        (["no-such-command"], {}),
    ],
)
def test_what_is_started_anew(argv: list[str], more: dict[str, str], asked: list[str]) -> None:
    preloaded.run(argv, {"PATH": os.environ["PATH"], **more})
    assert asked == []
