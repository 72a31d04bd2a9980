"""The durability table (README), row by row: each cell cuts a recorded run at a random moment and checks
exactly what the row promises. `scripts/test` plays one round of each cell, `scripts/test --all` fifty.

FSD_TEST_SEED repeats a round; the seed stands in every failure. The row of `fsd checkpoint create` comes with
checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cli import inside
from support.loopdisk import LoopDisk
from support.loopdisk import available as loop_available
from support.reading import committed_tree
from support.recording import Found, History, Recording, read_tree
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.wait import wait_for

pytestmark = pytest.mark.kernel

FLUSH_AGE = 2.0  # after so long what was written is on its way without anybody asking
STALL = 10.0  # for which the daemon stands still together with who uses it
TRANSFER = 40.0  # what a few hundred small files may take on a busy machine
DAEMON, RESTART, LOST, SERVER = (
    "the daemon is killed",
    "the machine restarts",
    "the sandbox is lost",
    "the server crashes",
)


class Round:
    """One recorded run, cut. Everything it starts ends with it."""

    def __init__(self, server: Server, base: Path, stack: ExitStack) -> None:
        self.seed = int(os.environ.get("FSD_TEST_SEED", "0")) or secrets.randbits(32)
        print(f"FSD_TEST_SEED={self.seed}")
        self.random = random.Random(self.seed)
        self.server, self.base, self._stack = server, base, stack
        self.fs: TestFs = server.create()
        self.disk: LoopDisk | None = None
        self.sandbox: Sandbox
        self.recording: Recording
        self.cut_at = 0.0

    def begin(self, profile: str, *options: str, disk: bool = False, supervised: bool = False) -> None:
        """A mounted sandbox (`disk`: its state on a disk that can die) with a recorder at work in it."""
        state = None
        if disk and loop_available(self.base) is None:
            self.disk = self._stack.enter_context(LoopDisk(self.base / "l", 128))
            state = self.disk.path / "state"
        self.sandbox = Sandbox(self.base / "a", self.fs, *options, state=state, supervised=supervised)
        self._stack.callback(self.sandbox.close)
        self.sandbox.mount()
        self.recording = Recording(self.sandbox.mountpoint, self.seed, profile)
        self._stack.callback(self.recording.stop)
        # A random call, and a random moment in it.
        self.recording.wait_acked(self.random.randint(200, 320))
        threading.Event().wait(self.random.random() * 0.01)

    def history(self) -> History:
        """The model of the run, once it is over; fails where nothing was at stake."""
        self.recording.stop()
        assert len(self.recording.acked) >= 200
        fresh = sum(at > self.cut_at - FLUSH_AGE - STALL for at in self.recording.acked)
        assert fresh, "nothing was at stake: everything was old enough to be flushed"
        return self.recording.history()

    # The ways to cut.

    def kill_daemon(self) -> None:
        """SIGKILL; the supervisor mounts again."""
        killed = self.sandbox.daemon
        self.cut_at = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        self.recording.stop()
        self.sandbox.wait_remounted(killed)

    def restart_machine(self, *, synced: bool = False) -> None:
        """Everything stops at once, what was not synced is gone; another boot mounts the place again.
        `synced`: all of the log was, so that without a disk of its own nothing of it is torn."""
        self.cut_at = time.monotonic()
        self.sandbox.signal(signal.SIGSTOP)
        if self.disk:
            self.disk.die()
        self.sandbox.kill()
        self.sandbox.detach()
        self.recording.stop()
        if self.disk:
            self.disk.remount()
        elif not synced:
            self.tear()
        self.sandbox.env["FSD_BOOT_ID"] = f"another-{self.seed}"
        self.sandbox.mount()

    def tear(self) -> None:
        """Without loop devices: the end of every log segment becomes what an unsynced disk could hold."""
        for segment in sorted(self.sandbox.state.glob("mounts/*/*")):
            if not segment.is_file() or segment.stat().st_size < 4096 or segment.name == "lock":
                continue
            raw = bytearray(segment.read_bytes())
            start = self.random.randrange(len(raw) // 2, len(raw))
            raw[start:] = bytes(len(raw) - start) if self.random.random() < 0.5 else b""
            segment.write_bytes(raw)

    def lose_sandbox(self) -> None:
        self.cut_at = time.monotonic()
        self.sandbox.lose()
        self.recording.stop()

    def crash_server_and_lose_sandbox(self) -> None:
        """Both at once: what is left is what the server had made durable."""
        self.cut_at = time.monotonic()
        self.server.kill()
        self.lose_sandbox()
        self.server.restart()

    def committed(self) -> Found:
        return committed_tree(self.fs.token, self.server.url)

    def shown(self) -> Found:
        return read_tree(self.sandbox.mountpoint)


@pytest.fixture
def play(trusted: Server, tmp_path_factory: pytest.TempPathFactory, turn: int) -> Iterator[Round]:
    with ExitStack() as stack:
        yield Round(trusted, tmp_path_factory.mktemp("s"), stack)


def everything_after_a_killed_daemon(play: Round, profile: str) -> None:
    """Shared by the rows whose first column says: kept."""
    play.begin(profile, supervised=True)
    play.kill_daemon()
    history = play.history()
    history.check_exact(play.shown())
    assert play.sandbox.status()["restarts"] == 1
    play.sandbox.drain()
    history.check_exact(play.committed())


# write(2) and every namespace call: kept | may be lost, never torn | may be lost | –


def test_write_and_namespace_calls_when_the_daemon_is_killed(play: Round) -> None:
    everything_after_a_killed_daemon(play, "plain")


def test_write_and_namespace_calls_when_the_machine_restarts(play: Round) -> None:
    play.begin("plain", disk=True)
    play.restart_machine()
    history = play.history()
    history.check_since(play.shown(), 0, {}, recovered=True)
    play.sandbox.drain()
    assert play.committed() == play.shown()


def test_write_and_namespace_calls_when_the_sandbox_is_lost(play: Round) -> None:
    play.begin("plain")
    play.lose_sandbox()
    play.history().check_since(play.committed(), 0, {})


# close(2): kept | as write | kept once flushed, with --durability close when it returns | as left


def test_close_when_the_daemon_is_killed(play: Round) -> None:
    play.begin("plain", "--durability", "close", supervised=True)
    play.kill_daemon()
    play.history().check_exact(play.shown())


def test_close_when_the_machine_restarts(play: Round) -> None:
    play.begin("plain", "--durability", "close", disk=True)
    play.restart_machine()
    history = play.history()
    history.check_since(play.shown(), history.closed_names, history.closed, recovered=True)


def test_close_when_the_sandbox_is_lost_after_the_flush_delay(play: Round) -> None:
    play.begin("plain")
    closed = play.recording.pause()
    play.cut_at = time.monotonic()
    wait_for(
        lambda: play.sandbox.status()["pending"]["operations"] == 0,
        FLUSH_AGE + TRANSFER,
        "the flush of what was closed",
        every=0.1,
    )
    play.sandbox.lose()
    history = play.history()
    still_open = history.open_at(closed)
    kept = {number: closed for number in range(1, 10_000) if number not in still_open}
    history.check_since(play.committed(), closed, kept)


def test_close_when_the_sandbox_is_lost_with_durability_close(play: Round) -> None:
    play.begin("plain", "--durability", "close")
    play.lose_sandbox()
    history = play.history()
    assert history.closed_names, "nothing was at stake: no file was closed"
    history.check_closed(play.committed())


def test_close_when_the_server_crashes(play: Round) -> None:
    play.begin("plain")
    play.cut_at = time.monotonic()
    play.server.kill()
    play.recording.wait_acked(len(play.recording.acked) + 50)
    play.server.restart()
    play.recording.stop()
    history = play.history()
    history.check_exact(play.shown())
    play.sandbox.drain()
    history.check_exact(play.committed())


# fsync, fdatasync, O_SYNC, O_DSYNC, msync, fsync of a directory: kept | kept | kept | kept


def test_fsync_and_its_kin_when_the_daemon_is_killed(play: Round) -> None:
    everything_after_a_killed_daemon(play, "sync")


def test_fsync_and_its_kin_when_the_machine_restarts(play: Round) -> None:
    play.begin("sync", disk=True)
    play.restart_machine()
    history = play.history()
    assert history.synced, "nothing was at stake: nothing was synced"
    history.check_synced(play.shown(), recovered=True)
    play.sandbox.drain()
    history.check_synced(play.committed(), recovered=True)


def test_fsync_and_its_kin_when_the_sandbox_is_lost(play: Round) -> None:
    play.begin("sync")
    play.lose_sandbox()
    synced_is_there(play)


def test_fsync_and_its_kin_when_the_server_crashes(play: Round) -> None:
    play.begin("sync")
    play.crash_server_and_lose_sandbox()
    synced_is_there(play)


def synced_is_there(play: Round) -> None:
    history = play.history()
    last = history.synced_names
    assert last and play.recording.acked[last - 1] > play.cut_at - FLUSH_AGE, "nothing was at stake"
    history.check_synced(play.committed())


# a store into a shared mapping: lost unless msync'ed or unmapped before | lost | lost | –


def test_a_store_into_a_shared_mapping_when_the_daemon_is_killed(play: Round) -> None:
    play.begin("map", supervised=True)
    play.kill_daemon()
    # What was stored into a mapping that is neither synced nor unmapped is not promised; the check knows.
    play.history().check_exact(play.shown())


# sync, syncfs: no promise; `fsd drain` is the way


def test_sync_promises_nothing_and_returns_and_drain_makes_the_promise(play: Round) -> None:
    play.begin("plain")
    subprocess.run(["sync", "-f", os.fspath(play.sandbox.mountpoint)], timeout=30, check=True)
    covered = len(play.recording.acked)
    play.sandbox.drain()
    late = play.recording.so_far() + 1  # one may be under way
    play.lose_sandbox()
    play.history().check_up_to(play.committed(), covered, late=late)


# system umount, fusermount3 -u: kept | kept | may be lost until the daemon has exited | –


def detached(play: Round, disk: bool = False) -> History:
    """A run ended by the system's own unmount, which has returned."""
    play.begin("plain", disk=disk)
    play.recording.stop()
    play.cut_at = time.monotonic()
    history = play.history()
    way = play.random.choice((["umount"], ["fusermount3", "-u"]))
    print("ended by", way)
    done = subprocess.run(
        [*way, os.fspath(play.sandbox.mountpoint)],
        timeout=60,
        env=play.sandbox.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + play.sandbox.logs()
    # Linux makes no unmount wait for a FUSE daemon: it learns of it at once, and syncs its log first. (umount
    # itself waits for more where the helper is installed.)
    wait_for(
        lambda: play.sandbox.record_state() in ("detached", "ended"), 30, "the daemon to notice", every=0.005
    )
    return history


def test_system_umount_when_the_daemon_is_killed(play: Round) -> None:
    history = detached(play)
    play.sandbox.kill()
    play.sandbox.mount()
    history.check_exact(play.shown())


def test_system_umount_when_the_machine_restarts(play: Round) -> None:
    history = detached(play, disk=True)
    play.restart_machine(synced=True)
    history.check_exact(play.shown())


def test_system_umount_when_the_sandbox_is_lost_after_wait_exit(play: Round) -> None:
    history = detached(play)
    play.sandbox.fsd("wait-exit", os.fspath(play.sandbox.mountpoint))
    play.sandbox.lose()
    history.check_exact(play.committed())


# fsd drain, fsd unmount, exit 0: kept | kept | kept | kept


@pytest.mark.parametrize("column", [DAEMON, RESTART, LOST, SERVER])
def test_drain_and_unmount(play: Round, column: str) -> None:
    play.begin("plain", disk=column == RESTART, supervised=column == DAEMON)
    drained = play.random.random() < 0.5
    print("drain" if drained else "unmount")
    if not drained:
        play.recording.stop()
    covered = len(play.recording.acked)
    play.cut_at = time.monotonic()
    answer = play.sandbox.drain() if drained else play.sandbox.unmount()
    late = play.recording.so_far() + 1  # one may be under way
    assert answer["pending"]["operations"] == 0 or drained
    cuts: dict[str, Callable[[], None]] = {
        DAEMON: play.kill_daemon if drained else play.sandbox.mount,
        RESTART: play.restart_machine,
        LOST: play.lose_sandbox,
        SERVER: play.crash_server_and_lose_sandbox,
    }
    before = play.cut_at
    cuts[column]()
    play.cut_at = before  # at stake is what was young when the promise was asked for
    history = play.history()
    found = play.shown() if column in (DAEMON, RESTART) else play.committed()
    if not drained or column == DAEMON:
        # A killed daemon loses nothing, and its mount shows what no server would: a file truncated and not
        # written yet.
        history.check_exact(found)
    else:
        history.check_up_to(found, covered, recovered=column == RESTART, late=late)


# a direct command, exit 0: – | – | kept | kept


class Commands:
    """Direct commands one after another, each acknowledged by its exit code 0."""

    def __init__(self, fs: TestFs, url: str, seed: int) -> None:
        self.env = {**fs.env, "FSD_ENDPOINT": url}
        self.random = random.Random(seed)
        self.files: dict[str, bytes] = {}
        self.entries = 0
        self.acked = 0
        self.under_way: tuple[str, bytes | None, int] = ("", None, 0)
        self.stop = threading.Event()

    def fsd(self, *argv: str, stdin: bytes = b"") -> bool:
        return inside(*argv, env=self.env, stdin=stdin).code == 0

    def run(self) -> None:
        if not self.fsd("journal", "create", "--journal-id", "j", "--output", "json"):
            return
        while not self.stop.is_set():
            path = f"/d{self.random.randrange(5)}/f{self.random.randrange(30)}"
            choice = self.random.random()
            data = self.random.randbytes(self.random.choice((0, 100, 70_000)))
            if choice < 0.3:
                self.under_way = ("", None, 1)
                entry = json.dumps({"type": "step", "n": self.entries})
                if not self.fsd("journal", "append", "--journal-id", "j", "--entry-json", entry):
                    return
                self.entries += 1
            elif choice < 0.4 and path in self.files:
                self.under_way = (path, None, 0)
                if not self.fsd("rm", path):
                    return
                del self.files[path]
            else:
                self.under_way = (path, data, 0)
                if not self.fsd("cp", "-", f":{path}", stdin=data):
                    return
                self.files[path] = data
            self.acked += 1
        self.under_way = ("", None, 0)


@pytest.mark.parametrize("column", [LOST, SERVER])
def test_a_direct_command(trusted: Server, turn: int, column: str) -> None:
    seed = int(os.environ.get("FSD_TEST_SEED", "0")) or secrets.randbits(32)
    print(f"FSD_TEST_SEED={seed}")
    fs = trusted.create()
    commands = Commands(fs, trusted.url, seed)
    thread = threading.Thread(target=commands.run)
    thread.start()
    count = random.Random(seed).randint(200, 260)
    wait_for(
        lambda: commands.acked >= count or not thread.is_alive(), 100, "acknowledged commands", every=0.001
    )
    if column == SERVER:
        trusted.kill()
        trusted.restart()
    commands.stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert commands.acked >= count and commands.files and commands.entries, "nothing was at stake"
    found = {
        path: value.content
        for path, value in committed_tree(fs.token, trusted.url).items()
        if value.kind == "f"
    }
    wanted = {path[1:]: hashlib.sha256(data).hexdigest() for path, data in commands.files.items()}
    path, data, entry = commands.under_way
    if found.get(path[1:]) != wanted.get(path[1:]):
        # The one command that was under way may have done its work.
        now = None if data is None else hashlib.sha256(data).hexdigest()
        assert found.pop(path[1:], None) == now
        wanted.pop(path[1:], None)
    assert found == wanted
    read = fs.ask("GET", "/journals/j/entries?limit=1000").json["entries"]
    assert [one["n"] for one in read[: commands.entries]] == list(range(commands.entries))
    assert len(read) - commands.entries in (0, entry)
