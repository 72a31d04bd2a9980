"""fallocate: the rules of ext4 one by one, holes that are holes everywhere, tools, kills and remounts."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from pathlib import Path

import pytest
from support.ranges import COLLAPSE, INSERT, KEEP, PUNCH, ZERO, Twice, fallocate, outcome
from support.sandbox import Sandbox, sandbox

from fsd.model.limits import FILE_MAX, GIB, KIB, MIB

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def room(path: Path) -> int:
    return os.stat(path).st_blocks * 512


CALLS = [
    (size, mode, offset, length)
    for size in (0, 64 * KIB)
    for mode in (0, KEEP, PUNCH | KEEP, ZERO, ZERO | KEEP)
    for offset, length in (
        (0, 4096),
        (4096, 8192),
        (4100, 100),
        (60_000, 100_000),
        (64 * KIB, 4096),
        (100_000, 4096),
        (0, 64 * KIB),
    )
]
WRONG = [
    (PUNCH, 0, 4096),
    (PUNCH | KEEP | ZERO, 0, 4096),
    (64, 0, 4096),
    (128, 0, 4096),
    (0, 0, 0),
    (0, 0, -1),
    (0, -1, 10),
    (0, (1 << 63) - 10, 100),
    (0, 1, FILE_MAX),
]


def test_every_rule_as_on_the_local_disk(box: Sandbox, tmp_path: Path) -> None:
    """Error, size, content and times of each call."""
    for number, (size, mode, offset, length) in enumerate([*CALLS, *((8192, *call) for call in WRONG)]):
        got = []
        for top in (box.mountpoint, tmp_path):
            fd = os.open(top / f"rule{number}", os.O_RDWR | os.O_CREAT, 0o644)
            os.write(fd, b"z" * size)
            got.append(outcome(fd, mode, offset, length))
            os.close(fd)
        assert got[0] == got[1], (size, mode, offset, length)


def test_what_no_handle_may(box: Sandbox) -> None:
    path = box.mountpoint / "file"
    path.write_bytes(b"x" * 8192)
    with path.open("rb") as file:
        for mode in (0, PUNCH | KEEP):
            with pytest.raises(OSError, match="Bad file") as caught:
                fallocate(file.fileno(), mode, 0, 4096)
            assert caught.value.errno == errno.EBADF
    with path.open("ab") as file:
        fallocate(file.fileno(), 0, 0, 10_000)
        assert os.fstat(file.fileno()).st_size == 10_000
        # What only a local disk can do, refused as the kernel refuses it for every FUSE mount.
        for mode in (COLLAPSE, INSERT):
            with pytest.raises(OSError, match="not supported"):
                fallocate(file.fileno(), mode, 4096, 4096)
        with pytest.raises(OSError, match="No space") as full:
            fallocate(file.fileno(), 0, 0, min(os.statvfs(path).f_bavail * 4096 * 2, FILE_MAX))
        assert full.value.errno == errno.ENOSPC
        assert os.fstat(file.fileno()).st_size == 10_000


@pytest.mark.root
def test_set_id_bits_go_with_an_ordinary_users_call(box: Sandbox, tmp_path: Path) -> None:
    """As on the local disk; root's call leaves them."""
    got = []
    tmp_path.chmod(0o755)
    for top in (box.mountpoint, tmp_path):
        modes = []
        for mode in (0o6755, 0o2745, 0o6777):
            for flags in (0, PUNCH | KEEP):
                path = top / f"set{mode:o}{flags}"
                path.write_bytes(b"x" * 10_000)
                os.chown(path, 12345, 12345)
                os.chmod(path, mode | 0o6)
                modes.append(as_other(path, flags))
        got.append(modes)
    assert got[0] == got[1]


def as_other(path: Path, mode: int) -> int:
    """The file's mode after another user's call."""
    script = (
        "import ctypes, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.fallocate(fd, int(sys.argv[2]), ctypes.c_long(0), ctypes.c_long(4096)):\n"
        "    sys.exit(os.strerror(ctypes.get_errno()))\n"
    )
    argv = ["/usr/bin/python3", "-c", script, f"/proc/self/cwd/{path.name}", str(mode)]
    done = subprocess.run(argv, cwd=path.parent, user=54321, group=54321, extra_groups=[], timeout=30)
    assert done.returncode == 0
    return os.stat(path).st_mode


def test_holes_are_holes_everywhere(box: Sandbox, tmp_path: Path) -> None:
    """Room falls at once, stays so when flushed, elsewhere and after a remount."""
    top = box.mountpoint
    data = os.urandom(6 * MIB)
    (top / "f").write_bytes(data)
    box.drain()
    assert room(top / "f") == 6 * MIB
    want = bytearray(data)
    with (top / "f").open("r+b") as file:
        for start, length in ((MIB, 2 * MIB), (4 * MIB + 4096, 8192), (5 * MIB + 1000, 100)):
            fallocate(file.fileno(), PUNCH | KEEP, start, length)
            want[start : start + length] = bytes(length)
        held = room(top / "f")
        assert held == -(-(6 * MIB - 2 * MIB - 8192 - 100) // 512) * 512
        assert (top / "f").read_bytes() == want
        os.fsync(file.fileno())
    assert room(top / "f") == held
    with (top / "huge").open("wb") as file:
        fallocate(file.fileno(), KEEP, 0, 4 * GIB)
        assert os.fstat(file.fileno()).st_size == 0
        fallocate(file.fileno(), 0, 0, 4 * GIB)
        fallocate(file.fileno(), PUNCH | KEEP, 0, 4 * GIB)
        file.seek(3 * GIB)
        file.write(b"end")
    box.drain()
    with sandbox(tmp_path / "two", box.fs) as other:
        assert (other.mountpoint / "f").read_bytes() == want
        assert room(other.mountpoint / "f") == held
        assert os.stat(other.mountpoint / "huge").st_size == 4 * GIB
        assert room(other.mountpoint / "huge") <= MIB
    box.unmount()
    box.mount()
    assert (top / "f").read_bytes() == want
    assert room(top / "f") == held


def test_mapped_pages_go_with_the_hole(box: Sandbox) -> None:
    path = box.mountpoint / "mapped"
    path.write_bytes(b"a" * 64 * KIB)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 64 * KIB) as mapped:
        mapped[0:4] = b"bbbb"
        mapped[9000:9004] = b"cccc"
        fallocate(file.fileno(), PUNCH | KEEP, 8192, 4096)
        assert mapped[8192:12288] == bytes(4096)
        assert mapped[0:4] == b"bbbb"
        mapped[8200:8203] = b"new"
        mapped.flush()
        assert path.read_bytes()[8192:8208] == bytes(8) + b"new" + bytes(5)


def test_random_calls_as_on_the_local_disk(box: Sandbox, tmp_path: Path, seed: int) -> None:
    """With fsyncs, a kill of the daemon and a remount between."""
    both = Twice(box.mountpoint / "twice", tmp_path / "twice", seed, 5 * MIB)
    for change in ("drain", "kill", "remount", ""):
        for number in range(40):
            both.step()
            if number % 13 == 0:
                os.fsync(both.fds[0])
        both.check()
        if change == "drain":
            box.drain()
            both.check()
        elif change == "kill":
            box.kill()
            both.fds = []
            box.detach()
            box.mount()
            both.open(box.mountpoint / "twice")
        elif change == "remount":
            both.close()
            box.unmount()
            box.mount()
            both.open(box.mountpoint / "twice")
    both.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_random_calls(box: Sandbox, tmp_path: Path, seed: int) -> None:
    for turn in range(6):
        both = Twice(box.mountpoint / f"twice{turn}", tmp_path / f"twice{turn}", seed + turn, 9 * MIB)
        for number in range(400):
            both.step()
            if number % 50 == 49:
                both.check()
            if number % 120 == 119:
                both.close()
                box.unmount()
                box.mount()
                both.open(box.mountpoint / f"twice{turn}")
        both.close()


@pytest.mark.long
def test_tools(box: Sandbox) -> None:
    """What people call: fallocate(1), cp, truncate, rsync, posix_fallocate, fio."""
    script = """
        fallocate -l 3M made; test "$(stat -c %s made)" = 3145728
        fallocate -n -l 8M made; test "$(stat -c %s made)" = 3145728
        head -c 3M /dev/urandom > data; cp data keep
        fallocate -p -o 1M -l 1M data; test "$(stat -c %b data)" = 4096
        cmp <(head -c 1M data) <(head -c 1M keep); cmp <(tail -c 1M data) <(tail -c 1M keep)
        cmp <(head -c 2M data | tail -c 1M) <(head -c 1M /dev/zero)
        fallocate -z -o 2M -l 2M data; test "$(stat -c %s data)" = 4194304
        cp --sparse=always data sparse; cmp data sparse
        cp --reflink=auto keep copy; cmp keep copy
        head -c 2M /dev/zero > zeros; cat zeros keep > dig; fallocate -d dig
        cmp dig <(cat zeros keep); test $(stat -c %b dig) -le 6144
        ! fallocate -c -o 1M -l 1M data 2>/dev/null
        rsync --preallocate keep rsynced; cmp keep rsynced
        rsync --preallocate --inplace --sparse dig rsynced; cmp dig rsynced
        python3 -c 'import os; os.posix_fallocate(os.open("posix", os.O_RDWR | os.O_CREAT), 5, 100000)'
        test "$(stat -c %s posix)" = 100005
    """
    done = subprocess.run(
        ["bash", "-euc", script], cwd=box.mountpoint, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
