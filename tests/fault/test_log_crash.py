"""The client's log when the process or the machine ends: at every durable step, at every byte, mid-page."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree
from support.clientcase import files

from fsd.model.errors import Busy, DiskFailed, FormatTooNew, NotFound, UsageError
from fsd.model.limits import MIB
from fsd.vfs.aside import kept
from fsd.vfs.log import STATE, Log
from fsd.vfs.open import open_volume
from fsd.vfs.records import FORMAT, State, packb
from fsd.wire.messages import Commit, CommitAnswer


class Died(BaseException):
    """The process ends here; nothing after it runs."""


def make(directory: Path, seed: int = 1, name: str = "mount", bench: Bench | None = None) -> Client:
    client = Client(directory / name, bench or Bench(directory / "server"), Clock(), random.Random(seed))
    client.net.faulty = False
    return client


def put(client: Client, name: bytes, data: bytes, *, sync: bool = False) -> None:
    client.put(client.volume.root_ino, name, data, offset=0, truncate=True, sync=sync)


# The process dies.


def scenario(client: Client, done: list[str]) -> None:
    """A run with every kind of durable step; `done` says what was acknowledged."""
    client.open()
    put(client, b"a", b"one")
    done.append("a=one")
    put(client, b"b", b"two", sync=True)
    done.append("b=two")
    root = client.volume.root_ino
    client.call(lambda v: v.rename(root, b"a", root, b"c", 0))
    done.append("a->c")
    client.kill()
    client.open()  # recovery: retires a log
    put(client, b"c", b"three")
    done.append("c=three")
    client.until(client.volume.barrier())
    put(client, b"d", b"four" * 1000)
    done.append("d=four")


def expected(done: list[str]) -> dict[str, bytes]:
    tree: dict[str, bytes] = {}
    for step in done:
        if step == "a->c":
            tree["/c"] = tree.pop("/a")
        else:
            name, _, what = step.partition("=")
            tree["/" + name] = b"four" * 1000 if what == "four" else what.encode()
    return tree


def test_the_process_dies_at_every_durable_step(tmp_path: Path) -> None:
    """What was acknowledged is there after the next mount; a step that was under way is there or not."""
    bench = Bench(tmp_path / "server")
    passed: list[str] = []
    at = 0
    while True:
        bench.new_fs()
        client = make(tmp_path, name=f"mount{at}", bench=bench)
        left = [at]

        def crash(name: str, left: list[int] = left) -> None:
            if left[0] == 0:
                left[0] = -1
                passed.append(name)
                raise Died(name)
            left[0] -= 1

        client.clock.crash_at = crash
        done: list[str] = []
        try:
            scenario(client, done)
        except Died:
            died = True
        else:
            died = False
        client.clock.crash_at = lambda name: None
        end_process(client)
        client.open()
        client.until(client.volume.barrier())
        before, after = expected(done), files(client)
        allowed = [before]
        if len(done) < len(FULL):
            allowed.append(expected(FULL[: len(done) + 1]))
            # Made and not yet written: two calls.
            allowed.append({**before, "/" + FULL[len(done)][0]: b""})
        assert after in allowed, f"died at {passed[-1] if died else 'nothing'}, after {done}"
        client.volume.close()
        bench.audit()
        if not died:
            break
        at += 1
    assert {
        "log.segment",
        "log.sync",
        "log.synced",
        "log.retired.written",
        "log.erased",
        "log.forgotten",
    } <= set(passed)
    bench.close()


FULL = ["a=one", "b=two", "a->c", "c=three", "d=four"]


def end_process(client: Client) -> None:
    """What the kernel does when a process ends: its files are closed, its locks are gone."""
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path.startswith(str(client.options.state_dir) + "/"):
            os.close(int(name))


# The tail is torn.


def test_a_tail_torn_at_every_byte_is_cut_at_the_last_whole_record(tmp_path: Path) -> None:
    client = make(tmp_path)
    client.open()
    put(client, b"kept", b"before", sync=True)
    root = client.volume.root_ino
    client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    start = client.volume.core.log.tail & 0xFFFFFFFF
    client.call(lambda v: v.mkdir(root, b"last", 0o755, 0, 0))
    end = client.volume.core.log.tail & 0xFFFFFFFF
    assert end - start > 40
    segment = sorted(p for p in client.options.state_dir.iterdir() if p.name.startswith("log."))[-1]
    image = tmp_path / "image"
    client.snapshot_disk(image)
    whole = segment.read_bytes()[:end]
    client.kill()
    replays: list[int] = []
    for cut in range(start, end + 1):
        for tail in (b"", bytes(end - cut + 64), b"\xff" * (end - cut)):
            place = tmp_path / "torn"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(image, place)
            (place / segment.name).write_bytes(whole[:cut] + tail)
            log = Log.reopen(place, client.host)
            replays.append(sum(1 for record in log.scan() if record.whole))
            log.abandon()
    assert len(set(replays)) == 2, "the last record is there whole or not at all"
    assert replays.count(max(replays)) == 3
    client.bench.close()


def test_a_torn_log_is_recovered_without_its_last_record(tmp_path: Path) -> None:
    client = make(tmp_path)
    client.open()
    root = client.volume.root_ino
    client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    client.call(lambda v: v.mkdir(root, b"last", 0o755, 0, 0))
    end = client.volume.core.log.tail & 0xFFFFFFFF
    segment = sorted(p for p in client.options.state_dir.iterdir() if p.name.startswith("log."))[-1]
    client.kill()
    with segment.open("r+b") as file:
        file.truncate(end - 1)
    client.open()
    assert set(server_tree(client.bench)) == {"/d"}
    client.volume.close()
    client.bench.close()


def written(tmp_path: Path, size: int) -> tuple[Client, Path, int, int]:
    """A client that was killed behind a write of `size` bytes; its segment, where that record is and ends."""
    client = make(tmp_path)
    client.options = replace(client.options, segment_size=64 * MIB)
    client.open()
    root = client.volume.root_ino
    put(client, b"kept", b"before", sync=True)
    _, fh = client.call(lambda v: v.create(root, b"last", 0o644, 0, 0, os.O_RDWR))
    start = client.volume.core.log.tail & 0xFFFFFFFF
    client.call(lambda v: v.write(fh, 0, b"\x55" * size))
    end = client.volume.core.log.tail & 0xFFFFFFFF
    segment = sorted(p for p in client.options.state_dir.iterdir() if p.name.startswith("log."))[-1]
    client.waiting.clear()
    client.kill()
    return client, segment, start, end


def copies(client: Client) -> list[Path]:
    return kept(client.options.state_dir)


@pytest.mark.parametrize("size", [10, 5000, 100_000])
@pytest.mark.parametrize("where", ["header", "first byte", "middle", "last byte"])
def test_a_damaged_last_record_is_told_from_a_torn_one(tmp_path: Path, size: int, where: str) -> None:
    """It was answered, so it was written whole: other bytes there are the disk's. A copy is kept and said."""
    client, segment, start, end = written(tmp_path, size)
    at = {
        "header": start + 20,
        "first byte": start + 49,
        "middle": (start + 40 + end) // 2,
        "last byte": end - 1,
    }
    data = bytearray(segment.read_bytes())
    data[at[where]] ^= 0x10
    segment.write_bytes(data)
    client.open()
    assert len(copies(client)) == 1
    assert files(client)["/kept"] == b"before"
    client.volume.close()
    client.bench.close()


@pytest.mark.parametrize("size", [10, 5000, 100_000])
def test_a_torn_last_record_is_no_damage(tmp_path: Path, size: int) -> None:
    """Whole pages of it are there, in order, and the rest is as it was allocated."""
    client, segment, start, end = written(tmp_path, size)
    whole = segment.read_bytes()
    assert not any(whole[end:])
    image = tmp_path / "image"
    client.snapshot_disk(image)
    for page in range(start // 4096, (end - 1) // 4096 + 1):
        torn = max(start, page * 4096)
        shutil.rmtree(client.options.state_dir)
        shutil.copytree(image, client.options.state_dir)
        segment.write_bytes(whole[:torn] + bytes(len(whole) - torn))
        log = Log.reopen(client.options.state_dir, client.host)
        assert sum(1 for _ in log.scan()) > 0
        assert not log.end_damaged(), torn
        log.abandon()
    client.open()
    assert copies(client) == []
    client.volume.close()
    client.bench.close()


def test_a_write_that_failed_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(tmp_path)
    client.options = replace(client.options, segment_size=64 * MIB)
    client.open()
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"f", 0o644, 0, 0, os.O_RDWR))
    real = os.pwritev

    def half(fd: int, buffers: list[bytes], at: int) -> int:
        os.pwrite(fd, b"".join(buffers)[:50_000], at)
        raise OSError(errno.EIO, "the test's disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        with pytest.raises(DiskFailed, match="the test's disk"):
            client.volume.write(fh, 0, b"\x55" * 100_000)
    assert os.pwritev is real
    client.call(lambda v: v.write(fh, 0, b"short"))
    client.kill()
    client.open()
    assert copies(client) == []
    assert files(client)["/f"] == b"short"
    client.volume.close()
    client.bench.close()


# The machine loses power.


class PowerDisk:
    """Knows what of the log was synced, and can lose what was not."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.synced: dict[str, int] = {}
        client.clock.crash_at = self.passed

    def passed(self, name: str) -> None:
        if name == "log.synced":
            core = self.client.volume.core if hasattr(self.client, "volume") else None
            for path in self.client.options.state_dir.glob("log.*"):
                self.synced[path.name] = path.stat().st_size
            if core is not None and core.log._begun:
                last = f"log.{core.log._segment:016x}"
                self.synced[last] = core.log._at

    def cut(self, rng: random.Random) -> None:
        """Power off: of the pages written since the last sync any may be missing, and the size too."""
        self.client.kill()
        self.client.clock.boot = f"boot-{rng.random()}"
        for path in self.client.options.state_dir.glob("log.*"):
            data = bytearray(path.read_bytes())
            safe = self.synced.get(path.name, 0)
            end = len(bytes(data).rstrip(b"\0"))
            for page in range(safe // 4096, end // 4096 + 1):
                if rng.random() < 0.3:
                    low = max(safe, page * 4096)
                    data[low : (page + 1) * 4096] = bytes(max(0, min(len(data), (page + 1) * 4096) - low))
            if rng.random() < 0.4 and end > safe:
                del data[rng.randrange(safe, end) :]
            path.write_bytes(data)


def open_and_die(client: Client, rng: random.Random) -> None:
    """The recovery ends as well, at one of its commits, before or after the server did it."""
    left = rng.randrange(3)
    commit = client.remote.commit

    def dying(sent: Commit, timeout: float) -> CommitAnswer:
        nonlocal left
        left -= 1
        if left >= 0:
            return commit(sent, timeout)
        if rng.random() < 0.5:
            commit(sent, timeout)
        raise Died("commit")

    client.remote.commit = dying  # type: ignore[method-assign, assignment]
    try:
        client.open()
        client.kill()
    except Died:
        end_process(client)
    finally:
        client.remote.commit = commit  # type: ignore[method-assign]


def power_run(directory: Path, seed: int) -> tuple[int, int]:
    """Random writes and fsyncs, then a power cut. Returns (files at stake, files that went back)."""
    rng = random.Random(seed)
    client = make(directory, seed)
    client.open()
    disk = PowerDisk(client)
    disk.passed("log.synced")
    versions: dict[bytes, list[bytes]] = {}
    synced: dict[bytes, int] = {}
    for _ in range(rng.randrange(10, 60)):
        name = rng.choice((b"f0", b"f1", b"f2", b"f3"))
        now = bytearray(versions.setdefault(name, [b""])[-1])
        offset = rng.choice((0, len(now)))
        data = rng.randbytes(8) * rng.choice((1, 100, 2000))
        sync = rng.random() < 0.3
        client.put(client.volume.root_ino, name, data, offset=offset, sync=sync)
        now[offset : offset + len(data)] = data
        versions[name].append(bytes(now))
        if sync:
            synced[name] = len(versions[name]) - 1
        client.clock.seconds += rng.random()
        client.volume.tick(client.clock.seconds)
        client.run_some(rng.randrange(5))
    disk.cut(rng)
    if seed % 2:
        open_and_die(client, random.Random(seed))
    client.open()
    client.until(client.volume.barrier())
    tree = files(client)
    back = 0
    for name, past in versions.items():
        path = "/" + name.decode()
        least = synced.get(name, -1)
        if path not in tree:
            assert least < 0, f"seed {seed}: fsynced {path} is gone"
            back += 1
            continue
        assert tree[path] in past[max(0, least) :], f"seed {seed}: {path} is torn, or older than its fsync"
        back += tree[path] != past[-1]
    conflicts = [path for path in tree if ".conflict" in path]
    assert not conflicts, f"seed {seed}: a lost tail makes no conflicts"
    client.volume.close()
    client.bench.close()
    return len(versions), back


@pytest.mark.parametrize("start", [0, pytest.param(20, marks=pytest.mark.long)])
def test_a_power_cut_loses_at_most_what_was_not_synced_and_tears_nothing(tmp_path: Path, start: int) -> None:
    stake = back = 0
    for seed in range(start, start + 20):
        at, lost = power_run(tmp_path / str(seed), seed)
        stake, back = stake + at, back + lost
    assert stake > 20
    assert back > 0, "no cut took anything: the test proves nothing"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_power_cuts_for_long(tmp_path: Path) -> None:
    went_back = sum(power_run(tmp_path / str(seed), seed)[1] for seed in range(1000, 1300))
    assert went_back > 0, "no cut took anything: the test proves nothing"


# State directories that are not what they should be.


def altered(tmp_path: Path, change: Callable[[State], State]) -> Client:
    client = make(tmp_path)
    client.open()
    client.call(lambda v: v.mkdir(v.root_ino, b"d", 0o755, 0, 0))
    core = client.volume.core
    core.record(
        STATE, 0, 0, [packb(change(State(1, core.session, core.ticket, 0, 1, (), "boot-0", "", "m")))]
    )
    client.kill()
    return client


def test_a_log_of_a_newer_format_is_refused_and_kept(tmp_path: Path) -> None:
    client = altered(tmp_path, lambda state: state._replace(format=FORMAT + 1))
    with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}"):
        client.open()
    assert Log.segments(client.options.state_dir)
    client.bench.close()


def test_a_state_directory_of_another_filesystem_is_refused_and_kept(tmp_path: Path) -> None:
    client = altered(tmp_path, lambda state: state._replace(file_system="fs_other"))
    client.options = replace(client.options, file_system="fs_mine")
    with pytest.raises(UsageError, match="belongs to filesystem"):
        client.open()
    assert Log.segments(client.options.state_dir)
    client.bench.close()


def test_a_subtree_that_is_not_there_is_refused(tmp_path: Path) -> None:
    client = make(tmp_path)
    client.options = replace(client.options, remote_path=b"/nowhere")
    with pytest.raises(NotFound):
        client.open()
    client.bench.close()


def test_a_second_daemon_on_the_same_state_is_refused(tmp_path: Path) -> None:
    client = make(tmp_path)
    client.open()
    with pytest.raises(Busy, match="in use by pid"):
        open_volume(client.options, client.host, client.remote, client.cache)
    client.volume.close()
    client.bench.close()
