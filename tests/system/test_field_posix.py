"""What users of such filesystems complain about in calls and tools, in short forms: cases 24 and 26 to 35.

The numbers are those of the collection the cases come from.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two(trusted: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, Sandbox]]:
    """Two mounts of one filesystem for all cases: each works in a directory of its own."""
    fs = trusted.create()
    boxes = [Sandbox(tmp_path_factory.mktemp("box"), fs) for _ in range(2)]
    try:
        for box in boxes:
            box.mount()
        yield boxes[0], boxes[1]
        for box in boxes:
            assert box.unmount()["pending"] == {"operations": 0, "files": 0, "bytes": 0}
    finally:
        for box in boxes:
            box.close()


@pytest.fixture
def here(two: tuple[Sandbox, Sandbox], request: pytest.FixtureRequest) -> Path:
    """A directory of the case's own on the first mount."""
    made = two[0].mountpoint / request.node.name.split("[")[0]
    made.mkdir(exist_ok=True)
    return made


def there(two: tuple[Sandbox, Sandbox], path: Path) -> Path:
    """The same path on the second mount."""
    return two[1].mountpoint / path.relative_to(two[0].mountpoint)


def shell(script: str, *argv: object, timeout: float = 60) -> str:
    done = subprocess.run(
        ["bash", "-euc", script, "-", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script}: {done.returncode}\n{done.stderr}"
    return done.stdout.strip()


def test_case_24_many_writers_and_a_listing_meet_no_error(trusted: Server, here: Path) -> None:
    """16 writers, a loop of readdir: no EIO, and nothing of a locked database in the server's log."""
    stop = threading.Event()
    errors: list[OSError] = []
    made = [0] * 16

    def write(number: int) -> None:
        while not stop.is_set() and made[number] < 200:
            try:
                with open(here / f"{number}-{made[number]}", "xb") as file:
                    file.write(b"x" * 100)
                    if made[number] % 10 == 0:
                        os.fsync(file.fileno())
            except OSError as exc:
                errors.append(exc)
                return
            made[number] += 1

    def look() -> None:
        while not stop.is_set():
            try:
                os.listdir(here)
            except OSError as exc:
                errors.append(exc)
                return

    writers = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    reader = threading.Thread(target=look)
    reader.start()
    for thread in writers:
        thread.start()
    stop.wait(4)
    try:
        wait_for(lambda: sum(made) > 100 or errors, 60, "writers to write")
    finally:
        stop.set()
    for thread in [*writers, reader]:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert sum(made) > 100
    assert len(os.listdir(here)) == sum(made)
    assert "locked" not in trusted.log.read_text()


def test_case_26_rmdir_while_an_unlinked_file_is_open(two: tuple[Sandbox, Sandbox], here: Path) -> None:
    for sent in (False, True):
        directory = here / f"d{sent}"
        directory.mkdir()
        with open(directory / "x", "w+b") as file:
            file.write(b"before")
            file.flush()
            if sent:
                two[0].drain()
            os.unlink(directory / "x")
            assert os.listdir(directory) == []  # no .fuse_hidden
            directory.rmdir()
            file.write(b" after")
            file.seek(0)
            assert file.read() == b"before after"


def test_case_27_rm_rf_and_a_deleting_scan_take_one_pass(two: tuple[Sandbox, Sandbox], here: Path) -> None:
    for sent in (False, True):
        for way in ("rm", "scandir"):
            directory = here / f"{way}{sent}"
            directory.mkdir()
            for number in range(2500):
                os.close(os.open(directory / f"file-number-{number}", os.O_CREAT | os.O_WRONLY))
            if sent:
                two[0].drain()
            if way == "rm":
                shell('rm -rf "$1"', directory)
            else:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        os.unlink(entry.path)
                directory.rmdir()
            assert not directory.exists()


@pytest.mark.parametrize("count", [0, 1, 23, 24, 1000, pytest.param(50_000, marks=pytest.mark.long)])
def test_case_28_listings_have_the_exact_number(two: tuple[Sandbox, Sandbox], here: Path, count: int) -> None:
    directory = here / str(count)
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / f"{number}", os.O_CREAT | os.O_WRONLY))
    assert int(shell('ls -f "$1" | wc -l', directory)) == count + 2  # . and ..
    two[0].drain()
    other = there(two, directory)
    wait_for(other.exists, 30, "the directory on the other mount")
    assert int(shell('ls -f "$1" | wc -l', other)) == count + 2
    assert int(shell('find "$1" -type f | wc -l', other)) == count


def test_case_29_times_stay_through_flush_and_remount(trusted: Server, tmp_path: Path) -> None:
    """Files, directories, links and the directories temporary files came and went in; to the nanosecond."""
    box = Sandbox(tmp_path / "box", trusted.create())
    try:
        box.mount()
        top = box.mountpoint
        (top / "dir").mkdir()
        (top / "file").write_bytes(b"content" * 1000)
        os.link(top / "file", top / "dir" / "hard")
        (top / "link").symlink_to("file")
        for number in range(20):
            (top / "dir" / f".tmp{number}").write_bytes(b"t")
            threading.Event().wait(0.005)  # longer than the clock's tick
            if number % 2:
                (top / "dir" / f".tmp{number}").rename(top / "dir" / "target")
            else:
                (top / "dir" / f".tmp{number}").unlink()
        with open(top / "mapped", "w+b") as file:
            file.truncate(8192)
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[:4] = b"mmap"
                mapped.flush()
        (top / "stamped").touch()
        os.utime(top / "stamped", ns=(123_456_789, 987_654_321))

        def times() -> dict[str, tuple[int, int]]:
            names = ["", "dir", "file", "dir/hard", "link", "dir/target", "mapped", "stamped"]
            stats = {name: os.lstat(top / name) for name in names}
            return {name: (info.st_mtime_ns, info.st_ctime_ns) for name, info in stats.items()}

        before = times()
        box.drain()
        assert times() == before
        box.unmount()
        box.mount()
        assert times() == before
        box.unmount()
        box.lose()
        box.mount()
        assert times() == before
        box.unmount()
    finally:
        box.close()


def test_case_30_and_31_the_other_mount_sees_whole_files_after_close(
    two: tuple[Sandbox, Sandbox], here: Path
) -> None:
    """Without fsync: within the flush delay, the transfer and a second; never a size of 0, never an old time
    with a new size."""
    other = there(two, here)
    wait_for(other.exists, 30, "the directory")
    for number in range(2):
        assert not (other / f"f{number}").exists()  # a negative entry is in the kernel's cache
        (here / f"f{number}").write_bytes(b"z" * 30_000)
        mtime = os.stat(here / f"f{number}").st_mtime_ns
        wait_for((other / f"f{number}").exists, 30, "the file on the other mount")
        info = os.stat(other / f"f{number}")
        assert (info.st_size, info.st_mtime_ns) == (30_000, mtime)
        assert (other / f"f{number}").read_bytes() == b"z" * 30_000


def test_case_32_what_was_renamed_is_found_at_once(two: tuple[Sandbox, Sandbox], here: Path) -> None:
    (here / "a").write_bytes(b"x")
    (here / "d0").mkdir()
    (here / "d0" / "inside").write_bytes(b"y")
    for number in range(300):
        old, new = ("a", "b") if number % 2 == 0 else ("b", "a")
        os.rename(here / old, here / new)
        assert os.stat(here / new).st_size == 1
        assert not (here / old).exists()
        os.rename(here / f"d{number}", here / f"d{number + 1}")
        assert (here / f"d{number + 1}" / "inside").read_bytes() == b"y"
        if number % 100 == 50:
            two[0].drain()


def test_case_33_symlinks_of_package_managers(two: tuple[Sandbox, Sandbox], here: Path) -> None:
    package = here / "node_modules" / "x"
    package.mkdir(parents=True)
    (package / "y.js").write_text("#!/bin/sh\necho ran\n")
    os.chmod(package / "y.js", 0o755)
    binaries = here / "node_modules" / ".bin"
    binaries.mkdir()
    os.symlink("../x/y.js", binaries / "y")
    os.symlink("absent" * 100, binaries / "dangling")
    os.symlink("t" * 4095, binaries / "long")
    assert shell('"$1"', binaries / "y") == "ran"
    two[0].drain()
    other = there(two, binaries)
    wait_for(lambda: os.path.lexists(other / "long"), 30, "the links on the other mount")
    assert shell('"$1"', other / "y") == "ran"
    assert os.readlink(other / "long") == "t" * 4095
    assert os.lstat(other / "dangling").st_size == 600


def calls(top: Path) -> dict[str, Callable[[], object]]:
    """Calls that fail on a disk: on names, then on what is open or has attributes."""
    return {**calls_on_names(top), **calls_on_files(top)}


def calls_on_names(top: Path) -> dict[str, Callable[[], object]]:
    (top / "f").write_bytes(b"x")
    (top / "d" / "e").mkdir(parents=True)
    (top / "empty").mkdir()
    os.symlink("loop", top / "loop")
    os.symlink("nowhere", top / "dangling")
    os.mkfifo(top / "fifo")
    long = top / ("n" * 256)
    return {
        "stat absent": lambda: os.stat(top / "absent"),
        "open absent": lambda: os.open(top / "absent", os.O_RDONLY),
        "stat through file": lambda: os.stat(top / "f" / "x"),
        "create through file": lambda: os.open(top / "f" / "x", os.O_CREAT | os.O_WRONLY),
        "create in absent": lambda: os.open(top / "no" / "x", os.O_CREAT | os.O_WRONLY),
        "create exclusively": lambda: os.open(top / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        "create over dangling exclusively": lambda: os.open(top / "dangling", os.O_CREAT | os.O_EXCL),
        "mkdir over file": lambda: os.mkdir(top / "f"),
        "mkdir over dir": lambda: os.mkdir(top / "d"),
        "mkdir in absent": lambda: os.mkdir(top / "no" / "x"),
        "mkdir long": lambda: os.mkdir(long),
        "create long": lambda: os.open(long, os.O_CREAT | os.O_WRONLY),
        "stat long": lambda: os.stat(long),
        "symlink over file": lambda: os.symlink("x", top / "f"),
        "symlink empty": lambda: os.symlink("", top / "s"),
        "symlink long": lambda: os.symlink("x" * 5000, top / "s"),
        "readlink file": lambda: os.readlink(top / "f"),
        "open loop": lambda: os.open(top / "loop", os.O_RDONLY),
        "open link nofollow": lambda: os.open(top / "dangling", os.O_RDONLY | os.O_NOFOLLOW),
        "open dir for writing": lambda: os.open(top / "d", os.O_WRONLY),
        "open file as dir": lambda: os.open(top / "f", os.O_RDONLY | os.O_DIRECTORY),
        "open fifo to write nonblocking": lambda: os.open(top / "fifo", os.O_WRONLY | os.O_NONBLOCK),
        "list file": lambda: os.listdir(top / "f"),
        "rmdir full": lambda: os.rmdir(top / "d"),
        "rmdir file": lambda: os.rmdir(top / "f"),
        "rmdir absent": lambda: os.rmdir(top / "absent"),
        "rmdir dot": lambda: os.rmdir(f"{top}/empty/."),
        "rmdir dotdot": lambda: os.rmdir(f"{top}/empty/.."),
        "unlink dir": lambda: os.unlink(top / "d"),
        "unlink absent": lambda: os.unlink(top / "absent"),
        "link dir": lambda: os.link(top / "d", top / "hard"),
        "link over": lambda: os.link(top / "f", top / "dangling", follow_symlinks=False),
        "link absent": lambda: os.link(top / "absent", top / "hard"),
        "rename absent": lambda: os.rename(top / "absent", top / "x"),
        "rename file over dir": lambda: os.rename(top / "f", top / "empty"),
        "rename dir over file": lambda: os.rename(top / "empty", top / "f"),
        "rename dir over full dir": lambda: os.rename(top / "empty", top / "d"),
        "rename into itself": lambda: os.rename(top / "d", top / "d" / "e" / "x"),
        "rename to another filesystem": lambda: os.rename(top / "f", "/dev/shm/never"),
        "rename dot": lambda: os.rename(f"{top}/empty/.", top / "x"),
    }


def calls_on_files(top: Path) -> dict[str, Callable[[], object]]:
    """In the tree that `calls_on_names` made."""
    read = os.open(top / "f", os.O_RDONLY)
    write = os.open(top / "f", os.O_WRONLY)
    directory = os.open(top / "d", os.O_RDONLY)
    return {
        "write to a reader": lambda: os.write(read, b"x"),
        "read of a writer": lambda: os.read(write, 1),
        "read of a dir": lambda: os.read(directory, 1),
        "truncate a dir": lambda: os.truncate(top / "d", 0),
        "truncate a reader": lambda: os.ftruncate(read, 0),
        "truncate below zero": lambda: os.truncate(top / "f", -1),
        "seek below zero": lambda: os.lseek(read, -1, os.SEEK_SET),
        "map dir": lambda: mmap.mmap(directory, 4096, prot=mmap.PROT_READ),
        "map for writing a reader": lambda: mmap.mmap(read, 1, mmap.MAP_SHARED, mmap.PROT_WRITE),
        "xattr absent": lambda: os.getxattr(top / "f", "user.absent"),
        "xattr remove absent": lambda: os.removexattr(top / "f", "user.absent"),
        "xattr create over": lambda: (
            os.setxattr(top / "f", "user.a", b"1"),
            os.setxattr(top / "f", "user.a", b"2", os.XATTR_CREATE),
        ),
        "xattr replace absent": lambda: os.setxattr(top / "f", "user.b", b"2", os.XATTR_REPLACE),
        "xattr without a class": lambda: os.setxattr(top / "f", "plain", b"1"),
        "xattr without a name": lambda: os.setxattr(top / "f", "user.", b"1"),
        "xattr of an unknown class": lambda: os.getxattr(top / "f", "system.unknown"),
        "xattr of a link": lambda: os.setxattr(top / "dangling", "user.a", b"1", follow_symlinks=False),
        "xattr of a fifo": lambda: os.setxattr(top / "fifo", "user.a", b"1"),
        "chmod absent": lambda: os.chmod(top / "absent", 0o600),
        "utime absent": lambda: os.utime(top / "absent"),
        "mknod over": lambda: os.mknod(top / "f", stat.S_IFREG | 0o600),
        "statvfs absent": lambda: os.statvfs(top / "absent"),
        "chdir to file": lambda: os.chdir(top / "f"),
        "exec without a right": lambda: os.execv(top / "f", ["f"]),
    }


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "done"


def outcomes(top: Path) -> dict[str, str]:
    """Of all calls, made by a child: what it opened ends with it."""
    ours, childs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(childs, json.dumps({name: outcome(call) for name, call in calls(top).items()}).encode())
        finally:
            os._exit(0)
    os.close(childs)
    with open(ours, "rb") as told:
        found: dict[str, str] = json.loads(told.read())
    os.waitpid(pid, 0)
    return found


def test_case_34_errors_are_those_of_a_disk(here: Path, tmp_path: Path) -> None:
    disk, mounted = outcomes(tmp_path), outcomes(here)
    assert {name: (disk[name], mounted[name]) for name in disk if disk[name] != mounted[name]} == {}
    assert sum(told != "done" for told in disk.values()) == len(disk)


@pytest.mark.root
def test_case_34_permission_errors_of_another_user(here: Path, tmp_path: Path) -> None:
    """What nobody may do to root's files."""
    script = """
import errno, os, sys
os.chdir(sys.argv[1])
os.setgid(65534); os.setgroups([]); os.setuid(65534)
def told(call):
    try:
        call()
    except OSError as exc:
        return errno.errorcode[exc.errno]
    return "done"
for call in (
    lambda: open("secret"), lambda: open("public", "a"), lambda: os.unlink("public"),
    lambda: os.chmod("public", 0o777), lambda: os.chown("public", 65534, -1), lambda: os.mkdir("new"),
    lambda: os.rename("public", "x"), lambda: os.unlink("sticky/public"), lambda: os.listdir("closed"),
    lambda: os.stat("closed/x"), lambda: os.utime("public", (1, 1)), lambda: os.link("secret", "sticky/l"),
    lambda: os.setxattr("public", "user.a", b"1"), lambda: os.truncate("public", 0),
    lambda: os.execv("public", ["public"]), lambda: os.mknod("sticky/dev", 0o20600, 259),
    lambda: open("public").read(), lambda: open("sticky/mine", "x"), lambda: os.chmod("sticky/mine", 0o600),
):
    print(told(call))
"""
    answers = []
    for top in (tmp_path / "disk", here):
        top.mkdir(exist_ok=True)
        for parent in [top, *top.parents]:
            if parent.stat().st_mode & 0o001 == 0 and not parent.is_mount():
                os.chmod(parent, parent.stat().st_mode | 0o011)
        for name, mode in (("secret", 0o600), ("public", 0o644)):
            (top / name).write_bytes(b"x")
            os.chmod(top / name, mode)
        (top / "sticky").mkdir()
        os.chmod(top / "sticky", 0o1777)
        (top / "sticky" / "public").touch()
        (top / "closed").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", script, os.fspath(top)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.split())
    assert answers[0] == answers[1]
    assert answers[0][:2] == ["EACCES", "EACCES"]
    assert answers[0][-3:] == ["done", "done", "done"]


def test_case_35_shared_mappings_and_sqlite_wal_from_two_processes(
    two: tuple[Sandbox, Sandbox], here: Path
) -> None:
    """The -shm file of a WAL database is a shared mapping of both processes."""
    script = (
        "import mmap, sys\n"
        "f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0)\n"
        "at = int(sys.argv[2])\n"
        "for n in range(200):\n"
        "    m[at] = n % 250 + 1\n"
        "print(m[4096 - 1 - at])\n"
    )
    (here / "map").write_bytes(bytes(4096))
    for at in (0, 4095):
        shell('"$1" -c "$2" "$3" "$4"', sys.executable, script, here / "map", at)
    assert (here / "map").read_bytes()[::4095] == bytes([200, 200])
    shell('sqlite3 "$1/db" "pragma journal_mode=wal; create table t(n integer)"', here)
    writer = 'for i in $(seq 15); do sqlite3 -cmd ".timeout 20000" "$1/db" "insert into t values($i)"; done'
    procs = [subprocess.Popen(["bash", "-euc", writer, "-", os.fspath(here)]) for _ in range(2)]
    held = subprocess.Popen(["sqlite3", os.fspath(here / "db")], stdin=subprocess.PIPE, text=True)
    try:
        for process in procs:
            assert process.wait(60) == 0
        check = 'sqlite3 "$1/db" "select count(*) from t; pragma integrity_check; pragma journal_mode"'
        assert shell(check, here).split() == ["30", "ok", "wal"]
    finally:
        held.communicate("", timeout=60)
    two[0].drain()
    other = there(two, here)
    wait_for(lambda: (other / "db").exists(), 30, "the database on the other mount")
    copied = shutil.copytree(other, here.parent / "copied-db")
    assert shell(check, copied).split() == ["30", "ok", "wal"]


def test_statfs_tells_the_room_of_the_server(trusted: Server, two: tuple[Sandbox, Sandbox]) -> None:
    """`df` shows the disk under the server's objects, and follows it."""

    def sizes(path: Path) -> tuple[int, int]:
        """Bytes used and available, as `df` counts them."""
        told = os.statvfs(path)
        return (told.f_blocks - told.f_bfree) * told.f_frsize, told.f_bavail * told.f_frsize

    def alike(mount: Path) -> bool:
        both = zip(sizes(mount), sizes(trusted.data_dir), strict=True)
        return all(abs(here - there) < 64 << 20 for here, there in both)

    for box in two:
        wait_for(lambda at=box.mountpoint: alike(at), 30, "the mount to tell the server's disk")  # type: ignore[misc]
    told = os.statvfs(two[0].mountpoint)
    assert 0 < told.f_favail <= told.f_files
    assert shell('df -P "$1" | tail -1', two[0].mountpoint).endswith(f" {two[0].mountpoint}")
