"""Listing a directory that is too large to be all in memory: the same names, while it changes, in any order
of reading; and what tells whether it is empty."""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Iterator

import pytest
from support.client import Client
from support.clientcase import client_fixture, other  # noqa: F401

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import PosixError
from fsd.service import namespace
from fsd.vfs import listing, loads

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
            node = client.volume.core.nodes.by_ino.get(dict(KNOWN).get(one.name, 0))
            if node is not None:
                client.volume.forget(node.ino, node.lookups)
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
