"""Forks made, copied, merged, checkpointed, swept and deleted while everybody writes: no error but those a
caller is to expect, what was committed is there, and the audit of each filesystem finds nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.daywork import Mount, content_of
from support.postgres import database_of

from fsd.model import ops
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Busy, Conflict, ForkCopying, FsdError, NotFound
from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.service.merge import Wish
from fsd.service.native import Ask
from fsd.service.sweep import Terms
from fsd.wire.frame import make_blob

EXPECTED = (Busy, Conflict, ForkCopying, NotFound)


class Race:
    """Threads over one origin and whatever forks there are."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        """Until so many seconds are over and each kind of step was done once, however slow the machine."""
        self.bench, self.service, self.origin = bench, bench.service, bench.fs
        self.end = time.monotonic() + seconds
        self.forks: list[FsRef] = []
        self.failed: list[BaseException] = []
        self.done: dict[str, int] = {}
        self.written: dict[str, set[str]] = {}  # names committed to each filesystem; nobody removes any

    def any(self, rng: random.Random) -> FsRef:
        return rng.choice([self.origin, *self.forks])

    def loop(self, name: str, step: Callable[[random.Random], Any]) -> None:
        rng = random.Random(name)
        while not self.failed and (time.monotonic() < self.end or not self.all_done()):
            try:
                step(rng)
                self.done[name] = self.done.get(name, 0) + 1
            except EXPECTED:
                continue
            except BaseException as exc:  # noqa: BLE001 - told by the main thread
                self.failed.append(exc)

    def all_done(self) -> bool:
        return all(name in self.done for name in ("fork0", "write1", "merge3"))

    def fork(self, rng: random.Random) -> None:
        if len(self.forks) > 5:
            time.sleep(0.01)
            return
        of = self.any(rng)
        made = self.service.db.write(lambda tx: self.service.forks.create(tx, of, "", []))
        self.forks.append(self.service.filesystems.get(made["file_system_id"]))

    def write(self, rng: random.Random) -> None:
        """A file of some thousand bytes, replaced now and then, by a session of its own."""
        fs = self.any(rng)
        mount = Mount(self.service, fs, f"w{rng.random()}")
        for at in range(3):
            ino, blob = mount.ino(), make_blob(rng.randbytes(rng.choice((10, 3000))))
            name = b"%d-%d" % (mount.start.session, at)
            content = content_of([blob])
            size = blob.raw_len
            mount.commit(
                [
                    mount.create(ROOT_INO, name, ino, 0o100644),
                    ops.Content(mount.op(), ops.CONTENT, ino, 0, size, content, True, None, 9, 9),
                ],
                [blob],
            )
            self.written.setdefault(fs.name, set()).add(name.decode())

    def merge(self, rng: random.Random) -> None:
        if self.forks:
            fork = rng.choice(self.forks)
            into = self.service.db.read(lambda tx: self.service.forks.origin_of(tx, fork))
            ready = self.service.merges.prepare(into, fork, Wish())
            self.service.db.write(lambda tx: self.service.merges.merge(tx, into, fork, None, Wish(), ready))

    def copy(self, _rng: random.Random) -> None:
        self.service.forks.copy_some()

    def sweep(self, rng: random.Random) -> None:
        self.service.sweep.call(self.any(rng).name, Terms(60.0), "")

    def checkpoint(self, rng: random.Random) -> None:
        fs = self.any(rng)
        made = self.service.db.write(lambda tx: self.service.checkpoints.make(tx, fs, None, Ask()))
        name = made["checkpoint_id"]
        self.service.db.write(lambda tx: self.service.checkpoints.delete(tx, fs, None, name))

    def delete(self, rng: random.Random) -> None:
        if len(self.forks) > 3:
            fork = rng.choice(self.forks)
            told = self.service.db.write(
                lambda tx: self.service.filesystems.delete(tx, fork.name, cascade=rng.random() < 0.5)
            )
            gone = {fork.name, *told["forks_deleted"]}
            self.forks = [one for one in self.forks if one.name not in gone]
        self.service.filesystems.collect()

    def run(self) -> None:
        steps = (
            *(self.fork, self.write, self.write, self.merge),
            *(self.copy, self.sweep, self.checkpoint, self.delete),
        )
        threads = [
            threading.Thread(target=self.loop, args=(f"{step.__name__}{at}", step))
            for at, step in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("fsd.service.forkcopy.FORK_CHUNK", 5)
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def race(bench: Bench, seconds: float) -> None:
    made = Race(bench, seconds)
    made.run()
    for fs in list(made.forks):
        try:
            made.service.filesystems.get(fs.name)
        except FsdError:
            made.forks.remove(fs)
            continue
        made.service.forks.finish(fs)
    for fs in (made.origin, *made.forks):
        found = audit(bench.service.db, fs)
        assert not found, (fs, found)
        bench.fs = fs
        lost = made.written.get(fs.name, set()) - bench.tree().keys()
        assert not lost, (fs, lost)
    assert made.written
    bench.fs = made.origin


def test_everything_at_once(bench: Bench) -> None:
    race(bench, 2.0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_everything_at_once_long(bench: Bench) -> None:
    race(bench, 60.0)
