"""A mount that is not where it was made: moved, bound to other places, or in another mount namespace."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mounttable
from support.tinyplace import TESTS, Tiny
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.kernel import unmount
from fsd.kernel.mountpoint import mounted_at, places
from fsd.kernel.runtime import fixed_directory
from fsd.model.errors import Busy, NotDrained, NotFound

pytestmark = [pytest.mark.kernel, pytest.mark.root]


def say(text: str) -> None:
    print(text)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=30)


@pytest.fixture
def private(tiny: Tiny) -> Iterator[Tiny]:
    """The place lies in a mount of its own: below a shared one the kernel moves nothing."""
    run("mount", "--bind", tiny.base, tiny.base)
    run("mount", "--make-private", tiny.base)
    yield tiny
    tiny.close()
    for path in reversed(places_below(tiny.base)):
        run("umount", "-i", "-l", path)
    run("umount", "-l", tiny.base)


def places_below(base: Path) -> list[Path]:
    lines = mounttable.mountinfo()
    return [path for line in lines if base in (path := Path(line.split()[4])).parents]


def made(base: Path, name: str) -> Path:
    (base / name).mkdir()
    return base / name


def test_a_moved_mount_is_unmounted_where_it_is(private: Tiny) -> None:
    assert private.start().returncode == 0
    record, other = private.record(), made(private.base, "other")
    run("mount", "--move", private.place, other)
    (other / "f").write_bytes(b"x")
    assert unmount.status(other, private.directory)["pid"] == record.pid
    with pytest.raises(Busy, match=f"{other} is mounted"):
        unmount.wait_exit(private.place, private.directory, 1, say, Host())
    used = os.open(other, os.O_RDONLY)
    try:
        with pytest.raises(Busy, match=f"in use by pid {os.getpid()}"):
            unmount.unmount(other, private.directory, 30, say, Host())
    finally:
        os.close(used)
    assert (other / "f").read_bytes() == b"x"
    assert unmount.unmount(other, private.directory, 30, say, Host())["status"] == "unmounted"
    assert places(record.source) == []
    assert not private.directory.alive(record.mount_id)
    assert unmount.wait_exit(private.place, private.directory, 30, say, Host())["status"] == "ended"


def test_a_stop_detaches_a_moved_mount(private: Tiny) -> None:
    assert private.start().returncode == 0
    record, other = private.record(), made(private.base, "other")
    run("mount", "--move", private.place, other)
    os.kill(record.pid, signal.SIGTERM)
    wait_for(lambda: not private.directory.alive(record.mount_id), 30, "its end")
    assert places(record.source) == []


def test_a_dead_moved_mount_is_detached(private: Tiny) -> None:
    assert private.start().returncode == 0
    record, other = private.record(), made(private.base, "other")
    run("mount", "--move", private.place, other)
    for pid in (record.supervisor_pid, record.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not private.directory.alive(record.mount_id), 30, "their end")
    with pytest.raises(NotDrained, match="was dead"):
        unmount.unmount(other, private.directory, 30, say, Host())
    assert places(record.source) == []


def test_the_last_of_several_places_ends_the_mount(private: Tiny) -> None:
    """The mount's own place went first, by umount(8): the daemon serves the others until the last goes."""
    assert private.start().returncode == 0
    record, first, second = private.record(), made(private.base, "first"), made(private.base, "second")
    for place in (first, second):
        run("mount", "--bind", private.place, place)
    run("umount", "-i", private.place)
    answer = unmount.unmount(first, private.directory, 30, say, Host())
    assert answer == {"status": "unmounted", "still_mounted_at": str(second)}
    (second / "f").write_bytes(b"x")
    assert unmount.unmount(second, private.directory, 30, say, Host())["status"] == "unmounted"
    assert places(record.source) == []
    assert not private.directory.alive(record.mount_id)


def test_an_unmount_leaves_no_dead_places(private: Tiny) -> None:
    """Where it was bound to goes with the mount, unless that is in use: then all of it stays."""
    assert private.start().returncode == 0
    record, bound = private.record(), made(private.base, "bound")
    run("mount", "--bind", private.place, bound)
    used = os.open(bound, os.O_RDONLY)
    try:
        with pytest.raises(Busy, match=f"{bound} is busy"):
            unmount.unmount(private.place, private.directory, 30, say, Host())
    finally:
        os.close(used)
    (private.place / "f").write_bytes(b"x")
    assert (bound / "f").read_bytes() == b"x"
    assert unmount.unmount(private.place, private.directory, 30, say, Host())["status"] == "unmounted"
    assert places(record.source) == []


def test_what_keeps_a_mount_busy_is_told_with_what_to_do(private: Tiny) -> None:
    assert private.start().returncode == 0
    below = made(private.place, "below")
    run("mount", "-t", "tmpfs", "none", below)
    with pytest.raises(Busy, match=f"mounts below it: {below}$") as told:
        unmount.unmount(private.place, private.directory, 30, say, Host())
    assert told.value.hint == "unmount those below it; `--lazy` detaches it under them"
    run("umount", below)
    used = os.open(private.place, os.O_RDONLY)
    try:
        with pytest.raises(Busy, match="in use by pid ") as told:
            unmount.unmount(private.place, private.directory, 30, say, Host())
    finally:
        os.close(used)
    assert told.value.hint.endswith("end them or change their directory; `--lazy` detaches it under them")
    assert unmount.unmount(private.place, private.directory, 30, say, Host())["status"] == "unmounted"


def test_a_place_bound_twice_is_unmounted_twice(private: Tiny) -> None:
    """One bound place lies on another: umount(8) of either had done it, and said that it was busy."""
    assert private.start().returncode == 0
    record, bound = private.record(), made(private.base, "bound")
    for name in ("one", "two"):
        (private.place / name).mkdir()
        (private.place / name / name).touch()
        run("mount", "--bind", private.place / name, bound)
    left = {"status": "unmounted", "still_mounted_at": str(private.place)}
    assert unmount.unmount(bound, private.directory, 30, say, Host()) == left
    assert os.listdir(bound) == ["one"]
    run("umount", "-i", private.place)
    run("mount", "--bind", bound, bound)
    left["still_mounted_at"] = str(bound)
    assert unmount.unmount(bound, private.directory, 30, say, Host()) == left
    assert os.listdir(bound) == ["one"]
    assert unmount.unmount(bound, private.directory, 30, say, Host())["status"] == "unmounted"
    assert places(record.source) == [] and os.listdir(bound) == []
    assert not private.directory.alive(record.mount_id)


@pytest.mark.parametrize("how", ["unmount", "stop", "dead"])
def test_a_mount_bound_onto_itself_ends_as_a_whole(private: Tiny, how: str) -> None:
    """As container runtimes do, to make it shared; with places bound in it below and on one another."""
    assert private.start().returncode == 0
    record, sub = private.record(), private.place / "sub"
    (sub / "below").mkdir(parents=True)
    run("mount", "--bind", private.place, private.place)
    run("mount", "--bind", sub, sub)
    run("mount", "--bind", sub, sub)
    run("mount", "--bind", sub, sub / "below")
    if how == "unmount":
        assert unmount.unmount(private.place, private.directory, 30, say, Host())["status"] == "unmounted"
    elif how == "stop":
        os.kill(record.pid, signal.SIGTERM)
    else:
        for pid in (record.supervisor_pid, record.pid):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not private.directory.alive(record.mount_id), 30, "its end")
    if how == "dead":
        with pytest.raises(NotDrained, match="was dead"):
            unmount.unmount(private.place, private.directory, 30, say, Host())
    assert places(record.source) == []
    assert os.listdir(private.place) == []


def test_a_mount_under_another_is_not_unmounted_in_its_stead(private: Tiny) -> None:
    assert private.start().returncode == 0
    run("mount", "-t", "tmpfs", "none", private.place)
    with pytest.raises(Busy, match=r"lies under another mount \(none\)"):
        unmount.unmount(private.place, private.directory, 30, say, Host())
    on_top = mounted_at(private.place)
    assert on_top is not None
    assert on_top.fstype == "tmpfs"
    run("umount", private.place)
    (private.place / "f").touch()
    assert unmount.unmount(private.place, private.directory, 30, say, Host())["status"] == "unmounted"


@pytest.mark.long  # the session's end is waited for five seconds
def test_an_unmount_takes_nothing_off_that_is_not_its_own(private: Tiny) -> None:
    assert private.start().returncode == 0
    record, covered = private.record(), made(private.base, "covered")
    run("mount", "--bind", private.place, covered)
    run("mount", "-t", "tmpfs", "none", covered)
    assert unmount.unmount(private.place, private.directory, 30, say, Host())["status"] == "unmounted"
    assert places(record.source) == [covered]  # what lies on it is somebody else's
    on_top = mounted_at(covered)
    assert on_top is not None
    assert on_top.fstype == "tmpfs"
    run("umount", covered)
    with pytest.raises(OSError) as told:
        os.listdir(covered)
    assert told.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)


def test_a_mount_in_another_namespace_is_told_with_the_way_to_it(tiny: Tiny) -> None:
    apart = ["unshare", "-m", "--propagation", "private", *tiny.command()]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    subprocess.run(apart, cwd=TESTS, env=env, check=True, capture_output=True, timeout=60)
    assert not tiny.listed()
    record = tiny.record()
    hint = f"`nsenter -t {record.pid} -m fsd unmount {tiny.place}`"
    again = tiny.start()
    assert again.returncode == 7
    assert f"in another mount namespace (daemon {record.pid})" in again.stderr
    assert hint in again.stderr
    with pytest.raises(NotFound, match="in another mount namespace") as absent:
        unmount.unmount(tiny.place, tiny.directory, 30, say, Host())
    assert absent.value.hint == hint
    with pytest.raises(Busy, match="in another mount namespace") as waited:
        unmount.wait_exit(tiny.place, tiny.directory, 30, say, Host())
    assert hint in str(waited.value.hint)
    assert unmount.status(tiny.place, tiny.directory)["pid"] == record.pid
    way = [sys.executable if word == "fsd" else word for word in hint.strip("`").split()]
    way[way.index("unmount") : way.index("unmount")] = ["-m", "fsd"]
    subprocess.run(way, env=env, check=True, capture_output=True, timeout=60)
    assert not tiny.alive()
    with pytest.raises(NotFound, match="nothing is mounted at"):
        unmount.unmount(tiny.place, tiny.directory, 30, say, Host())


def unmounted_apart(place: Path, propagation: str) -> dict[str, object]:
    """`fsd unmount` in a mount namespace of its own, after which that one does not list the place."""
    script = f'"$0" -m fsd unmount {place} --output json && ! grep " {place} " /proc/self/mountinfo >&2'
    apart = ["unshare", "-m", "--propagation", propagation, "sh", "-c", script, sys.executable]
    done = subprocess.run(apart, cwd=TESTS, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_an_unmount_in_a_namespace_made_later_is_of_its_copy_alone(tiny: Tiny) -> None:
    """It had ended the mount for everybody else."""
    assert tiny.start().returncode == 0
    told = unmounted_apart(tiny.place, "private")
    assert (told["status"], told["still_mounted_at"]) == ("unmounted", str(tiny.place))
    assert tiny.listed() and tiny.alive()
    (tiny.place / "d").mkdir()


def test_an_unmount_in_a_namespace_that_shares_its_mounts_ends_the_mount(private: Tiny) -> None:
    run("mount", "--make-shared", private.base)
    assert private.start().returncode == 0
    told = unmounted_apart(private.place, "unchanged")
    assert told["status"] == "unmounted" and "still_mounted_at" not in told
    assert not private.listed() and not private.alive()


def started_where_read_only(tiny: Tiny, where: Path) -> subprocess.CompletedProcess[bytes]:
    """The tiny mount in a mount namespace of its own, in which nobody can write to `where`."""
    script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    apart = ["unshare", "-m", "sh", "-c", script, str(where), *tiny.command()]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(apart, cwd=TESTS, env=env, capture_output=True, timeout=60, check=False)


def test_a_place_for_pointers_that_cannot_be_written_stops_no_mount(tiny: Tiny) -> None:
    """A container whose root is read-only, with a runtime directory that is not."""
    fixed = fixed_directory(0)
    fixed.mkdir(mode=0o700, exist_ok=True)
    done = started_where_read_only(tiny, fixed)
    assert done.returncode == 0, done.stderr
    assert b"will not find this mount" in done.stderr
    assert tiny.alive()


def test_a_runtime_directory_that_cannot_be_written_is_told_with_what_to_do(tiny: Tiny) -> None:
    tiny.directory.make()
    done = started_where_read_only(tiny, tiny.directory.path)
    assert done.returncode == 2
    assert b"cannot be written: Read-only file system (set XDG_RUNTIME_DIR" in done.stderr
    assert not tiny.alive()
