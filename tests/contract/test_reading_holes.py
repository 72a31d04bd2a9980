"""What is read of a file without its holes, and where it lies, is the file: also where one block has several
holes, as a mount that wrote here and there leaves them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.bench import Bench, Mount

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Part, encode
from fsd.model.limits import BLOCK, KIB, PATCHES_MAX
from fsd.model.ops import CONTENT, Content
from fsd.model.spans import Span
from fsd.service.retained import state_of
from fsd.service.tree import inode
from fsd.service.upload import Reading
from fsd.wire.frame import make_blob

FAR = 100 * KIB  # a hole that is not sent as zeros


def write(mount: Mount, size: int, pieces: dict[int, list[tuple[int, bytes]]]) -> tuple[int, bytes]:
    """A file with these pieces of its blocks, by their offset in the block; its number and its bytes."""
    ino, data = mount.create(ROOT_INO, b"f%d" % mount.counter), bytearray(size)
    rows = []
    for idx, found in sorted(pieces.items()):
        parts = []
        for off, held in found:
            blob = make_blob(held)
            mount.blobs[blob.hash] = blob
            parts.append(Part(off, len(held), 0, blob.hash))
            data[idx * BLOCK + off : idx * BLOCK + off + len(held)] = held
        rows.append((idx, encode(tuple(parts))))
    number = mount.number()
    mount.add(Content(number, CONTENT, ino, 0, size, tuple(rows), True, None, mount.time, mount.time))
    mount.commit()
    return ino, bytes(data)


def read(bench: Bench, ino: int, first: int, end: int, *, sparse: bool) -> tuple[list[Span], bytes]:
    """Bytes [first, end): the spans, and what came of them put where they lie."""

    def opened(tx: Tx) -> Reading:
        state, attr = state_of(tx, bench.fs), inode(tx, bench.fs.id, ino)
        assert attr is not None
        service = bench.service
        return Reading.open(tx, service.db, service.packs, bench.fs, state, attr, first, end)

    reading = bench.service.db.read(opened)
    spans = reading.skip_holes() if sparse else [(first, end)]
    came = b"".join(iter(reading.next_piece, b""))
    made, at = bytearray(end - first), 0
    for start, stop in spans:
        made[start - first : stop - first] = came[at : at + stop - start]
        at += stop - start
    assert at == len(came)
    return spans, bytes(made)


def test_each_piece_of_one_block(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        held = [(at * 2 * FAR, bytes([65 + at]) * 5000) for at in range(5)]
        ino, data = write(bench.mount(), 2 * BLOCK, {0: held, 1: held})
        spans, made = read(bench, ino, 0, len(data), sparse=True)
        assert len(spans) == 10
        assert made == data


@pytest.mark.parametrize("seed", range(6))
def test_any_range_of_any_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Bench(tmp_path) as bench:
        count = rng.randrange(2, 9)
        pieces: dict[int, list[tuple[int, bytes]]] = {}
        for idx in rng.sample(range(count), rng.randrange(1, count + 1)):
            ends = sorted(rng.sample(range(0, BLOCK - 100, 100), 2 * rng.randrange(1, PATCHES_MAX // 2)))
            pieces[idx] = [
                (ends[at], rng.randbytes(rng.randrange(1, ends[at + 1] - ends[at] + 1)))
                for at in range(0, len(ends), 2)
            ]
        size = (
            max(pieces) * BLOCK + max(off + len(held) for off, held in pieces[max(pieces)]) + rng.randrange(9)
        )
        ino, data = write(bench.mount(), size, pieces)
        ranges = [(0, size), *(tuple(sorted(rng.sample(range(size), 2))) for _ in range(12))]
        for first, end in ranges:
            wanted = data[first:end]
            spans, made = read(bench, ino, first, end, sparse=True)
            assert made == wanted, (first, end, spans)
            assert read(bench, ino, first, end, sparse=False)[1] == wanted
