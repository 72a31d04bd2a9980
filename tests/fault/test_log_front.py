"""A log whose oldest segment cannot be read at its beginning: what later ones say rests on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock
from support.clientcase import files

from fsd.vfs.aside import kept
from fsd.vfs.recover import Report

SEGMENT = 64 << 10


def garble(segment: Path) -> None:
    with segment.open("r+b") as file:
        file.write(b"\xff" * 40)


def lose_a_page(segment: Path) -> None:
    with segment.open("r+b") as file:
        file.write(bytes(4096))


@pytest.mark.parametrize("damage", [garble, lose_a_page])
@pytest.mark.parametrize("booted", [False, True])
def test_nothing_is_made_of_what_lies_behind_a_lost_beginning(
    tmp_path: Path, damage: Callable[[Path], None], booted: bool
) -> None:
    """The later segments were replayed as if they were the whole log: a file whose base and whose first
    changes stood in the lost part became its last changes on nothing, what was new there was gone, and
    nobody was told."""
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    client.options = replace(client.options, segment_size=SEGMENT)
    client.net.faulty = False
    client.open()
    root = client.volume.root_ino
    old = bytes(range(256)) * 100
    client.put(root, b"old", old)
    client.until(client.volume.barrier())
    client.volume.close()

    client.open()
    assert client.call(lambda v: v.lookup(root, b"old")) is not None
    assert client.call(lambda v: v.lookup(root, b"new")) is None
    client.net.cut = 1 << 30
    client.put(root, b"new", b"n" * 20_000)
    fh = client.call(lambda v: v.open(client.volume.core.nodes.get(root).entries[b"old"] or 0, 2))
    for at in range(0, 24_000, 8000):
        client.call(lambda v, at=at: v.write(fh, at, b"x" * 8000))  # type: ignore[misc]
    for _ in range(8):
        client.call(lambda v: v.write(fh, 16_000, b"y" * 9000))
    segments = sorted(client.options.state_dir.glob("log.*"))
    assert len(segments) > 1, "the changes must go on in a later segment"
    client.kill()
    damage(segments[0])
    client.net.cut = 0
    if booted:
        client.clock.boot = "boot-1"

    client.open()
    assert files(client) == {"/old": old}
    report = client.volume.recovered
    assert isinstance(report, Report)
    assert report.log_copy is not None
    assert any(str(report.log_copy) in note for note in report.notes())
    (copy,) = kept(client.options.state_dir)
    assert copy == report.log_copy
    assert b"y" * 9000 in b"".join(path.read_bytes() for path in sorted(copy.iterdir()))
    client.volume.close()
    client.bench.close()
