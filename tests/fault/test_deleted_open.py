"""A deleted file that is still open can be read however long ago it lost its name, and is swept after."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from support.client import Client, Clock
from support.inproc import NoCache
from support.sweeping import SweepBench, noise

from fsd.model.limits import GRACE_LEAST, MIB
from fsd.vfs.compact import compact
from fsd.vfs.keep import EVERY, Keeper

SIZE = 3 * MIB + 1000


def deleted_and_open(tmp_path: Path, *, cached: bool = False) -> tuple[SweepBench, Client, int]:
    """A client with a handle of a file that has no name any more, all of it committed."""
    bench = SweepBench(tmp_path / "server")
    client = Client(tmp_path / "mount", bench, Clock(), random.Random(1))
    client.net.faulty = False
    client.cache = NoCache(keep=cached)
    client.open()
    root = client.volume.root_ino
    ino = client.put(root, b"f", noise(1, SIZE), sync=True)
    fh = client.call(lambda v: v.open(ino, os.O_RDWR))
    client.call(lambda v: v.unlink(root, b"f"))
    client.until(client.volume.barrier())
    assert bench.rows("blob", "AND refs=0") == bench.rows("blob") == 4
    return bench, client, fh


def pass_time(bench: SweepBench, client: Client, seconds: float) -> None:
    """Both clocks go on, the client's timers ring, the server sweeps with the shortest grace."""
    for _ in range(int(seconds / EVERY) + 1):
        client.clock.seconds += EVERY
        bench.time.ahead += EVERY
        client.volume.tick(client.clock.seconds)
        client.run_some(50)
        bench.sweep(GRACE_LEAST)


def test_it_stays_while_it_is_open_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    bench, client, fh = deleted_and_open(tmp_path)
    pass_time(bench, client, 5 * GRACE_LEAST)
    assert bench.rows("blob") == 4
    found = b"".join(
        bytes(client.call(lambda v, a=at: v.read(fh, a, MIB)))  # type: ignore[misc]
        for at in range(0, SIZE, MIB)
    )
    assert found == noise(1, SIZE)
    client.call(lambda v: v.release(fh))
    pass_time(bench, client, 2 * GRACE_LEAST)
    assert bench.rows("blob") == 0
    assert client.volume.keeper.at is None, "nothing is left to keep"
    client.volume.close()
    bench.close()


def test_a_directory_that_was_removed_while_it_was_open_is_nothing_to_keep(tmp_path: Path) -> None:
    """What it was stopped the asking for files that are still open, and calls on a full buffer (ESTALE)."""
    bench, client, fh = deleted_and_open(tmp_path)
    root = client.volume.root_ino
    made = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
    opened = client.call(lambda v: v.opendir(made))
    client.call(lambda v: v.rmdir(root, b"d"))
    client.call(lambda v: v.releasedir(opened))
    client.call(lambda v: v.forget(made, 1))
    client.until(client.volume.barrier())
    pass_time(bench, client, 2 * GRACE_LEAST)
    assert bench.rows("blob") == 4
    compact(client.volume.core)
    client.call(lambda v: v.release(fh))
    assert not client.volume.core.orphans
    client.volume.close()
    bench.close()


def test_without_being_asked_the_server_would_let_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above shows is the asking's doing."""
    monkeypatch.setattr(Keeper, "wake", lambda self, now: None)
    bench, client, _ = deleted_and_open(tmp_path)
    pass_time(bench, client, 2 * GRACE_LEAST)
    assert bench.rows("blob") == 0
    client.volume.close()
    bench.close()


def test_what_is_missing_all_the_same_comes_again_from_the_cache(tmp_path: Path) -> None:
    """The server could not be reached for longer than its grace."""
    bench, client, _ = deleted_and_open(tmp_path, cached=True)
    data = noise(1, SIZE)
    blocks = [data[at : at + MIB] for at in range(0, SIZE, MIB)]
    for block in blocks[1:]:
        client.cache.put(hashlib.sha256(block).digest(), block)
    client.net.cut = 10**9
    pass_time(bench, client, 2 * GRACE_LEAST)
    assert bench.rows("blob") == 0
    client.net.cut = 0
    pass_time(bench, client, EVERY)
    assert bench.rows("blob") == 3
    client.volume.close()
    bench.close()
