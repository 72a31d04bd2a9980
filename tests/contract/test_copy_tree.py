"""A tree copied on the server in steps: the copy is the tree, wherever a step ends, and what is in the way is
told by its path."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.postgres import database_of

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.errors import PosixError, UsageError
from fsd.service import copytree, namespace
from fsd.service.copytree import TreeCopy
from fsd.service.paths import Copied, Plan


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def parts(path: str) -> list[bytes]:
    return [part.encode() for part in path.split("/") if part]


def copy(bench: Bench, source: str, target: str, **options: bool) -> Copied:
    """All steps; what they did together. `after` is how many there were."""
    total, after, steps = Copied(), b"", 0
    while True:

        def run(tx: Tx, after: bytes = after) -> Copied:
            paths = bench.service.paths
            build = paths.builder()
            given = {"overwrite": True, "resume": False, **options}
            did = TreeCopy(tx, bench.fs.id, build, **given).step(parts(source), parts(target), after)
            paths.execute(tx, bench.fs, Plan(build.ops, copied=did))
            return did

        did = bench.service.db.write(run)
        steps += 1
        for name, count in did.counts.items():
            total.counts[name] += count
        total.failed += did.failed
        total.not_copied += did.not_copied
        if did.after is None:
            total.after = b"%d" % steps
            return total
        assert did.after > after, "a step that does not come further"
        after = did.after


def looks(bench: Bench, attr: Attr) -> Any:
    content = bench.read(attr) if attr.is_file else attr.target
    return attr.mode, attr.mtime, content, attr.xattrs


def tree(bench: Bench, ino: int, path: str = "") -> dict[str, Any]:
    found = {}
    for name, entry in bench.entries(ino).items():
        at = f"{path}/{name.decode()}"
        found[at] = looks(bench, entry.attr)
        if entry.attr.is_dir:
            found.update(tree(bench, entry.attr.ino, at))
    return found


def grow(mount: Mount, rng: random.Random, parent: int, depth: int) -> None:
    for number in range(rng.randrange(3, 5)):
        name = b"%c%d" % (rng.choice(b"a.~"), number)
        kind = rng.random()
        mount.time += 1
        if depth and (not number or kind < 0.2):
            below = mount.create(parent, name, stat.S_IFDIR | rng.choice((0o700, 0o755)))
            grow(mount, rng, below, depth - 1)
        elif kind < 0.5:
            mount.symlink(parent, name, b"somewhere")
        else:
            ino = mount.file(parent, name, rng.randbytes(rng.choice((0, 7, 3000))))
            if rng.random() < 0.3:
                mount.setxattr(ino, b"user.k", b"v")


@pytest.mark.parametrize("most", [1, 3, 500])
def test_the_copy_is_the_tree(bench: Bench, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(copytree, "COPY_STEP", most)
    monkeypatch.setattr(copytree, "COPY_STEP_OPS", 2 * most)
    mount = bench.mount()
    source = mount.mkdir(ROOT_INO, b"src")
    grow(mount, random.Random(most + 20), source, 2)
    target = mount.mkdir(ROOT_INO, b"dst")
    mount.commit()
    wanted = tree(bench, source)
    assert len(wanted) > 5
    did = copy(bench, "/src", "/dst")
    assert tree(bench, target) == wanted
    assert not did.failed and not did.not_copied
    assert sum(did.counts[name] for name in ("files", "symlinks", "directories")) == len(wanted)
    assert did.counts["bytes"] == sum(
        len(one[2]) for one in wanted.values() if isinstance(one[2], bytes) and stat.S_ISREG(one[0])
    )
    assert bench.find("/dst").mtime == bench.find("/src").mtime
    again = copy(bench, "/src", "/dst", resume=True)
    assert again.counts["files"] == again.counts["symlinks"] == 0 and tree(bench, target) == wanted
    assert copy(bench, "/src", "/dst", overwrite=False).counts["skipped"] == again.counts["skipped"]
    assert copy(bench, "/src", "/dst").counts["files"] == did.counts["files"]
    assert tree(bench, target) == wanted


def test_what_is_in_the_way_is_told_and_the_rest_is_copied(bench: Bench) -> None:
    mount = bench.mount()
    source, target = mount.mkdir(ROOT_INO, b"src"), mount.mkdir(ROOT_INO, b"dst")
    below = mount.mkdir(source, b"d")
    mount.file(below, b"inside", b"1")
    mount.file(source, b"f", b"22")
    mount.file(source, b"g", b"333")
    mount.symlink(source, b"l", b"f")
    mount.create(source, b"pipe", stat.S_IFIFO | 0o600)
    mount.file(target, b"d", b"a file")
    mount.mkdir(target, b"f")
    mount.mkdir(target, b"l")
    there = mount.file(ROOT_INO, b"there", b"x")
    mount.symlink(target, b"g", b"../there")
    mount.file(target, b"own", b"stays")
    mount.commit()
    did = copy(bench, "/src", "/dst")
    assert [(path, type(why)) for path, why in did.failed] == [
        (b"/src/d", PosixError),
        (b"/src/f", PosixError),
        (b"/src/l", PosixError),
    ]
    assert did.not_copied == [b"/src/pipe"]
    assert did.counts["files"] == 1 and bench.find("/there").ino == there
    assert bench.read(bench.find("/there")) == b"333", "through the link that was there, as cp does"
    assert bench.read(bench.find("/dst/own")) == b"stays"
    with pytest.raises(UsageError, match="into itself"):
        copy(bench, "/", "/dst")
    with pytest.raises(UsageError, match="into itself"):
        copy(bench, "/src", "/src/d")
    with pytest.raises(PosixError):
        copy(bench, "/src/f", "/dst")


def test_depth_costs_once_a_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred levels by path, from the root each, would be 80,000 lookups a look."""
    mount = bench.mount()
    source = parent = mount.mkdir(ROOT_INO, b"src")
    for _ in range(400):
        parent = mount.mkdir(parent, b"d")
        mount.time += 1
    mount.file(parent, b"f", b"deep")
    target = mount.mkdir(ROOT_INO, b"dst")
    mount.commit()
    asked = 0
    real = namespace.lookup

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return real(*args)

    monkeypatch.setattr(namespace, "lookup", counted)
    did = copy(bench, "/src", "/dst")
    assert did.counts["directories"] == 400
    assert asked < 4_000
    here, there = source, target
    for _ in range(400):
        [was], [now] = bench.entries(here).values(), bench.entries(there).values()
        assert was.attr.mtime == now.attr.mtime
        here, there = was.attr.ino, now.attr.ino
