"""Writing a new file past the page cache, for large bytes that are not read again soon.

A page of the cache costs more than the bytes in it: 8 MiB written and synced through it are 2.1 ms of CPU
where memory was used before, in a virtual machine that gives free memory back to its host six times that,
and 0.4 ms past it. And they drive out what is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from fsd.model.limits import DIRECT_BUFFER, DIRECT_BUFFERS, KIB

ALIGNED: Final = 4096  # no disk asks for more; one that does is written to through the cache
_IN_PLACE: Final = 64 * KIB  # so much at least is worth a write of its own


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
    for what is left of the last 4 KiB; durable only after an fsync. Raises `OSError`.

    What lies in its page of memory as it will in its page of the file (`place`) is written from there, all
    else through a buffer: a copy of 8 MiB takes 1 to 2 ms, in which no other thread runs Python."""
    out = _Out(fd)
    with _buffers.taken() as room:
        at = 0
        for view in _joined(pieces):
            while view:
                gap = -(out.at + at) % ALIGNED
                if len(view) >= gap + _IN_PLACE and place(view) == (out.at + at) % ALIGNED:
                    room[at : at + gap] = view[:gap]
                    out.write(room[: at + gap])
                    some = gap + (len(view) - gap) // ALIGNED * ALIGNED
                    out.write(view[gap:some])
                    at, view = 0, view[some:]
                    continue
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


def place(data: bytes | bytearray | memoryview) -> int | None:
    """Where in its page of memory `data` begins; None where it is not told: it is empty or read-only."""
    address = _address(data)
    return None if address is None else address % ALIGNED


def _address(data: bytes | bytearray | memoryview) -> int | None:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    except (TypeError, ValueError):
        return None


def _joined(pieces: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """`pieces` as views, those that lie one behind the other in the same memory as one."""
    last = memoryview(b"")
    for piece in pieces:
        view = memoryview(piece)
        start, end = _address(last), _address(view)
        if start is not None and start + len(last) == end and view.obj is last.obj:
            whole = memoryview(view.obj)
            base = _address(whole)
            if base is not None:
                last = whole[start - base : start - base + len(last) + len(view)]
                continue
        yield last
        last = view
    yield last


class _Out:
    """A file being written from its beginning on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.at = 0
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
                done = os.pwrite(self._fd, data, self.at)
            except OSError as exc:
                if exc.errno != errno.EINVAL or not self._direct:
                    raise
                self.through_cache()  # it wants other addresses or lengths than these
                continue
            self.at += done
            data = data[done:]
            if done % ALIGNED:
                self.through_cache()
