"""A service that is killed in the middle of commits that ask for a checkpoint; run by `test_cut_crash`.

    python -m support.cut_child DIRECTORY POINT COUNT

As `commit_child`; each answer tells the checkpoint made with it, labelled by its step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsd.host.seam import Crasher, Host
from fsd.service.access import ADMIN_GRANT
from fsd.wire.messages import CommitAnswer, make_commit
from support.bench import Bench, Mount
from support.commit_child import STEPS, queue_step


def commit_and_keep(m: Mount, step: int) -> CommitAnswer:
    """Send what is queued, and ask for a checkpoint of it."""
    ask = {"label": f"step {step}"}
    commit = make_commit(m.session, m.ticket, m.queue, (0, 0, 0), list(m.blobs.values()), ask)
    answer = m.bench.service.commits.commit(m.bench.fs, commit, ADMIN_GRANT)
    m.ticket, m.queue = answer.ticket, []
    m.blobs.clear()
    return answer


def main() -> None:
    directory, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    crasher = Crasher(point, 10**9)
    bench = Bench(directory, Host(crash_point=crasher))
    m = bench.mount()
    print(json.dumps({"fs": [bench.fs.id, bench.fs.name], "session": m.session, "ticket": m.ticket.hex()}))
    sys.stdout.flush()
    crasher.seen, crasher.count = 0, count
    for step in range(STEPS):
        queue_step(m, step)
        answer = commit_and_keep(m, step)
        assert answer.checkpoint is not None
        told = {"step": step, "ticket": m.ticket.hex(), "checkpoint": answer.checkpoint["checkpoint_id"]}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
