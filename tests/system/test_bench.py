"""scripts/bench works in a clone: two peers, two groups, one round; what it promises of failures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/bench", *argv], capture_output=True, text=True, timeout=1700, check=False
    )


@pytest.mark.long
@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_one_round_beside_the_disk(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "ext4,fsd", "--groups", "git,requests", "--work", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert "git clone, s" in done.stdout
    assert "requests of a small fsync" in done.stdout
    assert not list(tmp_path.iterdir()), "the bench left something behind"


@pytest.mark.long
@pytest.mark.kernel
@pytest.mark.timeout(1800)
def test_states_on_both_engines(tmp_path: Path) -> None:
    done = bench("--quick", "--groups", "states", "--work", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert "fsd, PostgreSQL" in done.stdout
    assert "of fsd, PostgreSQL: at most 1024" in done.stdout


@pytest.mark.long
@pytest.mark.kernel
@pytest.mark.timeout(900)
def test_a_peer_that_cannot_start_is_a_row(tmp_path: Path) -> None:
    """As where its download failed: the others are measured, the exit code is 0."""
    argv = ["env", f"PYTHONPATH={ROOT / 'tests'}", str(ROOT / ".venv/bin/python"), "-m", "bench"]
    argv += ["--quick", "--tools", str(tmp_path / "tools"), "--work", str(tmp_path), "--groups", "git"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=800, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    for peer in ("passthrough_ll", "juicefs, SQLite", "juicefs, Redis"):
        assert f"FAILED       {peer}: start:" in done.stdout
    assert "git clone, s" in done.stdout
