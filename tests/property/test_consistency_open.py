"""`--consistency open`: what was closed on one mount is seen by the next open on another, feed or not."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.errors import FsdError
from fsd.model.limits import BLOCK, PARKED_MAX
from fsd.vfs.calls import SENT_BACK
from fsd.vfs.loads import AskJob
from fsd.vfs.types import Park


class Pair:
    """A writer, and a reader that never hears from the feed."""

    def __init__(self, directory: Path) -> None:
        self.bench = Bench(directory / "server")
        self.clock, rng = Clock(), random.Random(1)
        self.writer = Client(directory / "w", self.bench, self.clock, rng, "writer")
        self.reader = Client(directory / "r", self.bench, self.clock, rng, "reader")
        self.reader.options = replace(self.reader.options, consistency="open")
        for client in (self.writer, self.reader):
            client.net.faulty = False
            client.open()
        self.root = self.reader.volume.root_ino

    def write(self, name: bytes, data: bytes) -> None:
        self.writer.put(self.root, name, data, truncate=True, sync=True)

    def look(self, name: bytes, thread: int = 0) -> int | None:
        """As the kernel looks a path up at an open: from its own memory where it knows the name."""
        asker = object()
        found = self.reader.call(lambda v: v.lookup(self.root, name, asker, thread))
        return None if found is None else found.ino

    def read(self, ino: int, thread: int = 0) -> bytes:
        """Open, read all, close."""
        asker = object()
        fh = self.reader.call(lambda v: v.open(ino, os.O_RDONLY, asker=asker, thread=thread))
        data = self.reader.call(lambda v: v.read(fh, 0, 1 << 30))
        self.reader.call(lambda v: v.release(fh))
        return data

    def cat(self, name: bytes) -> bytes:
        """By name, as `cat` does: a stale name is looked up once more."""
        ino = self.look(name)
        assert ino is not None
        try:
            return self.read(ino)
        except FsdError as exc:
            if exc.errno != errno.ESTALE:
                raise
        again = self.look(name)
        assert again is not None
        assert again != ino
        return self.read(again)

    def cat_known(self, name: bytes, ino: int) -> bytes:
        """As `cat` where the kernel knows the name: no lookup, or one after ESTALE."""
        try:
            return self.read(ino)
        except FsdError as exc:
            if exc.errno != errno.ESTALE:
                raise
        again = self.look(name)
        assert again is not None
        return self.read(again)

    def names(self, ino: int = 0) -> set[bytes]:
        """opendir, read all, close; of the root where no other is given."""
        asker = object()
        fh = self.reader.call(lambda v: v.opendir(ino or self.root, asker))
        page = self.reader.call(lambda v: v.readdir(fh, 0))
        self.reader.call(lambda v: v.releasedir(fh))
        return {name for name, _, _ in page}

    def asked(self) -> int:
        return self.reader.remote.calls.count("ask")


def replace_file(pair: Pair, data: bytes) -> None:
    """`f` means another file from now on, on the server."""
    pair.write(b".tmp", data)
    pair.writer.call(lambda v: v.rename(pair.root, b".tmp", pair.root, b"f", 0))
    pair.writer.until(pair.writer.volume.barrier())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.bench.close()


def test_each_open_sees_what_was_closed_before_it_with_one_request(pair: Pair) -> None:
    pair.write(b"f", b"one")
    assert pair.cat(b"f") == b"one"
    for text in (b"two", b"three", b""):
        pair.write(b"f", text)
        before = pair.asked()
        assert pair.cat(b"f") == text
        assert pair.asked() - before == 1
    before = pair.asked()
    assert pair.cat(b"f") == b""
    assert pair.asked() - before == 1  # also when nothing has changed


def test_a_file_of_several_blocks_too(pair: Pair) -> None:
    first, second = os.urandom(2 * BLOCK + 5), os.urandom(2 * BLOCK + 7)
    pair.write(b"big", first)
    assert pair.cat(b"big") == first
    pair.write(b"big", second)
    before = pair.asked()
    assert pair.cat(b"big") == second
    assert pair.asked() - before <= 2  # the file, and its block list


def test_a_name_that_means_another_file_is_looked_up_again(pair: Pair) -> None:
    pair.write(b"f", b"old")
    old = pair.look(b"f")
    assert pair.cat(b"f") == b"old"
    replace_file(pair, b"new")
    assert pair.cat(b"f") == b"new"
    assert pair.look(b"f") != old
    pair.writer.call(lambda v: v.unlink(pair.root, b"f"))
    pair.writer.until(pair.writer.volume.barrier())
    gone = pair.look(b"f")
    assert gone is not None  # the kernel knew it
    with pytest.raises(FsdError) as told:
        pair.read(gone)
    assert told.value.errno == errno.ESTALE
    assert pair.look(b"f") is None


def test_a_name_that_did_not_exist_is_asked_for_again(pair: Pair) -> None:
    assert pair.look(b"late") is None
    pair.write(b"late", b"there")
    assert pair.cat(b"late") == b"there"


def test_a_file_is_found_under_whichever_of_its_names_is_left(pair: Pair) -> None:
    """Made here or elsewhere, removed here or elsewhere: an open asks about a name the file still has."""
    pair.write(b"a", b"data")
    ino = pair.look(b"a")
    assert ino is not None
    pair.reader.call(lambda v: v.link(ino, pair.root, b"b"))
    pair.reader.until(pair.reader.volume.barrier())
    assert pair.cat_known(b"a", ino) == pair.cat(b"b") == b"data"
    pair.reader.call(lambda v: v.unlink(pair.root, b"b"))
    pair.reader.until(pair.reader.volume.barrier())
    assert pair.cat_known(b"a", ino) == b"data"
    pair.reader.call(lambda v: v.link(ino, pair.root, b"c"))
    pair.reader.until(pair.reader.volume.barrier())
    pair.writer.feed()
    pair.writer.call(lambda v: v.unlink(pair.root, b"c"))
    pair.writer.until(pair.writer.volume.barrier())
    assert pair.cat_known(b"a", ino) == b"data"
    before = pair.asked()
    assert pair.cat_known(b"a", ino) == b"data"
    assert pair.asked() - before == 1


def test_each_of_several_names_is_asked_about(pair: Pair) -> None:
    pair.write(b"a", b"old")
    found = pair.writer.number(pair.root, b"a")
    pair.writer.call(lambda v: v.link(found, pair.root, b"b"))
    pair.writer.until(pair.writer.volume.barrier())
    assert pair.cat(b"a") == pair.cat(b"b") == b"old"
    pair.write(b".tmp", b"new")
    pair.writer.call(lambda v: v.rename(pair.root, b".tmp", pair.root, b"a", 0))
    pair.writer.until(pair.writer.volume.barrier())
    assert pair.cat(b"b") == b"old"
    assert pair.cat(b"a") == b"new"
    assert pair.cat(b"b") == b"old"


@pytest.mark.parametrize("opened", [False, True])
def test_a_name_is_looked_up_again_also_where_its_file_is_known_to_be_gone(pair: Pair, opened: bool) -> None:
    """A question about its attributes was answered so; the kernel has not heard of it yet, and opens what it
    knew by the name."""
    pair.write(b"f", b"old")
    old = pair.look(b"f")
    assert old is not None
    assert pair.cat(b"f") == b"old"
    if opened:
        pair.reader.call(lambda v: v.open(old, os.O_RDONLY))
    replace_file(pair, b"new")
    pair.reader.until(pair.reader.volume.loader.attrs([pair.reader.volume.node(old)]))
    assert pair.reader.volume.node(old).gone
    with pytest.raises(FsdError) as told:
        pair.read(old, thread=7)
    assert told.value.errno == errno.ESTALE
    new = pair.look(b"f")
    assert new not in (None, old)
    assert pair.read(new or 0, thread=7) == b"new"


def test_an_open_is_sent_back_once(pair: Pair) -> None:
    """To the kernel ESTALE the second time is the call's error: where the name changes all the time, and for
    a file that is opened by no name (/proc/self/fd)."""
    pair.write(b"f", b"old")
    old = pair.look(b"f")
    assert old is not None
    pair.reader.call(lambda v: v.open(old, os.O_RDONLY))
    assert pair.read(old) == b"old"
    replace_file(pair, b"new")
    for thread in (7, 8, 7):
        with pytest.raises(FsdError) as told:
            pair.read(old, thread=thread)
        assert told.value.errno == errno.ESTALE
        assert pair.read(old, thread=thread) == b"old"
    with pytest.raises(FsdError):
        pair.read(old, thread=7)
    new = pair.look(b"f")
    assert new not in (None, old)
    replace_file(pair, b"newer")
    assert pair.read(new or 0, thread=7) == b"new"
    with pytest.raises(FsdError):
        pair.read(new or 0, thread=7)


def test_an_open_that_was_sent_back_and_came_no_more_is_forgotten(pair: Pair) -> None:
    """The kernel may refuse the second try itself; the thread's next open of that file was let through."""
    pair.write(b"f", b"old")
    old = pair.look(b"f")
    assert old is not None
    replace_file(pair, b"new")
    for wait in (0.0, SENT_BACK):
        pair.clock.seconds += wait
        with pytest.raises(FsdError) as told:
            pair.read(old, thread=7)
        assert told.value.errno == errno.ESTALE
    assert pair.read(old, thread=7) == b"old"


def test_an_open_that_was_sent_back_ends_where_there_is_no_name(pair: Pair) -> None:
    """The next one of that thread is another: the file it finds may be older."""
    pair.write(b"f", b"old")
    old = pair.look(b"f")
    assert old is not None
    replace_file(pair, b"new")
    with pytest.raises(FsdError):
        pair.read(old, thread=7)
    pair.writer.call(lambda v: v.unlink(pair.root, b"f"))
    pair.writer.until(pair.writer.volume.barrier())
    pair.reader.feed()
    assert pair.look(b"f", thread=7) is None  # ENOENT
    pair.write(b"f", b"again")
    again = pair.look(b"f", thread=7)
    assert again is not None
    replace_file(pair, b"newest")
    with pytest.raises(FsdError) as told:
        pair.read(again, thread=7)
    assert told.value.errno == errno.ESTALE


def test_a_listing_begins_with_what_is_there_at_opendir(pair: Pair) -> None:
    pair.write(b"a", b"1")
    assert pair.names() == {b"a"}
    pair.write(b"b", b"2")
    pair.writer.call(lambda v: v.unlink(pair.root, b"a"))
    pair.writer.until(pair.writer.volume.barrier())
    assert pair.names() == {b"b"}
    before = pair.asked()
    assert pair.names() == {b"b"}
    assert pair.asked() - before == 1


@pytest.mark.parametrize("how", ["its attributes", "the directory above", "a feed behind"])
def test_a_listing_is_new_also_where_the_version_came_before_it(pair: Pair, how: str) -> None:
    """What a directory is now was answered to somebody who did not ask for its names."""
    there = pair.writer.call(lambda v: v.mkdir(pair.root, b"d", 0o755, 0, 0)).ino
    pair.writer.put(there, b"a", b"1", sync=True)
    assert pair.names() == {b"d"}
    here = pair.look(b"d")
    assert here is not None
    assert pair.names(here) == {b"a"}
    if how == "a feed behind":
        pair.writer.put(there, b"b", b"2", sync=True)
        pair.reader.feed()
    pair.writer.put(there, b"c", b"3", sync=True)
    if how == "the directory above":
        pair.write(b"beside", b"4")
        assert pair.names() == {b"d", b"beside"}
    else:
        pair.reader.until(pair.reader.volume.loader.attrs([pair.reader.volume.node(here)]))
    wanted = {b"a", b"b", b"c"} if how == "a feed behind" else {b"a", b"c"}
    assert pair.names(here) == wanted
    before = pair.asked()
    assert pair.names(here) == wanted
    assert pair.asked() - before == 1


def test_a_directory_with_changes_of_its_own_shows_others_names_too(pair: Pair) -> None:
    """Nothing is sent meanwhile: who works in a directory all the time would see nothing new in it."""
    pair.write(b"old", b"1")
    assert pair.names() == {b"old"}
    pair.reader.put(pair.root, b"mine", b"local")
    pair.reader.call(lambda v: v.unlink(pair.root, b"old"))
    assert pair.reader.volume.node(pair.root).busy
    pair.write(b"theirs", b"2")
    assert pair.names() == {b"mine", b"theirs"}
    assert pair.reader.volume.node(pair.root).busy
    made = pair.reader.call(lambda v: v.mkdir(pair.root, b"d", 0o755, 0, 0)).ino
    pair.reader.put(made, b"in", b"3")
    assert pair.names(made) == {b"in"}
    pair.reader.until(pair.reader.volume.barrier())
    pair.writer.feed()
    pair.writer.put(pair.writer.number(pair.root, b"d"), b"later", b"4", sync=True)
    assert pair.names(made) == {b"in", b"later"}
    assert pair.names() == {b"mine", b"theirs", b"d"}


def test_an_open_waits_for_an_answer_of_its_own(pair: Pair) -> None:
    """A question that was sent before the open is not its answer."""
    pair.write(b"f", b"one")
    ino = pair.look(b"f")
    assert ino is not None
    volume = pair.reader.volume
    first, second = object(), object()
    with pytest.raises(Park) as early:
        volume.open(ino, os.O_RDONLY, asker=first)
    job = next(iter(volume.jobs()))
    answer = pair.reader.run(job)
    pair.write(b"f", b"two")
    with pytest.raises(Park) as late:
        volume.open(ino, os.O_RDONLY, asker=second)
    volume.finish(job, answer)
    assert early.value.want.finished
    assert not late.value.want.finished
    fh = volume.open(ino, os.O_RDONLY, asker=first)
    volume.release(fh)
    pair.reader.until(late.value.want)
    fh = pair.reader.call(lambda v: v.open(ino, os.O_RDONLY, asker=second))
    assert pair.reader.call(lambda v: v.read(fh, 0, 10)) == b"two"


@pytest.mark.parametrize("what", ["a name in it", "itself"])
def test_a_directory_the_server_got_since_it_was_asked_stays(pair: Pair, what: str) -> None:
    """The server answers that it has no such directory, and has it when that arrives."""
    client, volume = pair.reader, pair.reader.volume
    made = client.call(lambda v: v.mkdir(pair.root, b"d", 0o755, 0, 0)).ino
    file = client.put(made, b"f", b"data")
    asker = object()
    if what == "itself":
        volume.loader.attrs([volume.node(made)])
    else:
        with pytest.raises(Park):
            volume.lookup(made, b"absent", asker)
    job = next(one for one in volume.jobs() if isinstance(one, AskJob))
    answer = client.run(job)
    client.until(volume.barrier())
    volume.finish(job, answer)
    assert client.call(lambda v: v.lookup(made, b"absent", asker)) is None
    found = client.call(lambda v: v.lookup(made, b"f", object()))
    assert found is not None
    assert found.ino == file
    assert client.call(lambda v: v.mkdir(made, b"more", 0o755, 0, 0)).is_dir
    assert not volume.node(made).gone


def test_what_others_changed_since_the_server_was_asked_is_asked_again(pair: Pair) -> None:
    """The answer that there is no such inode is older than its commit here, and than what another made of it
    since: that is not forgotten with the answer."""
    client, volume, other = pair.reader, pair.reader.volume, pair.writer
    made = client.call(lambda v: v.mkdir(pair.root, b"d", 0o755, 0, 0)).ino
    volume.loader.attrs([volume.node(made)])
    job = next(one for one in volume.jobs() if isinstance(one, AskJob))
    answer = client.run(job)
    client.until(client.call(lambda v: v.barrier()))
    other.feed()
    found = other.call(lambda v: v.lookup(pair.root, b"d"))
    assert found is not None
    other.call(lambda v: v.setattr(found.ino, mode=0o700))
    other.until(other.volume.barrier())
    client.feed()
    volume.finish(job, answer)
    assert client.call(lambda v: v.getattr(made)).mode & 0o777 == 0o700


def test_callers_that_never_come_back_are_forgotten(pair: Pair) -> None:
    pair.write(b"f", b"one")
    ino = pair.look(b"f")
    assert ino is not None
    for _ in range(PARKED_MAX + 10):
        with pytest.raises(Park):
            pair.reader.volume.open(ino, os.O_RDONLY, asker=object())
    assert len(pair.reader.volume.asked) <= PARKED_MAX


def test_own_changes_that_are_not_sent_yet_ask_nobody(pair: Pair) -> None:
    pair.reader.put(pair.root, b"mine", b"local")
    ino = pair.look(b"mine")
    assert ino is not None
    before = pair.asked()
    assert pair.read(ino) == b"local"
    assert pair.asked() == before
