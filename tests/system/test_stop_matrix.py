"""Seven ways to end a mount, each after five states a file can be in: what was written is there at the next
mount of the place, nothing is left mounted, and the exit code tells the truth. On a slow machine the truth
may be another one: what was written two seconds ago has been sent, and two signals come as one.

`scripts/test --all` plays every cell several times.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest
from support import mounttable
from support.reading import committed_tree
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

WAYS = ("own_command", "umount", "fusermount3", "sigterm", "sigint_twice", "sigkill", "server_gone")
STATES = ("fsynced", "closed", "open_and_written", "renamed_over", "deleted")
NOTHING = {"operations": 0, "files": 0, "bytes": 0}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attempt" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--rounds") or (50 if metafunc.config.getoption("--all") else 1)
        metafunc.parametrize("attempt", range(rounds))


class Cell:
    """One mount with one file in one state, to be ended in one way."""

    def __init__(self, server: Server, base: Path, way: str, state: str, patience: str = "") -> None:
        self.server, self.state, self.fs = server, state, server.create()
        # Where everything can be sent the time is no matter; who must give up does so soon.
        given_up = way in ("sigint_twice", "server_gone") and state != "fsynced"
        patience = patience or ("3s" if given_up else "90s")
        self.box = Sandbox(base, self.fs, "--stop-timeout", patience, supervised=True)
        self.fd: int | None = None
        self.ended = False
        self.content = secrets.token_bytes(20_000)

    @property
    def file(self) -> Path:
        return self.box.mountpoint / "dir" / "file"

    def prepare(self) -> None:
        self.box.mount()
        self.file.parent.mkdir()
        if self.state in ("renamed_over", "deleted"):
            self.file.write_bytes(b"the old content")
            self.box.drain()
        if self.state == "deleted":
            self.file.unlink()
        elif self.state == "renamed_over":
            temporary = self.file.with_name(".file.tmp")
            temporary.write_bytes(self.content)
            temporary.rename(self.file)
        else:
            self.fd = os.open(self.file, os.O_CREAT | os.O_WRONLY)
            os.write(self.fd, self.content)
            if self.state == "fsynced":
                os.fsync(self.fd)
            if self.state != "open_and_written":
                self.close_file()

    def close_file(self) -> None:
        if self.fd is not None:
            # After the end of the connection close has an error to tell; the file is looked at later.
            fd, self.fd = self.fd, None
            if self.ended:
                with contextlib.suppress(OSError):
                    os.close(fd)
            else:
                os.close(fd)

    def check(self) -> None:
        """After the next mount of the place."""
        if self.state == "deleted":
            assert os.listdir(self.file.parent) == []
        else:
            assert self.file.read_bytes() == self.content
            assert os.listdir(self.file.parent) == ["file"]

    def listed(self) -> bool:
        return f" {self.box.mountpoint} " in mounttable.mounts()

    def wait_exit(self) -> int:
        ended = self.box.fsd("wait-exit", os.fspath(self.box.mountpoint), check=False)
        print(ended.stdout, ended.stderr, self.box.logs())  # shown where a cell fails
        return ended.returncode

    def status_code(self, *argv: str) -> int:
        return self.box.fsd(*argv, os.fspath(self.box.mountpoint), check=False).returncode

    # The seven ways. Each returns when the mount has ended.

    def own_command(self) -> None:
        if self.fd is not None:
            busy = self.box.fsd("unmount", os.fspath(self.box.mountpoint), check=False)
            assert busy.returncode == 7
            assert str(os.getpid()) in busy.stderr
            assert self.listed()
            self.close_file()
        answer = self.box.unmount()
        assert (answer["status"], answer["pending"]) == ("unmounted", NOTHING)
        assert not self.listed()

    def by_system(self, *command: str) -> None:
        if self.fd is not None:
            assert subprocess.run(command, capture_output=True, timeout=50, check=False).returncode != 0
            assert self.listed()
            self.close_file()
        subprocess.run(command, check=True, timeout=50)
        assert not self.listed()
        assert self.wait_exit() == 0

    def umount(self) -> None:
        self.by_system("umount", os.fspath(self.box.mountpoint))

    def fusermount3(self) -> None:
        self.by_system("fusermount3", "-u", os.fspath(self.box.mountpoint))

    def sigterm(self) -> None:
        os.kill(self.box.daemon, signal.SIGTERM)
        assert self.wait_ended() == 0

    def sigint_twice(self) -> None:
        # The server answers nothing, so that the first stop cannot be over before the second.
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            os.kill(self.box.daemon, signal.SIGINT)
            os.kill(self.box.daemon, signal.SIGINT)
            code = self.wait_ended()
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        self.check_code(code, twice=True)

    def sigkill(self) -> None:
        self.box.kill()

    def server_gone(self) -> None:
        self.server.kill()
        try:
            os.kill(self.box.pids[0], signal.SIGTERM)
            code = self.wait_ended()
        finally:
            self.server.restart()
        self.check_code(code)

    def check_code(self, code: int, *, twice: bool = False) -> None:
        """Of a stop without a server, which is there again now. 0 means that all had been sent before; it may
        have arrived without an answer. `twice`: asked to leave at once, it did not look what is left."""
        sent = self.sent()
        assert code in (0, 6)
        assert sent or code == 6, "it said that all is sent"
        assert twice or code == 0 or self.state != "fsynced", "it said that something is left"

    def sent(self) -> bool:
        """Whether the server has what was done last."""
        found = committed_tree(self.fs.token, self.server.url)
        if self.state == "deleted":
            return "dir/file" not in found
        there = found.get("dir/file")
        return there is not None and there.content == hashlib.sha256(self.content).hexdigest()

    def wait_ended(self) -> int:
        """When nothing is mounted any more: how the daemon ended."""
        wait_for(lambda: not self.listed(), 60, "the detach")
        return self.wait_exit()


def play(cell: Cell, way: str) -> None:
    try:
        cell.prepare()
        getattr(cell, way)()
        cell.ended = True
        cell.close_file()
        cell.box.mount()
        cell.check()
        answer = cell.box.unmount()
        assert answer["status"] == "unmounted"
    finally:
        cell.ended = True  # what a close says now is not what failed
        cell.close_file()
        cell.box.close()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_end(trusted: Server, tmp_path: Path, way: str, state: str, attempt: int) -> None:
    play(Cell(trusted, tmp_path / "box", way, state), way)


def test_a_stop_that_has_no_time_left_detaches_a_mount_in_use(trusted: Server, tmp_path: Path) -> None:
    """On a busy machine three seconds were none: whatever came to the place then met a dead mount."""
    play(Cell(trusted, tmp_path / "box", "server_gone", "open_and_written", patience="100ms"), "server_gone")
