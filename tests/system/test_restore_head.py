"""`--restore-head` of several sandboxes at once: one restores, whatever happens to it, and nobody else puts
anything beside or over it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import command
from support.sandbox import Sandbox, alive
from support.server import Server, TestFs
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(200)]

FILES = 300


def captured(box: Sandbox, files: int = FILES) -> dict[str, bytes]:
    """Put a tree into the thread; what it holds."""
    source = box.base / "source"
    wanted = {f"d{at % 10}/f{at}": b"content %d" % at for at in range(files)}
    for path, data in wanted.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    box.fsd("checkpoint", "capture", os.fspath(source), "--thread", "chat")
    return wanted


def tree(box: Sandbox) -> dict[str, bytes]:
    top = box.mountpoint
    return {str(at.relative_to(top)): at.read_bytes() for at in sorted(top.rglob("*")) if at.is_file()}


class Start:
    """`fsd mount` of a sandbox, under way."""

    def __init__(self, box: Sandbox, *options: str, thread: str = "chat") -> None:
        self.box, self.said = box, ""
        own = Path(box.env["XDG_RUNTIME_DIR"]) / "fsd"
        self.runtime = Path("/run/fsd") if os.geteuid() == 0 and os.access("/run", os.W_OK) else own
        words = ["mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), *box.options]
        self.process = subprocess.Popen(
            [*command(), *words, "--thread", thread, "--restore-head", *options, "--output", "json"],
            env=box.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def end(self, timeout: float = 90) -> int:
        """Its exit code."""
        code = self.process.wait(timeout)
        self._reader.join()
        assert self.process.stdout is not None
        told = self.process.stdout.read()
        if code == 0:
            self.box._note(json.loads(told))
        return code

    def pids(self) -> list[int]:
        """Of the daemon and what runs for it."""
        place = os.fspath(self.box.mountpoint)
        records = [json.loads(at.read_text()) for at in self.runtime.glob("*.json")]
        (daemon,) = [int(one["pid"]) for one in records if one["mountpoint"] == place]
        below = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
        return [daemon, *map(int, below)]


@pytest.fixture
def boxes(shared_server: Server, short_dir: Path) -> Iterator[list[Sandbox]]:
    fs = shared_server.create()
    made = [Sandbox(short_dir / name, fs) for name in "abc"]
    try:
        yield made
    finally:
        for box in made:
            box.close()


def begun(box: Sandbox, *options: str) -> tuple[Start, list[int]]:
    """A restore whose process stands still while it fetches, of which the service knows."""
    start = Start(box, *options)

    def under_way() -> bool:
        return any(name.startswith(".fsd-restore-") for name in os.listdir(box.mountpoint))

    wait_for(lambda: os.path.ismount(box.mountpoint) and under_way(), 60, "the restore", every=0.005)
    pids = start.pids()
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: box.fs.ask("GET", "/list/").json["entries"], 30, "the service to know of it")
    return start, pids


def conflicts(fs: TestFs) -> Any:
    return fs.ask("GET", "/conflicts/").json["conflicts"]


@pytest.mark.parametrize("option", ["", "--if-empty"])
def test_one_of_several_restores(boxes: list[Sandbox], option: str) -> None:
    wanted = captured(boxes[0])
    options = [option] if option else []
    starts = [Start(box, *options) for box in boxes]
    codes = [start.end() for start in starts]
    for box, start, code in zip(boxes, starts, codes):
        if code:
            assert "is not empty" in start.said and "--if-empty" in start.said
            assert not os.path.ismount(box.mountpoint)
            box.mount()
        elif option and "restored the checkpoint" not in start.said:
            assert "nothing was restored" in start.said
        assert tree(box) == wanted
    restored = [start for start in starts if "restored the checkpoint" in start.said]
    assert len(restored) == 1
    assert sorted(codes) == ([0, 0, 0] if option else [0, 1, 1])
    assert not conflicts(boxes[0].fs)
    assert not boxes[0].fs.ask("GET", "/leases").json["leases"]


def test_states_of_the_filesystem_are_restored_by_one_too(boxes: list[Sandbox]) -> None:
    """And what anybody had written when the service comes to do it is not replaced."""
    first, second, third = boxes
    first.mount()
    (first.mountpoint / "f").write_text("kept")
    first.json("checkpoint", "create")
    (first.mountpoint / "f").unlink()
    first.unmount()
    thread = f"fsd:{first.fs.id}"
    starts = [Start(box, "--if-empty", thread=thread) for box in (second, third)]
    assert [start.end() for start in starts] == [0, 0]
    assert sum("restored the checkpoint" in start.said for start in starts) == 1
    assert tree(second) == tree(third) == {"f": b"kept"}
    (checkpoint,) = [
        one["checkpoint_id"]
        for one in first.fs.ask("GET", "/checkpoints").json["checkpoints"]
        if one["reason"] == "named"
    ]
    for path in ({}, {"path": "/sub"}):
        if path:
            assert first.fs.ask("PUT", "/files/sub/new?parents=1", b"new").status == 200
        body = {"checkpoint": checkpoint, "force": True, "empty": True, **path}
        refused = first.fs.ask("POST", "/restore", body)
        assert refused.status == 409 and refused.json["error"]["code"] == "conflict"
    assert first.fs.ask("GET", "/files/sub/new").body == b"new"


@pytest.fixture
def held(boxes: list[Sandbox]) -> TestFs:
    """The lock is another's, who does not give it up."""
    fs = boxes[0].fs
    body = {"path": "/.fsd-restore-head", "host": "other", "command": "x", "ttl_s": 120}
    assert fs.ask("POST", "/leases", body).status == 201
    return fs


@pytest.mark.parametrize("how", ["interrupt", "unmount"])
def test_who_waits_for_another_can_be_stopped(boxes: list[Sandbox], held: TestFs, how: str) -> None:
    """And nothing is restored afterwards, least of all into the directory below."""
    box = boxes[0]
    captured(box, 3)
    start = Start(box)
    wait_for(lambda: "waiting" in start.said, 60, "it to wait")
    pids = start.pids()
    if how == "interrupt":
        start.process.send_signal(signal.SIGINT)
    else:
        subprocess.run(["fusermount3", "-u", os.fspath(box.mountpoint)], check=True, timeout=50)
    assert start.end() != 0
    wait_for(lambda: not any(alive(pid) for pid in pids), 60, "all of it to end")
    assert not os.path.ismount(box.mountpoint) and not os.listdir(box.mountpoint)
    assert held.ask("GET", "/list/").json["entries"] == []


@pytest.mark.long
def test_a_sandbox_that_is_lost_while_it_restores_leaves_word(boxes: list[Sandbox]) -> None:
    """Others wait for it, as long as it lives and its lock after that; none takes a part for the whole."""
    first, second, third = boxes
    wanted = captured(first, 2000)
    lost, pids = begun(first)
    waiting = Start(second, "--if-empty")
    wait_for(lambda: "waiting" in waiting.said, 60, "the second to wait")
    assert waiting.process.poll() is None
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    first.detach()
    assert lost.end() == 1
    assert waiting.end() == 1
    assert "did not end" in waiting.said and "--exclusive" in waiting.said
    assert Start(third, "--if-empty").end() == 1, "nor later"
    again = Start(third, "--exclusive")
    assert again.end() == 0
    assert tree(third) == wanted
    third.unmount()
    assert Start(third, "--exclusive", "--if-empty").end() == 0
    assert tree(third) == wanted and not conflicts(third.fs)


def test_who_loses_the_lock_while_it_fetches_puts_nothing_there(boxes: list[Sandbox]) -> None:
    """A sandbox that was paused for longer than the lock lasts: another may have restored. What it was about
    to do is taken back on the service too, or nobody could restore there."""
    first, second, _ = boxes
    wanted = captured(first, 2000)
    lost, pids = begun(first)
    (lease,) = first.fs.ask("GET", "/leases").json["leases"]
    assert first.fs.ask("POST", f"/leases/{lease['fence']}/release", {}).status == 200
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    assert lost.end() != 0
    assert first.fs.ask("GET", "/list/").json["entries"] == []
    assert Start(second, "--if-empty").end() == 0
    assert tree(second) == wanted and not conflicts(second.fs)


def test_one_that_is_stopped_while_it_fetches_leaves_nothing(boxes: list[Sandbox]) -> None:
    """Nothing of it was in its place yet: the next one need not be told to replace anything."""
    box = boxes[0]
    captured(box, 2000)
    stopped, pids = begun(box)
    stopped.process.send_signal(signal.SIGINT)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    assert stopped.end() != 0
    wait_for(lambda: not any(alive(pid) for pid in pids), 60, "all of it to end")
    assert box.fs.ask("GET", "/list/").json["entries"] == []


def test_one_that_is_stopped_while_it_puts_things_in_place_ends_that_first(boxes: list[Sandbox]) -> None:
    """A part of the checkpoint would be in the way of everybody else."""
    first, second, _ = boxes
    wanted = captured(first, 1000)
    stopped = Start(first, "--stop-timeout", "300")
    wait_for(lambda: (first.mountpoint / "d0").exists(), 120, "the first to be in its place", every=0.002)
    pids = stopped.pids()
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.end() != 0
    wait_for(lambda: not any(alive(pid) for pid in pids), 100, "all of it to end")
    for lease in first.fs.ask("GET", "/leases").json["leases"]:  # as it would expire
        assert first.fs.ask("POST", f"/leases/{lease['fence']}/release", {}).status == 200
    assert Start(second, "--if-empty").end() == 0
    assert tree(second) == wanted and not conflicts(second.fs)


def test_others_wait_for_one_that_replaces_what_is_there(boxes: list[Sandbox]) -> None:
    first, second, _ = boxes
    wanted = captured(first, 2000)
    replacing, pids = begun(first, "--exclusive")
    other = Start(second, "--if-empty")
    wait_for(lambda: "waiting" in other.said or other.process.poll() is not None, 60, "the second to wait")
    assert other.process.poll() is None, other.said
    for pid in pids[1:]:
        os.kill(pid, signal.SIGCONT)
    assert replacing.end() == 0
    assert other.end() == 0
    assert "nothing was restored" in other.said
    assert tree(second) == wanted


def test_a_state_comes_back_into_a_subtree_whose_name_is_no_text(boxes: list[Sandbox]) -> None:
    box = boxes[0]
    box.mount()
    top = os.fsencode(box.mountpoint) + b"/\xff"
    os.mkdir(top)
    with open(top + b"/f", "w") as file:
        file.write("kept")
    box.json("checkpoint", "create")
    os.unlink(top + b"/f")
    box.unmount()
    start = Start(box, "--remote-path", os.fsdecode(b"/\xff"), thread=f"fsd:{box.fs.id}")
    assert start.end() == 0, start.said
    assert tree(box) == {"f": b"kept"}
