"""A file that another sandbox commits all the time is opened and read. What was asked about it in two
requests never agreed with a commit between them: who read a log over a slow way waited until its writer
paused."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.limits import MIB

COMMITS = 50  # whoever asks so often has not been served


class Hot:
    """A file that `writer` changes and commits once for each answer that `reader` gets, right behind it."""

    def __init__(self, directory: Path, bench: Bench, size: int) -> None:
        self.writer, self.reader = (self._mounted(directory, bench, name) for name in ("writer", "reader"))
        self.commits = 0
        root = self.writer.volume.root_ino
        _, self.fh = self.writer.call(lambda v: v.create(root, b"hot", 0o644, 0, 0, os.O_RDWR))
        ino = self.writer.volume.handle(self.fh).node.ino
        self.writer.call(lambda v: v.setattr(ino, size=size))
        self._commit()
        found = self.reader.call(lambda v: v.lookup(root, b"hot"))
        assert found is not None
        self.ino = found.ino
        asked, self.commits = self.reader.remote.ask, 0

        def ask(questions: Sequence[tuple[Any, ...]], timeout: float) -> tuple[int, list[Any]]:
            answer = asked(questions, timeout)
            if self.commits < COMMITS:
                self._commit()
            return answer

        self.reader.remote.ask = ask  # type: ignore[method-assign]

    @staticmethod
    def _mounted(directory: Path, bench: Bench, name: str) -> Client:
        made = Client(directory / name, bench, Clock(), random.Random(1), name)
        made.net.faulty = False
        made.options = replace(made.options, segment_size=64 * MIB)
        made.open()
        return made

    def _commit(self) -> None:
        self.commits += 1
        self.writer.call(lambda v: v.write(self.fh, 0, b"%08d" % self.commits))
        self.writer.call(lambda v: v.fsync(self.fh, False))


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[Callable[[int], Hot]]:
    with Bench(tmp_path / "server") as bench:
        yield lambda size: Hot(tmp_path, bench, size)


@pytest.mark.parametrize("size", [8 * MIB, 9 << 30], ids=["a page of blocks", "several"])
def test_a_file_that_is_committed_all_the_time_is_read(hot: Callable[[int], Hot], size: int) -> None:
    made = hot(size)
    fh = made.reader.call(lambda v: v.open(made.ino, os.O_RDONLY))
    first = made.reader.call(lambda v: v.read(fh, 0, 8))
    assert int(first) <= made.commits < 10
    # And again, on the same handle, with what was committed since.
    made.reader.feed()
    again = made.reader.call(lambda v: v.read(fh, 0, 8))
    assert int(first) < int(again) <= made.commits < 20


def test_a_file_of_more_pages_than_come_together(hot: Callable[[int], Hot]) -> None:
    """Those are of several moments, and asked for until they agree."""
    made = hot(40 << 30)
    fh = made.reader.call(lambda v: v.open(made.ino, os.O_RDONLY))
    assert made.commits == COMMITS
    assert int(made.reader.call(lambda v: v.read(fh, 0, 8))) == COMMITS


def test_a_file_with_changes_of_its_own_that_another_committed(hot: Callable[[int], Hot]) -> None:
    """Its attributes wait to be sent, and are older than its blocks: it was asked about without a pause until
    they were."""
    made = hot(8 * MIB)
    made.reader.volume.setattr(made.ino, mode=0o600)
    assert made.reader.volume.node(made.ino).busy
    made.commits = COMMITS  # no more than the next
    made._commit()
    before = made.reader.remote.calls.count("ask")
    fh = made.reader.call(lambda v: v.open(made.ino, os.O_RDONLY))
    assert int(made.reader.call(lambda v: v.read(fh, 0, 8))) == made.commits
    assert made.reader.remote.calls.count("ask") - before < 10
    assert made.reader.volume.node(made.ino).mode & 0o777 == 0o600
