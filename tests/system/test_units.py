"""The systemd units are what systemd accepts. It need not run here; its verifier must be installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.cli import command

UNITS = Path(__file__).parent.parent.parent / "systemd"


@pytest.mark.parametrize(
    ("unit", "installed"),
    [("fsd-server.service", "fsd-server.service"), ("fsd-mount@.service", "fsd-mount@mnt-work.service")],
)
def test_verify(tmp_path: Path, unit: str, installed: str) -> None:
    verifier = shutil.which("systemd-analyze")
    assert verifier, "systemd-analyze is missing: apt-get install -y systemd"
    shutil.copy(UNITS / unit, tmp_path / installed)
    done = subprocess.run(
        [verifier, "verify", str(tmp_path / installed)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Unknown keys are only warned of.
    assert installed not in done.stderr, done.stderr


@pytest.mark.parametrize("unit", ["fsd-server.service", "fsd-mount@.service"])
def test_commands_exist(unit: str) -> None:
    """What the unit runs is understood by this version's command line."""
    text = (UNITS / unit).read_text()
    (line,) = [one for one in text.splitlines() if one.startswith("ExecStart=")]
    words = line.removeprefix("ExecStart=/usr/bin/env fsd ").split()
    flags = [word for word in words if word.startswith("--")]
    assert flags
    shown = subprocess.run(
        [*command(), words[0], "--help"], capture_output=True, text=True, check=True, timeout=50
    ).stdout
    for flag in flags:
        assert flag in shown
