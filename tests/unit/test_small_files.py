"""New small files are made together, and each as it would be made alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.inproc import NoCache

from fsd.host.seam import Host
from fsd.model.blocks import Part
from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOCK, KIB, SMALL_FILE
from fsd.vfs.build import TOGETHER, BlockTask, BuildJob, Made, Unit, build, grouped
from fsd.vfs.log import WRITE, Log
from fsd.wire.frame import open_blob


class Reads(Log):
    """Counts, and fails where it is told to."""

    count = 0
    bad = (-1, -1)

    def read(self, pos: int, length: int) -> bytes:
        self.count += 1
        if pos < self.bad[1] and self.bad[0] < pos + length:
            raise IntegrityError("unreadable")
        return super().read(pos, length)


@pytest.fixture
def log(tmp_path: Path) -> Reads:
    made = Reads(tmp_path, Host(), 1)
    made.rotate(b"state")
    return made


def alone(log: Log, *pieces: bytes, parts: tuple[Part, ...] = (), start: int = 0) -> tuple[BlockTask, ...]:
    """A file of one block, written in `pieces`."""
    runs = []
    for piece in pieces:
        runs.append((start, len(piece), log.append(WRITE, 5, start, [b"time", piece]) + 4))
        start += len(piece)
    return (BlockTask(0, parts, tuple(runs), start),)


def several(log: Log) -> list[Unit]:
    """Files of every kind."""
    kinds: list[tuple[BlockTask, ...]] = [alone(log, b"%d" % at * 900) for at in range(2 * TOGETHER)]
    kinds += [alone(log, os.urandom(3000)), alone(log, bytes(5000)), alone(log, b"x")]
    kinds += [alone(log, b"first" * 700, b"second" * 300, b"third"), ()]
    kinds += [alone(log, os.urandom(SMALL_FILE)), alone(log, os.urandom(SMALL_FILE + 1))]
    kinds += [alone(log, b"behind a hole", start=100)]
    late, early = alone(log, b"late" * 90)[0], alone(log, b"early" * 90)[0]
    kinds += [(late._replace(runs=((0, 450, early.runs[0][2]), (450, 360, late.runs[0][2])), length=810),)]
    kinds += [(early._replace(length=BLOCK),), (early, late._replace(block=1)), alone(log, b"end" * 500)]
    return list(enumerate(kinds))


def made(units: list[Unit], log: Log) -> list[Made]:
    remote: Any = None
    return BuildJob(tuple(units), log, BLOCK, {}).run(remote, NoCache())


def test_each_is_made_as_it_is_alone(log: Reads) -> None:
    units = several(log)
    assert max(map(len, grouped(units))) > 1
    for (key, tasks), (told, found) in zip(units, made(units, log), strict=True):
        assert told == key
        assert found == [build(task, log, lambda wanted: {})._replace(raw=()) for task in tasks]


def test_groups_are_all_units_in_order(log: Reads) -> None:
    units = several(log)
    assert [unit for group in grouped(units) for unit in group] == units


def test_files_that_lie_together_are_read_together(log: Reads) -> None:
    units = list(enumerate(alone(log, b"%d" % at * 500) for at in range(TOGETHER)))
    assert len(made(units, log)) == TOGETHER
    assert log.count == 1


def test_what_lies_far_apart_is_not_read_whole(log: Reads) -> None:
    first = alone(log, b"a" * 4000)
    log.append(WRITE, 6, 0, [bytes(4 * BLOCK)])
    found = made([(1, first), (2, alone(log, b"b" * 4000))], log)
    assert log.count == 2
    datas = [open_blob(built.blobs[0]) for _, some in found if isinstance(some, list) for built in some]
    assert datas == [b"a" * 4000, b"b" * 4000]


def test_one_that_cannot_be_read_fails_alone(log: Reads) -> None:
    units = list(enumerate(alone(log, b"%d" % at * 500) for at in range(9)))
    pos = units[4][1][0].runs[0][2]
    log.bad = pos, pos + 1
    for key, found in made(units, log):
        assert isinstance(found, IntegrityError) == (key == 4)


def test_a_group_holds_little(log: Reads) -> None:
    units = list(enumerate(alone(log, os.urandom(40 * KIB)) for _ in range(9)))
    for group in grouped(units):
        assert sum(tasks[0].length for _, tasks in group) <= 128 * KIB
