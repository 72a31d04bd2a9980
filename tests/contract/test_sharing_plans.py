"""Each query about leases and conflicts uses the index it was written for (SQLite)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench

from fsd.meta.sql import in_list
from fsd.service import conflicts, writers

_NAME = "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)"
PLANS = {
    "leases": (writers.LEASES, ["SEARCH lease USING PRIMARY KEY (fs=?)"]),
    "parent": (writers.PARENT, ["SEARCH inode USING PRIMARY KEY (fs=? AND ino=? AND died=?)"]),
    "open": (
        conflicts.OPEN,
        [
            "SEARCH c USING PRIMARY KEY (fs=? AND (parent,name)>(?,?))",
            "SEARCH d USING COVERING INDEX dentry_ino (fs=? AND ino=? AND parent=? AND name=? AND died=?)",
            "SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)",
        ],
    ),
    "oldest": (
        conflicts.OLDEST,
        ["SEARCH conflict USING INDEX conflict_seq (fs=?)", f"{_NAME} LEFT-JOIN"],
    ),
    "count": (conflicts.COUNT, ["SEARCH conflict USING COVERING INDEX conflict_seq (fs=?)"]),
    "parents": (
        writers.PARENTS.format(in_list([1, 2])[0]),
        ["SEARCH dentry USING COVERING INDEX dentry_ino (fs=? AND ino=?)"],
    ),
    "named": (conflicts.NAMED, ["SEARCH dentry USING COVERING INDEX dentry_ino (fs=? AND ino=?)"]),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("plans")) as made:
        yield made


@pytest.mark.parametrize("name", sorted(PLANS))
def test_plan(bench: Bench, name: str) -> None:
    text, wanted = PLANS[name]
    plan = bench.service.db.read(
        lambda tx: [row[3] for row in tx.all("EXPLAIN QUERY PLAN " + text, [1] * text.count("?"))]
    )
    assert [line for line in plan if line.startswith("SEARCH")] == wanted
    # What is scanned is the bounded subquery, and nothing is sorted.
    assert not [line for line in plan if line.startswith(("SCAN", "USE TEMP")) and line != "SCAN c"]
