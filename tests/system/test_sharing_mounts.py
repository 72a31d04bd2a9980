"""Mounts of one filesystem beside each other, with real processes: how soon one sees what another committed,
at what cost, and that tools which watch or lock files work."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.proxy import BLACK_HOLE, FaultProxy
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.wait import wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def mounted(boxes: Callable[..., Sandbox]) -> Callable[..., Sandbox]:
    def make(name: str, fs: TestFs, *options: str, **more: str) -> Sandbox:
        box = boxes(name, fs, *options, **more)
        box.mount()
        return box

    return make


def sees(box: Sandbox, path: str, text: str) -> bool:
    try:
        return (box.mountpoint / path).read_text() == text
    except FileNotFoundError:
        return False


# How soon.


def visible_after(server: Server, mounted: Callable[..., Sandbox], commits: int) -> None:
    """A commits; a program on B reads the file over and over, which B answers from memory until the feed has
    told it of a change. So what reaches the server from B are the feed's polls and, for each change that was
    looked at, one question about the inode and one for its bytes."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        a, b = mounted("a", fs), mounted("b", fs, endpoint=proxy.url)
        (a.mountpoint / "f").write_text("0")
        a.drain()
        wait_for(lambda: sees(b, "f", "0"), 30, "the first version on B")
        fd = os.open(a.mountpoint / "f", os.O_WRONLY)
        proxy.reset_counts()
        late = []
        began = time.monotonic()
        for number in range(1, commits + 1):
            os.pwrite(fd, b"%06d" % number, 0)
            os.fsync(fd)
            committed = time.monotonic()
            wanted = b"%06d" % number
            # What a program on B does: it reads, from B's kernel as long as nobody tells that to forget.
            while (b.mountpoint / "f").read_bytes() != wanted:
                if time.monotonic() - committed > 40:
                    raise AssertionError(f"commit {number} is not seen on B\n{b.logs()}")
                time.sleep(0.002)
            late.append(time.monotonic() - committed)
        os.close(fd)
        counts = dict(proxy.requests)
        # Where all stood still for seconds the feed seemed silent, and B asked before each use.
        more = 2 * (time.monotonic() - began) if "silent" in b.logs() else 0
    late.sort()
    p99 = late[int(len(late) * 0.99) - 1]
    print(f"p50 {late[len(late) // 2]:.3f} s, p99 {p99:.3f} s, max {late[-1]:.3f} s, {counts}")
    # On an idle machine the p99 is 0.14 s; here others may have the processor for a while.
    assert late[len(late) // 2] < 1.0, f"p99 {p99:.3f} s, median {late[len(late) // 2]:.3f} s"
    assert set(counts) <= {"changes", "ns", "blobs", "sessions"}, counts
    assert counts.get("ns", 0) + counts.get("blobs", 0) <= 2 * commits + 2 + more, counts
    assert counts["changes"] <= 2 * commits + 10 + sum(late) + more, counts


def test_another_mount_sees_a_commit_within_a_second(server: Server, mounted: Callable[..., Sandbox]) -> None:
    visible_after(server, mounted, 100)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_another_mount_sees_a_commit_within_a_second_a_thousand_times(
    server: Server, mounted: Callable[..., Sandbox]
) -> None:
    visible_after(server, mounted, 1000)


def test_a_mount_that_looks_at_nothing_asks_for_nothing(
    server: Server, mounted: Callable[..., Sandbox]
) -> None:
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        a, b = mounted("a", fs), mounted("b", fs, endpoint=proxy.url)
        assert not list(b.mountpoint.iterdir())
        proxy.reset_counts()
        for number in range(8):
            (a.mountpoint / f"f{number}").write_text("x")
            a.drain()
        seq = int(a.status()["fs_seq"])
        b.fsd("wait", str(b.mountpoint), "--seq", str(seq))
        # `wait` itself is answered by the mount; nothing but the feed went to the server.
        assert set(proxy.requests) - {"sessions"} == {"changes"}, proxy.requests


def test_with_the_feed_silent_what_the_kernel_keeps_is_checked(
    server: Server, mounted: Callable[..., Sandbox]
) -> None:
    """Only the feed is cut off. What B's kernel was told before may not be kept then: sizes, bytes, names
    that exist and names that do not."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        a, b = mounted("a", fs), mounted("b", fs, endpoint=proxy.url)
        for name in ("grows", "shrinks", "goes", "replaced"):
            (a.mountpoint / name).write_text("first version")
        a.drain()
        wait_for(lambda: sees(b, "replaced", "first version"), 30, "the files on B")
        assert {path.name: path.stat().st_size for path in b.mountpoint.iterdir()}
        assert not (b.mountpoint / "comes").exists()
        proxy.always(BLACK_HOLE, lambda request: request.route == "changes")
        proxy.cut_all()
        (a.mountpoint / "grows").write_text("second version, and more of it")
        (a.mountpoint / "shrinks").write_text("2nd")
        (a.mountpoint / "goes").unlink()
        (a.mountpoint / "new").write_text("another file")
        (a.mountpoint / "new").rename(a.mountpoint / "replaced")
        (a.mountpoint / "comes").write_text("came")
        a.drain()
        wait_for(lambda: "silent" in b.logs(), 30, "B to notice the silence")
        for name, text in (
            ("grows", "second version, and more of it"),
            ("shrinks", "2nd"),
            ("replaced", "another file"),
            ("comes", "came"),
        ):
            # An answer counts for a second while the feed is silent.
            wait_for(lambda n=name, t=text: sees(b, n, t), 30, f"{name} on B")
            assert (b.mountpoint / name).stat().st_size == len(text)
        wait_for(lambda: not (b.mountpoint / "goes").exists(), 30, "a removal on B")
        proxy.clear()


# Tools that watch.


@pytest.mark.parametrize("how", ["-f", "-F"])
def test_tail_on_another_mount_shows_each_line_once_and_soon(
    shared_fs: TestFs, mounted: Callable[..., Sandbox], how: str
) -> None:
    a, b = mounted("a", shared_fs), mounted("b", shared_fs)
    log = a.mountpoint / "log"
    log.write_text("begin\n")
    a.drain()
    wait_for(lambda: sees(b, "log", "begin\n"), 30, "the log on B")
    tail = subprocess.Popen(
        ["tail", how, "-n", "+1", "-s", "0.1", b.mountpoint / "log"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    seen: list[tuple[str, float]] = []
    assert tail.stdout is not None
    reader = threading.Thread(
        target=lambda: [seen.append((line, time.monotonic())) for line in tail.stdout or ()]
    )
    reader.start()
    try:
        wrote: dict[str, float] = {}
        with log.open("a") as out:
            for number in range(20):
                line = f"line {number}\n"
                out.write(line)
                out.flush()
                os.fsync(out.fileno())
                wrote[line] = time.monotonic()
                threading.Event().wait(0.03)
        if how == "-F":  # the log is rotated: the name means another file
            log.rename(a.mountpoint / "log.1")
            log.write_text("rotated\n")
            a.drain()
            wrote["rotated\n"] = time.monotonic()
        wait_for(lambda: len(seen) >= len(wrote) + 1, 30, f"all lines; there are {len(seen)}")
    finally:
        tail.kill()
        tail.wait(60)
        reader.join(60)
    assert [line for line, _ in seen] == ["begin\n", *wrote]
    late = [at - wrote[line] for line, at in seen if line in wrote]
    # Far below the minute for which a kernel keeps what it was told, on whatever machine.
    assert sorted(late)[len(late) // 2] < 10.0, late
    assert max(late) < 30.0, late


def test_an_open_that_may_make_the_file_opens_what_another_mount_has_just_made(
    server: Server, mounted: Callable[..., Sandbox]
) -> None:
    """The daemon has heard of the name and the kernel, whose directory others are busy in, has not."""
    fs = server.create()
    a, b = mounted("a", fs), mounted("b", fs)
    over = threading.Event()

    def work(number: int) -> None:
        for turn in range(10**9):
            path = b.mountpoint / f"busy{number}-{turn % 20}"
            path.touch()
            path.unlink()
            if over.is_set():
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(60):
            name = f"f{number}"
            assert not (b.mountpoint / name).exists()
            with (a.mountpoint / name).open("w") as file:
                os.fsync(file.fileno())
            for _ in range(20):
                os.close(os.open(b.mountpoint / name, os.O_RDWR | os.O_CREAT))
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_an_open_asks_where_that_was_wanted(server: Server, mounted: Callable[..., Sandbox]) -> None:
    """`--consistency open`: the feed is cut off, and yet each open shows what was closed before it."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        a = mounted("a", fs, "--durability", "close")
        b = mounted("b", fs, "--consistency", "open", endpoint=proxy.url)
        (a.mountpoint / "f").write_text("first")
        assert sees(b, "f", "first")
        proxy.always(BLACK_HOLE, lambda request: request.route == "changes")
        for number in range(5):
            (a.mountpoint / "f").write_text(f"version {number} " * (number + 1))
            assert (b.mountpoint / "f").read_text() == f"version {number} " * (number + 1)
        (a.mountpoint / ".new").write_text("another file")
        (a.mountpoint / ".new").rename(a.mountpoint / "f")
        a.drain()
        assert (b.mountpoint / "f").read_text() == "another file"
        assert not (b.mountpoint / "late").exists()
        (a.mountpoint / "late").write_text("new")
        assert (b.mountpoint / "late").read_text() == "new"
        assert {path.name for path in b.mountpoint.iterdir()} == {"f", "late"}
        proxy.clear()
        assert b.status()["consistency"] == "open"


def test_conflicts_are_seen_from_any_sandbox_until_they_are_resolved(
    server: Server, mounted: Callable[..., Sandbox]
) -> None:
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        a, b = mounted("a", fs), mounted("b", fs, endpoint=proxy.url)
        (a.mountpoint / "d").mkdir()
        (a.mountpoint / "d" / "f").write_text("common")
        a.drain()
        wait_for(lambda: sees(b, "d/f", "common"), 30, "the file on B")
        # Open before the cut: a write on a handle asks nobody, whatever the feed has just told.
        fd = os.open(b.mountpoint / "d" / "f", os.O_WRONLY)
        proxy.refuse()
        os.pwrite(fd, b"from B", 0)  # as long as what was there
        os.close(fd)
        (a.mountpoint / "d" / "f").write_text("of A")
        a.drain()
        proxy.accept()
        b.drain()
        listed = a.json("conflicts")["conflicts"]
        assert [(c["original"], c["reason"], c["mount"]) for c in listed] == [
            ("/d/f", "conflict", str(b.mountpoint))
        ]
        copy = str(listed[0]["path"]).lstrip("/")
        for box in (a, b):
            wait_for(lambda box=box: box.status()["conflicts"] == 1, 30, "status to count it")
        wait_for(lambda: sees(a, copy, "from B"), 30, "the copy on A")
        b.unmount()
        b.mount()
        # It is no memory of the mount's. (On a loaded machine an answer may be late for one status.)
        wait_for(lambda: b.status()["conflicts"] == 1, 30, "status to count it after a mount")
        assert b.json("conflicts", "/d")["conflicts"] == listed
        (a.mountpoint / copy).rename(a.mountpoint / "d" / "mine")
        a.drain()
        assert not b.json("conflicts")["conflicts"]
        for box in (a, b):
            wait_for(lambda box=box: box.status()["conflicts"] == 0, 30, "status to count none")


# Locks and databases within one mount.

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for n in range(int(sys.argv[3])):
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO t (who, n) VALUES (?, ?)", (sys.argv[2], n))
    db.execute("COMMIT")
db.close()
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_eight_processes_write_one_sqlite_database(
    shared_fs: TestFs, mounted: Callable[..., Sandbox], mode: str
) -> None:
    box = mounted("a", shared_fs)
    path = box.mountpoint / "db.sqlite"
    rounds = 8
    made = sqlite3.connect(path, timeout=60)
    made.execute(f"PRAGMA journal_mode={mode}")
    made.execute("CREATE TABLE t (who TEXT, n INTEGER)")
    made.commit()
    made.close()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(who), str(rounds)]) for who in range(8)
    ]
    assert [one.wait(100) for one in writers] == [0] * 8
    check = sqlite3.connect(path, timeout=60)
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert check.execute("SELECT count(*), count(DISTINCT who) FROM t").fetchone() == (8 * rounds, 8)
    check.close()


LOCKER = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
lock = fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf
class Alarm(Exception): pass
def rung(number, frame): raise Alarm
signal.signal(signal.SIGUSR1, rung)
print("ready", flush=True)
try:
    lock(fd, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
except Alarm:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_locks_between_processes_wait_and_are_interrupted(
    shared_fs: TestFs, mounted: Callable[..., Sandbox], kind: str
) -> None:
    box = mounted("a", shared_fs)
    path = box.mountpoint / "lock"
    path.write_text("")

    def locker() -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [sys.executable, "-c", LOCKER, path, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made

    def waits(process: subprocess.Popen[str]) -> bool:
        """Whether it sleeps inside the lock call."""
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"

    first = locker()
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    fd = os.open(path, os.O_RDWR)
    take = fcntl.flock if kind == "flock" else fcntl.lockf
    with pytest.raises(OSError) as told:
        take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert told.value.errno in (errno.EAGAIN, errno.EACCES)
    second, third = locker(), locker()
    for one in (second, third):
        wait_for(lambda one=one: waits(one), 30, "the lock to be waited for")
    second.send_signal(signal.SIGUSR1)
    out, _ = second.communicate(timeout=60)
    assert out == "interrupted\n"
    assert third.stdout is not None
    first.kill()  # its locks go with it
    first.wait(60)
    assert third.stdout.readline() == "locked\n"
    third.communicate(timeout=60)
    take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
