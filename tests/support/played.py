"""A program of `support` in a process of its own: it loads our extension before pyfuse3, which the test's
process may have loaded already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsd.kernel import requests
from support.processes import die_with_parent

TESTS = Path(__file__).resolve().parents[1]


def played(module: str, needs: str, *args: str | Path) -> Any:
    """What `support.<module>.main` prints, as JSON. `needs`: what the extension must have."""
    assert hasattr(requests._extension, needs), "an older extension, or none: scripts/setup"
    program = f"import fsd.kernel.requests; from support.{module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
