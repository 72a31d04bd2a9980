"""The bound of the design: at most 60 us of CPU an operation in a batch of 1,000 (measured: about 20)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench
from support.commit_cost import KINDS, cost

from fsd.meta.sqlite import SqliteDatabase
from fsd.model.attrs import ROOT_INO

BOUND_US = 60.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("cost")) as made:
        yield made


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cost_of_an_operation(bench: Bench, kind: str) -> None:
    found = cost(bench, kind, 4)
    assert found <= BOUND_US, f"{kind}: {found:.1f} us an operation"


def test_a_small_fsync_is_few_statements_and_one_transaction(bench: Bench) -> None:
    """What a new file of 4 KiB and its fsync cost the database: each statement is 5 to 20 us of CPU."""
    m = bench.mount("few")
    m.file(ROOT_INO, b"few-0", b"first")
    m.commit()
    asked: list[str] = []
    database = bench.service.db
    assert isinstance(database, SqliteDatabase)
    database._conn.set_trace_callback(asked.append)
    try:
        m.file(ROOT_INO, b"few-1", bytes(range(256)) * 16)
        m.commit()
    finally:
        database._conn.set_trace_callback(None)
    kinds = [statement.split()[0] for statement in asked]
    assert kinds[0] == "BEGIN" and kinds[-1] == "COMMIT", asked
    assert not {"SAVEPOINT", "ROLLBACK"} & set(kinds), "a lone request needs none"
    assert len(asked) <= 18, "\n".join(asked)
