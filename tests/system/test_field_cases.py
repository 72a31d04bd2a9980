"""What users of such filesystems complain about when a mount ends, the server is away or the disk is full, in
short forms. The numbers are those of the collection the cases come from.

Elsewhere: 16, 19, 23 in tests/kernel/test_cut.py; 20 and the matrix of ends in test_stop_matrix.py; 46 in
tests/kernel/test_no_fuse.py; 24 and 26 to 35 in test_field_posix.py; 21, 36, 37, 43 and 44 in
test_field_more.py; 38 in test_more_tools.py; 39 in tests/kernel/test_posix_rules.py; 10 and 12 in
tests/kernel/test_checkpoint_mount.py; 11 in test_restore_mount.py; 13 in tests/contract/test_audit_repair.py;
42 in tests/fault/test_room_comes_back.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mounttable
from support.cli import command
from support.processes import die_with_parent
from support.proxy import (
    EMPTY_200_AFTER,
    HTML_502,
    HTML_502_AFTER,
    FaultProxy,
    delay,
    on,
    truncate,
)
from support.sandbox import Sandbox, alive
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

MIB = 1 << 20
NOTHING = {"operations": 0, "files": 0, "bytes": 0}


class Case:
    """A server behind a proxy, and sandboxes of one filesystem on it."""

    def __init__(self, server: Server, base: Path) -> None:
        self.server, self.base = server, base
        self.fs = server.create()
        self.proxy = FaultProxy(server.url)
        self.boxes: list[Sandbox] = []

    def box(self, *options: str, supervised: bool = False, state: Path | None = None) -> Sandbox:
        """A sandbox, mounted, with its root known."""
        made = Sandbox(
            self.base / f"box{len(self.boxes)}",
            self.fs,
            *options,
            supervised=supervised,
            state=state,
            endpoint=self.proxy.url,
        )
        self.boxes.append(made)
        made.mount()
        os.listdir(made.mountpoint)
        return made

    def close(self) -> None:
        self.proxy.clear()
        for box in self.boxes:
            box.close()
        self.proxy.close()


@pytest.fixture
def case(trusted: Server, tmp_path: Path) -> Iterator[Case]:
    made = Case(trusted, tmp_path)
    try:
        yield made
    finally:
        made.close()


def big(path: Path, size: int = 12 * MIB) -> str:
    """A file of `size` random bytes; their hash."""
    data = secrets.token_bytes(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listed(box: Sandbox) -> bool:
    return f" {box.mountpoint} " in mounttable.mounts()


def test_case_1_sigterm_sends_what_was_written_or_says_so(case: Case) -> None:
    box = case.box("--stop-timeout", "60s")
    told = big(box.mountpoint / "a")
    os.kill(box.daemon, signal.SIGTERM)
    wait_for(lambda: not listed(box), 60, "the detach")
    assert box.fsd("wait-exit", os.fspath(box.mountpoint)).returncode == 0
    box.lose()
    box = case.box("--stop-timeout", "4s")
    assert hashed(box.mountpoint / "a") == told
    case.proxy.refuse()
    told = big(box.mountpoint / "b")
    os.kill(box.daemon, signal.SIGTERM)
    wait_for(lambda: not listed(box), 30, "the detach")
    left = box.fsd("wait-exit", os.fspath(box.mountpoint), check=False)
    assert left.returncode == 6
    assert "/b" in left.stdout
    case.proxy.accept()
    box.mount()
    assert hashed(box.mountpoint / "b") == told


@pytest.mark.parametrize("way", ["own", "umount", "fusermount3"])
def test_case_2_and_3_after_umount_the_data_is_safe(case: Case, way: str) -> None:
    """The daemon is killed as soon as the command is back; fsd's own has sent everything by then."""
    box = case.box()
    case.proxy.always(delay(0.2), on("packs"))
    told = big(box.mountpoint / "a")
    where = os.fspath(box.mountpoint)
    if way == "own":
        assert box.unmount()["pending"] == NOTHING
        box.lose()
    else:
        argv = ["umount", where] if way == "umount" else ["fusermount3", "-u", where]
        subprocess.run(argv, check=True, timeout=30)
        box.kill()
    case.proxy.clear()
    box.mount()
    assert hashed(box.mountpoint / "a") == told


def test_case_4_an_fsync_that_returned_outlives_both(server: Server, tmp_path: Path) -> None:
    case = Case(server, tmp_path)
    try:
        box = case.box("--io-timeout", "2s")
        fd = os.open(box.mountpoint / "f", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"kept" * 100_000)
        os.fsync(fd)
        server.kill()
        os.write(fd, b"more")
        with pytest.raises(OSError) as told:
            os.fsync(fd)
        assert told.value.errno == errno.EIO
        box.kill()
        with contextlib.suppress(OSError):
            os.close(fd)
        server.restart()
        box.lose()
        box.mount()
        assert (box.mountpoint / "f").read_bytes() == b"kept" * 100_000
    finally:
        case.close()


def test_case_5_fsync_sends_the_newest_content(case: Case) -> None:
    """The upload of the older is held back meanwhile."""
    box = case.box()
    path = box.mountpoint / "f"
    case.proxy.always(delay(1.5), on("packs"))
    big(path, 9 * MIB)
    wait_for(lambda: case.proxy.count("packs") > 0, 30, "the upload of the first content")
    newest = secrets.token_bytes(5 * MIB)
    with open(path, "r+b") as file:
        file.write(newest)
        file.truncate()
        os.fsync(file.fileno())
    box.lose()
    case.proxy.clear()
    box.mount()
    assert path.read_bytes() == newest


def test_case_6_the_cache_bound_drops_nothing_unsent(case: Case) -> None:
    box = case.box("--cache-size", "2M")
    case.proxy.refuse()
    told = {f"f{number}": big(box.mountpoint / f"f{number}", 3 * MIB) for number in range(5)}
    assert {name: hashed(box.mountpoint / name) for name in told} == told
    case.proxy.accept()
    box.drain()
    box.unmount()
    box.mount()
    # Reading back fills the small cache several times over.
    assert {name: hashed(box.mountpoint / name) for name in told} == told
    cached = sum(path.stat().st_size for path in (box.state / "cache").rglob("*") if path.is_file())
    assert cached < 4 * MIB


def test_case_7_no_number_of_failures_gives_up_an_upload(case: Case) -> None:
    """Longer than every time-out: status lists it all the time, and it arrives."""
    box = case.box("--io-timeout", "1s")
    case.proxy.always(HTML_502)
    told = big(box.mountpoint / "a", MIB)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert box.status()["pending"]["files"] == 1
    with open(box.mountpoint / "a", "rb") as file, pytest.raises(OSError, match="Input/output error"):
        os.fsync(file.fileno())
    case.proxy.clear()
    wait_for(lambda: box.status()["pending"] == NOTHING, 30, "the file to arrive")
    box.lose()
    box.mount()
    assert hashed(box.mountpoint / "a") == told


def test_case_8_renamed_over_is_never_empty(case: Case) -> None:
    box, other = case.box(), case.box()
    (box.mountpoint / "f").write_text("0")
    box.drain()
    wait_for((other.mountpoint / "f").exists, 30, "the file on the other mount")
    stop = threading.Event()
    seen: dict[Path, list[str]] = {box.mountpoint: [], other.mountpoint: []}

    def read(top: Path) -> None:
        while not stop.is_set():
            seen[top].append((top / "f").read_text())

    readers = [threading.Thread(target=read, args=(top,)) for top in seen]
    for thread in readers:
        thread.start()
    subprocess.run(
        ["bash", "-euc", "for i in $(seq 200); do printf %s $i > .t && mv .t f; done"],
        cwd=box.mountpoint,
        check=True,
        timeout=60,
    )
    box.drain()
    wait_for(lambda: seen[other.mountpoint][-1] == "200", 30, "the last on the other mount")
    stop.set()
    for thread in readers:
        thread.join(60)
    for told in seen.values():
        assert all(text.isdigit() for text in told), "empty or torn for a reader"
        assert [int(text) for text in told] == sorted(map(int, told)), "an older one came back"
    box.unmount()
    box.lose()
    box.mount()
    assert (box.mountpoint / "f").read_text() == "200"


def test_case_9_answers_that_are_none_do_not_end_the_daemon(case: Case) -> None:
    box = case.box()
    daemon = box.daemon
    told = {}
    for number, fault in enumerate((HTML_502_AFTER, EMPTY_200_AFTER, truncate(40))):
        case.proxy.always(fault)
        told[f"f{number}"] = big(box.mountpoint / f"f{number}", MIB)
        case.proxy.reset_counts()
        wait_for(lambda: case.proxy.count("commits") + case.proxy.count("packs") > 1, 30, "tries")
        assert alive(daemon)
        case.proxy.clear()
        with open(box.mountpoint / f"f{number}", "rb") as file:
            os.fsync(file.fileno())
    assert box.status()["conflicts"] == 0
    box.lose()
    box.mount()
    assert {name: hashed(box.mountpoint / name) for name in sorted(os.listdir(box.mountpoint))} == told


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(1500, 4), pytest.param(20_000, 60, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
)
def test_case_14_readers_go_on_after_an_outage(case: Case, count: int, seconds: int) -> None:
    """Many known inodes, 16 readers in loops, the server away for longer than the caches believe."""
    box = case.box()
    for number in range(count):
        directory = box.mountpoint / f"d{number % 15}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{number}").write_bytes(b"%d" % number)
    box.unmount()
    box.lose()
    box.mount()
    subprocess.run(["ls", "-lR", os.fspath(box.mountpoint)], check=True, stdout=subprocess.DEVNULL)
    stop = threading.Event()
    turns = [0] * 16
    wrong: list[object] = []

    def read(which: int) -> None:
        number = which
        while not stop.is_set():
            number = (number + 16) % count
            try:
                text = (box.mountpoint / f"d{number % 15}" / f"f{number}").read_bytes()
            except OSError as exc:
                wrong.append(exc)
                return
            if text != b"%d" % number:
                wrong.append((number, text))
            turns[which] += 1

    readers = [threading.Thread(target=read, args=(which,)) for which in range(16)]
    for thread in readers:
        thread.start()
    try:
        wait_for(lambda: min(turns) > 5, 30, "the readers to read")
        case.proxy.refuse()
        stop.wait(seconds)
        before = list(turns)
        case.proxy.accept()
        wait_for(lambda: all(now > then for now, then in zip(turns, before)), 30, "all 16 to go on")
    finally:
        stop.set()
        for thread in readers:
            thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in readers)


def test_case_15_a_name_that_does_not_resolve_is_an_error_in_time(case: Case) -> None:
    box = Sandbox(case.base / "box", case.fs, endpoint="https://no-such-server.invalid:1")
    where = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state))
    start = time.monotonic()
    told = box.fsd(*where, "--ready-timeout", "2s", check=False)
    assert told.returncode == 1
    assert "no-such-server.invalid" in told.stderr
    assert time.monotonic() - start < 40  # the default is 60 s
    assert not listed(box)
    # And while it waits, a signal ends it.
    process = subprocess.Popen([*command(), *where, "--foreground"], env=box.env, stderr=subprocess.PIPE)
    try:
        threading.Event().wait(1.5)
        process.terminate()
        assert process.wait(40) != 0
    finally:
        process.kill()
        process.communicate()
    assert not listed(box)


@pytest.mark.root
def test_case_15_when_the_name_resolves_no_more_the_mount_goes_on_and_can_be_ended(case: Case) -> None:
    """Name resolution is taken away from a mount at work, in a namespace with a hosts file of its own."""
    hosts = case.base / "hosts"
    hosts.write_text("127.0.0.1 fsd-server.invalid\n")
    box = Sandbox(
        case.base / "box", case.fs, endpoint=case.proxy.url.replace("127.0.0.1", "fsd-server.invalid")
    )
    argv = ["mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), "--foreground"]
    with open(case.base / "out", "wb") as out:
        process = subprocess.Popen(
            [
                *("unshare", "-m", "--propagation", "private", "bash", "-c"),
                'mount --bind "$0" /etc/hosts && exec "$@"',
                *(os.fspath(hosts), *command(), *argv),
                *("--insecure", "--no-supervisor", "--io-timeout", "3s", "--stop-timeout", "3s"),
            ],
            env=box.env,
            stdout=out,
            stderr=out,
            preexec_fn=die_with_parent,
        )
    top = Path(f"/proc/{process.pid}/root{box.mountpoint}")
    try:
        wait_for(lambda: "mounted" in (case.base / "out").read_text(), 30, "the mount")
        (top / "f").write_text("before")
        wait_for(lambda: case.proxy.count("commits") > 0, 30, "the first commit")
        hosts.write_text("")
        case.proxy.cut_all()
        (top / "g").write_text("meanwhile")
        with open(top / "g") as file:
            os.fsync(file.fileno())  # the last known address serves
        case.proxy.refuse()
        (top / "h").write_text("left")
        process.terminate()
        assert process.wait(60) == 6
    finally:
        process.kill()
        process.wait(60)
    case.proxy.accept()
    box.env["FSD_ENDPOINT"] = case.proxy.url
    assert box.fsd("cat", "/g").stdout == "meanwhile"


def test_case_17_a_dead_mount_is_cleaned_up_by_the_next(case: Case) -> None:
    box = case.box()
    (box.mountpoint / "f").write_bytes(b"x")
    box.kill()
    with pytest.raises(OSError) as told:
        os.listdir(box.mountpoint)
    assert told.value.errno == errno.ENOTCONN
    box.mount()
    assert (box.mountpoint / "f").read_bytes() == b"x"
    assert mounttable.mounts().count(f" {box.mountpoint} ") == 1


def test_case_18_a_shell_in_the_mount_goes_on_after_cd(case: Case) -> None:
    box = case.box(supervised=True)
    (box.mountpoint / "f").write_text("there")
    shell = subprocess.Popen(
        ["bash"], cwd=box.mountpoint, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    try:
        shell.stdin.write("cat f; echo\n")
        assert shell.stdout.readline() == "there\n"
        killed = box.daemon
        os.kill(killed, signal.SIGKILL)
        box.wait_remounted(killed)
        shell.stdin.write(f"cat f 2>/dev/null || echo stale; cd {box.mountpoint}; cat f; echo\n")
        assert shell.stdout.readline() == "stale\n"
        assert shell.stdout.readline() == "there\n"
    finally:
        shell.kill()
        shell.communicate()


def test_case_22_nothing_of_the_mounts_own_lies_inside_it(case: Case) -> None:
    box = Sandbox(case.base / "box", case.fs)
    inside = box.mountpoint / "state"
    where = os.fspath(box.mountpoint)
    told = box.fsd("mount", where, "--state-dir", os.fspath(inside), check=False, timeout=30)
    assert told.returncode == 2
    assert "inside the mount point" in told.stderr
    (case.base / "link").symlink_to(box.mountpoint)
    told = box.fsd("mount", where, "--state-dir", f"{case.base}/link/s", check=False, timeout=30)
    assert told.returncode == 2
    assert os.listdir(box.mountpoint) == []
    # The working directory may not either, and nothing hangs.
    argv = [*command(), "mount", where, "--state-dir", os.fspath(box.state)]
    done = subprocess.run(
        argv, env=box.env, cwd=box.mountpoint, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "working directory" in done.stderr
    assert not listed(box)


@contextlib.contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    """A file system of its own for a state directory."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def test_case_25_40_and_41_a_full_disk_under_the_buffer(case: Case) -> None:
    """Writing meets ENOSPC or waits; nothing acknowledged is lost; the log stays small and names the state
    directory; and all goes on by itself when there is space."""
    with small_disk(case.base / "disk", "24m") as disk:
        box = case.box("--io-timeout", "2s", "--buffer-size", "1G", state=disk / "state")
        case.proxy.refuse()
        filler = disk / "filler"
        written = {}
        told: OSError | None = None
        for number in range(40):
            data = secrets.token_bytes(MIB)
            try:
                with open(box.mountpoint / f"f{number}", "wb", buffering=0) as file:
                    file.write(data)
            except OSError as exc:
                told = exc
                break
            written[f"f{number}"] = hashlib.sha256(data).hexdigest()
        assert told is not None
        assert told.errno == errno.ENOSPC
        assert len(written) > 3
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(24 * MIB))
        for _ in range(3000):
            for name in ("f0", "f1"):
                assert hashed(box.mountpoint / name) == written[name] if _ % 100 == 0 else True
            os.stat(box.mountpoint / "f0")
        logs = sum(path.stat().st_size for path in disk.rglob("*.log"))
        assert logs < MIB
        assert os.fspath(disk) in box.logs()
        # Removing works on a full disk.
        os.unlink(box.mountpoint / "f2")
        del written["f2"]
        filler.unlink()
        case.proxy.accept()
        path = box.mountpoint / "after"
        wait_for(lambda: _writes(path, secrets.token_bytes(MIB)), 30, "writing to go on by itself")
        path.unlink()
        box.drain()
        box.unmount()
        box.close()
    other = case.box()
    found = {name: hashed(other.mountpoint / name) for name in os.listdir(other.mountpoint)}
    assert {name: found.get(name) for name in written} == written


def _writes(path: Path, data: bytes) -> bool:
    try:
        path.write_bytes(data)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        return False
    return True


def test_case_45_no_local_fsync_without_an_fsync(case: Case) -> None:
    """Creating small files costs none; with an fsync each, at most two."""
    assert shutil.which("strace"), "scripts/setup-test installs it"
    box = case.box()
    summary = case.base / "strace.out"
    trace = subprocess.Popen(
        [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=fsync,fdatasync",
            "-o",
            os.fspath(summary),
            "-p",
            str(box.daemon),
        ],
        preexec_fn=die_with_parent,
        stderr=subprocess.DEVNULL,
    )
    try:
        status = Path(f"/proc/{box.daemon}/status")
        wait_for(lambda: f"TracerPid:\t{trace.pid}" in status.read_text(), 30, "strace to be attached")
        for number in range(100):
            (box.mountpoint / f"f{number}").write_bytes(b"x" * 500)
        box.drain()
        free = summary.read_text().count("sync(")
        for number in range(20):
            with open(box.mountpoint / f"s{number}", "wb") as file:
                file.write(b"x" * 500)
                file.flush()
                os.fsync(file.fileno())
        costly = summary.read_text().count("sync(") - free
    finally:
        trace.terminate()
        trace.wait(60)
    assert free <= 2
    assert costly <= 40


def test_case_46_a_mount_that_did_not_come_up_says_so_in_one_line(case: Case) -> None:
    box = Sandbox(case.base / "box", case.fs, endpoint="http://127.0.0.1:1", supervised=True)
    argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), "--ready-timeout", "1s")
    told = box.fsd(*argv, "--output", "text", check=False)
    assert told.returncode == 1
    assert told.stderr.startswith("fsd [ERROR]: ")
    assert os.listdir(box.mountpoint) == []
    doctor = box.fsd("doctor", "--output", "json", check=False)
    assert doctor.returncode in (0, 1)
    assert "mount" in json.dumps(json.loads(doctor.stdout)["works"])


def test_case_46_while_nobody_serves_the_place_nothing_is_written_below_it(case: Case) -> None:
    """The daemon died and the next one cannot start, since the server is away."""
    box = case.box(supervised=True)
    (box.mountpoint / "before").write_bytes(b"kept")
    case.proxy.refuse()
    killed = box.daemon
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: "restart 1" in box.logs(), 30, "the next daemon")
    for _ in range(5):
        with pytest.raises(OSError) as told:
            (box.mountpoint / "lost").write_bytes(b"x")
        assert told.value.errno == errno.ENOTCONN
    case.proxy.accept()
    box.wait_remounted(killed)
    assert os.listdir(box.mountpoint) == ["before"]
    assert mounttable.mounts().count(f" {box.mountpoint} ") == 1
    # The same where the supervisor died too, and somebody mounts again.
    box.kill()
    case.proxy.refuse()
    mounting = threading.Thread(target=box.mount)
    mounting.start()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        with pytest.raises(OSError) as told:
            (box.mountpoint / "lost").write_bytes(b"x")
        assert told.value.errno == errno.ENOTCONN
    case.proxy.accept()
    mounting.join(60)
    assert os.listdir(box.mountpoint) == ["before"]
    assert mounttable.mounts().count(f" {box.mountpoint} ") == 1
    # A stop while the next one is still to come takes the dead mount away.
    case.proxy.refuse()
    killed = box.daemon
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: box.logs().count("restart 1") > 1, 30, "the next daemon")
    os.kill(box.pids[0], signal.SIGTERM)
    wait_for(lambda: not alive(box.pids[0]), 30, "the supervisor to end")
    assert not listed(box)
    assert os.listdir(box.mountpoint) == []
