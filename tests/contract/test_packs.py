"""Blobs into packs and out again, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.packstore import FS_NAME, make_fs, noise
from support.postgres import PostgresServer

from fsd.blobs.directory import DirectoryStore
from fsd.blobs.store import Stretch
from fsd.host.seam import Host
from fsd.meta.database import Database, open_database
from fsd.model.errors import DamagedBody, IntegrityError, TooLarge
from fsd.model.limits import BLOCK, PACK_INLINE_MAX, UPLOAD_BLOBS_MAX, UPLOAD_MAX
from fsd.service.packs import Packs, object_key
from fsd.wire.frame import RAW, Blob, make_blob, open_blob


class Shelf:
    """Packs with a clock that moves by hand."""

    def __init__(self, place: str, objects: Path) -> None:
        self.now = 1000
        self.host = Host(wall_ns=lambda: self.now)
        self.db: Database = open_database(place, self.host)
        self.store = DirectoryStore(objects, self.host)
        self.packs = Packs(self.db, self.store, self.host)
        self.fs = self.db.write(make_fs)

    def put(self, *blobs: Blob) -> None:
        self.packs.store(self.fs, FS_NAME, blobs)

    def objects(self) -> list[str]:
        return sorted(found.key for found in self.store.list("packs/"))

    def rows(self, what: str) -> list[tuple[object, ...]]:
        return self.db.read(lambda tx: tx.all(f"SELECT {what} ORDER BY 1"))


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "data")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.fresh()


@pytest.fixture
def shelf(place: str, tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(place, tmp_path / "objects")
    yield made
    made.db.close()


def small(number: int) -> Blob:
    return make_blob(noise(f"small {number}", 100))


def large(number: int) -> Blob:
    return make_blob(noise(f"large {number}", PACK_INLINE_MAX + 1))


def test_small_packs_live_in_their_row_and_larger_ones_are_objects(shelf: Shelf) -> None:
    shelf.put(small(1), small(2), make_blob(b"text " * 1000))
    assert shelf.objects() == []
    shelf.put(large(1), small(3))
    assert len(shelf.objects()) == 1
    wanted = [small(1), small(2), make_blob(b"text " * 1000), large(1), small(3)]
    found = shelf.packs.read(shelf.fs, [blob.hash for blob in wanted] + [b"?" * 32])
    assert found == {blob.hash: blob for blob in wanted}


@pytest.mark.parametrize(("size", "objects"), [(PACK_INLINE_MAX, 0), (PACK_INLINE_MAX + 1, 1)])
def test_the_bound_between_the_two(shelf: Shelf, size: int, objects: int) -> None:
    blob = make_blob(noise("x", size), compress=False)
    shelf.put(blob)
    assert len(shelf.objects()) == objects
    assert open_blob(shelf.packs.read(shelf.fs, [blob.hash])[blob.hash]) == open_blob(blob)


def test_a_blob_is_stored_once(shelf: Shelf) -> None:
    shelf.put(small(1), small(1))
    shelf.put(large(1))
    before = shelf.rows("id, size FROM pack")
    shelf.now = 2000
    shelf.put(small(1))
    shelf.put(large(1), small(1))
    assert shelf.rows("id, size FROM pack") == before
    assert len(shelf.objects()) == 1
    assert shelf.rows("fresh FROM blob") == [(2000,), (2000,)], "reuse makes a blob fresh"
    shelf.put(large(1), large(2), small(1), small(2))
    assert len(shelf.rows("hash FROM blob")) == 4
    found = shelf.packs.read(shelf.fs, [b.hash for b in (small(1), small(2), large(1), large(2))])
    assert len(found) == 4


def test_filesystems_do_not_share(shelf: Shelf) -> None:
    shelf.put(small(1))
    assert shelf.packs.read(shelf.fs + 1, [small(1).hash]) == {}
    assert shelf.db.write(lambda tx: shelf.packs.missing(tx, shelf.fs + 1, {small(1).hash})) == [
        small(1).hash
    ]


def test_missing_tells_which_and_makes_the_others_fresh(shelf: Shelf) -> None:
    many = [small(number) for number in range(700)]
    shelf.put(*many)
    shelf.now = 5000
    asked = {blob.hash for blob in many[:600]} | {b"a" * 32, b"b" * 32}
    assert shelf.db.write(lambda tx: shelf.packs.missing(tx, shelf.fs, asked)) == [b"a" * 32, b"b" * 32]
    fresh = [row[0] for row in shelf.rows("fresh FROM blob")]
    assert (fresh.count(1000), fresh.count(5000)) == (100, 600)
    assert shelf.db.write(lambda tx: shelf.packs.missing(tx, shelf.fs, set())) == []


def test_a_blob_with_references_is_marked_when_it_loses_the_last(shelf: Shelf) -> None:
    """Until then nothing takes it: to use it again writes no row."""
    used, idle = small(1).hash, small(2).hash
    shelf.put(small(1), small(2))
    shelf.db.write(lambda tx: shelf.packs.adjust(tx, shelf.fs, {used: 1}))

    def fresh() -> dict[object, object]:
        return dict(shelf.rows("hash, fresh FROM blob"))  # type: ignore[arg-type]

    shelf.now = 2000
    assert shelf.db.write(lambda tx: shelf.packs.lengths(tx, shelf.fs, {used, idle})) == {
        used: 100,
        idle: 100,
    }
    shelf.put(small(1), small(3))
    assert fresh() == {used: 1000, idle: 2000, small(3).hash: 2000}
    shelf.now = 3000
    shelf.db.write(lambda tx: shelf.packs.adjust(tx, shelf.fs, {used: -1}))
    assert fresh()[used] == 3000


def test_only_what_is_new_of_a_small_pack_is_stored(shelf: Shelf) -> None:
    shelf.put(small(1), small(2))
    shelf.put(small(2), small(1))
    assert len(shelf.rows("id FROM pack")) == 1
    shelf.put(small(2), small(3))
    packs: dict[object, object] = dict(shelf.rows("hash, pack FROM blob"))  # type: ignore[arg-type]
    assert packs[small(1).hash] == packs[small(2).hash] != packs[small(3).hash]
    assert [(row[0],) for row in sorted(shelf.rows("id FROM pack"))] == sorted(
        {(one,) for one in packs.values()}
    )
    found = shelf.packs.read(shelf.fs, [small(number).hash for number in (1, 2, 3)])
    assert [open_blob(found[small(number).hash]) for number in (1, 2, 3)] == [
        noise(f"small {number}", 100) for number in (1, 2, 3)
    ]


def test_counts_move_by_what_is_said(shelf: Shelf) -> None:
    shelf.put(small(1), small(2))
    one, two = small(1).hash, small(2).hash
    shelf.db.write(lambda tx: shelf.packs.adjust(tx, shelf.fs, {one: 3, two: 1}))
    shelf.db.write(lambda tx: shelf.packs.adjust(tx, shelf.fs, {one: -1, two: 0}))
    counts = dict(shelf.db.read(lambda tx: tx.all("SELECT hash, refs FROM blob")))
    assert counts == {one: 2, two: 1}


@pytest.mark.parametrize(
    "bad",
    [
        Blob(small(1).hash, RAW, 100, b"x" * 100),
        Blob(small(1).hash, RAW, 100, small(1).stored[:99]),
        make_blob(b"text " * 1000)._replace(stored=b"(" * 50),
        make_blob(b"text " * 1000)._replace(raw_len=4999),
        Blob(b"\0" * 32, RAW, BLOCK + 1, b"x" * (BLOCK + 1)),
    ],
)
def test_bytes_that_are_not_what_they_say_are_refused_whole(shelf: Shelf, bad: Blob) -> None:
    with pytest.raises(DamagedBody):
        shelf.put(small(5), large(5), bad)
    assert shelf.packs.read(shelf.fs, [small(5).hash, large(5).hash, bad.hash]) == {}
    assert shelf.objects() == []


def test_an_upload_has_bounds(shelf: Shelf) -> None:
    blob = make_blob(noise("x", BLOCK), compress=False)
    with pytest.raises(TooLarge):
        shelf.put(*[blob] * (UPLOAD_MAX // BLOCK + 1))
    with pytest.raises(TooLarge):
        shelf.put(*[small(1)] * (UPLOAD_BLOBS_MAX + 1))
    shelf.put(*[small(1)] * UPLOAD_BLOBS_MAX)


def test_read_some_stops_at_a_size_but_gives_one(shelf: Shelf) -> None:
    blobs = [large(number) for number in range(5)]
    shelf.put(*blobs)
    asked = [blobs[0].hash, b"?" * 32, *[blob.hash for blob in blobs[1:]]]
    found, absent = shelf.packs.read_some(shelf.fs, asked, 1)
    assert (list(found), absent) == ([blobs[0].hash], [b"?" * 32])
    found, _ = shelf.packs.read_some(shelf.fs, asked, 3 * len(blobs[0].stored))
    assert set(found) == {blob.hash for blob in blobs[:3]}
    found, absent = shelf.packs.read_some(shelf.fs, [b"?" * 32, b"!" * 32], 1)
    assert (found, absent) == ({}, [b"?" * 32, b"!" * 32])


def test_only_large_blobs_are_left_unread_for_the_kernel(shelf: Shelf) -> None:
    """Small ones are asked for in any order: each would be a call, and a worker's, of its own."""
    blocks = [make_blob(noise(f"block {number}", BLOCK)) for number in range(4)]
    files = [make_blob(noise(f"file {number}", 40_000)) for number in range(16)]
    shelf.put(*blocks)
    shelf.put(*files)
    for blobs, unread in ((blocks, True), (files, False), (files[::-1], False)):
        found, _ = shelf.packs.read_some(shelf.fs, [blob.hash for blob in blobs], UPLOAD_MAX)
        for blob in blobs:
            stored = found[blob.hash].stored
            assert isinstance(stored, Stretch) == unread
            assert (stored.read() if isinstance(stored, Stretch) else stored) == blob.stored


def test_blobs_swept_between_prepare_and_insert_are_stored_again(shelf: Shelf) -> None:
    shelf.put(large(1), small(1))
    prepared = shelf.packs.prepare(shelf.fs, FS_NAME, [large(1), small(1), large(2)])
    assert prepared.hashes == {large(1).hash, small(1).hash, large(2).hash}
    shelf.db.write(lambda tx: tx.execute("DELETE FROM blob"))
    shelf.db.write(lambda tx: shelf.packs.insert(tx, prepared))
    found = shelf.packs.read(shelf.fs, [large(1).hash, small(1).hash, large(2).hash])
    assert found == {blob.hash: blob for blob in (large(1), small(1), large(2))}


def test_a_pack_that_moved_while_it_was_read_is_found(shelf: Shelf) -> None:
    """As the sweep does it: another pack has the blob, and the old object goes."""
    shelf.put(large(1))
    [old] = shelf.objects()
    number = int(old.rsplit("/", 1)[1], 16)
    located = shelf.packs._locate(shelf.fs, [large(1).hash])
    body = shelf.store.get(old, 0, shelf.store.head(old) or 0)
    shelf.store.put(object_key(FS_NAME, number + 500), [body])
    shelf.db.write(
        lambda tx: (
            tx.execute(
                "INSERT INTO pack SELECT id+500, fs, size, data, created FROM pack WHERE id=?", (number,)
            ),
            tx.execute("UPDATE blob SET pack=pack+500"),
            tx.execute("DELETE FROM pack WHERE id=?", (number,)),
        )
    )
    shelf.store.delete(old)
    assert shelf.packs._fetch(shelf.fs, located) == {large(1).hash: large(1)}


def test_a_lost_or_short_object_is_told(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(large(1))
    [key] = shelf.objects()
    path = tmp_path / "objects" / key
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        shelf.packs.read(shelf.fs, [large(1).hash])
    path.unlink()
    with pytest.raises(IntegrityError, match="lost"):
        shelf.packs.read(shelf.fs, [large(1).hash])


def test_distant_blobs_of_a_large_pack_are_read_apart(shelf: Shelf) -> None:
    blobs = [make_blob(noise(f"r{number}", 400_000), compress=False) for number in range(12)]
    shelf.put(*blobs)
    reads: list[int] = []
    get = shelf.store.get

    def counted(key: str, offset: int, length: int) -> bytes:
        reads.append(length)
        return get(key, offset, length)

    shelf.store.get = counted  # type: ignore[method-assign]
    wanted = [blobs[0], blobs[1], blobs[7]]
    assert shelf.packs.read(shelf.fs, [blob.hash for blob in wanted]) == {b.hash: b for b in wanted}
    assert sorted(reads) == [400_000, 800_000]


def test_numbers_of_packs_are_never_given_again(place: str, tmp_path: Path) -> None:
    numbers: set[object] = set()
    for turn in range(3):
        shelf = Shelf(place, tmp_path / "objects")
        shelf.put(small(turn))
        shelf.put(large(turn))
        numbers |= {row[0] for row in shelf.rows("id FROM pack")}
        shelf.db.write(lambda tx: tx.execute("DELETE FROM pack"))
        shelf.db.write(lambda tx: tx.execute("DELETE FROM blob"))
        shelf.db.close()
    assert len(numbers) == 6
