"""Asking a daemon that says nothing: a bounded wait, and what is the matter with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import die_with_parent
from support.wait import wait_for

from fsd.kernel import control_client
from fsd.model.errors import Unavailable

LISTENS = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1] + ".new")
sock.listen()
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A socket and the process behind it, which listens and never answers."""
    path = tmp_path / "s"
    process = subprocess.Popen([sys.executable, "-c", LISTENS, str(path)], preexec_fn=die_with_parent)
    try:
        wait_for(path.exists, 30, "the socket")
        yield path, process.pid
    finally:
        process.kill()
        process.wait(60)


def test_a_silent_daemon_is_waited_for_no_longer_than_was_asked(
    silent: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two bounds, the silence that is allowed and the time a command gave, the first that is over."""
    path, pid = silent
    monkeypatch.setattr(control_client, "LATE", 0.25)
    with pytest.raises(Unavailable, match=r"'drain' within 0.5 s") as told:
        control_client.request(path, "drain", {"timeout": 0.25}, timeout=600)
    assert f"kill -USR1 {pid}" in told.value.hint
    with pytest.raises(Unavailable, match=r"'drain' within 0.1 s"):
        control_client.request(path, "drain", {"timeout": 600}, timeout=0.1)
    with pytest.raises(Unavailable, match=r"'drain' within 0.1 s"):
        control_client.request(path, "drain", {"timeout": None}, timeout=0.1)


def test_a_stopped_daemon_is_told_as_such(silent: tuple[Path, int]) -> None:
    path, pid = silent
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: b") T " in Path(f"/proc/{pid}/stat").read_bytes(), 30, "the stop")
    with pytest.raises(Unavailable, match=f"the process {pid} is stopped") as told:
        control_client.request(path, "status", timeout=0.1)
    assert f"kill -CONT {pid}" in told.value.hint


PAUSED = """
import sys
import time
from pathlib import Path
from fsd.kernel.control_client import request
print(request(Path(sys.argv[1]), "drain", timeout=float(sys.argv[2])))
"""


@pytest.mark.long
def test_a_command_in_a_paused_sandbox_goes_on_after_it(tmp_path: Path) -> None:
    """Command and daemon stood still for longer than a silence may be; the answer comes right after."""
    limit = 20.0
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        argv = [sys.executable, "-c", PAUSED, str(path), str(limit)]
        command = subprocess.Popen(argv, stdout=subprocess.PIPE, preexec_fn=die_with_parent)
        try:
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(1000).endswith(b"\n")
                os.kill(command.pid, signal.SIGSTOP)
                paused = time.monotonic()
                wait_for(lambda: time.monotonic() - paused > limit + 1, limit + 60, "the pause", every=0.5)
                os.kill(command.pid, signal.SIGCONT)
                peer.sendall(b'{"progress": {"text": "x"}}\n{"progress"')
                peer.sendall(b': {"text": "y"}}\n{"ok": {"status": "drained"}}\n')
                out, _ = command.communicate(timeout=60)
        finally:
            command.kill()
            command.wait(60)
    assert (command.returncode, out) == (0, b"{'status': 'drained'}\n")
