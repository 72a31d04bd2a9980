"""The answer to a commit that made a conflict copy is lost; the copy is found before it comes again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree

from fsd.model.errors import NoSpace, Unavailable
from fsd.vfs.commit import CommitJob
from fsd.vfs.log import APART
from fsd.vfs.node import Inode
from fsd.vfs.types import Job

COPY = b"copy"  # what the rival calls it, which is how this mount hears of it
FIRST, SECOND, THIRD = b"<the first>", b"<the second>", b"<the third>"


@dataclass
class Met:
    """Two mounts; the second's change of `f` went into a copy, and it does not know: the answer is lost.
    `fh` is its handle of `f`, `copy` what it found under the copy's name, `job` the commit to be answered."""

    client: Client
    rival: Client
    fh: int
    copy: Inode
    job: Job

    def write(self, fh: int, data: bytes) -> None:
        size = self.client.volume.handle(fh).node.size
        self.client.call(lambda v: v.write(fh, size, data))

    def open_copy(self) -> int:
        return self.client.call(lambda v: v.open(self.copy.ino, os.O_RDWR))

    def answer(self) -> None:
        """The commit is sent again and answered."""
        self.client.volume.finish(self.job, self.client.run(self.job))

    def settle(self) -> dict[str, bytes]:
        """Everything is sent and both mounts agree with the server; its files."""
        for client in (self.client, self.rival) * 2:
            client.until(client.volume.barrier())
            client.feed()
        tree = server_tree(self.client.bench)
        for client in (self.client, self.rival):
            assert_same(tree, client.view())
        return {path: what[1] for path, what in tree.items() if what[0] == "file"}


def opened(directory: Path, bench: Bench, clock: Clock, name: str) -> Client:
    made = Client(directory / name, bench, clock, random.Random(1), name)
    made.net.faulty = False
    made.open()
    return made


def next_commit(client: Client) -> Job:
    """The next commit, not run yet; what has to be done before it is."""
    for _ in range(10):
        client.waiting.extend(client.volume.jobs())
        for job in list(client.waiting):
            client.waiting.remove(job)
            if isinstance(job, CommitJob):
                return job
            client.volume.finish(job, client.run(job))
    raise AssertionError("nothing is to be sent")


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    bench, clock = Bench(tmp_path / "server"), Clock()
    client, rival = (opened(tmp_path, bench, clock, name) for name in ("mine", "rival"))
    root = client.volume.root_ino
    rival.put(root, b"f", b"base", sync=True)
    client.feed()
    node = client.call(lambda v: v.lookup(root, b"f"))
    assert node is not None
    fh = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    rival.put(root, b"f", b" and what the rival made of it", sync=True)
    client.call(lambda v: v.write(fh, 0, b"MINE"))
    client.volume.barrier()
    job = next_commit(client)
    assert not isinstance(client.run(job), Exception)
    client.volume.finish(job, Unavailable("the reply is lost by the test"))
    rival.feed()
    (name,) = [name for name, _ in rival.listing(root) if b".conflict-" in name]
    rival.call(lambda v: v.rename(root, name, root, COPY, 0))
    rival.until(rival.volume.barrier())
    client.feed()
    copy = client.call(lambda v: v.lookup(root, COPY))
    assert copy is not None
    assert copy.ino != node.ino
    client.clock.seconds += 1.0
    client.volume.tick(client.clock.seconds)
    yield Met(client, rival, fh, copy, next_commit(client))
    for one in (client, rival):
        one.volume.close()
    bench.close()


def test_one_that_loses_again_is_not_shown_under_the_first_copys_name(met: Met) -> None:
    """Both numbers are one inode's by then; the wire's number of the first copy must find another."""
    met.write(met.fh, FIRST)
    met.answer()
    met.rival.put(met.rival.volume.root_ino, COPY, b" and the rival's", sync=True)
    files = met.settle()
    assert files.pop("/f") == b"base and what the rival made of it"
    assert files.pop("/copy") == b"MINE and the rival's"
    assert list(files.values()) == [b"MINE" + FIRST]


def test_both_were_changed_and_both_are_kept(met: Met) -> None:
    """In the same place, too: programs took them for different files."""
    other = met.open_copy()
    met.write(met.fh, FIRST)
    met.write(other, SECOND)
    met.answer()
    met.write(met.fh, THIRD)
    met.write(other, THIRD)
    files = met.settle()
    assert files["/f"] == b"base and what the rival made of it"
    assert sorted(data for path, data in files.items() if path != "/f") == [
        b"MINE" + FIRST + THIRD,
        b"MINE" + SECOND + THIRD,
    ]
    assert files["/" + COPY.decode()] == b"MINE" + FIRST + THIRD


def test_an_fsync_of_the_one_set_apart_waits_for_its_new_place(met: Met) -> None:
    other = met.open_copy()
    met.write(met.fh, FIRST)
    met.write(other, SECOND)
    wants = [met.client.volume.sync_want(met.client.volume.handle(fh)) for fh in (met.fh, other)]
    met.answer()
    assert not wants[1].finished
    met.client.until(wants[1])
    tree = server_tree(met.client.bench)
    assert b"MINE" + SECOND in [what[1] for what in tree.values()]
    met.settle()


@pytest.mark.parametrize("which", ["handle", "copy"])
def test_only_one_was_changed_and_they_become_one(met: Met, which: str) -> None:
    other = met.open_copy()
    met.write(met.fh if which == "handle" else other, FIRST)
    met.answer()
    # From here on a write through either is seen through the other.
    met.write(other, SECOND)
    met.write(met.fh, THIRD)
    want = b"MINE" + FIRST + SECOND + THIRD
    for fh in (met.fh, other):
        assert met.client.call(lambda v, h=fh: v.read(h, 0, 100)) == want  # type: ignore[misc]
    number = met.client.volume.node(met.copy.ino).ino
    assert number == met.client.volume.handle(met.fh).node.ino
    files = met.settle()
    assert files == {"/f": b"base and what the rival made of it", "/" + COPY.decode(): want}


def test_the_kernel_forgets_what_is_one(met: Met) -> None:
    """Its counts are of two numbers: nothing is left when both are given back, neither is unknown before."""
    client, root = met.client, met.client.volume.root_ino
    number = client.volume.handle(met.fh).node.ino
    client.volume.ref(number)
    met.answer()
    met.settle()
    client.call(lambda v: v.release(met.fh))
    assert client.volume.node(number) is client.volume.node(met.copy.ino)
    client.call(lambda v: v.unlink(root, COPY))
    client.until(client.volume.barrier())
    client.volume.forget(number, 100)
    client.volume.forget(met.copy.ino, 100)
    client.volume.tick(client.clock.seconds)
    assert not {number, met.copy.ino} & set(client.volume.core.nodes.by_ino)
    assert not client.volume.core.nodes.also
    met.settle()


def test_a_rename_of_the_copy_before_is_one_of_the_file(met: Met) -> None:
    other = met.open_copy()
    root = met.client.volume.root_ino
    met.write(met.fh, FIRST)
    met.write(other, SECOND)
    met.client.call(lambda v: v.rename(root, COPY, root, b"renamed", 0))
    met.answer()
    files = met.settle()
    assert files.pop("/renamed") == b"MINE" + FIRST
    assert files.pop("/f") == b"base and what the rival made of it"
    assert list(files.values()) == [b"MINE" + SECOND]


@pytest.mark.parametrize("moment", ["before the answer", "no room to log it", "after", "under way"])
def test_killed_around_it(met: Met, moment: str) -> None:
    other = met.open_copy()
    met.write(met.fh, FIRST)
    met.write(other, SECOND)
    if moment == "no room to log it":
        no_room_to_set_apart(met.client, 1 << 30)
    if moment != "before the answer":
        met.answer()
    if moment == "no room to log it":
        assert met.client.volume.core.met
        met.client.clock.seconds += 5
        met.client.volume.tick(met.client.clock.seconds)
        met.client.volume.barrier()
        assert not any(isinstance(job, CommitJob) for job in met.client.volume.jobs()), "sent all the same"
    if moment == "under way":
        met.client.volume.barrier()
        met.client.run_some(3)
    met.client.waiting.clear()
    met.client.kill()
    met.client.open()
    files = met.settle()
    assert files.pop("/f") == b"base and what the rival made of it"
    kept = sorted(files.values())
    if moment == "before the answer":
        # What was flushed before the kill is told apart from what was not: it may be a copy of its own.
        kept = [data for data in kept if data != b"MINE"]
    assert kept == [b"MINE" + FIRST, b"MINE" + SECOND]


def no_room_to_set_apart(client: Client, times: int) -> list[int]:
    """The next `times` records of this kind find no room; a list with an entry for each such."""
    log = client.volume.core.log
    write = log._write
    tries: list[int] = []

    def full(kind: int, *args: Any, **more: Any) -> int:
        if kind == APART and len(tries) < times:
            tries.append(kind)
            raise NoSpace("the test's disk is full")
        return write(kind, *args, **more)

    log._write = full  # type: ignore[method-assign]
    return tries


def test_room_for_it_comes_later(met: Met) -> None:
    other = met.open_copy()
    met.write(met.fh, FIRST)
    met.write(other, SECOND)
    tries = no_room_to_set_apart(met.client, 3)
    met.answer()
    files = met.settle()
    assert len(tries) == 3
    assert files.pop("/f") == b"base and what the rival made of it"
    assert sorted(files.values()) == [b"MINE" + FIRST, b"MINE" + SECOND]
