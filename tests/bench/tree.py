"""A mount of fsd for one figure, and a tree of empty files in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.peers import Fsd

PER_DIRECTORY = 1000


@contextmanager
def mounted(base: Path, **more: object) -> Iterator[Fsd]:
    """A server and a mount of its own; gone at the end."""
    peer = Fsd(base, **more)  # type: ignore[arg-type]
    try:
        peer.start()
        peer.mount()
        yield peer
    finally:
        peer.stop()
        shutil.rmtree(base, ignore_errors=True)


def make_files(root: Path, count: int) -> None:
    """Empty files, a thousand a directory."""
    for at in range(0, count, PER_DIRECTORY):
        directory = root / f"d{at // PER_DIRECTORY}"
        directory.mkdir()
        for number in range(min(PER_DIRECTORY, count - at)):
            os.mknod(f"{directory}/f{number}", 0o100644)
