"""Which checkpoints a rule keeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from fsd.model.errors import UsageError
from fsd.service.thinning import Point, doomed, read_keep

START = datetime(2026, 1, 1, tzinfo=UTC)


def points(*hours: float) -> list[Point]:
    return [Point(f"{hour:g}", int((START + timedelta(hours=hour)).timestamp()) * 10**9) for hour in hours]


def kept(rule: str, some: list[Point]) -> list[str]:
    gone = doomed(some, read_keep(rule))
    assert gone == [point.name for point in some if point.name in gone], "oldest first"
    return [point.name for point in some if point.name not in gone]


def test_the_newest_so_many() -> None:
    some = points(1, 2, 3, 4)
    assert kept("2", some) == ["3", "4"]
    assert kept("last=9", some) == ["1", "2", "3", "4"]
    assert kept("1", []) == []


def test_the_newest_of_each_of_the_newest_periods_that_have_one() -> None:
    assert kept("hourly=2", points(0.1, 0.5, 1.2, 9.1, 9.9)) == ["1.2", "9.9"]
    assert kept("daily=2", points(1, 23, 25, 47, 24 * 30)) == ["47", "720"]
    assert kept("weekly=2", points(0, 24 * 3.9, 24 * 4.1, 24 * 5)) == ["93.6", "120"]
    assert kept("monthly=1,yearly=2", points(0, 24 * 40, 24 * 400)) == ["960", "9600"]


def test_a_clock_that_was_set_back_does_not_make_the_newest_old() -> None:
    some = points(10, 11, 10.5, 10.75)  # as they were made
    assert kept("1", some) == ["10.75"]
    assert kept("hourly=1", some) == ["10.75"]
    assert kept("hourly=2", some) == ["11", "10.75"]
    assert kept("last=2", points(24 * 365, 1, 2, 3)) == ["2", "3"], "nor one that was ahead keep one for ever"


def test_rules_add_up() -> None:
    some = points(*range(0, 72, 6))
    assert kept("last=2,daily=3", some) == ["18", "42", "60", "66"]


@pytest.mark.parametrize(
    "text", ["", "0", "last=0", "daily", "daily=-1", "daily=1,daily=2", "x=1", "1,2", "daily=1.5"]
)
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError):
        read_keep(text)
