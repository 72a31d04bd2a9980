"""The exit codes of a command that could not be started are a shell's."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from fsd.client.command import CANNOT_EXECUTE, NOT_FOUND, not_started, wait


@pytest.mark.parametrize(
    ("name", "number", "code", "reason"),
    [
        ("absent", errno.ENOENT, NOT_FOUND, "No such file or directory"),
        # What the system says where one directory of PATH cannot be entered, or is no directory.
        ("absent", errno.EACCES, NOT_FOUND, "not found"),
        ("absent", errno.ENOTDIR, NOT_FOUND, "not found"),
        ("directory", errno.EACCES, NOT_FOUND, "not found"),
        ("here", errno.EACCES, CANNOT_EXECUTE, "Permission denied"),
        ("here", errno.ENOEXEC, CANNOT_EXECUTE, "Exec format error"),
        ("./absent", errno.ENOENT, NOT_FOUND, "No such file or directory"),
        ("./here", errno.EACCES, CANNOT_EXECUTE, "Permission denied"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_not_started(tmp_path: Path, name: str, number: int, code: int, reason: str, relative: bool) -> None:
    (tmp_path / "bin" / "directory").mkdir(parents=True)
    (tmp_path / "bin" / "here").touch()
    env = {"PATH": f"/no/such:{'bin' if relative else tmp_path / 'bin'}"}
    error = OSError(number, os.strerror(number))
    assert not_started(error, name, env, tmp_path) == (code, reason)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_wait(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    def lacking(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if old_kernel:
        monkeypatch.setattr(os, "pidfd_open", lacking)
    with subprocess.Popen(["sh", "-c", "read x; exit 3"], stdin=subprocess.PIPE) as child:
        assert wait(child, 0.01) is None
        assert child.stdin is not None
        child.stdin.close()
        assert wait(child, 30) == 3
        assert wait(child, 30) == 3, "also after it was reaped"
