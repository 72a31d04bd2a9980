"""Table 4 of the notes on threads: what parks, waits, dies and ends, on both loops, each under a time limit.

A real kernel mount of a volume in memory, in a process of its own; requests park by the name asked for.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import mounttable
from support.parked import parked
from support.wait import wait_for

pytestmark = pytest.mark.kernel

TESTS = Path(__file__).parent.parent
LOOPS = ("mini", "trio")


class Tiny:
    """One mounted process."""

    def __init__(self, directory: Path, loop: str) -> None:
        self.place = directory / "m"
        self.place.mkdir()
        self.log = directory / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.tinymount", str(self.place), loop, str(self.log)],
            cwd=TESTS,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def let_go(self) -> None:
        """What is held, now and later, is answered."""
        Path(f"{self.log}.go").touch()

    def listed(self) -> bool:
        return f" {self.place} " in mounttable.mounts()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        if self.listed():
            subprocess.run(["fusermount3", "-uz", str(self.place)], check=True, timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_ended(self, within: float = 60.0) -> int:
        return self.process.wait(within)


class Call:
    """`body` in a thread: its result or error."""

    def __init__(self, body: Callable[[], object]) -> None:
        self.result: object = None
        self._body = body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._body()
        except OSError as exc:
            self.result = exc

    def join(self, within: float = 60.0) -> object:
        self.thread.join(within)
        assert not self.thread.is_alive(), f"not answered within {within} s"
        return self.result

    @property
    def waits(self) -> bool:
        return self.thread.is_alive()

    def until_parked(self) -> None:
        """Returns when the thread waits in the kernel for our answer."""
        wait_for(lambda: parked(self.thread.native_id or 0), 30, "the request to be parked")


def exists(path: Path) -> Callable[[], object]:
    return lambda: os.path.exists(path)


@pytest.fixture(params=LOOPS)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tiny]:
    made = Tiny(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def tiny_mini(tmp_path: Path) -> Iterator[Tiny]:
    made = Tiny(tmp_path, "mini")
    yield made
    made.close()


def test_64_parked_lookups_in_64_directories_and_others_work_on(tiny: Tiny) -> None:
    for number in range(64):
        (tiny.place / f"d{number}").mkdir()
    calls = [Call(exists(tiny.place / f"d{number}" / "held")) for number in range(64)]
    for call in calls:
        call.until_parked()
    quick = Call(lambda: [os.path.exists(tiny.place / f"other{n}") for n in range(50)])
    quick.join()
    assert all(call.waits for call in calls)
    tiny.let_go()
    for call in calls:
        assert call.join() is False


def test_parked_lookups_of_one_directory_are_all_answered(tiny: Tiny) -> None:
    """The kernel asks one after the other; each is answered in its turn."""
    calls = [Call(exists(tiny.place / f"slow300-{number}")) for number in range(4)]
    for call in calls:
        assert call.join() is False


def test_while_a_lookup_is_parked_cached_stats_and_other_directories_answer(tiny: Tiny) -> None:
    (tiny.place / "other").mkdir()
    (tiny.place / "here").mkdir()
    (tiny.place / "here" / "file").write_bytes(b"x")
    os.stat(tiny.place / "here" / "file")
    slow = Call(exists(tiny.place / "here" / "held"))
    slow.until_parked()
    cached = Call(lambda: os.stat(tiny.place / "here" / "file").st_size)
    assert cached.join() == 1
    elsewhere = Call(lambda: (tiny.place / "other" / "new").write_bytes(b"y"))
    assert elsewhere.join() == 1
    assert slow.waits
    tiny.let_go()
    assert slow.join() is False


def test_while_an_fsync_is_parked_only_writes_to_that_file_wait(tiny: Tiny) -> None:
    path = tiny.place / "heldsync"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    other = os.open(tiny.place / "other", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, b"first", 0)
        slow = Call(lambda: os.fsync(fd))
        slow.until_parked()
        for quick in (
            Call(lambda: os.pread(fd, 5, 0)),
            Call(lambda: os.fstat(fd).st_size),
            Call(lambda: os.pwrite(other, b"x", 0)),
        ):
            quick.join()
        assert slow.waits
        same = Call(lambda: os.pwrite(fd, b"second", 0))
        tiny.let_go()
        assert same.join() == 6
        assert slow.join() is None
    finally:
        os.close(fd)
        os.close(other)


def test_a_killed_client_with_a_parked_request_is_gone(tiny: Tiny) -> None:
    client = subprocess.Popen(["stat", str(tiny.place / "held")], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: parked(client.pid), 30, "the client to be parked")
        client.kill()
        assert client.wait(60) == -signal.SIGKILL
    finally:
        tiny.let_go()
        client.kill()
        client.wait(60)
    assert Call(lambda: (tiny.place / "after").write_bytes(b"fine")).join() == 4


WAITER = """
import os, signal, sys
def told(*_): raise SystemExit(7)
signal.signal(signal.SIGINT, told)
what, path = sys.argv[1:]
if what == "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
file = os.open(path, os.O_RDWR | os.O_CREAT) if what == "fsync" else -1
print("here", flush=True)
os.fsync(file) if what == "fsync" else os.path.exists(path)
if what == "blocked": raise SystemExit(8)
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("lookup", 7),
        pytest.param("fsync", 7, marks=pytest.mark.long),
        pytest.param("blocked", 8, marks=pytest.mark.long),
    ],
)
def test_a_program_that_handles_ctrl_c_gets_it_while_it_waits(tiny_mini: Tiny, what: str, code: int) -> None:
    """Not in the middle of an fsync, which an error would tell that data is lost, and not what it blocks."""
    tiny = tiny_mini
    path = tiny.place / ("heldsync" if what == "fsync" else "held")
    client = subprocess.Popen([sys.executable, "-c", WAITER, what, path], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        client.stdout.readline()
        wait_for(lambda: parked(client.pid), 30, "the client to be parked")
        client.send_signal(signal.SIGINT)
        if what != "lookup":
            with pytest.raises(subprocess.TimeoutExpired):
                client.wait(2.5)
            tiny.let_go()
        assert client.wait(60) == code
    finally:
        tiny.let_go()
        client.kill()
        client.communicate(timeout=60)


def test_a_client_killed_between_poll_and_read_freezes_nothing(tiny_mini: Tiny) -> None:
    """The kernel drops its unread request; a blocking read would hold the GIL until the next one."""
    tiny = tiny_mini
    window = Path(f"{tiny.log}.window")
    for number in range(3):
        window.touch()
        client = subprocess.Popen(["stat", str(tiny.place / f"gone{number}")], stderr=subprocess.DEVNULL)
        wait_for(lambda client=client: parked(client.pid), 30, "the request to be asked")  # type: ignore[misc]
        client.kill()
        client.wait(60)
        window.unlink()
    # The tick in the process's other thread goes on only while the GIL is free.
    tiny.process.send_signal(signal.SIGTERM)
    assert tiny.wait_ended() == 0
    assert "ended by an exception" not in tiny.log.read_text()


def test_a_handler_that_raises_is_eio_and_logged(tiny: Tiny) -> None:
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            os.stat(tiny.place / "boom")
    assert Call(exists(tiny.place / "fine")).join() is False
    text = tiny.log.read_text()
    assert "boom, as the test asked" in text
    assert "lookup failed unexpectedly" in text


def test_sigterm_while_idle(tiny: Tiny) -> None:
    tiny.process.send_signal(signal.SIGTERM)
    assert tiny.wait_ended() == 0
    assert not tiny.listed()


def test_fusermount_while_idle(tiny: Tiny) -> None:
    subprocess.run(["fusermount3", "-u", str(tiny.place)], check=True, timeout=60)
    assert tiny.wait_ended() == 0
    assert not tiny.listed()


def test_sigterm_while_parked(tiny: Tiny) -> None:
    slow = Call(lambda: os.stat(tiny.place / "held"))
    slow.until_parked()
    tiny.process.send_signal(signal.SIGTERM)
    error = slow.join()
    assert isinstance(error, OSError)
    assert error.errno in (errno.EIO, errno.ECONNABORTED, errno.ENOTCONN)
    assert tiny.wait_ended() == 0
    assert not tiny.listed()


def test_fusermount_while_parked_is_refused(tiny: Tiny) -> None:
    slow = Call(exists(tiny.place / "held"))
    slow.until_parked()
    done = subprocess.run(["fusermount3", "-u", str(tiny.place)], capture_output=True, timeout=60)
    assert done.returncode != 0
    assert tiny.listed()
    tiny.let_go()
    assert slow.join() is False
    assert Call(exists(tiny.place / "more")).join() is False


def test_lazy_unmount_while_parked_still_answers(tiny: Tiny) -> None:
    slow = Call(exists(tiny.place / "held"))
    slow.until_parked()
    subprocess.run(["fusermount3", "-uz", str(tiny.place)], check=True, timeout=60)
    assert not tiny.listed()
    tiny.let_go()
    assert slow.join() is False
    assert tiny.wait_ended() == 0


def test_forced_unmount_while_parked(tiny: Tiny) -> None:
    """umount -f aborts the connection: the client gets its error at once and the process ends."""
    slow = Call(lambda: os.stat(tiny.place / "held"))
    slow.until_parked()
    subprocess.run(["umount", "-f", "-i", str(tiny.place)], capture_output=True, timeout=60, check=False)
    error = slow.join()
    assert isinstance(error, OSError)
    # Stock trio has no way to see the abort while a handler is parked; its own tick ends the process.
    if tiny.process.args[4] == "trio":  # type: ignore[index]
        tiny.process.send_signal(signal.SIGTERM)
    assert tiny.wait_ended() == 0


def test_many_workers_come_and_go(tiny_mini: Tiny) -> None:
    """Bursts of parked requests leave the mount as quick as before; workers beyond the few end themselves."""
    tiny = tiny_mini
    for number in range(40):
        (tiny.place / f"d{number}").mkdir()
    for burst in range(3):
        calls = [Call(exists(tiny.place / f"d{n}" / f"slow100-{burst}")) for n in range(40)]
        for call in calls:
            assert call.join() is False
    start = time.monotonic()
    for number in range(500):
        os.path.exists(tiny.place / f"x{number}")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("count", [0, 1, 23, 24, 1000])
def test_readdir_gives_every_name_once(tiny_mini: Tiny, count: int) -> None:
    directory = tiny_mini.place / "d"
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / f"{number:05d}", os.O_CREAT | os.O_WRONLY))
    assert sorted(os.listdir(directory)) == [f"{number:05d}" for number in range(count)]
    done = subprocess.run(["ls", "-fa", str(directory)], capture_output=True, timeout=60, check=True)
    assert done.stdout.split()[:2] == [b".", b".."]
    assert len(done.stdout.split()) == count + 2
    if count:
        subprocess.run(["rm", "-r", str(directory)], timeout=60, check=True)
        assert not directory.exists()


def test_lookups_are_counted_as_the_kernel_counts_them(tiny_mini: Tiny) -> None:
    """Whatever told the kernel of an inode, it forgets exactly that often."""
    top = tiny_mini.place
    for number in range(300):
        (top / f"f{number}").write_bytes(b"x")
    (top / "d").mkdir()
    subprocess.run(["ls", "-la", str(top)], capture_output=True, timeout=60, check=True)
    assert len(list(os.scandir(top))) == 301
    assert os.statvfs(top).f_files == 301
    for number in range(300):
        os.stat(top / f"f{number}")
        os.unlink(top / f"f{number}")
    os.rmdir(top / "d")
    wait_for(lambda: os.statvfs(top).f_files == 0, 30, "the kernel to forget what is gone")
    assert os.statvfs(top).f_ffree == 0
