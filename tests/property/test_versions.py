"""Versioned rows against full copies: random commits, pins and unpins; every pinned state stays as it was.

The model keeps a whole copy of the tree at each pin. After each step: the head and every pin read back equal
to their copies (by the central queries of namespace.md section 2), and the audit finds nothing: versions
disjoint, no dead row that no pin sees, counts and figures as recomputed. Seeds are in the test ids.
"""

from __future__ import annotations

import copy
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Parts, pieces
from fsd.model.limits import BLOCK
from fsd.service import pins, tree
from fsd.service.retained import At, state_of
from fsd.service.tree import block_parts, resolve
from fsd.wire.frame import open_blob
from fsd.wire.messages import TREE

# Sizes around the borders where rows come and go: empty, small, one block exactly, just past it, three.
SIZES = (0, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 7)


@dataclass
class File:
    """An inode of the model: `data` None for a directory."""

    data: bytes | None
    mode: int
    cseq: int = 0
    children: dict[bytes, int] = field(default_factory=dict)
    links: int = 0


Tree = dict[int, File]


def shown(tree: Tree, ino: int = ROOT_INO, path: str = "") -> dict[str, Any]:
    """path → (ino, mode, links, data)."""
    found: dict[str, Any] = {}
    for name, child in sorted(tree[ino].children.items()):
        node = tree[child]
        below = f"{path}/{name.decode()}"
        found[below] = (child, node.mode, node.links if node.data is not None else None, node.data)
        if node.data is None:
            found.update(shown(tree, child, below))
    return found


def tree_at(bench: Bench, at: At | None) -> dict[str, Any]:
    """The tree of the head or at a retained seq, its contents verified: by the mount's questions, all on one
    state, and by path."""
    rows: dict[str, Any] = {}

    def walk(tx: Tx) -> None:
        state = state_of(tx, bench.fs, at)
        top = resolve(tx, state.fs, [], at=state.at).need()
        for below, attr in tree.walk(tx, state.fs, top, b"", 10_000, state.at):
            found = block_parts(tx, state.fs, attr, 0, attr.blocks, state.at)
            what = None if attr.is_dir else (attr.size, sorted(found.items()))
            rows["/" + below.decode()] = (attr.ino, attr.mode, None if attr.is_dir else attr.nlink, what)

    bench.service.db.read(walk)
    seq, (whole,) = bench.service.namespace.ask(bench.fs, [(TREE, ROOT_INO, 10_000)], at)
    assert at is None or at.seq in (None, seq)
    asked = {entry.attr.ino: entry.attr.mode for _, entries in whole for entry in entries}
    assert asked == {row[0]: row[1] for row in rows.values()}
    return {
        path: (ino, mode, nlink, None if what is None else content(bench, *what))
        for path, (ino, mode, nlink, what) in rows.items()
    }


def content(bench: Bench, size: int, blocks: list[tuple[int, Parts]]) -> bytes:
    data = bytearray(size)
    for idx, parts in blocks:
        found = bench.service.packs.read(bench.fs.id, [part.hash for part in parts])
        for piece in pieces(parts, 0, BLOCK):
            at = idx * BLOCK + piece.at
            data[at : at + piece.length] = open_blob(found[piece.hash])[
                piece.boff : piece.boff + piece.length
            ]
    assert len(data) == size
    return bytes(data)


class Machine:
    """Random steps on one mount session, and the model beside it."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench, self.rng = bench, rng
        self.m: Mount = bench.mount()
        self.tree: Tree = {ROOT_INO: File(None, stat.S_IFDIR | 0o755)}
        self.pins: dict[int, tuple[int, dict[str, Any]]] = {}  # pin → seq, the copy
        self.seq = 0
        self.kinds: dict[str, int] = {}

    # What is there.

    def dirs(self) -> list[int]:
        return [ino for ino, node in self.tree.items() if node.data is None]

    def names(self, *, of_dirs: bool) -> list[tuple[int, bytes, int]]:
        return [
            (parent, name, ino)
            for parent in self.dirs()
            for name, ino in self.tree[parent].children.items()
            if (self.tree[ino].data is None) == of_dirs
        ]

    def free(self, parent: int) -> bytes:
        return next(
            name
            for at in range(100)
            if (name := b"%c" % self.rng.choice(b"abcdefgh") + b"%d" % at * (at > 0))
            not in self.tree[parent].children
        )

    def data(self) -> bytes:
        size = self.rng.choice(SIZES)
        return (b"%d." % self.rng.randrange(10**6) * (size // 2 + 1))[:size]

    # Operations: each changes the model and queues the operation.

    def op_create(self) -> None:
        parent = self.rng.choice(self.dirs())
        name, data = self.free(parent), self.data()
        ino = self.m.file(parent, name, data)
        self.tree[ino] = File(data, stat.S_IFREG | 0o644, links=1)
        self.tree[parent].children[name] = ino

    def op_mkdir(self) -> None:
        parent = self.rng.choice(self.dirs())
        name = self.free(parent)
        ino = self.m.mkdir(parent, name)
        self.tree[ino] = File(None, stat.S_IFDIR | 0o755)
        self.tree[parent].children[name] = ino

    def op_write(self) -> None:
        files = self.names(of_dirs=False)
        if not files:
            return
        ino = self.rng.choice(files)[2]
        old = self.tree[ino].data
        assert old is not None
        data = self.data()
        kind = self.rng.randrange(3)
        if kind == 0:
            self.m.write(ino, data, self.seq)
        elif kind == 1:
            data = old[: len(old) // 2]
            self.m.write(ino, data, self.seq, full=False)
        else:
            data = old + data[: BLOCK // 2]
            self.m.write(ino, data, self.seq, full=False, appended_from=len(old))
        self.tree[ino].data = data

    def op_chmod(self) -> None:
        ino = self.rng.choice([ino for ino in self.tree if ino != ROOT_INO] or [0])
        if ino:
            mode = self.rng.choice((0o600, 0o640, 0o755))
            self.m.setattr(ino, mode=mode)
            self.tree[ino].mode = stat.S_IFMT(self.tree[ino].mode) | mode

    def op_link(self) -> None:
        files = self.names(of_dirs=False)
        if files:
            ino = self.rng.choice(files)[2]
            parent = self.rng.choice(self.dirs())
            name = self.free(parent)
            self.m.link(ino, parent, name)
            self.tree[parent].children[name] = ino
            self.tree[ino].links += 1

    def drop(self, ino: int) -> None:
        node = self.tree[ino]
        node.links -= 1
        if node.data is None or node.links == 0:
            del self.tree[ino]

    def op_unlink(self) -> None:
        files = self.names(of_dirs=False)
        if files:
            parent, name, ino = self.rng.choice(files)
            self.m.unlink(parent, name, ino, self.seq)
            del self.tree[parent].children[name]
            self.drop(ino)

    def op_rmdir(self) -> None:
        empty = [one for one in self.names(of_dirs=True) if not self.tree[one[2]].children]
        if empty:
            parent, name, ino = self.rng.choice(empty)
            self.m.rmdir(parent, name, ino)
            del self.tree[parent].children[name]
            self.drop(ino)

    def below(self, ino: int) -> set[int]:
        found = {ino}
        for child in self.tree[ino].children.values():
            found |= self.below(child)
        return found

    def op_rename(self) -> None:
        every = self.names(of_dirs=False) + self.names(of_dirs=True)
        if not every:
            return
        parent, name, ino = self.rng.choice(every)
        is_dir = self.tree[ino].data is None
        allowed = [d for d in self.dirs() if not is_dir or d not in self.below(ino)]
        new_parent = self.rng.choice(allowed)
        over = 0
        targets = [
            (to, there)
            for to, there in self.tree[new_parent].children.items()
            if there != ino
            and (self.tree[there].data is None) == is_dir
            and not self.tree[there].children
            and there != parent
        ]
        if targets and self.rng.random() < 0.6:
            new_name, over = self.rng.choice(targets)
        else:
            new_name = self.free(new_parent)
        self.m.rename(parent, name, ino, new_parent, new_name, over, self.seq)
        del self.tree[parent].children[name]
        self.tree[new_parent].children[new_name] = ino
        if over:
            self.drop(over)

    def op_exchange(self) -> None:
        files = self.names(of_dirs=False)
        if len(files) < 2:
            return
        (p1, n1, i1), (p2, n2, i2) = self.rng.sample(files, 2)
        if i1 == i2:
            return
        self.m.rename(p1, n1, i1, p2, n2, i2, self.seq, flags=2)
        self.tree[p1].children[n1], self.tree[p2].children[n2] = i2, i1

    # Steps.

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            number, seq = self.bench.service.db.write(
                lambda tx: pins.pin(tx, self.bench.fs, "checkpoint", "test")
            )
            self.count("pin")
            self.pins[number] = (seq, copy.deepcopy(shown(self.tree)))
            return
        if kind < 0.27 and self.pins:
            number = self.rng.choice(list(self.pins))
            self.bench.service.db.write(
                lambda tx: pins.unpin(tx, self.bench.service.packs, self.bench.fs, number)
            )
            self.count("unpin")
            del self.pins[number]
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

    def count(self, kind: str) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def check(self) -> None:
        self.bench.audit()
        assert tree_at(self.bench, None) == shown(self.tree), "the head"
        for seq, kept in self.pins.values():
            assert tree_at(self.bench, At(seq=seq)) == kept, f"the state pinned at {seq}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("versions")) as made:
        yield made


def run(bench: Bench, seed: int, steps: int) -> dict[str, int]:
    bench.new_fs()
    machine = Machine(bench, random.Random(seed))
    for _ in range(steps):
        machine.step()
        machine.check()
    while machine.pins:
        number = machine.rng.choice(list(machine.pins))
        bench.service.db.write(lambda tx, n=number: pins.unpin(tx, bench.service.packs, bench.fs, n))
        del machine.pins[number]
        machine.check()
    dead = bench.service.db.read(
        lambda tx: tx.one("SELECT count(*) FROM inode WHERE fs=? AND died<140737488355327", (bench.fs.id,))
    )
    assert dead == (0,), "without pins no history is left"
    return machine.kinds


@pytest.mark.parametrize("seed", range(8))
def test_random_commits_and_pins(bench: Bench, seed: int) -> None:
    kinds = run(bench, seed, 50)
    assert kinds.get("pin", 0) > 0
    assert len(kinds) >= 8, f"too little was tried: {kinds}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_random_commits_and_pins_long(tmp_path: Path, seed: int) -> None:
    with Bench(tmp_path) as made:
        run(made, seed, 120)
