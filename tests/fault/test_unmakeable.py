"""Content that cannot be made any more, since something it needs is gone: it is put aside as far as it is
here, what else there is goes on, and the next mount of the place works."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.client import Client, Clock
from support.inproc import NoCache
from support.sweeping import SweepBench, noise

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import FsdError, IntegrityError, PosixError, UsageError
from fsd.model.limits import GRACE_LEAST, MIB, UNMADE_MAX
from fsd.model.ops import Content
from fsd.vfs import log as log_module
from fsd.vfs import recover
from fsd.vfs.commit import CommitJob
from fsd.vfs.decide import Kept, export, kept
from fsd.vfs.drive import Driver
from fsd.vfs.keep import EVERY
from fsd.vfs.log import SHIFT
from fsd.wire.messages import Commit, CommitAnswer

PREAD = os.pread
SIZE = 2 * MIB + 1000
EDITS = 30  # more than patches fit into one block


class Rig:
    """A client of a server that sweeps, with a committed source, and no cache."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = SweepBench(directory / "server")
        self.client = Client(directory / "mount", self.bench, Clock(), random.Random(1))
        self.client.options = replace(self.client.options, segment_size=64 * MIB)
        self.client.net.faulty = False
        self.client.cache = NoCache()
        monkeypatch.setattr(recover, "Driver", partial(Driver, sleep=self.sleep))
        self.client.open()
        self.root = self.client.volume.root_ino
        self.source = self.client.put(self.root, b"source", noise(1, SIZE), sync=True)
        self.client.kill()  # the log had its bytes
        self.client.open()
        assert self.client.call(lambda v: v.lookup(self.root, b"source"))
        self.ino = 0
        self.fh = 0

    def sleep(self, seconds: float) -> None:
        self.client.clock.seconds += seconds

    def new(self, name: bytes) -> int:
        node, fh = self.client.call(lambda v: v.create(self.root, name, 0o640, 0, 0, os.O_RDWR))
        self.ino = node.ino
        return fh

    def write(self, fh: int, offset: int, data: bytes) -> None:
        self.client.call(lambda v: v.write(fh, offset, data))

    def copied(self) -> tuple[bytes, int]:
        """`copy`, not committed, with many changes in its second block, and its source gone for good. What
        can be had of it, and how much of it cannot."""
        client = self.client
        client.call(lambda v: v.opendir(self.root))
        self.fh = self.new(b"copy")
        source = client.call(lambda v: v.open(self.source, os.O_RDONLY))
        assert client.call(lambda v: v.copy_range(source, 0, self.fh, 0, SIZE, 0)) == SIZE
        client.call(lambda v: v.release(source))
        client.net.cut = 10**9
        left = bytearray(SIZE)
        for at in range(EDITS):
            place = MIB + 20_000 * at
            self.write(self.fh, place, noise(at, 100))
            left[place : place + 100] = noise(at, 100)
        self.remove_source()
        return bytes(left), SIZE - 100 * EDITS

    def remove_source(self) -> None:
        other = self.bench.mount("other")
        source = self.bench.find("source")
        other.unlink(ROOT_INO, b"source", source.ino, source.cseq)
        other.commit()
        for _ in range(int(3 * GRACE_LEAST / EVERY)):
            self.client.clock.seconds += EVERY
            self.bench.time.ahead += EVERY
            self.client.volume.tick(self.client.clock.seconds)
            self.client.run_some(50)
            self.bench.sweep(GRACE_LEAST)
        assert self.bench.rows("blob") == 0

    def back(self) -> None:
        """The server answers again."""
        self.client.net.cut = 0

    def drained(self) -> None:
        self.client.until(self.client.volume.barrier())

    def refused(self) -> list[Kept]:
        return kept(self.client.options.state_dir)

    def close(self) -> None:
        self.client.volume.close()
        self.bench.audit()
        self.bench.close()


@pytest.fixture(name="rig")
def rig_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def put_aside(rig: Rig, left: bytes, lacking: int) -> Kept:
    """The one refusal there is holds what is left."""
    (one,) = rig.refused()
    assert (one.errno, one.path, one.mode) == (errno.EIO, b"/copy", 0o100640)
    assert one.data is not None and one.data.read_bytes() == left
    assert one.to_json()["lacking_bytes"] == lacking
    return one


def test_a_copy_that_lost_its_source_is_put_aside_and_the_rest_goes_on(rig: Rig, tmp_path: Path) -> None:
    left, lacking = rig.copied()
    rig.back()
    client, began = rig.client, rig.client.clock.seconds
    client.put(rig.root, b"later", b"x" * 100, sync=True)
    assert client.clock.seconds - began < UNMADE_MAX / 2, "another file waited for it"
    rig.drained()
    assert client.clock.seconds - began >= UNMADE_MAX, "it was given up at once"
    one = put_aside(rig, left, lacking)
    assert rig.bench.read(rig.bench.find("later")) == b"x" * 100
    assert rig.bench.find("copy").size == 0
    assert client.volume.pending().operations == client.volume.core.refused == 1
    assert "the server lacks" in one.reason
    with pytest.raises(PosixError) as told:
        client.call(lambda v: v.fsync(rig.fh, False))
    assert told.value.errno == errno.EIO
    client.call(lambda v: v.fsync(rig.fh, False))  # told once
    out = export(rig.refused(), tmp_path / "out")
    assert out.files == out.incomplete == [str(tmp_path / "out" / "copy")]
    assert (tmp_path / "out" / "copy").read_bytes() == left
    rig.close()


def test_who_waits_for_it_is_told_and_others_are_not(rig: Rig) -> None:
    rig.copied()
    rig.back()
    other = rig.new(b"other")
    rig.write(other, 0, b"y" * 10)
    with pytest.raises(PosixError) as told:
        rig.client.call(lambda v: v.fsync(rig.fh, False))
    assert told.value.errno == errno.EIO
    rig.client.call(lambda v: v.fsync(other, False))
    assert rig.bench.read(rig.bench.find("other")) == b"y" * 10
    rig.close()


@pytest.mark.parametrize("named", [False, True], ids=["unnumbered", "reserved"])
def test_the_next_mount_works(rig: Rig, named: bool) -> None:
    """Killed before the server came back; with a rename the number of its content was reserved."""
    left, lacking = rig.copied()
    client = rig.client
    if named:
        client.call(lambda v: v.rename(rig.root, b"copy", rig.root, b"away", 0))
        client.call(lambda v: v.rename(rig.root, b"away", rig.root, b"copy", 0))
    client.put(rig.root, b"later", b"x" * 100)
    client.kill()
    rig.back()
    client.open()
    put_aside(rig, left, lacking)
    assert rig.bench.read(rig.bench.find("later")) == b"x" * 100
    assert rig.bench.find("copy").size == 0
    report = client.volume.recovered
    assert isinstance(report, recover.Report)
    (note,) = report.notes()
    assert note.startswith("1 change of an earlier run could not be sent and is kept: `fsd recover`")
    rig.close()


class Died(BaseException):
    """The process ends at a crash point."""


def moments() -> list[str]:
    names = [f"refused.{step}" for step in ("written", "synced", "renamed", "durable")]
    return ["numbered", *names, "answered"]


@pytest.mark.parametrize("moment", moments())
@pytest.mark.parametrize("recovering", [False, True], ids=["mounted", "recovering"])
def test_killed_at_each_step_of_it(rig: Rig, moment: str, recovering: bool) -> None:
    """There is one refusal in the end, whole, and nothing else is lost."""
    left, lacking = rig.copied()
    client = rig.client
    client.put(rig.root, b"later", b"x" * 100)
    reached: list[str] = []

    def crash(name: str) -> None:
        if name == moment:
            reached.append(name)
            raise Died(name)

    client.clock.crash_at = crash
    original = log_module.Log.append

    def append(self: log_module.Log, kind: int, *rest: object, **more: object) -> int:
        pos = original(self, kind, *rest, **more)  # type: ignore[arg-type]
        if {"numbered": log_module.RESERVED, "answered": log_module.ACK}.get(moment) == kind and (
            kind == log_module.RESERVED or rig.refused()
        ):
            reached.append(moment)
            raise Died(moment)
        return pos

    if recovering:
        client.kill()
    rig.back()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module.Log, "append", append)
        with pytest.raises(Died):
            (client.open if recovering else rig.drained)()
    assert reached == [moment]
    client.clock.crash_at = lambda name: None
    if not recovering:
        client.waiting.clear()
        client.kill()
    client.open()
    put_aside(rig, left, lacking)
    rig.drained()
    assert rig.bench.read(rig.bench.find("later")) == b"x" * 100
    rig.close()


def test_what_is_written_meanwhile_takes_it_along(rig: Rig) -> None:
    """Later changes of the file are put aside with it, since without it they are torn; a file that is written
    anew is sent."""
    left, _ = rig.copied()
    client = rig.client
    client.volume.flusher.freeze(client.volume.core.nodes.get(rig.ino))
    rig.write(rig.fh, 5, b"more")
    rig.write(rig.fh, SIZE, b"end")
    rig.back()
    for _ in range(1000):
        if rig.refused():
            break
        client.clock.seconds += 0.1
        client.volume.committer.urgent = (
            client.volume.core.next_op - 1
        )  # no flush by age: that would freeze more
        client.volume.flusher.wake(client.clock.seconds)
        client.volume.committer.kick()
        client.run_some(20)
    rig.drained()
    first, last = rig.refused()
    assert first.data is not None and last.data is not None
    assert first.data.read_bytes() == left
    want = left[:5] + b"more" + left[9:] + b"end"
    assert last.data.read_bytes() == want
    assert last.lacking == first.lacking - 4
    client.call(lambda v: v.setattr(rig.ino, size=0))
    rig.write(rig.fh, 0, b"new")
    rig.drained()
    assert len(rig.refused()) == 2
    assert rig.bench.read(rig.bench.find("copy")) == b"new"
    rig.close()


@pytest.mark.parametrize("anew", [False, True])
def test_changes_that_were_frozen_behind_it(rig: Rig, anew: bool) -> None:
    """They wait for it to be made: with a truncation they can be sent, else they are put aside too."""
    left, _ = rig.copied()
    client = rig.client
    node = client.volume.core.nodes.get(rig.ino)
    client.volume.flusher.freeze(node)
    if anew:
        client.call(lambda v: v.setattr(rig.ino, size=0))
    rig.write(rig.fh, 7, b"behind")
    client.volume.flusher.freeze(node)
    rig.back()
    rig.drained()
    assert len(rig.refused()) == (1 if anew else 2)
    if anew:
        assert rig.bench.read(rig.bench.find("copy")) == bytes(7) + b"behind"
    else:
        data = rig.refused()[-1].data
        assert data is not None and data.read_bytes() == left[:7] + b"behind" + left[13:]
    rig.close()


# What else can be gone.


def lose_blobs(rig: Rig) -> None:
    """The server has lost every blob, and knows."""
    rig.bench.service.db.write(lambda tx: drop(tx, rig.bench.fs.id))


def drop(tx: Tx, fs: int) -> None:
    tx.execute("DELETE FROM blob WHERE fs=?", (fs,))


def lose_packs(rig: Rig) -> None:
    """The files are gone, and the server finds out when it reads them."""
    for found in list(rig.bench.service.store.list("packs/")):
        rig.bench.service.store.delete(found.key)


def rewritten(rig: Rig) -> None:
    """More than a quarter of a block that the server has: it would be made whole."""
    rig.fh = rig.client.call(lambda v: v.open(rig.source, os.O_RDWR))
    rig.write(rig.fh, 100, noise(7, 400_000))


def read(rig: Rig, offset: int, size: int) -> bytes:
    return bytes(rig.client.call(lambda v: v.read(rig.fh, offset, size)))


def test_a_block_of_which_the_server_lost_the_rest_keeps_what_is_written(rig: Rig) -> None:
    """As on a disk with a bad sector: what was written is there, the rest cannot be read."""
    rewritten(rig)
    lose_packs(rig)
    rig.drained()
    assert rig.refused() == []
    rig.client.kill()
    rig.client.open()
    assert rig.client.call(lambda v: v.lookup(rig.root, b"source"))
    rig.fh = rig.client.call(lambda v: v.open(rig.source, os.O_RDONLY))
    assert read(rig, 100, 400_000) == noise(7, 400_000)
    with pytest.raises(FsdError) as told:
        read(rig, 500_000, 100)
    assert told.value.errno == errno.EIO
    rig.client.volume.close()
    rig.bench.service.close()


def test_a_block_whose_rest_the_server_does_not_know_is_put_aside(rig: Rig) -> None:
    rewritten(rig)
    lose_blobs(rig)
    rig.drained()
    (one,) = rig.refused()
    assert one.data is not None
    assert one.data.read_bytes() == bytes(100) + noise(7, 400_000) + bytes(SIZE - 400_100)
    assert one.lacking == SIZE - 400_000
    rig.client.volume.close()
    rig.bench.service.close()


@pytest.fixture(name="bad")
def bad_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`bad(pos, length)`: the disk cannot read these bytes of a log any more."""
    broken: list[tuple[int, int]] = []
    pread = os.pread

    def failing(fd: int, size: int, at: int) -> bytes:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.startswith("log."):
            base = int(name[4:20], 16) << SHIFT
            for low, high in broken:
                if base + at < high and base + at + size > low:
                    raise OSError(errno.EIO, "the disk cannot read this")
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", failing)
    return lambda pos, length: broken.append((pos, pos + length))


def one_page_of(rig: Rig, bad: Callable[[int, int], None], data: bytes) -> bytes:
    """The disk cannot read one page of the log in the middle of what was written; what is left."""
    (run,) = rig.client.volume.core.nodes.get(rig.ino).file().extents
    page = (run.pos + 50_000) & ~4095
    bad(page, 4096)
    lost = page - run.pos
    return data[:lost] + bytes(4096) + data[lost + 4096 :]


def test_what_the_log_cannot_give_back_is_put_aside(rig: Rig, bad: Callable[[int, int], None]) -> None:
    client = rig.client
    data = noise(3, 200_000)
    rig.fh = rig.new(b"copy")
    rig.write(rig.fh, 0, data)
    left = one_page_of(rig, bad, data)
    client.put(rig.root, b"later", b"x" * 100)
    with pytest.raises(PosixError) as told:
        client.call(lambda v: v.fsync(rig.fh, False))
    assert told.value.errno == errno.EIO
    rig.drained()
    assert rig.bench.read(rig.bench.find("later")) == b"x" * 100
    assert rig.bench.find("copy").size == 0
    put_aside(rig, left, 4096)
    rig.close()


def test_what_the_server_will_not_take_is_put_aside_but_for_what_the_log_cannot_give_back(
    rig: Rig, bad: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made when the disk could still read it: its one blob comes of one piece of the log."""
    client, left = rig.client, b""
    data = noise(3, 200_000)
    commit = client.remote.commit

    def picky(sent: Commit, timeout: float) -> CommitAnswer:
        nonlocal left
        if any(isinstance(op, Content) for op in sent.ops):
            left = left or one_page_of(rig, bad, data)
            raise UsageError("the test's server does not like it")
        return commit(sent, timeout)

    monkeypatch.setattr(client.remote, "commit", picky)
    rig.fh = rig.new(b"copy")
    rig.write(rig.fh, 0, data)
    rig.drained()
    (one,) = rig.refused()
    assert one.data is not None and one.data.read_bytes() == left != data
    assert one.lacking == len(data), "none of it could be checked"
    rig.close()


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_frozen_behind_it_and_covers_what_is_gone_is_sent(
    rig: Rig, bad: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Killed behind the record that says the first is put aside: the rest of it still is what the second
    is made of."""
    client, data = rig.client, noise(3, 200_000)
    rig.fh = rig.new(b"copy")
    rig.write(rig.fh, 0, data)
    left = one_page_of(rig, bad, data)
    node = client.volume.core.nodes.get(rig.ino)
    client.volume.flusher.freeze(node)
    lost = next(at for at in range(0, len(data), 16) if data[at : at + 16] != left[at : at + 16]) - 16
    rig.write(rig.fh, lost, noise(4, 5000))
    client.volume.flusher.freeze(node)
    original = log_module.Log.append

    def append(self: log_module.Log, kind: int, *rest: object, **more: object) -> int:
        pos = original(self, kind, *rest, **more)  # type: ignore[arg-type]
        if killed and kind == log_module.ACK and rig.refused():
            raise Died("answered")
        return pos

    with monkeypatch.context() as patch:
        patch.setattr(log_module.Log, "append", append)
        with pytest.raises(Died) if killed else nullcontext():
            rig.drained()
    if killed:
        client.waiting.clear()
        client.kill()
        monkeypatch.setattr(os, "pread", PREAD)  # the log must be found whole up to its end
        client.open()
    rig.drained()
    assert rig.bench.read(rig.bench.find("copy")) == data[:lost] + noise(4, 5000) + data[lost + 5000 :]
    put_aside(rig, left, 4096)
    rig.close()


def test_nothing_is_made_twice_where_the_commit_was_on_its_way(rig: Rig) -> None:
    """A commit before it is not answered yet: its turn comes after that."""
    left, lacking = rig.copied()
    rig.back()
    client = rig.client
    client.put(rig.root, b"first", b"1")
    want = client.volume.barrier()
    held = None
    for _ in range(2000):
        client.waiting.extend(client.volume.jobs())
        commit = next((job for job in client.waiting if isinstance(job, CommitJob)), None)
        if commit is not None and held is None:
            client.waiting.remove(commit)
            held = commit
        if client.waiting:
            job = client.waiting.pop()
            client.volume.finish(job, client.run(job))
        else:
            client.clock.seconds += 0.5
            client.volume.tick(client.clock.seconds)
    assert held is not None and rig.refused() == []
    client.volume.finish(held, client.run(held))
    client.until(want)
    put_aside(rig, left, lacking)
    assert rig.bench.read(rig.bench.find("first")) == b"1"
    rig.close()


def test_a_blob_that_is_lost_costs_those_asked_for_with_it_nothing(rig: Rig) -> None:
    """Files of a directory that is read through are fetched together."""
    for number in range(6):
        rig.client.put(rig.root, b"small%d" % number, noise(number, 300), sync=True)
    rig.client.kill()
    rig.client.open()
    lost = rig.bench.find("small3")
    (digest,) = {part.hash for part in lost.first_block()}
    rig.bench.service.db.write(
        lambda tx: tx.execute("DELETE FROM blob WHERE fs=? AND hash=?", (rig.bench.fs.id, digest))
    )
    read_well, failed = [], []
    for name, ino in rig.client.listing(rig.root):
        try:
            if name != b"source":
                read_well.append((name, rig.client.read_all(ino)))
        except IntegrityError:
            failed.append(name)
    assert failed == [b"small3"]
    assert sorted(read_well) == [(b"small%d" % n, noise(n, 300)) for n in (0, 1, 2, 4, 5)]
    rig.client.volume.close()
    rig.bench.service.close()


@pytest.mark.parametrize("subtree", ["/", "/above/it"])
def test_a_recovery_puts_it_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtree: str
) -> None:
    """A log knows directories by number alone; the server knows their names."""
    rig = Rig(tmp_path, monkeypatch)
    client = rig.client
    above = client.call(lambda v: v.mkdir(rig.root, b"above", 0o755, 0, 0))
    inside = client.call(lambda v: v.mkdir(above.ino, b"it", 0o755, 0, 0))
    rig.drained()
    if subtree != "/":
        client.kill()
        client.options = replace(client.options, remote_path=subtree.encode(), state_dir=tmp_path / "below")
        client.open()
        inside = client.volume.core.nodes.get(client.volume.root_ino)
        rig.source = client.put(inside.ino, b"source", noise(1, SIZE), sync=True)
    made = client.call(lambda v: v.mkdir(inside.ino, b"made", 0o755, 0, 0))
    client.put(made.ino, b"file", noise(2, 3000))
    node = client.call(lambda v: v.lookup(made.ino, b"file"))
    assert node is not None
    rig.fh = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    source = client.call(lambda v: v.open(rig.source, os.O_RDONLY))
    client.call(lambda v: v.copy_range(source, 0, rig.fh, 5000, SIZE, 0))
    client.call(lambda v: v.release(source))
    for at in range(EDITS):
        rig.write(rig.fh, 9000 + 2000 * at, noise(at, 100))
    client.kill()
    for held in client.waiting:
        assert not isinstance(held, CommitJob), "something was sent"
    lose_blobs(rig)
    client.open()
    (one,) = rig.refused()
    assert one.path == (b"/made/file" if subtree != "/" else b"/above/it/made/file")
    assert rig.bench.find("above/it/made/file").size == 0
    client.volume.close()
    rig.bench.service.close()
