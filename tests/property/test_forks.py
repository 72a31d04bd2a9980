"""Forks against full copies: of heads and of pinned states, of forks, copied in pieces between everybody's
commits; deleted and detached.

The model of each filesystem is `test_versions.Machine` with its whole copies; a fork's begins as a copy of
the state it was made from. After every step each filesystem reads as its model, copied or not, and the audit
of each finds nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.postgres import PostgresServer
from test_versions import Machine, Tree, shown

from fsd.model.blocks import decode, pieces
from fsd.model.errors import Conflict, NotFound
from fsd.model.limits import BLOCK
from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.service.native import Ask
from fsd.service.retained import At
from fsd.service.sweep import Terms
from fsd.wire.frame import open_blob

# What a fork can meet → the steps that can lead there.
LEADS = {
    "fork of the head": ("fork",),
    "fork of a fork": ("fork",),
    "fork of an alias": ("fork",),
    "fork of a checkpoint": ("fork", "checkpoint"),
    "chunk more": ("copy_one", "act"),
    "a write that waited": ("act_on_alias",),
    "a pin on an alias": ("act_on_alias",),
    "delete": ("fork", "delete"),
    "delete refused": ("fork", "delete"),
}


@dataclass
class World:
    """Filesystems by name, each with its machine; whole trees at pins, for forks of them."""

    bench: Bench
    rng: random.Random

    def __post_init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.kept: dict[str, list[tuple[str, int, Tree]]] = {}  # checkpoints: id, seq, the whole copy
        self.refs: dict[str, FsRef] = {}
        self.origin: dict[str, str] = {}
        self.kinds: set[str] = set()
        self.add(self.bench.new_fs(), None)

    def add(self, fs: FsRef, tree: Tree | None) -> Machine:
        self.bench.fs = fs
        made = Machine(self.bench, self.rng)
        if tree is not None:
            made.tree = copy.deepcopy(tree)
            made.seq = self.bench.service.feed.head(fs)
        self.machines[fs.name], self.refs[fs.name], self.kept[fs.name] = made, fs, []
        return made

    def on(self, name: str) -> Machine:
        self.bench.fs = self.refs[name]
        return self.machines[name]

    def copied(self, name: str) -> bool:
        row = self.bench.service.db.read(lambda tx: tx.one("SELECT copied FROM fs WHERE name=?", (name,)))
        assert row is not None
        return bool(row[0])

    # Steps.

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.12 and len(self.machines) < 6:
            self.fork()
        elif kind < 0.3:
            self.copy_one()
        elif kind < 0.36:
            self.delete()
        elif kind < 0.42:
            self.checkpoint()
        elif kind < 0.48:
            self.sweep()
        else:
            self.act()

    def step_to(self, kinds: set[str]) -> None:
        """A random one of the steps that can lead to `kinds`; something that is no fork is there first."""
        if self.machines.keys() == self.origin.keys():
            self.add(self.bench.new_fs(), None)
        step = self.rng.choice(sorted({step for kind in kinds for step in LEADS[kind]}))
        if step in ("copy_one", "act_on_alias") and not self.waiting():
            step = "fork"
        if step == "fork" and len(self.machines) >= 6:
            step = "delete"
        getattr(self, step)()

    def fork(self) -> None:
        kept = [name for name in self.machines if self.kept[name]]
        name = self.rng.choice(kept if kept and self.rng.random() < 0.6 else list(self.machines))
        machine, service = self.on(name), self.bench.service
        if self.kept[name] and self.rng.random() < 0.6:
            checkpoint, seq, tree = self.rng.choice(self.kept[name])
            self.kinds.add("fork of a checkpoint")
        else:
            checkpoint, tree, seq = None, machine.tree, machine.seq
            self.kinds.add("fork of a fork" if name in self.origin else "fork of the head")
            if name in self.waiting():
                self.kinds.add("fork of an alias")
        made = service.db.write(
            lambda tx: service.forks.create(tx, self.refs[name], "", [], checkpoint=checkpoint)
        )
        assert made["origin_seq"] == seq and made["origin_id"] == name
        fs = service.filesystems.get(made["file_system_id"])
        self.add(fs, tree)
        self.origin[fs.name] = name

    def act(self) -> None:
        """A few steps of one filesystem. A write to what is not copied waits for the copy."""
        name = self.rng.choice(list(self.machines))
        if self.waiting() and self.rng.random() < 0.7:
            name = self.rng.choice([one for one in self.machines if one not in self.waiting()])
        self.act_on(name)

    def act_on_alias(self) -> None:
        self.act_on(self.rng.choice(self.waiting()))

    def act_on(self, name: str) -> None:
        machine = self.on(name)
        alias = name in self.waiting()
        before, pinned = machine.seq, set(machine.pins)
        machine.step()
        if alias and machine.seq != before:
            assert self.copied(name)
            self.kinds.add("a write that waited")
        elif alias and machine.pins.keys() - pinned:
            assert not self.copied(name)
            self.kinds.add("a pin on an alias")

    def checkpoint(self) -> None:
        name = self.rng.choice(list(self.machines))
        service, machine = self.bench.service, self.machines[name]
        made = service.db.write(lambda tx: service.checkpoints.make(tx, self.refs[name], None, Ask()))
        assert made["fs_seq"] == machine.seq
        self.kept[name].append((made["checkpoint_id"], machine.seq, copy.deepcopy(machine.tree)))

    def sweep(self) -> None:
        """Nothing is young enough to stay, whatever only another filesystem needs."""
        name = self.rng.choice(list(self.machines))
        cursor: str | None = ""
        while cursor is not None:
            cursor = self.bench.service.sweep.call(name, Terms(-1.0), cursor)["next_cursor"]

    def copy_one(self) -> None:
        waiting = self.waiting()
        if waiting:
            result = self.bench.service.forks._chunk(self.refs[self.rng.choice(waiting)].id)
            self.kinds.add(f"chunk {result}")

    def waiting(self) -> list[str]:
        """Forks that are not copied."""
        return [name for name in self.origin if not self.copied(name)]

    def delete(self) -> None:
        name = self.rng.choice(list(self.machines))
        if len(self.machines) < 3:
            return
        service = self.bench.service
        below = self.depends(name)
        if below:
            with pytest.raises(Conflict, match="not copied yet"):
                service.db.write(lambda tx: service.filesystems.delete(tx, name))
            self.kinds.add("delete refused")
            if self.rng.random() < 0.5:
                service.forks.detach(name)
                self.kinds.add("delete after detaching")
                below = []
        answer = service.db.write(lambda tx: service.filesystems.delete(tx, name, cascade=bool(below)))
        assert sorted(answer["forks_deleted"]) == sorted(below)
        self.kinds.add("delete with its forks" if below else "delete")
        for one in (name, *below):
            del self.machines[one], self.refs[one]
            self.origin.pop(one, None)
            with pytest.raises(NotFound):
                service.filesystems.get(one)
        while service.filesystems.collect():
            continue
        if not self.machines:
            self.add(self.bench.new_fs(), None)

    def depends(self, name: str) -> list[str]:
        """Forks that read this one's rows, and theirs."""
        found = [one for one, origin in self.origin.items() if origin == name and not self.copied(one)]
        return [*found, *(below for one in found for below in self.depends(one))]

    def check(self) -> None:
        for name, machine in self.machines.items():
            self.on(name)
            found = audit(self.bench.service.db, self.refs[name])
            assert not found, (name, found)
            assert live(self.bench) == shown(machine.tree), f"the head of {name}"
            for checkpoint, seq, tree in self.kept[name]:
                assert live(self.bench, At(checkpoint=checkpoint)) == shown(tree), f"{name} at {seq}"
            for seq, kept in machine.pins.values():
                assert live(self.bench, At(seq=seq)) == kept, f"{name} at {seq}"


def live(bench: Bench, at: At | None = None) -> dict[str, Any]:
    """The tree as a mount asks for it: path → (ino, mode, links, data)."""
    service, fs = bench.service, bench.fs
    _, (directories,) = service.namespace.ask(fs, [("tree", 1, 100_000)], at)
    listed = dict(directories)
    found: dict[str, Any] = {}

    def walk(ino: int, path: str) -> None:
        for entry in listed[ino]:
            attr, below = entry.attr, f"{path}/{entry.name.decode()}"
            if attr.is_dir:
                found[below] = (attr.ino, attr.mode, None, None)
                walk(attr.ino, below)
                continue
            _, (answer,) = service.namespace.ask(fs, [("blocks", attr.ino, 0, 4096)], at)
            found[below] = (attr.ino, attr.mode, attr.nlink, content(bench, attr.size, answer[1]))

    walk(1, "")
    return found


def content(bench: Bench, size: int, stored: list[tuple[int, bytes]]) -> bytes:
    """The bytes of a file, each blob verified."""
    data = bytearray(size)
    for idx, raw in stored:
        parts = decode(raw)
        found = bench.service.packs.read(bench.fs.id, [part.hash for part in parts])
        for piece in pieces(parts, 0, BLOCK):
            at = idx * BLOCK + piece.at
            whole = open_blob(found[piece.hash])
            data[at : at + piece.length] = whole[piece.boff : piece.boff + piece.length]
    assert len(data) == size, "content behind the end of the file"
    return bytes(data)


def run(bench: Bench, seed: int, steps: int, needed: Iterable[str] = ()) -> set[str]:
    """At least `steps` random steps, and more until all of `needed` was met. → What was met."""
    world = World(bench, random.Random(seed))
    for _ in range(steps):
        world.step()
        world.check()
    while missing := set(needed) - world.kinds:
        world.step_to(missing)
        world.check()
    for name in world.origin:
        bench.service.forks.finish(world.refs[name])
    world.check()
    bench.new_fs()
    return world.kinds


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few rows a chunk that copies end in the middle of every table; packs that are objects."""
    monkeypatch.setattr("fsd.service.forkcopy.FORK_CHUNK", 3)
    monkeypatch.setattr("fsd.service.packs.PACK_INLINE_MAX", 30)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("forks")) as made:
        yield made


@pytest.mark.usefixtures("small_chunks")
def test_forks_and_everything_beside_them(bench: Bench, seed: int) -> None:
    met: set[str] = set()
    for at in range(3):
        met |= run(bench, seed + at, 40)
    run(bench, seed + 3, 40, LEADS.keys() - met)


@pytest.mark.usefixtures("small_chunks")
def test_forks_on_postgresql(tmp_path: Path, postgres_server: PostgresServer, seed: int) -> None:
    with Bench(tmp_path, database=postgres_server.fresh()) as made:
        run(made, seed, 30, LEADS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", range(60))
def test_forks_long(tmp_path: Path, seed: int, at: int) -> None:
    with Bench(tmp_path) as made:
        run(made, seed + at, 100)
