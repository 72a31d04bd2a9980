"""Disk use before and after: 20,000 files made, overwritten and deleted, then swept; printed with `-s`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.sweeping import DAY, SweepBench, noise
from support.wait import wait_for

from fsd.meta import sqlite
from fsd.model.attrs import ROOT_INO

BATCH = 1000


def churn(bench: SweepBench, count: int) -> None:
    """`count` files in directories of a thousand: made, overwritten, deleted, as one mount does it."""
    m = bench.mount()
    for at in range(0, count, BATCH):
        directory = m.mkdir(ROOT_INO, b"d%d" % at)
        inos = [m.file(directory, b"f%d" % n, noise(at + n, 3000)) for n in range(min(BATCH, count - at))]
        m.commit()
        for n, ino in enumerate(inos):
            m.write(ino, noise(count + at + n, 3000), m.seq)
        m.commit()
        for n, ino in enumerate(inos):
            m.unlink(directory, b"f%d" % n, ino, m.seq)
        m.rmdir(ROOT_INO, b"d%d" % at, directory)
        m.commit()


def room(bench: SweepBench) -> tuple[int, int]:
    """Bytes of the database and of the objects."""
    return bench.service.db.room().bytes, sum(bench.objects().values())


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        ("sqlite", 1000),
        pytest.param("postgresql", 1000, marks=pytest.mark.long),
        pytest.param("sqlite", 20_000, marks=pytest.mark.long),
        pytest.param("postgresql", 20_000, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(600)
def test_what_was_made_and_deleted_leaves_no_room_taken(
    engine: str, count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = None
    if engine == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh()
    with SweepBench(tmp_path / "data", database=url) as bench:
        start = room(bench)
        churn(bench, count)
        full = room(bench)
        assert full[1] > count * 6000 - 1
        bench.time.ahead = 100 * DAY  # also past what is kept of feed and sessions
        began = time.monotonic()
        done = bench.sweep(vacuum=True)
        took = time.monotonic() - began
        end = room(bench)
        print(f"{engine}, {count} files: start {start}, full {full}, swept in {took:.1f} s {end}: {done}")
        assert done["blobs"] == 2 * count
        assert end[1] == start[1] == 0
        assert end[0] <= start[0] + (512 << 10 if engine == "sqlite" else full[0] - start[0])
        for table in ("inode", "dentry", "block", "blob", "pack", "dropped", "gone"):
            assert bench.rows(table) == (table == "inode"), f"rows are left in {table}"
        if engine == "sqlite":
            assert end[0] < 2 << 20, "nor does the file keep the room that the WAL was made with"
            files = sum(one.stat().st_size for one in (tmp_path / "data").glob("fsd.db*"))
            assert files < start[0] + (24 << 20), "the WAL has come back too"


def free_pages(bench: SweepBench) -> int:
    """Pages inside the SQLite file that hold nothing."""
    return int(bench.service.db.read(lambda tx: tx.all("PRAGMA freelist_count"))[0][0])


def test_writes_go_on_while_room_is_given_back(tmp_path: Path) -> None:
    """Each step is a short transaction: a commit begun beside one ends before the next begins. The writer
    grows the file meanwhile, so the room is counted in free pages."""
    with SweepBench(tmp_path) as bench:
        churn(bench, 2000)
        bench.time.ahead = 100 * DAY
        bench.sweep()
        before = free_pages(bench)
        assert before > 120
        wanted = threading.Semaphore(0)
        committed: list[int] = []
        over = threading.Event()

        def write() -> None:
            m = bench.mount("other")
            while wanted.acquire() and not over.is_set():
                m.file(ROOT_INO, b"w%d" % len(committed), b"x")
                m.commit()
                committed.append(1)

        thread = threading.Thread(target=write)
        thread.start()
        steps, more = 0, True
        try:
            while more:
                wanted.release()
                more = bench.service.db.give_back(10)
                wait_for(lambda: len(committed) > steps or not thread.is_alive(), 60, "the commit")  # noqa: B023
                steps += 1
        finally:
            over.set()
            wanted.release()
            thread.join()
        assert len(committed) == steps > 3
        assert free_pages(bench) < 10, "what is left is what the last writes freed"


def test_a_file_made_before_steps_were_possible_is_written_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_INCREMENTAL", 0)
    with SweepBench(tmp_path) as bench:
        churn(bench, 1000)
    monkeypatch.undo()
    with SweepBench(tmp_path) as bench:
        m = bench.mount()
        m.file(ROOT_INO, b"kept", noise(1, 5000))
        m.commit()
        size = os.stat(tmp_path / sqlite.FILE).st_size
        bench.time.ahead = 100 * DAY
        bench.sweep(everything=True, vacuum=True)
        assert bench.tree() == {"kept": noise(1, 5000)}
        assert os.stat(tmp_path / sqlite.FILE).st_size < size
        assert bench.service.db.read(lambda tx: tx.one("PRAGMA auto_vacuum")) == (2,)
