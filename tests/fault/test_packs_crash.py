"""The server dies at every durable step of a pack, and at random moments: what was acknowledged is there."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import packstore

from fsd.blobs.directory import DirectoryStore
from fsd.host.seam import Host
from fsd.model.errors import IntegrityError
from fsd.wire.frame import Blob, open_blob

UPLOADS = 6
CHILD = [sys.executable, packstore.__file__]

POINTS = [
    *(("pack.written", 1), ("pack.synced", 3), ("pack.renamed", 3), ("pack.durable", 1)),
    # 1: the filesystem's row, 2: numbers of packs, then one an upload.
    *(("db.commit", 2), ("db.commit", 3), ("db.committed", 2), ("db.committed", UPLOADS + 2)),
    *(
        pytest.param(point, count, marks=pytest.mark.long)
        for point, count in (
            *(("pack.written", 3), ("pack.synced", 1), ("pack.renamed", 1), ("pack.durable", 3)),
            *(("db.commit", 4), ("db.commit", UPLOADS + 2), ("db.committed", 3), ("db.committed", 4)),
        )
    ),
]


@pytest.mark.parametrize(("point", "count"), POINTS)
def test_killed_at_each_durable_step_of_a_pack(tmp_path: Path, point: str, count: int) -> None:
    done = subprocess.run(
        [*CHILD, str(tmp_path), point, str(count), str(UPLOADS)],
        timeout=60,
        check=False,
        stdout=subprocess.PIPE,
    )
    assert done.returncode == -signal.SIGKILL, "the point was never passed"
    acknowledged = {int(line) for line in done.stdout.split()}
    assert len(acknowledged) < UPLOADS
    at = packstore.open_packs(tmp_path, Host())
    packstore.check(at, UPLOADS, acknowledged)
    # The same uploads come again, as from a client that got no answer.
    for number in range(UPLOADS):
        at.packs.store(at.fs, packstore.FS_NAME, packstore.upload(number))
    assert packstore.check(at, UPLOADS, set(range(UPLOADS))) == UPLOADS
    at.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Four rounds on one directory; each is killed after a random number of acknowledgements."""
    rng = random.Random(seed)
    uploads = 60
    acknowledged: set[int] = set()
    for _ in range(4):
        child = subprocess.Popen([*CHILD, str(tmp_path), "", "1", str(uploads)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        wanted = rng.randint(5, uploads - 5)
        for line in child.stdout:
            acknowledged.add(int(line))
            wanted -= 1
            if not wanted:
                break
        os.kill(child.pid, signal.SIGKILL)
        acknowledged |= {int(line) for line in child.stdout.read().split()}
        child.stdout.close()
        # It may have come to its end between its last word and the signal.
        assert child.wait(60) in (-signal.SIGKILL, 0)
        at = packstore.open_packs(tmp_path, Host())
        packstore.check(at, uploads, acknowledged)
        at.close()
    assert acknowledged


def test_unfinished_objects_of_a_crash_are_removed_later(tmp_path: Path) -> None:
    subprocess.run(
        [*CHILD, str(tmp_path), "pack.synced", "1", "2"], timeout=60, check=False, capture_output=True
    )
    [left] = (tmp_path / ".unfinished").iterdir()
    packstore.open_packs(tmp_path, Host()).close()
    assert left.exists(), "it may belong to another server that is just writing it"
    hours = 2 * 3600 * 10**9
    packstore.open_packs(tmp_path, Host(wall_ns=lambda: Host().wall_ns() + hours)).close()
    assert not left.exists()


def test_a_flipped_byte_reaches_nobody(tmp_path: Path) -> None:
    at = packstore.open_packs(tmp_path, Host())
    at.packs.store(at.fs, packstore.FS_NAME, packstore.upload(1))
    [listed] = at.store.list("packs/")
    path = tmp_path / listed.key
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    blobs = packstore.upload(1)
    found = at.packs.read(at.fs, [blob.hash for blob in blobs])
    bad = [blob for blob in blobs if not intact(found[blob.hash])]
    assert len(bad) == 1
    with pytest.raises(IntegrityError, match=bad[0].hash.hex()):
        open_blob(found[bad[0].hash])
    at.close()


def intact(blob: Blob) -> bool:
    return hashlib.sha256(blob.stored).digest() == blob.hash


def test_an_object_is_synced_before_its_name_and_its_name_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves the page cache whole, so the order of the syncs is looked at itself."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(fd: int) -> None:
        steps.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def seen_rename(old: Path, new: Path) -> None:
        steps.append("rename")
        rename(old, new)

    at = packstore.open_packs(tmp_path, Host())
    at.packs.store(at.fs, packstore.FS_NAME, packstore.upload(1))  # makes the directories
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    at.packs.store(at.fs, packstore.FS_NAME, packstore.upload(3))
    monkeypatch.undo()
    at.close()
    assert steps == ["file", "rename", "directory"]


def test_directories_another_has_just_made_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a directory is there does not say that its entry survives a power cut."""
    synced: list[str] = []
    fsync = os.fsync

    def seen(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    root = tmp_path / "a" / "b"
    store = DirectoryStore(root, Host())
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    (root / "packs" / "fs_x").mkdir(parents=True)  # by another thread, before its sync
    del synced[:]
    store.put("packs/fs_x/1", [b"1"])
    assert synced[:2] == [str(root), str(root / "packs")]
    del synced[:]
    store.put("packs/fs_x/2", [b"2"])
    assert str(root / "packs") not in synced
    for number in (1, 2):
        store.delete(f"packs/fs_x/{number}")
    (root / "packs" / "fs_x").rmdir()  # by somebody who tidies up
    store.put("packs/fs_x/3", [b"3"])
    assert store.get("packs/fs_x/3", 0, 1) == b"3"
