"""Checkpoints made through a mount with programs at work, and mounts of them."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.cli import command
from support.proxy import CUT_REQUEST, HTML_502, LOSE_REPLY, FaultProxy, Request
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

from fsd.kernel.control_client import request
from fsd.model.limits import NOT_FLUSHED_MAX
from fsd.model.ops import CREATE, Create

pytestmark = pytest.mark.kernel


@pytest.fixture
def box(trusted: Server, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "box", trusted.create())
    made.mount()
    yield made
    made.close()


def cut(box: Sandbox, label: str, **more: Any) -> dict[str, Any]:
    """A checkpoint by the control socket."""
    args = {"ask": {"label": label}, "timeout": 30, **more}
    return request(Path(box.record).with_suffix(".sock"), "checkpoint", args, timeout=40)


@pytest.fixture
def at(box: Sandbox, tmp_path: Path) -> Iterator[Any]:
    """Mounts of states beside the box's own."""
    places: list[Path] = []

    def mount(*how: str) -> Path:
        place = tmp_path / f"at{len(places)}"
        place.mkdir()
        box.fsd("mount", str(place), "--state-dir", str(box.state), *how)
        places.append(place)
        return place

    yield mount
    for place in places:
        box.fsd("unmount", str(place), "--lazy")


def test_a_mapping_is_in_the_checkpoint(box: Sandbox, at: Any) -> None:
    path = box.mountpoint / "mapped"
    path.write_bytes(bytes(8192))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
        view[5000:5005] = b"store"
        made = cut(box, "mapped")
        view[5000:5005] = b"later"
        shown = (at("--checkpoint", made["checkpoint_id"]) / "mapped").read_bytes()
    assert shown[5000:5005] == b"store"
    assert made["not_flushed"] == []


def test_a_checkpoint_shows_its_moment(box: Sandbox, at: Any) -> None:
    top = box.mountpoint
    (top / "d").mkdir()
    (top / "d" / "f").write_text("then")
    made = cut(box, "then")
    (top / "d" / "f").write_text("now, and longer")
    (top / "d" / "g").write_text("new")
    os.rename(top / "d" / "f", top / "moved")
    box.fsd("drain", str(top))
    place = at("--checkpoint", made["checkpoint_id"])
    assert sorted(p.name for p in (place / "d").iterdir()) == ["f"]
    assert (place / "d" / "f").read_text() == "then"
    for call in (
        lambda: (place / "d" / "f").write_text("x"),
        lambda: (place / "new").touch(),
        lambda: os.unlink(place / "d" / "f"),
        lambda: os.mkdir(place / "e"),
        lambda: os.chmod(place / "d", 0o700),
    ):
        with pytest.raises(OSError) as told:
            call()
        assert told.value.errno == errno.EROFS
    status = box.json("status", str(place))
    assert status["shown_state"]["fs_seq"] == made["fs_seq"]
    listed = {one["mount_path"]: one["shown"] for one in box.json("mounts")["mounts"]}
    assert listed[str(top)] is None
    assert listed[str(place)] == f"checkpoint={made['checkpoint_id']}"
    assert box.json("status", str(top))["checkpoint"]["last"]["checkpoint_id"] == made["checkpoint_id"]


def test_a_writer_is_cut_between_two_of_its_calls(box: Sandbox, at: Any) -> None:
    play_writer(box, at, 5)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_writer_is_cut_between_two_of_its_calls_for_long(box: Sandbox, at: Any) -> None:
    play_writer(box, at, 60)


def play_writer(box: Sandbox, at: Any, rounds: int) -> None:
    """A program numbers its calls: step n appends to a log, creates, writes, renames, removes. A checkpoint
    shows what a prefix of these calls has made."""
    top = box.mountpoint
    stop = threading.Event()
    steps = [0]

    def work() -> None:
        log = os.open(top / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        number = 0
        while not stop.is_set():
            number += 1
            os.write(log, b"%08d\n" % number)
            fd = os.open(top / f"tmp{number}", os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(fd, b"%08d" % number)
            os.close(fd)
            os.rename(top / f"tmp{number}", top / f"f{number % 5}")
            if number % 7 == 0:
                os.unlink(top / f"f{number % 5}")
            steps[0] = number
        os.close(log)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        made = []
        for _ in range(rounds):
            before = steps[0]
            made.append((before, cut(box, "running"), steps[0]))
            wait_for(lambda b=before: steps[0] >= b + 10, 60, "the program to go on", every=0.001)  # type: ignore[misc]
    finally:
        stop.set()
        writer.join()
    for before, one, after in made:
        check_prefix(at("--checkpoint", one["checkpoint_id"]), before, after)


def check_prefix(place: Path, before: int, after: int) -> None:
    log = (place / "log").read_bytes() if (place / "log").exists() else b""
    assert len(log) % 9 == 0
    last = len(log) // 9
    assert log == b"".join(b"%08d\n" % n for n in range(1, last + 1))
    assert before <= last <= after + 1
    model: dict[str, bytes] = {}
    states = []
    for number in range(1, last + 1):
        tmp, data, slot = f"tmp{number}", b"%08d" % number, f"f{number % 5}"
        if number == last:
            states.append(dict(model))
        model[tmp] = b""
        if number == last:
            states.append(dict(model))
        model[tmp] = data
        if number == last:
            states.append(dict(model))
        model[slot] = model.pop(tmp)
        if number == last:
            states.append(dict(model))
        if number % 7 == 0:
            del model[slot]
            if number == last:
                states.append(dict(model))
    got = {p.name: p.read_bytes() for p in place.iterdir() if p.name != "log"}
    assert got in (states or [{}]), f"no prefix of what was done up to {last}: {got}"


def test_a_mount_of_a_journal_entry(box: Sandbox, at: Any) -> None:
    box.fsd("journal", "create", "--journal-id", "j", "--title", "t", "--actor", "agent:a")
    for number in range(3):
        (box.mountpoint / "f").write_text(str(number))
        box.fsd("journal", "append", "--journal-id", "j", "--entry-json", '{"type": "t"}')
    place = at("--at-journal", "j:2")
    assert (place / "f").read_text() == "1"
    refused = box.fsd("checkpoint", "create", "--mount", str(place), check=False)
    assert refused.returncode == 2, "what never changes needs no checkpoint"
    # Beside it the live one is found by itself.
    assert box.json("checkpoint", "create")["fs_seq"] >= 3
    both = ("mount", str(place), "--checkpoint", "cp_x", "--at-journal", "j:1")
    assert box.fsd(*both, check=False).returncode == 2


def test_automatic_checkpoints(trusted: Server, tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "auto", trusted.create(), "--auto-checkpoint", "300ms", "--keep", "last=2")
    try:
        box.mount()
        wait_for(lambda: auto(box)["skipped"] >= 2 or auto(box)["made"] > 1, 30, "turns with nothing to do")
        made = auto(box)["made"]
        assert made <= 1, "nothing changed, yet checkpoints were made"
        for number in range(3):
            (box.mountpoint / "f").write_text(str(number))
            wait_for(lambda n=made + number + 1: auto(box)["made"] >= n, 30, "a checkpoint")  # type: ignore[misc]
        status = auto(box)
        assert status["problem"] is None
        assert status["last_at"] is not None
        listed = box.fs.ask("GET", "/checkpoints").json["checkpoints"]
        assert {one["reason"] for one in listed} == {"automatic"}
        assert len(listed) <= 3
    finally:
        box.close()
    box = Sandbox(tmp_path / "bad", trusted.create(), "--auto-checkpoint", "1h", "--keep", "sometimes")
    try:
        bad = box.fsd("mount", str(box.mountpoint), "--state-dir", str(box.state), *box.options, check=False)
        assert bad.returncode == 2, bad.stderr
    finally:
        box.close()


def auto(box: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = box.status()["checkpoint"]["automatic"]
    return found


def test_the_head_of_a_thread_is_there_when_the_mount_is(trusted: Server, tmp_path: Path) -> None:
    source, fs = tmp_path / "source", trusted.create()
    (source / "src").mkdir(parents=True)
    (source / "src" / "main.py").write_text("print()")
    (source / "src" / "main.py").chmod(0o755)
    first = Sandbox(tmp_path / "one", fs)
    second = Sandbox(tmp_path / "two", fs)
    head = ("--thread", "chat", "--restore-head")
    try:
        first.mount(*head)  # nothing to restore yet is no error
        first.unmount()
        made = first.json("checkpoint", "capture", str(source), "--thread", "chat")
        first.mount(*head)
        assert (first.mountpoint / "src" / "main.py").read_text() == "print()"
        assert os.stat(first.mountpoint / "src" / "main.py").st_mode & 0o777 == 0o755
        (first.mountpoint / "newer").write_text("work")
        first.unmount()
        again = ["mount", str(second.mountpoint), "--state-dir", str(second.state), *second.options, *head]
        refused = second.fsd(*again, check=False)
        assert refused.returncode == 1, refused.stderr
        assert "not empty" in refused.stderr
        assert "--force" not in refused.stderr, "mount has no such flag"
        assert "without --restore-head" in refused.stderr
        assert "--exclusive" in refused.stderr
        assert not os.path.ismount(second.mountpoint)
        second.mount(*head, "--exclusive")
        assert sorted(p.name for p in second.mountpoint.iterdir()) == ["src"]
        assert made["checkpoint_id"]
        # The filesystem's own thread holds states of itself.
        second.json("checkpoint", "create", "--label", "own")
        (second.mountpoint / "src" / "main.py").write_text("later")
        second.unmount()
        second.mount("--thread", f"fsd:{fs.id}", "--restore-head", "--exclusive")
        assert (second.mountpoint / "src" / "main.py").read_text() == "print()"
    finally:
        first.close()
        second.close()


def test_a_checkpoint_from_outside_asks_the_mounts(box: Sandbox, at: Any, tmp_path: Path) -> None:
    """With a server that does not hear of what was written within the flush delay, unless asked."""
    other = Sandbox(tmp_path / "other", box.fs)
    try:
        other.mount()
        (box.mountpoint / "here").write_text("one")
        (other.mountpoint / "there").write_text("two")
        asked = ("checkpoint", "create", "--remote", "--label", "all", "--require-all", "--drain", "60s")
        made = box.json(*asked)
        assert [one["included"] for one in made["sessions"]] == [True, True]
        assert made["server_ms"] < 50_000
        place = at("--checkpoint", made["checkpoint_id"])
        assert sorted(p.name for p in place.iterdir()) == ["here", "there"]
        os.kill(other.daemon, signal.SIGSTOP)
        try:
            late = ("checkpoint", "create", "--remote", "--drain", "1s")
            refused = box.fsd(*late, "--require-all", check=False)
            assert refused.returncode == 6, refused.stderr
            # On a busy machine this one, too, may need longer than a second.
            wait_for(lambda: included(box.json(*late)) == [False, True], 60, "one of two to be in it")
        finally:
            os.kill(other.daemon, signal.SIGCONT)
    finally:
        other.close()


def included(made: dict[str, Any]) -> list[bool]:
    return sorted(one["included"] for one in made["sessions"])


@pytest.mark.root  # another mount hides the file's name
def test_a_daemon_without_descriptors_lives_on(box: Sandbox, at: Any) -> None:
    """Neither a checkpoint that somebody asks for nor a command may end it, whatever they need."""
    limits = resource.prlimit(box.daemon, resource.RLIMIT_NOFILE)
    with open(box.mountpoint / "f", "wb", buffering=0) as file:  # a helper has to look for mappings of it
        file.write(b"x" * 100)
        highest = max(int(name) for name in os.listdir(f"/proc/{box.daemon}/fd"))
        resource.prlimit(box.daemon, resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        try:
            elsewhere = box.fs.ask("POST", "/checkpoints", {"drain": {"timeout": 3}})
            assert elsewhere.status in (200, 201), elsewhere
            # Nobody can take it on now, or it gets the last descriptor and is told that there was no other.
            status = ("status", os.fspath(box.mountpoint))
            asked = threading.Thread(target=lambda: box.fsd(*status, check=False))
            asked.start()
            asked.join(1)
        finally:
            resource.prlimit(box.daemon, resource.RLIMIT_NOFILE, limits)
        asked.join(60)
        assert not asked.is_alive()
        file.write(b"y")
    assert box.status()["pid"] == box.daemon
    place = at("--checkpoint", cut(box, "after")["checkpoint_id"])
    assert (place / "f").read_bytes() == b"x" * 100 + b"y"


def test_more_refused_changes_than_a_message_holds(box: Sandbox) -> None:
    """What is named of them is bounded, how many there are is told all the same, and the exit is honest."""
    (own,) = (box.state / "mounts").iterdir()
    op = tuple(Create(1, CREATE, 1, b"x", 2, 0o100644, 0, 0, 0, None, 0))
    for number in range(1200):
        place = own / "refused" / f"9-{number}"
        place.mkdir(parents=True)
        entry = {"op": op, "errno": 13, "reason": "no", "path": b"/" + b"\xff" * 1000 + b"%d" % number}
        (place / "entry").write_bytes(msgpack.packb(entry | {"mode": 0o100644, "uid": 0, "gid": 0}))
    done = box.fsd("checkpoint", "create", "--output", "json", check=False)
    assert done.returncode == 6, done.stderr
    assert "1200 changes were refused" in done.stderr
    made = box.json("checkpoint", "create", "--partial")
    assert made["not_flushed_total"] == 1200
    assert 0 < len(made["not_flushed"]) <= NOT_FLUSHED_MAX
    assert len(json.dumps(made)) < 1 << 20


def test_a_mapping_of_a_file_that_cannot_be_opened_by_name(box: Sandbox, at: Any, tmp_path: Path) -> None:
    path, other = box.mountpoint / "mapped", tmp_path / "over"
    path.write_bytes(bytes(8192))
    other.write_text("something else")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
        subprocess.run(["mount", "--bind", str(other), str(path)], check=True)
        try:
            view[5000:5005] = b"store"
            made = cut(box, "hidden")
            view[5000:5005] = b"later"
        finally:
            subprocess.run(["umount", str(path)], check=True)
        shown = (at("--checkpoint", made["checkpoint_id"]) / "mapped").read_bytes()
    assert shown[5000:5005] == b"store"


def test_a_mounted_state_outlives_its_checkpoint_and_its_daemon(box: Sandbox, tmp_path: Path) -> None:
    for number in range(3):
        (box.mountpoint / f"f{number}").write_text(f"old {number}")
    made = cut(box, "gone soon")
    shown = Sandbox(tmp_path / "shown", box.fs, "--checkpoint", made["checkpoint_id"], supervised=True)
    try:
        shown.mount()
        assert (shown.mountpoint / "f0").read_text() == "old 0"
        for number in range(3):
            (box.mountpoint / f"f{number}").write_text("new")
        box.fsd("drain", str(box.mountpoint))
        box.fsd("checkpoint", "delete", made["checkpoint_id"], "--yes")
        assert (shown.mountpoint / "f1").read_text() == "old 1"
        killed = shown.daemon
        os.kill(killed, signal.SIGKILL)
        shown.wait_remounted(killed)
        assert shown.status()["restarts"] == 1
        assert (shown.mountpoint / "f2").read_text() == "old 2"
        shown.unmount()
        again = shown.fsd(
            "mount", str(shown.mountpoint), "--state-dir", str(shown.state), *shown.options, check=False
        )
        assert again.returncode == 5, again.stderr
    finally:
        shown.close()


def test_a_cold_state_is_listed_in_few_requests(box: Sandbox, trusted: Server, tmp_path: Path) -> None:
    for number in range(400):
        directory = box.mountpoint / f"d{number % 20}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{number}").write_bytes(b"%d" % number)
    made = cut(box, "many")
    with FaultProxy(trusted.url) as proxy:
        shown = Sandbox(tmp_path / "shown", box.fs, "--checkpoint", made["checkpoint_id"], endpoint=proxy.url)
        try:
            shown.mount()
            proxy.reset_counts()
            assert (shown.mountpoint / "d7" / "f7").read_bytes() == b"7"
            assert sum(len(files) for _, _, files in os.walk(shown.mountpoint)) == 400
            assert 0 < proxy.count("ns") <= 6
            before = proxy.count("ns")
            # What never changes is asked for once, whatever the time: neither the feed nor age expires it.
            assert sum(len(files) for _, _, files in os.walk(shown.mountpoint)) == 400
            assert proxy.count("ns") == before
            assert proxy.count("changes") == 0
        finally:
            shown.close()


def test_a_server_that_ends_while_the_state_is_asked_for_is_waited_for(
    box: Sandbox, trusted: Server, tmp_path: Path
) -> None:
    """As one that ends in any other of the requests a mount begins with."""

    def keeps_state(request: Request) -> bool:
        return request.route == "sessions" and "/state?" in request.path

    (box.mountpoint / "f").write_bytes(b"then")
    made = cut(box, "then")
    with FaultProxy(trusted.url) as proxy:
        for fault in (CUT_REQUEST, LOSE_REPLY, HTML_502):
            proxy.next(fault, keeps_state)
        shown = Sandbox(tmp_path / "shown", box.fs, "--checkpoint", made["checkpoint_id"], endpoint=proxy.url)
        try:
            shown.mount()
            assert proxy.pending() == 0
            assert (shown.mountpoint / "f").read_bytes() == b"then"
        finally:
            shown.close()


def test_a_mount_that_waits_for_its_state_is_stopped(box: Sandbox, trusted: Server, tmp_path: Path) -> None:
    """It waits for an hour, or for ever where its daemon was started again."""
    made = cut(box, "then")
    with FaultProxy(trusted.url) as proxy:
        proxy.always(HTML_502, lambda request: "/state?" in request.path)
        shown = Sandbox(tmp_path / "shown", box.fs, endpoint=proxy.url)
        mount = [*command(), "mount", str(shown.mountpoint), "--state-dir", str(shown.state), "--foreground"]
        how = ("--checkpoint", made["checkpoint_id"], "--ready-timeout", "1h")
        process = subprocess.Popen([*mount, *how], env=shown.env, stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None, "it is a pipe"
            assert any(b"waiting: " in line for line in process.stderr)
            process.terminate()
            _, said = process.communicate(timeout=60)
            assert process.returncode != 0
            assert b"stopped before it was mounted" in said
        finally:
            process.kill()
            process.wait()
            shown.close()


def test_what_was_written_into_an_open_file_is_in_it(box: Sandbox) -> None:
    data = os.urandom(1 << 20)
    with open(box.mountpoint / "open", "wb", buffering=0) as file:
        file.write(data)
        made = box.json("checkpoint", "create")
        file.write(b"later")
    cat = [*command(), "checkpoint", "cat", made["checkpoint_id"], "/open"]
    assert subprocess.run(cat, env=box.env, capture_output=True, check=True).stdout == data


def test_cycles_of_work_checkpoint_and_a_new_sandbox(trusted: Server, tmp_path: Path, seed: int) -> None:
    """Every cycle goes on from the last checkpoint in another sandbox; every other one is killed."""
    chance, fs = random.Random(seed), trusted.create()
    wanted: dict[str, bytes] = {}
    last = ""
    for cycle in range(3):
        box = Sandbox(tmp_path / f"box{cycle}", fs)
        try:
            if last:
                # Nobody knows yet that a killed one is gone.
                box.fsd("checkpoint", "restore", last, "--yes", "--force")
            box.mount()
            got = {p.name: p.read_bytes() for p in box.mountpoint.iterdir()}
            assert got == wanted, f"cycle {cycle}"
            for name in chance.sample(sorted(wanted), min(2, len(wanted))):
                (box.mountpoint / name).unlink()
                del wanted[name]
            for number in range(5):
                wanted[f"f{cycle}-{number}"] = chance.randbytes(chance.randrange(50_000))
                (box.mountpoint / f"f{cycle}-{number}").write_bytes(wanted[f"f{cycle}-{number}"])
            last = box.json("checkpoint", "create")["checkpoint_id"]
            (box.mountpoint / "not in it").write_text("x")
            if cycle % 2:
                box.lose()
            else:
                box.unmount()
        finally:
            box.close()


def test_many_writers_and_readers_beside_checkpoints(box: Sandbox) -> None:
    top, stop, errors = box.mountpoint, threading.Event(), []

    def write(who: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            (top / f"w{who}-{number % 20}").write_bytes(b"%d" % number)

    def read() -> None:
        while not stop.is_set():
            for path in list(top.iterdir()):
                with suppress(FileNotFoundError):
                    path.read_bytes()

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as exc:  # noqa: BLE001 - told below
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(write, who)) for who in range(8)]
    threads += [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):
            assert cut(box, f"busy {number}")["not_flushed"] == []
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert "locked" not in box.logs()
