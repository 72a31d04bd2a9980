"""Merges against what paths say: random changes of a fork and of its parent, merged.

`plain` runs (no renames, no links) are compared path by path with a three-way merge of the two trees: what is
expected is known exactly, conflicts included. `wild` runs do everything: after them every filesystem passes
the audit, a conflict has changed nothing, a merge has lost no content that either side wrote, and merging
again does nothing. `moves` runs are mostly renames, with answers for one side here and for the other there.
"""

from __future__ import annotations

import copy
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.postgres import PostgresServer
from test_forks import live
from test_versions import Machine, shown

from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.service.merge import CONFLICTS, MERGED, Wish

Shown = dict[str, Any]


class Pair:
    """A parent with a fork, and a machine for each."""

    def __init__(self, bench: Bench, rng: random.Random, *, plain: bool) -> None:
        self.bench, self.rng = bench, rng
        self.parent = bench.new_fs()
        self.ours = Machine(bench, rng)
        self.play(self.ours, self.parent, 25, plain=plain)
        service = bench.service
        made = service.db.write(lambda tx: service.forks.create(tx, self.parent, "", []))
        self.fork = service.filesystems.get(made["file_system_id"])
        bench.fs = self.fork
        self.theirs = Machine(bench, rng)
        self.theirs.tree = copy.deepcopy(self.ours.tree)
        self.theirs.seq = made["fs_seq"]
        self.base = shown(self.ours.tree)
        self.base_stored = self.stored(self.parent)

    def play(
        self, machine: Machine, fs: FsRef, steps: int, *, plain: bool = False, moves: bool = False
    ) -> None:
        """Random commits of one side."""
        self.bench.fs = fs
        kinds = [name for name in dir(machine) if name.startswith("op_")]
        if plain:
            kinds = ["op_create", "op_mkdir", "op_write", "op_chmod", "op_unlink", "op_rmdir"]
        elif moves:
            kinds += ["op_rename"] * 5 + ["op_mkdir", "op_rmdir"]
        for _ in range(steps):
            for _ in range(self.rng.choice((1, 1, 3))):
                getattr(machine, self.rng.choice(kinds))()
            if machine.m.queue:
                assert machine.m.commit() == [], "a side alone meets no conflict"
                machine.seq = machine.m.seq

    def on(self, fs: FsRef) -> Shown:
        self.bench.fs = fs
        return live(self.bench)

    def stored(self, fs: FsRef) -> dict[str, Any]:
        """path → the blobs a file's content is of: what a merge compares (it does not read them)."""
        ask = self.bench.service.namespace.ask
        return {
            path: ask(fs, [("blocks", ino, 0, 4096)])[1][0][1]
            for path, (ino, _mode, _links, data) in self.on(fs).items()
            if data is not None
        }

    def audit(self) -> None:
        for fs in (self.parent, self.fork):
            found = audit(self.bench.service.db, fs)
            assert not found, found

    def merge(self, wish: Wish | None = None) -> dict[str, Any]:
        service = self.bench.service
        told = service.merges.rehearse(self.parent, self.fork, wish or Wish())
        ready = None
        if self.rng.random() < 0.5:
            ready = service.merges.prepare(self.parent, self.fork, wish or Wish())
        done = service.db.write(
            lambda tx: service.merges.merge(tx, self.parent, self.fork, None, wish or Wish(), ready)
        )
        assert (told["status"] == CONFLICTS) == (done["status"] == CONFLICTS)
        assert told["conflicts"] == done["conflicts"]
        return done


def flat(tree: Shown, stored: Shown) -> Shown:
    """What a path-wise merge looks at: mode and content, None for a directory's. The same bytes in other
    blobs are another content: a block cut short keeps its blob, one written anew has its own."""
    return {
        path: (mode, None if data is None else (data, stored[path]))
        for path, (_ino, mode, _links, data) in tree.items()
    }


def expected(base: Shown, ours: Shown, theirs: Shown) -> tuple[Shown, set[str]]:
    """The merged tree and the paths in conflict, by paths alone."""
    merged: Shown = {}
    conflicts: set[str] = set()
    for path in base.keys() | ours.keys() | theirs.keys():
        was, mine, other = base.get(path), ours.get(path), theirs.get(path)
        if other in (was, mine):
            found = mine
        elif mine == was:
            found = other
        elif was and mine and other and len({was[1] is None, mine[1] is None, other[1] is None}) == 1:
            # Mode and content for themselves.
            parts = []
            for w, m, o in zip(was, mine, other):
                if o not in (w, m) and m != w:
                    conflicts.add(path)
                parts.append(m if o == w else o)
            found = tuple(parts)
        elif mine and other and mine[1] is None and other[1] is None:
            # Both made the directory: an ordinary mode gives way.
            if mine[0] != other[0] and stat.S_IFDIR | 0o755 not in (mine[0], other[0]):
                conflicts.add(path)
            found = other if mine[0] == stat.S_IFDIR | 0o755 else mine
        else:
            conflicts.add(path)
            found = mine
        if found is not None:
            merged[path] = found
    # What lies in a directory that is not there any more.
    for path in list(merged):
        above = path.rsplit("/", 1)[0]
        while above:
            if merged.get(above, (0, b""))[1] is not None:
                conflicts.add(path)
            above = above.rsplit("/", 1)[0]
    return merged, conflicts


def plain_run(bench: Bench, seed: int) -> str:
    pair = Pair(bench, random.Random(seed), plain=True)
    pair.play(pair.theirs, pair.fork, pair.rng.choice((2, 6)), plain=True)
    pair.play(pair.ours, pair.parent, pair.rng.choice((0, 2, 6)), plain=True)
    ours, theirs = pair.on(pair.parent), pair.on(pair.fork)
    before = flat(pair.base, pair.base_stored)
    merged, conflicts = expected(
        before, flat(ours, pair.stored(pair.parent)), flat(theirs, pair.stored(pair.fork))
    )
    done = pair.merge()
    after = pair.on(pair.parent)
    pair.audit()
    assert pair.on(pair.fork) == theirs, "a merge changes nothing of the fork"
    if conflicts:
        assert done["status"] == CONFLICTS, (conflicts, done)
        assert after == ours
    else:
        assert done["status"] != CONFLICTS, done
        assert flat(after, pair.stored(pair.parent)) == merged
    return str(done["status"])


def contents(tree: Shown) -> set[bytes]:
    return {data for _, _, _, data in tree.values() if data}


def directories(tree: Shown) -> set[int]:
    return {ino for ino, _, _, data in tree.values() if data is None}


def by_inode(tree: Shown) -> dict[int, tuple[Any, ...]]:
    return {ino: (mode, data) for ino, mode, _, data in tree.values()}


def check_inodes(base: Shown, ours: Shown, theirs: Shown, after: Shown) -> None:
    """Nobody decided anything: of an inode that all three have is there what one side made of it. Names of a
    file may go on either side, and the file with the last one, but not with a change."""
    was, mine, other, now = map(by_inode, (base, ours, theirs, after))
    for ino in (was.keys() & mine.keys()) - other.keys() - now.keys():
        names = [path for path, (held, *_) in base.items() if held == ino]
        assert mine[ino] == was[ino] or any(path in theirs for path in names), "a change went without a word"
    for ino in was.keys() & mine.keys() & other.keys():
        if ino not in now:
            assert other[ino] == was[ino], "what the fork changed went with its names"
            assert mine[ino][1] == was[ino][1], "what the parent wrote went with its names"
            names = [path for path, (held, *_) in base.items() if held == ino]
            replaced = any(path in theirs and theirs[path][0] != ino for path in names)
            assert replaced or mine[ino] == was[ino], "what the parent made of its mode went with its names"
            continue
        for before, here, there, found in zip(was[ino], mine[ino], other[ino], now[ino]):
            assert before in (here, there) or here == there, "both changed it, and no conflict was told"
            assert found == (here if there == before else there)


def wild_run(bench: Bench, seed: int) -> list[str]:
    pair = Pair(bench, random.Random(seed), plain=False)
    told: list[str] = []
    base = pair.base
    for _ in range(3):
        pair.play(pair.theirs, pair.fork, pair.rng.choice((1, 3)), plain=False)
        if pair.rng.random() < 0.7:
            pair.play(pair.ours, pair.parent, pair.rng.choice((1, 3)), plain=False)
        ours, theirs = pair.on(pair.parent), pair.on(pair.fork)
        done = pair.merge()
        told.append(str(done["status"]))
        after = pair.on(pair.parent)
        pair.audit()
        assert pair.on(pair.fork) == theirs
        if done["status"] == CONFLICTS:
            assert after == ours, "with conflicts nothing is applied"
            keep = pair.rng.random() < 0.5
            done = pair.merge(Wish(ours=("*",)) if keep else Wish(theirs=("*",)))
            pair.audit()
            told.append(f"decided: {done['status']}")
            if keep:
                assert done["status"] != CONFLICTS or {"loop"} == {one["kind"] for one in done["conflicts"]}
                assert contents(ours) - contents(base) <= contents(pair.on(pair.parent))
            break
        assert directories(ours) & directories(theirs) <= directories(after), "both have it"
        check_inodes(base, ours, theirs, after)
        written = (contents(ours) | contents(theirs)) - contents(base)
        assert written & contents(ours) & contents(theirs) <= contents(after)
        for data in written:
            # Nobody else can have wanted it gone: it is new.
            assert data in contents(after), "content that one side wrote is lost"
        assert pair.merge()["status"] == "nothing"
        base = theirs
        pair.ours.tree = rebuilt(pair.bench, pair.parent)
        pair.ours.seq = pair.bench.service.feed.head(pair.parent)
    return told


def moves_run(bench: Bench, seed: int) -> str:
    """Mostly renames on both sides; conflicts decided now for one side, now for the other."""
    rng = random.Random(seed)
    pair = Pair(bench, rng, plain=False)
    pair.play(pair.theirs, pair.fork, rng.choice((1, 3, 5)), moves=True)
    pair.play(pair.ours, pair.parent, rng.choice((1, 3, 5)), moves=True)
    ours, theirs = pair.on(pair.parent), pair.on(pair.fork)
    done = pair.merge()
    pair.audit()
    both = directories(ours) & directories(theirs)
    if done["status"] != CONFLICTS:
        assert both <= directories(pair.on(pair.parent)), "a directory that both have is gone"
        written = (contents(ours) | contents(theirs)) - contents(pair.base)
        assert written <= contents(pair.on(pair.parent)), "content that one side wrote is lost"
        check_inodes(pair.base, ours, theirs, pair.on(pair.parent))
        return str(done["status"])
    some = [f"*/{name}" for name in rng.sample("abcdefgh", 7)]
    mixed = tuple(some[: rng.choice((0, 1, 3))])
    for wish in (Wish(mixed, tuple(some[3:])), Wish(mixed, ("*",)), Wish(("*",))):
        assert pair.on(pair.parent) == ours, "with conflicts nothing is applied"
        done = pair.merge(wish)
        pair.audit()
        assert pair.on(pair.fork) == theirs, "a merge changes nothing of the fork"
        if done["status"] != CONFLICTS:
            assert both <= directories(pair.on(pair.parent)), "a directory that both have is gone"
            if wish == Wish(("*",)):
                assert contents(ours) - contents(pair.base) <= contents(pair.on(pair.parent))
            break
    return f"decided: {done['status']}"


def rebuilt(bench: Bench, fs: FsRef) -> Any:
    """The model of what a filesystem shows, to go on from."""
    from test_versions import File

    bench.fs = fs
    tree: dict[int, File] = {1: File(None, 0o40755)}
    found = live(bench)
    by_path = {"": 1}
    for path in sorted(found, key=lambda one: one.count("/")):
        ino, mode, links, data = found[path]
        if ino not in tree:
            tree[ino] = File(data, mode, links=links or 0)
        parent, name = path.rsplit("/", 1)
        tree[by_path[parent]].children[name.encode()] = ino
        by_path[path] = ino
    return tree


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("merge")) as made:
        yield made


def test_merges_by_path(bench: Bench, seed: int) -> None:
    told = [plain_run(bench, seed + at) for at in range(8)]
    bench.new_fs()
    assert MERGED in told


def test_merges_of_everything(bench: Bench, seed: int) -> None:
    told = [one for at in range(5) for one in wild_run(bench, seed + at)]
    bench.new_fs()
    assert MERGED in told


def test_merges_of_moves(bench: Bench, seed: int) -> None:
    told = [moves_run(bench, seed + at) for at in range(4)]
    bench.new_fs()
    assert any(one.endswith(MERGED) for one in told), told


def test_no_two_directories_of_the_fork_are_one_of_the_parent(bench: Bench) -> None:
    """The parent moved a directory to where another had been, which the fork still has (this seed)."""
    wild_run(bench, 5_000_221)


def test_what_only_one_side_decided_is_no_conflict(bench: Bench) -> None:
    """Directories the fork removed and made anew, a file both made empty, a block of the same bytes in
    another blob (these seeds)."""
    told = [plain_run(bench, seed) for seed in (51_514, 597_713, 5_000_732, 7_200_229, 7_200_404)]
    assert MERGED in told


def test_a_directory_of_the_parent_has_one_name_after_a_merge(bench: Bench) -> None:
    """The fork moved a directory away and put in its place what the parent had removed (this seed)."""
    assert "decided: merged" in wild_run(bench, 5_000_538)


def test_a_directory_the_fork_has_does_not_go_from_where_the_parent_moved_it(bench: Bench) -> None:
    """The fork changed its mode, and removed what had been where the parent moved it (this seed)."""
    assert moves_run(bench, 797_889) == "decided: nothing"


def test_merges_on_postgresql(tmp_path: Path, postgres_server: PostgresServer, seed: int) -> None:
    with Bench(tmp_path, database=postgres_server.fresh()) as made:
        plain_run(made, seed)
        wild_run(made, seed)
        made.new_fs()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("at", range(40))
def test_merges_long(tmp_path: Path, seed: int, at: int) -> None:
    with Bench(tmp_path) as made:
        for one in range(25):
            plain_run(made, seed + 1000 * at + one)
            wild_run(made, seed + 1000 * at + one)
            moves_run(made, seed + 1000 * at + one)
        made.new_fs()
