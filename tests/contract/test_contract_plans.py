"""Each query of the checkpoint contract uses the index it was written for (SQLite), and none sorts what an
index has in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench

from fsd.service import manifests, names, records, threads

_KEYED = "SEARCH {} USING PRIMARY KEY (fs=? AND {}=?)"
PLANS = {
    "thread": (records.THREAD_SQL, [_KEYED.format("thread", "key")]),
    "by key": (records.BY_KEY_SQL, ["SEARCH checkpoint USING INDEX checkpoint_key (fs=? AND key=?)"]),
    "by thread": (
        records.BY_THREAD_SQL,
        ["SEARCH checkpoint USING INDEX checkpoint_thread (fs=? AND thread=?)"],
    ),
    "list": (records.LIST_SQL, ["SEARCH checkpoint USING INDEX checkpoint_thread (fs=? AND thread=?)"]),
    "thread used": (
        manifests._THREAD_USED,
        ["SEARCH checkpoint USING COVERING INDEX checkpoint_thread (fs=? AND thread=?)"],
    ),
    "copy names": (
        manifests._COPY_NAMES,
        ["SEARCH named USING INDEX named_checkpoint (checkpoint=?)"],
    ),
    "references": (threads.REFERENCES_SQL, ["SEARCH named USING PRIMARY KEY (fs=? AND name>?)"]),
    "name": (names.FIND_SQL, [_KEYED.format("blob_name", "name")]),
    "names": (names.LIST_SQL, ["SEARCH blob_name USING PRIMARY KEY (fs=? AND name>? AND name<?)"]),
    "counted": (names.COUNTED_SQL, [_KEYED.format("named", "name")]),
    "sweep": (
        names.SWEEP_SQL,
        ["SEARCH blob_name USING PRIMARY KEY (fs=? AND name>?)", _KEYED.format("named", "name")],
    ),
    "missing": (
        names.MISSING_SQL,
        ["SEARCH named USING INDEX named_checkpoint (checkpoint=? AND fs=?)", _KEYED.format("b", "name")],
    ),
}
SORTED = {"list", "by thread", "missing"}  # few rows, in an order no index has


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("contract-plans")) as made:
        yield made


@pytest.mark.parametrize("name", sorted(PLANS))
def test_plan(bench: Bench, name: str) -> None:
    text, wanted = PLANS[name]
    plan = bench.service.db.read(
        lambda tx: [row[3] for row in tx.all("EXPLAIN QUERY PLAN " + text, [1] * text.count("?"))]
    )
    searches = [line for line in plan if line.startswith("SEARCH")]
    assert [line.replace(" COVERING", "") for line in searches] == [
        line.replace(" COVERING", "") for line in wanted
    ]
    assert not [line for line in plan if line.startswith("SCAN")]
    if name not in SORTED:
        assert not [line for line in plan if "TEMP B-TREE" in line], plan
