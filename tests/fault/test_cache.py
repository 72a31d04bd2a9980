"""`BlobCache`: bounded, verified, shared, and never an error to its user."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fsd.cache.blobs import BlobCache
from fsd.host.seam import Host


def blob(n: int, size: int = 1000) -> tuple[bytes, bytes]:
    data = hashlib.sha256(b"%d" % n).digest() * (size // 32 + 1)
    data = data[:size]
    return hashlib.sha256(data).digest(), data


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


class Clock:
    """A wall clock that moves a minute and a half at each look, and a monotonic one moved by hand."""

    def __init__(self) -> None:
        self.wall, self.mono = 10**18, 0.0

    def host(self) -> Host:
        def wall_ns() -> int:
            self.wall += 90 * 10**9
            return self.wall

        return replace(Host(), wall_ns=wall_ns, monotonic=lambda: self.mono)


def test_what_was_put_is_got_and_only_that(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", Host(), 10**6)
    digest, data = blob(1)
    assert cache.get(digest) is None
    cache.put(digest, data)
    assert cache.get(digest) == data
    assert cache.get(blob(2)[0]) is None
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.bytes) == (1, 2, 1000)
    assert BlobCache(tmp_path / "cache", Host(), 10**6).get(digest) == data
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_damaged_bytes_are_a_miss_and_go(tmp_path: Path, damage: str) -> None:
    cache = BlobCache(tmp_path, Host(), 10**6)
    digest, data = blob(1)
    cache.put(digest, data)
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[500] ^= 1
    path.write_bytes(
        {"flip": bytes(raw), "cut": bytes(raw[:-1]), "longer": bytes(raw) + b"x", "empty": b""}[damage]
    )
    assert cache.get(digest) is None
    assert not files(tmp_path) and cache.stats().damaged == 1
    cache.put(digest, data)
    assert cache.get(digest) == data


def test_the_size_is_bounded_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, Clock().host(), 16_000)
    for n in range(16):
        cache.put(*blob(n))
    assert len(files(tmp_path)) == 16
    assert cache.get(blob(0)[0])
    cache.put(*blob(100))
    kept = [n for n in range(16) if cache.get(blob(n)[0])]
    assert 0 in kept and 1 not in kept and 15 in kept
    for n in range(200, 400):
        cache.put(*blob(n))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 16_000
    assert cache.get(blob(399)[0]) and cache.stats().evicted > 100
    cache.put(*blob(500, size=20_000))
    assert cache.get(blob(500, size=20_000)[0]) is None


def test_an_existing_directory_is_brought_under_a_smaller_bound(tmp_path: Path) -> None:
    large = BlobCache(tmp_path, Clock().host(), 10**6)
    for n in range(100):
        large.put(*blob(n))
    small = BlobCache(tmp_path, Clock().host(), 10_000)
    small.put(*blob(1000))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    assert small.get(blob(1000)[0])


def test_several_mounts_share_one_directory_within_its_slack(tmp_path: Path) -> None:
    caches = [BlobCache(tmp_path, Host(), 80_000) for _ in range(3)]
    for n in range(600):
        caches[n % 3].put(*blob(n))
        digest, data = blob(n)
        assert caches[(n + 1) % 3].get(digest) in (data, None)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 80_000 + 2 * 10_000


def test_threads_get_right_bytes_or_none_while_others_evict(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, Host(), 30_000)
    wrong: list[int] = []
    hits: list[int] = []

    def work(seed: int) -> None:
        for step in range(300):
            n = (seed * 7 + step * 3) % 60
            digest, data = blob(n)
            got = cache.get(digest)
            if got is None:
                cache.put(digest, data)
            elif got != data:
                wrong.append(n)
            else:
                hits.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and hits
    assert not cache.stats().last_error


def test_a_full_disk_stops_the_cache_growing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_FSIZE plays the disk that takes no more, in a process of its own."""
    program = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_cache import blob, files
from fsd.cache.blobs import BlobCache
from fsd.host.seam import Host
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Path(sys.argv[1])
cache = BlobCache(root, Host(), 10**6)
cache.put(*blob(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
for n in range(2, 6):
    cache.put(*blob(n))
assert cache.get(blob(1)[0]) == blob(1)[1]
assert [cache.get(blob(n)[0]) for n in range(2, 6)] == [None] * 4
assert cache.stats().skipped == 4 and cache.stats().last_error, cache.stats()
assert len(files(root)) == 1, files(root)
print("survived")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, os.fspath(tmp_path), os.fspath(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[1])},
    )
    assert done.stdout.strip() == "survived", done.stderr


def test_after_a_pause_a_disk_with_space_again_is_used(tmp_path: Path) -> None:
    clock = Clock()
    cache = BlobCache(tmp_path / "cache", clock.host(), 10**6)
    (tmp_path / "cache").write_bytes(b"in the way")
    cache.put(*blob(1))
    assert cache.get(blob(1)[0]) is None and cache.stats().last_error
    (tmp_path / "cache").unlink()
    cache.put(*blob(1))
    assert cache.stats().skipped == 2 and cache.get(blob(1)[0]) is None
    clock.mono += 60
    cache.put(*blob(1))
    assert cache.get(blob(1)[0])


def test_what_a_killed_process_left_unfinished_goes(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, Host(), 10**6)
    cache.put(*blob(1))
    (path,) = files(tmp_path)
    old = path.with_name(path.name + ".123.4.tmp")
    new = path.with_name(path.name + ".124.5.tmp")
    for left in (old, new):
        left.write_bytes(b"part")
    os.utime(old, (0, 0))
    BlobCache(tmp_path, Host(), 10**6).put(*blob(2))
    assert not old.exists() and new.exists()


def test_bound_zero_is_no_cache(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", Host(), 0)
    cache.put(*blob(1))
    assert cache.get(blob(1)[0]) is None and not (tmp_path / "cache").exists()
