"""Listing a directory that is too large to be all in memory: the same names, while it changes, in any order
of reading; and what tells whether it is empty."""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from support.client import Client
from support.clientcase import other

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import PosixError
from fsd.service import namespace
from fsd.vfs import listing, loads
from fsd.vfs.types import Park
from fsd.vfs.volume import Volume

T = TypeVar("T")
COUNT = 300


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large is what has more than 40 names; a page has 16."""
    monkeypatch.setattr(loads, "LISTING_MAX", 40)
    monkeypatch.setattr(listing, "LISTING_MAX", 40)
    monkeypatch.setattr(loads, "LIST_PAGE", 16)
    monkeypatch.setattr(listing, "WINDOW", 32)
    monkeypatch.setattr(loads, "DIR_INLINE_MAX", 16)
    monkeypatch.setattr(namespace, "DIR_INLINE_MAX", 16)
    monkeypatch.setattr(loads, "TREE_ENTRIES", 16)


@pytest.fixture
def there(client: Client, small: None) -> Iterator[tuple[Client, int, set[bytes]]]:
    """A mount that has not seen the directory's names, the directory's number, and its names."""
    top = client.call(lambda v: v.mkdir(ROOT_INO, b"large", 0o755, 0, 0))
    names = {b"n%04d" % number for number in range(COUNT)}
    for name in sorted(names):
        client.call(lambda v, name=name: v.mknod(top.ino, name, stat.S_IFREG | 0o644, 0, 0, 0))
    client.until(client.volume.barrier())
    made = other(client)
    made.call(lambda v: v.lookup(ROOT_INO, b"large"))
    yield made, top.ino, names
    made.volume.close()


def read(client: Client, fh: int, cookie: int, limit: int) -> list[tuple[bytes, int]]:
    found = client.call(lambda v: v.readdir(fh, cookie, limit))
    for _, node, _ in found:
        client.volume.ref(node.ino)
    client.volume.tick(client.clock.seconds)
    for one in client.volume.take_invalidations():  # the kernel forgets as it is told
        if one.name is not None:
            known = client.volume.core.nodes.by_ino.get(dict(KNOWN).get(one.name, 0))
            if known is not None:
                client.volume.forget(known.ino, known.lookups)
    KNOWN.update({name: node.ino for name, node, _ in found})
    return [(name, after) for name, _, after in found]


KNOWN: dict[bytes, int] = {}


def names_of(client: Client, ino: int, limit: int = 7) -> list[bytes]:
    fh = client.call(lambda v: v.opendir(ino))
    found: list[bytes] = []
    cookie = 0
    while page := read(client, fh, cookie, limit):
        found += [name for name, _ in page]
        cookie = page[-1][1]
    client.call(lambda v: v.releasedir(fh))
    return found


def test_all_names_come_once_and_few_stay_in_memory(there: tuple[Client, int, set[bytes]]) -> None:
    client, ino, names = there
    for _ in range(2):
        found = names_of(client, ino)
        assert len(found) == COUNT
        assert set(found) == names
        assert len(client.volume.core.nodes.by_ino) < 120
    assert not client.volume.node(ino).complete


def asked_few(client: Client, call: Callable[[Volume], T]) -> T:
    for _ in range(20):
        try:
            return call(client.volume)
        except Park as park:
            client.until(park.want)
    raise AssertionError("it is asked for again and again")


@pytest.mark.parametrize("own", [False, True])
def test_one_that_was_known_whole_and_grew_too_large_elsewhere(
    client: Client, small: None, own: bool
) -> None:
    """Also where a change of one's own in it is not sent yet."""
    top = client.call(lambda v: v.mkdir(ROOT_INO, b"grows", 0o755, 0, 0)).ino
    for number in range(9):
        client.call(lambda v, n=number: v.mknod(top, b"a%d" % n, stat.S_IFREG | 0o644, 0, 0, 0))
    client.until(client.volume.barrier())
    second = other(client)
    there = second.number(ROOT_INO, b"grows")
    assert len(names_of(second, there)) == 9
    for number in range(COUNT):
        client.call(lambda v, n=number: v.mknod(top, b"n%04d" % n, stat.S_IFREG | 0o644, 0, 0, 0))
    client.until(client.volume.barrier())
    wanted = {b"a%d" % number for number in range(9)} | {b"n%04d" % number for number in range(COUNT)}
    second.feed()
    if own:
        second.call(lambda v: v.mknod(there, b"own", stat.S_IFREG | 0o644, 0, 0, 0))
        second.call(lambda v: v.unlink(there, b"a3"))
        wanted = wanted - {b"a3"} | {b"own"}
    fh = second.call(lambda v: v.opendir(there))
    assert asked_few(second, lambda v: v.readdir(fh, 0, 7))
    second.call(lambda v: v.releasedir(fh))
    found = names_of(second, there)
    assert len(found) == len(wanted)
    assert set(found) == wanted
    with pytest.raises(PosixError) as told:
        asked_few(second, lambda v: v.rmdir(ROOT_INO, b"grows"))
    assert told.value.errno == errno.ENOTEMPTY
    second.until(second.volume.barrier())
    assert set(names_of(second, there)) == wanted
    second.volume.close()


class Reader:
    """A program that reads the directory from its start to its end."""

    def __init__(self, client: Client, ino: int) -> None:
        self.client = client
        self.fh = client.call(lambda v: v.opendir(ino))
        self.found: list[bytes] = []
        self.cookie = 0
        self.ended = False

    def step(self) -> None:
        page = [] if self.ended else read(self.client, self.fh, self.cookie, 7)
        self.found += [name for name, _ in page]
        self.ended = not page
        self.cookie = page[-1][1] if page else self.cookie


@pytest.mark.parametrize("ahead", [1, 5, 7, 12])
def test_two_readers_at_once_both_see_all_names(there: tuple[Client, int, set[bytes]], ahead: int) -> None:
    client, ino, names = there
    names_of(client, ino)
    readers = [Reader(client, ino) for _ in range(2)]
    for _ in range(ahead):
        readers[0].step()
    while not all(reader.ended for reader in readers):
        for reader in readers:
            reader.step()
    for reader in readers:
        assert len(reader.found) == COUNT
        assert set(reader.found) == names
    assert len(client.volume.core.nodes.by_ino) < 160


@pytest.mark.parametrize("count", [12, COUNT])
def test_a_name_that_another_mount_took_away_while_it_is_listed(
    client: Client, small: None, count: int
) -> None:
    """The kernel would keep what it is told with a listing, for a minute."""
    top = client.call(lambda v: v.mkdir(ROOT_INO, b"large", 0o755, 0, 0)).ino
    for number in range(count):
        client.call(lambda v, n=number: v.mknod(top, b"n%04d" % n, stat.S_IFREG | 0o644, 0, 0, 0))
    client.until(client.volume.barrier())
    looker = other(client)
    looker.call(lambda v: v.lookup(ROOT_INO, b"large"))
    if count > 40:
        names_of(looker, top)  # it is known to be large from then on
    fh = looker.call(lambda v: v.opendir(top))
    page = looker.call(lambda v: v.readdir(fh, 0, 3))
    client.call(lambda v: v.rename(top, b"n0008", top, b"other", 0))
    client.call(lambda v: v.rename(top, b"n0010", top, b"n0009", 0))
    client.until(client.volume.barrier())
    looker.volume.apply_feed(looker.remote.changes(looker.volume.feed_seq, looker.volume.session, 0.0))
    found = dict[bytes, int]()
    while page:
        found.update({name: node.ino for name, node, _ in page})
        cookie = page[-1][2]
        page = looker.call(lambda v, cookie=cookie: v.readdir(fh, cookie, 3))
    assert found.keys() & {b"n0008", b"n0009", b"n0010"} == {b"n0009"}
    moved = looker.call(lambda v: v.lookup(top, b"n0009"))
    assert moved is not None
    assert found[b"n0009"] == moved.ino
    looker.call(lambda v: v.releasedir(fh))
    looker.volume.close()


@pytest.mark.parametrize("count", [38, COUNT])
def test_everything_is_forgotten_while_a_directory_is_listed(
    client: Client, small: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A feed that begins anew: names are asked for again, many at once."""
    monkeypatch.setattr(listing, "STALE_ASKED", 10)
    top = client.call(lambda v: v.mkdir(ROOT_INO, b"large", 0o755, 0, 0)).ino
    for number in range(count):
        client.call(lambda v, n=number: v.mknod(top, b"n%04d" % n, stat.S_IFREG | 0o644, 0, 0, 0))
    client.until(client.volume.barrier())
    looker = other(client)
    looker.call(lambda v: v.lookup(ROOT_INO, b"large"))
    if count > 40:
        names_of(looker, top)
    reader = Reader(looker, top)
    reader.step()
    client.call(lambda v: v.unlink(top, b"n0020"))
    client.until(client.volume.barrier())
    looker.volume.core.invalidations += looker.volume.feed.forget_everything(looker.volume.core.seq)
    asked = looker.remote.calls.count("ask")
    while not reader.ended:
        reader.step()
    assert set(reader.found) == {b"n%04d" % n for n in range(count)} - {b"n0020"}
    assert 0 < looker.remote.calls.count("ask") - asked < count // 3 + 5
    looker.volume.close()


def test_an_answer_that_nobody_took_says_nothing_later(there: tuple[Client, int, set[bytes]]) -> None:
    """A removal of the directory that was interrupted leaves its answer behind."""
    client, ino, names = there
    names_of(client, ino)
    for name in sorted(names):
        client.call(lambda v, name=name: v.unlink(ino, name))
    client.until(client.volume.barrier())
    with pytest.raises(Park) as parked:
        client.volume.rmdir(ROOT_INO, b"large")
    client.until(parked.value.want)  # and the caller is gone
    client.clock.seconds += 10.0
    writer = other(client, "writer")
    writer.call(lambda v: v.lookup(ROOT_INO, b"large"))
    writer.call(lambda v: v.mknod(ino, b"new", stat.S_IFREG | 0o644, 0, 0, 0))
    writer.until(writer.volume.barrier())
    writer.volume.close()
    with pytest.raises(PosixError) as caught:
        client.call(lambda v: v.rmdir(ROOT_INO, b"large"))
    assert caught.value.errno == errno.ENOTEMPTY


def test_names_made_and_removed_meanwhile(there: tuple[Client, int, set[bytes]]) -> None:
    client, ino, names = there
    names_of(client, ino)
    client.call(lambda v: v.mknod(ino, b"zz-own", stat.S_IFREG | 0o644, 0, 0, 0))
    client.call(lambda v: v.unlink(ino, b"n0123"))
    wanted = names - {b"n0123"} | {b"zz-own"}
    assert sorted(names_of(client, ino)) == sorted(wanted)
    client.until(client.volume.barrier())
    assert sorted(names_of(client, ino)) == sorted(wanted)
    # Removing while reading, as rm -r does: every name comes.
    fh = client.call(lambda v: v.opendir(ino))
    cookie, gone = 0, set()
    while page := read(client, fh, cookie, 7):
        cookie = page[-1][1]
        for name, _ in page:
            client.call(lambda v, name=name: v.unlink(ino, name))
            gone.add(name)
    client.call(lambda v: v.releasedir(fh))
    assert gone == wanted
    client.call(lambda v: v.rmdir(ROOT_INO, b"large"))
    client.until(client.volume.barrier())


@pytest.mark.parametrize("number", range(3))
def test_seeking_back_and_forth(there: tuple[Client, int, set[bytes]], number: int) -> None:
    client, ino, _ = there
    rng = random.Random(number)
    names_of(client, ino)
    fh = client.call(lambda v: v.opendir(ino))
    at: dict[int, list[tuple[bytes, int]]] = {}
    cookie = 0
    while page := read(client, fh, cookie, 5):
        at[cookie] = page
        cookie = page[-1][1]
    for _ in range(60):
        cookie = rng.choice(list(at))
        assert read(client, fh, cookie, 5) == at[cookie]
    client.call(lambda v: v.releasedir(fh))


def test_a_large_directory_is_not_empty(there: tuple[Client, int, set[bytes]]) -> None:
    client, ino, names = there
    names_of(client, ino)
    with pytest.raises(PosixError) as caught:
        client.call(lambda v: v.rmdir(ROOT_INO, b"large"))
    assert caught.value.errno == errno.ENOTEMPTY
    # Also when it is only here that all but one were removed.
    for name in sorted(names)[1:]:
        client.call(lambda v, name=name: v.unlink(ino, name))
    with pytest.raises(PosixError):
        client.call(lambda v: v.rmdir(ROOT_INO, b"large"))
    client.call(lambda v: v.unlink(ino, min(names)))
    client.call(lambda v: v.rmdir(ROOT_INO, b"large"))
    client.until(client.volume.barrier())


def test_a_name_of_a_large_directory_comes_without_counting_it(
    there: tuple[Client, int, set[bytes]],
) -> None:
    client, ino, names = there
    for name in sorted(names)[:20]:
        assert client.call(lambda v, name=name: v.lookup(ino, name)) is not None
    assert client.call(lambda v: v.lookup(ino, b"absent")) is None
    assert client.volume.loader.large[ino] == loads.LARGE_AFTER
    assert len(client.volume.core.nodes.by_ino) < 30
