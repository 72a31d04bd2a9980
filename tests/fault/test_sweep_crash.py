"""The server dies at each durable step of a sweep: nothing needed is lost, the next sweep does the rest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.sweep_child import prepare, sweep
from support.sweeping import DAY, SweepBench, same

from fsd.service.access import FsRef

TESTS = Path(__file__).parent.parent
Prepared = tuple[Path, FsRef, dict[str, bytes]]
STEPS = (
    "sweep.blobs",
    "sweep.blobs_gone",
    "sweep.dropped",
    "sweep.written",
    "sweep.moved",
    "sweep.object",
    "sweep.objects_gone",
    "sweep.stray",
    "pack.deleted",
    "pack.synced",
    "pack.durable",
)
SELDOM = ("sweep.blobs", "sweep.dropped", "pack.synced", "sweep.objects_gone")
LONG = pytest.mark.long
POINTS = [
    *[(point, 1) for point in STEPS if point not in SELDOM],
    ("db.commit", 4),
    *[pytest.param(point, 1, marks=LONG) for point in SELDOM],
    *[
        pytest.param(point, count, marks=LONG)
        for point in (*STEPS, "pack.written", "pack.renamed")
        for count in (1, 2)
        if (point, count) not in (("sweep.stray", 2), *((one, 1) for one in STEPS))
    ],
    *[
        pytest.param(point, count, marks=LONG)
        for point in ("db.commit", "db.committed")
        for count in range(1, 17)
    ],
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = tmp_path_factory.mktemp("prepared")
    fs, wanted = prepare(directory)
    return directory, fs, wanted


@pytest.mark.parametrize(("point", "count"), POINTS)
def test_killed_at(point: str, count: int, tmp_path: Path, prepared: Prepared) -> None:
    source, fs, wanted = prepared
    shutil.copytree(source, tmp_path / "data")
    check(tmp_path / "data", point, count, fs, wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "count"),
    [
        *((point, 1) for point in STEPS),
        *((p, n) for p in ("db.commit", "db.committed") for n in (1, 4, 7, 10, 13)),
    ],
)
def test_killed_at_on_postgresql(
    point: str, count: int, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    url = postgres_server.fresh()
    fs, wanted = prepare(tmp_path, url)
    check(tmp_path, point, count, fs, wanted, url)


def check(
    directory: Path, point: str, count: int, fs: FsRef, wanted: dict[str, bytes], database: str | None = None
) -> None:
    """Kill a sweep there; then all is there, and the next sweep ends it."""
    words = [str(directory), point, str(count), *filter(None, [database])]
    done = subprocess.run(
        [sys.executable, "-m", "support.sweep_child", *words],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"the point was never passed: {done.stderr}"
    with SweepBench(directory, database=database) as bench:
        bench.fs = fs
        bench.audit()
        same(bench.tree(), wanted)
        sweep(bench)
        bench.time.ahead = 6 * DAY  # the objects of packs that were rewritten have had their time
        bench.sweep()
        same(bench.tree(), wanted)
        assert (bench.rows("pin"), bench.rows("dropped")) == (0, 0)
        assert bench.rows("blob") == len(wanted)
        objects = [key for key in bench.objects() if fs.name in key]
        assert len(objects) == bench.rows("pack", "AND data IS NULL") > 0


def test_without_a_crash_the_same_is_left(tmp_path: Path, prepared: Prepared) -> None:
    """What the cases above compare with; each kind of step had something to do."""
    source, fs, wanted = prepared
    shutil.copytree(source, tmp_path / "data")
    with SweepBench(tmp_path / "data") as bench:
        bench.fs = fs
        did = sweep(bench)
        for name in ("pins", "blobs", "packs", "packs_rewritten", "packs_gathered", "objects", "strays"):
            assert did[name], f"nothing for {name} to do"
        same(bench.tree(), wanted)
