"""Counts of links while another mount makes names too: what is counted here is never less than nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.kernel.entries import Entries

ROOMY = 1000  # inodes kept: nothing is forgotten meanwhile


@contextmanager
def duo(tmp_path: Path) -> Iterator[list[Client]]:
    bench, clock = Bench(tmp_path / "server"), Clock()
    clients = [Client(tmp_path / name, bench, clock, random.Random(1), name) for name in ("alpha", "beta")]
    for client in clients:
        client.net.faulty = False
        client.inodes_max = ROOMY
        client.open()
    yield clients
    for client in clients:
        client.volume.close()
    bench.close()


def told(client: Client, ino: int) -> int:
    """The links the kernel is told, both ways: it is told something."""
    entries = Entries(client.volume.root_ino)
    node = client.call(lambda v: v.getattr(ino))
    entries.attr_bytes(node)
    return int(entries.of(node).st_nlink)


def test_directories_of_another_mount_removed_from_one_that_is_changed_here(tmp_path: Path) -> None:
    with duo(tmp_path) as (alpha, beta):
        root = alpha.volume.root_ino
        ino = alpha.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
        alpha.until(alpha.volume.barrier())
        there = beta.number(root, b"d")
        for name in (b"1", b"2", b"3", b"4"):
            beta.call(lambda v, n=name: v.mkdir(there, n, 0o755, 0, 0))  # type: ignore[misc]
        beta.until(beta.volume.barrier())
        alpha.call(lambda v: v.setattr(ino, mode=0o700))  # till this is sent its attributes stay
        alpha.feed()
        for name, _ in alpha.listing(ino):
            alpha.call(lambda v, n=name: v.rmdir(ino, n))  # type: ignore[misc]
            assert told(alpha, ino) == 2
        alpha.until(alpha.volume.barrier())
        assert told(alpha, ino) == 2
        assert alpha.listing(root) == [(b"d", ino)]


@pytest.mark.parametrize("replaced", [False, True])
def test_names_of_another_mount_of_a_file_that_is_changed_here(tmp_path: Path, replaced: bool) -> None:
    with duo(tmp_path) as (alpha, beta):
        root = alpha.volume.root_ino
        ino = alpha.put(root, b"f", b"data", sync=True)
        fh = alpha.call(lambda v: v.open(ino, os.O_RDWR))
        there = beta.number(root, b"f")
        beta.call(lambda v: v.link(there, root, b"g"))
        beta.until(beta.volume.barrier())
        alpha.call(lambda v: v.setattr(ino, mode=0o600))
        alpha.feed()
        alpha.call(lambda v: v.rename(root, b"g", root, b"h", 0))
        alpha.call(lambda v: v.unlink(root, b"f"))
        assert told(alpha, ino) == 0
        if replaced:
            alpha.put(root, b"new", b"n")
            alpha.call(lambda v: v.rename(root, b"new", root, b"h", 0))
        else:
            alpha.call(lambda v: v.unlink(root, b"h"))
        assert told(alpha, ino) == 0
        assert alpha.call(lambda v: v.read(fh, 0, 10)) == b"data"
        alpha.call(lambda v: v.release(fh))
        alpha.until(alpha.volume.barrier())
        assert [name for name, _ in alpha.listing(root)] == ([b"h"] if replaced else [])
