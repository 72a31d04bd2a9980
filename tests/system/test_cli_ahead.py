"""Supervisor and daemon of a mount are begun before the command knows what it mounts: whatever becomes of it
then, and of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import command
from support.processes import die_with_parent
from support.sandbox import Sandbox
from support.server import TestFs
from support.wait import wait_for

import fsd

pytestmark = pytest.mark.kernel


class Mount:
    """`fsd mount` of a sandbox that waits, before it knows its token, for what is written into a FIFO.
    `program`: where the package is."""

    def __init__(self, box: Sandbox, base: Path, program: Path | None = None) -> None:
        self.box, self.fifo = box, base / "token"
        os.mkfifo(self.fifo, 0o600)
        self.place = os.fspath(box.mountpoint)
        self.argv = [*command(), "mount", self.place, "--state-dir", os.fspath(box.state), "--output", "json"]
        self.command = subprocess.Popen(
            [*self.argv, "--token-file", os.fspath(self.fifo)],
            env={name: value for name, value in box.env.items() if name != "FSD_TOKEN"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=program,
            preexec_fn=die_with_parent,
        )
        wait_for(lambda: self._pair() is not None, 30, "supervisor and daemon")
        self.supervisor, self.daemon = self._pair() or (0, 0)

    def all(self) -> list[int]:
        """The processes that run this mount."""
        word = os.fsencode(self.place)
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if word in words(pid)]

    def _pair(self) -> tuple[int, int] | None:
        """Both, once the process between the command and the supervisor is gone."""
        above = {pid: parent(pid) for pid in self.all() if pid != self.command.pid}
        if self.command.pid in above.values():
            return None
        return next(((up, pid) for pid, up in above.items() if up in above), None)

    def go_on(self) -> subprocess.CompletedProcess[bytes]:
        """Give it its token, and see it end."""
        self.fifo.write_text(self.box.fs.token)
        out, err = self.command.communicate(timeout=60)
        return subprocess.CompletedProcess(self.argv, self.command.returncode, out, err)


def words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    """0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def inheritable(pid: int) -> list[str]:
    """What a program that `pid` starts would hold, beside the three streams."""
    numbers = [path.name for path in Path(f"/proc/{pid}/fd").iterdir() if int(path.name) > 2]
    told = {number: Path(f"/proc/{pid}/fdinfo/{number}").read_text() for number in numbers}
    flags = {number: int(text.partition("flags:")[2].split()[0], 8) for number, text in told.items()}
    return [os.readlink(f"/proc/{pid}/fd/{n}") for n, known in flags.items() if not known & os.O_CLOEXEC]


def sockets(pid: int) -> list[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


@pytest.fixture
def sandbox(shared_fs: TestFs, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "one", shared_fs, supervised=True)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def begun(sandbox: Sandbox, tmp_path: Path) -> Iterator[Mount]:
    made = Mount(sandbox, tmp_path)
    try:
        yield made
    finally:
        made.command.kill()
        made.command.communicate(timeout=30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_ends_what_it_began(begun: Mount, number: signal.Signals) -> None:
    begun.command.send_signal(number)
    assert begun.command.wait(30) != 0
    wait_for(lambda: not begun.all(), 30, "the end of supervisor and daemon")
    assert not os.path.ismount(begun.place)
    assert begun.box.fsd("status", begun.place, check=False).returncode == 5  # not found
    assert not begun.box.state.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_after_its_order_ends_what_it_began(
    begun: Mount, number: signal.Signals
) -> None:
    """Before the supervisor has come to it. The place is free then, too."""
    os.kill(begun.supervisor, signal.SIGSTOP)
    begun.fifo.write_text(begun.box.fs.token)
    wait_for(lambda: not sockets(begun.command.pid), 30, "the order")
    begun.command.send_signal(number)
    assert begun.command.wait(30) != 0
    os.kill(begun.supervisor, signal.SIGCONT)
    wait_for(lambda: not begun.all(), 30, "the end of supervisor and daemon")
    assert not os.path.ismount(begun.place)
    begun.box.mount()


def test_they_hold_nothing_of_the_commands(begun: Mount) -> None:
    """Until they know that there is a mount: its streams, directory, session."""
    for pid in (begun.supervisor, begun.daemon):
        wait_for(lambda pid=pid: os.readlink(f"/proc/{pid}/fd/2") == os.devnull, 30, "its own streams")
        held = {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)}
        assert held == {os.devnull}
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) not in (os.getsid(0), begun.supervisor)
    wait_for(lambda: os.getpgid(begun.daemon) == begun.daemon, 30, "a group of its own")
    assert parent(begun.supervisor) != begun.command.pid


def test_what_was_begun_is_what_mounts(begun: Mount) -> None:
    done = begun.go_on()
    told = json.loads(done.stdout)
    assert (told["supervisor_pid"], told["pid"]) == (begun.supervisor, begun.daemon)
    for pid in (begun.supervisor, begun.daemon):
        assert os.readlink(f"/proc/{pid}/fd/2") == told["log_file"]
        assert not inheritable(pid)
        assert b"fsd1." not in Path(f"/proc/{pid}/environ").read_bytes()
    assert begun.box.fsd("mount", begun.place, check=False).returncode == 7  # they hold its lock
    begun.box.fsd("unmount", begun.place)
    wait_for(lambda: not begun.all(), 30, "the end of both")


@pytest.mark.parametrize("who", ["supervisor", "daemon", "both"])
def test_one_that_was_killed_before_is_begun_anew(begun: Mount, who: str) -> None:
    killed = [begun.supervisor] if who == "supervisor" else [begun.daemon]
    killed = [begun.supervisor, begun.daemon] if who == "both" else killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not set(killed) & set(begun.all()), 30, "their end")
    done = begun.go_on()
    told = json.loads(done.stdout)
    assert told["pid"] not in (begun.daemon, told["supervisor_pid"])
    assert (told["supervisor_pid"] == begun.supervisor) == (who == "daemon")
    wait_for(lambda: begun.daemon not in begun.all(), 30, "the end of the first daemon")
    assert begun.box.status()["restarts"] == 0
    begun.box.fsd("unmount", begun.place)


def test_a_daemon_of_the_version_before_is_begun_anew(sandbox: Sandbox, tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copytree(Path(fsd.__file__).parent, program / "fsd")
    begun = Mount(sandbox, tmp_path, program)
    os.utime(program / "fsd/model/limits.py", (1, 1))
    told = json.loads(begun.go_on().stdout)
    assert told["supervisor_pid"] == begun.supervisor
    assert told["pid"] != begun.daemon
    assert begun.daemon not in begun.all()
    sandbox.fsd("unmount", begun.place)


@pytest.mark.parametrize("more", [[], ["--no-supervisor"]], ids=["ahead", "not ahead"])
def test_a_log_that_cannot_be_written_is_told(sandbox: Sandbox, more: list[str]) -> None:
    place = os.fspath(sandbox.mountpoint)
    mount = ["mount", place, "--state-dir", os.fspath(sandbox.state), *more, "--output", "json"]
    log = Path(json.loads(sandbox.fsd(*mount).stdout)["log_file"])
    sandbox.fsd("unmount", place)
    log.unlink()
    log.mkdir()
    done = sandbox.fsd(*mount, check=False)
    assert (done.returncode, os.fspath(log) in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr
    assert not os.path.ismount(place)
    log.rmdir()
    sandbox.fsd(*mount)
    sandbox.fsd("unmount", place)


def test_a_stop_of_the_supervisor_before_the_order_ends_the_daemon(begun: Mount) -> None:
    os.kill(begun.supervisor, signal.SIGTERM)
    wait_for(lambda: begun.all() == [begun.command.pid], 30, "the end of both")


@pytest.mark.parametrize(
    "wrong", [["--no-such-flag"], ["--lease-time", "x"], ["a", "b"], ["--token-file", "/no"]]
)
def test_a_mount_that_is_refused_leaves_no_process(sandbox: Sandbox, wrong: list[str]) -> None:
    place = os.fspath(sandbox.mountpoint)
    done = sandbox.fsd("mount", place, *wrong, check=False)
    assert done.returncode not in (0, 70)
    assert done.stderr.count("\n") <= 3  # the error, its hint, the error as JSON
    every = map(int, filter(str.isdigit, os.listdir("/proc")))
    mine = [pid for pid in every if os.fsencode(place) in words(pid)]
    wait_for(lambda: not any(os.fsencode(place) in words(pid) for pid in mine), 30, "their end")
    assert not os.path.ismount(place)
