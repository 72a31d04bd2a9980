"""The disk under the state directory fails, or was made read-only: each call says so at once, what the server
answered waits until it can be logged, and nothing hangs or is lost. A part of a log that the disk cannot read
is a damaged one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.client import Client
from support.clientcase import age, files, finish, settled, take

from fsd.model.errors import DiskFailed, FsdError, UsageError
from fsd.vfs.aside import kept
from fsd.vfs.build import BuildJob
from fsd.vfs.commit import CommitJob
from fsd.vfs.compact import compact
from fsd.vfs.log import OFFSET_MASK, SHIFT
from fsd.vfs.types import Job

WRITES = ("pwritev", "pwrite", "posix_fallocate", "ftruncate", "fdatasync")
Broken = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(name="broken")
def broken_fixture(client: Client, monkeypatch: pytest.MonkeyPatch) -> Broken:
    """`with broken(number)`: every change of the log's files fails with this error."""
    now = [0]

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *rest: Any) -> Any:
            if now[0] and os.readlink(f"/proc/self/fd/{fd}").startswith(str(client.options.state_dir)):
                raise OSError(now[0], os.strerror(now[0]))
            return real(fd, *rest)

        return call

    for name in WRITES:
        monkeypatch.setattr(os, name, failing(name))

    @contextmanager
    def broken(number: int) -> Iterator[None]:
        now[0] = number
        try:
            yield
        finally:
            now[0] = 0

    return broken


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_an_answer_that_cannot_be_logged_waits(client: Client, broken: Broken, number: int) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"before")
    want = client.volume.barrier()
    finish(client, take(client, BuildJob))
    with broken(number):
        finish(client, take(client, CommitJob))
        assert os.strerror(number) in client.volume.pending().reason
        for _ in range(100):
            client.clock.seconds += 0.5
            client.volume.tick(client.clock.seconds)
            client.run_some(10)
        assert not want.finished
        assert os.strerror(number) in client.volume.pending().reason
        assert client.call(lambda v: v.lookup(root, b"a")) is not None
    client.until(want)
    settled(client)
    assert files(client) == {"/a": b"before"}


def test_who_changes_something_is_told_at_once(client: Client, broken: Broken) -> None:
    root = client.volume.root_ino
    node, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, b"x" * 5000))
    want = client.volume.barrier()
    with broken(errno.EIO):
        for change in (
            lambda v: v.write(fh, 0, b"y"),
            lambda v: v.setattr(node.ino, size=0),
            lambda v: v.setattr(node.ino, mode=0o600),
            lambda v: v.mkdir(root, b"d", 0o755, 0, 0),
            lambda v: v.rename(root, b"a", root, b"b", 0),
            lambda v: v.unlink(root, b"a"),
        ):
            with pytest.raises(DiskFailed) as told:
                change(client.volume)
            assert told.value.errno == errno.EIO
            assert str(client.options.state_dir) in told.value.message
        assert client.call(lambda v: v.read(fh, 0, 9000)) == b"x" * 5000
    client.until(want)
    client.call(lambda v: v.write(fh, 5000, b"z"))
    settled(client)
    assert files(client) == {"/a": b"x" * 5000 + b"z"}


def test_killed_meanwhile_the_next_mount_sends_it_again(client: Client, broken: Broken) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"before")
    client.volume.barrier()
    finish(client, take(client, BuildJob))
    with broken(errno.EIO):
        finish(client, take(client, CommitJob))
        client.kill()
    client.open()
    settled(client)
    assert files(client) == {"/a": b"before"}


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_what_it_holds_goes_from_a_copy(client: Client, broken: Broken, tmp_path: Path, number: int) -> None:
    """As whoever tries to mount there is told."""
    client.put(client.volume.root_ino, b"a", b"unsent")
    with broken(number):
        client.kill()
        with pytest.raises(UsageError) as told:
            client.open()
        assert f"cp -a {client.options.state_dir.parent.parent} " in told.value.hint
    client.options = replace(client.options, state_dir=tmp_path / "copy")
    shutil.copytree(told_of(told.value.message), client.options.state_dir)
    client.open()
    settled(client)
    assert files(client) == {"/a": b"unsent"}


def told_of(message: str) -> str:
    """The state directory that a message names."""
    return message.removeprefix("the state directory ").partition(" ")[0]


@pytest.fixture(name="bad")
def bad_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges of log positions that the disk cannot read."""
    broken: list[tuple[int, int]] = []
    pread = os.pread

    def failing(fd: int, size: int, at: int) -> bytes:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.startswith("log."):
            pos = int(name[4:20], 16) << SHIFT | at
            if any(pos < high and pos + size > low for low, high in broken):
                raise OSError(errno.EIO, "the disk cannot read this")
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", failing)
    return broken


def test_an_open_file_without_a_name_that_cannot_be_read_stops_nothing(
    client: Client, bad: list[tuple[int, int]]
) -> None:
    """Its oldest part is to be written again at the log's end."""
    client.volume.core.log._segment_size = 64 << 10
    root = client.volume.root_ino
    node, fh = client.call(lambda v: v.create_unnamed(root, 0o600, 0, 0, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, b"q" * 9000))
    (run,) = node.file().extents
    bad.append((run.pos + 4000, run.pos + 4010))
    for number in range(12):
        client.put(root, b"f%d" % number, os.urandom(20_000), sync=True)
    compact(client.volume.core)
    client.volume.tick(client.clock.seconds)
    with pytest.raises(FsdError) as told:
        client.call(lambda v: v.read(fh, 0, 9000))
    assert told.value.errno == errno.EIO
    client.put(root, b"last", b"x", sync=True)
    client.call(lambda v: v.release(fh))
    settled(client)


@pytest.mark.parametrize("part", ["payload", "header"])
def test_a_log_that_cannot_be_read_in_the_middle_is_a_damaged_one(
    client: Client, bad: list[tuple[int, int]], part: str
) -> None:
    """What comes before is sent, a copy of all that can be read is kept, and the place can be mounted."""
    root = client.volume.root_ino
    client.put(root, b"first", b"1" * 3000)
    client.put(root, b"second", b"2" * 9000)
    second = client.call(lambda v: v.lookup(root, b"second"))
    assert second is not None
    (run,) = second.file().extents
    client.put(root, b"third", b"3" * 3000)
    low = run.pos + 5000 if part == "payload" else run.pos - 20
    client.kill()
    bad.append((low, low + 10))
    client.open()
    assert client.volume.recovered is not None
    (copy,) = kept(client.options.state_dir)
    found = files(client)
    assert found["/first"] == b"1" * 3000
    assert "/third" not in found
    (segment,) = copy.iterdir()
    raw = Path(segment).read_bytes()
    assert b"3" * 3000 in raw, "what lies behind is kept"
    assert b"2" * 4000 in raw
    at = low & OFFSET_MASK
    assert raw[at : at + 10] == bytes(10)
    settled(client)
    age(client)


def test_after_a_sync_that_failed_no_answer_before_it_frees_anything(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed write-back once: the next sync says that all is well. What was not durable
    then goes with what it frees, not before."""
    log = client.volume.core.log
    log._segment_size = 32 << 10
    root = client.volume.root_ino
    lost: set[int] = set()
    real = os.fdatasync

    def sync(fd: int) -> None:
        number = int(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))[4:20], 16)
        if not lost:
            lost.add(number)
            raise OSError(errno.EIO, "the write-back failed")
        real(fd)

    def run(job: Job) -> object:
        try:
            return job.run(client.remote, client.cache)
        except Exception as exc:  # noqa: BLE001 - as the daemon's workers do
            return exc

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(client, "run", run)
    freed_behind: list[tuple[int, list[int]]] = []
    free = log.free_before

    def free_before(pos: int) -> None:
        free(pos)
        freed_behind.append((log.oldest, sorted(n for n in lost if n in log._fds)))

    monkeypatch.setattr(log, "free_before", free_before)
    for number in range(20):
        client.put(root, b"f%d" % number, os.urandom(9000), sync=True)
        client.run_some(20)
    settled(client)
    assert lost, "no sync failed"
    assert log.freed > 0, "nothing was ever freed again"
    assert all(not left for _, left in freed_behind), "something was freed, and its reason perhaps lost"


def test_what_a_failed_sync_covered_frees_nothing_that_stays_behind_it(client: Client) -> None:
    """The second segment's answers, perhaps lost, are why the first is not needed; it is needed itself."""
    log = client.volume.core.log
    first = log.oldest
    for _ in range(2):
        log.rotate(client.volume.core.state())
    needed = [(first + n) << SHIFT for n in range(3)]
    for failed in (True, False):
        job = log.begin_sync()
        job.run(client.remote, client.cache)
        log.end_sync(job, failed=failed)
        assert log.freeable(needed[1]) is log.freeable(needed[2]) is False
    log.rotate(client.volume.core.state())
    assert not log.freeable(needed[2])
    assert log.freeable((first + 3) << SHIFT)
    log.free_before((first + 3) << SHIFT)
    assert log.oldest == first + 3
    log.rotate(client.volume.core.state())
    assert log.freeable((first + 4) << SHIFT)


def test_a_sync_of_whoever_waits_for_it_frees_nothing_either(client: Client, broken: Broken) -> None:
    """An unmount's, or a new session's: the kernel tells that one, and the job that all is well."""
    core = client.volume.core
    log, first = core.log, core.log.oldest
    for _ in range(2):
        log.rotate(core.state())
    core.free_to = (first + 2) << SHIFT
    core.sync_job = job = log.begin_sync()
    with broken(errno.EIO), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        client.volume.core.log.sync()
    job.run(client.remote, client.cache)
    core.synced(job, None)
    assert log.oldest == first
    log.sync()
    assert not log.freeable((first + 2) << SHIFT)
    log.rotate(core.state())
    assert log.freeable((first + 3) << SHIFT)


def test_a_sync_covers_what_a_job_is_only_about_to(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmount must not return before what an earlier, slow one of many segments is at."""
    log = client.volume.core.log
    for _ in range(2):
        log.rotate(client.volume.core.state())
    job = log.begin_sync()
    assert len(job.segments) == 2
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    client.volume.sync()
    assert len(synced) == 2
    synced.clear()
    job.run(client.remote, client.cache)
    log.end_sync(job, failed=False)
    synced.clear()
    log.sync()
    assert synced == []


def test_what_is_left_of_a_range_of_the_log(client: Client, bad: list[tuple[int, int]]) -> None:
    root = client.volume.root_ino
    node, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    data = os.urandom(20_000)
    client.call(lambda v: v.write(fh, 0, data))
    (run,) = node.file().extents
    log = client.volume.core.log
    assert log.rest(run.pos, 20_000) == data
    page = (run.pos + 9000) & ~4095
    bad.append((page + 5, page + 6))
    lost = page - run.pos
    assert log.rest(run.pos, 20_000) == data[:lost] + bytes(4096) + data[lost + 4096 :]
    assert log.rest((log.oldest - 1) << SHIFT, 10) == bytes(10)
    bad.clear()
    client.call(lambda v: v.release(fh))


def test_a_new_session_is_not_used_before_it_is_durable(client: Client, broken: Broken) -> None:
    """The server has forgotten the session: what is queued goes under another."""
    root = client.volume.root_ino
    client.put(root, b"a", b"before")
    client.bench.service.db.write(lambda tx: tx.execute("DELETE FROM session"))
    want = client.volume.barrier()
    finish(client, take(client, BuildJob))
    with broken(errno.EIO):
        for _ in range(100):
            client.clock.seconds += 0.5
            client.volume.tick(client.clock.seconds)
            client.run_some(10)
        assert files(client) == {}
        assert "fails" in client.volume.pending().reason
    client.until(want)
    assert files(client) == {"/a": b"before"}
    settled(client)


def test_a_segment_that_could_not_be_deleted_goes_before_those_behind_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was read-only for a moment. A recovery reads nothing behind a gap in the log."""
    core, root = client.volume.core, client.volume.root_ino
    log, first = core.log, core.log.oldest
    for number in range(3):
        client.put(root, b"f%d" % number, b"x", sync=True)
        log.rotate(core.state())
    real, failing = os.unlink, [True]

    def unlink(path: Any, **more: Any) -> None:
        if failing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    for behind in (1, 2):
        core.free_to, core.sync_job = (first + behind) << SHIFT, log.begin_sync()
        core.sync_job.run(client.remote, client.cache)
        core.synced(core.sync_job, None)
        if failing:
            assert log.oldest == first
            assert os.strerror(errno.EROFS) in core.reason
            failing.clear()
    assert log.segments(client.options.state_dir)[0] == log.oldest == first + 2
    client.put(root, b"late", b"late")
    client.kill()
    client.open()
    settled(client)
    assert files(client) == {"/f0": b"x", "/f1": b"x", "/f2": b"x", "/late": b"late"}
    assert not kept(client.options.state_dir)
