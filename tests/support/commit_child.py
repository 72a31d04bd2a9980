"""A service that is killed at a crash point in the middle of commits; run by `test_commit_crash`.

    python -m support.commit_child DIRECTORY POINT COUNT [DATABASE]

Prints one JSON line for the session and one for each commit that was answered. Step `k` is the same in every
process (`queue_step`), so the test can send the one that was not answered again.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from fsd.host.seam import Crasher, Host
from fsd.model.attrs import ROOT_INO, make_ino
from support.bench import Bench, Mount

STEPS = 60


def content(step: int) -> bytes:
    """Small ones are inline, every fourth is a pack of its own."""
    return b"%d." % step + random.Random(step).randbytes(100_000 if step % 4 == 0 else 10)


def queue_step(m: Mount, step: int) -> None:
    """Step `step`: a new file; then the one before is renamed, and every third one before that removed."""
    m.counter = step
    m.next_op = step * 10 + 1
    m.file(ROOT_INO, b"new-%d" % step, content(step))
    if step >= 1:
        ino = make_ino(m.session, step)
        m.rename(ROOT_INO, b"new-%d" % (step - 1), ino, ROOT_INO, b"old-%d" % (step - 1))
    if step >= 2 and step % 3 == 0:
        ino = make_ino(m.session, step - 1)
        m.unlink(ROOT_INO, b"old-%d" % (step - 2), ino, 2**40)


def expected(steps: int) -> dict[str, bytes]:
    """The tree after that many steps."""
    found: dict[str, bytes] = {}
    for step in range(steps):
        found[f"new-{step}"] = content(step)
        if step >= 1:
            found[f"old-{step - 1}"] = found.pop(f"new-{step - 1}")
        if step >= 2 and step % 3 == 0:
            del found[f"old-{step - 2}"]
    return found


def main() -> None:
    directory, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    crasher = Crasher(point, 10**9)
    bench = Bench(directory, Host(crash_point=crasher), sys.argv[4] if len(sys.argv) > 4 else None)
    m = bench.mount()
    print(json.dumps({"fs": [bench.fs.id, bench.fs.name], "session": m.session, "ticket": m.ticket.hex()}))
    sys.stdout.flush()
    crasher.seen, crasher.count = 0, count
    for step in range(STEPS):
        queue_step(m, step)
        m.commit()
        print(json.dumps({"step": step, "ticket": m.ticket.hex()}), flush=True)


if __name__ == "__main__":
    main()
