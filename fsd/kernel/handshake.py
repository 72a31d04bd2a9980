"""Flags in the answer to the kernel's INIT that pyfuse3 3.5 has no word for.

With ACLs the kernel must leave the umask to us (`DONT_MASK`): a directory's default ACL takes its place, and
bits the kernel has taken off already cannot be known any more. pyfuse3 asks for ACLs and not for this. Some
that spare requests libfuse 3.14 does not know (`KILLPRIV`), or wants and then forgets to say (`PARALLEL`).

INIT is the first request of a connection, and the kernel sends no other before it is answered. So libfuse
reads its first request from a socket in the connection's place, the flags are set in its answer on the way,
and from then on the descriptor is the connection itself: nothing is in the way of later requests.

The rejected alternative for ACLs, mounting with MS_POSIXACL, sets the same flag in the kernel, but only
mount(2) knows it: neither fusermount3 nor the new mount API do, so neither mounts of users nor `beneath`
could have it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from fsd.kernel.mountpoint import DEVICE

log = logging.getLogger(__name__)

# The same bits in the request, where the kernel offers them, and in the answer.
DONT_MASK: Final = 1 << 6  # FUSE_DONT_MASK
PARALLEL: Final = 1 << 18  # FUSE_PARALLEL_DIROPS: lookups in a directory do not wait for each other
CACHE_SYMLINKS: Final = 1 << 23  # FUSE_CACHE_SYMLINKS: a target is asked for once; an inode's never changes
KILLPRIV: Final = 1 << 28  # FUSE_HANDLE_KILLPRIV_V2: see `requests`
_READ: Final = 128 * 1024  # the kernel wants room for a page of data at least
_ANSWERED: Final = struct.Struct("=IiQIIII")  # out header; major, minor, max_readahead, flags
_OFFERED: Final = struct.Struct("=IIQQIIIIIIII")  # in header; major, minor, max_readahead, flags


def connections() -> set[int]:
    """The descriptors of this process that are open FUSE devices."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == str(DEVICE):
                found.add(int(name))
        except FileNotFoundError:
            continue  # the one of this very listing
    return found


class Handshake:
    """Adds flags to what libfuse answers on the connection `fd`: `choose` gets those the kernel offers and
    returns which of them, when libfuse has answered and the kernel does not know yet, in a thread of its own.
    Made by the thread that mounts, between the mount and the first read."""

    def __init__(self, fd: int, choose: Callable[[int], int]) -> None:
        self._fd = fd
        self._choose = choose
        self._kernel = os.dup(fd)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._theirs = theirs
        os.dup2(theirs.fileno(), fd, inheritable=False)
        self._thread = threading.Thread(target=self._run, name="fsd-init", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The loop reads from the connection itself by now: something was answered."""
        self._ours.close()
        self._theirs.close()

    def _run(self) -> None:
        try:
            self._pass_init()
        except OSError as exc:
            log.error("the kernel's first request was not answered: %s", exc)
            self._ours.close()  # libfuse's session ends with that
        finally:
            os.close(self._kernel)

    def _pass_init(self) -> None:
        asked = os.read(self._kernel, _READ)
        self._ours.send(asked)
        answer = bytearray(self._ours.recv(_READ))
        # The loop has made the descriptor as it wants it, blocking or not: so is what takes its place.
        os.set_blocking(self._kernel, os.get_blocking(self._fd))
        os.dup2(self._kernel, self._fd, inheritable=False)
        if len(answer) >= _ANSWERED.size and _ANSWERED.unpack_from(answer)[1] == 0:
            offered = _OFFERED.unpack_from(asked)[-1]
            *head, flags = _ANSWERED.unpack_from(answer)
            _ANSWERED.pack_into(answer, 0, *head, flags | self._choose(offered) & offered)
        os.write(self._kernel, answer)
        # The loop may wait for the socket that was there before: wake it once there is something to read.
        poll = select.poll()
        poll.register(self._kernel, select.POLLIN)
        poll.poll()
        try:
            self._ours.send(b"\0")
        except OSError:
            if self._ours.fileno() >= 0:
                raise
            # `close` was quicker: the loop did not wait, it has answered already.
