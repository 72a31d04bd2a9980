"""scripts/demo runs, proves, and leaves nothing behind; without /dev/fuse it says so and proves the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.leftovers import fsd_mounts

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
SECRET = re.compile(r"fsd1\.[A-Za-z0-9_=-]{20,}")


def run(base: Path, *wrap: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TMPDIR": os.fspath(base)}
    return subprocess.run(
        [*wrap, sys.executable, os.fspath(DEMO)], env=env, capture_output=True, text=True, timeout=110
    )


@pytest.mark.kernel
def test_the_demo_proves_every_step_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("d")
    done = run(base)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "everything was proved; nothing was left behind" in done.stdout
    assert done.stdout.count("✓") >= 8
    assert not SECRET.search(done.stdout + done.stderr), "a token was shown"
    assert not fsd_mounts(base) and not list(base.iterdir())


@pytest.mark.root
def test_the_demo_without_fuse_proves_the_rest_and_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A mount namespace of its own hides /dev/fuse."""
    base = tmp_path_factory.mktemp("d")
    hide = "mount -t tmpfs none /dev/shm && touch /dev/shm/x && mount --bind /dev/shm/x /dev/fuse && "
    hide += "mount -o remount,bind,ro /dev/fuse && "
    script = hide + 'exec "$0" "$@"'
    done = run(base, "unshare", "-m", "--propagation", "private", "bash", "-c", script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "nothing was mounted; the rest was proved" in done.stdout
    assert done.stdout.count("✓") == 3
    assert not list(base.iterdir())


def test_a_demo_that_cannot_prove_says_so_and_cleans_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("d")
    env = {**os.environ, "TMPDIR": os.fspath(base)}
    program = f"import sys; sys.path.insert(0, {os.fspath(DEMO.parent)!r}); import demo; "
    program += "demo.PLAN = 'another plan'; sys.exit(demo.main())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1 and "NOT proved: the plan is what sandbox 1 wrote" in done.stderr
    assert not list(base.iterdir())
