"""copy_file_range within a mount: the right bytes wherever they are, and stored ones are not moved."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox

from fsd.model.limits import GIB, KIB, MIB

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def copy(source: Path, target: Path, start: int, to: int, length: int) -> int:
    """As programs call it: until nothing more is copied. How many calls it took."""
    calls = 0
    with source.open("rb") as a, target.open("r+b" if target.exists() else "wb") as b:
        while length:
            done = os.copy_file_range(a.fileno(), b.fileno(), length, start, to)
            calls += 1
            if not done:
                return calls
            start, to, length = start + done, to + done, length - done
    return calls


def moved(box: Sandbox) -> int:
    """Bytes the daemon has read and written, in files and from the kernel."""
    rows = Path(f"/proc/{box.daemon}/io").read_text().split()
    return int(rows[1]) + int(rows[3])


def missed(box: Sandbox) -> int:
    """Blobs that were fetched: each was looked for in the cache first."""
    return int(box.status()["cache"]["misses"])


def test_stored_bytes_are_shared(box: Sandbox, tmp_path: Path) -> None:
    """24 MiB, aligned and not: the daemon neither reads nor sends them."""
    top, data = box.mountpoint, os.urandom(24 * MIB)
    (top / "a").write_bytes(data)
    box.drain()
    before, fetched = moved(box), missed(box)
    assert copy(top / "a", top / "b", 0, 0, 30 * MIB) <= 3
    copy(top / "a", top / "c", 12_345, 777, 20 * MIB)
    want = bytes(777) + data[12_345 : 12_345 + 20 * MIB]
    box.drain()
    assert moved(box) - before < MIB
    assert missed(box) == fetched
    assert (top / "b").read_bytes() == data
    assert (top / "c").read_bytes() == want
    os.unlink(top / "a")
    box.drain()
    with sandbox(tmp_path / "two", box.fs) as other:
        assert (other.mountpoint / "b").read_bytes() == data
        assert (other.mountpoint / "c").read_bytes() == want
        assert os.stat(other.mountpoint / "c").st_blocks == os.stat(top / "c").st_blocks


def test_whatever_is_not_stored_yet(box: Sandbox) -> None:
    """Written and not flushed, patched, holes, copies of copies; each byte is the source's at that moment."""
    top = box.mountpoint
    want = bytearray(os.urandom(3 * MIB + 17))
    path = top / "a"
    path.write_bytes(want)
    copy(path, top / "now", 0, 0, 4 * MIB)
    assert (top / "now").read_bytes() == want
    box.drain()
    with path.open("r+b") as file:
        for at in (0, 5000, MIB - 3, 2 * MIB + 1):
            file.seek(at)
            file.write(b"patched")
            want[at : at + 7] = b"patched"
        file.truncate(6 * MIB)
        want += bytes(6 * MIB - len(want))
        file.seek(5 * MIB)
        file.write(b"end")
        want[5 * MIB : 5 * MIB + 3] = b"end"
    copy(path, top / "mixed", 0, 0, 6 * MIB)
    copy(top / "mixed", top / "again", 1, MIB, 6 * MIB)
    assert (top / "mixed").read_bytes() == want
    assert (top / "again").read_bytes() == bytes(MIB) + want[1:]
    assert os.stat(top / "mixed").st_blocks * 512 < 4 * MIB
    box.drain()
    box.unmount()
    box.mount()
    assert (top / "now").stat().st_size == 3 * MIB + 17
    assert (top / "mixed").read_bytes() == want
    assert (top / "again").read_bytes() == bytes(MIB) + want[1:]
    assert os.stat(top / "mixed").st_blocks * 512 < 5 * MIB


def test_kept_when_the_daemon_is_killed(box: Sandbox, tmp_path: Path) -> None:
    """Copied and nothing sent: the server is away, the daemon is killed, the source removed."""
    top, data = box.mountpoint, os.urandom(5 * MIB)
    (top / "a").write_bytes(data)
    box.drain()
    box.fs.server.stop()
    copy(top / "a", top / "b", 0, 0, 5 * MIB)
    copy(top / "a", top / "b", 100, 3 * MIB, MIB)
    os.unlink(top / "a")
    box.kill()
    box.fs.server.start()
    box.detach()
    box.mount()
    want = data[: 3 * MIB] + data[100 : MIB + 100] + data[4 * MIB :]
    assert (top / "b").read_bytes() == want
    assert not (top / "a").exists()
    box.drain()
    with sandbox(tmp_path / "two", box.fs) as other:
        assert (other.mountpoint / "b").read_bytes() == want


def test_rules(box: Sandbox, tmp_path: Path) -> None:
    """Errors, short counts and sizes as on the local disk."""
    got = []
    box.drain()
    for top in (box.mountpoint, tmp_path):
        source, target = top / "rules", top / "target"
        source.write_bytes(b"0123456789" * 1000)
        target.write_bytes(b"x" * 5)
        read, write = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR)
        both, append = os.open(source, os.O_RDWR), os.open(target, os.O_WRONLY | os.O_APPEND)
        calls = (
            (read, write, 100, 9_990, 3),
            (read, write, 100, 10_000, 3),
            (read, write, 100, 20_000, 3),
            (read, write, 1 << 40, 0, 3),
            (read, write, 0, 0, 3),
            (read, read, 10, 0, 5000),
            (both, both, 100, 0, 50),
            (both, both, 100, 0, 100),
            (both, both, 9000, 5000, 9000),
            (read, append, 10, 0, 0),
            (write, read, 10, 0, 0),
            (read, write, 10, 0, (1 << 62)),
        )
        found: list[object] = []
        for source_fd, target_fd, length, start, to in calls:
            os.utime(target_fd, ns=(10**18, 10**18))
            try:
                done: object = os.copy_file_range(source_fd, target_fd, length, start, to)
            except OSError as exc:
                done = errno.errorcode[exc.errno or 0]
            times = os.fstat(target_fd).st_mtime_ns != 10**18
            found.append((done, os.fstat(target_fd).st_size, times if done not in (0, "EINVAL") else None))
        found.append((source.read_bytes(), target.read_bytes()))
        got.append(found)
        for fd in (read, write, both, append):
            os.close(fd)
    assert got[0] == got[1]


@pytest.mark.long
def test_huge_and_sparse(box: Sandbox) -> None:
    """A terabyte of hole is a few calls; what lies in it comes along."""
    top = box.mountpoint
    with (top / "huge").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(300 * GIB)
        file.write(b"middle")
    assert copy(top / "huge", top / "copied", 0, 0, 1 << 40) < 1100
    assert os.stat(top / "copied").st_size == 1 << 40
    assert os.stat(top / "copied").st_blocks * 512 <= 8 * KIB
    with (top / "copied").open("rb") as file:
        file.seek(300 * GIB - 1)
        assert file.read(8) == b"\0middle\0"


@pytest.mark.long
def test_many_small_pieces(box: Sandbox, seed: int) -> None:
    """More pieces than a block may have parts: they become one blob, with the same bytes."""
    rng, top = random.Random(seed), box.mountpoint
    data = rng.randbytes(3 * MIB)
    (top / "a").write_bytes(data)
    want = bytearray(rng.randbytes(2 * MIB))
    (top / "b").write_bytes(want)
    box.drain()
    box.unmount()
    box.mount()
    for _ in range(60):
        start, to, length = rng.randrange(2 * MIB), rng.randrange(MIB), rng.choice((10, 5000, 100_000))
        copy(top / "a", top / "b", start, to, length)
        want[to : to + length] = data[start : start + length]
    assert (top / "b").read_bytes() == want
    box.drain()
    box.unmount()
    box.mount()
    assert (top / "b").read_bytes() == want


@pytest.mark.long
def test_tools(box: Sandbox) -> None:
    """cp (which shares by itself), git and Python."""
    script = """
        mkdir tree; for n in $(seq 40); do head -c $((n * 9999)) /dev/urandom > tree/$n; done
        cp -a tree copied; diff -r tree copied
        cp -a --reflink=auto copied again; diff -r tree again
        python3 -c 'import shutil; shutil.copyfile("tree/40", "py")'; cmp tree/40 py
        git init -q repo; cp tree/* repo/; cd repo; git add .
        git -c user.name=n -c user.email=e commit -qm all; git clone -q . ../clone; git gc -q; git fsck
        cd ..; diff -r --exclude=.git repo clone
    """
    done = subprocess.run(
        ["bash", "-euc", script], cwd=box.mountpoint, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
