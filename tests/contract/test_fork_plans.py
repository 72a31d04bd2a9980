"""How a fork's copy reads: from key to key, on both engines, however large its origin is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.postgres import PostgresServer
from test_query_plans import fill_postgresql, plan

from fsd.host.seam import Host
from fsd.meta import postgresql
from fsd.meta.database import Database, open_database
from fsd.service.forkcopy import BLOB, STAGES

TABLES = ("inode", "block", "dentry")


@pytest.mark.parametrize("at", range(3))
def test_sqlite_reads_a_range_of_the_key(db: Database, at: int) -> None:
    for sql in (STAGES[at].select, STAGES[at].insert):
        got = plan(db, sql)
        assert len(got) == 1
        assert re.match(
            rf"SEARCH {TABLES[at]} USING PRIMARY KEY \(.*\(fs,\w+.*\)>\(.*\(fs,\w+.*\)<\(", got[0]
        ), got
    assert plan(db, BLOB) == ["SEARCH blob USING PRIMARY KEY (fs=? AND hash=?)"]


def test_postgresql_reads_a_range_of_the_key(tmp_path: Path, postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh()
    open_database(url, Host()).close()
    with postgresql.connect(url) as conn:
        fill_postgresql(conn)
        for at, stage in enumerate(STAGES):
            select: list[Any] = [1001, 1, *([] if at == 0 else [b"" if at == 2 else 1]), 1002, 5, 5, 100]
            key = [1001, 1, *([] if at == 0 else [b"" if at == 2 else 1])]
            for sql, values in ((stage.select, select), (stage.insert, [7, *key, *key, 5, 5])):
                rows = conn.execute(f"EXPLAIN {postgresql.to_percent(sql)}", values).fetchall()
                told = "\n".join(row[0] for row in rows)
                assert f"{TABLES[at]}_pkey" in told, told
                assert "Sort" not in told, told
