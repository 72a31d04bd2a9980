"""How much of a sparse file is stored: counted on the way, on both sides, the same as counted at the end."""

from __future__ import annotations

import os
import random

import pytest
from support.client import Client

from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import covered, decode
from fsd.model.limits import BLOCK
from fsd.vfs import content
from fsd.vfs.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE


def counted(client: Client, ino: int) -> tuple[int, int]:
    """(size, holes) of a file from the server's blocks, which the server's own count must agree with."""
    found = [e.attr for e in client.bench.entries(ROOT_INO).values() if e.attr.ino == ino]
    assert found, "the file is on the server"
    _, (answer,) = client.bench.service.namespace.ask(client.bench.fs, [("blocks", ino, 0, 4096)])
    assert answer is not None
    stored = sum(covered(decode(raw)) for _, raw in answer[1])
    assert found[0].rdev == found[0].size - stored
    return found[0].size, found[0].rdev


def play(client: Client, rng: random.Random, rounds: int) -> int:
    """Random writes (of zeros too), holes, copies and truncations with fsyncs; returns how many times holes
    were compared."""
    node, fh = client.call(lambda v: v.create(ROOT_INO, b"f", 0o644, 0, 0, os.O_RDWR))
    compared = 0
    for _ in range(rounds):
        known = node.rdev, node.stamp
        what = rng.random()
        at = rng.choice((0, rng.randrange(5 * BLOCK), rng.randrange(40 * BLOCK), node.size))
        length = rng.choice((1, 100, 4096, 70_000, 300_000, BLOCK, BLOCK + 100))
        if what < 0.45:
            data = rng.randbytes(length) if rng.random() < 0.7 else bytes(length)
            client.call(lambda v, at=at, data=data: v.write(fh, at, data))
        elif what < 0.55:
            mode = rng.choice((0, KEEP_SIZE | PUNCH_HOLE, KEEP_SIZE | ZERO_RANGE))
            client.call(lambda v, at=at, mode=mode, long=length: v.allocate(fh, mode, at, long))
        elif what < 0.65:
            to = at + rng.choice((-1, 1)) * length
            if to >= 0:
                client.call(lambda v, at=at, to=to, long=length: v.copy_range(fh, at, fh, to, long, 0))
        elif what < 0.8:
            client.call(lambda v, at=at: v.setattr(node.ino, size=at))
        else:
            client.call(lambda v: v.fsync(fh, False))
            assert counted(client, node.ino) == (node.size, node.rdev)
            compared += node.rdev > 0
        assert 0 <= node.rdev <= node.size
        assert node.rdev == known[0] or node.stamp != known[1], "what stat shows changed without being told"
    client.call(lambda v: v.release(fh))
    return compared


@pytest.mark.parametrize("number", range(4))
def test_what_is_stored_is_counted_right(client: Client, number: int) -> None:
    assert play(client, random.Random(number), 60)


def test_zeros_over_a_dense_file_are_a_hole_on_both_sides(client: Client) -> None:
    node, fh = client.call(lambda v: v.create(ROOT_INO, b"f", 0o644, 0, 0, os.O_RDWR))
    for data in (b"x" * 70_000, bytes(70_000)):
        stamp = node.stamp
        client.call(lambda v, data=data: v.write(fh, 0, data))
        client.call(lambda v: v.fsync(fh, False))
        assert counted(client, node.ino) == (node.size, node.rdev)
        assert node.stamp > stamp
    assert node.rdev == 70_000
    client.call(lambda v: v.release(fh))


def test_an_fsync_counts_what_it_wrote_and_not_the_whole_file(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, fh = client.call(lambda v: v.create(ROOT_INO, b"f", 0o644, 0, 0, os.O_RDWR))
    for at in range(300):
        client.call(lambda v, at=at: v.write(fh, 3 * at * BLOCK + 100, b"x"))
    client.call(lambda v: v.fsync(fh, False))
    looked = []
    monkeypatch.setattr(content, "covered", lambda *asked: looked.append(asked) or covered(*asked))
    client.call(lambda v: v.write(fh, 6 * BLOCK, b"y" * 4096))
    client.call(lambda v: v.fsync(fh, False))
    assert 0 < len(looked) < 10
    assert counted(client, node.ino) == (node.size, node.rdev)
    client.call(lambda v: v.release(fh))


@pytest.mark.long
def test_what_is_stored_is_counted_right_long(client: Client, seed: int) -> None:
    assert play(client, random.Random(seed), 1500)
