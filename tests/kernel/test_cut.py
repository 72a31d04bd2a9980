"""The server away, slow or wrong: clear words, the right errno, nothing lost, nothing stuck."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import command
from support.parked import parked
from support.processes import die_with_parent
from support.proxy import FaultProxy, delay
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def box(server: Server, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "box", server.create(), "--io-timeout", "6s", "--stop-timeout", "2s")
    yield made
    os.kill(server.pid, signal.SIGCONT)
    made.close()


@pytest.fixture
def patient(server: Server, tmp_path: Path) -> Iterator[Sandbox]:
    """One that waits longer for its server than any test."""
    made = Sandbox(tmp_path / "box", server.create(), "--io-timeout", "5m", "--stop-timeout", "2s")
    yield made
    os.kill(server.pid, signal.SIGCONT)
    made.close()


def filled(box: Sandbox, count: int) -> None:
    """Files on the server that the next mount has not in memory."""
    box.mount()
    for number in range(count):
        directory = box.mountpoint / f"d{number % 10}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{number}").write_bytes(b"%d" % number)
    box.unmount()
    box.lose()
    box.mount()


def test_a_killed_reader_of_a_cut_server_is_gone(patient: Sandbox, server: Server) -> None:
    filled(patient, 10)
    os.kill(server.pid, signal.SIGSTOP)
    reader = subprocess.Popen(["cat", str(patient.mountpoint / "d1" / "f1")], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: parked(reader.pid), 30, "the reader to wait")
        reader.kill()
        assert reader.wait(60) == -signal.SIGKILL
    finally:
        reader.kill()
        os.kill(server.pid, signal.SIGCONT)
        reader.wait(60)


# Who prints its pid makes the call that waits for the server, once it is told to.
_USER = """
import mmap, os, sys, threading
memory = mmap.mmap(-1, 4096)
def opened_by_a_thread(flags):
    found = []
    thread = threading.Thread(target=lambda: found.append(os.open(sys.argv[1], flags)))
    thread.start()
    thread.join()
    return found[0]
def call(what):
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    what()
"""
_READ = "call(lambda: os.preadv(file, [memory], 0))"
_SYNC = "os.write(file, b'x'); call(lambda: os.fsync(file))"
USERS = [
    f"file = {by}({flags})\n{before}{calls}"
    for flags, calls in (("os.O_DIRECT", _READ), ("os.O_WRONLY", _SYNC))
    for by, before in (
        ("opened_by_a_thread", ""),
        ("(lambda flags: os.open(sys.argv[1], flags))", "os.fork() and sys.exit(os.wait()[1])\n"),
    )
]


def test_who_waits_on_a_handle_that_another_opened_can_be_killed(patient: Sandbox, server: Server) -> None:
    """Opened by a thread that is gone, or by the parent, which is well: neither is who waits."""
    filled(patient, len(USERS))
    users = []
    try:
        for number, script in enumerate(USERS):
            path = str(patient.mountpoint / f"d{number}" / f"f{number}")
            argv = [sys.executable, "-c", _USER + script, path]
            users.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        pids = [int(user.stdout.readline()) for user in users if user.stdout is not None]
        os.kill(server.pid, signal.SIGSTOP)
        for user in users:
            assert user.stdin is not None
            user.stdin.write("\n")
            user.stdin.flush()
        for pid in pids:
            wait_for(lambda pid=pid: parked(pid), 30, "the call to wait")
            os.kill(pid, signal.SIGKILL)
        for user in users:
            assert user.wait(60) != 0
    finally:
        os.kill(server.pid, signal.SIGCONT)
        for user in users:
            user.kill()
            user.communicate(timeout=60)


# Has a thread of its own submit a write (io_submit), and shows what became of it once that thread is gone.
_ASYNCHRONOUS = """
import ctypes, mmap, os, struct, sys, threading
setup, events, submit = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}[os.uname().machine]
call, context = ctypes.CDLL(None).syscall, ctypes.c_ulong(0)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
memory = mmap.mmap(-1, 4096)
memory[:] = b"n" * 4096
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
iocb = struct.pack("=QIIHhIQQqQII", 0, 0, 0, 1, 0, file, at, 4096, 0, 0, 0, 0)
write = ctypes.create_string_buffer(iocb, 64)
writes = (ctypes.c_void_p * 1)(ctypes.addressof(write))
assert call(setup, 1, ctypes.byref(context)) == 0
thread = threading.Thread(target=lambda: print(call(submit, context, 1, writes), flush=True))
sys.stdin.readline()
thread.start()
thread.join()
event = ctypes.create_string_buffer(32)
assert call(events, context, 1, 1, event, None) == 1
print(struct.unpack("=QQqq", event.raw)[2], flush=True)
"""


@pytest.mark.long
def test_a_write_whose_thread_is_gone_is_not_interrupted(patient: Sandbox, server: Server) -> None:
    """It was asynchronous, and its program is well."""
    patient.mount()
    path = patient.mountpoint / "f"
    path.write_bytes(b"o" * 4096)
    patient.drain()
    argv = [sys.executable, "-c", _ASYNCHRONOUS, str(path)]
    user = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    script = "import os, sys; file = os.open(sys.argv[1], os.O_WRONLY); os.write(file, b'x'); os.fsync(file)"
    try:
        os.kill(server.pid, signal.SIGSTOP)
        assert user.stdin is not None and user.stdout is not None
        user.stdin.write("\n")
        user.stdin.flush()
        assert user.stdout.readline() == "1\n"
        # Who came later and was killed has ended: all that waits was looked at.
        later = subprocess.Popen([sys.executable, "-c", script, str(path)])
        wait_for(lambda: parked(later.pid), 30, "the later one to wait")
        later.kill()
        assert later.wait(60) == -signal.SIGKILL
        os.kill(server.pid, signal.SIGCONT)
        assert user.stdout.readline() == "4096\n"
    finally:
        os.kill(server.pid, signal.SIGCONT)
        user.kill()
        user.communicate(timeout=60)


@pytest.mark.long
def test_an_fsync_in_a_paused_sandbox_is_no_error_after_it(server: Server, tmp_path: Path) -> None:
    """The sandbox stands still for longer than the I/O time-out; the server was well all the while."""
    limit = 20
    box = Sandbox(tmp_path / "box", server.create(), "--io-timeout", f"{limit}s")
    script = "import os, sys; out = open(sys.argv[1], 'wb', 0); out.write(b'kept'); os.fsync(out.fileno())"
    try:
        box.mount()
        os.listdir(box.mountpoint)
        os.kill(server.pid, signal.SIGSTOP)
        writer = subprocess.Popen([sys.executable, "-c", script, str(box.mountpoint / "f")])
        wait_for(lambda: parked(writer.pid), 30, "the fsync to wait")
        box.signal(signal.SIGSTOP)
        os.kill(server.pid, signal.SIGCONT)
        paused = time.monotonic()
        wait_for(lambda: time.monotonic() - paused > limit + 3, limit + 60, "the pause to be over", every=0.5)
        box.signal(signal.SIGCONT)
        assert writer.wait(60) == 0
        box.lose()
        box.mount()
        assert (box.mountpoint / "f").read_bytes() == b"kept"
    finally:
        os.kill(server.pid, signal.SIGCONT)
        box.signal(signal.SIGCONT)
        box.close()


def test_readers_go_on_when_the_server_is_back(patient: Sandbox, server: Server) -> None:
    box = patient
    filled(box, 40)
    os.kill(server.pid, signal.SIGSTOP)
    got: dict[int, object] = {}

    def read(number: int) -> None:
        try:
            got[number] = (box.mountpoint / f"d{number % 10}" / f"f{number}").read_bytes()
        except OSError as exc:
            got[number] = exc

    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    # What is known needs nobody.
    assert os.stat(box.mountpoint).st_ino == 1
    threading.Event().wait(1.5)
    os.kill(server.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert got == {number: b"%d" % number for number in range(16)}


def test_what_is_in_the_cache_is_read_while_every_request_hangs(server: Server, tmp_path: Path) -> None:
    """Reads, not only of what is in memory; the uploads of a big flush hang in every worker."""
    box = Sandbox(tmp_path / "box", server.create(), "--io-timeout", "5m", "--stop-timeout", "2s")
    try:
        box.mount()
        data = {f"f{number}": os.urandom(100_000) for number in range(6)} | {"big": os.urandom(3 << 20)}
        for name, content in data.items():
            (box.mountpoint / name).write_bytes(content)
        for _ in range(2):  # the second mount has it all in the cache, and only names and sizes in memory
            box.unmount()
            box.mount()
            assert {n: (box.mountpoint / n).read_bytes() for n in os.listdir(box.mountpoint)} == data
        os.kill(server.pid, signal.SIGSTOP)
        for number in range(4):
            (box.mountpoint / f"new{number}").write_bytes(os.urandom(9 << 20))
        for name, content in data.items():
            begun = time.monotonic()
            assert (box.mountpoint / name).read_bytes() == content
            assert time.monotonic() - begun < 60, name
        os.kill(server.pid, signal.SIGCONT)
        box.unmount()
    finally:
        os.kill(server.pid, signal.SIGCONT)
        box.close()


def test_fsync_of_a_cut_server_is_eio_and_the_next_one_covers_it(box: Sandbox, server: Server) -> None:
    box.mount()
    fd = os.open(box.mountpoint / "f", os.O_CREAT | os.O_WRONLY)
    try:
        os.write(fd, b"must arrive")
        os.kill(server.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(fd)
        assert 4 < time.monotonic() - start < 60
        # The mount goes on for what needs no server.
        os.write(fd, b" whole")
        assert os.pread(os.open(box.mountpoint / "f", os.O_RDONLY), 20, 0) == b"must arrive whole"
        status = box.status()
        assert status["pending"]["files"] == 1
        assert status["first_pending_path"] == "/f"
        os.kill(server.pid, signal.SIGCONT)
        wait_for(lambda: _fsynced(fd), 30, "an fsync that succeeds")
    finally:
        os.close(fd)
    assert box.fsd("cat", "/f").stdout == "must arrive whole"


def _fsynced(fd: int) -> bool:
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise
        return False
    return True


def test_unmount_without_a_server_says_what_is_left_and_keeps_it(box: Sandbox, server: Server) -> None:
    box.mount()
    (box.mountpoint / "kept").write_bytes(b"kept here")
    server.kill()
    done = box.fsd("unmount", os.fspath(box.mountpoint), "--timeout", "1s", check=False)
    assert done.returncode == 6
    assert '"files": 1' in done.stdout
    assert "/kept" in done.stdout
    assert not os.path.ismount(box.mountpoint)
    server.restart()
    box.mount()
    assert (box.mountpoint / "kept").read_bytes() == b"kept here"
    assert box.unmount()["status"] == "unmounted"


def test_drain_without_a_server_is_six_and_the_mount_stays(box: Sandbox, server: Server) -> None:
    box.mount()
    (box.mountpoint / "kept").write_bytes(b"kept here")
    server.kill()
    done = box.fsd("drain", os.fspath(box.mountpoint), "--timeout", "1s", check=False)
    assert done.returncode == 6
    assert (box.mountpoint / "kept").read_bytes() == b"kept here"
    server.restart()
    assert box.drain()["status"] == "drained"


def test_a_mount_without_a_server_gives_up_in_time(box: Sandbox, server: Server) -> None:
    server.kill()
    start = time.monotonic()
    done = box.fsd(
        "mount",
        os.fspath(box.mountpoint),
        "--state-dir",
        os.fspath(box.state),
        "--ready-timeout",
        "2s",
        check=False,
    )
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert time.monotonic() - start < 40  # the default is 60 s
    assert not os.path.ismount(box.mountpoint)
    server.restart()
    box.mount()


def test_a_mount_waits_for_a_server_that_is_slow_to_come(box: Sandbox, server: Server) -> None:
    server.kill()
    mounting = threading.Thread(target=box.mount)
    mounting.start()
    threading.Event().wait(2.0)
    assert mounting.is_alive()
    assert not os.path.ismount(box.mountpoint)
    server.restart()
    mounting.join(60)
    assert os.path.ismount(box.mountpoint)


@pytest.mark.long
def test_a_server_that_takes_15_s_for_each_answer_is_mounted_and_written_to(
    server: Server, tmp_path: Path
) -> None:
    """As long as it answers a mount goes on; the first page of the feed has as much time as the rest."""
    with FaultProxy(server.url) as proxy:
        box = Sandbox(tmp_path / "box", server.create(), endpoint=proxy.url)
        try:
            proxy.always(delay(15))
            box.mount(timeout=300)
            with open(box.mountpoint / "f", "wb") as file:
                file.write(b"arrives")
                file.flush()
                os.fsync(file.fileno())
            proxy.clear()
            assert box.fsd("cat", "/f").stdout == "arrives"
        finally:
            proxy.clear()
            box.close()


def test_a_wrong_token_mounts_nothing(box: Sandbox) -> None:
    token = box.env["FSD_TOKEN"]
    box.env["FSD_TOKEN"] = token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")
    argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state))
    assert box.fsd(*argv, check=False).returncode == 3
    assert not os.path.ismount(box.mountpoint)
    box.env["FSD_TOKEN"] = token
    box.mount()


def test_a_subtree_that_does_not_exist(box: Sandbox) -> None:
    argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state))
    done = box.fsd(*argv, "--remote-path", "/absent", check=False)
    assert done.returncode == 5
    assert "/absent" in done.stderr


def test_a_detached_daemon_that_sends_is_waited_for(box: Sandbox, server: Server) -> None:
    """umount(8) while the server is slow; the next mount of the place comes after the rest has gone."""
    box.mount()
    (box.mountpoint / "f").write_bytes(b"late")
    os.kill(server.pid, signal.SIGSTOP)
    subprocess.run(["umount", "-i", str(box.mountpoint)], check=True, timeout=60)
    resume = threading.Timer(1.5, os.kill, (server.pid, signal.SIGCONT))
    resume.start()
    try:
        box.mount()
    finally:
        resume.join()
    assert (box.mountpoint / "f").read_bytes() == b"late"


def test_ctrl_c_tells_how_far_it_is_and_twice_leaves_no_mount(box: Sandbox, server: Server) -> None:
    argv = [
        *command(),
        "mount",
        os.fspath(box.mountpoint),
        "--state-dir",
        os.fspath(box.state),
        "--foreground",
    ]
    process = subprocess.Popen(
        [*argv, "--stop-timeout", "30s"],
        env=box.env,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        wait_for(lambda: os.path.ismount(box.mountpoint), 30, "the mount")
        wait_for(lambda: box.fsd("status", os.fspath(box.mountpoint), check=False).returncode == 0, 30)
        (box.mountpoint / "f").write_bytes(b"x" * 5000)
        os.kill(server.pid, signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = b""
        while b"1 file, " not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 6
        assert not os.path.ismount(box.mountpoint)
    finally:
        process.kill()
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()
    os.kill(server.pid, signal.SIGCONT)
    box.mount()
    assert (box.mountpoint / "f").read_bytes() == b"x" * 5000
