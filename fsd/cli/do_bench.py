"""`fsd bench`: a short measurement of one directory, mounted or not, to be set beside that of another one."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli.context import Context
from fsd.cli.output import Document, align
from fsd.model.errors import InternalError, NotFound
from fsd.model.limits import KIB, MIB

SMALL: Final = 4 * KIB
FSYNCS: Final = 20


def bench(context: Context, args: SimpleNamespace) -> Document:
    """Small files, fsyncs and one large file in a directory of its own below the given one, removed at the
    end. Changes nothing else."""
    where = os.path.abspath(args.path)
    figures: dict[str, dict[str, Any]] = {}
    if not os.path.isdir(where):
        raise NotFound(f"no such directory: {where}", hint="give one of a mount or of a local disk")
    work = tempfile.mkdtemp(prefix=".fsd-bench-", dir=where)
    try:
        for name, unit, value in (
            *_small_files(work, args.files),
            *_fsyncs(work),
            *_large_file(os.path.join(work, "large"), args.size),
        ):
            figures[name] = {"value": float(f"{value:.4g}"), "unit": unit}
    finally:
        shutil.rmtree(work)
    document = {"path": where, "files": args.files, "bytes": args.size, "figures": figures}
    return Document(document, text=_text)


def _text(value: Any) -> str:
    rows = [[name, f"{one['value']:g}", one["unit"]] for name, one in value["figures"].items()]
    return f"{value['path']}\n" + align(rows)


def _each(count: int, call: Callable[[int], object]) -> float:
    """Microseconds a call, of `count` calls."""
    start = time.perf_counter()
    for at in range(count):
        call(at)
    return (time.perf_counter() - start) / count * 1e6


def _small_files(work: str, count: int) -> list[tuple[str, str, float]]:
    data = os.urandom(SMALL)

    def create(at: int) -> None:
        descriptor = os.open(f"{work}/{at}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def absent(at: int) -> None:
        if os.path.exists(f"{work}/absent-{at}"):
            raise InternalError("a name that was never made exists")

    def read(at: int) -> None:
        with open(f"{work}/{at}", "rb", buffering=0) as file:
            if file.read(SMALL) != data:
                raise InternalError("other bytes were read than were written")

    return [
        ("create, write 4 KiB, close", "us", _each(count, create)),
        ("look up an absent name", "us", _each(count, absent)),
        ("stat", "us", _each(count, lambda at: os.stat(f"{work}/{at}"))),
        ("open, read, close", "us", _each(count, read)),
        ("rename", "us", _each(count, lambda at: os.rename(f"{work}/{at}", f"{work}/r{at}"))),
        ("unlink", "us", _each(count, lambda at: os.unlink(f"{work}/r{at}"))),
    ]


def _fsyncs(work: str) -> list[tuple[str, str, float]]:
    took = []
    for at in range(FSYNCS):
        descriptor = os.open(f"{work}/s{at}", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, b"x" * SMALL)
            start = time.perf_counter()
            os.fsync(descriptor)
            took.append((time.perf_counter() - start) * 1e3)
        finally:
            os.close(descriptor)
    return [
        ("fsync of a small file, median", "ms", statistics.median(took)),
        ("the slowest", "ms", max(took)),
    ]


def _large_file(path: str, size: int) -> list[tuple[str, str, float]]:
    block = os.urandom(MIB)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        start = time.perf_counter()
        for at in range(0, size, MIB):
            os.write(descriptor, block[: min(MIB, size - at)])
        os.fsync(descriptor)
        wrote = time.perf_counter() - start
        os.lseek(descriptor, 0, os.SEEK_SET)
        start = time.perf_counter()
        while os.read(descriptor, MIB):
            pass
        read = time.perf_counter() - start
    finally:
        os.close(descriptor)
    return [
        ("write + fsync, one large file", "MiB/s", size / MIB / wrote),
        ("read it again", "MiB/s", size / MIB / read),
    ]
