"""Operations that reach us past pyfuse3: they park, fail, end and are killed as all others, on both loops;
and without the extension that passes them on everything is as it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import mounttable
from support.parked import parked
from support.ranges import KEEP, fallocate
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]

TESTS = Path(__file__).parent.parent


class Mounted:
    """One mounted process, and a file in it that is open."""

    def __init__(self, directory: Path, loop: str, extension: str) -> None:
        self.place, self.log = directory / "m", directory / "log"
        self.place.mkdir()
        argv = [sys.executable, "-m", "support.furthermount", extension, str(self.place), loop, str(self.log)]
        self.process = subprocess.Popen(argv, cwd=TESTS, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.fd = os.open(self.place / "file", os.O_RDWR | os.O_CREAT)
        os.write(self.fd, b"x" * 100)

    def close(self) -> None:
        with suppress(OSError):  # its session may have ended
            os.close(self.fd)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        if f" {self.place} " in mounttable.mounts():
            subprocess.run(["fusermount3", "-uz", str(self.place)], check=True, timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(params=("mini", "trio"))
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path, request.param, "with")
    yield made
    made.close()


def failing(body: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        body()
    return caught.value.errno or 0


def test_parked_failing_and_answered(mounted: Mounted) -> None:
    """Twelve wait, others are answered meanwhile, a bug in a handler is EIO and no more; then all end."""
    told: list[object] = []

    def allocate(path: Path) -> None:
        with path.open("wb") as file:
            fallocate(file.fileno(), 0, 0, 10)
        told.append("done")

    threads = [threading.Thread(target=allocate, args=(mounted.place / f"f{n}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(parked(thread.native_id or 0) for thread in threads), 30, "all to park")
    assert os.lseek(mounted.fd, 5, os.SEEK_DATA) == 6
    assert failing(lambda: fallocate(mounted.fd, KEEP, 0, 10)) == errno.EIO
    assert failing(lambda: os.copy_file_range(mounted.fd, mounted.fd, 5, 0, 50)) == errno.EIO
    assert failing(lambda: os.lseek(mounted.fd, 95, os.SEEK_DATA)) == errno.EIO
    assert os.pread(mounted.fd, 3, 0) == b"xxx"
    assert not told
    Path(f"{mounted.log}.go").touch()
    for thread in threads:
        thread.join(30)
    assert told == ["done"] * 12
    assert "failed unexpectedly" in mounted.log.read_text()


def test_who_waits_can_be_killed(mounted: Mounted) -> None:
    script = (
        "import ctypes, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "ctypes.CDLL(None).fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(10))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script, str(mounted.place / "file")])
    wait_for(lambda: parked(caller.pid), 30, "the call to park")
    caller.kill()
    assert caller.wait(30) == -signal.SIGKILL
    assert os.lseek(mounted.fd, 1, os.SEEK_DATA) == 2


def test_an_open_that_was_done_and_fails_all_the_same_leaves_no_handle(mounted: Mounted) -> None:
    """The kernel releases none that it was not told of."""
    path = mounted.place / "file"
    path.chmod(0o4755)
    before = os.statvfs(mounted.place).f_bavail
    script = "import os, sys; os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)"
    caller = subprocess.Popen([sys.executable, "-c", script, str(path)])
    wait_for(lambda: os.statvfs(mounted.place).f_bavail == before + 1, 30, "the open to park")
    caller.kill()
    assert caller.wait(30) == -signal.SIGKILL
    wait_for(lambda: os.statvfs(mounted.place).f_bavail == before, 30, "the handle to go")


def test_a_session_that_ends_answers_who_waits(mounted: Mounted) -> None:
    told: list[int] = []
    waiting = threading.Thread(
        target=lambda: told.append(failing(lambda: fallocate(mounted.fd, 0, 0, 10))), daemon=True
    )
    waiting.start()
    wait_for(lambda: parked(waiting.native_id or 0), 30, "the call to park")
    mounted.process.send_signal(signal.SIGTERM)
    waiting.join(60)
    assert told in ([errno.EIO], [errno.ENOTCONN], [errno.ECONNABORTED])
    assert mounted.process.wait(60) == 0


def test_without_the_extension_the_kernel_does_without(tmp_path: Path) -> None:
    mounted = Mounted(tmp_path, "mini", "without")
    try:
        assert os.lseek(mounted.fd, 5, os.SEEK_DATA) == 5
        assert os.lseek(mounted.fd, 5, os.SEEK_HOLE) == 100
        assert failing(lambda: fallocate(mounted.fd, 0, 0, 10)) == errno.EOPNOTSUPP
        assert failing(lambda: os.open(mounted.place, os.O_TMPFILE | os.O_RDWR)) == errno.EOPNOTSUPP
        assert os.copy_file_range(mounted.fd, mounted.fd, 50, 0, 100) == 50
        assert os.pread(mounted.fd, 200, 0) == b"x" * 150
    finally:
        mounted.close()
