"""What checkpoints cost: rows for what changed and not for what exists, and all of it back at the end."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from support.bench import Bench, Mount
from support.postgres import PostgresServer

from fsd.model.attrs import ROOT_INO
from fsd.service.difference import Difference
from fsd.service.native import Ask
from fsd.service.restore import Wish
from fsd.service.retained import At


def grow(mount: Mount, count: int) -> list[int]:
    """A tree of `count` small files, 100 to a directory."""
    inos: list[int] = []
    directory = ROOT_INO
    for number in range(count):
        if number % 100 == 0:
            directory = mount.mkdir(ROOT_INO, b"d%d" % number)
        inos.append(mount.file(directory, b"f%d" % number, b"content %d" % (number % 50)))
        if len(mount.queue) > 3000:
            mount.commit()
    mount.commit()
    return inos


def rows(bench: Bench) -> tuple[int, int]:
    """Live and retained versions of inodes."""

    def count(condition: str) -> int:
        sql = f"SELECT count(*) FROM inode WHERE fs=? AND died{condition}140737488355327"
        row = bench.service.db.read(lambda tx: tx.one(sql, (bench.fs.id,)))
        assert row is not None
        return int(row[0])

    return count("="), count("<")


def timed(times: dict[str, list[float]], what: str, began: float) -> None:
    times.setdefault(what, []).append((time.perf_counter() - began) * 1000)


def live_through(bench: Bench, tree: int, checkpoints: int, changes: int) -> dict[str, float]:
    """Checkpoints with changes in between, compared, restored, deleted; medians in ms."""
    service, fs = bench.service, bench.fs
    mount = bench.mount()
    rng = random.Random(tree)
    inos = grow(mount, tree)[:1000]  # as many are changed, however many there are
    times: dict[str, list[float]] = {}
    names: list[tuple[str, int]] = []
    for turn in range(checkpoints):
        began = time.perf_counter()
        made = service.db.write(lambda tx: service.checkpoints.make(tx, fs, None, Ask()))
        timed(times, "create", began)
        names.append((made["checkpoint_id"], made["fs_seq"]))
        for ino in rng.sample(inos, changes):
            mount.write(ino, b"%d" % turn, mount.seq)
        mount.commit()
    live, dead = rows(bench)
    assert live == tree + -(-tree // 100) + 1
    assert dead == checkpoints * changes, "one retained version for each change between two checkpoints"
    for (_, first), (_, last) in itertools.pairwise(names):
        began = time.perf_counter()
        found = service.db.read(lambda tx, a=first, b=last: Difference(tx, fs.id, a, b).changes())  # type: ignore[misc]
        timed(times, "diff", began)
        assert len(found) == changes
    for name, _ in (names[-1], names[0]):
        wish = Wish(At(checkpoint=name), own=frozenset([mount.session]))
        began = time.perf_counter()
        done = service.db.write(lambda tx, w=wish: service.restores.restore(tx, fs, None, w))  # type: ignore[misc]
        timed(times, "restore", began)
        assert done.undo is not None
        names.append((done.undo["checkpoint_id"], done.undo["fs_seq"]))
    bench.audit()
    rng.shuffle(names)
    for name, _ in names:
        began = time.perf_counter()
        service.db.write(lambda tx, n=name: service.checkpoints.delete(tx, fs, None, n))  # type: ignore[misc]
        timed(times, "delete", began)
    assert rows(bench) == (live, 0), "without checkpoints no history is left"
    return {what: sorted(some)[len(some) // 2] for what, some in times.items()}


def test_growth(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        live_through(bench, 2000, 12, 20)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_growth_of_a_large_tree(tmp_path: Path, engine: str, request: pytest.FixtureRequest) -> None:
    """Costs follow the changes: a hundred times the files, about the same times (generous bounds)."""
    url = None
    if engine == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh()
    with Bench(tmp_path, database=url) as bench:
        small = live_through(bench, 1000, 200, 100)
        bench.audit()
        bench.new_fs()
        large = live_through(bench, 100_000, 200, 100)
    print(f"{engine}: 1,000 files {small}, 100,000 files {large}")
    for what, spent in large.items():
        assert spent < 6 * small[what] + 20, (what, small, large)
