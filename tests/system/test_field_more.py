"""The rest of what users complain about, by the numbers of the collection: 21, 36, 37, 43 and 44.

Where the others are is told in test_field_cases.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.proxy import FaultProxy
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]


@pytest.fixture
def boxes(trusted: Server, tmp_path: Path) -> Iterator[tuple[Sandbox, Sandbox]]:
    fs = trusted.create()
    made = Sandbox(tmp_path / "a", fs), Sandbox(tmp_path / "b", fs)
    try:
        for box in made:
            box.mount()
        yield made
    finally:
        for box in made:
            box.close()


def filled(top: Path, count: int, each: int = 100) -> None:
    for number in range(count):
        directory = top / f"{number // 500:03d}"
        directory.mkdir(exist_ok=True)
        (directory / f"{number}").write_bytes(b"x" * each)


@pytest.mark.parametrize(
    "count", [800, pytest.param(50_000, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
def test_case_21_du_four_at_once_over_many_files(
    trusted: Server, boxes: tuple[Sandbox, Sandbox], count: int
) -> None:
    """Each tells the right total on a mount that has never seen them; the server lives on."""
    many = boxes[0].mountpoint / "many"
    many.mkdir()
    filled(many, count, 5000)
    boxes[0].drain(timeout=600)
    pid = trusted.pid
    other = boxes[1].mountpoint / "many"
    wait_for(other.exists, 60, "the files on the other mount")
    at_once = [
        subprocess.Popen(["du", "-s", "--apparent-size", "-B1", other], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    told = {int(one.communicate(timeout=600)[0].split()[0]) for one in at_once}
    directories = (count + 499) // 500 + 1
    assert len(told) == 1
    total = told.pop() - count * 5000
    assert 0 <= total <= directories * (1 << 20)
    found = subprocess.run(["find", other, "-type", "f"], capture_output=True, check=True, timeout=300)
    assert found.stdout.count(b"\n") == count
    assert trusted.pid == pid
    assert trusted.process is not None and trusted.process.poll() is None


def memory(pid: int) -> int:
    """Bytes a process has now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{pid} is gone")


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_case_43_memory_is_bounded_and_flat(server: Server, tmp_path: Path) -> None:
    """Many small files, looked through and kept by a checkpoint, ten times over: the daemon and the server
    take no more for the tenth round than for the fifth, and the daemon less than a KiB for each file."""
    box = Sandbox(tmp_path / "a", server.create())
    try:
        box.mount()
        (box.mountpoint / "first").mkdir()
        filled(box.mountpoint / "first", 1000)
        box.drain(timeout=600)
        empty, rounds = memory(box.daemon), []
        for number in range(10):
            top = box.mountpoint / f"round{number}"
            top.mkdir()
            filled(top, 6000)
            subprocess.run(["find", top, "-ls"], stdout=subprocess.DEVNULL, check=True, timeout=300)
            box.fsd("checkpoint", "create", "--label", f"{number}", timeout=300)
            box.drain(timeout=600)
            if number == 3:
                known = (memory(box.daemon) - empty) / (4 * 6000)
                assert known < 1024 + (24 << 20) / (4 * 6000)  # some MiB are caches of their own bound
            if number > 3:
                subprocess.run(["rm", "-r", top], check=True, timeout=300)
            box.drain(timeout=600)
            rounds.append((memory(box.daemon), memory(server.pid)))
        for at in (0, 1):
            assert rounds[9][at] < 1.25 * rounds[4][at] + (8 << 20), rounds
        assert box.unmount(timeout=300)["status"] == "unmounted"
    finally:
        box.close()


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)
print("locked", flush=True)
if sys.stdin.readline() == "cross\\n":
    print("asking", flush=True)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 200)
    except OSError as exc:
        print(exc.errno, flush=True)
    else:
        print("got it", flush=True)
sys.stdin.readline()
"""


def test_case_36_locks_name_their_owner_and_notice_deadlocks(boxes: tuple[Sandbox, Sandbox]) -> None:
    """As on a disk within a mount; another mount has locks of its own (docs/posix.md)."""
    path = boxes[0].mountpoint / "locked"
    path.write_bytes(bytes(1000))
    boxes[0].drain()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        fd = os.open(path, os.O_RDWR)
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        assert (kind, start, length, pid) == (fcntl.F_WRLCK, 100, 10, holder.pid)
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 200)
        holder.stdin.write("cross\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "asking\n"
        stat = Path(f"/proc/{holder.pid}/stat")
        wait_for(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "S", 30, "it to wait for the lock")
        with pytest.raises(OSError) as told:
            fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)  # each has what the other waits for
        assert told.value.errno == errno.EDEADLK
        fcntl.lockf(fd, fcntl.LOCK_UN, 10, 200)
        assert holder.stdout.readline() == "got it\n"
        wait_for((boxes[1].mountpoint / "locked").exists, 30, "the file on the other mount")
        with open(boxes[1].mountpoint / "locked", "r+b") as elsewhere:
            fcntl.lockf(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody there has it
        holder.stdin.write("end\n")
        holder.stdin.flush()
        holder.wait(30)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


def test_case_37_appending_rewriting_and_renaming_work(boxes: tuple[Sandbox, Sandbox]) -> None:
    top = boxes[0].mountpoint
    (top / "d").mkdir()
    path = top / "d" / "f"
    path.write_bytes(b"a" * (3 << 20))
    for drained in (False, True):
        with path.open("ab") as file:
            file.write(b"b" * 10)
        with path.open("r+b") as file:
            file.seek((1 << 20) - 5)
            file.write(b"c" * 10)
        path = path.rename(top / "d" / f"g{drained}")
        (top / "d").rename(top / "e")
        (top / "e").rename(top / "d")
        if not drained:
            boxes[0].drain()
    boxes[0].drain()
    there = boxes[1].mountpoint / "d" / "gTrue"
    wait_for(there.exists, 30, "the new name on the other mount")
    wanted = bytearray(b"a" * (3 << 20) + b"b" * 20)
    wanted[(1 << 20) - 5 : (1 << 20) + 5] = b"c" * 10
    assert there.read_bytes() == wanted


@pytest.mark.parametrize("count", [700, pytest.param(5000, marks=pytest.mark.long)])
def test_case_44_a_cold_listing_is_a_handful_of_requests(server: Server, tmp_path: Path, count: int) -> None:
    """`ls -lR` of a tree that a mount has never seen: some requests for a thousand entries, not one each."""
    fs = server.create()
    box = Sandbox(tmp_path / "a", fs)
    with FaultProxy(server.url) as proxy:
        cold = Sandbox(tmp_path / "b", fs, endpoint=proxy.url)
        try:
            box.mount()
            filled(box.mountpoint, count)
            box.drain(timeout=300)
            cold.mount()
            before = proxy.requests.total()
            told = subprocess.run(
                ["ls", "-lR", cold.mountpoint], capture_output=True, text=True, timeout=200, check=True
            )
            asked = proxy.requests.total() - before
            assert sum(line.startswith("-") for line in told.stdout.splitlines()) == count
            assert asked <= 12 + count // 250, (asked, json.dumps(proxy.requests))
            assert cold.unmount()["status"] == "unmounted"
        finally:
            box.close()
            cold.close()
