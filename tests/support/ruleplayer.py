"""Plays the rules that need one user alone in two directories, and prints what differs:

python -m support.ruleplayer LOCAL MOUNTED GROUP...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.differential import LOOKS, until_the_clock_moves
from support.fileops import Actor, Identity
from support.handlerules import groups
from support.posixrules import AS_MANY_LINKS_AS_ALLOWED, Rule


class Ground:
    """Two directories, and everybody in both. Close it always."""

    def __init__(
        self, local: Path, mounted: Path, people: Sequence[Identity | None], *, ready: bool = False
    ) -> None:
        """`ready`: the directories are there, and need not be made fit for everybody."""
        self.tops = (local, mounted)
        self.people = people
        self.played = 0
        self.sides: tuple[list[Actor], ...] = ([], [])
        for top in () if ready else self.tops:
            top.mkdir()
            top.chmod(0o755)
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
        found = [told for rule in rules if (told := self.play(rule, timed)) and self.stays(rule, timed)]
        assert not found, f"{len(found)} of {len(rules)} rules differ\n" + "\n".join(found[:20])

    def stays(self, rule: Rule, timed: bool) -> bool:
        """Whether a rule that differed does so again. A walk that begins anew, since a name expired under it,
        goes on counting its links in the kernel: exactly as many as are allowed may then be too many."""
        return AS_MANY_LINKS_AS_ALLOWED not in rule.name or self.play(rule, timed) is not None

    def close(self) -> None:
        for side in self.sides:
            for actor in side:
                actor.close()


def main(local: str, mounted: str, *names: str) -> None:
    ground = Ground(Path(local), Path(mounted), [None])
    every = groups()
    rules = [rule for name in names for rule in every[name] if not rule.of_others]
    assert rules
    try:
        ground.play_all(rules)
    finally:
        ground.close()
    print(f"{len(rules)} rules")


if __name__ == "__main__":
    main(*sys.argv[1:])
