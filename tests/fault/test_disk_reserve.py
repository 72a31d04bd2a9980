"""The room that SQLite's disk keeps back: where it never fitted, was given up, comes back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fsd.meta.reserve import FILE, Reserve
from fsd.model.errors import NoSpace
from fsd.model.limits import DISK_RESERVE


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk is full: nothing can be allocated on it."""
    state = [False]
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if state[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    return state


def test_it_is_there_given_up_and_had_again(tmp_path: Path, full: list[bool]) -> None:
    made = Reserve(tmp_path)
    assert made.held and (tmp_path / FILE).stat().st_blocks * 512 >= DISK_RESERVE
    made.check()
    full[0] = True
    made.give_up()
    assert (tmp_path / FILE).stat().st_size == 0
    for one in (made, Reserve(tmp_path)):  # and so it is after a restart
        with pytest.raises(NoSpace, match="full"):
            one.check()
    full[0] = False
    made.check()
    assert made.held and Reserve(tmp_path).held


def test_where_it_never_fitted_writes_go_on_without(tmp_path: Path, full: list[bool]) -> None:
    full[0] = True
    made = Reserve(tmp_path)
    made.check()
    assert not made.held and not (tmp_path / FILE).exists()
    full[0] = False
    assert Reserve(tmp_path).held
