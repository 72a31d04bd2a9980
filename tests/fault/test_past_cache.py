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

import msgpack
import pytest

from fsd.blobs.directory import DirectoryStore
from fsd.host import direct
from fsd.host.seam import Host
from fsd.model.errors import NoSpace
from fsd.model.limits import DIRECT_BUFFER, DIRECT_BUFFERS, DIRECT_LEAST, DIRECT_PIECE, KIB, MIB
from fsd.service import packs
from fsd.wire.frame import RAW, Blob, header_length

BODY = random.Random(8).randbytes(MIB)


class Wrote(NamedTuple):
    past: bool
    length: int
    of: object  # whose memory it was


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
        self.wrote.append(Wrote(past, done, data.obj))
        return done

    def write(self, fd: int, data: memoryview) -> int:
        self.wrote.append(Wrote(False, len(data), data))
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


def received(start: int, size: int) -> tuple[bytearray, memoryview]:
    """A body as a server has it, and the `size` bytes of it that begin at `start` of a page."""
    body = bytearray(BODY * (size // MIB + 2))
    return body, memoryview(body)[(start - (direct.place(body) or 0)) % direct.ALIGNED :][:size]


@pytest.mark.parametrize("start", [0, 1, 417, 4095])
@pytest.mark.parametrize("before", [0, 2 * direct.ALIGNED, DIRECT_BUFFER - direct.ALIGNED])
def test_what_lies_as_the_file_will_is_written_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, before: int
) -> None:
    disk = Disk(monkeypatch)
    body, there = received(start, 4 * MIB + 1000)
    assert direct.place(there) == start
    head = (BODY * 2)[: before + start]
    blocks = [there[at : at + MIB] for at in range(0, len(there), MIB)]
    assert written(tmp_path / "f", [head, *blocks]) == head + bytes(there)
    own = [one.length for one in disk.wrote if one.of is body]
    assert own == [4 * MIB if start + 1000 >= direct.ALIGNED or start == 0 else 4 * MIB - direct.ALIGNED], (
        "in one write, but for the parts of pages at both ends"
    )
    assert sum(disk.lengths(past=False)) == (len(head) + len(there)) % direct.ALIGNED


def test_what_lies_otherwise_or_has_gaps_is_no_less_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    rng = random.Random(5)
    for number in range(12):
        _, there = received(rng.randrange(direct.ALIGNED), 3 * MIB)
        cuts = sorted(rng.sample(range(3 * MIB), 8))
        views = [there[low:high] for low, high in zip([0, *cuts], [*cuts, 3 * MIB], strict=True)]
        del views[rng.randrange(len(views))]
        views.insert(rng.randrange(len(views)), memoryview(BODY)[: rng.randrange(200 * KIB)])
        head = BODY[: direct.place(views[0]) or 0] if rng.random() < 0.5 else b"?"
        want = head + b"".join(views)
        assert written(tmp_path / f"f{number}", [head, *views]) == want
        (tmp_path / f"f{number}").unlink()
    assert any(isinstance(one.of, bytearray) for one in disk.wrote), "some were written from where they lay"


def test_a_pack_is_laid_out_so() -> None:
    """Wherever its blobs were received: no length of the header is out of reach of its `pad`."""
    _, page = received(0, MIB + direct.ALIGNED)
    for start in range(direct.ALIGNED):
        there = page[start : start + MIB]
        made, said = packs._frame("fs_x", 7, [Blob(bytes(32), RAW, MIB, there)])
        assert len(made[0]) % direct.ALIGNED == start
        assert (said.rows[0][1], said.size) == (len(made[0]), len(made[0]) + MIB)
        assert header_length(bytes(made[0])) == len(made[0]) - 8
        header = msgpack.unpackb(made[0][8:])
        assert (header["v"], header["fs"], header["pack"]) == (1, "fs_x", 7)
        assert header["blobs"] == [[bytes(32), RAW, MIB, MIB]]
    small, _ = packs._frame("fs_x", 7, [Blob(bytes(32), RAW, DIRECT_LEAST - 1, page[1:DIRECT_LEAST])])
    assert len(small[0]) < 200, "what goes through the cache has no pad"


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
