"""What was promised, as rows that pass or fail in one run's results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.results import Results

DISK, FLOOR, JUICE, FSD = "ext4", "passthrough_ll", "juicefs, SQLite", "fsd"
FSD_POSTGRESQL = "fsd, PostgreSQL"


@dataclass(frozen=True, slots=True)
class Target:
    """`of`: the figure of the other peer (or of fsd, then another figure) that bounds it, times `factor`.
    `faster`: for rates, fsd's must reach it instead of staying below. Without `other` a plain bound."""

    figure: str
    other: str
    factor: float
    of: str = ""
    rate: bool = False
    plus: float = 0.0
    goal: bool = False
    who: str = FSD

    def bound(self, results: Results) -> float | None:
        if not self.other:
            return self.factor
        found = results.median(self.other, self.of or self.figure)
        return None if found is None else found * self.factor + self.plus

    def told(self) -> str:
        word = "at least" if self.rate else "at most"
        if self.who != FSD:
            word = f"of {self.who}: {word}"
        if not self.other:
            return f"{word} {self.factor:g}"
        of = f" of {self.of!r}" if self.of else ""
        more = f" + {self.plus:g}" if self.plus else ""
        return f"{word} {self.factor:.3g}x {self.other}{of}{more}{' (goal)' if self.goal else ''}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value` or `bound` is None where it was not measured."""

    target: Target
    value: float | None
    bound: float | None

    @property
    def word(self) -> str:
        if self.value is None or self.bound is None:
            return "not measured"
        met = self.value >= self.bound if self.target.rate else self.value <= self.bound
        return "met" if met else "MISSED"


DURABLE = "untar until durable, s"
STATES = ("checkpoint create", "checkpoint diff of 10", "checkpoint delete", "fork")
STATUS = ("git status first, s", "git status second, s")
KINDS = ("lookup", "open+close", "create+write+close")

OF_STATES = [
    Target("checkpoint create, server ms, 100,000 files", "", 50),
    Target("checkpoint diff of 10, server ms, 100,000 files", "", 100),
    Target("fork, server ms, 100,000 files", "", 50),
    # Whatever there is: as fast as on a small tree, give or take 10 ms.
    *(
        Target(f"{what}, server ms, 100,000 files", FSD, 1, of=f"{what}, server ms, 1,000 files", plus=10)
        for what in STATES
    ),
    Target("first byte of an old state after its mount, s, 100,000 files", "", 0.1),
    Target("bytes a change of 200 checkpoints", "", 1024),
    Target("given back by prune, % of the growth", "", 85, rate=True),  # 95, but for half-filled pages
]
TARGETS = [
    Target(DURABLE, JUICE, 1 / 5),
    Target(DURABLE, FLOOR, 2),
    Target(DURABLE, DISK, 2.5, goal=True),
    Target("git clone, s", JUICE, 1 / 3),
    *(Target(figure, FLOOR, 1.3) for figure in (*STATUS, "ls -lR warm, s")),
    *(Target(figure, JUICE, 1 / 2) for figure in (*STATUS, "ls -lR warm, s")),
    Target("rm -rf, s", JUICE, 1 / 4),
    Target("cold mount + first ls -R, s", JUICE, 1 / 2),
    Target("requests of a cold ls -R of 5,000", "", 5),
    Target("SQLite FULL, tx/s", JUICE, 2, rate=True),
    Target("write + fsync, MiB/s", JUICE, 1, rate=True),
    Target("cold read, MiB/s", JUICE, 0.8, rate=True),
    *(Target(f"{kind}, us CPU", FLOOR, 2) for kind in KINDS),
    Target("rename, us CPU", FLOOR, 2.5),
    Target("unlink, us CPU", FLOOR, 2.5),
    Target("requests of a small fsync", "", 1),
    Target("durable writes of a small fsync", "", 1),
    Target("peak RSS, MiB", "", 90),
    Target("peak RSS of the supervisor, MiB", "", 15),
    Target("RSS after find over 100,000, MiB", "", 60 + 100_000 / 1024),
    Target("RSS growth, round 3 to 10 of 100,000 names, %", "", 5),
    Target(
        "untar until durable at +20 ms, s", FSD, 1.3, of="untar until durable through a proxy, s", plus=0.04
    ),
    Target("git clone at +20 ms, s", FSD, 1.3, of="git clone through a proxy, s", plus=0.04),
    Target("cold ls -R at +20 ms, s", FSD, 1.3, of="cold ls -R through a proxy, s", plus=0.04),
    *OF_STATES,
    # The same of the other engine, each beside a small tree of its own.
    *(replace(one, who=FSD_POSTGRESQL, other=one.other and FSD_POSTGRESQL) for one in OF_STATES),
]


def verdicts(results: Results) -> list[Verdict]:
    return [Verdict(one, results.median(one.who, one.figure), one.bound(results)) for one in TARGETS]
