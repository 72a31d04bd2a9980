"""What a commit costs: CPU of this process an operation, by kind. `scripts/bench-commits` prints it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fsd.model.attrs import ROOT_INO
from support.bench import Bench, Mount

BATCH = 1000


def _fill(m: Mount, directory: int, count: int) -> list[int]:
    return [m.file(directory, b"f%d-%d" % (m.next_op, at), b"content %d" % at) for at in range(count)]


def _creates(m: Mount) -> None:
    _fill(m, ROOT_INO, BATCH // 2)


def _writes(m: Mount) -> None:
    inos = _fill(m, m.mkdir(ROOT_INO, b"w%d" % m.next_op), BATCH)
    m.commit()
    for at, ino in enumerate(inos):
        m.write(ino, b"other %d" % at, m.seq)


def _renames(m: Mount) -> None:
    source, target = m.mkdir(ROOT_INO, b"s%d" % m.next_op), m.mkdir(ROOT_INO, b"t%d" % m.next_op)
    inos = [m.file(source, b"%d" % at, b"x") for at in range(BATCH)]
    m.commit()
    for at, ino in enumerate(inos):
        m.rename(source, b"%d" % at, ino, target, b"%d" % at)


def _unlinks(m: Mount) -> None:
    directory = m.mkdir(ROOT_INO, b"u%d" % m.next_op)
    inos = [m.file(directory, b"%d" % at, b"content %d" % at) for at in range(BATCH)]
    m.commit()
    for at, ino in enumerate(inos):
        m.unlink(directory, b"%d" % at, ino, m.seq)


def _attributes(m: Mount) -> None:
    inos = _fill(m, m.mkdir(ROOT_INO, b"a%d" % m.next_op), BATCH)
    m.commit()
    for ino in inos:
        m.setattr(ino, mode=0o600)


KINDS: dict[str, Callable[[Mount], None]] = {
    "create + content": _creates,
    "content": _writes,
    "rename": _renames,
    "unlink": _unlinks,
    "setattr": _attributes,
}


def cost(bench: Bench, kind: str, rounds: int) -> float:
    """The best of `rounds`, in microseconds of CPU (all threads) an operation."""
    m, best = bench.mount(), float("inf")
    for _ in range(rounds):
        KINDS[kind](m)
        count = len(m.queue)
        start = time.process_time()
        told = m.commit()
        best = min(best, (time.process_time() - start) / count * 1e6)
        assert told == []
        assert count == BATCH
    return best


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory)) as bench:
        for kind in KINDS:
            print(f"{kind:20} {cost(bench, kind, 5):6.1f} us CPU an operation, batches of {BATCH}")


if __name__ == "__main__":
    main()
