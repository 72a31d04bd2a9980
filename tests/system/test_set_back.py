"""A service that is set back to an older copy of its data, and a state directory that is removed, with real
processes: what the mounts do, what the commands say."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import Outcome, process
from support.postgres import PostgresServer
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


class Data:
    """What a server stores, in one of the ways it can be kept and set back."""

    def __init__(self, directory: Path, postgres: PostgresServer | None, *, running: bool = False) -> None:
        self.copy, self.postgres, self.running = directory / "copy", postgres, running
        self.url = postgres.fresh() if postgres is not None else None
        self.where = ["--database", self.url] if self.url else []
        self.server = Server(directory / "server", *self.where).start()

    def copied(self) -> None:
        """Of a stopped server, but for one that is to go on (PostgreSQL)."""
        if not self.running:
            self.server.stop()
        if self.postgres is not None and self.url is not None:
            self.postgres.dump(self.url, self.copy)
        else:
            shutil.copytree(self.server.data_dir, self.copy)
        if not self.running:
            self.server.restart()

    def set_back(self) -> None:
        """Of a stopped server, which starts again. Of PostgreSQL the objects stay as they are now."""
        if self.postgres is not None and self.url is not None:
            self.postgres.set_back(self.url, self.copy)
            if self.running:
                return
            done = self.audit("--repair", "--yes")
            assert done.code == 0, done.err
        else:
            shutil.rmtree(self.server.data_dir)
            shutil.copytree(self.copy, self.server.data_dir)
        self.server.restart()

    def audit(self, *words: str) -> Outcome:
        there = os.fspath(self.server.data_dir)
        where = [*self.where, "--blobs", f"{there}/blobs"] if self.where else ["--data-dir", there]
        return process("audit", *where, *words)


@pytest.fixture(params=["sqlite", "postgresql"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Data]:
    postgres = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    made = Data(tmp_path, postgres)
    try:
        yield made
    finally:
        made.server.end()


def cut_off(box: Sandbox) -> bool:
    return bool(box.status()["read_only"])


def test_mounts_of_a_service_that_was_set_back(data: Data, short_dir: Path, tmp_path: Path) -> None:
    server = data.server
    fs = server.create()
    with sandbox(short_dir / "a", fs) as first:
        put(first.mountpoint / "old", b"old")
        data.copied()
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
            data.set_back()
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
    assert data.audit("--read-data").code == 0


def test_a_database_that_is_set_back_under_a_running_server(
    postgres_server: PostgresServer, short_dir: Path, tmp_path: Path
) -> None:
    """Not what to do, but what happens: mounts that saw more are cut off, nobody's file becomes another."""
    data = Data(tmp_path, postgres_server, running=True)
    server = data.server
    try:
        fs = server.create()
        with sandbox(short_dir / "a", fs) as first:
            put(first.mountpoint / "old", b"old" * 100_000)
            data.copied()
            for at in range(20):
                put(first.mountpoint / f"late{at}", b"%d" % at * 90_000)
                assert fs.ask("PUT", f"/files/direct{at}", b"%d" % at * 90_000).status == 200
            data.set_back()
            wait_for(lambda: cut_off(first), 60, "the mount to hear of it")
            with pytest.raises(OSError) as told:
                (first.mountpoint / "more").touch()
            assert told.value.errno in (errno.EROFS, errno.ESTALE), "it would have to ask what is there"
            with sandbox(short_dir / "b", fs) as second:
                for at in range(20):
                    put(second.mountpoint / f"new{at}", b"%d." % at * 80_000)
                    assert fs.ask("PUT", f"/files/again{at}", b"%d," % at * 80_000).status == 200
                wanted = {f"new{at}": b"%d." % at * 80_000 for at in range(20)}
                wanted |= {f"again{at}": b"%d," % at * 80_000 for at in range(20)}
                wanted["old"] = b"old" * 100_000
                wait_for(lambda: len(os.listdir(second.mountpoint)) == len(wanted), 30, "all of it")
                assert {at.name: at.read_bytes() for at in second.mountpoint.iterdir()} == wanted
                assert {name: fs.ask("GET", f"/files/{name}").body for name in wanted} == wanted
                inos = [at.stat().st_ino for at in second.mountpoint.iterdir()]
                assert len(set(inos)) == len(wanted)
        server.stop()
        found = data.audit("--read-data")
        assert found.code == 0, found.out
    finally:
        server.end()


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
