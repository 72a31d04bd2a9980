"""Directories that are known to lie in each other: of one the old place is known, of the other the new."""

from __future__ import annotations

import pytest
from support.client import Client
from support.clientcase import client_fixture as client_fixture
from support.clientcase import other

from fsd.wire.messages import LeaseSeen

pytestmark = pytest.mark.timeout(60)  # it is over at once, or never


@pytest.fixture(name="inner")
def inner_fixture(client: Client) -> int:
    """The inode of `b`, which is in `a` by now. This mount has a change of `a` on its way, so of that one it
    goes on with what it knew: that it is in `b`."""
    root = client.volume.root_ino
    outer = client.call(lambda v: v.mkdir(root, b"b", 0o755, 0, 0))
    below = client.volume.mkdir(outer.ino, b"a", 0o755, 0, 0)
    client.until(client.volume.barrier())
    client.volume.setattr(below.ino, mode=0o700)  # on its way: none of its jobs is run here

    writer = other(client)
    there = writer.call(lambda v: v.lookup(root, b"b"))
    assert there is not None
    writer.call(lambda v: v.rename(there.ino, b"a", root, b"a", 0))
    writer.call(lambda v: v.rename(root, b"b", below.ino, b"b", 0))
    writer.until(writer.volume.barrier())
    writer.volume.close()

    client.feed()
    assert client.call(lambda v: v.lookup(root, b"a")) is below
    assert client.call(lambda v: v.lookup(below.ino, b"b")) is outer
    assert (outer.parent, below.parent) == (below.ino, outer.ino), "the circle this is about"
    return outer.ino


def test_a_rename_into_such_a_directory(client: Client, inner: int) -> None:
    """The FUSE thread went round for good, and the whole mount with it."""
    root = client.volume.root_ino
    client.call(lambda v: v.mkdir(root, b"new", 0o755, 0, 0))
    client.call(lambda v: v.rename(root, b"new", inner, b"new", 0))
    client.until(client.volume.barrier())
    (entry,) = client.bench.entries(inner).values()
    assert entry.name == b"new"


def test_a_change_there_beside_the_writer_lease_of_another_mount(client: Client, inner: int) -> None:
    core = client.volume.core
    core.see_leases((LeaseSeen(1, core.new_ino(), core.session + 1, "somebody else's", False),))
    client.call(lambda v: v.mkdir(inner, b"new", 0o755, 0, 0))
    client.until(client.volume.barrier())
    assert set(client.bench.entries(inner)) == {b"new"}
