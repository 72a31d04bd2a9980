"""An error that is told again and again keeps nothing of the calls it was told to."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.errors import FsdError, LeaseLost
from fsd.vfs.types import Park


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Bench(tmp_path / "server") as bench:
        made = Client(tmp_path / "mount", bench, Clock(), random.Random(1))
        made.net.faulty = False
        made.open()
        yield made


def frames(error: FsdError) -> int:
    count, at = 0, error.__traceback__
    while at is not None:
        count, at = count + 1, at.tb_next
    return count


def test_a_lost_lease_is_told_to_every_fsync(client: Client) -> None:
    """A program that went on trying made the daemon grow, call by call."""
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"f", 0o644, 0, 0, os.O_RDWR))
    client.volume.write(fh, 0, b"data")
    lost = LeaseLost("somebody else's")
    client.volume.core.fence_off(lost)
    kept = []
    for _ in range(20):
        with pytest.raises(LeaseLost) as told:
            client.volume.fsync(fh, False)
        assert told.value is lost
        kept.append(frames(lost))
    assert kept[-1] == kept[0] > 0


def test_one_want_is_told_to_all_who_wait(client: Client) -> None:
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"f", 0o644, 0, 0, os.O_RDWR))
    client.volume.write(fh, 0, b"data")
    with pytest.raises(Park) as parked:
        client.volume.fsync(fh, False)
    lost = LeaseLost("somebody else's")
    client.volume.core.fence_off(lost)
    kept = []
    for _ in range(20):
        with pytest.raises(LeaseLost):
            client.volume.done(parked.value.want)
        kept.append(frames(lost))
    assert kept[-1] == kept[0] > 0
