"""A power cut takes the end of the log after the server had committed what was in it.

The disk is a copy taken earlier, the boot id another one. What the server has must stay as it is: no conflict
copies of a mount with itself, nothing older over something newer, nothing that was removed under its own
name. What only the lost end told apart comes beside, as NAME.recovered-… (or as the server names it).
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree
from support.world import World

BESIDE = (".recovered-", ".conflict-", "/.fsd-lost")
Shown = dict[str, tuple[Any, ...]]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    made = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    made.net.faulty = False
    made.open()
    return made


def lose_tail(client: Client, disk: Path) -> None:
    """Power off, and on again with the disk as it was when the copy was taken."""
    client.waiting = []
    client.kill()
    shutil.rmtree(client.options.state_dir)
    shutil.copytree(disk, client.options.state_dir)
    client.clock.boot = f"after {client.clock.boot}"
    client.open()


def contents(tree: Shown) -> Shown:
    """Names, kinds, modes and bytes; times of directories move when something comes beside."""
    return {path: row[:3] if row[0] == "file" else row[:2] for path, row in tree.items()}


def named(tree: Shown) -> Shown:
    return {path: row for path, row in contents(tree).items() if not any(mark in path for mark in BESIDE)}


def drain(client: Client) -> None:
    client.until(client.volume.barrier())


def test_what_was_committed_after_the_copy_stays_and_makes_no_conflict(
    client: Client, tmp_path: Path
) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"one", sync=True)
    client.snapshot_disk(tmp_path / "disk")
    client.put(root, b"a", b"two, longer", offset=0, sync=True)
    client.put(root, b"b", b"new", sync=True)
    client.call(lambda v: v.rename(root, b"b", root, b"c", 0))
    client.call(lambda v: v.unlink(root, b"a"))
    client.put(root, b"a", b"another", sync=True)
    drain(client)
    before = contents(server_tree(client.bench))
    lose_tail(client, tmp_path / "disk")
    assert contents(server_tree(client.bench)) == before


def test_content_in_the_log_that_was_sent_and_changed_since_is_kept_as_the_server_has_it(
    client: Client, tmp_path: Path
) -> None:
    root = client.volume.root_ino
    client.put(root, b"f", b"first")
    client.snapshot_disk(tmp_path / "disk")
    drain(client)
    client.put(root, b"f", b"second", truncate=True, offset=0)
    drain(client)
    lose_tail(client, tmp_path / "disk")
    assert named(server_tree(client.bench)) == contents(server_tree(client.bench))
    assert server_tree(client.bench)["/f"][1] == b"second"


def test_changes_in_the_log_behind_what_was_sent_go_on_from_it(client: Client, tmp_path: Path) -> None:
    root = client.volume.root_ino
    client.put(root, b"f", b"sent", sync=True)
    client.put(root, b"f", b" and more")
    client.snapshot_disk(tmp_path / "disk")
    lose_tail(client, tmp_path / "disk")
    assert contents(server_tree(client.bench)) == {"/f": ("file", b"sent and more", 0o644)}


def test_a_reserved_content_operation_whose_making_is_lost(client: Client, tmp_path: Path) -> None:
    root = client.volume.root_ino
    client.put(root, b"f", b"base", sync=True)
    client.put(root, b"f", b" changed")
    client.call(lambda v: v.rename(root, b"f", root, b"g", 0))
    client.snapshot_disk(tmp_path / "disk")
    drain(client)
    lose_tail(client, tmp_path / "disk")
    assert contents(server_tree(client.bench)) == {"/g": ("file", b"base changed", 0o644)}


def test_what_was_made_and_removed_unsent_comes_beside_and_nothing_conflicts(
    client: Client, tmp_path: Path
) -> None:
    root = client.volume.root_ino
    client.put(root, b"x", b"made and removed")
    client.put(root, b"y", b"stays")
    client.snapshot_disk(tmp_path / "disk")
    client.call(lambda v: v.unlink(root, b"x"))
    client.put(root, b"z", b"later", sync=True)
    drain(client)
    lose_tail(client, tmp_path / "disk")
    found = server_tree(client.bench)
    assert named(found) == {"/y": ("file", b"stays", 0o644), "/z": ("file", b"later", 0o644)}
    (beside,) = set(found) - {"/y", "/z"}
    assert beside.startswith("/x.recovered-") and found[beside][1] == b"made and removed"


def test_it_comes_beside_also_behind_a_directory_whose_times_it_moved(client: Client, tmp_path: Path) -> None:
    """Random day 21154: its removal changed an operation that was queued before it, so that was sent in
    another form than the log has."""
    root = client.volume.root_ino
    directory = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
    client.put(directory, b"temporary", b"")
    client.call(lambda v: v.unlink(directory, b"temporary"))
    client.call(lambda v: v.setattr(directory, mode=0o700))
    client.put(directory, b"x", b"made and removed")
    client.snapshot_disk(tmp_path / "disk")
    client.call(lambda v: v.unlink(directory, b"x"))
    client.call(lambda v: v.setattr(directory, mode=0o750))
    drain(client)
    client.put(directory, b"later", b"stays", sync=True)
    drain(client)
    lose_tail(client, tmp_path / "disk")
    found = server_tree(client.bench)
    assert named(found) == {"/d": ("dir", 0o750), "/d/later": ("file", b"stays", 0o644)}
    (beside,) = set(found) - {"/d", "/d/later"}
    assert beside.startswith("/d/x.recovered-") and found[beside][1] == b"made and removed"


@pytest.mark.parametrize("seed", range(25))
def test_random_days_cut_at_random(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    world.net.faulty = False
    for _ in range(world.rng.randrange(10, 60)):
        world.step()
    world.snapshot_disk(tmp_path / "disk")
    for _ in range(world.rng.randrange(5, 60)):
        world.step()
    world.handles.clear()
    drain(world)
    before = contents(server_tree(world.bench))
    lose_tail(world, tmp_path / "disk")
    after = server_tree(world.bench)
    assert named(after) == {p: row for p, row in before.items() if not any(mark in p for mark in BESIDE)}
    world.close()


def emptied(client: Client, name: bytes) -> int:
    """The first half of a replacement; the handle."""
    node = client.call(lambda v: v.lookup(v.root_ino, name))
    assert node is not None
    return client.call(lambda v: v.open(node.ino, os.O_WRONLY | os.O_TRUNC))


@pytest.mark.parametrize("sent", [True, False])
def test_a_replacement_whose_second_half_is_lost_leaves_the_old_content(
    client: Client, tmp_path: Path, sent: bool
) -> None:
    root = client.volume.root_ino
    client.put(root, b"f", b"old content", sync=sent)
    fh = emptied(client, b"f")
    client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    client.snapshot_disk(tmp_path / "disk")
    client.call(lambda v: v.write(fh, 0, b"new content"))
    client.call(lambda v: v.release(fh))
    lose_tail(client, tmp_path / "disk")
    assert contents(server_tree(client.bench))["/f"] == ("file", b"old content", 0o644)
    assert "/d" in server_tree(client.bench)
    client.put(root, b"f", b"newest", offset=0, truncate=True, sync=True)
    assert contents(server_tree(client.bench))["/f"] == ("file", b"newest", 0o644)


@pytest.mark.parametrize("how", ["synced", "the log is synced", "long before the end", "no power cut"])
def test_a_file_that_was_emptied_on_purpose_is_empty(client: Client, tmp_path: Path, how: str) -> None:
    root = client.volume.root_ino
    client.put(root, b"f", b"old content", sync=True)
    fh = emptied(client, b"f")
    if how == "synced":
        client.call(lambda v: v.fsync(fh, False))
    client.call(lambda v: v.release(fh))
    if how == "the log is synced":
        client.call(lambda v: v.sync())  # as an unmount does
    if how == "long before the end":
        client.clock.wall += 10_000_000_000
        client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    client.snapshot_disk(tmp_path / "disk")
    if how == "no power cut":
        client.waiting = []
        client.kill()
        client.open()
    else:
        lose_tail(client, tmp_path / "disk")
    assert contents(server_tree(client.bench))["/f"] == ("file", b"", 0o644)
