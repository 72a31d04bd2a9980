"""What is begun ahead of a mount, where the system does not give it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, socket
from fsd.kernel import ahead

def refuse(*_):
    raise BlockingIOError(11, "no more of it")

FAILING
ahead.begin()
print([begun._sock.recv(1) for begun in ahead._begun])
"""
FAILING = {
    "socket": ("socket.socketpair = refuse", "[]"),
    "first process": ("os.fork = refuse", "[]"),
    # Told by its end, as that of one which was killed.
    "supervisor": ("os.fork = lambda real=os.fork: real() if os.getpid() == own else refuse()", "[b'']"),
}


@pytest.mark.parametrize("what", FAILING)
def test_what_cannot_be_begun_is_no_failure_and_no_words(what: str) -> None:
    failing, begun = FAILING[what]
    program = PROGRAM.replace("FAILING", f"own = os.getpid()\n{failing}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (begun + "\n", "")
