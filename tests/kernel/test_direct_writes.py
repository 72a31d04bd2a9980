"""O_DIRECT beside the kernel's pages: who reads through pages sees what an asynchronous write has written."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.server import Server

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.timeout(180),
    pytest.mark.x86_64,
]

PROGRAM = Path(__file__).parent.parent / "support" / "directwrites.py"


@pytest.fixture
def box(trusted: Server, tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path, trusted.create()) as made:
        yield made


def play(path: Path, seconds: float, pieces: int, size: int, *more: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, os.fspath(PROGRAM), os.fspath(path), str(seconds), str(pieces), str(size), *more],
        capture_output=True, text=True, timeout=seconds + 60, check=True,
    )  # fmt: skip
    rounds, old = map(int, done.stdout.split())
    return rounds, old


@pytest.mark.parametrize("seconds", [1.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_readers_through_pages_see_asynchronous_writes(box: Sandbox, seconds: float) -> None:
    for pieces, size in ((4, 4096), (1, 640 * 1024)):
        rounds, old = play(box.mountpoint / "f", seconds, pieces, size)
        assert rounds > 3
        assert old == 0, f"{old} of {rounds} rounds read old bytes ({pieces} writes of {size})"


@pytest.mark.parametrize("seconds", [2.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_so_they_do_where_each_write_is_synced(box: Sandbox, seconds: float) -> None:
    rounds, old = play(box.mountpoint / "f", seconds, 4, 4096, "sync")
    assert rounds > 3
    assert old == 0, f"{old} of {rounds} rounds read old bytes"


def test_more_writes_at_once_than_the_kernel_has_requests_hang_nobody(box: Sandbox) -> None:
    rounds, _ = play(box.mountpoint / "f", 1.0, 48, 4096)
    assert rounds > 1
    assert (box.mountpoint / "f").stat().st_size == 48 * 4096


@pytest.mark.long
def test_a_file_of_direct_writes_is_what_was_written(box: Sandbox) -> None:
    """The last word of a file that was written both ways, on another mount too."""
    path = box.mountpoint / "f"
    play(path, 0.5, 8, 4096)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"through pages")
    there = path.read_bytes()
    assert there[5000:5013] == b"through pages"
    box.unmount()
    with tempfile.TemporaryDirectory() as base, sandbox(Path(base), box.fs) as other:
        assert (other.mountpoint / "f").read_bytes() == there
