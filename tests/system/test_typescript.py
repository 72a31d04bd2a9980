"""The TypeScript client: built by its lock file, its tests run by Node against this checkout's server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


def npm(where: Path, *argv: str) -> str:
    env = {**os.environ, "FSD": os.fspath(ROOT / ".venv/bin/fsd"), "CI": "1"}
    ran = subprocess.run(["npm", *argv], cwd=where, env=env, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_its_own_tests(tmp_path: Path) -> None:
    where = tmp_path / "typescript"
    shutil.copytree(ROOT / "clients/typescript", where, ignore=shutil.ignore_patterns("node_modules", "dist"))
    npm(where, "ci", "--ignore-scripts")
    told = npm(where, "test")
    assert "# fail 0" in told and "# pass 17" in told, told
