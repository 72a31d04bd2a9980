"""A daemon that is killed while it waits in the kernel for the lock of a directory whose holder waits for it.

Nothing interrupts that wait: the process stays a zombie with one thread unless that thread holds nothing, or
somebody ends the connection.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.server import Server
from support.tinyplace import Tiny
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.kernel import remains, runtime, unmount
from fsd.model.errors import NotDrained

pytestmark = pytest.mark.kernel


_pace = threading.Event()  # never set


class Stuck:
    """A `tiny` daemon in that wait. `thread` is what the waiting one is called."""

    def __init__(self, tiny: Tiny, *options: str) -> None:
        self.tiny = tiny
        assert tiny.start(*options).returncode == 0
        self.pid = tiny.record().pid
        self.source = tiny.record().source
        # What cannot be interrupted: a thread of this test would be in its way.
        self.reader = subprocess.Popen(
            ["stat", str(tiny.place / "slow300000told")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # One that reads or writes a file waits like that for a moment only.
        wait_for(lambda: self._waiting() and _pace.wait(0.3) is False and self._waiting(), 30, "that wait")
        self.thread = self._waiting()

    def _waiting(self) -> str:
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                name, _, rest = (task / "stat").read_text().rpartition(")")
            except FileNotFoundError:  # a thread that has ended
                continue
            if rest.split()[0] == "D":
                return name.partition("(")[2]
        return ""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Whatever became of it: nobody stays in the kernel."""
        if remains.cannot_end(self.pid):
            remains.end_connections(self.tiny.place, self.source)
        if self.reader.poll() is None and not self.tiny.alive():
            remains.end_connections(self.tiny.place, self.source)
        self.tiny.close()
        self.reader.wait(60)


@pytest.fixture
def stuck(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Stuck]:
    made = Stuck(tiny, *request.param)
    try:
        yield made
    finally:
        made.close()


def both_gone(stuck: Stuck) -> bool:
    return not os.path.exists(f"/proc/{stuck.pid}/task") and stuck.reader.poll() is not None


@pytest.mark.parametrize("stuck", [["alone"]], indirect=True)
def test_a_killed_daemon_ends_by_itself(stuck: Stuck) -> None:
    assert stuck.thread == "fsd-send"
    stuck.kill()
    wait_for(lambda: both_gone(stuck), 30, "the daemon and its reader to end")
    assert stuck.tiny.start().returncode == 0
    assert os.listdir(stuck.tiny.place) == []


@pytest.mark.parametrize("stuck", [["in-python"]], indirect=True)
def test_a_supervisor_helps_a_daemon_that_cannot_end(stuck: Stuck) -> None:
    assert stuck.thread != "fsd-send"
    stuck.kill()
    wait_for(lambda: both_gone(stuck), 30, "the daemon and its reader to end")
    wait_for(
        lambda: stuck.tiny.record().pid != stuck.pid and stuck.tiny.state() == runtime.MOUNTED,
        30,
        "the next daemon",
    )
    assert "its connection was ended" in Path(stuck.tiny.record().log).read_text()


@pytest.mark.parametrize("stuck", [["in-python", "alone"]], indirect=True)
def test_the_next_mount_helps_or_says_what_to_do(stuck: Stuck) -> None:
    stuck.kill()
    wait_for(lambda: remains.cannot_end(stuck.pid), 30, "the daemon to stay")
    told = stuck.tiny.start("no-rights")
    assert told.returncode == 7
    assert f"umount -f {stuck.tiny.place}" in told.stderr
    assert remains.cannot_end(stuck.pid)  # so it would have stayed
    assert stuck.tiny.start().returncode == 0
    wait_for(lambda: both_gone(stuck), 30, "the daemon and its reader to end")


@pytest.mark.parametrize("stuck", [["in-python", "alone"]], indirect=True)
def test_an_unmount_helps(stuck: Stuck) -> None:
    stuck.kill()
    wait_for(lambda: remains.cannot_end(stuck.pid), 30, "the daemon to stay")
    with pytest.raises(NotDrained, match="was dead"):
        unmount.unmount(stuck.tiny.place, stuck.tiny.directory, 5, print, Host())
    assert not stuck.tiny.listed()
    wait_for(lambda: both_gone(stuck), 30, "the daemon and its reader to end")


READS = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
os.write(1, b"it is open\\n")
os.pread(file, 4096, 768 * 4096)
"""


def in_the_kernel(pid: int) -> bool:
    """Whether a thread of `pid` waits where nothing interrupts it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
            return True
    return False


def stays_in_the_kernel(pid: int) -> bool:
    """One that reads or writes a file waits like that for a moment only."""
    return in_the_kernel(pid) and _pace.wait(0.3) is False and in_the_kernel(pid)


@contextlib.contextmanager
def silent(server: Server) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def killed_and_back(box: Sandbox, server: Server, reader: subprocess.Popen[bytes]) -> None:
    """The daemon is in the wait: killed, it goes, its reader goes, and the place is mounted again."""
    killed = box.daemon
    try:
        wait_for(lambda: stays_in_the_kernel(killed), 30, "the daemon to wait in the kernel")
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: not os.path.exists(f"/proc/{killed}/task"), 30, "the daemon to end")
        wait_for(lambda: reader.poll() is not None, 30, "the reader to end")
    finally:
        if remains.cannot_end(killed):
            remains.end_connections(box.mountpoint, f"fsd:{box.fs.id}:{box.record.stem}")
    os.kill(server.pid, signal.SIGCONT)
    box.wait_remounted(killed)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_names_are_forgotten_in_a_directory_somebody_looks_into(server: Server, tmp_path: Path) -> None:
    """The server stops answering: a lookup waits, and the kernel is told to forget its neighbours."""
    with sandbox(tmp_path, server.create(), supervised=True) as box:
        directory = box.mountpoint / "d"
        directory.mkdir()
        for number in range(10_010):  # more than are loaded at once, so that a name is asked for
            (directory / f"f{number}").touch()
        box.unmount()
        box.mount()
        assert not any((directory / f"missing{number}").exists() for number in range(100))
        with silent(server):
            reader = subprocess.Popen(["stat", str(directory / "another")], stderr=subprocess.DEVNULL)
            killed_and_back(box, server, reader)
        assert len(os.listdir(directory)) == 10_010


@pytest.mark.long
@pytest.mark.timeout(240)
def test_pages_are_dropped_of_a_file_somebody_reads(server: Server, tmp_path: Path) -> None:
    """The same with the lock of a page: a reader waits for one while a direct write drops all."""
    fs = server.create()
    content = os.urandom(4 << 20)
    with sandbox(tmp_path / "one", fs) as box:
        (box.mountpoint / "f").write_bytes(content)
        box.unmount()
    with sandbox(tmp_path / "two", fs, supervised=True) as box:
        path = box.mountpoint / "f"
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with silent(server):
                reader = subprocess.Popen(
                    [sys.executable, "-c", READS, str(path)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                assert reader.stdout is not None
                # Before that it may wait for the pages of its program, and the write would meet nobody.
                assert reader.stdout.readline() == b"it is open\n"
                reader.stdout.close()
                wait_for(lambda: stays_in_the_kernel(reader.pid), 30, "the reader to wait")
                block = mmap.mmap(-1, 4096)
                block.write(b"n" * 4096)

                def write() -> None:
                    with contextlib.suppress(OSError):  # its daemon is killed
                        os.pwrite(file, block, 0)

                writer = threading.Thread(target=write, daemon=True)
                writer.start()
                killed_and_back(box, server, reader)
                writer.join(60)
                assert not writer.is_alive()
        finally:
            with contextlib.suppress(OSError):
                os.close(file)
        assert path.read_bytes()[4096:] == content[4096:]
