"""A service that is set back to an older copy of its data, and a state directory that is removed, with real
processes: what the mounts do, what the commands say."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.cli import process
from support.sandbox import Sandbox, sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(180)]


def put(path: Path, data: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def copied(server: Server, to: Path) -> None:
    server.stop()
    shutil.copytree(server.data_dir, to)
    server.restart()


def set_back(server: Server, to: Path) -> None:
    """Of a stopped server."""
    shutil.rmtree(server.data_dir)
    shutil.copytree(to, server.data_dir)
    server.restart()


def cut_off(box: Sandbox) -> bool:
    return bool(box.status()["read_only"])


def test_mounts_of_a_service_that_was_set_back(server: Server, short_dir: Path, tmp_path: Path) -> None:
    fs = server.create()
    with sandbox(short_dir / "a", fs) as first:
        put(first.mountpoint / "old", b"old")
        copied(server, tmp_path / "copy")
        with sandbox(short_dir / "b", fs) as second:
            put(second.mountpoint / "late", b"acknowledged, and lost with the data")
            handle = os.open(second.mountpoint / "late", os.O_RDWR)
            put(first.mountpoint / "new", b"new")
            first.drain()
            (first.mountpoint / "pending").touch()
            pending = os.open(first.mountpoint / "pending", os.O_WRONLY)
            server.stop()
            os.write(pending, b"pending")
            os.close(pending)
            set_back(server, tmp_path / "copy")
            third = Sandbox(short_dir / "c", fs)
            try:
                third.mount()
                assert third.status()["mount_session_id"] == second.status()["mount_session_id"]
                for at in range(10):
                    put(third.mountpoint / f"theirs{at}", b"theirs")
                wait_for(lambda: cut_off(first) and cut_off(second), 30, "the mounts to hear of it")
                with pytest.raises(OSError) as told:
                    os.pwrite(handle, b"never", 0)
                assert told.value.errno == errno.EROFS
                os.close(handle)
                assert all((third.mountpoint / f"theirs{at}").read_bytes() == b"theirs" for at in range(10))
                third.unmount()
            finally:
                third.close()
            second.unmount()  # nothing left to send: 0
        assert (first.mountpoint / "pending").read_bytes() == b"pending"
        place = os.fspath(first.mountpoint)
        assert first.fsd("unmount", place, check=False).returncode == 6
        again = first.fsd("mount", place, "--state-dir", os.fspath(first.state), check=False)
        assert again.returncode == 6
        assert "older copy" in again.stderr
        taken = tmp_path / "taken"
        state = ("--state-dir", os.fspath(first.state))
        assert first.fsd("recover", place, *state, "--export", os.fspath(taken), check=False).returncode == 6
        assert (taken / "pending").read_bytes() == b"pending"
        assert first.fsd("recover", place, *state, "--discard", "--yes").returncode == 0
        first.mount()
        assert sorted(os.listdir(first.mountpoint)) == ["old", *(f"theirs{at}" for at in range(10))]
        first.unmount()
    server.stop()
    assert process("audit", "--data-dir", os.fspath(server.data_dir)).code == 0


def test_a_state_directory_removed_under_a_mount(server: Server, short_dir: Path) -> None:
    fs = server.create()
    with sandbox(short_dir / "a", fs) as box:
        for name in ("before", "after"):
            (box.mountpoint / name).touch()
        before, after = (os.open(box.mountpoint / name, os.O_WRONLY) for name in ("before", "after"))
        server.stop()
        os.write(before, b"before" * 50_000)
        shutil.rmtree(box.state)
        wait_for(lambda: list(box.state.rglob("log.*")), 30, "the log to be back")
        for at in range(70):
            os.pwrite(after, os.urandom(1 << 20), at << 20)
        os.close(before)
        os.close(after)
        box.kill()
        server.restart()
        box.mount()
        assert (box.mountpoint / "before").read_bytes() == b"before" * 50_000
        assert (box.mountpoint / "after").stat().st_size == 70 << 20
        assert box.drain()["status"] == "drained"
        box.unmount()
    server.stop()
    assert process("audit", "--data-dir", os.fspath(server.data_dir)).code == 0
