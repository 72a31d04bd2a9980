"""A process that may write no large files (`ulimit -f`): the log tells that, and no full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource, sys
from pathlib import Path
from fsd.host.seam import Host
from fsd.model.errors import NoSpace
from fsd.vfs.log import WRITE, Log

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
log = Log(Path(sys.argv[1]), Host(), 1)
log.rotate(b"state")
try:
    log.append(WRITE, 5, 0, [bytes(2 << 20)], spare=False)
except NoSpace as exc:
    print(exc.message, exc.hint, sep="\\n")
"""


def test_a_limit_of_the_process_is_told_as_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    message, hint = done.stdout.splitlines()
    assert "1048576 bytes a file" in message and "full" not in message
    assert "ulimit -f" in hint
