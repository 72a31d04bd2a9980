"""Checkpoints through a mount, no kernel: random operations, cuts of the network and crashes go on while one
is being made, and each that is made equals what programs had done at the moment it was asked for.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.client import assert_same
from support.world import World

from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import decode, pieces
from fsd.model.errors import Busy, NotDrained
from fsd.model.limits import BLOCK
from fsd.service.retained import At
from fsd.vfs.types import Want
from fsd.wire.frame import open_blob


class CutWorld(World):
    """A world in which checkpoints are asked for now and then, and those made are compared with the model."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, seed)
        self.asked: tuple[Want, dict[str, tuple[Any, ...]]] | None = None
        self.made: list[tuple[int, dict[str, tuple[Any, ...]]]] = []
        self.busy = self.failed = 0

    def step(self) -> None:
        if self.rng.random() < 0.06:
            self.do_checkpoint()
        else:
            super().step()
        self.look()

    def do_checkpoint(self) -> None:
        self.note("checkpoint")
        within = self.rng.choice((None, None, 0.5))
        if self.asked is not None and not self.asked[0].finished:
            with pytest.raises(Busy):
                self.volume.checkpoint({"label": "x"}, partial=False, within=within)
            self.busy += 1
            return
        want = self.volume.checkpoint({"label": f"c{len(self.made)}"}, partial=False, within=within)
        self.asked = want, self.tree.walk()

    def look(self) -> None:
        """Take note of a checkpoint that was made."""
        if self.asked is None or not self.asked[0].finished:
            return
        (want, tree), self.asked = self.asked, None
        if want.error is not None:
            assert isinstance(want.error, NotDrained), want.error
            self.failed += 1
            return
        assert isinstance(want.result, dict)
        assert want.result["not_flushed"] == []
        self.made.append((want.result["fs_seq"], tree))
        self.note(f"checkpoint made at {self.made[-1][0]}")

    def do_crash(self) -> None:
        self.asked = None
        super().do_crash()

    def check_checkpoints(self) -> None:
        for seq, tree in self.made:
            assert_same(tree, self.tree_at(seq))

    def tree_at(self, seq: int, ino: int = ROOT_INO, path: str = "") -> dict[str, tuple[Any, ...]]:
        """The same as `Tree.walk`, from the server's state `seq`."""
        found: dict[str, tuple[Any, ...]] = {}
        ask = self.bench.service.namespace.ask
        _, ((entries, _),) = ask(self.bench.fs, [("list", ino, b"", 10_000)], At(seq=seq))
        for entry in entries:
            at, attr = f"{path}/{entry.name.decode()}", entry.attr
            xattrs = tuple(sorted((attr.xattrs or {}).items()))
            if attr.is_dir:
                found[at] = ("dir", attr.mode & 0o7777, attr.mtime, xattrs)
                found.update(self.tree_at(seq, attr.ino, at))
            elif attr.is_file:
                _, ((_, blocks),) = ask(self.bench.fs, [("blocks", attr.ino, 0, 4096)], At(seq=seq))
                data = self.content(attr.size, blocks)
                found[at] = ("file", data, attr.mode & 0o7777, attr.nlink, attr.mtime, xattrs)
            else:
                found[at] = ("link", attr.target)
        return found

    def content(self, size: int, blocks: list[tuple[int, bytes]]) -> bytes:
        data = bytearray(size)
        for index, raw in blocks:
            parts = decode(raw)
            got = self.bench.service.packs.read(self.bench.fs.id, [part.hash for part in parts])
            for piece in pieces(parts, 0, BLOCK):
                at = index * BLOCK + piece.at
                data[at : at + piece.length] = open_blob(got[piece.hash])[
                    piece.boff : piece.boff + piece.length
                ]
        return bytes(data)


def run(directory: Path, seed: int, steps: int) -> CutWorld:
    world = CutWorld(directory, seed)
    try:
        for _ in range(steps):
            world.step()
        world.net.faulty, world.net.cut = False, 0
        if world.asked is not None:
            with suppress(NotDrained):
                world.until(world.asked[0])
        world.until(world.volume.barrier())
        world.look()
        world.check_checkpoints()
        world.check_server()
        world.check_local()
        assert world.volume.pending().clean
        assert world.volume.core.queue.held is None
    except BaseException:
        print(f"seed {seed}, after {len(world.done)} steps; the last:")
        print("\n".join(world.done[-40:]))
        raise
    world.close()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_is_the_moment_it_was_asked_for(tmp_path: Path, seed: int) -> None:
    world = run(tmp_path, seed, 250)
    assert len(world.made) > 2, "hardly a checkpoint was made"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_a_checkpoint_is_the_moment_it_was_asked_for_for_long(tmp_path: Path, seed: int) -> None:
    world = run(tmp_path, seed, 900)
    assert len(world.made) > 10
    # Not how often it was asked for by itself: replies are lost, and it is asked for again.
    assert len(world.remote.made) < len(world.made), "none was made by a commit"
