"""The durable replace: at every crash point the old or the new content is there, whole; never neither."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsd.host.files import lock_directory, write_durable
from fsd.host.seam import Crasher, Host
from fsd.model.errors import Busy

CHILD = """
import sys
from pathlib import Path
from fsd.host.files import write_durable
from fsd.host.seam import Crasher, Host
write_durable(Host(crash_point=Crasher(sys.argv[2])), Path(sys.argv[1]), [b"new " * 5000, b"end"], "thing")
"""
NEW = b"new " * 5000 + b"end"


@pytest.mark.parametrize(
    ("point", "content"),
    [
        ("thing.written", b"old"),
        ("thing.synced", b"old"),
        ("thing.renamed", NEW),
        ("thing.durable", NEW),
    ],
)
def test_killed_at_each_durable_step(tmp_path: Path, point: str, content: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", CHILD, str(path), point], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == content
    write_durable(Host(), path, b"again", "thing")
    assert path.read_bytes() == b"again"


def test_a_write_that_fails_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_durable(Host(), path, b"x" * 5000, "thing")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_locked_directory_names_its_holder(tmp_path: Path) -> None:
    held = lock_directory(tmp_path, "data directory")
    with pytest.raises(Busy, match=str(os.getpid())):
        lock_directory(tmp_path, "data directory")
    os.close(held)
    os.close(lock_directory(tmp_path, "data directory"))


def test_a_crasher_counts_only_its_own_point() -> None:
    crasher = Crasher("a", count=2)
    crasher("b")
    crasher("a")
    assert crasher.seen == 1
