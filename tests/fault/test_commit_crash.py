"""The server killed at each durable step of a commit: what was answered is there, the rest applied once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.bench import Bench
from support.commit_child import STEPS, expected, queue_step

from fsd.service.access import FsRef

TESTS = Path(__file__).parent.parent
POINTS = ["db.commit", "db.committed", "pack.written", "pack.synced", "pack.renamed", "pack.durable"]


@pytest.mark.parametrize("count", [4, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 11))])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(point: str, count: int, tmp_path: Path, either: str | None) -> None:
    words = [str(tmp_path), point, str(count), *filter(None, [either])]
    done = subprocess.run(
        [sys.executable, "-m", "support.commit_child", *words],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, *acks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(acks) < STEPS, "it was killed before the end"
    with Bench(tmp_path, database=either) as bench:
        bench.fs = FsRef(*first["fs"])
        bench.audit()
        tree = bench.tree()
        assert tree in (expected(len(acks)), expected(len(acks) + 1)), "all or nothing of the last one"
        m = bench.mount()
        m.session, m.time = first["session"], 1_700_000_000_000_000_000 + first["session"]
        m.ticket = bytes.fromhex(acks[-1]["ticket"] if acks else first["ticket"])
        queue_step(m, len(acks))
        assert m.commit() == []
        assert bench.tree() == expected(len(acks) + 1)
        assert bench.service.feed.head(bench.fs) == len(acks) + 1
        queue_step(m, len(acks) + 1)
        assert m.commit() == []
        assert bench.tree() == expected(len(acks) + 2)
