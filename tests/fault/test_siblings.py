"""Small files read one after the other come together; who reads here and there fetches what is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

FILES = 120
Inos = list[tuple[bytes, int]]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Client]:
    """A mount that has nothing of two directories of small files, but their listings."""
    bench, clock = Bench(tmp_path / "server"), Clock()
    writer, made = (Client(tmp_path / n, bench, clock, random.Random(1), n) for n in ("writer", "reader"))
    for client in (writer, made):
        client.net.faulty = False
        client.inodes_max = 10_000
    writer.open()
    root = writer.volume.root_ino
    for name in (b"one", b"two"):
        where = writer.call(lambda v, n=name: v.mkdir(root, n, 0o755, 0, 0)).ino  # type: ignore[misc]
        for at in range(FILES):
            writer.put(where, b"f%03d" % at, b"%s %d\n" % (name, at) * 50)
    writer.until(writer.volume.barrier())
    made.open()
    yield made
    for client in (writer, made):
        client.volume.close()
    bench.close()


def files(client: Client, directory: bytes) -> Inos:
    top = client.call(lambda v: v.lookup(v.root_ino, directory))
    assert top is not None
    return client.listing(top.ino)


def fetches(client: Client) -> int:
    return client.remote.calls.count("blobs")


def test_a_walk_through_directories_asks_seldom(reader: Client) -> None:
    for name in (b"one", b"two"):
        for file, ino in files(reader, name):
            assert reader.read_all(ino) == b"%s %d\n" % (name, int(file[1:])) * 50
    assert 0 < fetches(reader) <= 2 * FILES // 8


def test_single_reads_bring_nothing_more(reader: Client) -> None:
    one, two = files(reader, b"one"), files(reader, b"two")
    for at in range(20):
        reader.read_all((one if at % 2 else two)[at * 5][1])
    assert fetches(reader) == 20
    assert len(reader.volume.core.recent._blobs) == 20


def test_reads_all_over_a_directory_bring_little_more(reader: Client) -> None:
    one = files(reader, b"one")
    for at in range(60):
        reader.read_all(one[(at * 53 + 60) % FILES][1])
    assert len(reader.volume.core.recent._blobs) <= 60 + 7 * 4


def test_a_walk_that_ends_closes_the_window(reader: Client) -> None:
    one, two = files(reader, b"one"), files(reader, b"two")
    for _, ino in one[:60]:
        reader.read_all(ino)
    had = len(reader.volume.core.recent._blobs)
    reader.read_all(two[0][1])  # the window is open still
    reader.read_all(one[-1][1])
    brought = len(reader.volume.core.recent._blobs)
    assert brought > had + 2
    reader.read_all(two[-1][1])
    assert len(reader.volume.core.recent._blobs) == brought + 1
