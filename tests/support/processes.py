"""Servers of others, started for a test session: free ports, an end with the parent, bounded starts."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: SIGKILL when the starting thread ends, so that a killed pytest leaves nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_held: dict[int, socket.socket] = {}  # ports of this process's tests


def free_ports(count: int) -> list[int]:
    """Loopback ports, all different, that no other program gets until `give_back`: they are bound here, and
    who sets SO_REUSEADDR may listen there, again and again. While nobody does, connections are refused."""
    ports = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        _held[port] = sock
        ports.append(port)
    return ports


def give_back(port: int) -> None:
    """Others may have the port; one that was not taken from here is left alone."""
    if port in _held:
        _held.pop(port).close()


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, timeout: float = 20) -> None:
    """Signal, wait, and SIGKILL after `timeout`."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def tail(path: Path, lines: int = 20) -> str:
    """The end of a log file, for messages."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def server_directory(what: str, *, open_to_others: bool = False) -> Path:
    """A new directory for a server's data; those of dead runs are removed. The caller removes it.

    In memory where there is a gigabyte of it: the servers' own syncs are none of our tests' concern, and
    removing a cluster of five thousand files takes seconds on a disk.
    """
    for base in (
        Path("/dev/shm"),
        Path(os.environ.get("TMPDIR", "/tmp")).resolve(),
        Path("/var/tmp"),
        Path("/tmp"),
    ):
        if not base.is_dir() or not os.access(base, os.W_OK):
            continue
        space = os.statvfs(base)
        if base.name == "shm" and space.f_bavail * space.f_frsize < 1 << 30:
            continue
        if open_to_others and not all(one.stat().st_mode & 0o001 for one in (base, *base.parents)):
            continue  # scripts/test makes a directory that only its user can enter
        for old in base.glob(f"fsd-test-{what}.*.*"):
            if not Path("/proc", old.name.split(".")[1]).exists():
                shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"fsd-test-{what}.{os.getpid()}.", dir=base))
    raise AssertionError("no temporary directory is open to other users")
