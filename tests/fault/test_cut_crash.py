"""The server killed while a commit makes a checkpoint: both or neither; sent again it is one checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.commit_child import STEPS, expected, queue_step
from support.cut_child import commit_and_keep

from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import decode
from fsd.service.access import FsRef
from fsd.service.retained import At
from fsd.wire.frame import open_blob

TESTS = Path(__file__).parent.parent


def kept(bench: Bench) -> list[dict[str, Any]]:
    """The checkpoints there are, oldest first."""
    read = bench.service.db.read
    found, _ = read(lambda tx: bench.service.checkpoints.page(tx, bench.fs, None, None, 1000))
    return found[::-1]


def tree_at(bench: Bench, seq: int) -> dict[str, bytes]:
    _, ((entries, _),) = bench.service.namespace.ask(bench.fs, [("list", ROOT_INO, b"", 1000)], At(seq=seq))
    found = {}
    for entry in entries:
        (part,) = decode(entry.attr.parts)
        blobs = bench.service.packs.read(bench.fs.id, [part.hash])
        found[entry.name.decode()] = open_blob(blobs[part.hash])[: entry.attr.size]
    return found


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("point", ["checkpoint.make", "db.commit", "db.committed"])
def test_killed_at(point: str, count: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.cut_child", str(tmp_path), point, str(count)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, *acks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(acks) < STEPS
    with Bench(tmp_path) as bench:
        bench.fs = FsRef(*first["fs"])
        bench.audit()
        there = kept(bench)
        assert [one["checkpoint_id"] for one in there[: len(acks)]] == [ack["checkpoint"] for ack in acks]
        assert len(there) in (len(acks), len(acks) + 1)
        assert (len(there) > len(acks)) == (bench.tree() == expected(len(acks) + 1)), "one without the other"
        m = Mount(bench, "again")
        m.session, m.time = first["session"], 1_700_000_000_000_000_000 + first["session"]
        m.ticket = bytes.fromhex(acks[-1]["ticket"] if acks else first["ticket"])
        queue_step(m, len(acks))
        answer = commit_and_keep(m, len(acks))
        assert answer.checkpoint is not None
        again = kept(bench)
        assert len(again) == len(acks) + 1
        assert again[-1]["checkpoint_id"] == answer.checkpoint["checkpoint_id"]
        for step, one in enumerate(again):
            assert one["label"] == f"step {step}"
            assert tree_at(bench, one["fs_seq"]) == expected(step + 1)
