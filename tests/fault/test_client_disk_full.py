"""The disk under the state directory, or the buffer, is full: nothing is lost, nothing hangs for ever."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree

from fsd.model.errors import NoSpace
from fsd.model.limits import MIB
from fsd.vfs.types import Park

SUPPORT = Path(__file__).parent.parent / "support"


def apart(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A script of tests/support with a disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    wrap = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    return subprocess.run(
        [*wrap, sys.executable, SUPPORT / script, disk, tmp_path / "server"],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_full_disk_under_the_state_directory(tmp_path: Path) -> None:
    done = apart("full_log.py", tmp_path)
    assert done.stdout.split() == ["full", "changes", "told", "freed", "recovered"], done.stderr
    assert done.returncode == 0, done.stderr


def test_no_inodes_left_under_the_state_directory(tmp_path: Path) -> None:
    done = apart("full_inodes.py", tmp_path)
    assert done.stdout.split() == ["on", "told", "freed"], done.stderr
    assert done.returncode == 0, done.stderr


def small(tmp_path: Path) -> Client:
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    client.net.faulty = False
    client.options = replace(client.options, segment_size=64 * MIB, buffer_size=8 * MIB, io_timeout=10.0)
    client.open()
    return client


def test_a_full_buffer_parks_writers_until_it_is_sent(tmp_path: Path) -> None:
    """Ten times the buffer goes through while the server answers."""
    client = small(tmp_path)
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"f", 0o644, 0, 0, os.O_RDWR))
    data = client.rng.randbytes(80 * MIB)
    parked = 0
    for at in range(0, len(data), MIB):
        piece = data[at : at + MIB]
        try:
            client.volume.write(fh, at, piece)
        except Park as park:
            parked += 1
            client.until(park.want)
            assert client.call(lambda v, p=piece, o=at: v.write(fh, o, p)) == MIB  # type: ignore[misc]
        assert client.volume.core.log.used <= 9 * MIB
    assert parked > 3
    client.call(lambda v: v.fsync(fh, False))
    assert server_tree(client.bench)["/f"][1] == data
    client.volume.close()
    client.bench.close()


def test_a_full_buffer_without_a_server_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    client = small(tmp_path)
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"f", 0o644, 0, 0, os.O_RDWR))
    client.net.cut = 1 << 30
    data = client.rng.randbytes(40 * MIB)
    taken = 0
    want = None
    while want is None:
        try:
            taken += client.volume.write(fh, taken, data[taken : taken + MIB])
        except Park as park:
            want = park.want
    assert taken >= 5 * MIB
    client.clock.seconds += 1
    client.volume.tick(client.clock.seconds)
    assert not want.finished, "nothing was freed: to try again would be to wait for ever"
    client.clock.seconds += 10
    client.volume.tick(client.clock.seconds)
    with pytest.raises(NoSpace, match="the log under"):
        client.volume.done(want)
    assert client.volume.pending().bytes == taken
    client.net.cut = 0
    client.until(client.volume.barrier())
    assert server_tree(client.bench)["/f"][1] == data[:taken]
    assert client.volume.pending().clean
    client.volume.close()
    client.bench.close()


def test_however_small_only_so_many_changes_wait_to_be_sent(tmp_path: Path) -> None:
    """Each file costs memory, not only bytes of the log: without a server a mount's memory grew without end,
    and so did that of the recovery after it was killed for that."""
    client = small(tmp_path)
    root = client.volume.root_ino
    for name in (b"old", b"older"):
        client.put(root, name, b"x", sync=True)
    client.until(client.volume.barrier())
    client.volume.unsent_max = 40
    client.net.cut = 1 << 30
    made: list[bytes] = []
    want = None
    while want is None:
        assert len(made) < 100
        try:
            _, fh = client.volume.create(root, b"f%d" % len(made), 0o644, 0, 0, os.O_RDWR)
            made.append(b"<%d>" % len(made))
            client.volume.write(fh, 0, made[-1])
            client.volume.release(fh)
        except Park as park:
            want = park.want
    assert 18 <= len(made) <= 21
    before = client.volume.unsent
    for gone in (b"old", b"older"):  # what the server has to hear of is one more
        with pytest.raises(Park):
            client.volume.unlink(root, gone)
    client.volume.unlink(root, b"f0")  # what it never heard of is less
    assert client.volume.unsent < before
    client.clock.seconds += 11
    client.volume.tick(client.clock.seconds)
    with pytest.raises(NoSpace, match="as many as a mount keeps"):
        client.volume.done(want)
    client.net.cut = 0
    for number in range(60):
        client.put(root, b"more%d" % number, b"[%d]" % number)
        assert client.volume.unsent <= 42
    client.call(lambda v: v.unlink(root, b"old"))
    client.until(client.volume.barrier())
    tree = server_tree(client.bench)
    files = {f"/f{number}": data for number, data in enumerate(made) if number}
    files |= {f"/more{number}": b"[%d]" % number for number in range(60)}
    found = {path: entry[1] for path, entry in tree.items() if path != "/" and entry[1] is not None}
    last = f"/f{len(made) - 1}"  # perhaps its write waited in vain
    assert {**found, last: b""} == {**files, last: b"", "/older": b"x"}
    client.volume.close()
    client.bench.close()


def test_files_that_are_emptied_are_counted_too(tmp_path: Path) -> None:
    """They need no room in the log, so nothing bounded how many of them a mount kept unsent."""
    client = small(tmp_path)
    root = client.volume.root_ino
    inos = [client.put(root, b"f%d" % number, b"x") for number in range(60)]
    client.until(client.volume.barrier())
    client.volume.unsent_max = 40
    client.net.cut = 1 << 30
    emptied = 0
    want = None
    while want is None:
        assert emptied < len(inos), "nothing stopped it"
        try:
            if emptied % 2:
                client.volume.setattr(inos[emptied], size=0)
            else:
                client.volume.release(client.volume.open(inos[emptied], os.O_WRONLY | os.O_TRUNC))
            emptied += 1
        except Park as park:
            want = park.want
    assert 38 <= emptied <= 40
    client.volume.setattr(inos[0], size=1)  # one that counts already is none more
    client.net.cut = 0
    for ino in inos[emptied:]:
        client.call(lambda v, ino=ino: v.setattr(ino, size=0))  # type: ignore[misc]
        assert client.volume.unsent <= 41
    client.until(client.volume.barrier())
    contents = {path: entry[1] for path, entry in server_tree(client.bench).items()}
    assert contents == {f"/f{number}": b"" if number else b"\0" for number in range(60)}
    client.volume.close()
    client.bench.close()
