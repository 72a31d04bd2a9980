"""A server whose answers are wrong in one place or another: each call of a program ends with an answer or an
error, and the mount goes on. What is wrong and possible is believed."""

from __future__ import annotations

import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock
from support.lying import Lying

from fsd.model.errors import FsdError
from fsd.vfs import listing, loads

NAMES = [b"a", b"b", b"c", b"d", b"e"]


def play(path: Path, seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One mount that works on what another one changes; how often it was lied to."""
    rng = random.Random(seed)
    if rng.random() < 0.5:  # every directory is a large one
        for module, name, value in (
            (loads, "LISTING_MAX", 3),
            (listing, "LISTING_MAX", 3),
            (loads, "LIST_PAGE", 2),
            (loads, "DIR_INLINE_MAX", 2),
        ):
            monkeypatch.setattr(module, name, value)
    bench, clock = Bench(path / "server"), Clock()
    truthful = Client(path / "other", bench, clock, rng, "other")
    client = Client(path / "mount", bench, clock, rng)
    client.options = replace(client.options, io_timeout=30.0)
    remote = client.remote = Lying(bench.service, bench.fs, client.net, rng=rng)
    for one in (truthful, client):
        one.net.faulty = False
        one.open()
    remote.rate = 0.3
    for _ in range(rounds):
        work(truthful, rng)
        for _ in range(rng.randrange(6)):
            work(client, rng)
        try:
            client.volume.apply_feed(
                remote.changes(client.volume.feed_seq, client.volume.session, 0.0, client.volume.root_ino)
            )
        except FsdError:
            continue
    remote.rate = 0.0
    for one in (client, truthful):
        one.volume.close()
    bench.close()
    return remote.lies


def work(client: Client, rng: random.Random) -> None:
    """One call of a program, wherever it gets to."""
    try:
        call(client, rng)
    except FsdError:
        return


def call(client: Client, rng: random.Random) -> None:
    at = client.volume.root_ino
    while rng.random() < 0.5:
        found = client.call(lambda v, at=at: v.lookup(at, rng.choice(NAMES)))
        if found is None or not found.is_dir:
            break
        at = found.ino
    name, other, kind = rng.choice(NAMES), rng.choice(NAMES), rng.randrange(11)
    if kind == 0:
        client.call(lambda v: v.mkdir(at, name, 0o755, 0, 0))
    elif kind == 1:
        client.call(lambda v: v.symlink(at, name, b"target", 0, 0))
    elif kind == 2:
        client.call(lambda v: v.unlink(at, name))
    elif kind == 3:
        client.call(lambda v: v.rmdir(at, name))
    elif kind == 4:
        client.call(lambda v: v.rename(at, name, client.volume.root_ino, other, 0))
    elif kind == 5:
        client.listing(at)
    elif kind == 6:
        found = client.call(lambda v: v.lookup(at, name))
        if found is not None:
            client.call(lambda v: v.link(found.ino, at, other))
    elif kind == 7:
        found = client.call(lambda v: v.lookup(at, name))
        if found is not None and stat.S_ISREG(found.mode):
            client.read_all(found.ino)
    else:
        size = rng.choice((1, 5000, 3 << 20))
        client.put(
            at, name, os.urandom(8) * (size // 8), offset=rng.choice((0, None)), sync=rng.random() < 0.5
        )


@pytest.mark.parametrize("seed", range(6))
def test_wrong_answers_end_no_mount(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(tmp_path, seed, 30, monkeypatch) > 5
