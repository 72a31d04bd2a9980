"""Mounts and processes that a test run left behind: find them, end them, tell.

A run marks everything it starts with `FSD_TEST_RUN=<id>` in the environment, which children inherit, and
keeps its files below one directory. Only what bears the mark, or is mounted below the directory, is touched.
Also a program (standard library only): `leftovers.py DIR` clears what is mounted below DIR and removes it;
`leftovers.py --dead-runs BASE` does that for every BASE/fsd-test.<pid>.* whose process is gone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

MARK = "FSD_TEST_RUN"
_OCTAL = re.compile(rb"\\([0-7]{3})")


def fsd_mounts(under: Path) -> list[str]:
    """Mount points of fsd below `under`, innermost first."""
    found = []
    prefix = os.path.join(os.path.realpath(under), "")
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields, _, behind = line.partition(b" - ")
        kind = behind.split(b" ")[0]
        raw = _OCTAL.sub(lambda m: bytes([int(m[1], 8)]), fields.split(b" ")[4])
        path = os.fsdecode(raw)
        if (kind == b"fuse.fsd" or b" fsd:" in behind) and path.startswith(prefix):
            found.append(path)
    return sorted(found, key=len, reverse=True)


def clear_mounts(under: Path) -> list[str]:
    """Detach every fsd mount below `under`; returns what was there."""
    found = fsd_mounts(under)
    for path in found:
        subprocess.run(["fusermount3", "-uz", path], check=False, timeout=50)
        if path in fsd_mounts(under) and os.geteuid() == 0:
            subprocess.run(["umount", "-il", path], check=False, timeout=50)
    return found


def clear_records(under: Path, runtime: Path = Path("/run/fsd")) -> None:
    """Forget ended mounts below `under`: as root their records lie in one directory for the whole machine."""
    prefix = os.path.join(os.path.realpath(under), "")
    for record in runtime.glob("*.json"):
        try:
            mountpoint = json.loads(record.read_text())["mountpoint"]
        except (OSError, ValueError, KeyError):
            continue  # being written or removed by somebody else
        if str(mountpoint).startswith(prefix):
            for suffix in (".json", ".lock", ".sock"):
                record.with_suffix(suffix).unlink(missing_ok=True)


def marked_processes(run: str) -> dict[int, str]:
    """pid → command line of every other process that bears the mark `run`."""
    want = f"{MARK}={run}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        base = Path("/proc", entry)
        try:
            if want not in (base / "environ").read_bytes().split(b"\0"):
                continue
            state = (base / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
            command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, IndexError):
            continue  # it ended meanwhile, or belongs to somebody else
        if state != b"Z":
            found[int(entry)] = command
    return found


def end_processes(pids: list[int]) -> None:
    """SIGKILL, by number; gone already is fine."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def clear_run(work: Path) -> None:
    """Detach what is mounted below a run's directory and remove the directory (never what is mounted)."""
    for gone in clear_mounts(work):
        print(f"cleared a leftover mount: {gone}", file=sys.stderr)
    clear_records(work)
    subprocess.run(["rm", "-rf", "--one-file-system", "--", os.fspath(work)], check=False, timeout=120)


def dead_runs(base: Path) -> list[Path]:
    """Directories of earlier runs of scripts/test that were killed."""
    found = []
    for work in base.glob("fsd-test.*.*"):
        pid = work.name.split(".")[1]
        if pid.isdigit() and work.is_dir() and not Path("/proc", pid).exists():
            found.append(work)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--dead-runs":
        for run in dead_runs(Path(sys.argv[2])):
            clear_run(run)
    else:
        clear_run(Path(sys.argv[1]))
