"""`fsd mount` as processes: start, restart, places that will not do, ends. The volume is one in memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import mounttable
from support.processes import die_with_parent
from support.tinyplace import TESTS, Tiny
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.kernel import beneath, runtime, unmount
from fsd.kernel.control_client import connect
from fsd.kernel.mountpoint import mounted_at
from fsd.model.errors import Busy, NotDrained, NotFound
from fsd.model.limits import RESTARTS_MAX

pytestmark = pytest.mark.kernel


def say(text: str) -> None:
    print(text)


def test_mount_returns_when_the_mount_answers(tiny: Tiny) -> None:
    done = tiny.start()
    assert done.returncode == 0, done.stderr
    assert tiny.listed()
    assert (tiny.place / "new").write_bytes(b"x") == 1
    status = unmount.status(tiny.place, tiny.directory)
    record = tiny.record()
    assert status["pid"] == record.pid
    assert status["supervisor_pid"] == record.supervisor_pid != record.pid
    assert status["restarts"] == 0
    assert status["state"] == "mounted"


def test_the_supervisor_imports_neither_pyfuse3_nor_trio(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    maps = Path(f"/proc/{tiny.record().supervisor_pid}/maps").read_text()
    assert "pyfuse3" not in maps
    assert "libfuse3" not in maps
    assert "pyfuse3" in Path(f"/proc/{tiny.record().pid}/maps").read_text()


def test_the_token_is_in_nobodys_arguments_or_environment(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    record = tiny.record()
    for pid in (record.pid, record.supervisor_pid):
        assert b"fsd1." not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"fsd1." not in Path(f"/proc/{pid}/environ").read_bytes()
    assert "fsd1." not in (tiny.base / "run" / f"{record.mount_id}.json").read_text()


def test_a_path_inside_finds_the_mount_but_does_not_unmount_it(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    (tiny.place / "d").mkdir()
    assert unmount.status(tiny.place / "d", tiny.directory)["mount_path"] == str(tiny.place)
    assert unmount.drain(tiny.place / "d", tiny.directory, 30, say)["status"] == "drained"
    with pytest.raises(NotFound):
        unmount.unmount(tiny.place / "d", tiny.directory, 30, say, Host())
    assert tiny.listed()


def test_a_second_mount_of_the_place_is_busy(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    again = tiny.start()
    assert again.returncode == 7
    assert "is mounted" in again.stderr


def test_a_killed_daemon_is_started_again(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    for round_ in range(1, 3):
        tiny.kill_daemon()
        assert unmount.status(tiny.place, tiny.directory)["restarts"] == round_
        assert sorted(os.listdir(tiny.place)) == []
    assert tiny.start().returncode == 7


@pytest.mark.parametrize("lack", ["short", "full"])
def test_a_restart_that_lacks_something_for_a_moment_is_tried_again(tiny: Tiny, lack: str) -> None:
    """Such an error ended the mount for good: it was taken for an end that was meant."""
    assert tiny.start(lack).returncode == 0
    os.kill((first := tiny.record()).pid, signal.SIGKILL)
    wait_for(lambda: tiny.state() == runtime.MOUNTED and tiny.record().pid != first.pid, 30, "the restart")
    record = tiny.record()
    assert (record.restarts, record.supervisor_pid) == (3, first.supervisor_pid)
    assert os.listdir(tiny.place) == []
    assert {"short": "start new thread", "full": "disk is full"}[lack] in Path(record.log).read_text()


def test_a_volume_that_broke_is_replaced_by_one_from_its_log(tiny: Tiny) -> None:
    """It would go on with whatever it was left with, or send nothing any more and say nothing either."""
    assert tiny.start().returncode == 0
    before = tiny.record()
    with contextlib.suppress(OSError):  # cut off, where the daemon has ended before it answered
        (tiny.place / "boomtick").exists()
    wait_for(
        lambda: tiny.record().pid != before.pid and tiny.state() == runtime.MOUNTED, 30, "another daemon"
    )
    assert "boom, as the test asked" in Path(before.log).read_text()
    assert tiny.record().restarts == 1
    (tiny.place / "d").mkdir()


def test_a_killed_daemon_is_started_again_without_its_records(tiny: Tiny) -> None:
    """A user's runtime directory goes with the login, or somebody tidies up: the mount stays."""
    assert tiny.start().returncode == 0
    before = tiny.record()
    (tiny.place / "d").mkdir()
    shutil.rmtree(tiny.directory.path)
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: tiny.state() == runtime.MOUNTED and tiny.record().pid != before.pid, 30, "the restart")
    assert os.listdir(tiny.place) == []  # the volume in memory is a new one
    assert tiny.alive()
    assert unmount.status(tiny.place, tiny.directory)["restarts"] == 1
    assert tiny.start().returncode == 7
    assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
    assert not tiny.listed()


def test_a_mount_whose_records_were_tidied_up_is_found_again(tiny: Tiny) -> None:
    assert tiny.start("tidy").returncode == 0
    before = tiny.record()
    for left in ("json", "sock", ""):
        old = tiny.directory.path / f"{before.mount_id}.{left}"
        shutil.rmtree(tiny.directory.path) if not left else old.unlink()
        wait_for(lambda: tiny.state() == runtime.MOUNTED and Path(before.socket).exists(), 30, "the record")
        wait_for(tiny.alive, 30, "the lock")
        told = unmount.status(tiny.place, tiny.directory)
        assert (told["pid"], told["restarts"]) == (before.pid, 0)
    os.utime(before.socket, (1, 1))
    wait_for(lambda: os.stat(before.socket).st_mtime > 1, 30, "a younger socket")
    tiny.kill_daemon()
    wait_for(tiny.alive, 30, "the lock of the next daemon")
    assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
    assert not tiny.alive()


class Scribe:
    """Makes files in a directory as fast as it can, whatever happens there."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.made = 0
        self.refused: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        tried = 0
        while not self._over.is_set():
            tried += 1
            try:
                os.close(os.open(self.place / f"f{tried % 50}", os.O_CREAT | os.O_WRONLY))
                self.made += 1
            except OSError as exc:
                self.refused.add(exc.errno or 0)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)


@pytest.mark.parametrize("how", ["beneath", "without the kernel's help"])
def test_no_write_lands_in_the_directory_below_while_a_daemon_is_replaced(tiny: Tiny, how: str) -> None:
    """As root, where the kernel can put a mount beneath another."""
    below = os.open(tiny.place, os.O_RDONLY | os.O_DIRECTORY)  # the directory itself, whatever is mounted
    try:
        assert tiny.start(*(["old-kernel"] if how != "beneath" else [])).returncode == 0
        scribe = Scribe(tiny.place)
        try:
            for _ in range(RESTARTS_MAX - 1):
                made = scribe.made
                tiny.kill_daemon()
                wait_for(lambda made=made: scribe.made > made + 20, 30, "writes after the restart")
        finally:
            scribe.stop()
        assert scribe.refused <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
        if how == "beneath" and os.geteuid() == 0 and kernel_release() >= (6, 5):
            assert os.listdir(below) == []
        assert mounttable.mounts().count(f" {tiny.place} ") == 1
        assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
        assert not tiny.listed()
    finally:
        for name in os.listdir(below):
            os.unlink(name, dir_fd=below)
        os.close(below)


def kernel_release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


@pytest.mark.root
@pytest.mark.parametrize("how", ["beneath", "without the kernel's help"])
def test_a_mount_made_read_only_stays_so_when_its_daemon_is_replaced(tiny: Tiny, how: str) -> None:
    """By `mount -o remount`, which the kernel does alone: the daemon is not told, and its next one looks."""

    def remount(flag: str) -> None:
        command = ["mount", "-i", "-o", f"remount,{flag}", os.fspath(tiny.place)]
        subprocess.run(command, check=True, timeout=30, env={**os.environ, "LIBMOUNT_FORCE_MOUNT2": "always"})

    assert tiny.start(*(["old-kernel"] if how != "beneath" else [])).returncode == 0
    assert unmount.status(tiny.place, tiny.directory)["read_only"] is False
    remount("ro")
    for _ in range(2):
        tiny.kill_daemon()
        with pytest.raises(OSError) as told:
            (tiny.place / "f").touch()
        assert told.value.errno == errno.EROFS
        assert unmount.status(tiny.place, tiny.directory)["read_only"] is True
    remount("rw")
    (tiny.place / "f").touch()
    tiny.kill_daemon()
    (tiny.place / "f").touch()
    assert unmount.status(tiny.place, tiny.directory)["read_only"] is False
    remount("ro")
    both = tiny.record()
    for pid in (both.supervisor_pid, both.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not tiny.alive(), 30, "their end")
    assert tiny.start().returncode == 0
    (tiny.place / "f").touch()  # another mount, by somebody who asked for no read-only one


def test_several_dead_mounts_of_one_place_become_one(tiny: Tiny) -> None:
    """A daemon that died while it took the place of another."""
    assert tiny.start().returncode == 0
    record = tiny.record()
    for pid in (record.supervisor_pid, record.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not tiny.alive(), 30, "both to end")
    made = beneath.make(record.source, {"default_permissions"}, read_only=False)
    if made is None:  # not root: then nothing makes two
        return
    made.put(tiny.place)
    os.close(made.fuse_fd)
    made.close()
    assert mounttable.mounts().count(f" {tiny.place} ") == 2
    assert tiny.start().returncode == 0
    assert (tiny.place / "new").write_bytes(b"x") == 1
    assert mounttable.mounts().count(f" {tiny.place} ") == 1


def test_a_read_only_mount_made_apart_is_read_only(tiny: Tiny) -> None:
    made = beneath.make("fsd:x:y", {"default_permissions", "allow_other"}, read_only=True)
    if made is None:  # not root
        return
    try:
        made.put(tiny.place)
        (line,) = [line for line in mounttable.mountinfo() if str(tiny.place) in line]
        assert " ro,nosuid,nodev,relatime " in line
        assert " - fuse.fsd fsd:x:y ro," in line
        assert line.endswith("default_permissions,allow_other")
        assert not made.replace(tiny.base / "elsewhere", "fsd:x:y"), "there is nothing to replace"
    finally:
        os.close(made.fuse_fd)
        made.close()


def test_restarts_end_after_five(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    for _ in range(RESTARTS_MAX):
        tiny.kill_daemon()
    os.kill(tiny.record().pid, signal.SIGKILL)
    wait_for(lambda: not tiny.alive(), 30, "the supervisor to give up")
    # Whoever goes on writing is told; nothing lands in the directory below.
    with pytest.raises(OSError, match="not connected"):
        (tiny.place / "f").write_bytes(b"")
    with pytest.raises(NotDrained, match="6 times in 10 minutes"):
        unmount.wait_exit(tiny.place, tiny.directory, 30, say, Host())
    # And the next mount of the place starts afresh.
    assert tiny.start().returncode == 0


def test_a_daemon_whose_supervisor_died_works_on(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    os.kill(tiny.record().supervisor_pid, signal.SIGKILL)
    (tiny.place / "x").write_bytes(b"x")
    assert tiny.start().returncode == 7
    assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
    assert not tiny.alive()


def test_both_killed_the_next_mount_cleans_up(tiny: Tiny) -> None:
    """Transport endpoint is not connected: nobody has to know what that is."""
    assert tiny.start().returncode == 0
    record = tiny.record()
    os.kill(record.supervisor_pid, signal.SIGKILL)
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not tiny.alive(), 30)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(tiny.place)
    assert tiny.start().returncode == 0
    assert os.listdir(tiny.place) == []
    mounts = mounttable.mounts()
    assert mounts.count(f" {tiny.place} ") == 1


def test_both_killed_unmount_detaches_and_does_not_claim_success(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    record = tiny.record()
    os.kill(record.supervisor_pid, signal.SIGKILL)
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not tiny.alive(), 30)
    with pytest.raises(NotDrained, match="was dead"):
        unmount.unmount(tiny.place, tiny.directory, 30, say, Host())
    assert not tiny.listed()


def test_unmount_names_who_keeps_it_busy(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    user = subprocess.Popen(["sleep", "60"], cwd=tiny.place, preexec_fn=die_with_parent)
    try:
        with pytest.raises(Busy, match=f"{user.pid} \\(sleep\\)"):
            unmount.unmount(tiny.place, tiny.directory, 30, say, Host())
        assert tiny.listed()
        (tiny.place / "still").write_bytes(b"works")
        answer = unmount.unmount(tiny.place, tiny.directory, 30, say, Host(), lazy=True)
        assert answer["status"] == "unmounted"
        assert not tiny.listed()
    finally:
        user.kill()
        user.wait(60)
    wait_for(lambda: not tiny.alive(), 30)


def test_unmount_waits_a_moment_for_a_user_nobody_sees(tiny: Tiny) -> None:
    """An open file on its way through a socket is in no process's table."""
    assert tiny.start().returncode == 0
    ours, theirs = socket.socketpair()
    fd = os.open(tiny.place, os.O_RDONLY)
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
    gone = threading.Timer(0.25, theirs.close)
    gone.start()
    try:
        assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
    finally:
        gone.join()
        ours.close()
    assert not tiny.listed()


@pytest.mark.root
def test_a_bound_place_is_unmounted_alone(tiny: Tiny) -> None:
    """umount(8) calls `fsd unmount` for it, as for the mount: the mount and its daemon go on."""
    assert tiny.start().returncode == 0
    (tiny.place / "d").mkdir()
    (tiny.place / "f").write_bytes(b"x")
    elsewhere = tiny.base / "elsewhere"
    elsewhere.mkdir()
    for inside, outside in (("d", elsewhere), (".", elsewhere), ("f", tiny.place / "bound")):
        if inside == "f":
            outside.touch()
        subprocess.run(["mount", "--bind", tiny.place / inside, outside], check=True, timeout=30)
        rows = [one for one in unmount.mounts(tiny.directory) if one["mount_id"] == tiny.record().mount_id]
        assert [(one["mount_path"], one["state"]) for one in rows] == [(str(tiny.place), runtime.MOUNTED)]
        used = os.open(outside, os.O_RDONLY)
        try:
            with pytest.raises(Busy):
                unmount.unmount(outside, tiny.directory, 30, say, Host())
        finally:
            os.close(used)
        answer = unmount.unmount(outside, tiny.directory, 30, say, Host())
        assert answer == {"status": "unmounted", "still_mounted_at": str(tiny.place)}
        assert not mounted_at(outside)
        assert tiny.listed()
        assert tiny.alive()
    assert (tiny.place / "f").read_bytes() == b"x"
    assert unmount.unmount(tiny.place, tiny.directory, 30, say, Host())["status"] == "unmounted"
    assert not tiny.alive()


@pytest.mark.root
def test_what_is_mounted_on_a_file_stays_while_the_server_is_silent(tiny: Tiny) -> None:
    """The kernel takes a mount off a name it is told to forget: whoever wrote through it wrote into the file
    below from then on. (Before Linux 6.2 it knows no other way.)"""
    assert tiny.start().returncode == 0
    other = tiny.base / "other"
    other.write_bytes(b"other")
    place, slow = tiny.place / "f", tiny.place / "hang500"
    assert not place.exists() and not slow.exists()  # so the kernel was told
    place.write_bytes(b"x")
    subprocess.run(["mount", "--bind", other, place], check=True, timeout=30)

    def asks() -> bool:
        before = time.monotonic()
        return not slow.exists() and time.monotonic() - before > 0.45

    wait_for(asks, 30, "the kernel to ask again for what it was told after the other name")
    stays = tuple(int(one) for one in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 2)
    assert place.read_bytes() == (b"other" if stays else b"x")
    if stays:
        subprocess.run(["umount", place], check=True, timeout=30)
    assert place.read_bytes() == b"x"


def test_umount_by_anybody_ends_both_and_restarts_nothing(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    subprocess.run(["umount", "-i", str(tiny.place)], check=True, timeout=60)
    assert unmount.wait_exit(tiny.place, tiny.directory, 30, say, Host())["exit"] == 0
    assert not tiny.alive()
    assert not tiny.listed()


def test_wait_exit_of_a_mounted_place_is_busy(tiny: Tiny) -> None:
    assert tiny.start().returncode == 0
    with pytest.raises(Busy):
        unmount.wait_exit(tiny.place, tiny.directory, 1, say, Host())


@pytest.mark.parametrize("who", ["supervisor_pid", "pid"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_to_either_ends_both(tiny: Tiny, who: str, number: signal.Signals) -> None:
    assert tiny.start().returncode == 0
    os.kill(getattr(tiny.record(), who), number)
    wait_for(lambda: not tiny.alive(), 30, "both to end")
    assert not tiny.listed()
    assert unmount.wait_exit(tiny.place, tiny.directory, 1, say, Host())["exit"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_in_a_daemons_first_moments_is_a_stop(tiny: Tiny, number: signal.Signals) -> None:
    """It does not take signals itself yet: the default action ends it, and nobody starts another."""
    assert tiny.start().returncode == 0
    first = tiny.record()
    os.kill(first.pid, signal.SIGKILL)
    pid = wait_for(lambda: child_of(first.supervisor_pid, but=first.pid), 30, "the next daemon")
    os.kill(pid, number)
    wait_for(lambda: not tiny.alive(), 30, "both to end")
    assert not tiny.listed()
    assert tiny.record().state == runtime.ENDED and tiny.record().restarts == 1
    assert tiny.start().returncode == 0


def child_of(pid: int, *, but: int) -> int:
    """The process that `pid` started, other than `but`; 0: there is none."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next((int(one) for one in found if int(one) != but), 0)


def test_foreground_ctrl_c_of_the_terminals_group_is_one_stop(tiny: Tiny) -> None:
    process = tiny.start_foreground()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 0, tiny.record()
    assert not tiny.listed()


@pytest.mark.parametrize("options", [(), ("alone",)])
def test_nohup_is_no_stop_at_the_end_of_the_terminal(tiny: Tiny, options: tuple[str, ...]) -> None:
    process = tiny.start_foreground(*options, before=("nohup",))
    for pid in {process.pid, tiny.record().pid}:
        status = Path(f"/proc/{pid}/status").read_text()
        [ignored] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:")]
        assert ignored >> signal.SIGHUP - 1 & 1, status
        os.kill(pid, signal.SIGHUP)
    (tiny.place / "d").mkdir()
    process.terminate()
    assert process.wait(60) == 0
    assert not tiny.listed()


def test_foreground_alone(tiny: Tiny) -> None:
    process = tiny.start_foreground("alone")
    assert tiny.record().pid == process.pid
    process.terminate()
    assert process.wait(60) == 0
    assert not tiny.listed()


def test_the_service_manager_is_told(tiny: Tiny, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        process = tiny.start_foreground(env={"TEST_NOTIFY": str(tmp_path / "notify")})
        got = [manager.recv(4096).decode() for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 0
        got.append(manager.recv(4096).decode())
    assert got == [f"MAINPID={process.pid}", "READY=1", "STOPPING=1"]


def test_what_the_server_refused_is_never_called_drained(tiny: Tiny) -> None:
    assert tiny.start("refused").returncode == 0
    with pytest.raises(NotDrained, match="refused 1 operation") as caught:
        unmount.drain(tiny.place, tiny.directory, 30, say)
    assert caught.value.details["status"] == "not_drained"
    with pytest.raises(NotDrained):
        unmount.unmount(tiny.place, tiny.directory, 30, say, Host())
    assert not tiny.listed()
    with pytest.raises(NotDrained):
        unmount.wait_exit(tiny.place, tiny.directory, 30, say, Host())


def test_a_command_that_goes_away_does_not_take_the_unmount_back(tiny: Tiny) -> None:
    """Ctrl-C while `fsd unmount` sends the rest: the daemon ends all the same, and the next can begin."""
    assert tiny.start("stuck").returncode == 0
    asked = {"verb": "unmount", "args": {"timeout": 0.5, "lazy": False}}
    with connect(Path(tiny.record().socket)) as sock, sock.makefile("rb") as lines:
        sock.sendall(json.dumps(asked).encode() + b"\n")
        assert b"progress" in lines.readline()
    wait_for(lambda: not tiny.listed(), 30, "the unmount")
    with pytest.raises(NotDrained):
        unmount.wait_exit(tiny.place, tiny.directory, 30, say, Host())
    assert not tiny.alive()


def test_a_stop_right_before_the_mount_leaves_nothing(tiny: Tiny) -> None:
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = tiny.command("foreground", "slow")
    with subprocess.Popen(command, cwd=TESTS, env=env, stderr=subprocess.PIPE) as process:
        wait_for((tiny.base / "slow").exists, 30, "the step before the mount")
        process.terminate()
        assert process.wait(60) in (1, 6)
    assert not tiny.listed()
    assert not tiny.alive()


@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_ends_a_mount_that_cannot_be_detached(tiny: Tiny, times: int) -> None:
    """With a word in the log and exit 6: it is no crash, after which another daemon would be started."""
    assert tiny.start("stays", "stuck").returncode == 0
    record = tiny.record()
    for _ in range(times):
        os.kill(record.pid, signal.SIGTERM)
    wait_for(lambda: not tiny.alive(), 30, "the end")
    assert tiny.record().state == runtime.ENDED
    assert tiny.record().restarts == 0
    assert tiny.record().ended["exit"] == 6
    assert "cannot be unmounted" in Path(record.log).read_text()


class TestPlaces:
    """Places that will not do: a clear word, the right exit code, nothing mounted."""

    def refused(self, tiny: Tiny, code: int, word: str, **more: Path) -> None:
        done = tiny.start(**more)
        assert done.returncode == code, done.stderr
        assert word in done.stderr
        assert not tiny.listed()

    def test_absent(self, tiny: Tiny) -> None:
        self.refused(tiny, 5, "does not exist", place=tiny.base / "absent")

    def test_a_file(self, tiny: Tiny) -> None:
        (tiny.base / "file").write_bytes(b"")
        self.refused(tiny, 2, "not a directory", place=tiny.base / "file")

    def test_not_empty(self, tiny: Tiny) -> None:
        (tiny.place / "something").write_bytes(b"")
        self.refused(tiny, 2, "'something'")

    def test_a_place_another_filesystem_of_ours_holds(self, tiny: Tiny, tmp_path: Path) -> None:
        assert tiny.start().returncode == 0
        record = tiny.record()
        other = json.loads((tiny.base / "run" / f"{record.mount_id}.json").read_text())
        assert other["state"] == "mounted"
        (tmp_path / "second").mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "support.tinydaemon", str(tiny.place), str(tmp_path / "second")],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 7
        assert "mounted already" in done.stderr

    def test_the_state_directory_inside(self, tiny: Tiny) -> None:
        self.refused(tiny, 2, "lies inside the mount point", place=tiny.base)

    def test_the_working_directory_inside(self, tiny: Tiny) -> None:
        self.refused(tiny, 2, "the working directory", cwd=tiny.place)

    def test_a_symlink_to_a_place_is_the_place(self, tiny: Tiny) -> None:
        link = tiny.base / "link"
        link.symlink_to(tiny.place)
        assert tiny.start(place=link).returncode == 0
        assert tiny.listed()
        assert tiny.start().returncode == 7
        assert unmount.unmount(link, tiny.directory, 30, say, Host())["status"] == "unmounted"
