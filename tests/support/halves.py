"""Run the tests in two halves at once, each a pytest of its own: they wait more than they compute.

    python tests/support/halves.py LIMIT [pytest's options]

What the first half prints is shown as it comes, the second's when both have ended. After LIMIT seconds, or at
SIGINT or SIGTERM, both get SIGINT (pytest then still tells what it did and clears up) and, a minute later,
SIGKILL. The exit status is 124 after LIMIT, else the first that is not 0. That no test of a half was chosen
counts only where the other had none either.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).resolve().parent.parent
# About equal in time.
SECOND = ("contract", "property", "system")
GRACE = 60
NONE_CHOSEN = 5  # pytest's


def halves() -> tuple[list[str], list[str]]:
    """The directories with tests: those of the first half, those of the second."""
    found = sorted(one.parent for one in TESTS.glob("*/test_*.py"))
    every = list(dict.fromkeys(str(one.relative_to(TESTS.parent)) for one in found))
    second = [one for one in every if Path(one).name in SECOND]
    return [one for one in every if one not in second], second


class Stopped(Exception):
    """A signal asked for the end."""


def stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(f"signal {number}")


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """SIGINT, then SIGKILL, to what still runs."""
    deadline = time.monotonic() + GRACE
    for one in running:
        if one.poll() is None:
            one.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def main(limit: float, options: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    deadline = time.monotonic() + limit
    first, second = ([sys.executable, "-m", "pytest", *options, *part] for part in halves())
    late = False
    with tempfile.TemporaryFile() as kept:
        # In sessions of their own: a ^C at the terminal reaches them once, through this process.
        running = [
            subprocess.Popen(first, start_new_session=True),
            subprocess.Popen(second, stdout=kept, stderr=subprocess.STDOUT, start_new_session=True),
        ]
        try:
            for one in running:
                one.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        except Stopped as exc:
            print(f"test: {exc}", file=sys.stderr)
        end(running)
        kept.seek(0)
        sys.stdout.flush()
        shutil.copyfileobj(kept, sys.stdout.buffer)
        sys.stdout.flush()
    if late:
        return 124
    ends = [one.returncode for one in running]
    chosen = [one for one in ends if one != NONE_CHOSEN] or ends
    return next((one for one in chosen if one), 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
