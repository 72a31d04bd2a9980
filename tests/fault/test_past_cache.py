"""Writing past the page cache: the same bytes whatever the disk can and says, in bounded memory."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fsd.blobs.directory import DirectoryStore
from fsd.host import direct
from fsd.host.seam import Host
from fsd.model.errors import NoSpace
from fsd.model.limits import DIRECT_BUFFER, DIRECT_BUFFERS, DIRECT_LEAST, DIRECT_PIECE, KIB, MIB

BODY = random.Random(8).randbytes(MIB)


class Wrote(NamedTuple):
    past: bool
    length: int


class Disk:
    """Looks at every write of this process; `refuses`, `takes` and `full` make it another disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrote: list[Wrote] = []
        self.refuses = False  # writes past the cache
        self.takes: int | None = None  # of one write, at most
        self.full: int | None = None  # bytes
        self._pwrite, self._write = os.pwrite, os.write
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "write", self.write)

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        past = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if past and self.refuses:
            raise OSError(errno.EINVAL, "Invalid argument")
        if self.full is not None and at + len(data) > self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        # Whatever this disk can: it is written through the cache, at any length.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        done = self._pwrite(fd, data[: self.takes], at)
        if past:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        self.wrote.append(Wrote(past, done))
        return done

    def write(self, fd: int, data: memoryview) -> int:
        self.wrote.append(Wrote(False, len(data)))
        return self._write(fd, data)

    def lengths(self, *, past: bool) -> list[int]:
        return [one.length for one in self.wrote if one.past == past and one.length]


def pieces_of(size: int, count: int) -> list[bytes | memoryview]:
    """`size` bytes in `count` pieces of unlike lengths, nowhere aligned."""
    rng = random.Random(size)
    cuts = sorted(rng.randrange(size + 1) for _ in range(count - 1))
    whole = memoryview((BODY * (size // MIB + 1))[:size])
    return [whole[low:high] for low, high in zip([0, *cuts], [*cuts, size], strict=True)]


def written(path: Path, pieces: Sequence[bytes | memoryview]) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        direct.write_past_cache(fd, pieces)
    finally:
        os.close(fd)
    return path.read_bytes()


@pytest.mark.parametrize(
    "size", [0, 1, 4095, 4096, 4097, DIRECT_BUFFER - 1, DIRECT_BUFFER, DIRECT_BUFFER + 1, 5 * MIB + 123]
)
def test_the_bytes_are_those_given(tmp_path: Path, size: int) -> None:
    pieces = pieces_of(size, 7)
    assert written(tmp_path / "f", pieces) == b"".join(pieces)


@pytest.mark.parametrize("size", [DIRECT_BUFFER + 5000, 4 * MIB, 4 * MIB + 1])
def test_all_but_a_rest_of_the_last_page_goes_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    disk = Disk(monkeypatch)
    pieces = pieces_of(size, 9)
    assert written(tmp_path / "f", pieces) == b"".join(pieces)
    assert sum(disk.lengths(past=True)) == size - size % direct.ALIGNED
    assert sum(disk.lengths(past=False)) == size % direct.ALIGNED


def test_a_disk_that_cannot_is_written_to_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.refuses = True
    pieces = pieces_of(3 * MIB + 77, 5)
    assert written(tmp_path / "f", pieces) == b"".join(pieces)
    assert not disk.lengths(past=True)


def test_so_is_one_that_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def no_such_flag(fd: int, what: int, flags: int = 0) -> Any:
        if what == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, what, flags)

    monkeypatch.setattr(direct.fcntl, "fcntl", no_such_flag)
    pieces = pieces_of(3 * MIB + 77, 5)
    assert written(tmp_path / "f", pieces) == b"".join(pieces)


@pytest.mark.parametrize("takes", [64 * KIB, 100_000])
def test_what_a_write_did_not_take_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    disk = Disk(monkeypatch)
    disk.takes = takes
    pieces = pieces_of(2 * MIB + 99, 5)
    assert written(tmp_path / "f", pieces) == b"".join(pieces)
    # From an address that is not aligned on, the rest goes through the cache.
    assert sum(disk.lengths(past=True)) == (2 * MIB if takes % direct.ALIGNED == 0 else takes)


def test_an_error_that_stays_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: memoryview, at: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Invalid argument"):
        written(tmp_path / "f", [BODY])


def test_many_at_once_share_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = direct._Buffers()
    monkeypatch.setattr(direct, "_buffers", made)
    start = threading.Barrier(3 * DIRECT_BUFFERS)
    same: list[bool] = []

    def one(number: int) -> None:
        pieces = [bytes([number]) * (3 * MIB + number)]
        start.wait(30)
        same.append(written(tmp_path / f"f{number}", pieces) == pieces[0])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3 * DIRECT_BUFFERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert same == [True] * len(threads)
    assert 1 <= len(made._free) <= DIRECT_BUFFERS


def test_which_objects_of_the_store_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "objects", Host())
    disk = Disk(monkeypatch)
    blocks = [b"header", *[BODY] * 4]
    store.put("packs/a/large", blocks)
    assert sum(disk.lengths(past=True)) == 4 * MIB
    assert store.get("packs/a/large", 0, 4 * MIB + 6) == b"".join(blocks)
    disk.wrote.clear()
    tree = [BODY[: DIRECT_PIECE - 1]] * 16  # many small files
    store.put("packs/a/tree", tree)
    few = [BODY[: DIRECT_LEAST - 1]]
    store.put("packs/a/few", few)
    assert not disk.lengths(past=True)
    assert disk.lengths(past=False)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "objects", Host())
    disk = Disk(monkeypatch)
    disk.full = 3 * MIB
    with pytest.raises(NoSpace):
        store.put("packs/a/b", [BODY] * 4)
    assert disk.lengths(past=True) == [DIRECT_BUFFER]
    assert store.head("packs/a/b") is None
    assert os.listdir(tmp_path / "objects" / ".unfinished") == []
    disk.full = None
    store.put("packs/a/b", [BODY] * 4)
    assert store.get("packs/a/b", 0, 4 * MIB) == BODY * 4


def test_a_file_that_may_not_grow_is_told(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path / "f", [BODY] * 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


CHILD = """
import sys
from pathlib import Path
from fsd.blobs.directory import DirectoryStore
from fsd.host.seam import Crasher, Host
store = DirectoryStore(Path(sys.argv[1]), Host(crash_point=Crasher(sys.argv[2])))
store.put("packs/a/b", [b"0123456789abcdef" * 65536] * 3 + [b"end"])
"""


@pytest.mark.parametrize(
    ("point", "there"),
    [("pack.written", False), ("pack.synced", False), ("pack.renamed", True), ("pack.durable", True)],
)
def test_killed_at_each_durable_step_of_a_large_object(tmp_path: Path, point: str, there: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, os.fspath(tmp_path / "objects"), point], timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = DirectoryStore(tmp_path / "objects", Host())
    assert (store.head("packs/a/b") is not None) == there
    if there:
        assert store.get("packs/a/b", 0, 3 * MIB + 3) == b"0123456789abcdef" * 65536 * 3 + b"end"
