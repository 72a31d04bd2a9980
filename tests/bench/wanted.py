"""The command line of scripts/bench. The standard library alone: it is read before anything is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# As measure.GROUPS, special.SPECIAL and the peers' names say; tests/unit/test_bench_report.py compares.
GROUPS = ("big", "small", "git", "sqlite", "operations")
SPECIAL = ("requests", "distance", "many", "memory", "states")
PEERS = ("ext4", "passthrough_ll", "juicefs", "fsd")


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: of {', '.join(known)}")
        return found

    return names


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with 2 where one is wrong, with 0 after --help."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="fsd beside a local disk and peers, in one run on this machine. Ratios count, not times.",
        epilog="Example: scripts/bench --quick --only fsd,passthrough_ll --groups small,git",
    )
    add = parser.add_argument
    every = (*GROUPS, *SPECIAL)
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default 5)")
    add("--quick", action="store_true", help="one round, and the smallest of the special figures")
    add("--only", type=_some_of(PEERS), default=[], metavar="PEERS", help=f"by commas, of {', '.join(PEERS)}")
    add("--groups", type=_some_of(every), default=[], help=f"by commas, of {', '.join(every)}")
    add("--minutes", type=float, default=120, metavar="N", help="begin nothing after this (default 120)")
    add("--tools", type=Path, default=Path(".bench"), help=argparse.SUPPRESS)
    add("--work", type=Path, metavar="DIR", help="directory to measure in (default: a temporary one)")
    add("--save", action="store_true", help="also write the results to tests/bench/results/")
    add("--show", type=Path, metavar="FILE", help="only print the report of a saved JSON file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # For the shell script: 0 all is said (--help), 2 wrong, 3 measure, 4 show what was measured.
    sys.exit(4 if arguments().show else 3)
