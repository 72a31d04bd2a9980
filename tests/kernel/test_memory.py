"""What the daemon may take of a sandbox's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.sandbox import sandbox
from support.server import TestFs

MIB = 1 << 20


def peak(pid: int) -> float:
    """MiB of the largest RSS so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.kernel
@pytest.mark.parametrize("size", [64, pytest.param(512, marks=pytest.mark.long)])
def test_large_files_pass_through(
    size: int, tmp_path_factory: pytest.TempPathFactory, shared_fs: TestFs
) -> None:
    """Written, and read after a remount: what calls that waited had made is let go at once."""
    with sandbox(tmp_path_factory.mktemp("b"), shared_fs, supervised=True) as box:
        path = box.mountpoint / "large"
        block = os.urandom(MIB)
        with path.open("wb", buffering=0) as file:
            for at in range(size):
                file.write(block[at:] + block[:at])
            os.fsync(file.fileno())
        written = peak(box.daemon)
        box.unmount()
        box.mount()
        with path.open("rb", buffering=0) as file:
            for at in range(size):
                assert file.read(MIB) == block[at:] + block[:at]
        # Some 55 MiB are its own.
        peaks = written, peak(box.daemon)
        print(f"MiB: {peaks}, the supervisor {peak(box.pids[0])}")
        assert max(peaks) < 100, peaks
        assert peak(box.pids[0]) < 15, "the supervisor"
        box.unmount()


@pytest.mark.kernel
def test_the_supervisor_keeps_nothing_of_the_daemon(
    tmp_path_factory: pytest.TempPathFactory, shared_fs: TestFs
) -> None:
    """It lives as long as the mount, and what it loaded before it forked stays; each start pays for that."""
    with sandbox(tmp_path_factory.mktemp("b"), shared_fs, supervised=True) as box:
        supervisor, daemon = (Path(f"/proc/{pid}/maps").read_text() for pid in box.pids)
        for library in ("libcrypto", "libfuse3", "_cmsgpack"):
            assert library in daemon, library
            assert library not in supervisor, library
        assert "libssl" not in daemon, "its endpoint is plain http"
