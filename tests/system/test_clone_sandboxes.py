"""A running sandbox is copied, its state directory and all, and both go on: the files of both are there.

Real processes; the copy has the same paths, so the same mount id, as a clone by a platform has.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clone import Clone, copy_of, frozen
from support.processes import die_with_parent
from support.proxy import LOSE_REPLY, SWALLOW_REPLY, FaultProxy, delay, delay_reply, on
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.root, pytest.mark.timeout(240)]

COMMITS = on("commits")


class Scene:
    """A first sandbox behind a proxy of its own, its copy, and every content that was acknowledged."""

    def __init__(self, server: Server, base: Path) -> None:
        self.base = base
        self.proxy = FaultProxy(server.url)
        self.fs = server.create()
        self.first = Sandbox(base / "box", self.fs, endpoint=self.proxy.url, supervised=True)
        self.clone: Clone | None = None
        self.written: set[bytes] = set()
        self.first.mount()

    def close(self) -> None:
        self.proxy.clear()
        if self.clone is not None:
            self.clone.close()
        self.first.close()
        self.proxy.close()

    def write(self, top: Path, name: str) -> bytes:
        """A file with content found nowhere else."""
        content = b"%s:%s\n" % (name.encode(), secrets.token_hex(20).encode()) * 50
        path = top / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.written.add(content)
        return content

    def work(self, top: Path, who: str) -> None:
        """Files of its own, and one of a name that both copies write; a rename, a removal."""
        for number in range(8):
            self.write(top, f"{who}-{number}")
            self.write(top, f"dir-{who}/{number}")
        # The rename moves it and the removed one is meant to be gone.
        (top / f"{who}-0").rename(top / f"{who}-moved")
        gone = (top / f"{who}-1").read_bytes()
        (top / f"{who}-1").unlink()
        self.written.discard(gone)
        self.write(top, "shared")

    def copy(self) -> None:
        """Copy the first sandbox as it is at this moment."""
        with frozen(self.first):
            copied = copy_of(self.first, self.base / "copy")
        self.clone = Clone(self.first, copied)

    def both_drain(self) -> None:
        assert self.clone is not None
        for box in (self.first, self.clone):
            assert box.drain()["status"] == "drained"
            assert box.unmount()["status"] == "unmounted"

    def check(self, conflicts: bool) -> set[str]:
        """A third mount elsewhere has all content; what differs has a conflict's name and is listed."""
        third = Sandbox(self.base / "third", self.fs)
        try:
            third.mount()
            found: dict[bytes, str] = {}
            names = []
            for directory, _, files in os.walk(third.mountpoint):
                for name in files:
                    path = Path(directory, name)
                    found[path.read_bytes()] = name
                    names.append(os.path.relpath(path, third.mountpoint))
            lost = self.written - set(found)
            assert not lost, f"lost {[text[:30] for text in lost]}; there is {sorted(names)}"
            copies = {name for name in names if ".conflict-" in name}
            assert bool(copies) == conflicts, sorted(names)
            listed = third.json("conflicts")["conflicts"]
            assert {entry["path"].lstrip("/") for entry in listed} == copies
            # Without a conflict no name is there twice.
            assert len(found) == len(names), sorted(names)
            third.unmount()
            return set(names)
        finally:
            third.close()


@contextmanager
def scene(server: Server, base: Path) -> Iterator[Scene]:
    made = Scene(server, base)
    try:
        yield made
    finally:
        made.close()


def test_a_copy_with_everything_sent(trusted: Server, tmp_path: Path) -> None:
    with scene(trusted, tmp_path) as play:
        play.work(play.first.mountpoint, "before")
        play.first.drain()
        play.copy()
        assert play.clone is not None
        play.written.discard((play.first.mountpoint / "shared").read_bytes())  # both write it anew
        play.work(play.first.mountpoint, "first")
        play.first.drain()
        # The copy starts anew and reads what the first one sent meanwhile: no conflict.
        play.clone.mount()
        play.written.discard((play.clone.inside / "shared").read_bytes())
        play.work(play.clone.inside, "second")
        play.both_drain()
        assert {"first-moved", "second-moved", "before-moved", "shared"} <= play.check(conflicts=False)


def test_both_write_the_same_name_before_either_sends(trusted: Server, tmp_path: Path) -> None:
    with scene(trusted, tmp_path) as play:
        play.copy()
        assert play.clone is not None
        play.clone.mount()
        play.proxy.always(delay_reply(3), COMMITS)
        play.work(play.first.mountpoint, "first")
        play.work(play.clone.inside, "second")
        play.proxy.clear()
        play.both_drain()
        names = play.check(conflicts=True)
        assert any(name.startswith("shared.conflict-") for name in names)


class Holder:
    """A process that keeps a file of the mount open and writes to it. (Not the test's: a child that it
    starts while the daemon is frozen would close the file, and hang in that.)"""

    SCRIPT = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | int(sys.argv[2]))
for line in sys.stdin.buffer:
    os.write(fd, line)
    print(flush=True)
"""

    def __init__(self, path: Path, flags: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT, os.fspath(path), str(flags)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"\n"

    def close(self) -> None:
        """The file is closed when this returns."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.mark.parametrize("order", ["first_sends_before", "copy_sends_before", "first_changes_after"])
def test_a_copy_with_unsent_changes(trusted: Server, tmp_path: Path, order: str) -> None:
    """Nothing of what lay in the log at the copy makes a conflict, unless the first went on changing it."""
    with scene(trusted, tmp_path) as play:
        play.work(play.first.mountpoint, "settled")
        play.first.drain()
        play.written.discard((play.first.mountpoint / "shared").read_bytes())
        play.proxy.refuse()
        play.work(play.first.mountpoint, "unsent")
        top = play.first.mountpoint
        holders = [Holder(top / "open", 0), Holder(top / "appended", os.O_APPEND)]
        for number, holder in enumerate(holders):
            holder.write(b"%d before the copy" % number)
        play.copy()
        assert play.clone is not None
        for number, holder in enumerate(holders):
            if order == "first_changes_after":
                holder.write(b"%d after the copy" % number)
            holder.close()
        play.proxy.accept()
        if order == "copy_sends_before":
            play.first.signal(signal.SIGSTOP)
            play.clone.mount()
            play.first.signal(signal.SIGCONT)
            play.first.drain()
        else:
            play.first.drain()
            play.clone.mount()
        # What both have differs from here on.
        play.written = {text for text in play.written if not text.startswith(b"shared")}
        play.work(play.first.mountpoint, "first")
        play.clone.wait_shown(play.first.drain()["fs_seq"])
        (play.clone.inside / "shared").unlink()
        play.written = {text for text in play.written if not text.startswith(b"shared")}
        play.work(play.clone.inside, "second")
        play.both_drain()
        names = play.check(conflicts=order == "first_changes_after")
        assert {"unsent-moved", "first-moved", "second-moved", "open"} <= names
        for number, name in enumerate(("open", "appended")):
            got = play.fs.ask("GET", f"/files/{name}").body.splitlines()
            wanted = [b"%d before the copy" % number] + [b"%d after the copy" % number] * order.endswith(
                "after"
            )
            # What both appended may be added behind (sharing rule 5): a line of both is then there twice.
            assert got in (wanted, *([wanted + wanted[:1]] if number and order.endswith("after") else []))


@pytest.mark.parametrize(
    "fault", ["the server acted", pytest.param("the server has it before it", marks=pytest.mark.long)]
)
def test_a_copy_in_the_middle_of_a_commit(trusted: Server, tmp_path: Path, fault: str) -> None:
    """The commit is sent by both; it counts once."""
    with scene(trusted, tmp_path) as play:
        play.proxy.reset_counts()
        play.proxy.next(SWALLOW_REPLY if fault == "the server acted" else delay(4), COMMITS)
        play.work(play.first.mountpoint, "under-way")
        drain = threading.Thread(target=play.first.fsd, args=("drain", os.fspath(play.first.mountpoint)))
        drain.start()
        wait_for(lambda: play.proxy.pending() == 0, 30, "the commit to be under way")
        play.copy()
        assert play.clone is not None
        play.clone.mount()
        (play.clone.inside / "shared").unlink()
        play.written = {text for text in play.written if not text.startswith(b"shared")}
        play.work(play.clone.inside, "second")
        play.clone.drain()
        play.proxy.cut_all()
        drain.join(60)
        assert not drain.is_alive()
        play.work(play.first.mountpoint, "first")
        play.written = {text for text in play.written if not text.startswith(b"shared")}
        play.both_drain()
        assert {"under-way-moved", "first-moved", "second-moved"} <= play.check(conflicts=False)


def test_two_sandboxes_from_one_snapshot(trusted: Server, tmp_path: Path) -> None:
    """The first ended; two are started from what it left."""
    with scene(trusted, tmp_path) as play:
        assert os.listdir(play.first.mountpoint) == []  # known from here on without the server
        play.proxy.refuse()
        play.work(play.first.mountpoint, "unsent")
        play.copy()
        assert play.clone is not None
        play.first.kill()
        play.proxy.accept()
        play.first.mount()
        play.clone.mount()
        assert (play.first.mountpoint / "shared").read_bytes() == (play.clone.inside / "shared").read_bytes()
        (play.first.mountpoint / "shared").unlink()
        play.first.drain()
        play.written = {text for text in play.written if not text.startswith(b"shared")}
        for number in range(3):
            play.write(play.first.mountpoint, f"first-{number}")
            play.write(play.clone.inside, f"second-{number}")
        play.both_drain()
        names = play.check(conflicts=False)
        assert {"unsent-moved", "first-2", "second-2"} <= names
        assert "shared" not in names


def test_a_copy_mounted_at_another_place(trusted: Server, tmp_path: Path) -> None:
    """Its state belongs to the first place: it is named at start, kept, and sent by `fsd recover`."""
    with scene(trusted, tmp_path) as play:
        assert os.listdir(play.first.mountpoint) == []
        play.proxy.refuse()
        play.work(play.first.mountpoint, "unsent")
        with frozen(play.first):
            copied = copy_of(play.first, tmp_path / "copy")
        old = os.fspath(play.first.mountpoint)
        play.first.lose()  # the first is gone for good, its unsent changes with it
        play.proxy.accept()
        other = Sandbox(tmp_path / "other", play.fs, state=copied / "state")
        try:
            argv = ("mount", os.fspath(other.mountpoint), "--state-dir", os.fspath(other.state))
            told = other.fsd(*argv, "--no-supervisor", "--output", "json")
            other._note(json.loads(told.stdout))
            assert old in told.stderr, told.stderr
            assert os.listdir(other.mountpoint) == []
            sent = other.json("recover", old, "--state-dir", os.fspath(other.state))
            assert sent["status"] == "recovered"
            wait_for(lambda: (other.mountpoint / "unsent-moved").exists(), 30, "the mount to show it")
            other.unmount()
        finally:
            other.close()
        play.check(conflicts=False)


LOAD = """
import os, random, sys
top, who, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
os.chdir(top)
os.makedirs("files", exist_ok=True)
at = 0
print(flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        at += 1
        token = f"<{who}-{at}-{rng.randrange(10**9)}>\\n"
        text = token * rng.choice((1, 10, 3000))
        kind = rng.randrange(5)
        if kind < 2:
            with open(f"files/{who}-{at}", "x") as file:
                file.write(text)
        elif kind == 2:
            with open("all.log", "a") as file:
                file.write(token)
        elif kind == 3:
            with open(f".{who}.tmp", "w") as file:
                file.write(text)
            os.rename(f".{who}.tmp", f"files/{who}-renamed-{at}")
        else:
            with open(f"files/{who}-synced-{at}", "x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        print(token, end="", flush=True)
    print(flush=True)
"""


class Load:
    """A process that writes. `tokens`: what it was acknowledged; each is in one file."""

    def __init__(self, top: Path, who: str, seed: int) -> None:
        self.tokens: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOAD, os.fspath(top), who, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "\n"

    def start(self, count: int) -> None:
        """Begin to write `count` things."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Until all that was begun is acknowledged."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) != "\n":
            assert line, "the writer failed"
            self.tokens.append(line)

    def close(self) -> None:
        self.process.communicate(timeout=30)


def test_a_copy_at_any_moment_of_a_busy_sandbox(trusted: Server, tmp_path: Path, turn: int) -> None:
    seed = secrets.randbelow(10**9)
    rng = random.Random(seed)
    with scene(trusted, tmp_path) as play:
        first = Load(play.first.mountpoint, "first", seed)
        first.start(300)
        threading.Event().wait(rng.random() * 1.5)
        if rng.random() < 0.5:
            play.proxy.next(rng.choice((SWALLOW_REPLY, LOSE_REPLY, delay(1))), COMMITS)
        play.copy()
        assert play.clone is not None
        order = rng.random() < 0.5
        if order:
            first.finish()
            play.proxy.clear()
            play.proxy.cut_all()
            play.first.drain()
        play.clone.mount()
        second = Load(play.clone.inside, "second", seed + 1)
        second.start(100)
        if not order:
            first.finish()
            play.proxy.clear()
            play.proxy.cut_all()
        second.finish()
        for load in (first, second):
            load.start(50)
        for load in (first, second):
            load.finish()
            load.close()
        play.both_drain()
        third = Sandbox(play.base / "third", play.fs)
        try:
            third.mount()
            there = "".join(path.read_text() for path in third.mountpoint.rglob("*") if path.is_file())
            lost = [token for token in first.tokens + second.tokens if token not in there]
            assert not lost, (
                f"seed {seed}: {len(lost)} of {len(first.tokens)} and {len(second.tokens)}: {lost[:5]}"
            )
            assert len(first.tokens) == 350
            assert len(second.tokens) == 150
            third.unmount()
        finally:
            third.close()
