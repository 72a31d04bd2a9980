"""Somebody removes the state directory of a mount that runs. What it held is in open files alone then; it is
put back at the next tick, and nothing that was accepted is lost when the daemon dies after that."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree

from fsd.model.errors import Busy
from fsd.vfs.log import Log
from fsd.vfs.open import prepare


class Crash(BaseException):
    """The process ends here."""


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """A mount with several segments of what was never sent."""
    clock, rng = Clock(), random.Random(3)
    made = Client(tmp_path / "state" / "mounts" / "m", Bench(tmp_path / "server"), clock, rng)
    object.__setattr__(made.options, "segment_size", 64 << 10)
    made.net.faulty = False
    made.open()
    made.put(made.volume.root_ino, b"sent", b"sent", sync=True)
    write(made, 0, 8)
    assert len(Log.segments(made.options.state_dir)) > 2
    return made


def write(client: Client, first: int, end: int) -> None:
    for at in range(first, end):
        client.put(client.volume.root_ino, b"f%d" % at, b"%d" % at * 30_000)


def check(client: Client, count: int) -> None:
    """Everything is there after the daemon was killed and mounted again."""
    client.kill()
    client.open()
    client.until(client.volume.barrier())
    tree = server_tree(client.bench)
    assert tree["/sent"][1] == b"sent"
    assert [tree[f"/f{at}"][1] for at in range(count)] == [b"%d" % at * 30_000 for at in range(count)]
    client.volume.close()
    client.bench.close()


def test_a_removed_state_directory_is_put_back(client: Client, tmp_path: Path) -> None:
    before = Log.segments(client.options.state_dir)
    shutil.rmtree(tmp_path / "state")
    client.volume.tick(client.clock.monotonic())
    assert Log.segments(client.options.state_dir) == before
    assert client.options.state_dir.stat().st_mode & 0o777 == 0o700
    with pytest.raises(Busy):
        prepare(client.options)  # it is this mount's all the same
    write(client, 8, 12)
    check(client, 12)


@pytest.mark.parametrize("what", ["lock", "oldest"])
def test_old_files_that_are_tidied_up_are_put_back(client: Client, what: str) -> None:
    """Whoever removes by age takes the files that were written first."""
    directory = client.options.state_dir
    before = Log.segments(directory)
    oldest = min(directory.glob("log.*"))
    (directory / "lock" if what == "lock" else oldest).unlink()
    client.volume.tick(client.clock.monotonic())
    assert Log.segments(directory) == before
    with pytest.raises(Busy):
        prepare(client.options)
    check(client, 8)


def test_what_is_not_there_any_more_is_freed_all_the_same(client: Client) -> None:
    directory, volume = client.options.state_dir, client.volume
    client.until(volume.barrier())
    if volume.core.sync_job is None:
        volume.core.trim(renew_at=0)
    job = volume.core.sync_job
    assert job is not None
    gone = min(directory.glob("log.*"))
    job.run(client.remote, client.cache)
    gone.unlink()
    volume.finish(job, None)
    assert not gone.exists()
    client.waiting = [one for one in (*client.waiting, *volume.jobs()) if one is not job]
    check(client, 8)


def test_it_is_put_back_when_the_next_segment_begins(client: Client, tmp_path: Path) -> None:
    """Much is written between two ticks."""
    shutil.rmtree(tmp_path / "state")
    write(client, 8, 14)
    client.volume.tick(client.clock.monotonic())
    check(client, 14)


def test_everything_is_sent_from_it_without_a_crash(client: Client, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "state")
    client.until(client.volume.barrier())
    client.volume.tick(client.clock.monotonic())
    check(client, 8)


def test_where_it_cannot_be_put_back_it_is_told_and_tried_again(client: Client, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "state").write_text("in the way")
    client.volume.tick(client.clock.monotonic())
    assert "was removed and cannot be put back" in str(client.volume.status()["reason"])
    (tmp_path / "state").unlink()
    client.clock.seconds += 2
    client.volume.tick(client.clock.monotonic())
    check(client, 8)


@pytest.mark.parametrize("point", ["written", "synced", "renamed", "durable"])
@pytest.mark.parametrize("time", [1, 2, 3])
def test_a_crash_while_it_is_put_back_leaves_a_beginning(
    client: Client, tmp_path: Path, point: str, time: int
) -> None:
    """The files were removed by somebody; what is there again is a log all the same."""
    left = [time]

    def crash(name: str) -> None:
        left[0] -= name == f"log.put_back.{point}"
        if not left[0]:
            raise Crash

    shutil.rmtree(tmp_path / "state")
    client.clock.crash_at = crash
    with pytest.raises(Crash):
        client.volume.tick(client.clock.monotonic())
    client.clock.crash_at = lambda name: None
    client.kill()
    client.open()
    client.until(client.volume.barrier())
    tree = server_tree(client.bench)
    names = [name for name in tree if name.startswith("/f")]
    assert names == [f"/f{at}" for at in range(len(names))]
    for at, name in enumerate(names):
        assert tree[name][1] in (b"%d" % at * 30_000, b"")  # of the last one perhaps the name alone
    client.volume.close()
    client.bench.close()
