"""How much of a sparse file is stored: counted on the way, on both sides, the same as counted at the end."""

from __future__ import annotations

import os
import random

import pytest
from support.client import Client
from support.clientcase import client_fixture  # noqa: F401

from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import covered, decode
from fsd.model.limits import BLOCK
from fsd.vfs import content


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
    """Random writes and truncations with fsyncs; returns how many times holes were compared."""
    node, fh = client.call(lambda v: v.create(ROOT_INO, b"f", 0o644, 0, 0, os.O_RDWR))
    compared = 0
    for _ in range(rounds):
        what = rng.random()
        at = rng.choice((0, rng.randrange(5 * BLOCK), rng.randrange(40 * BLOCK), node.size))
        if what < 0.55:
            data = rng.randbytes(rng.choice((1, 100, 4096, 70_000, 300_000)))
            client.call(lambda v, at=at, data=data: v.write(fh, at, data))
        elif what < 0.75:
            client.call(lambda v, at=at: v.setattr(node.ino, size=at))
        else:
            client.call(lambda v: v.fsync(fh, False))
            assert counted(client, node.ino) == (node.size, node.rdev)
            compared += node.rdev > 0
        assert 0 <= node.rdev <= node.size
    client.call(lambda v: v.release(fh))
    return compared


@pytest.mark.parametrize("number", range(4))
def test_what_is_stored_is_counted_right(client: Client, number: int) -> None:
    assert play(client, random.Random(number), 60)


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
