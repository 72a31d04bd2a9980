"""The server killed at each durable step of a checkpoint's life: all or nothing, and it can be done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.checkpoint_child import FIRST, SECOND, act
from support.contract import audit_stopped
from support.server import Server

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
def test_killed_at(action: str, point: str, tmp_path: Path, either: str | None) -> None:
    words = [str(tmp_path), action, point, *filter(None, [either])]
    done = subprocess.run(
        [sys.executable, "-m", "support.checkpoint_child", *words],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (first,) = [json.loads(line) for line in done.stdout.splitlines()]
    name = first["checkpoint"]
    with Bench(tmp_path, database=either) as bench:
        bench.fs = FsRef(*first["fs"])
        bench.audit()
        kept = bench.service.db.read(lambda tx: tx.all("SELECT kind FROM pin WHERE expires IS NULL"))
        assert len(kept) == len(pages(bench)), "a state is kept without an end, and by no checkpoint"
        happened = point not in BEFORE
        assert state(bench, name) == after(action, happened=happened)
        if not happened:
            act(bench, action, name)
            assert state(bench, name) == after(action, happened=True)


@pytest.mark.parametrize(
    "point",
    [
        "checkpoint.delete",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("db.commit", "db.committed")),
    ],
)
def test_killed_while_many_are_pruned(tmp_path: Path, either: str | None, point: str) -> None:
    """Some are gone, each wholly, and the next prune takes the rest."""
    server = Server(tmp_path / "s", *(["--database", either] if either else []))
    try:
        fs = server.start().create()
        for at in range(6):
            assert fs.ask("PUT", f"/files/f{at}", b"%d" % at * 100).status == 200
            if at > 1:
                gone = {"action": "remove", "path": f"/f{at - 2}"}
                assert fs.ask("POST", "/actions", gone).status == 200
            assert fs.ask("POST", "/checkpoints", {"label": f"l{at}"}).status == 201
        wanted = {at: fs.ask("GET", f"/files/f{at}").body for at in (4, 5)}
        left: set[int] = set()
        for count in range(1, 20):
            server.end()
            server.env = {"FSD_CRASH": f"{point}:{count}"}
            try:
                server.start()
                fs.ask("POST", "/checkpoints/prune", {"keep": "last=1", "named": True})
                break  # it died no more: all are gone
            except AssertionError:
                continue  # it passed so many when it started
            except (OSError, HTTPException):
                assert server.process is not None
                assert server.process.wait(60) == -signal.SIGKILL
            server.env = {}
            server.restart()
            found = fs.ask("GET", "/checkpoints").json["checkpoints"]
            left.add(len(found))
            for one in found:
                at = int(one["label"][1:])
                listed = fs.ask("GET", f"/list/?checkpoint={one['checkpoint_id']}").json["entries"]
                assert [entry["path"] for entry in listed] == [f"/f{n}" for n in (at - 1, at) if n >= 0]
        server.end()
        server.env = {}
        server.restart()
        done = fs.ask("POST", "/checkpoints/prune", {"keep": "last=1", "named": True})
        assert done.status == 200
        assert [one["label"] for one in fs.ask("GET", "/checkpoints").json["checkpoints"]] == ["l5"]
        assert {at: fs.ask("GET", f"/files/f{at}").body for at in wanted} == wanted
        assert any(1 < count < 6 for count in left), "it was killed between two of them"
        server.stop()
        assert audit_stopped(server, either) == []
    finally:
        server.end()


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
