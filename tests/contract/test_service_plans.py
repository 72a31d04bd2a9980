"""Each query of the commit engine and the namespace uses the index it was written for (SQLite)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench

from fsd.meta.sql import in_list, values_list
from fsd.service import mountpin, pins, queries, redirect_rows, rows

_TWO = in_list([1, 2])[0]
_NUMBERS = values_list([(1,), (2,)])[0]
_ENTRY = "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)"
_INODE = "SEARCH {} USING PRIMARY KEY (fs=? AND ino=? AND died=?)"
PLANS = {
    "lookup": (queries.LOOKUP, [_ENTRY, _INODE.format("i")]),
    "list": (
        queries.LIST,
        ["SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name>?)", _INODE.format("i")],
    ),
    "tree": (
        queries.TREE.format(_TWO),
        ["SEARCH d USING PRIMARY KEY (fs=? AND parent=?)", _INODE.format("i")],
    ),
    "weight": (
        queries.WEIGHT.format(_TWO),
        ["SEARCH d USING PRIMARY KEY (fs=? AND parent=?)", _INODE.format("i")],
    ),
    "counts": (
        queries.COUNTS.format(values_list([(1,), (2,)])[0]),
        ["SEARCH d USING PRIMARY KEY (fs=? AND parent=?)"],
    ),
    "attrs": (queries.ATTRS.format(_TWO), [_INODE.format("i")]),
    "count": (queries.COUNT, ["SEARCH dentry USING PRIMARY KEY (fs=? AND parent=?)"]),
    "blocks": (
        queries.BLOCKS,
        ["SEARCH block USING PRIMARY KEY (fs=? AND ino=? AND idx>? AND idx<?)"],
    ),
    "load nodes": (rows.NODES + _TWO, [_INODE.format("inode")]),
    "load names": (rows.NAMES.format(values_list([(1, b"a"), (1, b"b")])[0]), [_ENTRY]),
    "load blocks": (
        rows.BLOCKS.format(values_list([(1, 2, 3), (4, 5, 6)])[0]),
        ["SEARCH b USING PRIMARY KEY (fs=? AND ino=? AND idx>? AND idx<?)"],
    ),
    "redirected": (
        redirect_rows.TARGETS.format(_NUMBERS),
        ["SEARCH r USING PRIMARY KEY (session=? AND ino=?)"],
    ),
    "redirected to": (
        redirect_rows.NUMBERS.format(_NUMBERS),
        ["SEARCH r USING COVERING INDEX redirect_to (to_ino=? AND session=?)"],
    ),
    "moved": (
        redirect_rows.MOVES.format(values_list([(1, b"a", 2), (1, b"b", 3)])[0]),
        ["SEARCH m USING PRIMARY KEY (session=? AND parent=? AND name=? AND ino=?)"],
    ),
    "names of": (rows.NAMES_OF, ["SEARCH dentry USING INDEX dentry_ino (fs=? AND ino=?)"]),
    "children": (rows.CHILDREN.format(_TWO), ["SEARCH dentry USING PRIMARY KEY (fs=? AND parent=?)"]),
    "a mount's pin": (mountpin.FIND_SQL, ["SEARCH pin USING INDEX pin_kind (fs=? AND kind=? AND seq=?)"]),
    "unpin": (
        f"DELETE FROM inode WHERE {pins.ONLY_SEEN}",
        ["SEARCH inode USING INDEX inode_died (fs=? AND died>? AND died<?)"],
    ),
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
    searches = [line for line in plan if line.startswith("SEARCH")]
    assert searches == wanted
    # What is scanned is a list of constants or the one row of a count, never a table.
    scans = [line for line in plan if line.startswith("SCAN") and "CONSTANT ROW" not in line]
    assert set(scans) <= {"SCAN k", "SCAN c"}
