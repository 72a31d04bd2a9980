"""What the volume promises, call by call, against the real commit service without a kernel."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree
from support.inproc import InProcess

from fsd.model.errors import NoSpace, NotAuthenticated, PosixError, Unavailable
from fsd.model.limits import MIB
from fsd.model.ops import REFUSED, Content, Outcome
from fsd.vfs.decide import kept
from fsd.vfs.open import open_volume
from fsd.vfs.types import Park
from fsd.wire.messages import Commit, CommitAnswer, make_commit


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(7))
    client.net.faulty = False
    client.options = replace(client.options, segment_size=64 * MIB)
    client.open()
    yield client
    client.volume.close()
    client.bench.close()


def make(box: Client, name: bytes, flags: int = 0) -> tuple[int, int]:
    node, fh = box.call(lambda v: v.create(v.root_ino, name, 0o644, 0, 0, os.O_RDWR | flags))
    return node.ino, fh


def later(box: Client, seconds: float) -> None:
    """Time passes and the network does all it can."""
    for _ in range(int(seconds / 0.5)):
        box.clock.seconds += 0.5
        box.volume.tick(box.clock.seconds)
        box.run_some(50)


def content(box: Client, path: str) -> bytes | None:
    found = server_tree(box.bench).get(path)
    return None if found is None else bytes(found[1])


# fsync.


def test_an_fsync_of_a_small_file_is_one_request(box: Client) -> None:
    _, fh = make(box, b"f")
    box.call(lambda v: v.write(fh, 0, b"x" * 60_000))
    before = len(box.remote.calls)
    box.call(lambda v: v.fsync(fh, False))
    assert box.remote.calls[before:] == ["commit"]
    assert content(box, "/f") == b"x" * 60_000


def test_an_fsync_of_megabytes_is_one_request_and_no_upload(box: Client) -> None:
    _, fh = make(box, b"f")
    data = box.rng.randbytes(3 * MIB)
    box.call(lambda v: v.write(fh, 0, data))
    before = len(box.remote.calls)
    box.call(lambda v: v.fsync(fh, False))
    assert box.remote.calls[before:] == ["commit"]
    assert content(box, "/f") == data


def test_an_fsync_does_not_wait_for_another_files_data(box: Client) -> None:
    """Its own content and the names before it; the other file is there without its bytes."""
    _, slow = make(box, b"slow")
    box.call(lambda v: v.write(slow, 0, b"y" * 1000))
    _, fh = make(box, b"f")
    box.call(lambda v: v.write(fh, 0, b"x"))
    box.call(lambda v: v.fsync(fh, False))
    assert content(box, "/f") == b"x"
    assert content(box, "/slow") == b""


def test_an_fsync_without_a_server_is_told_and_the_next_covers_everything(box: Client) -> None:
    _, fh = make(box, b"f")
    box.volume.core.options = replace(box.options, io_timeout=5.0)
    box.net.cut = 1 << 30
    box.call(lambda v: v.write(fh, 0, b"first"))
    with pytest.raises(Park) as parked:
        box.volume.fsync(fh, False)
    later(box, 7)
    with pytest.raises(Unavailable) as told:
        box.volume.done(parked.value.want)
    assert told.value.errno == errno.EIO
    box.call(lambda v: v.write(fh, 5, b" second"))
    box.net.cut = 0
    later(box, 3)
    box.call(lambda v: v.fsync(fh, False))
    assert content(box, "/f") == b"first second"


def test_an_fsync_of_a_paused_sandbox_waits_its_time_after_it(box: Client) -> None:
    _, fh = make(box, b"f")
    box.volume.core.options = replace(box.options, io_timeout=5.0)
    box.net.cut = 1 << 30
    box.call(lambda v: v.write(fh, 0, b"data"))
    with pytest.raises(Park) as parked:
        box.volume.fsync(fh, False)
    box.volume.extend(600.0)
    later(box, 600)
    assert not box.volume.done(parked.value.want)
    box.net.cut = 0
    later(box, 3)
    assert box.volume.done(parked.value.want)
    assert content(box, "/f") == b"data"


def test_a_revoked_token_is_told_at_once_and_nothing_is_lost(box: Client) -> None:
    _, fh = make(box, b"f")
    box.call(lambda v: v.write(fh, 0, b"data"))
    box.remote.fault = refuse_with(NotAuthenticated("the token is disabled"))
    with pytest.raises(NotAuthenticated) as told:
        box.call(lambda v: v.fsync(fh, False))
    assert told.value.errno == errno.EACCES
    assert box.volume.pending().reason == "the token is disabled"
    box.remote.fault = box.net
    later(box, 40)
    assert content(box, "/f") == b"data"
    assert box.volume.pending().clean


def test_a_full_server_is_told_at_once_and_the_data_goes_when_there_is_room(box: Client) -> None:
    _, fh = make(box, b"f")
    data = box.rng.randbytes(6 * MIB)
    box.call(lambda v: v.write(fh, 0, data))
    box.remote.fault = refuse_with(NoSpace("the server's disk is full"))
    with pytest.raises(NoSpace) as told:
        box.call(lambda v: v.fsync(fh, False))
    assert told.value.errno == errno.ENOSPC
    assert box.volume.pending().reason == "the server's disk is full"
    box.remote.fault = box.net
    later(box, 10)
    assert content(box, "/f") == data
    box.call(lambda v: v.fsync(fh, False))


def refuse_with(error: Exception) -> Callable[[str], str]:
    def fault(route: str) -> str:
        raise error

    return fault


def test_a_synchronous_handle_returns_when_it_is_committed(box: Client) -> None:
    _, fh = make(box, b"f", os.O_DSYNC)
    assert box.call(lambda v: v.write(fh, 0, b"now")) == 3
    assert content(box, "/f") == b"now"


def test_close_waits_where_that_was_asked_for(box: Client) -> None:
    box.volume.core.options = replace(box.options, durability="close")
    _, fh = make(box, b"f")
    box.call(lambda v: v.write(fh, 0, b"now"))
    box.call(lambda v: v.flush(fh))
    assert content(box, "/f") == b"now"


def test_a_barrier_ends_although_writers_go_on(box: Client) -> None:
    _, fh = make(box, b"f")
    box.call(lambda v: v.write(fh, 0, b"a" * 100_000))
    want = box.volume.barrier()
    at = 100_000
    for _ in range(1000):
        box.call(lambda v, o=at: v.write(fh, o, b"b" * 1000))  # type: ignore[misc]
        at += 1000
        box.run_some(1)
        if box.volume.done(want):
            break
    else:
        raise AssertionError("the barrier never ended")
    found = content(box, "/f")
    assert found is not None
    assert found.startswith(b"a" * 100_000)


# What others see meanwhile.


def test_a_file_truncated_and_rewritten_is_never_empty(box: Client) -> None:
    ino = box.put(box.volume.root_ino, b"f", b"old content", sync=True)
    fh = box.call(lambda v: v.open(ino, os.O_WRONLY | os.O_TRUNC))
    later(box, 20)
    assert content(box, "/f") == b"old content"
    box.call(lambda v: v.write(fh, 0, b"new"))
    later(box, 20)
    assert content(box, "/f") == b"old content", "half of the new content was published"
    box.call(lambda v: v.write(fh, 3, b" content"))
    box.call(lambda v: v.flush(fh))
    box.call(lambda v: v.release(fh))
    later(box, 5)
    assert content(box, "/f") == b"new content"


def test_a_file_replaced_by_rename_is_the_old_or_the_whole_new_one(box: Client) -> None:
    root = box.volume.root_ino
    box.put(root, b"f", b"old", sync=True)
    new = box.rng.randbytes(5 * MIB)
    box.put(root, b"tmp", new)
    box.call(lambda v: v.rename(root, b"tmp", root, b"f", 0))
    want = box.volume.barrier()
    seen = set()
    while not box.volume.done(want):
        box.run_some(1)
        found = content(box, "/f")
        assert found in (b"old", new)
        seen.add(len(found or b""))
    assert seen == {3, len(new)}


def test_a_directory_renamed_into_place_has_complete_files(box: Client) -> None:
    root = box.volume.root_ino
    folder = box.call(lambda v: v.mkdir(root, b"build", 0o755, 0, 0)).ino
    new = box.rng.randbytes(2 * MIB)
    box.put(folder, b"big", new)
    box.call(lambda v: v.rename(root, b"build", root, b"release", 0))
    want = box.volume.barrier()
    while not box.volume.done(want):
        box.run_some(1)
        assert content(box, "/release/big") in (None, new)
    assert content(box, "/release/big") == new


def test_what_came_and_went_before_the_flush_never_leaves(box: Client) -> None:
    root = box.volume.root_ino
    for number in range(50):
        box.put(root, b"temporary", b"%d" % number)
        box.call(lambda v: v.unlink(root, b"temporary"))
    assert len(box.volume.core.queue) <= 1, "one operation for the directory's times"
    later(box, 5)
    assert box.remote.calls.count("commit") <= 1
    assert server_tree(box.bench) == {}
    assert box.volume.pending().clean


def test_times_are_not_touched_by_a_flush(box: Client) -> None:
    root = box.volume.root_ino
    ino = box.put(root, b"f", b"data")
    first = box.call(lambda v: v.getattr(ino))
    times = (first.mtime, first.ctime, first.atime)
    later(box, 5)
    assert box.volume.pending().clean
    again = box.call(lambda v: v.getattr(ino))
    assert (again.mtime, again.ctime, again.atime) == times
    attr = box.bench.find("/f")
    assert (attr.mtime, attr.ctime, attr.atime) == times


def test_times_set_while_the_content_is_on_its_way_stay(box: Client) -> None:
    root = box.volume.root_ino
    ino = box.put(root, b"f", box.rng.randbytes(MIB))
    box.clock.seconds += 3
    box.volume.tick(box.clock.seconds)  # frozen; its blocks are being made
    box.call(lambda v: v.setattr(ino, mtime=1234567890123456789))
    later(box, 5)
    assert box.bench.find("/f").mtime == 1234567890123456789


def test_an_open_file_without_a_name_is_read_and_written_and_never_sent(box: Client) -> None:
    root = box.volume.root_ino
    data = box.rng.randbytes(3 * MIB)
    ino = box.put(root, b"f", data, sync=True)
    fh = box.call(lambda v: v.open(ino, os.O_RDWR))
    box.call(lambda v: v.unlink(root, b"f"))
    box.until(box.volume.barrier())
    assert server_tree(box.bench) == {}
    box.call(lambda v: v.write(fh, 100, b"more"))
    assert box.call(lambda v: v.read(fh, 90, 20)) == data[90:100] + b"more" + data[104:110]
    box.call(lambda v: v.fsync(fh, False))
    assert server_tree(box.bench) == {}
    box.call(lambda v: v.release(fh))
    assert box.volume.pending().clean


# Large directories, subtrees, read-only.


def test_a_directory_of_twelve_thousand_entries(box: Client, tmp_path: Path) -> None:
    """More than travels with a lookup: paged, exact, and deleted while it is read."""
    folder = box.call(lambda v: v.mkdir(v.root_ino, b"d", 0o755, 0, 0)).ino
    count = 12_000
    for number in range(count):
        box.call(lambda v, n=number: v.symlink(folder, b"s%05d" % n, b"t", 0, 0))  # type: ignore[misc]
    box.until(box.volume.barrier(), limit=200_000)
    other = Client(tmp_path / "other", box.bench, box.clock, box.rng, "other")
    other.net.faulty = False
    other.open()
    there = other.call(lambda v: v.lookup(v.root_ino, b"d"))
    assert there is not None
    assert other.call(lambda v: v.lookup(there.ino, b"s11999")) is not None
    assert other.call(lambda v: v.lookup(there.ino, b"missing")) is None
    fh = other.call(lambda v: v.opendir(there.ino))
    cookie, seen = 0, 0
    while True:
        rows = other.call(lambda v, c=cookie: v.readdir(fh, c, 500))  # type: ignore[misc]
        if not rows:
            break
        for name, _, cookie in rows:  # noqa: B007 - the last one is used
            other.call(lambda v, n=name: v.unlink(there.ino, n))  # type: ignore[misc]
        seen += len(rows)
    assert seen == count
    other.call(lambda v: v.rmdir(v.root_ino, b"d"))
    other.until(other.volume.barrier(), limit=200_000)
    assert server_tree(box.bench) == {}
    later(other, 1)
    assert len(other.volume.core.nodes.by_ino) < 100, "inodes that nobody needs were kept"
    other.volume.close()


def test_walking_a_cold_tree_takes_a_handful_of_requests(box: Client, tmp_path: Path) -> None:
    """200 directories of 10 files each, below each other and side by side."""
    root = box.volume.root_ino
    for number in range(20):
        top = box.call(lambda v, n=number: v.mkdir(root, b"d%d" % n, 0o755, 0, 0)).ino  # type: ignore[misc]
        for below in range(10):
            here = box.call(lambda v, t=top, n=below: v.mkdir(t, b"s%d" % n, 0o755, 0, 0)).ino  # type: ignore[misc]
            for file in range(10):
                box.call(lambda v, h=here, n=file: v.mknod(h, b"f%d" % n, 0o100644, 0, 0, 0))  # type: ignore[misc]
    box.until(box.volume.barrier(), limit=100_000)
    other = Client(tmp_path / "other", box.bench, box.clock, box.rng, "other")
    other.net.faulty = False
    other.open()
    before = other.remote.calls.count("ask")
    found = 0
    waiting = [other.volume.root_ino]
    while waiting:
        for _, ino in other.listing(waiting.pop()):
            found += 1
            if other.call(lambda v, i=ino: v.getattr(i)).is_dir:  # type: ignore[misc]
                waiting.append(ino)
    assert found == 20 + 200 + 2000
    assert other.remote.calls.count("ask") - before <= 5
    assert_same(server_tree(box.bench), other.view())
    other.volume.close()


def test_a_mount_of_a_subtree_sees_and_changes_only_that(box: Client, tmp_path: Path) -> None:
    root = box.volume.root_ino
    top = box.call(lambda v: v.mkdir(root, b"top", 0o755, 0, 0)).ino
    box.put(top, b"inside", b"in")
    box.put(root, b"outside", b"out")
    box.until(box.volume.barrier())
    sub = Client(tmp_path / "sub", box.bench, box.clock, box.rng, "sub")
    sub.net.faulty = False
    sub.options = replace(sub.options, remote_path=b"/top")
    sub.open()
    assert sub.view().keys() == {"/inside"}
    below = sub.call(lambda v: v.mkdir(v.root_ino, b"d", 0o755, 0, 0)).ino
    with pytest.raises(PosixError) as told:
        sub.call(lambda v: v.rename(v.root_ino, b"d", below, b"x", 0))
    assert told.value.errno == errno.EINVAL
    sub.put(below, b"f", b"deep", sync=True)
    assert content(box, "/top/d/f") == b"deep"
    sub.volume.close()


def test_a_read_only_mount_changes_nothing(box: Client, tmp_path: Path) -> None:
    ino = box.put(box.volume.root_ino, b"f", b"data", sync=True)
    reader = Client(tmp_path / "reader", box.bench, box.clock, box.rng, "reader")
    reader.net.faulty = False
    reader.options = replace(reader.options, read_only=True)
    reader.open()
    root = reader.volume.root_ino
    assert reader.call(lambda v: v.lookup(root, b"f")) is not None
    assert reader.read_all(ino) == b"data"
    changes: list[Callable[[], object]] = [
        lambda: reader.volume.create(root, b"x", 0o644, 0, 0, os.O_RDWR),
        lambda: reader.volume.unlink(root, b"f"),
        lambda: reader.volume.rename(root, b"f", root, b"g", 0),
        lambda: reader.volume.setattr(ino, mode=0o600),
        lambda: reader.volume.setattr(ino, size=0),
        lambda: reader.volume.open(ino, os.O_WRONLY),
        lambda: reader.volume.setxattr(ino, b"user.a", b"b"),
        lambda: reader.volume.link(ino, root, b"h"),
    ]
    for change in changes:
        with pytest.raises(PosixError) as told:
            change()
        assert told.value.errno == errno.EROFS
    reader.volume.close()


# Refusals.


class Refusing(InProcess):
    """A server that refuses the content of one file (a quota, say), and nothing else."""

    victim = 0

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        ops = commit.ops
        refused = [op for op in ops if isinstance(op, Content) and op.ino == self.victim]
        if not refused:
            return super().commit(commit, timeout)
        rest = [op for op in ops if op not in refused]
        answer = super().commit(
            make_commit(commit.session, commit.ticket, rest, commit.pending, commit.blobs), timeout
        )
        told = [Outcome(op.opno, REFUSED, errno.EDQUOT, 0, 0, b"", "the quota is used up") for op in refused]
        return answer._replace(outcomes=tuple(sorted((*answer.outcomes, *told))), next_op=ops[-1].opno + 1)


def test_a_refused_flush_is_told_once_to_each_handle_and_kept(box: Client) -> None:
    ino, fh = make(box, b"victim")
    data = box.rng.randbytes(100_000)
    box.call(lambda v: v.write(fh, 0, b"before"))
    box.call(lambda v: v.fsync(fh, False))
    second = box.call(lambda v: v.open(ino, os.O_RDONLY))
    refusing = Refusing(box.bench.service, box.bench.fs)
    refusing.victim = ino
    box.remote = refusing
    box.call(lambda v: v.write(fh, 0, data))
    with pytest.raises(PosixError) as told:
        box.call(lambda v: v.fsync(fh, False))
    assert told.value.errno == errno.EDQUOT
    with pytest.raises(PosixError) as told:
        box.call(lambda v: v.flush(second))
    assert told.value.errno == errno.EDQUOT
    box.call(lambda v: v.flush(second))
    box.call(lambda v: v.flush(fh))

    # It never blocks what comes after it, counts as pending, and its data is there.
    box.put(box.volume.root_ino, b"other", b"goes on", sync=True)
    assert content(box, "/other") == b"goes on"
    assert content(box, "/victim") == b"before"
    pending = box.volume.pending()
    assert not pending.clean
    assert "refused" in pending.reason
    (entry,) = kept(box.options.state_dir)
    assert entry.path == b"/victim"
    assert entry.errno == errno.EDQUOT
    assert entry.data is not None
    assert entry.data.read_bytes() == data

    # What programs see is what the server has.
    assert box.call(lambda v: v.getattr(ino)).size == 6
    assert box.read_all(ino) == b"before"
    assert_same(server_tree(box.bench), box.view())


def test_what_was_written_after_a_refused_flush_takes_its_changes_along(box: Client) -> None:
    """The quota is raised meanwhile: the next flush brings everything, also the part that was refused."""
    ino, fh = make(box, b"victim")
    box.call(lambda v: v.write(fh, 0, b"before" + bytes(200_000)))
    box.call(lambda v: v.fsync(fh, False))
    refusing = Refusing(box.bench.service, box.bench.fs)
    refusing.victim = ino
    box.remote = refusing
    refused = box.rng.randbytes(90_000)
    box.call(lambda v: v.write(fh, 50_000, refused))
    want = box.volume.barrier()
    while box.volume.core.queue.head() is None or not box.volume.core.queue.sent:
        box.run_some(1)
    box.call(lambda v: v.write(fh, 0, b"after!"))
    box.until(want)
    refusing.victim = 0
    with pytest.raises(PosixError):
        box.call(lambda v: v.fsync(fh, False))
    box.call(lambda v: v.fsync(fh, False))
    assert content(box, "/victim") == b"after!" + bytes(49_994) + refused + bytes(200_006 - 140_000)
    assert len(kept(box.options.state_dir)) == 1


def test_a_recovery_tells_that_it_goes_on(box: Client) -> None:
    """A mount must not be given up while it sends what an earlier run left."""
    for number in range(20):
        _, fh = make(box, b"f%d" % number)
        box.call(lambda v, fh=fh: v.write(fh, 0, b"kept"))
    box.kill()
    told: list[str] = []
    box.volume = open_volume(box.options, box.host, box.remote, box.cache, told=told.append)
    assert told[0] == "reading the log of an earlier run"
    assert "operations of an earlier run to send" in told[1]
    assert told[-1] == "0 operations of an earlier run to send"
    assert content(box, "/f19") == b"kept"
