"""CPU of the daemon an operation: what a FUSE filesystem costs where nothing else is in the way.

Each kind runs alone on settled files, many times. The kernel's caches are kept out by names it has not seen.
What the background owes later (the flush) is measured apart, while it is settled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import proc
from bench.peers import Peer

COUNT = 3000
CONTENT = b"x" * 4096


def measure(peer: Peer, directory: Path, count: int = COUNT) -> Iterator[tuple[str, float]]:
    """Figures in microseconds an operation: CPU of the daemon, and the time that passed."""
    base = os.fspath(directory)
    new = [f"{base}/f{at}" for at in range(count)]
    moved = [f"{base}/g{at}" for at in range(count)]

    def lookup() -> None:
        for at in range(count):
            try:
                os.stat(f"{base}/absent{at}")
            except FileNotFoundError:
                continue

    def create() -> None:
        for name in new:
            descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.write(descriptor, CONTENT)
            os.close(descriptor)

    def open_close() -> None:
        for name in new:
            os.close(os.open(name, os.O_RDONLY))

    def rename() -> None:
        for old, name in zip(new, moved, strict=True):
            os.rename(old, name)

    def unlink() -> None:
        for name in moved:
            os.unlink(name)

    kinds: list[tuple[str, Callable[[], None]]] = [
        ("lookup", lookup),
        ("create+write+close", create),
        ("open+close", open_close),
        ("rename", rename),
        ("unlink", unlink),
    ]
    for kind, call in kinds:
        server = proc.cpu(peer.servers())
        used, took = _cost(peer, call)
        yield f"{kind}, us CPU", used / count * 1e6
        yield f"{kind}, us", took / count * 1e6
        if kind != "create+write+close" or not peer.servers():
            peer.settle()
            continue
        used, _ = _cost(peer, peer.settle)
        yield "flush of a created file, us CPU", used / count * 1e6
        yield "flush of a created file, server, us CPU", (proc.cpu(peer.servers()) - server) / count * 1e6


def _cost(peer: Peer, call: Callable[[], None]) -> tuple[float, float]:
    used, start = proc.cpu(peer.daemons()), time.perf_counter()
    call()
    return proc.cpu(peer.daemons()) - used, time.perf_counter() - start
