"""Leases and locks against who would break them: holders that are stopped for longer than their lease and go
on, many at once, a server that is killed and started again, names that move, doubled requests."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import process, start_lock
from support.proxy import DOUBLE_REPLY, DOUBLE_REQUEST, LOSE_REPLY, FaultProxy
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.wait import wait_for

HOLD = ("--exclusive", "--lease-time", "2s")
kernel = pytest.mark.kernel


WRITER = """
import errno, sys
try:
    with open(sys.argv[1], "w") as file:
        file.write("during the stop")
    print("kept")
except OSError as exc:
    print(errno.errorcode[exc.errno])
"""


@kernel
@pytest.mark.long
def test_a_holder_stopped_for_longer_than_its_lease_wakes_up_fenced_off(
    server: Server, boxes: Callable[..., Sandbox]
) -> None:
    """Nothing of what it had in its log, and of what a program wrote into the stopped mount, reaches the
    service; all of it is kept and told."""
    fs = server.create()
    stopped, second = boxes("a", fs, *HOLD), boxes("b", fs, *HOLD, "--wait", "60s")
    stopped.mount()
    (stopped.mountpoint / "shared").write_text("common")
    stopped.drain()
    (stopped.mountpoint / "shared").write_text("before the stop")
    stopped.signal(signal.SIGSTOP)
    # A process of its own: one that is forked while a file of a stopped mount is open waits for it too.
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, stopped.mountpoint / "during"], stdout=subprocess.PIPE, text=True
    )
    second.mount()
    (second.mountpoint / "shared").write_text("of the second")
    second.drain()
    stopped.signal(signal.SIGCONT)
    wait_for(lambda: stopped.status()["exclusive"]["state"] == "lost", 60, "the stopped one to be told")
    outcome = writer.communicate(timeout=60)[0].strip()
    assert outcome in ("kept", "EROFS", "EIO")
    with pytest.raises(OSError) as told:
        (stopped.mountpoint / "late").write_text("no")
    assert told.value.errno == errno.EROFS
    ended = stopped.fsd("unmount", str(stopped.mountpoint), check=False)
    assert ended.returncode == 6, ended.stderr
    assert (second.mountpoint / "shared").read_text() == "of the second"
    assert not (second.mountpoint / "during").exists()
    target = stopped.base / "out"
    place = ("recover", str(stopped.mountpoint), "--state-dir", str(stopped.state))
    assert stopped.fsd(*place, "--export", str(target), check=False).returncode == 6
    assert (target / "shared").read_text() == "before the stop"
    if outcome == "kept":
        assert (target / "during").read_text() == "during the stop"
    assert second.unmount()["status"] == "unmounted"
    assert stopped.fsd(*place, "--as-conflicts", check=False).returncode == 0
    second.mount()
    copies = [p.read_text() for p in second.mountpoint.glob("shared.conflict-*")]
    assert copies == ["before the stop"]
    assert (second.mountpoint / "shared").read_text() == "of the second"


@kernel
def test_what_others_had_begun_below_a_lease_is_refused_kept_and_sent_later(
    server: Server, boxes: Callable[..., Sandbox]
) -> None:
    """A mount without the network writes below a directory that is somebody's alone meanwhile."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        away = boxes("a", fs, endpoint=proxy.url)
        away.mount()
        (away.mountpoint / "t").mkdir()
        (away.mountpoint / "t" / "f").write_text("first")
        away.drain()
        proxy.refuse()
        (away.mountpoint / "t" / "f").write_text("of who was away")
        (away.mountpoint / "t" / "new").write_text("new")
        (away.mountpoint / "t" / "sub").mkdir()
        (away.mountpoint / "t" / "sub" / ".tmp").write_text("saved")
        (away.mountpoint / "t" / "sub" / ".tmp").rename(away.mountpoint / "t" / "sub" / "saved")
        (away.mountpoint / "free").write_text("elsewhere")
        holder = boxes("b", fs, "--exclusive", "--remote-path", "/t")
        holder.mount()
        (holder.mountpoint / "f").write_text("of the holder")
        holder.drain()
        proxy.accept()
        drained = away.fsd("drain", str(away.mountpoint), "--output", "json", check=False)
        assert drained.returncode == 6, drained.stderr
        told = away.status()
        assert told["refused"], told
        assert process("cat", "/free", env=fs.env).text == "elsewhere"
        assert process("cat", "/t/f", env=fs.env).text == "of the holder"
        assert process("cat", "/t/new", env=fs.env).code == 5
        assert holder.unmount()["status"] == "unmounted"
        assert away.fsd("unmount", str(away.mountpoint), check=False).returncode == 6
        place = ("recover", str(away.mountpoint), "--state-dir", str(away.state), "--retry")
        again = away.fsd(*place, check=False)
        assert again.returncode == 0, (again.stderr, again.stdout)
        assert process("cat", "/t/sub/saved", env=fs.env).text == "saved"
        assert names(fs, "/t/sub") == ["saved"]
        assert names(fs, "/") == ["free", "t"]
        found = {
            name: process("cat", f"/t/{name}", env=fs.env).text for name in names(fs, "/t") if name != "sub"
        }
        assert found.pop("f") == "of the holder"
        assert found.pop("new") == "new"
        assert list(found.values()) == ["of who was away"], found


def names(fs: TestFs, path: str) -> list[str]:
    listed = json.loads(process("ls", path, "--output", "json", env=fs.env).out)
    return [entry["name"] for entry in listed["entries"]]


@kernel
@pytest.mark.long
def test_of_many_that_want_to_be_the_only_writer_one_is(
    shared_fs: TestFs, boxes: Callable[..., Sandbox]
) -> None:
    every = [boxes(f"x{number}", shared_fs, "--exclusive") for number in range(4)]
    codes: dict[int, int] = {}

    def mount(number: int) -> None:
        box = every[number]
        argv = ("mount", str(box.mountpoint), "--state-dir", str(box.state), *box.options)
        codes[number] = box.fsd(*argv, timeout=100, check=False).returncode

    threads = [threading.Thread(target=mount, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes.values()) == [0, 7, 7, 7]
    [holder] = [every[number] for number, code in codes.items() if code == 0]
    (holder.mountpoint / "f").write_text("mine")
    assert holder.unmount()["status"] == "unmounted"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_lock_keeps_processes_apart_while_the_server_is_killed_again_and_again(
    server: Server, tmp_path: Path
) -> None:
    """A counter that is read, and written a moment later, by five at once; fences rise with the turns."""
    fs = server.create()
    counter, fences = tmp_path / "counter", tmp_path / "fences"
    counter.write_text("0")
    turn = 'n=$(cat "$1"); echo $FSD_FENCE >> "$2"; sleep 0.05; echo $((n + 1)) > "$1"'
    argv = ("/counter", "--lease-time", "20s", "--", "sh", "-c", turn, "-", str(counter), str(fences))
    done = [0] * 5

    def work(number: int) -> None:
        for _ in range(3):
            code, err = 1, ""
            while code == 1 and "was lost" not in err:  # it came while the server was away
                running = start_lock(fs.env, *argv)
                _, err = running.communicate(timeout=100)
                code = running.returncode
            assert code == 0, err
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for killed in range(3):
        wait_for(lambda at=killed: sum(done) > 3 * at, 100, "some turns")  # type: ignore[misc]
        server.kill()
        server.restart()
    for thread in threads:
        thread.join(300)
    assert done == [3] * 5
    assert counter.read_text().split() == ["15"]
    seen = [int(line) for line in fences.read_text().split()]
    assert seen == sorted(set(seen))
    assert len(seen) == 15


@pytest.mark.long
def test_who_waits_for_a_lock_waits_on_while_the_server_is_away(server: Server) -> None:
    """For longer than a command keeps trying; the holder has it all the time, and gives it up in the end."""
    fs = server.create()
    holder = start_lock(fs.env, "/db", "--lease-time", "100s", "--", "sh", "-c", "echo on; exec sleep 300")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "on\n"
    waiting = start_lock(fs.env, "/db", "--", "echo", "my turn")
    assert waiting.stderr is not None
    assert "holds the lock /db since" in waiting.stderr.readline()
    server.kill()
    assert "waiting: nothing listens" in waiting.stderr.readline()
    assert start_lock(fs.env, "/db", "--", "true").wait(60) == 1  # who comes now is told at once
    server.restart()
    holder.terminate()
    assert holder.wait(60) == 128 + signal.SIGTERM
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "my turn\n"), err


def test_a_lock_stays_with_its_name_when_the_file_moves(shared_fs: TestFs) -> None:
    assert process("mkdir", "/dir", env=shared_fs.env).code == 0
    holder = start_lock(shared_fs.env, "/dir/a", "--", "sh", "-c", "echo on; exec sleep 100")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "on\n"
    assert process("mv", "/dir", "/moved", env=shared_fs.env).code == 0
    assert process("lock", "/dir/a", "--timeout", "0", "--", "true", env=shared_fs.env).code == 7
    assert process("lock", "/moved/a", "--timeout", "0", "--", "true", env=shared_fs.env).code == 0
    holder.terminate()
    assert holder.wait(60) == 128 + signal.SIGTERM
    assert process("lock", "/dir/a", "--timeout", "0", "--", "true", env=shared_fs.env).code == 0


def test_a_stopped_holder_of_a_lock_wakes_up_and_ends_its_command(shared_fs: TestFs) -> None:
    """`fsd lock` and its command stop together, as when a machine is paused, and another has its turn."""
    script = "trap 'echo ended; exit 0' TERM; echo $FSD_FENCE; while :; do sleep 0.1; done"
    holder = start_lock(shared_fs.env, "/db", "--lease-time", "1s", "--", "sh", "-c", script)
    assert holder.stdout is not None
    fence = int(holder.stdout.readline())
    child = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
    for pid in (holder.pid, child):
        os.kill(pid, signal.SIGSTOP)
    other = process("lock", "/db", "--", "sh", "-c", "echo $FSD_FENCE", env=shared_fs.env)
    assert other.code == 0, other.err
    assert int(other.text) > fence
    for pid in (child, holder.pid):
        os.kill(pid, signal.SIGCONT)
    out, err = holder.communicate(timeout=60)
    assert (holder.returncode, out) == (1, "ended\n"), err
    assert "was lost" in err


@kernel
@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [DOUBLE_REQUEST, DOUBLE_REPLY, LOSE_REPLY], ids=lambda fault: str(fault.kind)
)
def test_a_journal_beside_an_exclusive_mount_under_doubled_requests(
    server: Server, boxes: Callable[..., Sandbox], fault: Any
) -> None:
    """Each entry once, in order, and none before the files it tells of."""
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        box = boxes("a", fs, "--exclusive", endpoint=proxy.url)
        box.mount()
        box.fsd("journal", "create", "--journal-id", "j", "--title", "t", "--actor", "agent:a")
        for number in range(4):
            (box.mountpoint / f"f{number}").write_text(f"content {number}")
            proxy.next(fault, lambda request: request.method == "POST", times=3)
            entry = json.dumps({"type": "step", "number": number})
            box.fsd("journal", "append", "--journal-id", "j", "--entry-json", entry)
            proxy.clear()
        read = json.loads(process("journal", "read", "--journal-id", "j", "--output", "json", env=fs.env).out)
        entries = read["entries"] if isinstance(read, dict) else read
        numbers = [(one.get("entry") or one)["number"] for one in entries if "number" in json.dumps(one)]
        assert numbers == [0, 1, 2, 3], read
        assert box.unmount()["status"] == "unmounted"
    assert process("journal", "verify", "--journal-id", "j", env=fs.env).code == 0
    for number in range(4):
        assert process("cat", f"/f{number}", env=fs.env).text == f"content {number}"
