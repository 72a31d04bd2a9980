"""The change feed is silent: what is known is asked for again before use; without a server it has to do."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree

from fsd.model.errors import PosixError, Unavailable
from fsd.vfs.types import Park

Pair = tuple[Client, Client]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two mounts with one clock; the first hears nothing of the second's changes."""
    bench, clock = Bench(tmp_path / "server"), Clock()
    made = tuple(Client(tmp_path / n, bench, clock, random.Random(1), n) for n in ("deaf", "other"))
    for client in made:
        client.net.faulty = False
        client.open()
    yield made[0], made[1]
    for client in made:
        client.net.cut = 0
        client.until(client.volume.barrier())
        client.volume.close()
    bench.close()


def later(client: Client, seconds: float = 2.0) -> None:
    client.clock.seconds += seconds
    client.volume.tick(client.clock.seconds)


def test_changes_are_seen_without_the_feed(pair: Pair) -> None:
    deaf, other = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.put(root, b"gone", b"soon", sync=True)
    assert deaf.view().keys() == {"/f", "/gone"}
    deaf.volume.feed_silent(True)
    other.put(root, b"f", b"other", offset=0, sync=True)
    other.put(root, b"new", b"new", sync=True)
    other.call(lambda v: v.unlink(root, b"gone"))
    other.until(other.volume.barrier())
    later(deaf)
    assert deaf.call(lambda v: v.lookup(root, b"gone")) is None
    assert deaf.call(lambda v: v.lookup(root, b"new")) is not None
    found = deaf.call(lambda v: v.lookup(root, b"f"))
    assert found is not None
    assert deaf.read_all(found.ino) == b"other"
    later(deaf)
    assert_same(server_tree(deaf.bench), deaf.view())


def test_what_was_answered_a_moment_ago_is_not_asked_again(pair: Pair) -> None:
    deaf, _ = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.volume.feed_silent(True)
    deaf.call(lambda v: v.lookup(root, b"f"))
    asked = deaf.remote.calls.count("ask")
    for _ in range(50):
        assert deaf.volume.lookup(root, b"f") is not None
    assert deaf.remote.calls.count("ask") == asked


def test_without_a_server_what_is_known_has_to_do(pair: Pair) -> None:
    """Reads from memory, writes, renames and new files go on; only what is not known waits."""
    deaf, _ = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.view()
    folder = deaf.call(lambda v: v.mkdir(root, b"folder", 0o755, 0, 0)).ino
    deaf.volume.feed_silent(True)
    deaf.net.cut = 1 << 30
    later(deaf)
    for number in range(20):
        deaf.put(root, b"new%d" % number, b"written while cut")
        deaf.put(folder, b"x%d" % number, b"in a directory the server does not have")
        later(deaf)
    deaf.call(lambda v: v.rename(root, b"new0", root, b"renamed", 0))
    assert len(deaf.listing(root)) == 22
    assert deaf.volume.pending().files > 0
    assert deaf.volume.pending().reason
    deaf.net.cut = 0
    deaf.volume.feed_silent(False)
    deaf.until(deaf.volume.barrier())
    assert server_tree(deaf.bench)["/renamed"][1] == b"written while cut"
    assert_same(server_tree(deaf.bench), deaf.view())


def test_what_is_not_known_waits_and_is_told(pair: Pair) -> None:
    deaf, other = pair
    root = deaf.volume.root_ino
    other.put(root, b"far", b"away", sync=True)
    deaf.volume.core.options = replace(deaf.options, io_timeout=10.0)
    deaf.net.cut = 1 << 30
    with pytest.raises(Park) as parked:
        deaf.volume.lookup(root, b"far")
    want = parked.value.want
    for _ in range(12):
        deaf.run_some(3)
        later(deaf, 1.0)
    with pytest.raises(Unavailable) as told:
        deaf.volume.done(want)
    assert told.value.errno == errno.EIO
    deaf.net.cut = 0
    later(deaf)
    assert deaf.call(lambda v: v.lookup(root, b"far")) is not None


def test_an_error_of_the_file_system_is_no_time_out(pair: Pair) -> None:
    deaf, _ = pair
    with pytest.raises(PosixError) as told:
        deaf.call(lambda v: v.unlink(v.root_ino, b"nothing"))
    assert told.value.errno == errno.ENOENT
    with pytest.raises(PosixError) as told:
        deaf.call(lambda v: v.open(v.root_ino, os.O_RDONLY))
    assert told.value.errno == errno.EISDIR
