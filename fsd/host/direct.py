"""Writing a new file past the page cache, for large bytes that are not read again soon.

A page of the cache costs more than the bytes in it: 8 MiB written and synced through it are 2.1 ms of CPU
where memory was used before, in a virtual machine that gives free memory back to its host six times that,
and 0.4 ms past it. And they drive out what is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from fsd.model.limits import DIRECT_BUFFER, DIRECT_BUFFERS

ALIGNED: Final = 4096  # no disk asks for more; one that does is written to through the cache


class _Buffers:
    """DIRECT_BUFFERS aligned buffers of DIRECT_BUFFER bytes, made when they are needed; who finds none free
    waits for one. Any thread."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._slots = threading.Semaphore(DIRECT_BUFFERS)

    @contextlib.contextmanager
    def taken(self) -> Iterator[memoryview]:
        with self._slots:
            # Not given back between two uses: its pages cost what is to be saved.
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = mmap.mmap(-1, DIRECT_BUFFER)
            try:
                with memoryview(buffer) as view:
                    yield view
            finally:
                self._free.append(buffer)


_buffers: Final = _Buffers()


def write_past_cache(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write `pieces` as the beginning of the file `fd`, past the page cache where the filesystem can and but
    for what is left of the last 4 KiB; durable only after an fsync. Raises `OSError`."""
    out = _Out(fd)
    with _buffers.taken() as room:
        at = 0
        for piece in pieces:
            view = memoryview(piece)
            while view:
                some = min(len(view), len(room) - at)
                room[at : at + some] = view[:some]
                view = view[some:]
                at += some
                if at == len(room):
                    out.write(room)
                    at = 0
        whole = at - at % ALIGNED
        out.write(room[:whole])
        out.through_cache()
        out.write(room[whole:at])


class _Out:
    """A file being written from its beginning on."""

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._direct = True
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            self._direct = False  # this filesystem has nothing of the kind

    def through_cache(self) -> None:
        """From now on."""
        if self._direct:
            self._direct = False
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def write(self, data: memoryview) -> None:
        while data:
            try:
                done = os.pwrite(self._fd, data, self._at)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._direct:
                    raise
                self.through_cache()  # it wants other addresses or lengths than these
                continue
            self._at += done
            data = data[done:]
            if done % ALIGNED:
                self.through_cache()
