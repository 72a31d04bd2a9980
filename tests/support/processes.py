"""Servers of others, started for a test session: free ports, an end with the parent, bounded starts."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: SIGKILL when the starting thread ends, so that a killed pytest leaves nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now, all different."""
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, timeout: float = 20) -> None:
    """Signal, wait, and SIGKILL after `timeout`."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def tail(path: Path, lines: int = 20) -> str:
    """The end of a log file, for messages."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def open_to_others() -> Path:
    """A temporary directory that another user can reach: pytest's own is closed to them."""
    for name in (os.environ.get("TMPDIR", "/tmp"), "/var/tmp", "/tmp"):
        path = Path(name).resolve()
        if all(one.stat().st_mode & 0o001 for one in (path, *path.parents)):
            return path
    raise AssertionError("no temporary directory is open to other users")
