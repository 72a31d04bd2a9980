"""`BlobCache` storing large blobs behind its user's back: it gives what is there, in bounded memory."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.wait import wait_for

from fsd.cache.blobs import BlobCache
from fsd.host.seam import Host
from fsd.model.limits import CACHE_PAUSE, DIRECT_PIECE, MIB

LIMIT = 64 * MIB


def blob(number: int, size: int = MIB) -> tuple[bytes, bytes]:
    data = random.Random(number).randbytes(size)
    return hashlib.sha256(data).digest(), data


def stored(directory: Path) -> dict[str, Path]:
    return {path.name: path for path in directory.rglob("*") if path.is_file()}


class Held(BlobCache):
    """Its thread waits before it stores, until it is let go; then `then` is called, which may raise."""

    def __init__(self, directory: Path, behind: int, host: Host | None = None) -> None:
        super().__init__(directory, host or Host(), LIMIT, behind=behind)
        self.go = threading.Event()
        self.then: Callable[[], None] = lambda: None

    def _write(self, path: str, data: bytes, serial: int, *, past: bool) -> None:
        if past:
            assert self.go.wait(60)
            self.then()
        super()._write(path, data, serial, past=past)


def keepers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "fsd-keep"}


Made = Callable[[BlobCache], None]


@pytest.fixture
def made() -> Iterator[Made]:
    """Told of a cache, closes it at the end; no thread of it is left then."""
    before = keepers()
    caches: list[BlobCache] = []
    yield caches.append
    for cache in caches:
        if isinstance(cache, Held):
            cache.go.set()
        assert cache.close(60)
    assert not keepers() - before


def test_a_large_blob_is_there_at_once_and_stored_soon(tmp_path: Path, made: Made) -> None:
    cache = Held(tmp_path, 4 * MIB)
    made(cache)
    digest, data = blob(1, MIB - 77)
    cache.put(digest, data)
    assert cache.get(digest) == data
    assert digest.hex() not in stored(tmp_path)
    assert not cache.settle(0)
    cache.go.set()
    assert cache.settle(60)
    assert stored(tmp_path)[digest.hex()].read_bytes() == data
    assert BlobCache(tmp_path, Host(), LIMIT).get(digest) == data
    assert (cache.stats().hits, cache.stats().misses, cache.stats().bytes) == (1, 0, len(data))


def test_a_small_blob_is_stored_at_once(tmp_path: Path, made: Made) -> None:
    cache = Held(tmp_path, 4 * MIB)
    made(cache)
    digest, data = blob(1, DIRECT_PIECE - 1)
    cache.put(digest, data)
    assert stored(tmp_path)[digest.hex()].read_bytes() == data


def test_what_is_more_than_may_wait_is_stored_by_whoever_puts_it(tmp_path: Path, made: Made) -> None:
    cache = Held(tmp_path, 2 * MIB)
    made(cache)
    blobs = [blob(number) for number in range(4)]
    for digest, data in blobs:
        cache.put(digest, data)
    assert set(stored(tmp_path)) == {digest.hex() for digest, _ in blobs[2:]}
    assert all(cache.get(digest) == data for digest, data in blobs)
    cache.go.set()
    assert cache.settle(60)
    assert set(stored(tmp_path)) == {digest.hex() for digest, _ in blobs}
    cache.put(*blob(9))  # there is room again
    assert cache.settle(60)
    assert len(stored(tmp_path)) == 5


def test_one_that_waits_is_not_stored_twice(tmp_path: Path, made: Made) -> None:
    cache = Held(tmp_path, 4 * MIB)
    made(cache)
    for _ in range(3):
        cache.put(*blob(1))
    cache.go.set()
    assert cache.settle(60)
    assert len(stored(tmp_path)) == 1
    assert cache.stats().bytes == MIB


@pytest.mark.parametrize("what", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a slip")])
def test_one_that_cannot_be_stored_is_a_miss_and_the_next_ones_are_stored(
    tmp_path: Path, what: Exception, made: Made
) -> None:
    clock = [100.0]
    cache = Held(tmp_path, 4 * MIB, replace(Host(), monotonic=lambda: clock[0]))
    made(cache)

    def fail() -> None:
        raise what

    cache.then = fail
    cache.go.set()
    first, second = blob(1), blob(2)
    cache.put(*first)
    assert cache.settle(60)
    assert cache.get(first[0]) is None
    assert cache.stats().skipped == 1 and str(what) in cache.stats().last_error
    cache.then = lambda: None
    clock[0] += CACHE_PAUSE + 1
    cache.put(*second)
    assert cache.settle(60)
    assert BlobCache(tmp_path, Host(), LIMIT).get(second[0]) == second[1]


def test_no_thread_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    def none(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    cache = BlobCache(tmp_path, Host(), LIMIT, behind=4 * MIB)
    made(cache)
    digest, data = blob(1)
    cache.put(digest, data)
    assert stored(tmp_path)[digest.hex()].read_bytes() == data
    assert cache.settle(0)


def test_the_thread_keeps_nothing_of_what_it_stored(tmp_path: Path, made: Made) -> None:
    class Bytes(bytes):
        """Counts those alive."""

        alive = 0

        def __new__(cls, data: bytes) -> Bytes:
            Bytes.alive += 1
            return super().__new__(cls, data)

        def __del__(self) -> None:
            Bytes.alive -= 1

    cache = BlobCache(tmp_path, Host(), LIMIT, behind=8 * MIB)
    made(cache)
    for number in range(4):
        digest, data = blob(number)
        cache.put(digest, Bytes(data))
    assert cache.settle(60)
    wait_for(lambda: Bytes.alive == 0, 60, "the last blob to go")


def test_readers_get_right_bytes_while_others_put(tmp_path: Path, made: Made) -> None:
    cache = BlobCache(tmp_path, Host(), LIMIT, behind=2 * MIB)
    made(cache)
    blobs = [blob(number, DIRECT_PIECE + number) for number in range(24)]
    wrong: list[str] = []
    got = [0]

    def put() -> None:
        for one in blobs:
            cache.put(*one)

    def read() -> None:
        for _ in range(4):
            for digest, data in blobs:
                found = cache.get(digest)
                if found is not None:
                    got[0] += 1
                    if found != data:
                        wrong.append(digest.hex())

    threads = [threading.Thread(target=one) for one in (put, put, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cache.settle(60)
    read()
    assert not wrong and got[0] >= 4 * len(blobs)
    assert len(stored(tmp_path)) == len(blobs)


def test_where_an_earlier_version_stored_is_read_too(tmp_path: Path) -> None:
    digest, data = blob(1)
    name = digest.hex()
    old = tmp_path / "v1" / name[:2] / name[2:4] / name
    old.parent.mkdir(parents=True)
    old.write_bytes(data)
    cache = BlobCache(tmp_path, Host(), LIMIT)
    assert cache.get(digest) == data
    old.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert cache.get(digest) is None
    assert not old.exists() and cache.stats().damaged == 1
    cache.put(digest, data)
    assert os.path.relpath(stored(tmp_path)[name], tmp_path) == f"v1/{name[0]}/{name}"
    assert cache.get(digest) == data


def test_what_waits_is_stored_before_a_cache_is_closed(tmp_path: Path, made: Made) -> None:
    cache = Held(tmp_path, 4 * MIB)
    made(cache)
    blobs = [blob(number) for number in range(3)]
    before = keepers()
    for one in blobs:
        cache.put(*one)
    assert len(keepers() - before) == 1
    threading.Timer(0.05, cache.go.set).start()
    assert cache.close(60)
    assert not keepers() - before
    assert set(stored(tmp_path)) == {digest.hex() for digest, _ in blobs}


def test_a_cache_whose_disk_hangs_is_closed_in_time_and_what_waits_is_dropped(
    tmp_path: Path, made: Made
) -> None:
    cache = Held(tmp_path, 4 * MIB)
    made(cache)
    blobs = [blob(number) for number in range(3)]
    before = keepers()
    for one in blobs:
        cache.put(*one)
    assert not cache.close(0.01), "it says what it stored, and stored nothing"
    assert cache.get(blobs[2][0]) is None
    (thread,) = keepers() - before
    cache.go.set()
    thread.join(60)
    assert not thread.is_alive(), "it goes on after the one it was at"
    assert set(stored(tmp_path)) <= {blobs[0][0].hex()}


def test_a_closed_cache_stores_what_is_put_at_once_and_makes_no_thread(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, Host(), LIMIT, behind=4 * MIB)
    before = keepers()
    assert cache.close(60) and cache.close(60)
    digest, data = blob(1)
    cache.put(digest, data)
    assert stored(tmp_path)[digest.hex()].read_bytes() == data
    assert keepers() == before
    assert cache.close(0)


def test_caches_that_come_and_go_leave_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for number in range(20):
        cache = BlobCache(tmp_path / str(number), Host(), LIMIT, behind=4 * MIB)
        cache.put(*blob(number))
        assert cache.close(60)
    assert not set(threading.enumerate()) - before
