"""Large files read from their beginning to their end, in whole blocks and across them, one and several at
once: in few requests, every byte as it was written."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.limits import BLOCK, KIB
from fsd.vfs.ahead import ROOM
from fsd.vfs.loads import READ_AHEAD
from fsd.vfs.types import Park
from fsd.wire.frame import Blob

BLOCKS = 24
TAIL = 5000


@pytest.fixture
def reader(tmp_path: Path, seed: int) -> Iterator[tuple[Client, int, bytes]]:
    """A mount that has nothing of a large file but its name; the file's number and bytes."""
    bench, clock = Bench(tmp_path / "server"), Clock()
    writer, made = (Client(tmp_path / n, bench, clock, random.Random(1), n) for n in ("writer", "reader"))
    for client in (writer, made):
        client.net.faulty = False
        client.inodes_max = 10_000
    writer.open()
    data = random.Random(seed).randbytes(BLOCKS * BLOCK + TAIL)
    writer.put(writer.volume.root_ino, b"big", data)
    writer.until(writer.volume.barrier())
    made.open()
    node = made.call(lambda v: v.lookup(v.root_ino, b"big"))
    assert node is not None
    yield made, node.ino, data
    for client in (writer, made):
        client.volume.close()
    bench.close()


def fetches(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is asked of the server from now on."""
    fetched: list[bytes] = []
    ask = client.remote.blobs

    def blobs(hashes: Sequence[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        fetched.extend(hashes)
        return ask(hashes, timeout)

    monkeypatch.setattr(client.remote, "blobs", blobs)
    return fetched


def read(client: Client, ino: int, size: int) -> bytes:
    fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
    found, at = [], 0
    while piece := client.call(lambda v, at=at: v.read(fh, at, size)):  # type: ignore[misc]
        found.append(piece)
        at += len(piece)
    client.volume.release(fh)
    return b"".join(found)


@pytest.mark.parametrize("size", [BLOCK, 128 * KIB, 700 * KIB])
def test_a_file_read_in_order_comes_in_half_windows(reader: tuple[Client, int, bytes], size: int) -> None:
    client, ino, data = reader
    assert read(client, ino, size) == data
    assert client.remote.calls.count("blobs") <= BLOCKS * 2 // READ_AHEAD + 4


@pytest.mark.parametrize(("readers", "size"), [(2, BLOCK), (3, 700 * KIB), (4, BLOCK), (6, BLOCK)])
def test_several_readers_share_what_there_is_room_for(
    reader: tuple[Client, int, bytes], readers: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads a part of its own, in turns. Blocks are fetched once, but for what one reads ahead of its
    end into the next one's part."""
    client, ino, data = reader
    fetched = fetches(client, monkeypatch)
    each = BLOCKS // readers * BLOCK
    handles = [client.call(lambda v: v.open(ino, os.O_RDONLY)) for _ in range(readers)]
    for at in range(0, each, size):
        for number, fh in enumerate(handles):
            start = number * each + at
            end = min(start + size, (number + 1) * each)
            found = client.call(lambda v, fh=fh, at=start, n=end - start: v.read(fh, at, n))  # type: ignore[misc]
            assert found == data[start:end]
            client.run_some(1000)
    for fh in handles:
        client.volume.release(fh)
    assert len(fetched) <= BLOCKS + 1 + ROOM


@pytest.mark.parametrize("size", [BLOCK, 128 * KIB, 700 * KIB])
def test_who_reads_slower_than_blocks_come_has_each_fetched_once(
    reader: tuple[Client, int, bytes], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, ino, data = reader
    fetched = fetches(client, monkeypatch)
    fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
    for at in range(0, len(data), size):
        assert client.call(lambda v, at=at: v.read(fh, at, size)) == data[at : at + size]  # type: ignore[misc]
        client.run_some(1000)
    client.volume.release(fh)
    assert len(fetched) == len(set(fetched)) == BLOCKS + 1


def test_a_whole_block_at_hand_is_given_without_a_copy(reader: tuple[Client, int, bytes]) -> None:
    client, ino, data = reader
    fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
    first = client.call(lambda v: v.read(fh, 0, BLOCK))
    assert client.call(lambda v: v.read(fh, 0, BLOCK)) is first
    assert client.call(lambda v: v.read(fh, 3, BLOCK)) == data[3 : BLOCK + 3]
    assert client.call(lambda v: v.read(fh, BLOCKS * BLOCK, BLOCK)) == data[-TAIL:]
    client.volume.release(fh)


@pytest.mark.parametrize("at", [0, BLOCK, 5 * BLOCK + 7])
def test_a_read_that_has_to_wait_makes_no_room_for_its_bytes(
    reader: tuple[Client, int, bytes], at: int
) -> None:
    client, ino, data = reader
    fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
    tracemalloc.start()
    try:
        with pytest.raises(Park):
            client.volume.read(fh, at, BLOCK)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < BLOCK // 4
    assert client.call(lambda v: v.read(fh, at, BLOCK)) == data[at : at + BLOCK]
    client.volume.release(fh)


def test_reads_here_and_there_fetch_what_is_asked_for(reader: tuple[Client, int, bytes]) -> None:
    client, ino, data = reader
    fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
    for index in (20, 3, 11, 7):
        at = index * BLOCK + 10
        assert client.call(lambda v, at=at: v.read(fh, at, 100)) == data[at : at + 100]  # type: ignore[misc]
    assert len(client.volume.core.recent._blobs) == 4
    client.volume.release(fh)
