"""Redirects looked up one by one are those of the whole maps, whatever a commit does; what it asks for."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fsd.model import ops
from fsd.model.ops import Content, Create, Link, Op, Rename, Setattr, Unlink
from fsd.service.redirects import NOTHING, MoveKey, Redirects
from fsd.service.view import NameKey

NUMBERS = range(12)
NAMES = [b"a", b"b"]


class Rows:
    """What is stored for a session, in dictionaries; `asked`: how many keys each query had."""

    def __init__(self) -> None:
        self.numbers_to: dict[int, int] = {}
        self.moved_to: dict[MoveKey, NameKey] = {}
        self.asked: list[tuple[str, int]] = []

    def targets(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        self.asked.append(("targets", len(numbers)))
        return [(one, self.numbers_to[one]) for one in numbers if one in self.numbers_to]

    def numbers(self, targets: Sequence[int]) -> list[tuple[int, int]]:
        self.asked.append(("numbers", len(targets)))
        return [(one, to) for one, to in self.numbers_to.items() if to in targets]

    def moves(self, keys: Sequence[MoveKey]) -> list[tuple[MoveKey, NameKey]]:
        self.asked.append(("moves", len(keys)))
        return [(key, self.moved_to[key]) for key in keys if key in self.moved_to]


class Whole:
    """The same by maps of everything, gone through at each change."""

    def __init__(self, rows: Rows) -> None:
        self.to, self.moved = dict(rows.numbers_to), dict(rows.moved_to)
        self.new_to: dict[int, int] = {}
        self.new_moved: dict[MoveKey, NameKey] = {}

    def redirect(self, number: int, to: int) -> None:
        for one in [number, *(old for old, target in self.to.items() if target == number)]:
            self.to[one] = self.new_to[one] = to

    def move(self, key: MoveKey, to: NameKey) -> None:
        self.moved[key] = self.new_moved[key] = to


def some_op(rng: random.Random) -> Op:
    ino, parent, other, over = (rng.choice(NUMBERS) for _ in range(4))
    name, new = rng.choice(NAMES), rng.choice(NAMES)
    some: list[Op] = [
        Create(1, ops.CREATE, parent, name, ino, rng.choice([0o100644, 0o040755]), 0, 0, 0, None, 1),
        Link(1, ops.LINK, ino, parent, name, 1),
        Unlink(1, ops.UNLINK, parent, name, ino, 0, 1),
        Rename(1, ops.RENAME, parent, name, ino, other, new, 0, over, 0, 1),
        Setattr(1, ops.SETATTR, ino, 0o644, None, None, None, None, 1),
        Content(1, ops.CONTENT, ino, 0, 0, (), True, None, 1, 1),
    ]
    return rng.choice(some)


def change(rng: random.Random, lazy: Redirects, whole: Whole) -> None:
    number, to = rng.sample(NUMBERS, 2)
    key = (rng.choice(NUMBERS), rng.choice(NAMES), rng.choice(NUMBERS))
    match rng.randrange(3):
        case 0:
            lazy.redirect(number, to)
            whole.redirect(number, to)
        case 1:
            lazy.not_made(number)
            whole.to[number] = whole.new_to[number] = NOTHING
        case _:
            lazy.move(key, (to, key[1]))
            whole.move(key, (to, key[1]))


def compare(rng: random.Random, lazy: Redirects, whole: Whole, share: float) -> None:
    """Some of what can be asked: so that some is asked for the first time after it changed."""
    for number in NUMBERS:
        if rng.random() < share:
            assert lazy.real(number) == whole.to.get(number, number)
            assert lazy.nothing(number) == (whole.to.get(number) == NOTHING)
        key = (number, rng.choice(NAMES), rng.choice(NUMBERS))
        if rng.random() < share:
            assert lazy.moved(key) == whole.moved.get(key)


def test_looked_up_one_by_one_they_are_those_of_the_whole_maps() -> None:
    mapped = 0
    for seed in range(100):
        rng, rows = random.Random(seed), Rows()
        for commit in range(12):
            stored = rows.numbers_to or rows.moved_to
            lazy, whole = Redirects(rows if stored else None), Whole(rows)
            if rng.random() < 0.7:
                lazy.prefetch([some_op(rng) for _ in range(rng.randrange(4))], every_name=rng.random() < 0.5)
            for _ in range(rng.randrange(6)):
                change(rng, lazy, whole)
                compare(rng, lazy, whole, 0.2)
            assert (lazy.new_numbers, lazy.new_moves) == (whole.new_to, whole.new_moved), (seed, commit)
            compare(rng, lazy, whole, 1.0)
            rows.numbers_to.update(lazy.new_numbers)
            rows.moved_to.update(lazy.new_moves)
            mapped += len(lazy.known)
    assert mapped > 3_000, "nothing was redirected"


def test_a_commit_asks_once_for_what_it_names() -> None:
    rows = Rows()
    rows.numbers_to = {number: number + 100_000 for number in range(1000, 6000)}
    rows.moved_to = {(1, b"n%d" % at, at): (1, b"m%d" % at) for at in range(5000)}
    lazy = Redirects(rows)
    lazy.prefetch(
        [
            Create(1, ops.CREATE, 1, b"new", 7, 0o100644, 0, 0, 0, None, 1),
            Content(2, ops.CONTENT, 7, 0, 0, (), True, None, 1, 1),
            Content(3, ops.CONTENT, 1000, 0, 0, (), True, None, 1, 1),
            Unlink(4, ops.UNLINK, 1, b"n5", 5, 0, 1),
        ]
    )
    assert rows.asked == [("targets", 4), ("numbers", 1), ("moves", 1)]
    assert (lazy.real(7), lazy.real(1000), lazy.real(1)) == (7, 101_000, 1)
    assert lazy.moved((1, b"n5", 5)) == (1, b"m5")
    lazy.redirect(101_000, 9)
    assert lazy.real(1000) == 9
    assert lazy.new_numbers == {1000: 9, 101_000: 9}
    assert len(rows.asked) == 3, "it was asked again for what was known"


def test_a_session_without_any_asks_for_nothing() -> None:
    lazy = Redirects()
    assert lazy.none
    lazy.redirect(5, 6)
    lazy.redirect(6, 7)
    assert not lazy.none
    assert lazy.known == {5: 7, 6: 7}
