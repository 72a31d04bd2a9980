"""The server killed at each durable step of a checkpoint's life: all or nothing, and it can be done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.checkpoint_child import FIRST, SECOND, act

from fsd.service.access import FsRef
from fsd.service.retained import At
from fsd.wire.messages import LIST

TESTS = Path(__file__).parent.parent
BEFORE = (
    "checkpoint.make",
    "checkpoint.inthread",
    "checkpoint.delete",
    "restore.ends",
    "restore.brings",
    "db.commit",
)


@pytest.mark.parametrize(
    ("action", "point"),
    [
        *(("make", point) for point in ("checkpoint.make", "db.commit", "db.committed")),
        ("thread", "checkpoint.inthread"),
        *(("delete", point) for point in ("checkpoint.delete", "db.commit", "db.committed")),
        *(
            ("restore", point)
            for point in ("checkpoint.make", "restore.ends", "restore.brings", "db.commit", "db.committed")
        ),
        *(("restore path", point) for point in ("checkpoint.make", "db.commit", "db.committed")),
    ],
)
def test_killed_at(action: str, point: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.checkpoint_child", str(tmp_path), action, point],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (first,) = [json.loads(line) for line in done.stdout.splitlines()]
    name = first["checkpoint"]
    with Bench(tmp_path) as bench:
        bench.fs = FsRef(*first["fs"])
        bench.audit()
        kept = bench.service.db.read(lambda tx: tx.all("SELECT kind FROM pin WHERE expires IS NULL"))
        assert len(kept) == len(pages(bench)), "a state is kept without an end, and by no checkpoint"
        happened = point not in BEFORE
        assert state(bench, name) == after(action, happened=happened)
        if not happened:
            act(bench, action, name)
            assert state(bench, name) == after(action, happened=True)


def state(bench: Bench, name: str) -> tuple[dict[str, object], int, bool]:
    """The live tree, how many checkpoints there are, and whether the first is one of them (and as it was)."""
    found = pages(bench)
    there = name in {one["checkpoint_id"] for one in found}
    if there:
        _, (listing,) = bench.service.namespace.ask(bench.fs, [(LIST, 1, b"", 100)], At(checkpoint=name))
        assert {entry.name.decode() for entry in listing[0]} == set(FIRST)
    return bench.tree(), len(found), there


def pages(bench: Bench) -> list[dict[str, Any]]:
    """The checkpoints there are, a page of them."""
    service = bench.service
    return service.db.read(lambda tx: service.checkpoints.page(tx, bench.fs, None, None, 100))[0]


def after(action: str, *, happened: bool) -> tuple[dict[str, object], int, bool]:
    if not happened:
        return SECOND, 1, True
    if action in ("make", "thread"):
        return SECOND, 2, True
    if action == "delete":
        return SECOND, 0, False
    if action == "restore":
        return FIRST, 2, True
    return {**SECOND, "f1": FIRST["f1"]}, 2, True
