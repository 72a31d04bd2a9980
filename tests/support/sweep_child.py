"""A service that is killed at a crash point in the middle of a sweep; run by `test_sweep_crash`.

    python -m support.sweep_child DIRECTORY POINT COUNT [DATABASE]

`prepare` fills a directory so that each kind of step has something to do; the child sweeps it two days later.
It prints `done` when the sweep ended before the point was passed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fsd.host.seam import Crasher, Host
from fsd.model.attrs import ROOT_INO
from fsd.service import pins
from fsd.service.access import FsRef
from fsd.wire.frame import make_blob
from support.sweeping import DAY, SweepBench, noise

SMALL = 70  # inline packs that are gathered


def prepare(directory: Path, database: str | None = None) -> tuple[FsRef, dict[str, bytes]]:
    """The filesystem and what must be in it afterwards."""
    wanted: dict[str, bytes] = {}
    with SweepBench(directory, database=database) as bench:
        m = bench.mount()
        gone = [m.file(ROOT_INO, b"gone%d" % number, noise(number, 90_000)) for number in range(3)]
        m.commit()
        sparse = [m.file(ROOT_INO, b"sparse%d" % number, noise(50 + number, 30_000)) for number in range(10)]
        m.commit()
        for number in range(SMALL):
            m.file(ROOT_INO, b"small%d" % number, noise(100 + number, 1500))
            m.commit()
            wanted[f"small{number}"] = noise(100 + number, 1500)
        bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "journal", "x", bench.host.wall_ns()))
        for number, ino in enumerate(gone):
            m.unlink(ROOT_INO, b"gone%d" % number, ino, m.seq)
        for number in range(7):
            m.unlink(ROOT_INO, b"sparse%d" % number, sparse[number], m.seq)
        m.commit()
        for number in (7, 8, 9):
            wanted[f"sparse{number}"] = noise(50 + number, 30_000)
        # Two days ago another rewriting left an object for its grace, and an upload crashed.
        for number, rows in ((900, True), (901, False)):
            bench.service.store.put(f"packs/{bench.fs.name}/{number:016x}", [b"x" * 1000])
            if rows:
                bench.service.db.write(
                    lambda tx, n=number: tx.execute(  # type: ignore[misc]
                        "INSERT INTO dropped (fs, pack, size, since) VALUES (?,?,1000,0)", (bench.fs.id, n)
                    )
                )
        bench.service.packs.store(bench.fs.id, bench.fs.name, [make_blob(noise(7, 500))])
        return bench.fs, wanted


def sweep(bench: SweepBench) -> dict[str, int]:
    """Two sweeps: what the unpinning of the first one frees has its time before the second."""
    bench.time.ahead = 2 * DAY
    first = bench.sweep(everything=True)
    bench.time.ahead = 4 * DAY
    second = bench.sweep(everything=True)
    return {name: first[name] + second[name] for name in first}


def main() -> None:
    directory, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    crasher = Crasher(point, 10**9)
    bench = SweepBench(directory, Host(crash_point=crasher), sys.argv[4] if len(sys.argv) > 4 else None)
    crasher.seen, crasher.count = 0, count
    sweep(bench)
    print("done", flush=True)


if __name__ == "__main__":
    main()
