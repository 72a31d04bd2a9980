"""A service whose clock a test moves, for tests of the sweep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsd.host.seam import Host
from fsd.service.sweep import FIGURES, Terms
from support.bench import Bench

DAY = 24 * 3600.0


class Time:
    """The wall clock, `ahead` seconds ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> int:
        return Host().wall_ns() + int(self.ahead * 1e9)


class SweepBench(Bench):
    """A bench with a clock. `sweep` is a person's sweep from beginning to end."""

    def __init__(self, directory: Path, host: Host | None = None, database: str | None = None) -> None:
        self.time = Time()
        self.database = database
        super().__init__(directory, replace(host or Host(), wall_ns=self.time), database)

    def sweep(
        self,
        older: float = DAY,
        *,
        everything: bool = False,
        dry: bool = False,
        vacuum: bool = False,
    ) -> dict[str, int]:
        """What it did; of all filesystems with `everything`."""
        total = dict.fromkeys(FIGURES, 0)
        cursor = ""
        while True:
            only = None if everything else self.fs.name
            did = self.service.sweep.call(only, Terms(older, dry), cursor, vacuum=vacuum)
            for name in FIGURES:
                total[name] += did[name]
            if did["next_cursor"] is None:
                return total
            cursor = did["next_cursor"]

    def objects(self) -> dict[str, int]:
        return {found.key: found.size for found in self.service.store.list("packs/")}

    def rows(self, table: str, where: str = "") -> int:
        """Rows of the filesystem in `table`."""
        row = self.service.db.read(
            lambda tx: tx.one(f"SELECT count(*) FROM {table} WHERE fs=? {where}", (self.fs.id,))
        )
        assert row is not None
        return int(row[0])


def noise(number: int, size: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(number).randbytes(size)


def same(found: dict[str, object], wanted: dict[str, bytes] | Sequence[tuple[str, bytes]]) -> None:
    """The tree holds these files and nothing else."""
    wanted = dict(wanted)
    assert sorted(found) == sorted(wanted)
    different = [path for path in found if found[path] != wanted[path]]
    assert not different, f"other content: {different}"
