"""The flags set in the answer to INIT, with sockets for the kernel's connection and a thread for libfuse."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from fsd.kernel.handshake import CACHE_SYMLINKS, DONT_MASK, KILLPRIV, PARALLEL, Handshake

ASKED = struct.Struct("=IIQQIIIIIIII")
ANSWER = struct.Struct("=IiQIIII")
ALL = DONT_MASK | PARALLEL | CACHE_SYMLINKS | KILLPRIV


@pytest.mark.parametrize("offered", [ALL, DONT_MASK, PARALLEL | KILLPRIV, 0])
@pytest.mark.parametrize("error", [0, -71])
def test_only_what_is_offered_and_chosen_is_added(offered: int, error: int) -> None:
    kernel, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: list[int] = []

    def choose(flags: int) -> int:
        told.append(flags)
        return PARALLEL | KILLPRIV

    handshake = Handshake(connection.fileno(), choose)
    handshake.start()
    kernel.send(ASKED.pack(64, 26, 2, 0, 0, 0, 0, 0, 7, 45, 4096, offered | 1))
    asked = os.read(connection.fileno(), 4096)  # as libfuse
    assert ASKED.unpack(asked)[-1] == offered | 1
    os.write(connection.fileno(), ANSWER.pack(32, error, 2, 7, 31, 4096, 1))
    answer = ANSWER.unpack(kernel.recv(4096))
    kept = 1 if error else 1 | offered & (PARALLEL | KILLPRIV)
    assert answer == (32, error, 2, 7, 31, 4096, kept)
    assert told == ([] if error else [offered | 1])
    # From then on the descriptor is the connection.
    kernel.send(b"next")
    handshake._thread.join(10)
    assert not handshake._thread.is_alive()
    assert os.read(connection.fileno(), 4096) == b"next"
    handshake.close()
    kernel.close()
    connection.close()
