"""A full disk under the server: told as 507 with what to do, nothing half done, over when there is space."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import full_disk_server


def test_a_full_disk_under_the_server_loses_nothing(tmp_path: Path) -> None:
    """In a mount namespace of its own: see support/full_disk_server.py."""
    wrap = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*wrap, sys.executable, full_disk_server.__file__, str(tmp_path)],
        timeout=100,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["full", "starved", "removed", "restarted", "again"]
