"""What a copy took over stays readable until it is committed, whatever becomes of its source; what a file
without a name holds survives the log's segments being freed, and a kill behind its naming."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.client import Client, Clock
from support.inproc import NoCache
from support.sweeping import SweepBench, noise

from fsd.model.attrs import ROOT_INO
from fsd.model.limits import GIB, GRACE_LEAST, MIB
from fsd.vfs.compact import compact
from fsd.vfs.keep import EVERY, Keeper
from fsd.vfs.ranges import KEEP_SIZE, PUNCH_HOLE

SIZE = 3 * MIB + 1000


class Rig:
    """A client of a server that sweeps, with a committed source."""

    def __init__(self, tmp_path: Path, *, cached: bool = False, segment: int = 64 * MIB) -> None:
        self.bench = SweepBench(tmp_path / "server")
        self.client = Client(tmp_path / "mount", self.bench, Clock(), random.Random(1))
        self.client.options = replace(self.client.options, segment_size=segment)
        self.client.net.faulty = False
        self.client.cache = NoCache(keep=cached)
        self.client.open()
        self.root = self.client.volume.root_ino
        self.source = self.client.put(self.root, b"source", noise(1, SIZE), sync=True)

    def copy(self, fh: int) -> None:
        source = self.client.call(lambda v: v.open(self.source, os.O_RDONLY))
        assert self.client.call(lambda v: v.copy_range(source, 0, fh, 0, SIZE, 0)) == SIZE
        self.client.call(lambda v: v.release(source))

    def new(self, name: bytes) -> int:
        return self.client.call(lambda v: v.create(self.root, name, 0o644, 0, 0, os.O_RDWR))[1]

    def read(self, fh: int, size: int = SIZE) -> bytes:
        pieces = range(0, size, MIB)
        return b"".join(bytes(self.client.call(lambda v, a=at: v.read(fh, a, MIB))) for at in pieces)  # type: ignore[misc]

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / EVERY) + 1):
            self.client.clock.seconds += EVERY
            self.bench.time.ahead += EVERY
            self.client.volume.tick(self.client.clock.seconds)
            self.client.run_some(50)
            self.bench.sweep(GRACE_LEAST)

    def close(self) -> None:
        self.client.volume.close()
        self.bench.audit()
        self.bench.close()


def copied_and_both_removed(tmp_path: Path) -> tuple[Rig, int]:
    """An open copy without a name: it is never committed."""
    rig = Rig(tmp_path)
    fh = rig.new(b"copy")
    rig.copy(fh)
    rig.client.call(lambda v: v.unlink(rig.root, b"copy"))
    rig.client.call(lambda v: v.unlink(rig.root, b"source"))
    rig.client.until(rig.client.volume.barrier())
    return rig, fh


def test_what_a_copy_names_is_kept_as_long_as_it_is_needed(tmp_path: Path) -> None:
    rig, fh = copied_and_both_removed(tmp_path)
    rig.pass_time(4 * GRACE_LEAST)
    assert rig.read(fh) == noise(1, SIZE)
    rig.client.call(lambda v: v.release(fh))
    rig.pass_time(2 * GRACE_LEAST)
    assert rig.bench.rows("blob") == 0
    assert rig.client.volume.keeper.at is None
    rig.close()


def test_without_being_asked_the_server_would_let_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeper, "wake", lambda self, now: None)
    rig, _ = copied_and_both_removed(tmp_path)
    rig.pass_time(2 * GRACE_LEAST)
    assert rig.bench.rows("blob") == 0
    rig.close()


@pytest.mark.parametrize("cached", [True, False])
def test_a_source_that_went_while_the_server_was_away(tmp_path: Path, cached: bool) -> None:
    """For longer than its grace. From the cache the copy is made all the same; else it is put aside, and what
    comes after it is not kept waiting."""
    rig = Rig(tmp_path, cached=cached)
    client, data = rig.client, noise(1, SIZE)
    if cached:
        for at in range(0, SIZE, MIB):
            block = data[at : at + MIB]
            client.cache.put(hashlib.sha256(block).digest(), block)
    client.call(lambda v: v.opendir(rig.root))
    client.net.cut = 10**9
    fh = rig.new(b"copy")
    rig.copy(fh)
    other = rig.bench.mount("other")
    source = rig.bench.find("source")
    other.unlink(ROOT_INO, b"source", source.ino, source.cseq)
    other.commit()
    rig.pass_time(3 * GRACE_LEAST)
    assert rig.bench.rows("blob") == 0
    client.net.cut = 0
    client.put(rig.root, b"later", b"x" * 100)
    client.until(client.volume.barrier())
    assert rig.bench.read(rig.bench.find("later")) == b"x" * 100
    if cached:
        assert rig.bench.read(rig.bench.find("copy")) == data
    else:
        assert client.volume.pending().operations == client.volume.core.refused == 1
        assert rig.bench.find("copy").size == 0
    rig.close()


def test_a_call_says_no_more_than_its_answer_can(tmp_path: Path) -> None:
    """It has 32 bits, and older kernels ask for whatever the program did: of 40 GiB of hole the answer would
    be 0, which is the end of the file."""
    rig = Rig(tmp_path)
    source, target = rig.new(b"huge"), rig.new(b"target")
    ino = rig.client.volume.handle(source).node.ino
    rig.client.call(lambda v: v.setattr(ino, size=40 * GIB))
    done = rig.client.call(lambda v: v.copy_range(source, 0, target, 0, 40 * GIB, 0))
    assert 0 < done < 1 << 32
    assert rig.client.volume.handle(target).node.size == done
    rig.close()


@pytest.mark.parametrize("mtime", [3, -5, -(2**63)])
def test_a_file_without_a_name_outlives_its_segments(tmp_path: Path, mtime: int) -> None:
    """Its oldest part is written again when the rest of a segment is not needed any more; then it gets a name
    and the daemon is killed. Whatever time it was given."""
    rig = Rig(tmp_path, segment=256 << 10)
    client = rig.client
    node, fh = client.call(lambda v: v.create_unnamed(rig.root, 0o640, 5, 6, os.O_RDWR))
    want = bytearray(noise(2, 90_000))
    client.call(lambda v: v.write(fh, 0, bytes(want)))
    source = client.call(lambda v: v.open(rig.source, os.O_RDONLY))
    assert client.call(lambda v: v.copy_range(source, 777, fh, 90_000, 2 * MIB, 0)) == 2 * MIB
    want += noise(1, SIZE)[777 : 777 + 2 * MIB]
    client.call(lambda v: v.allocate(fh, PUNCH_HOLE | KEEP_SIZE, 50_000, 100_000))
    want[50_000:150_000] = bytes(100_000)
    client.call(lambda v: v.setattr(node.ino, size=5 * MIB))
    want += bytes(5 * MIB - len(want))
    volume = client.volume
    client.call(lambda v: v.setattr(node.ino, mtime=mtime))
    for number in range(12):
        client.put(rig.root, b"other%d" % number, noise(number, 100_000), sync=True)
        client.until(volume.barrier())
        if number == 5:
            client.call(lambda v: v.write(fh, 4 * MIB, b"newer"))
            want[4 * MIB : 4 * MIB + 5] = b"newer"
            client.call(lambda v: v.setattr(node.ino, mtime=mtime))
    oldest = volume.core.log.oldest
    for _ in range(20):
        compact(volume.core)
        client.run_some(20)
    assert volume.core.log.oldest > oldest, "nothing was moved"
    assert rig.read(fh, 5 * MIB) == want
    client.call(lambda v: v.link(node.ino, rig.root, b"named"))
    client.kill()
    client.open()
    client.until(client.volume.barrier())
    found = rig.bench.find("named")
    assert (found.mode, found.uid, found.gid, found.size) == (0o100640, 5, 6, 5 * MIB)
    assert found.mtime == max(mtime, 1 - 2**63)
    assert rig.bench.read(found) == want
    rig.close()


def test_a_removed_file_older_than_1970_holds_no_segment(tmp_path: Path) -> None:
    """What is written again of it is never sent: its time may stand in the log as another."""
    rig = Rig(tmp_path, segment=256 << 10)
    client, volume = rig.client, rig.client.volume
    fh = rig.new(b"file")
    ino = volume.handle(fh).node.ino
    client.call(lambda v: v.write(fh, 0, noise(2, 90_000)))
    client.call(lambda v: v.allocate(fh, PUNCH_HOLE | KEEP_SIZE, 50_000, 10_000))
    client.call(lambda v: v.unlink(rig.root, b"file"))
    client.call(lambda v: v.setattr(ino, mtime=-5))
    for number in range(12):
        client.put(rig.root, b"other%d" % number, noise(number, 100_000), sync=True)
    oldest = volume.core.log.oldest
    for _ in range(20):
        compact(volume.core)
        client.run_some(20)
    assert volume.core.log.oldest > oldest, "nothing was moved"
    found = bytearray(noise(2, 90_000))
    found[50_000:60_000] = bytes(10_000)
    assert rig.read(fh, 90_000) == found
    assert client.call(lambda v: v.getattr(ino)).mtime == -5
    rig.close()


def test_one_that_got_no_name_is_gone_with_the_daemon(tmp_path: Path) -> None:
    """Also with its segments freed, and with nothing but its first record."""
    rig = Rig(tmp_path, segment=256 << 10)
    client = rig.client
    _, fh = client.call(lambda v: v.create_unnamed(rig.root, 0o640, 0, 0, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, noise(2, 90_000)))
    for number in range(6):
        client.put(rig.root, b"other%d" % number, noise(number, 100_000), sync=True)
        compact(client.volume.core)
        client.run_some(20)
    client.kill()
    client.open()
    client.until(client.volume.barrier())
    assert sorted(rig.bench.entries()) == sorted([b"source", *(b"other%d" % n for n in range(6))])
    rig.close()
