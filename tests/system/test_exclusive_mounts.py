"""`fsd mount --exclusive` with real processes: who is told what, what a killed or cut holder keeps."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.proxy import BLACK_HOLE, FaultProxy
from support.sandbox import Sandbox, alive
from support.server import Server, TestFs
from support.wait import wait_for

HOLD = ("--exclusive", "--lease-time", "2s")


def fails(number: int, act: Callable[[], object]) -> None:
    with pytest.raises(OSError) as told:
        act()
    assert errno.errorcode[told.value.errno or 0] == errno.errorcode[number]


def refused(box: Sandbox, *argv: str) -> dict[str, Any]:
    """The error of a command that ends with 7."""
    done = box.fsd(*argv, "--output", "json", check=False)
    assert done.returncode == 7, done.stderr
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])["error"]
    return found


def test_it_binds_commands_and_other_mounts_until_it_is_unmounted(
    shared_fs: TestFs, boxes: Callable[..., Sandbox]
) -> None:
    holder, other = boxes("a", shared_fs, *HOLD, "--remote-path", "/t"), boxes("b", shared_fs)
    other.mount()
    (other.mountpoint / "t").mkdir()
    (other.mountpoint / "t" / "f").write_text("first")
    other.drain()
    holder.mount()
    told = refused(other, "rm", "-r", "/t")
    assert told["code"] == "lease_held"
    assert told["details"]["holder"]["mount"] == str(holder.mountpoint)
    for argv in (("mkdir", "/t/d"), ("chmod", "600", "/t/f"), ("mv", "/t/f", "/g"), ("cp", ":/t/f", ":/t/h")):
        refused(other, *argv)
    source = other.base / "source"
    source.write_text("data")
    refused(other, "cp", str(source), ":/t/uploaded")
    ran = other.fsd("run", "--path", "/t/d", "--", "touch", str(other.base / "ran"), check=False)
    assert ran.returncode == 7, ran.stderr
    assert "is the writer of /t since" in ran.stderr and "nothing was run" in ran.stderr
    assert not (other.base / "ran").exists()
    assert other.fsd("run", "--path", "/", "--", "true").returncode == 0
    wait_for(lambda: other.status()["leases"], 30, "the other mount to hear of it")
    fails(errno.EROFS, lambda: (other.mountpoint / "t" / "f").write_text("no"))
    fails(errno.EROFS, lambda: (other.mountpoint / "t" / "new").mkdir())
    (other.mountpoint / "beside").write_text("free")
    (holder.mountpoint / "f").write_text("of the holder")
    third = boxes("c", shared_fs, "--exclusive")
    assert refused(third, "mount", str(third.mountpoint), "--state-dir", str(third.state), *third.options)
    assert holder.status()["exclusive"]["state"] == "held"
    assert [(one["kind"], one["path"]) for one in other.json("mounts", "--all")["leases"]] == [
        ("writer", "/t")
    ]
    assert holder.unmount()["status"] == "unmounted"
    wait_for(lambda: not other.status()["leases"], 30, "the other mount to hear of the end")
    assert (other.mountpoint / "t" / "f").read_text() == "of the holder"
    (other.mountpoint / "t" / "f").write_text("free again")
    third.mount()  # at once: nothing waits for a lease to expire


def test_a_second_one_waits_for_its_turn(shared_fs: TestFs, boxes: Callable[..., Sandbox]) -> None:
    first, second = boxes("a", shared_fs, *HOLD), boxes("b", shared_fs, *HOLD, "--wait", "60s")
    first.mount()
    (first.mountpoint / "f").write_text("first")
    first.kill()  # it is renewed no more; its kernel mount stays behind
    second.mount()
    (second.mountpoint / "g").write_text("second")
    assert second.unmount()["status"] == "unmounted"


def test_a_killed_daemon_goes_on_under_the_same_lease(
    shared_fs: TestFs, boxes: Callable[..., Sandbox]
) -> None:
    holder = boxes("a", shared_fs, "--exclusive", "--lease-time", "60s", supervised=True)
    holder.mount()
    before = holder.status()["exclusive"]["fence"]
    (holder.mountpoint / "f").write_text("written")
    killed = holder.daemon
    os.kill(killed, signal.SIGKILL)
    holder.wait_remounted(killed)
    assert holder.status()["exclusive"]["fence"] > before
    assert (holder.mountpoint / "f").read_text() == "written"
    (holder.mountpoint / "g").write_text("again")
    holder.drain()
    holder.kill()
    holder.detach()
    plain = boxes("a", shared_fs)  # the same place, not exclusive any more: the old lease is given up
    plain.mount()
    (plain.mountpoint / "h").write_text("shared")
    assert not shared_fs.ask("GET", "/leases").json["leases"]
    assert plain.unmount()["status"] == "unmounted"


def cut_off(server: Server, boxes: Callable[..., Sandbox]) -> tuple[Sandbox, Sandbox, FaultProxy]:
    """A holder behind a cut network with changes of its own, and who took its lease meanwhile."""
    fs = server.create()
    proxy = FaultProxy(server.url)
    late = boxes("late", fs, *HOLD, endpoint=proxy.url)
    late.mount()
    (late.mountpoint / "d").mkdir()
    (late.mountpoint / "d" / "shared").write_text("common")
    late.drain()
    proxy.refuse()
    (late.mountpoint / "d" / "shared").write_text("of the late one")
    (late.mountpoint / "d" / "new").mkdir()
    (late.mountpoint / "d" / "new" / "own").write_bytes(b"own" * 100_000)
    os.symlink("shared", late.mountpoint / "d" / "link")
    second = boxes("second", fs, *HOLD, "--wait", "30s")
    second.mount()
    (second.mountpoint / "d" / "shared").write_text("of the second")
    second.drain()
    proxy.accept()
    return late, second, proxy


def recover(box: Sandbox, *flags: str) -> Any:
    return box.fsd(
        "recover", str(box.mountpoint), "--state-dir", str(box.state), "--output", "json", *flags, check=False
    )


def test_fenced_off_it_turns_read_only_and_people_decide(
    server: Server, boxes: Callable[..., Sandbox]
) -> None:
    late, second, proxy = cut_off(server, boxes)
    with proxy:
        wait_for(lambda: late.status()["exclusive"]["state"] == "lost", 30, "the late one to be told")
        told = late.status()
        assert "took it at" in told["exclusive"]["reason"] and "took it at" in told["reason"]
        assert told["pending"]["operations"] or told["pending"]["files"]
        fails(errno.EROFS, lambda: (late.mountpoint / "x").write_text("no"))
        assert (late.mountpoint / "d" / "shared").read_text() == "of the late one"
        fd = os.open(late.mountpoint / "d" / "shared", os.O_RDONLY)
        fails(errno.EIO, lambda: os.fsync(fd))
        os.close(fd)
        ended = late.fsd("unmount", str(late.mountpoint), "--output", "json", check=False)
        assert ended.returncode == 6
        wait_for(lambda: not any(map(alive, late.pids)), 30, "the late one to end")
        again = late.fsd("mount", str(late.mountpoint), "--state-dir", str(late.state), check=False)
        assert again.returncode == 6 and "--as-conflicts" in again.stderr
        assert recover(late).returncode == 6
        target = late.base / "out"
        taken = recover(late, "--export", str(target))
        assert taken.returncode == 6
        assert len(json.loads(taken.stdout)["exported"]) == 2
        assert (target / "d" / "shared").read_text() == "of the late one"
        assert (target / "d" / "new" / "own").read_bytes() == b"own" * 100_000
        assert os.readlink(target / "d" / "link") == "shared"
        assert recover(late, "--export", str(target)).returncode == 1  # it replaces nothing
        (late.base / "links" / "d").mkdir(parents=True)
        os.symlink("mine", late.base / "links" / "d" / "link")
        kept = recover(late, "--export", str(late.base / "links"))
        assert kept.returncode == 1 and "empty directory" in kept.stderr
        assert os.readlink(late.base / "links" / "d" / "link") == "mine"
        assert recover(late, "--as-conflicts").returncode == 7  # the second would have to refuse it
        assert second.unmount()["status"] == "unmounted"
        sent = recover(late, "--as-conflicts")
        assert sent.returncode == 0, sent.stderr
        assert json.loads(sent.stdout)["conflicts"] == 1
        assert recover(late).returncode == 0
    reader = boxes("reader", late.fs)
    reader.mount()
    found = {p.name: p for p in (reader.mountpoint / "d").iterdir()}
    (copy,) = (name for name in found if name.startswith("shared.conflict-"))
    assert found[copy].read_text() == "of the late one"
    assert found["shared"].read_text() == "of the second"
    assert (found["new"] / "own").read_bytes() == b"own" * 100_000


@pytest.mark.long
def test_what_a_fenced_off_mount_had_can_be_dropped(server: Server, boxes: Callable[..., Sandbox]) -> None:
    late, second, proxy = cut_off(server, boxes)
    with proxy:
        wait_for(lambda: late.status()["exclusive"]["state"] == "lost", 30, "the late one to be told")
        late.kill()
        late.detach()
        assert recover(late, "--discard").returncode == 2  # nobody to ask
        dropped = recover(late, "--discard", "--yes")
        assert dropped.returncode == 0
        assert json.loads(dropped.stdout)["status"] == "discarded"
        assert second.unmount()["status"] == "unmounted"
        late.mount()
        assert (late.mountpoint / "d" / "shared").read_text() == "of the second"


def test_cut_off_for_long_and_nobody_came_it_goes_on(server: Server, boxes: Callable[..., Sandbox]) -> None:
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        holder = boxes("a", fs, "--exclusive", "--lease-time", "1s", endpoint=proxy.url)
        holder.mount()
        (holder.mountpoint / "f").write_text("before")
        holder.drain()
        before = holder.status()["exclusive"]["fence"]
        proxy.refuse()
        (holder.mountpoint / "f").write_text("while cut off")
        wait_for(lambda: not fs.ask("GET", "/leases").json["leases"], 30, "the lease to expire")
        proxy.accept()
        wait_for(lambda: holder.status()["exclusive"]["fence"] > before, 30, "it to be taken again")
        assert holder.drain()["status"] == "drained"
        assert holder.status()["conflicts"] == 0


def test_a_renewal_that_hangs_does_not_cost_the_lease(server: Server, boxes: Callable[..., Sandbox]) -> None:
    fs = server.create()
    with FaultProxy(server.url) as proxy:
        holder = boxes("a", fs, "--exclusive", "--lease-time", "3s", endpoint=proxy.url)
        holder.mount()
        told = holder.status()["exclusive"]
        proxy.next(BLACK_HOLE, lambda request: request.path.endswith("/renew"))
        wait_for(lambda: not proxy.pending(), 30, "a renewal to hang")
        wait_for(lambda: proxy.count("leases") >= 3, 30, "the next ones")
        assert fs.ask("GET", "/leases").json["leases"][0]["fence"] == told["fence"]
        assert holder.status()["exclusive"] == told  # it never expired


def test_the_server_killed_while_a_lease_is_taken(tmp_path: Path, boxes: Callable[..., Sandbox]) -> None:
    """All of it or nothing: there is no lease without its session, and none is in the way afterwards."""
    server = Server(tmp_path / "server").start()
    try:
        fs = server.create()
        server.stop()
        server.env = {"FSD_CRASH": "lease.taken"}
        server.restart()
        box = boxes("a", fs, *HOLD, "--ready-timeout", "3s")
        done = box.fsd("mount", str(box.mountpoint), "--state-dir", str(box.state), *box.options, check=False)
        assert done.returncode == 1, done.stderr
        assert server.process is not None
        assert server.process.wait(60) == -signal.SIGKILL
        server.env = {}
        server.restart()
        assert not fs.ask("GET", "/leases").json["leases"]
        box.mount()
        (box.mountpoint / "f").write_text("fine")
        assert box.unmount()["status"] == "unmounted"
    finally:
        server.end()
