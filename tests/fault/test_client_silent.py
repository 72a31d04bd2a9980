"""The change feed is silent: what is known is asked for again before use; without a server it has to do."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree
from support.inproc import NoCache

from fsd.model.errors import PosixError, Unavailable
from fsd.model.limits import BLOCK, BLOCK_LISTS_MAX
from fsd.vfs.asking import AskJob
from fsd.vfs.blocklists import BlockLists
from fsd.vfs.recent import Recent
from fsd.vfs.types import LOCAL, Invalidation, Park
from fsd.vfs.volume import Volume

Pair = tuple[Client, Client]
T = TypeVar("T")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two mounts with one clock; the first hears nothing of the second's changes."""
    bench, clock = Bench(tmp_path / "server"), Clock()
    made = tuple(Client(tmp_path / n, bench, clock, random.Random(1), n) for n in ("deaf", "other"))
    for client in made:
        client.net.faulty = False
        client.open()
    yield made[0], made[1]
    for client in made:
        client.net.cut = 0
        client.until(client.volume.barrier())
        client.volume.close()
    bench.close()


def later(client: Client, seconds: float = 2.0) -> None:
    client.clock.seconds += seconds
    client.volume.tick(client.clock.seconds)


def test_changes_are_seen_without_the_feed(pair: Pair) -> None:
    deaf, other = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.put(root, b"gone", b"soon", sync=True)
    assert deaf.view().keys() == {"/f", "/gone"}
    deaf.volume.feed_silent(True)
    other.put(root, b"f", b"other", offset=0, sync=True)
    other.put(root, b"new", b"new", sync=True)
    other.call(lambda v: v.unlink(root, b"gone"))
    other.until(other.volume.barrier())
    later(deaf)
    assert deaf.call(lambda v: v.lookup(root, b"gone")) is None
    assert deaf.call(lambda v: v.lookup(root, b"new")) is not None
    found = deaf.call(lambda v: v.lookup(root, b"f"))
    assert found is not None
    assert deaf.read_all(found.ino) == b"other"
    later(deaf)
    assert_same(server_tree(deaf.bench), deaf.view())


def test_what_was_answered_a_moment_ago_is_not_asked_again(pair: Pair) -> None:
    deaf, _ = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.volume.feed_silent(True)
    deaf.call(lambda v: v.lookup(root, b"f"))
    asked = deaf.remote.calls.count("ask")
    for _ in range(50):
        assert deaf.volume.lookup(root, b"f") is not None
    assert deaf.remote.calls.count("ask") == asked


def test_without_a_server_what_is_known_has_to_do(pair: Pair) -> None:
    """Reads from memory, writes, renames and new files go on; only what is not known waits."""
    deaf, _ = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.view()
    folder = deaf.call(lambda v: v.mkdir(root, b"folder", 0o755, 0, 0)).ino
    deaf.volume.feed_silent(True)
    deaf.net.cut = 1 << 30
    later(deaf)
    for number in range(20):
        deaf.put(root, b"new%d" % number, b"written while cut")
        deaf.put(folder, b"x%d" % number, b"in a directory the server does not have")
        later(deaf)
    deaf.call(lambda v: v.rename(root, b"new0", root, b"renamed", 0))
    assert len(deaf.listing(root)) == 22
    assert deaf.volume.pending().files > 0
    assert deaf.volume.pending().reason
    deaf.net.cut = 0
    deaf.volume.feed_silent(False)
    deaf.until(deaf.volume.barrier())
    assert server_tree(deaf.bench)["/renamed"][1] == b"written while cut"
    assert_same(server_tree(deaf.bench), deaf.view())


def test_a_directory_changed_elsewhere_is_a_way_on_without_a_server(pair: Pair) -> None:
    """Another mount made a name in it, and nobody looked since: only that name is not known."""
    here, other = pair
    root = here.volume.root_ino
    folder = here.call(lambda v: v.mkdir(root, b"folder", 0o755, 0, 0)).ino
    here.put(folder, b"f", b"one", sync=True)
    here.view()
    other.put(root, b"theirs", b"x", sync=True)
    here.feed()
    assert here.volume.node(root).stale
    here.net.cut = 1 << 30
    assert here.call(lambda v: v.getattr(root)).mode & 0o7777 == 0o755
    assert here.call(lambda v: v.lookup(root, b"folder")) is not None
    here.put(folder, b"new", b"written while cut")
    here.put(root, b"beside", b"and here")
    assert here.volume.node(root).stale, "asked for when the server is back"
    later(here)
    here.net.cut = 0
    here.volume.feed_silent(False)
    here.until(here.volume.barrier())
    found = here.call(lambda v: v.getattr(root))
    assert not here.volume.node(root).stale and found.nlink == 3
    assert here.read_all(here.number(root, b"theirs")) == b"x"
    assert server_tree(here.bench)["/folder/new"][1] == b"written while cut"
    assert_same(server_tree(here.bench), here.view())


def test_a_file_changed_elsewhere_is_not_known_without_a_server(pair: Pair) -> None:
    here, other = pair
    root = here.volume.root_ino
    ino = here.put(root, b"f", b"one", sync=True)
    here.view()
    other.put(root, b"f", b"other", offset=0, sync=True)
    here.feed()
    here.net.cut = 1 << 30
    with pytest.raises(Park) as parked:
        here.volume.getattr(ino)
    for _ in range(5):
        later(here)
        here.run_some(10)
    assert not parked.value.want.finished


def out_of_memory(client: Client) -> None:
    """No bytes of blobs are at hand any more."""
    client.volume.core.recent = Recent(client.volume.core.log)


def hung(client: Client) -> None:
    """What is asked from now on is on its way for good; what needs no server is done."""
    for job in client.volume.jobs():
        if job.lane == LOCAL:
            client.volume.finish(job, client.run(job))
        else:
            client.waiting.append(job)


def call_hung(client: Client, fn: Callable[[Volume], T], seconds: float) -> T:
    """Make a call while everything that was sent hangs, within `seconds`."""
    until = client.clock.seconds + seconds
    while True:
        try:
            return fn(client.volume)
        except Park as park:
            want = park.want
        while not client.volume.done(want):
            hung(client)
            later(client, 0.1)
            assert client.clock.seconds < until, f"still waits for {want.what}"


def read_hung(client: Client, ino: int, seconds: float) -> bytes:
    fh = call_hung(client, lambda v: v.open(ino, os.O_RDONLY), seconds)
    data = call_hung(client, lambda v: v.read(fh, 0, 1 << 30), seconds)
    client.volume.release(fh)
    return data


@pytest.mark.parametrize("size", [5000, 3 * BLOCK + 5])
def test_while_requests_hang_what_is_in_the_cache_is_read(pair: Pair, size: int) -> None:
    """No answer and no error: the network takes everything and says nothing, and uploads hang as well."""
    deaf, _ = pair
    deaf.volume.core.options = replace(deaf.options, io_timeout=60.0)
    deaf.cache = NoCache(keep=True)
    root = deaf.volume.root_ino
    names = [b"f%d" % number for number in range(4)]
    data = {name: deaf.rng.randbytes(size) for name in names}
    for name in names:
        deaf.put(root, name, data[name], sync=True)
    inos = {name: ino for name, ino in deaf.listing(root)}
    out_of_memory(deaf)
    for name in names:
        assert deaf.read_all(inos[name]) == data[name]
    out_of_memory(deaf)
    deaf.put(root, b"dirty", deaf.rng.randbytes(20_000))
    # The first asks before anybody knows that the network is gone.
    fh = deaf.call(lambda v: v.open(inos[names[0]], os.O_RDONLY))
    with pytest.raises(Park) as parked:
        deaf.volume.read(fh, 0, size)
    hung(deaf)
    deaf.volume.feed_silent(True)
    hung(deaf)
    assert deaf.volume.done(parked.value.want), "the cache was not looked at again"
    assert call_hung(deaf, lambda v: v.read(fh, 0, size), 3.0) == data[names[0]]
    deaf.volume.release(fh)
    later(deaf)
    assert read_hung(deaf, inos[names[1]], 3.0) == data[names[1]]
    # Nothing is asked any more, and nothing waits.
    assert read_hung(deaf, inos[names[2]], 0.5) == data[names[2]]
    deaf.volume.feed_silent(False)
    assert deaf.read_all(inos[names[3]]) == data[names[3]]


def test_what_the_cache_lacks_is_fetched_all_the_same(pair: Pair) -> None:
    deaf, _ = pair
    root = deaf.volume.root_ino
    ino = deaf.put(root, b"f", b"x" * 5000, sync=True)
    deaf.volume.feed_silent(True)
    out_of_memory(deaf)
    assert deaf.read_all(ino) == b"x" * 5000


def test_block_lists_of_closed_files_are_bounded() -> None:
    lists = BlockLists()
    for ino in range(100):
        lists.keep(ino, 7, {index: () for index in range(BLOCK_LISTS_MAX // 10)})
    assert lists.get(99, 7) is not None
    assert lists.get(99, 8) is None
    assert lists.get(80, 7) is None
    assert lists._blocks <= BLOCK_LISTS_MAX
    lists.keep(1, 1, {index: () for index in range(BLOCK_LISTS_MAX + 1)})
    assert lists.get(1, 1) is None
    assert lists._blocks == 0


def test_what_is_not_known_waits_and_is_told(pair: Pair) -> None:
    deaf, other = pair
    root = deaf.volume.root_ino
    other.put(root, b"far", b"away", sync=True)
    deaf.volume.core.options = replace(deaf.options, io_timeout=10.0)
    deaf.net.cut = 1 << 30
    with pytest.raises(Park) as parked:
        deaf.volume.lookup(root, b"far")
    want = parked.value.want
    for _ in range(12):
        deaf.run_some(3)
        later(deaf, 1.0)
    with pytest.raises(Unavailable) as told:
        deaf.volume.done(want)
    assert told.value.errno == errno.EIO
    deaf.net.cut = 0
    later(deaf)
    assert deaf.call(lambda v: v.lookup(root, b"far")) is not None


@pytest.mark.parametrize("size", [5000, 3 * BLOCK])  # bytes alone, and a block list before them
def test_who_waited_in_vain_for_bytes_does_not_wait_again_at_once(pair: Pair, size: int) -> None:
    """The kernel's read-ahead ends with an error, and it asks again for the page its caller wants."""
    deaf, other = pair
    root, data = deaf.volume.root_ino, random.Random(2).randbytes(size)
    other.put(root, b"far", data, sync=True)
    fh = deaf.call(lambda v: v.open(v.lookup(root, b"far").ino, os.O_RDONLY))  # type: ignore[union-attr]
    deaf.volume.core.options = replace(deaf.options, io_timeout=10.0)
    deaf.net.cut = 1 << 30

    def waited() -> float:
        began = deaf.clock.seconds
        with pytest.raises(Park) as parked:
            deaf.volume.read(fh, 0, 4096)
        while not parked.value.want.finished:
            deaf.run_some(3)
            later(deaf, 0.1)
        with pytest.raises(Unavailable):
            deaf.volume.done(parked.value.want)
        return deaf.clock.seconds - began

    assert 10 <= waited() < 11
    with pytest.raises(Unavailable):
        deaf.volume.read(fh, 0, 4096)
    later(deaf, 1.1)
    assert 10 <= waited() < 11, "a later read waits as long as any"
    deaf.net.cut = 0
    later(deaf)
    assert deaf.call(lambda v: v.read(fh, 0, 4096)) == data[:4096]


def test_an_error_of_the_file_system_is_no_time_out(pair: Pair) -> None:
    deaf, _ = pair
    with pytest.raises(PosixError) as told:
        deaf.call(lambda v: v.unlink(v.root_ino, b"nothing"))
    assert told.value.errno == errno.ENOENT
    with pytest.raises(PosixError) as told:
        deaf.call(lambda v: v.open(v.root_ino, os.O_RDONLY))
    assert told.value.errno == errno.EISDIR


def test_a_name_that_was_absent_and_is_a_directory_the_kernel_has_not_seen_is_forgotten(pair: Pair) -> None:
    """It would say for a minute that there is no such name. One it knows keeps its name: somebody may work
    there."""
    deaf, other = pair
    root = deaf.volume.root_ino
    assert deaf.call(lambda v: v.lookup(root, b"d")) is None
    told = Invalidation(root, b"d")
    other.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    other.until(other.volume.barrier())
    deaf.volume.feed_silent(True)
    later(deaf)
    fh = deaf.call(lambda v: v.opendir(root))
    assert [name for name, _, _ in deaf.call(lambda v: v.readdir(fh, 0))] == [b"d"]
    deaf.call(lambda v: v.releasedir(fh))
    assert list(deaf.volume.still_absent([told])) == [told]
    assert deaf.call(lambda v: v.lookup(root, b"d")) is not None
    assert not list(deaf.volume.still_absent([told]))


def test_a_name_that_was_absent_and_was_made_here_is_not_forgotten(pair: Pair) -> None:
    """Of an untar that would be a message to the kernel for each file."""
    here, _ = pair
    root = here.volume.root_ino
    names = [Invalidation(root, name) for name in (b"file", b"never")]
    for one in names:
        assert here.call(lambda v, name=one.name: v.lookup(root, name)) is None
    _, fh = here.call(lambda v: v.create(root, b"file", 0o644, 0, 0, os.O_WRONLY | os.O_CREAT))
    here.call(lambda v: v.release(fh))
    assert list(here.volume.not_made(names)) == names[1:]
    here.call(lambda v: v.unlink(root, b"file"))
    assert list(here.volume.not_made(names)) == names


def asked_late(client: Client, name: bytes) -> Callable[[], None]:
    """Ask for `name` in vain for so long that what is known has to do. The answer is that of now; it comes
    when what is returned is called."""
    root = client.volume.root_ino
    with pytest.raises(Park) as parked:
        client.volume.lookup(root, name)
    late = [(job, client.run(job)) for job in client.volume.jobs() if isinstance(job, AskJob)]
    assert len(late) == 1
    later(client)
    assert parked.value.want.finished
    return lambda: client.volume.finish(*late[0])


def test_an_answer_that_comes_after_a_later_ones_brings_nothing_back(pair: Pair) -> None:
    """A file is renamed here between two questions for it, of which the first is answered last."""
    deaf, _ = pair
    root = deaf.volume.root_ino
    deaf.put(root, b"f", b"one", sync=True)
    deaf.volume.feed_silent(True)
    later(deaf)
    answer = asked_late(deaf, b"f")
    deaf.put(root, b"g", b"two", sync=True)  # the server is there again
    asked = deaf.remote.calls.count("ask")
    assert deaf.call(lambda v: v.lookup(root, b"f")) is not None
    assert deaf.remote.calls.count("ask") == asked + 1
    deaf.call(lambda v: v.rename(root, b"f", root, b"renamed", 0))
    deaf.until(deaf.volume.barrier())
    answer()
    assert deaf.call(lambda v: v.lookup(root, b"f")) is None
    deaf.volume.feed_silent(False)
    assert_same(server_tree(deaf.bench), deaf.view())


def test_another_number_of_answers_than_questions_is_asked_again(pair: Pair) -> None:
    _, other = pair
    root = other.volume.root_ino
    deaf = pair[0]
    deaf.put(root, b"f", b"one", sync=True)
    with pytest.raises(Park) as parked:
        other.volume.lookup(root, b"f")
    want = parked.value.want
    (job,) = (job for job in other.volume.jobs() if isinstance(job, AskJob))
    seq, answers = job.run(other.remote, other.cache)
    for wrong in ([], [*answers, None]):
        other.volume.finish(job, (seq, wrong))
        assert not want.finished, "it has no answer"
        later(other)
        (job,) = (job for job in other.volume.jobs() if isinstance(job, AskJob))
    other.volume.finish(job, (seq, answers))
    assert want.finished and want.error is None
    assert other.call(lambda v: v.lookup(root, b"f")) is not None
