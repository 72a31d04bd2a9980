"""What every `BlobStore` promises, on a directory and on a real S3 server."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.wait import wait_for

from fsd.blobs.directory import DirectoryStore
from fsd.blobs.s3 import S3Options, S3Store
from fsd.blobs.store import BlobStore
from fsd.host.seam import Host
from fsd.model.errors import IntegrityError, NotFound, Unavailable, UsageError
from fsd.model.limits import KIB, MIB


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "objects", Host())
    options: S3Options = request.getfixturevalue("seaweed_bucket")
    return S3Store(replace(options, prefix=f"{secrets.token_hex(6)}/"), Host())


def test_what_was_put_is_read_in_ranges(store: BlobStore) -> None:
    data = secrets.token_bytes(100_000)
    store.put("packs/fs_a/01", [data[:10], b"", data[10:50_000], data[50_000:]])
    assert store.head("packs/fs_a/01") == len(data)
    assert store.get("packs/fs_a/01", 0, len(data)) == data
    assert store.get("packs/fs_a/01", 0, 1) == data[:1]
    assert store.get("packs/fs_a/01", 99_999, 1) == data[-1:]
    assert store.get("packs/fs_a/01", 49_990, 20) == data[49_990:50_010]
    assert store.get("packs/fs_a/01", 5, 0) == b""


def test_a_stretch_is_what_a_range_would_be(store: BlobStore) -> None:
    data = secrets.token_bytes(1000)
    store.put("packs/fs_a/02", [data])
    found = store.stretch("packs/fs_a/02", 10, 900)
    if not isinstance(store, DirectoryStore):
        assert found is None
        return
    assert found is not None and found.read() == data[10:910]
    store.delete("packs/fs_a/02")  # it stays readable for whoever has it
    assert found[100:200].read() == data[110:210]
    with pytest.raises(NotFound):
        store.stretch("packs/fs_a/02", 10, 900)
    store.put("packs/fs_a/02", [data[:909]])
    with pytest.raises(IntegrityError):
        store.stretch("packs/fs_a/02", 10, 900)


def test_a_disk_that_gives_nothing_is_told_before_a_stretch_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer had begun, and was cut: its client heard nothing of the reason."""
    store = DirectoryStore(tmp_path / "objects", Host())
    store.put("packs/fs_a/02", [b"x" * MIB])

    def broken(fd: int, size: int, offset: int) -> bytes:
        assert (size, offset) == (128 * KIB, 10)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(Unavailable, match="EIO"):
        store.stretch("packs/fs_a/02", 10, 900_000)


def test_pieces_may_come_from_a_generator_and_be_large(store: BlobStore) -> None:
    block = secrets.token_bytes(MIB)
    store.put("packs/big", (block for _ in range(8)))
    assert store.head("packs/big") == 8 * MIB
    assert store.get("packs/big", 7 * MIB - 100, MIB + 100) == block[-100:] + block


def test_an_empty_object(store: BlobStore) -> None:
    store.put("empty", [])
    assert store.head("empty") == 0
    assert store.get("empty", 0, 0) == b""


def test_room_is_told_where_it_is_known(store: BlobStore) -> None:
    store.put("packs/a", [b"x"])
    told = store.space()
    if isinstance(store, DirectoryStore):
        assert told is not None and 0 < told.free <= told.total
    else:
        assert told is None


def test_what_is_not_there(store: BlobStore) -> None:
    assert store.head("packs/none") is None
    with pytest.raises(NotFound):
        store.get("packs/none", 0, 1)
    with pytest.raises(NotFound):
        store.get("packs/none", 0, 0)
    store.delete("packs/none")
    assert list(store.list("packs/")) == []


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (1000, 5)])
def test_a_range_behind_the_end_is_damage(store: BlobStore, offset: int, length: int) -> None:
    store.put("short", [b"0123456789"])
    with pytest.raises(IntegrityError):
        store.get("short", offset, length)


def test_putting_again_replaces(store: BlobStore) -> None:
    store.put("k", [b"first and long"])
    store.put("k", [b"second"])
    assert store.head("k") == 6
    assert store.get("k", 0, 6) == b"second"


def test_delete_is_idempotent_and_takes_one(store: BlobStore) -> None:
    store.put("a/1", [b"x"])
    store.put("a/10", [b"y"])
    store.delete("a/1")
    store.delete("a/1")
    assert store.head("a/1") is None
    assert [found.key for found in store.list("a/")] == ["a/10"]


def test_list_is_by_prefix_with_sizes_and_times(store: BlobStore) -> None:
    for fs in ("fs_a", "fs_ab", "fs_b"):
        for number in range(3):
            store.put(f"packs/{fs}/{number:016x}", [b"x" * number])
    found = {one.key: one for one in store.list("packs/fs_a/")}
    assert set(found) == {f"packs/fs_a/{number:016x}" for number in range(3)}
    assert [found[f"packs/fs_a/{number:016x}"].size for number in range(3)] == [0, 1, 2]
    now = Host().wall_ns() // 10**9
    assert all(now - 600 < one.mtime < now + 600 for one in found.values())
    assert len(list(store.list("packs/fs_a"))) == 6
    assert len(list(store.list(""))) == 9


def test_more_objects_than_a_page_are_all_listed(store: BlobStore) -> None:
    if isinstance(store, S3Store):
        store.page = 25
    keys = {f"many/{number:04d}" for number in range(60)}
    for key in keys:
        store.put(key, [b"x"])
    assert {one.key for one in store.list("many/")} == keys


def test_listing_goes_on_behind_a_key(store: BlobStore) -> None:
    keys = [f"packs/fs_a/{number:016x}" for number in range(12)]
    for key in keys:
        store.put(key, [b"x"])
    store.put("packs/fs_b/0", [b"x"])
    for at in (0, 5, 11):
        assert [one.key for one in store.list("packs/fs_a/", keys[at])] == keys[at + 1 :]
    assert [one.key for one in store.list("packs/", keys[10])] == [keys[11], "packs/fs_b/0"]
    assert [one.key for one in store.list("packs/", "packs/fs_a/~")] == ["packs/fs_b/0"]
    store.delete("packs/fs_b/0")
    for above in ("packs/fs_b", "packs/fs_a", "packs/none"):
        store.tidy(above)
    assert [one.key for one in store.list("packs/")] == keys
    store.put("packs/fs_b/1", [b"x"])
    assert store.head("packs/fs_b/1") == 1


def test_a_directory_is_listed_in_order_of_key(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, Host())
    keys = sorted(["a/b", "a-b", "a.b", "a/bd", "aa/x", "aa-/x", "b"])
    for key in keys:
        store.put(key, [b"1"])
    assert [one.key for one in store.list("")] == keys
    for at, key in enumerate(keys):
        assert [one.key for one in store.list("", key)] == keys[at + 1 :]
    store.delete("aa/x")
    store.tidy("aa")
    assert not (tmp_path / "aa").exists()


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\n", "x" * 600]
)
def test_keys_that_are_none(store: BlobStore, key: str) -> None:
    for call in (lambda: store.put(key, [b"x"]), lambda: store.get(key, 0, 1), lambda: store.head(key)):
        with pytest.raises(UsageError):
            call()


def test_readers_see_whole_objects_while_one_is_replaced(store: BlobStore) -> None:
    size = 200_000
    store.put("k", [b"a" * size])
    stop = threading.Event()
    torn: list[bytes] = []
    looked = 0

    def look() -> None:
        nonlocal looked
        while not stop.is_set():
            data = store.get("k", 0, size)
            looked += 1
            if data.count(data[:1]) != size:
                torn.append(data)

    reader = threading.Thread(target=look)
    reader.start()
    for letter in b"bcdefgh":
        store.put("k", [bytes([letter]) * size])
        before = looked
        wait_for(lambda: looked > before or not reader.is_alive(), 60, "a look")  # noqa: B023
    stop.set()
    reader.join(60)
    assert looked >= 7, "the reader ended"
    assert not torn
    assert store.get("k", 0, 1) == b"h"


def test_a_bucket_that_cannot_be_used_is_told_at_once(seaweed_bucket: S3Options) -> None:
    for options in (
        replace(seaweed_bucket, bucket="no-such-bucket"),
        replace(seaweed_bucket, secret_key="wrong"),
        replace(seaweed_bucket, endpoint="http://127.0.0.1:9"),
    ):
        with pytest.raises(Unavailable):
            S3Store(options, Host())


def test_a_secret_is_not_shown(seaweed_bucket: S3Options) -> None:
    assert seaweed_bucket.secret_key is not None
    assert seaweed_bucket.secret_key not in repr(seaweed_bucket)
