"""Machines that cannot mount: one clear line, a way out, and never a write into the bare directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

TESTS = Path(__file__).parent.parent


def tiny(base: Path, *wrapper: str) -> subprocess.CompletedProcess[str]:
    """The mount command under `wrapper`."""
    (base / "m").mkdir()
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "support.tinydaemon", str(base / "m"), str(base)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def refused(base: Path, done: subprocess.CompletedProcess[str], word: str) -> None:
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "fsd run" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert os.listdir(base / "m") == []
    assert not os.path.ismount(base / "m")


@pytest.mark.root
def test_no_device(tmp_path: Path) -> None:
    hide = 'mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    done = tiny(tmp_path, "unshare", "-m", "bash", "-c", hide, "-")
    refused(tmp_path, done, "there is no /dev/fuse")


@pytest.mark.root
def test_no_access_to_the_device(tmp_path: Path) -> None:
    other = tmp_path / "other"
    hide = (
        f'touch {other} && mount --bind {other} /dev/fuse && mount -o remount,ro,bind /dev/fuse && exec "$@"'
    )
    done = tiny(tmp_path, "unshare", "-m", "bash", "-c", hide, "-")
    refused(tmp_path, done, "cannot be opened")


def test_no_fusermount_without_root(tmp_path: Path) -> None:
    """In a user namespace without a mapping nobody is root, and the files stay accessible."""
    done = tiny(tmp_path, "unshare", "-U", "env", f"PATH={tmp_path}")
    refused(tmp_path, done, "fusermount3 is not installed")
