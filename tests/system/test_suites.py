"""Others' test programs on a mount, as far as Debian has them: fio, stress-ng, bonnie++, dbench, postmark and
CPython's own tests.

They pass, or fail as they do in a local directory; their speeds are not looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server

pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(600)]

STRESSORS = """
access chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fcntl fiemap file-ioctl
filename flock fpunch fsize fstat getdent handle hdd inode-flags inotify io iomix lease link locka lockf
lockofd mknod mmap mmapfork mmapmany msync open readahead rename revio seek sendfile splice symlink
sync-file tee touch utime verity xattr aio
"""
PYTHON_TESTS = """
test_os test_posix test_shutil test_tempfile test_mmap test_fcntl test_zipfile test_tarfile test_pathlib
test_glob test_largefile test_io test_fileio test_mailbox test_dbm
"""
BONNIE = "bonnie++ -d . -s 64M -r 32 -n 1:4096:0:2 -z 1 -f -q"
PYTHON = "/usr/bin/python3.11"


@pytest.fixture(scope="module")
def box(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path_factory.mktemp("suites"), shared_server.create())
    try:
        made.mount()
        yield made
        made.unmount()
    finally:
        made.close()


def run(directory: Path, argv: list[str], timeout: float, stdin: str = "") -> tuple[int, str]:
    """Exit code and output of a program working in `directory`. One that hangs is told as exit -1."""
    env = {
        "PATH": os.environ["PATH"] + ":/usr/sbin",
        "HOME": "/",
        "TMPDIR": os.fspath(directory),
        "LANG": "C.UTF-8",
    }
    with subprocess.Popen(
        argv,
        cwd=directory,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            told, _ = process.communicate()
            return -1, f"not over after {timeout:g} s\n{told}"
    return process.returncode, told


@pytest.fixture
def here(box: Sandbox, request: pytest.FixtureRequest) -> Path:
    """A directory on the mount."""
    made = box.mountpoint / re.sub(r"\W", "-", request.node.name)
    made.mkdir()
    made.chmod(0o1777)
    return made


def passes(directory: Path, argv: list[str], timeout: float = 120, stdin: str = "") -> str:
    code, told = run(directory, argv, timeout, stdin)
    assert code == 0, f"{' '.join(argv)}: exit {code}\n{told[-3000:]}"
    return told


@pytest.mark.parametrize("stressor", STRESSORS.split())
def test_stress_ng(here: Path, tmp_path: Path, stressor: str) -> None:
    """Alone, two seconds, its results verified: as on a local directory."""
    argv = ["stress-ng", "--temp-path", ".", "--timeout", "2", "--verify", f"--{stressor}", "1"]
    code, told = run(here, argv, 60)
    if code != 0 or "skipping" in told:
        there, expected = run(tmp_path, argv, 60)
        assert code == there, f"{stressor}: exit {code}, on a local directory {there}\n{told[-3000:]}"
        # A FUSE filesystem is not asked for where its bytes lie, and inodes have no flags (docs/posix.md).
        if stressor not in ("fiemap", "verity", "inode-flags", "file-ioctl"):
            assert ("skipping" in told) == ("skipping" in expected), told[-3000:]


@pytest.mark.parametrize(
    "options",
    [
        "--rw=randrw --size=32m --ioengine=psync --fsync=64 --numjobs=2",
        "--rw=randwrite --size=16m --ioengine=mmap",
        "--rw=randwrite --size=16m --ioengine=libaio --iodepth=8 --direct=1",
        "--rw=randwrite --size=16m --ioengine=psync --sync=1 --bs=64k",
    ],
)
def test_fio_verifies(here: Path, options: str) -> None:
    common = "--name=v --bs=4k --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting --runtime=40"
    passes(here, ["fio", *common.split(), "--directory=.", *options.split()])


def test_bonnie(here: Path) -> None:
    user = ["-u", "root"] if os.geteuid() == 0 else []
    passes(here, [*BONNIE.split(), *user], 300)


def test_dbench(here: Path) -> None:
    told = passes(here, ["dbench", "-t", "12", "-D", ".", "-c", "/usr/share/dbench/client.txt", "2"])
    assert "Throughput" in told
    assert not re.search(r"^\[\d+\] ", told, re.MULTILINE), told  # an operation, by its line in the load


def test_postmark(here: Path) -> None:
    script = f"set location {here}\nset number 500\nset transactions 1000\nrun\nquit\n"
    told = passes(here, ["postmark"], 300, script)
    assert "transactions" in told, told
    assert "Error" not in told, told


def failed(directory: Path, name: str) -> tuple[int, set[str]]:
    """Exit code and which test methods failed."""
    code, told = run(directory, [PYTHON, "-m", "test", "--tempdir", os.fspath(directory), "-v", name], 240)
    assert code != -1, told[-3000:]
    assert "No module named" not in told, told
    return code, set(re.findall(r"^(?:FAIL|ERROR): (\S+ \(\S+\))", told, re.MULTILINE))


@pytest.mark.parametrize("name", PYTHON_TESTS.split())
def test_cpython(here: Path, tmp_path: Path, name: str) -> None:
    """CPython's own tests: what fails here fails on a local directory."""
    code, found = failed(here, name)
    if code != 0:
        there, expected = failed(tmp_path, name)
        assert (code, found) == (there, expected)
