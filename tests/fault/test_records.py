"""Records of ended mounts: told for a day, kept while they name what is left, gone after that."""

from __future__ import annotations

import errno
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fsd.host.seam import Host
from fsd.kernel import mountpoint, prune, runtime
from fsd.kernel.runtime import ENDED, Record, RuntimeDir
from fsd.model.errors import NotFound
from fsd.model.limits import RECORDS_KEPT, RECORDS_MAX

DAY = RECORDS_KEPT + 60


class Place:
    """A runtime directory, a fixed one for pointers, and a clock that can be put forward."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.ahead = 0.0
        real = Host()
        host = replace(real, wall_ns=lambda: real.wall_ns() + int(self.ahead * 1e9))
        fixed = base / "fixed"
        for module in (runtime, prune):
            monkeypatch.setattr(module, "fixed_directory", lambda uid: fixed)
        self.fixed = RuntimeDir(fixed, host)
        self.directory = RuntimeDir(base / "run", host)
        self.directory.make()

    def record(self, number: int, state: str = ENDED) -> Record:
        mount_id = f"{number:016x}"
        own = self.base / "state" / mount_id
        own.mkdir(parents=True)
        made = Record(
            mount_id=mount_id,
            file_system_id="fs",
            mountpoint=f"/m/{number}",
            socket=str(self.directory.socket_path(mount_id)),
            state_dir=str(own),
            log="",
            endpoint="",
            remote_path="/",
            runtime_dir=str(self.directory.path),
            state=state,
        )
        self.directory.write(made)
        self.directory.point(made)
        fd = self.directory.lock(mount_id)
        assert fd is not None
        os.close(fd)
        self.directory.socket_path(mount_id).touch()
        return made

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory.path) + os.listdir(self.fixed.path))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize("state", [ENDED, runtime.MOUNTED, runtime.DETACHED])
def test_an_ended_mount_is_told_for_a_day_and_then_gone_with_all_its_files(place: Place, state: str) -> None:
    """Killed ones too: their record never says that they ended."""
    made = place.record(1, state)
    torn = place.directory.path / f".{made.mount_id}.json.0123abcd"
    torn.touch()
    assert prune.prune(place.directory) == 0
    assert place.directory.read(made.mount_id) == made
    place.ahead = DAY
    assert prune.prune(place.directory) == 1
    assert place.names() == []
    with pytest.raises(NotFound):
        place.directory.read(made.mount_id)


@pytest.mark.parametrize("left", ["log.0000000000000001", "refused/1-1", "damaged/log-1-7"])
def test_what_names_something_left_is_kept(place: Place, left: str) -> None:
    made = place.record(1)
    file = Path(made.state_dir, left)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    place.ahead = DAY
    assert prune.prune(place.directory) == 0
    assert place.directory.read(made.mount_id) == made
    file.unlink()
    assert prune.prune(place.directory) == 1


def test_who_lives_or_is_mounted_keeps_its_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lives, listed = place.record(1, runtime.DETACHED), place.record(2, runtime.MOUNTED)
    entry = mountpoint.MountEntry("0:1", Path(listed.mountpoint), mountpoint.FSTYPE, listed.source)
    monkeypatch.setattr(prune, "list_mounts", lambda: [entry])
    held = place.directory.lock(lives.mount_id)
    assert held is not None
    place.ahead = DAY
    assert prune.prune(place.directory) == 0
    os.close(held)
    assert prune.prune(place.directory) == 1
    assert place.directory.read(listed.mount_id) == listed


def test_more_than_a_hundred_are_never_kept(place: Place) -> None:
    made = [place.record(number) for number in range(RECORDS_MAX + 3)]
    for at, record in enumerate(made):
        for file in place.directory.path.glob(f"{record.mount_id}.*"):
            os.utime(file, (1e9 + at, 1e9 + at))
    place.ahead = 1e9 - place.directory.host.wall_ns() / 1e9 + 1000
    assert prune.prune(place.directory) == 3
    assert len(place.directory.records()) == RECORDS_MAX
    assert {record.mount_id for record in made[:3]}.isdisjoint(r.mount_id for r in place.directory.records())


def test_files_of_others_are_left_alone(place: Place) -> None:
    for name in ("notes.txt", "x.json", ".hidden", "0123456789abcdef.other"):
        (place.directory.path / name).touch()
    place.fixed.make()
    place.ahead = DAY
    before = place.names()
    assert prune.prune(place.directory) == 0
    assert place.names() == before


def test_a_lock_is_never_held_on_a_file_that_was_removed(place: Place) -> None:
    """Who opened the lock before `prune` removed it, and locks it after that, would be alone with it."""
    made = place.record(1)
    place.ahead = DAY
    over = threading.Event()

    def prune_on() -> None:
        while not over.is_set():
            prune.prune(place.directory)

    thread = threading.Thread(target=prune_on)
    thread.start()
    try:
        taken = 0
        while taken < 300:
            fd = place.directory.lock(made.mount_id)
            if fd is None:
                continue
            taken += 1
            there = os.stat(place.directory.path / f"{made.mount_id}.lock")
            assert there.st_ino == os.fstat(fd).st_ino
            assert place.directory.alive(made.mount_id)
            os.close(fd)
    finally:
        over.set()
        thread.join(60)


def test_without_a_descriptor_a_record_is_neither_absent_nor_removed(place: Place) -> None:
    """Taken as absent, the place would be mounted twice, or what waits in its state be forgotten."""
    record = place.record(1)
    place.ahead = DAY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    names = place.names()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        # Every number below the limit is taken now.
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for look in (
            lambda: place.directory.load(record.mount_id),
            lambda: place.directory.read(record.mount_id),
            place.directory.records,
            lambda: prune.prune(place.directory),
        ):
            with pytest.raises(OSError, check=lambda exc: exc.errno == errno.EMFILE):
                look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert place.names() == names
    assert place.directory.load(record.mount_id) == record
