"""A command forked by a process that has loaded fsd (support.preloaded) does what one started anew does."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from support import preloaded
from support.server import TestFs


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
