"""What shellcheck finds in the project's shell scripts; exceptions stand in them with their reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_shellcheck_finds_nothing() -> None:
    checker = shutil.which("shellcheck")
    assert checker, "shellcheck is missing: apt-get install -y shellcheck"
    tried = [path for path in sorted(ROOT.glob("scripts/*")) if path.is_file()] + [ROOT / ".ci/run"]
    shell = [path for path in tried if path.read_bytes().split(b"\n", 1)[0].endswith((b"/sh", b"bash"))]
    assert len(shell) >= 12, "the scripts are elsewhere, or begin otherwise"
    found = subprocess.run([checker, "-S", "style", *shell], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The scripts where nothing is set up, and cannot be: a set-up that begins fails: no lock file."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "tests/bench").mkdir(parents=True)
    shutil.copy(ROOT / "tests/bench/wanted.py", tmp_path / "tests/bench")
    return tmp_path


def run(where: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    words = [where / "scripts" / name, *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def below(where: Path) -> set[str]:
    return {str(path.relative_to(where)) for path in where.rglob("*") if "__pycache__" not in path.parts}


SCRIPTS = ("bench", "bench-commits", "check", "demo", "install-ti", "lock", "setup", "setup-test", "test")


def test_help_installs_nothing(fresh: Path) -> None:
    before = below(fresh)
    assert {path.name for path in (fresh / "scripts").iterdir()} - {"__pycache__"} == {
        *SCRIPTS, "demo.py", "mount.fuse.fsd", "umount.fuse.fsd",
    }, "another script: does its --help only help?"  # fmt: skip
    for name in SCRIPTS:
        for flag in ("--help", "-h"):
            done = run(fresh, name, flag)
            assert (done.returncode, done.stderr) == (0, ""), name
            assert len(done.stdout.strip()) > 40, name
    assert "--quick" in run(fresh, "bench", "--help").stdout
    assert below(fresh) == before


def test_a_wrong_option_is_told_before_anything_is_installed(fresh: Path) -> None:
    before = below(fresh)
    for name in ("bench", "bench-commits", "check", "demo", "lock", "setup"):
        done = run(fresh, name, "--quik")
        assert (done.returncode, done.stdout) == (2, ""), name
        assert "--quik" in done.stderr
        assert "installing" not in done.stderr
    for wrong in (("--only", "ext3"), ("--groups", "small,bgi"), ("--rounds", "many")):
        done = run(fresh, "bench", *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert wrong[1].rpartition(",")[2] in done.stderr
    assert below(fresh) == before


def test_a_setup_that_was_stopped_while_it_made_the_environment_goes_on(fresh: Path) -> None:
    """What `venv` has made before it comes to pip. Here pip fails then, so nothing further is touched."""
    (fresh / "fsd/x").mkdir(parents=True)
    (fresh / "fsd/x/_x.c").touch()
    (fresh / "pyproject.toml").touch()
    (fresh / "requirements.lock").write_text("nothing @ file:///nowhere/nothing-1.whl\n")
    subprocess.run(["/usr/bin/python3.11", "-m", "venv", "--without-pip", fresh / ".venv"], check=True)
    done = run(fresh, "setup")
    assert done.returncode != 0
    assert "No module named pip" not in done.stderr
    assert "nothing" in done.stderr, "pip was not asked"
    asked = [fresh / ".venv/bin/python", "-m", "pip", "--version"]
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0
