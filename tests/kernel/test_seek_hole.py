"""SEEK_DATA and SEEK_HOLE: as the local disk answers them, wherever the bytes are at that moment."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.wait import wait_for

from fsd.model.limits import KIB, MIB

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


def layout(path: Path) -> list[tuple[int, int]]:
    """(start, end) of every piece of data, found with both questions."""
    found, at = list[tuple[int, int]](), 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while True:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                return found
            at = os.lseek(fd, start, os.SEEK_HOLE)
            found.append((start, at))
    finally:
        os.close(fd)


def answers(fd: int, offsets: list[int]) -> list[tuple[object, object]]:
    """What both questions say at each offset."""

    def ask(at: int, whence: int) -> object:
        try:
            return os.lseek(fd, at, whence)
        except OSError as exc:
            return exc.errno

    return [(ask(at, os.SEEK_DATA), ask(at, os.SEEK_HOLE)) for at in offsets]


def test_as_on_the_local_disk(box: Sandbox, tmp_path: Path, seed: int) -> None:
    """Random sparse files: each question at edges and between, before a flush, after it, after a remount."""
    rng = random.Random(seed)
    ours, theirs = box.mountpoint / "file", tmp_path / "file"
    size = rng.randrange(3 * MIB, 9 * MIB)
    edges = {0, size - 1, size, size + 1, MIB, MIB - 1, MIB + 1}
    for path in (ours, theirs):
        path.write_bytes(b"")
        os.truncate(path, size)
    for _ in range(12):
        at, length = rng.randrange(size), rng.choice((1, 100, 4096, 70_000, MIB + 5))
        data = rng.randbytes(min(length, size - at))
        for path in (ours, theirs):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(data)
        edges |= {at, at - 1, at + len(data), at + len(data) + 1, at // 4096 * 4096, at + 4096}
    offsets = sorted(edge for edge in edges if edge >= 0)
    with theirs.open("rb") as file:
        os.fsync(file.fileno())
        want = answers(file.fileno(), offsets)
        there = layout(theirs)
    with ours.open("rb") as file:
        assert answers(file.fileno(), offsets) == want
        os.lseek(file.fileno(), 5, os.SEEK_SET)
        assert os.lseek(file.fileno(), 5, os.SEEK_CUR) == 10
        assert os.lseek(file.fileno(), 0, os.SEEK_END) == size
    # Stored, small holes inside a block may have become zeros: more is data, never less.
    box.drain()
    stored = layout(ours)
    box.unmount()
    box.mount()
    assert layout(ours) == stored
    for start, end in there:
        assert any(low <= start and end <= high for low, high in stored)
    touched = {block for start, end in there for block in range(start // MIB, (end - 1) // MIB + 1)}
    assert {at // MIB for start, end in stored for at in range(start, end, 4096)} <= touched


def test_stores_through_a_mapping_are_data(box: Sandbox) -> None:
    """A page that only the kernel has, over a hole: a copy that skips holes must not lose it."""
    path = box.mountpoint / "mapped"
    path.write_bytes(b"")
    os.truncate(path, 4 * MIB)
    with path.open("r+b") as file:
        assert layout(path) == []
        mapped = mmap.mmap(file.fileno(), 4 * MIB)
        mapped[2 * MIB + 10] = 65
        with path.open("rb") as other:
            assert os.lseek(other.fileno(), 0, os.SEEK_DATA) == 2 * MIB
            assert os.lseek(other.fileno(), 2 * MIB, os.SEEK_HOLE) == 2 * MIB + 4096
        mapped[3 * MIB] = 66
        copy = box.mountpoint / "copy"
        subprocess.run(["cp", "--sparse=always", path, copy], check=True, timeout=30)
        assert copy.read_bytes() == mapped[:]
        mapped.close()
    assert layout(path) == [(2 * MIB, 2 * MIB + 4096), (3 * MIB, 3 * MIB + 4096)]


def test_what_another_mount_wrote(box: Sandbox, tmp_path: Path) -> None:
    path = box.mountpoint / "shared"
    path.write_bytes(b"")
    os.truncate(path, 64 * MIB)
    box.drain()
    with path.open("rb") as file, sandbox(tmp_path / "two", box.fs) as other:
        assert answers(file.fileno(), [0]) == [(6, 0)]
        with (other.mountpoint / "shared").open("r+b") as there:
            there.seek(40 * MIB)
            there.write(b"x" * 8192)
        other.drain()
        wait_for(lambda: layout(path) == [(40 * MIB, 40 * MIB + 8192)], 30, "the other's data")


@pytest.mark.long
def test_tools_see_the_holes(box: Sandbox) -> None:
    """cp, tar and qemu's way of copying read what is data and nothing else."""
    script = """
        truncate -s 900G image; printf end | dd of=image bs=1 seek=800G conv=notrunc status=none
        cp --sparse=auto image copied
        test "$(stat -c %s copied)" = "$(stat -c %s image)"
        test $(du -k copied | cut -f 1) -lt 2048
        tar -Scf image.tar image; test $(stat -c %s image.tar) -lt 4000000
        mkdir out; tar -xf image.tar -C out
        test "$(dd if=out/image bs=1 skip=800G count=3 status=none)" = end
        test "$(dd if=copied bs=1 skip=800G count=3 status=none)" = end
    """
    done = subprocess.run(
        ["bash", "-euc", script], cwd=box.mountpoint, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_file_of_many_pieces_is_walked_quickly(box: Sandbox) -> None:
    """Thousands of pieces of data, each looked for in its turn."""
    path = box.mountpoint / "pieces"
    with path.open("wb") as file:
        for number in range(1500):
            file.seek(number * 64 * KIB)
            file.write(b"p")
    assert len(layout(path)) == 1500
    box.drain()
    assert len(layout(path)) > 90
