"""Extents, blocks and flights of the client against plain byte arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fsd.model.blocks import Part, Parts, decode, pieces
from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOCK, FULL_LIST_BLOCKS, HIDDEN_REFS_MAX, PATCHES_MAX
from fsd.vfs.build import BlockTask, Source, assemble, build
from fsd.vfs.content import Content, Flight, operation
from fsd.vfs.extents import HOLE, Extents, Ref, Run
from fsd.vfs.records import result_of
from fsd.wire.frame import make_blob, open_blob


class MemoryLog:
    """The bytes of a log without a disk."""

    def __init__(self) -> None:
        self.bytes = bytearray(8)

    @property
    def tail(self) -> int:
        return len(self.bytes)

    def write(self, data: bytes) -> int:
        at = len(self.bytes)
        self.bytes += data
        return at

    def read(self, pos: int, length: int) -> bytes:
        found = bytes(self.bytes[pos : pos + length])
        if len(found) != length:
            raise IntegrityError("not in the log")
        return found


class Store:
    """Blobs by hash, and what they make of a block list."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}

    def fetch(self, wanted: Sequence[bytes]) -> dict[bytes, bytes]:
        return {digest: self.blobs[digest] for digest in wanted}

    def block(self, parts: Parts, length: int) -> bytes:
        out = bytearray(length)
        for piece in pieces(parts, 0, length):
            out[piece.at : piece.at + piece.length] = self.blobs[piece.hash][
                piece.boff : piece.boff + piece.length
            ]
        return bytes(out)

    def file(self, blocks: dict[int, Parts], size: int) -> bytes:
        count = (size + BLOCK - 1) // BLOCK
        return b"".join(self.block(blocks.get(i, ()), min(BLOCK, size - i * BLOCK)) for i in range(count))


def fly(content: Content, flight: Flight, log: MemoryLog, store: Store) -> None:
    """Make a flight's blocks."""
    made = [build(task, log, store.fetch) for task in content.plan(flight)]  # type: ignore[arg-type]
    for one in made:
        for blob, source in zip(one.blobs, one.sources):
            store.blobs[blob.hash] = open_blob(blob)
            assert assemble(source.pieces, log, store.fetch) == store.blobs[source.hash]  # type: ignore[arg-type]
    content.took(flight, made)
    flight.state = "ready"


def places(run: Run) -> list[object]:
    """Where each byte of a run is."""
    if run.ref is None:
        return list(range(run.pos, run.pos + run.end - run.start))
    boffs = range(run.ref.boff, run.ref.boff + run.end - run.start)
    return [(run.pos, run.ref.hash, boff if run.ref.hash else 0) for boff in boffs]


def test_hidden_holes_are_not_kept_for_ever() -> None:
    """An open file without a name is never sent: nothing else forgets what was punched over and over."""
    extents = Extents()
    extents.put(0, 100, 1)
    extents.put(100, 200, 500, Ref(b"blob", 7))
    for pos in range(1000, 11_000):
        extents.put(20, 40, pos, HOLE)
    assert len(extents._refs) <= 2 * len(list(extents)) + HIDDEN_REFS_MAX + 1
    newest = Run(20, 40, 10_999, HOLE)
    assert list(extents) == [Run(0, 20, 1), newest, Run(40, 100, 41), Run(100, 200, 500, Ref(b"blob", 7))]
    assert extents.total == 80 and list(extents.refs()) == [Ref(b"blob", 7)]


@pytest.mark.parametrize("seed", range(20))
def test_extents_show_the_newest_write_of_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    extents, log = Extents(), MemoryLog()
    model: list[object] = [None] * 300
    for _ in range(200):
        if rng.random() < 0.1:
            size = rng.randrange(300)
            extents.cut(size)
            model[size:] = [None] * (300 - size)
        elif rng.random() < 0.05:
            pos = rng.randrange(log.tail)
            extents.drop_before(pos)
            # A run goes or stays whole: what the server has covers all of a record or nothing.
            kept = {at: where for run in extents for at, where in enumerate(places(run), run.start)}
            assert all(model[at] == where for at, where in kept.items())
            model = [kept.get(at) for at in range(300)]
        else:
            start = rng.randrange(290)
            data = rng.randbytes(rng.randrange(1, min(60, 300 - start)))
            pos = log.write(data)
            ref = rng.choice((None, None, HOLE, Ref(b"blob", rng.randrange(100))))
            extents.put(start, start + len(data), pos, ref)
            model[start : start + len(data)] = places(Run(start, start + len(data), pos, ref))
        shown: list[object] = [None] * 300
        for run in extents:
            shown[run.start : run.end] = places(run)
        assert shown == model
        assert extents.total == sum(isinstance(one, int) for one in model)
        low = rng.randrange(300)
        part = extents.runs(low, 300)
        assert [places(r) for r in part] == [model[r.start : r.end] for r in part]
        assert sum(r.end - r.start for r in part) == sum(one is not None for one in model[low:])


@pytest.mark.parametrize("seed", range(8))
def test_flights_lead_to_what_was_written(seed: int) -> None:
    """Writes, truncations, freezes at any time and answers in order: blocks equal a byte array at each
    freeze, reads equal it always, and the operation alone leads to the same list."""
    rng = random.Random(seed)
    log, store = MemoryLog(), Store()
    content = Content({}, 0, 0)
    model = bytearray()
    frozen: list[tuple[Flight, bytes]] = []
    server: dict[int, Parts] = {}
    for step in range(120):
        roll = rng.random()
        if roll < 0.6:
            start = rng.choice((0, len(model), rng.randrange(len(model) + 1), len(model) + 50_000))
            big = rng.random() < 0.1
            data = rng.randbytes(rng.randrange(1, 2_000_000 if big else 20_000))
            content.wrote(start, start + len(data), log.write(data), 0.0, append=start == len(model))
            if start > len(model):
                model.extend(bytes(start - len(model)))
            model[start : start + len(data)] = data
        elif roll < 0.7:
            size = rng.choice((0, rng.randrange(len(model) + 1), len(model) + 70_000))
            content.cut(size, log.write(b"truncated"), 0.0)
            del model[size:]
            model.extend(bytes(size - len(model)))
        elif roll < 0.75 and model:
            start = rng.randrange(len(model))
            end = min(len(model), start + rng.choice((100, 70_000, 3_000_000)))
            content.wrote(start, end, log.write(b"punched"), 0.0, ref=HOLE)
            model[start:end] = bytes(end - start)
        elif roll < 0.78 and store.blobs:
            digest = rng.choice(list(store.blobs))
            blob = store.blobs[digest]
            boff = rng.randrange(len(blob))
            piece = blob[boff : boff + rng.choice((1, 5000, BLOCK))]
            start = rng.randrange(len(model) + 1)
            content.wrote(start, start + len(piece), log.write(b"shared"), 0.0, ref=Ref(digest, boff))
            model[start : start + len(piece)] = piece
        elif roll < 0.88 and content.dirty:
            flight = content.freeze(step + 1, 7, log.tail, len(model), step, step)
            assert content.startable(flight)
            fly(content, flight, log, store)
            frozen.append((flight, bytes(model)))
            assert store.file(flight.blocks, flight.size) == frozen[-1][1]
            assert all(len(parts) <= PATCHES_MAX + 1 for parts in flight.blocks.values())
        elif frozen:
            flight, then = frozen.pop(0)
            op = operation(flight, content.cseq)
            assert op.full
            server = result_of(server, op)
            assert store.file(server, op.size) == then
            content.landed(flight, step)
        at = rng.randrange(len(model) + 1)
        assert read(content, log, store, at, min(30_000, len(model) - at)) == model[at : at + 30_000]
    while frozen:
        content.landed(frozen.pop(0)[0], 999)
    if not content.dirty:
        assert content.first is None


def read(content: Content, log: MemoryLog, store: Store, offset: int, size: int) -> bytes:
    """What the file calls do, in small."""
    out = bytearray(size)
    for index in range(offset // BLOCK, (offset + size) // BLOCK + 1):
        block = store.block(content.shown(index), BLOCK)
        start = max(offset, index * BLOCK)
        stop = min(offset + size, (index + 1) * BLOCK)
        if start < stop:
            out[start - offset : stop - offset] = block[start - index * BLOCK : stop - index * BLOCK]
    for start, end, pos, ref in content.extents.runs(offset, offset + size):
        if ref is None:
            data = log.read(pos, end - start)
        else:
            data = store.blobs[ref.hash][ref.boff :][: end - start] if ref.hash else bytes(end - start)
        out[start - offset : end - offset] = data
    return bytes(out)


def base_block(store: Store, data: bytes) -> Parts:
    blob = make_blob(data)
    store.blobs[blob.hash] = data
    return (Part(0, len(data), 0, blob.hash),)


def no_base(wanted: Sequence[bytes]) -> dict[bytes, bytes]:
    raise AssertionError("a patch needs nothing of what was there")


def test_a_small_change_of_a_big_block_is_a_patch_and_needs_no_base() -> None:
    log, store = MemoryLog(), Store()
    data = random.Random(1).randbytes(BLOCK)
    task = BlockTask(0, base_block(store, data), ((5000, 4096, log.write(b"x" * 4096)),), BLOCK)
    made = build(task, log, no_base)  # type: ignore[arg-type]
    assert not task.needs_base()
    assert [part.length for part in made.parts] == [BLOCK, 4096]
    assert len(made.blobs[0].stored) < 4096
    store.blobs[made.blobs[0].hash] = open_blob(made.blobs[0])
    assert store.block(made.parts, BLOCK) == data[:5000] + b"x" * 4096 + data[9096:]


def test_a_block_is_folded_at_the_limit_of_patches() -> None:
    log, store = MemoryLog(), Store()
    parts = base_block(store, random.Random(2).randbytes(BLOCK))
    counts = []
    for at in range(40):
        task = BlockTask(0, parts, ((at * 10_000, 100, log.write(b"%03d" % at + bytes(97))),), BLOCK)
        made = build(task, log, store.fetch)  # type: ignore[arg-type]
        parts = made.parts
        store.blobs.update((blob.hash, open_blob(blob)) for blob in made.blobs)
        counts.append(len(parts))
    assert max(counts) == PATCHES_MAX + 1
    assert counts.count(1) == 2, "folded twice in forty patches"
    assert store.block(parts, BLOCK)[390_000:390_003] == b"039"


def test_a_quarter_of_a_block_is_written_whole() -> None:
    log, store = MemoryLog(), Store()
    parts = base_block(store, bytes(1) * 1000 + random.Random(3).randbytes(BLOCK - 1000))
    quarter = BLOCK // 4
    below = BlockTask(0, parts, ((0, quarter - 1, log.write(b"y" * (quarter - 1))),), BLOCK)
    at = BlockTask(0, parts, ((0, quarter, log.write(b"y" * quarter)),), BLOCK)
    assert len(build(below, log, store.fetch).parts) == 2  # type: ignore[arg-type]
    assert len(build(at, log, store.fetch).parts) == 1  # type: ignore[arg-type]


def test_zeros_are_a_hole() -> None:
    log = MemoryLog()
    task = BlockTask(3, (), ((0, 5000, log.write(bytes(5000))),), 5000)
    assert build(task, log, no_base) == (3, (), (), (), ())  # type: ignore[arg-type]


def test_a_long_file_names_only_what_changed() -> None:
    log, store = MemoryLog(), Store()
    size = (FULL_LIST_BLOCKS + 1) * BLOCK
    one = base_block(store, b"one block")
    content = Content(dict.fromkeys(range(FULL_LIST_BLOCKS + 1), one), size, 5)
    content.wrote(10 * BLOCK, 10 * BLOCK + 3, log.write(b"new"), 0.0, append=False)
    flight = content.freeze(1, 7, log.tail, size, 0, 0)
    fly(content, flight, log, store)
    op = operation(flight, 5)
    assert not op.full
    assert [index for index, _ in op.blocks] == [10]
    assert result_of(content.base or {}, op) == flight.blocks
    again = operation(flight, 5, full=True)
    assert len(again.blocks) == FULL_LIST_BLOCKS + 1


def test_what_lies_behind_a_truncation_never_comes_back() -> None:
    """In a long file the blocks that were cut and are holes now have to be named."""
    log, store = MemoryLog(), Store()
    count = FULL_LIST_BLOCKS + 4
    one = base_block(store, b"z" * BLOCK)
    base = dict.fromkeys(range(count), one)
    content = Content(dict(base), count * BLOCK, 5)
    content.cut((count - 3) * BLOCK + 10, log.write(b"t"), 0.0)
    content.cut(count * BLOCK, log.write(b"t"), 0.0)
    flight = content.freeze(1, 7, log.tail, count * BLOCK, 0, 0)
    fly(content, flight, log, store)
    op = operation(flight, 5)
    after = result_of(base, op)
    assert not op.full
    assert store.file(after, op.size)[(count - 3) * BLOCK :] == b"z" * 10 + bytes(3 * BLOCK - 10)
    assert after == flight.blocks


def test_a_cut_to_nothing_carries_the_whole_list() -> None:
    log, store = MemoryLog(), Store()
    size = 100 * BLOCK
    content = Content(None, size, 5)
    content.cut(0, log.write(b"t"), 0.0)
    content.wrote(size - 1, size, log.write(b"e"), 0.0, append=False)
    flight = content.freeze(1, 7, log.tail, size, 0, 0)
    fly(content, flight, log, store)
    assert operation(flight, 5).full


def test_an_append_is_told_only_while_nothing_else_happened() -> None:
    log = MemoryLog()
    content = Content({}, 10, 5)
    content.wrote(10, 12, log.write(b"ab"), 0.0, append=True)
    content.wrote(12, 14, log.write(b"cd"), 0.0, append=True)
    assert content.freeze(1, 7, log.tail, 14, 0, 0).appended_from == 10
    content.wrote(14, 15, log.write(b"e"), 0.0, append=True)
    content.wrote(0, 1, log.write(b"f"), 0.0, append=False)
    assert content.freeze(2, 7, log.tail, 15, 0, 0).appended_from is None


def test_a_source_says_where_a_blob_comes_from() -> None:
    log, store = MemoryLog(), Store()
    old = random.Random(4).randbytes(1000)
    task = BlockTask(0, base_block(store, old), ((100, 5, log.write(b"hello")),), 1000)
    made = build(task, log, store.fetch)  # type: ignore[arg-type]
    (source,) = made.sources
    assert isinstance(source, Source)
    assert assemble(source.pieces, log, store.fetch) == old[:100] + b"hello" + old[105:]  # type: ignore[arg-type]
    assert decode(None) == ()
