"""Checkpoints against full copies: made, deleted and restored, whole and by path, between random commits.

The model (that of `test_versions`) keeps a whole copy of the tree at each checkpoint. After each step the
head and every checkpoint read back equal to their copies, the difference of two states says exactly what
differs between their copies, and the audit finds nothing: no dead row that no pin sees, counts and figures as
recomputed.
"""

from __future__ import annotations

import copy
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.postgres import PostgresServer
from test_versions import File, Machine, Tree, shown, tree_at

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.blocks import Part
from fsd.model.errors import PosixError
from fsd.service.difference import Difference
from fsd.service.history import newest_with
from fsd.service.native import Ask
from fsd.service.restore import Restored, Wish
from fsd.service.retained import At, state_of
from fsd.service.tree import block_parts
from fsd.wire.frame import open_blob


@dataclass
class Kept:
    """A checkpoint: its seq, what it shows, and the model's tree."""

    seq: int
    shown: dict[str, Any]
    tree: Tree


class Keeper(Machine):
    """As `Machine`, with checkpoints instead of bare pins."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        super().__init__(bench, rng)
        self.kept: dict[str, Kept] = {}  # by checkpoint

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            self.checkpoint()
            return
        if kind < 0.27 and self.kept:
            self.forget(self.rng.choice(list(self.kept)))
            self.count("delete")
            return
        if kind < 0.33 and self.kept:
            self.restore(self.rng.choice(list(self.kept)))
            return
        if kind < 0.41 and self.kept:
            self.restore_path(self.rng.choice(list(self.kept)))
            return
        if kind < 0.46 and self.kept:
            self.undelete()
            return
        chosen = [name for name in dir(self) if name.startswith("op_")]
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            name = self.rng.choice(chosen)
            before = len(self.m.queue)
            getattr(self, name)()
            self.count(name) if len(self.m.queue) > before else None
        if self.m.queue:
            assert self.m.commit() == [], "one session alone meets no conflict"
            self.seq = self.m.seq

    def checkpoint(self) -> None:
        service = self.bench.service
        made = service.db.write(lambda tx: service.checkpoints.make(tx, self.bench.fs, None, Ask()))
        self.keep(made)
        self.count("make")

    def keep(self, made: dict[str, Any]) -> None:
        """The model's copy of a checkpoint of the present state."""
        tree = copy.deepcopy(self.tree)
        self.kept[made["checkpoint_id"]] = Kept(made["fs_seq"], shown(tree), tree)

    def forget(self, name: str) -> None:
        service = self.bench.service
        service.db.write(lambda tx: service.checkpoints.delete(tx, self.bench.fs, None, name))
        del self.kept[name]

    def ask_restore(self, name: str, path: tuple[bytes, ...]) -> Restored:
        service = self.bench.service
        wish = Wish(At(checkpoint=name), path, own=frozenset([self.m.session]))
        done = service.db.write(lambda tx: service.restores.restore(tx, self.bench.fs, None, wish))
        if done.undo is not None:
            self.keep(done.undo)
        assert done.seq == self.seq + done.moved
        self.seq = self.m.seq = done.seq
        return done

    def restore(self, name: str) -> None:
        """The whole tree."""
        self.count("restore") if self.ask_restore(name, ()).moved else None
        self.tree = copy.deepcopy(self.kept[name].tree)

    def restore_path(self, name: str) -> None:
        """One path: below it the copy, all else as it was."""
        kept = self.kept[name]
        if not kept.shown:
            return
        path = self.rng.choice(list(kept.shown))
        try:
            done = self.ask_restore(name, components(path))
        except PosixError:
            return  # a file is now where a directory of the path was
        self.count("restore path") if done.moved else None
        self.is_back(path, kept)

    def undelete(self) -> None:
        """A path that is gone comes back from the newest checkpoint that has it."""
        here = shown(self.tree)
        gone = sorted({path for kept in self.kept.values() for path in kept.shown} - here.keys())
        if not gone:
            return
        path = self.rng.choice(gone)
        if any(isinstance(here.get(path[:at], (0, 0, 0, None))[3], bytes) for at in range(len(path))):
            return  # a file is now where a directory of the path was
        newest = max((kept for kept in self.kept.values() if path in kept.shown), key=lambda kept: kept.seq)
        service, fs = self.bench.service, self.bench.fs

        def bring_back(tx: Tx) -> Restored:
            seq, there = newest_with(tx, fs, components(path))
            assert (seq, there) == (newest.seq, tuple(components(path)))
            wish = Wish(At(seq=seq), components(path), own=frozenset([self.m.session]), absent=True)
            return service.restores.restore(tx, fs, None, wish)

        done = service.db.write(bring_back)
        assert done.moved and done.undo is None
        self.seq = self.m.seq = done.seq
        self.count("undelete")
        self.is_back(path, newest)

    def is_back(self, path: str, kept: Kept) -> None:
        """`path` is what it was, all else is what it is in the model. Inode numbers may be new, so the model
        is made anew from what is there."""
        before = shown(self.tree)
        now = tree_at(self.bench, None)
        above = {path[:at] for at, char in enumerate(path) if char == "/"}
        for below in now.keys() | before.keys() | kept.shown.keys():
            inside = below == path or below.startswith(path + "/")
            was = (kept.shown if inside or below in above - before.keys() else before).get(below)
            assert (was is None) == (below not in now), below
            if was is not None:
                assert now[below][1::2] == was[1::2], below
                assert inside or below not in before or now[below][0] == was[0], below
        assert self.linked(now, path) == self.linked(kept.shown, path)
        self.tree = rebuilt(now)

    @staticmethod
    def linked(found: dict[str, Any], path: str) -> set[frozenset[str]]:
        """Which paths below `path` are names of one file."""
        groups: dict[int, set[str]] = {}
        for below, row in found.items():
            if below == path or below.startswith(path + "/"):
                groups.setdefault(row[0], set()).add(below)
        return {frozenset(group) for group in groups.values()}

    def check(self) -> None:
        self.bench.audit()
        assert tree_at(self.bench, None) == shown(self.tree), "the head"
        for name, kept in self.kept.items():
            assert tree_at(self.bench, At(checkpoint=name)) == kept.shown, f"the checkpoint at {kept.seq}"
        if self.kept:
            states = [(kept.seq, kept.shown) for kept in self.kept.values()]
            self.compare(self.rng.choice(states), self.rng.choice([*states, (self.seq, shown(self.tree))]))

    def compare(self, first: tuple[int, dict[str, Any]], last: tuple[int, dict[str, Any]]) -> None:
        """The difference of two states says what differs between their copies: each change holds, and each
        path that differs is told of, or lies below one that was renamed."""
        fs = self.bench.fs.id
        changes = self.bench.service.db.read(lambda tx: Difference(tx, fs, first[0], last[0]).changes())
        before, after = first[1], last[1]
        told: set[str] = set()
        left, came = set[str](), set[str]()  # what is below directories that were renamed: before, after
        for change in changes:
            if change.kind == "renamed" and change.source is not None:
                left.add(change.source.decode() + "/")
                came.add(change.path.decode() + "/")
        moved = left | came
        for change in changes:
            path = change.path.decode()
            was = before.get(path if change.source is None else change.source.decode())
            now = after.get(path)
            told.update((path, path if change.source is None else change.source.decode()))
            if change.kind == "renamed":
                assert change.source is not None
                assert was is not None and now is not None and was[0] == now[0], change
            elif change.kind in ("added", "removed"):
                there = now if change.kind == "added" else was
                assert there is not None, change
                if was is not None and now is not None and was[0] == now[0]:
                    # A name of one inode on both sides, in two directories: the rename of one has the other.
                    tops = left if change.kind == "added" else came
                    assert any(path.startswith(top) for top in tops), change
                    above = path.rpartition("/")[0]
                    assert before[above][0] != after[above][0], change
            elif path != "/":
                assert change.before is not None
                if was is None or (
                    was[0] != change.before.ino and any(path.startswith(top) for top in moved)
                ):
                    # In a directory that was renamed: under another path before.
                    was = next(row for row in before.values() if row[0] == change.before.ino)
                assert now is not None, change
                if change.kind == "replaced":
                    assert change.content and stat.S_IFMT(was[1]) != stat.S_IFMT(now[1]), change
                elif was[3] == now[3] and change.content:
                    # The same bytes, stored otherwise: the difference reads no content.
                    assert change.after is not None
                    ends = ((first[0], change.before), (last[0], change.after))
                    assert any(self.is_cut(seq, attr) for seq, attr in ends), change
                else:
                    assert (was[3] != now[3]) == change.content, change
        for path in before.keys() | after.keys():
            old, new = before.get(path), after.get(path)
            if old is None or new is None or old[1::2] != new[1::2]:
                assert path in told or any(path.startswith(top) for top in moved), path

    def is_cut(self, seq: int, attr: Attr) -> bool:
        """Whether a block of the file was cut short: it shows only a part of a blob."""

        def parts(tx: Tx) -> list[Part]:
            state = state_of(tx, self.bench.fs, At(seq=seq))
            found = block_parts(tx, state.fs, attr, 0, attr.blocks, state.at)
            return [part for parts in found.values() for part in parts]

        used = self.bench.service.db.read(parts)
        blobs = self.bench.service.packs.read(self.bench.fs.id, [part.hash for part in used])
        return any(len(open_blob(blobs[part.hash])) != part.length for part in used)


def components(path: str) -> tuple[bytes, ...]:
    return tuple(part.encode() for part in path.split("/")[1:])


def rebuilt(found: dict[str, Any]) -> Tree:
    """A model of what is there."""
    tree: Tree = {ROOT_INO: File(None, stat.S_IFDIR | 0o755)}
    inos = {"": ROOT_INO}
    for path, (ino, mode, _, data) in sorted(found.items()):
        parent, _, name = path.rpartition("/")
        inos[path] = ino
        node = tree.setdefault(ino, File(data, mode))
        node.links += 1
        tree[inos[parent]].children[name.encode()] = ino
    return tree


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("versions")) as made:
        yield made


def run(bench: Bench, seed: int, steps: int) -> dict[str, int]:
    bench.new_fs()
    machine = Keeper(bench, random.Random(seed))
    for _ in range(steps):
        machine.step()
        machine.check()
    while machine.kept:
        machine.forget(machine.rng.choice(list(machine.kept)))
        machine.check()
    dead = bench.service.db.read(
        lambda tx: tx.one("SELECT count(*) FROM inode WHERE fs=? AND died<140737488355327", (bench.fs.id,))
    )
    assert dead == (0,), "without pins no history is left"
    return machine.kinds


@pytest.mark.parametrize("seed", range(3))
def test_random_commits_and_checkpoints(bench: Bench, seed: int) -> None:
    kinds = run(bench, seed, 40)
    assert kinds.get("make", 0) > 0
    assert len(kinds) >= 9, f"too little was tried: {kinds}"


def test_random_commits_and_checkpoints_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, seed: int
) -> None:
    with Bench(tmp_path, database=postgres_server.fresh()) as made:
        run(made, seed, 25)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("engine", "number"), [*(("sqlite", n) for n in range(25)), *(("postgresql", n) for n in range(4))]
)
def test_random_commits_and_checkpoints_long(
    tmp_path: Path, request: pytest.FixtureRequest, engine: str, number: int, seed: int
) -> None:
    url = request.getfixturevalue("postgres_server").fresh() if engine == "postgresql" else None
    with Bench(tmp_path, database=url) as made:
        run(made, seed + number, 120)
