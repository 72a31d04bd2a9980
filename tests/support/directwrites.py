"""Run as a program: asynchronous writes with O_DIRECT (io_submit) to a file that threads read through pages.

`directwrites.py FILE SECONDS PIECES SIZE [sync]`: again and again PIECES writes of SIZE bytes each at once
(with `sync` each is committed); when all are done the file is read and must hold what was written. Prints
rounds and how many of them read old bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time

_IO_SETUP, _IO_GETEVENTS, _IO_SUBMIT = 206, 208, 209  # x86-64
_PWRITE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Control(ctypes.Structure):
    """struct iocb of linux/aio_abi.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_fd", ctypes.c_uint32),
    )


class Event(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


def _call(number: int, *args: object) -> int:
    done: int = _libc.syscall(ctypes.c_long(number), *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), "an asynchronous write was not taken")
    return done


def main(path: str, seconds: float, pieces: int, size: int, sync: bool) -> tuple[int, int]:
    """(rounds, rounds after which old bytes were read)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | (os.O_DSYNC if sync else 0)
    writing = os.open(path, flags, 0o644)
    os.truncate(path, pieces * size)
    reading = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(-1, pieces * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    context = ctypes.c_ulong(0)
    _call(_IO_SETUP, ctypes.c_long(pieces), ctypes.byref(context))
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            os.pread(reading, pieces * size, 0)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    rounds = old = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wanted = bytes([rounds % 250 + 1]) * (pieces * size)
        memory[:] = wanted
        controls = [
            Control(opcode=_PWRITE, fd=writing, buffer=start + at, length=size, offset=at)
            for at in range(0, pieces * size, size)
        ]
        pointers = (ctypes.POINTER(Control) * pieces)(*[ctypes.pointer(one) for one in controls])
        assert _call(_IO_SUBMIT, context, ctypes.c_long(pieces), pointers) == pieces
        events, left = (Event * pieces)(), pieces
        while left:
            got = _call(_IO_GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(left), events, None)
            assert all(events[at].result == size for at in range(got)), "a short write"
            left -= got
        old += os.pread(reading, pieces * size, 0) != wanted
        rounds += 1
    over.set()
    for reader in readers:
        reader.join()
    return rounds, old


if __name__ == "__main__":
    print(*main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), len(sys.argv) > 5))
