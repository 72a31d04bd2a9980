"""The rules of POSIX and ext4, one by one, on the mount and on a local directory in the same run.

The tables are `support.posixrules` and `support.handlerules`: each call that takes a path in each situation
that makes one fail, kinds against kinds, owners against modes, flags and times; by root and by other users. A
short run plays some of them (others when the seed is another); `--all` plays all, and looks at which times
moved.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from support import handlerules, posixrules
from support.differential import LOOKS, differences, identities, tree, until_the_clock_moves
from support.fileops import Actor, Identity
from support.posixrules import ROOT, Rule, path_calls, situations
from support.sandbox import Sandbox
from support.server import Server, TestFs

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]
SAMPLE = 20  # rules of each group in a short run


@lru_cache(maxsize=1)
def groups() -> dict[str, list[Rule]]:
    alone = len(identities()) == 1
    return {
        name: [rule for rule in rules if not (alone and rule.of_others)]
        for name, rules in handlerules.groups().items()
    }


class Ground:
    """Two directories, and everybody in both. Close it always."""

    def __init__(self, local: Path, mounted: Path, people: Sequence[Identity | None]) -> None:
        self.tops = (local, mounted)
        self.people = people
        self.played = 0
        self.sides: tuple[list[Actor], ...] = ([], [])
        for top in self.tops:
            top.mkdir(exist_ok=True)
            for directory in (top.parent, top):
                directory.chmod(0o755)
        for side, top in zip(self.sides, self.tops, strict=True):
            side.extend(Actor(top, who) for who in people)

    def play(self, rule: Rule, timed: bool) -> str | None:
        """What differs; None if nothing does. `timed`: also which times moved."""
        self.played += 1
        own = f"{self.played:05d}"
        for top, side in zip(self.tops, self.sides, strict=True):
            for directory in (top / own, top / own / "in"):
                directory.mkdir()
                directory.chmod(0o1777)
            for actor in side:
                actor.do(("reset",))
                assert actor.do(("enter", f"{own}/in".encode()))[0] is None
        for number, (who, op) in enumerate(rule.steps):
            if timed and op[0] not in LOOKS:
                until_the_clock_moves()
            wanted, got = (side[who].do(op) for side in self.sides)
            if wanted != got if timed else wanted[0] != got[0]:
                told = f"step {number}, {self.people[who]}: {op}"[:400]
                before = rule.steps[:number]
                return f"{rule.name}\n  {told}\n  there: {wanted}\n  here:  {got}\n  behind {before}"
        return None

    def play_all(self, rules: Sequence[Rule], timed: bool = False) -> None:
        found = [told for rule in rules if (told := self.play(rule, timed))]
        assert not found, f"{len(found)} of {len(rules)} rules differ\n" + "\n".join(found[:20])

    def close(self) -> None:
        for side in self.sides:
            for actor in side:
                actor.close()


class Stage:
    """A filesystem, a first mount and a local directory; other mounts of it when asked for."""

    def __init__(self, fs: TestFs, base: Path, *options: str) -> None:
        self.fs, self.base = fs, base
        base.chmod(0o755)
        self.boxes: list[Sandbox] = []
        self.box = self.mount(*options)
        self.local = base / "local"
        self.ground: Ground | None = None

    def mount(self, *options: str) -> Sandbox:
        box = Sandbox(self.base / f"box{len(self.boxes)}", self.fs, *options)
        self.boxes.append(box)
        box.mount()
        for above in (box.base, box.mountpoint) if not options or options == ("--acl",) else (box.base,):
            above.chmod(0o755)
        return box

    def play(self, rules: Sequence[Rule], timed: bool = False) -> None:
        assert rules
        self.ground = Ground(self.local, self.box.mountpoint / "t", identities())
        try:
            self.ground.play_all(rules, timed)
        finally:
            self.ground.close()

    def same_elsewhere(self, *options: str) -> None:
        """The tree is the local one's, and the same again on another mount once this one is gone."""
        here = self.box.mountpoint / "t"
        assert not differences(tree(self.local), tree(here))
        whole = tree(here, exact=True)
        self.box.unmount()
        self.box.lose()
        other = self.mount(*options)
        assert not differences(whole, tree(other.mountpoint / "t", exact=True))

    def close(self) -> None:
        for box in self.boxes:
            box.close()


@pytest.fixture
def stage(trusted: Server, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(trusted.create(), tmp_path)
    yield made
    made.close()


def test_some_of_all_rules(stage: Stage, seed: int) -> None:
    chosen = random.Random(seed)
    rules = [rule for group in groups().values() for rule in chosen.sample(group, min(SAMPLE, len(group)))]
    stage.play(rules)
    stage.same_elsewhere()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("group", handlerules.GROUPS)
def test_all_rules(stage: Stage, group: str) -> None:
    stage.play(groups()[group], timed=True)
    stage.same_elsewhere()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", [12, pytest.param(1, marks=pytest.mark.long)])
def test_what_acls_allow(trusted: Server, tmp_path: Path, seed: int, share: int) -> None:
    rules = list(handlerules.granular())
    made = Stage(trusted.create(), tmp_path, "--acl")
    try:
        made.play(random.Random(seed).sample(rules, len(rules) // share), timed=share == 1)
        made.same_elsewhere("--acl")
    finally:
        made.close()


def test_a_mount_to_look_at_says_what_a_read_only_disk_says(stage: Stage) -> None:
    """Each call in each situation by each user where nothing can be changed: EROFS, or what is told first."""
    people = identities()
    here = stage.box.mountpoint / "t"
    ground = Ground(stage.local, here, people)
    places = list(situations().items())
    for at, (_, (before, _)) in enumerate(places):
        name = f"{at:03d}"
        rule = Rule(name, tuple(step for step in before if step[0] < len(people)))
        assert ground.play(rule, timed=False) is None
        for name_, mode in ((b"plain", 0o666), (b"plain-dir", 0o777)):
            for step in posixrules.make("dir" if mode == 0o777 else "file", name_, mode):
                assert ground.sides[0][ROOT].do(step[1])[0] == ground.sides[1][ROOT].do(step[1])[0]
    ground.close()
    stage.box.unmount()
    other = stage.mount("--read-only")
    found, asked, refused = [], 0, 0
    actors: list[Actor] = []
    try:
        for who in people:
            pair = [_looking(stage.local, who, True), _looking(other.mountpoint / "t", who, False)]
            actors += pair
            for at, (where, (_, path)) in enumerate(places):
                for call, op in path_calls(path).items():
                    told = []
                    for actor in pair:
                        assert actor.do(("enter", b"%05d/in" % (at + 1)))[0] is None
                        told.append(actor.do(op)[0])
                    asked += 1
                    refused += told[0] == "EROFS"
                    if told[0] != told[1]:
                        found.append(f"{call}: {where}, {who}: there {told[0]}, here {told[1]}")
    finally:
        for actor in actors:
            actor.close()
    assert not found, f"{len(found)} of {asked}\n" + "\n".join(found[:40])
    assert refused > asked // 10


def _looking(top: Path, who: Identity | None, local: bool) -> Actor:
    """Somebody for whom `top` is read-only: a mount is so by itself."""
    return Actor(top, who, look_only=local and os.geteuid() == 0)
