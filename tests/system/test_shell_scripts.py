"""What shellcheck finds in the project's shell scripts; exceptions stand in them with their reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_shellcheck_finds_nothing() -> None:
    checker = shutil.which("shellcheck")
    assert checker, "shellcheck is missing: apt-get install -y shellcheck"
    tried = [path for path in sorted(ROOT.glob("scripts/*")) if path.is_file()] + [ROOT / ".ci/run"]
    shell = [path for path in tried if path.read_bytes().split(b"\n", 1)[0].endswith((b"/sh", b"bash"))]
    assert len(shell) >= 12, "the scripts are elsewhere, or begin otherwise"
    found = subprocess.run([checker, "-S", "style", *shell], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "")
