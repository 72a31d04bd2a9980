"""SQLite reads what it should: the plan of each central query, and of every statement of a day's work.

The planner believes the statistics that `fsd.meta.sqlite` writes, so plans do not depend on what is stored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.daywork import work
from support.postgres import PostgresServer

from fsd.host.seam import Host
from fsd.meta import postgresql, sqlite
from fsd.meta.database import Database
from fsd.meta.sql import MAX, in_list, values_list
from fsd.service import barriers, conflicts, difference, feed, history, native, pins, queries, restore, rows
from fsd.service.audit import audit
from fsd.service.open import ServiceOptions, open_service


def plan(db: Database, sql: str) -> list[str]:
    """The lines of the plan that say how a table is read."""
    nothing = [None] * sql.count("?")
    lines = db.read(lambda tx: [row[3] for row in tx.all(f"EXPLAIN QUERY PLAN {sql}", nothing)])
    return [line for line in lines if line.startswith(("SEARCH", "SCAN")) and "CONSTANT ROW" not in line]


MARKS = in_list(range(8))[0]
# What namespace.md section 2 says, where the code does not have it yet.
INODE_AT = (
    "SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)",
    "SEARCH y USING PRIMARY KEY (fs=? AND ino=? AND died>?)",
)


KEYS = {
    "inode": "fs=? AND ino=?",
    "dentry": "fs=? AND parent=? AND name=?",
    "block": "fs=? AND ino=? AND idx=?",
}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (
            queries.LOOKUP,
            [
                "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)",
                "SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)",
            ],
        ),
        (
            queries.LIST,
            [
                "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name>?)",
                "SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)",
            ],
        ),
        (
            queries.TREE.format(MARKS),
            [
                "SEARCH d USING PRIMARY KEY (fs=? AND parent=?)",
                "SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)",
            ],
        ),
        (queries.ATTRS.format(MARKS), ["SEARCH i USING PRIMARY KEY (fs=? AND ino=? AND died=?)"]),
        (rows.NODES + MARKS, ["SEARCH inode USING PRIMARY KEY (fs=? AND ino=? AND died=?)"]),
        (
            rows.NAMES.format(values_list([(1, b"x")] * 4)[0]),
            ["SCAN k", "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)"],
        ),
        (
            rows.BLOCKS.format(values_list([(1, 2, 3)] * 4)[0]),
            ["SCAN k", "SEARCH b USING PRIMARY KEY (fs=? AND ino=? AND idx>? AND idx<?)"],
        ),
        (
            queries.LOOKUP_AT,
            [
                "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)",
                "SEARCH x USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died>?)",
                *INODE_AT,
            ],
        ),
        (
            queries.LIST_AT,
            ["SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name>?)", *INODE_AT],
        ),
        (queries.TREE_AT.format(MARKS), ["SEARCH d USING PRIMARY KEY (fs=? AND parent=?)", *INODE_AT]),
        (queries.WEIGHT_AT.format(MARKS), ["SEARCH d USING PRIMARY KEY (fs=? AND parent=?)", *INODE_AT]),
        (queries.ATTRS_AT.format(values_list([(1,)] * 4)[0]), ["SCAN k", *INODE_AT]),
        (
            queries.COUNTS_AT.format(values_list([(1,)] * 4)[0]),
            ["SCAN k", "SEARCH d USING PRIMARY KEY (fs=? AND parent=?)", "SCAN c"],
        ),
        (queries.COUNT_AT, ["SEARCH dentry USING PRIMARY KEY (fs=? AND parent=?)", "SCAN c"]),
        (
            queries.BLOCKS_AT,
            ["SEARCH block USING PRIMARY KEY (fs=? AND ino=? AND idx>? AND idx<?)"],
        ),
        *[
            (
                difference.KEYS_SQL.format(t=table, k=key),
                [
                    f"SEARCH {table} USING INDEX {table}_born (fs=? AND born>? AND born<?)",
                    f"SEARCH {table} USING INDEX {table}_died (fs=? AND died>? AND died<?)",
                ],
            )
            for table, key in difference.KEYS_OF.items()
        ],
        (
            difference.NAMES_AT_SQL.format(values_list([(1,)] * 4)[0]),
            ["SCAN k", "SEARCH d USING INDEX dentry_ino (fs=? AND ino=?)"],
        ),
        (
            difference.BLOCKS_AT_SQL.format(values_list([(1, 2)] * 4)[0]),
            ["SCAN k", "SEARCH b USING PRIMARY KEY (fs=? AND ino=? AND idx=?)"],
        ),
        (
            difference.ENTRIES_AT_SQL.format(values_list([(1, b"x")] * 4)[0]),
            [
                "SCAN k",
                "SEARCH d USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died=?)",
                "SEARCH x USING PRIMARY KEY (fs=? AND parent=? AND name=? AND died>?)",
            ],
        ),
        *[
            (
                restore.ENDS_SQL.format(table),
                [f"SEARCH {table} USING INDEX {table}_born (fs=? AND born>?)"],
            )
            for table in restore.BRINGS_SQL
        ],
        *[
            (sql, [f"SEARCH {table} USING INDEX {table}_died (fs=? AND died>? AND died<?)"])
            for table, sql in restore.BRINGS_SQL.items()
        ],
        *[
            (
                restore.CAME_SQL[table],
                [
                    f"SEARCH l USING INDEX {table}_born (fs=? AND born>?)",
                    f"SEARCH o USING PRIMARY KEY ({key} AND died>? AND died<?)",
                ],
            )
            for table, key in KEYS.items()
        ],
        *[
            (
                restore.WENT_SQL[table],
                [
                    f"SEARCH o USING INDEX {table}_died (fs=? AND died>? AND died<?)",
                    f"SEARCH l USING PRIMARY KEY ({key} AND died=?)",
                ],
            )
            for table, key in KEYS.items()
        ],
        *[
            (
                sql.format("*", table),
                [f"SEARCH {table} USING INDEX {table}_{column} (fs=? AND {column}=?)"],
            )
            for table in restore.BRINGS_SQL
            for sql, column in ((restore.BORN_SQL, "born"), (restore.DIED_SQL, "died"))
        ],
        (native.LIST_SQL, ["SEARCH checkpoint USING INDEX checkpoint_order (fs=? AND num<?)"]),
        (
            native.LIST_THREAD_SQL,
            ["SEARCH checkpoint USING INDEX checkpoint_thread (fs=? AND thread=? AND rowid<?)"],
        ),
        (
            native.POINTS_SQL,
            ["SEARCH checkpoint USING INDEX checkpoint_thread (fs=? AND thread=? AND rowid>?)"],
        ),
        (feed.MADE_AT, ["SEARCH change USING PRIMARY KEY (fs=? AND seq=?)"]),
        (history.GONE_SQL, ["SEARCH gone USING INDEX gone_seq (fs=?)"]),
        (history.PINS_SQL, ["SEARCH pin USING INDEX pin_seq (fs=? AND seq<?)"]),
        (
            barriers.ASKS_SQL,
            ["SEARCH barrier USING INDEX barrier_session (fs=? AND session=? AND rowid>?)"],
        ),
        *[
            (
                f"DELETE FROM {table} WHERE {pins.ONLY_SEEN}",
                [f"SEARCH {table} USING INDEX {table}_died (fs=? AND died>? AND died<?)"],
            )
            for table in ("inode", "dentry", "block")
        ],
    ],
)
def test_plan_of_a_central_query(db: Database, sql: str, expected: list[str]) -> None:
    got = [re.sub(r"COVERING INDEX", "INDEX", line) for line in plan(db, sql)]
    assert got == expected


# Tables that are small, or read whole on purpose.
_MAY_SCAN = re.compile(r"^SCAN (k|fs|counter|format|c|fork USING INDEX fork_copy)$")
_WHOLE_FILESYSTEM = re.compile(
    r"^SEARCH (?!(?:fs|f|token|session|s|pin|journal|barrier|lease|k|sweep|fork)\b)\w+ USING .*\(fs=\?\)$"
)
# Reads the first row of a clustered range, or counts it, and says so.
_KNOWN = (
    "SELECT min(seq) FROM change WHERE fs=?",
    # At most CONFLICTS_MAX rows, by their index, in commits that met a conflict.
    conflicts.COUNT,
    conflicts.OLDEST,
)


def bad_lines(db: Database, sql: str) -> list[str]:
    return [
        line
        for line in plan(db, sql)
        if (line.startswith("SCAN") and not _MAY_SCAN.match(line)) or _WHOLE_FILESYSTEM.match(line)
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT ino FROM inode WHERE size>?",
        "SELECT count(*) FROM inode WHERE fs=? AND size>?",
        "SELECT name FROM dentry WHERE fs=? AND died=140737488355327",
        "SELECT ino FROM inode WHERE fs=? AND died>? AND died<=?",
    ],
)
def test_the_rule_finds_bad_statements(db: Database, sql: str) -> None:
    assert bad_lines(db, sql)


def test_no_statement_of_a_days_work_reads_a_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    for name in ("execute", "one", "all", "many"):
        monkeypatch.setattr(sqlite.SqliteTx, name, recording(seen, getattr(sqlite.SqliteTx, name)))
    service = open_service(ServiceOptions(tmp_path), Host())
    fs = work(service)
    monkeypatch.undo()
    assert len(seen) > 40, "the work did too little to say anything"
    bad = {sql: lines for sql in sorted(seen) if sql not in _KNOWN and (lines := bad_lines(service.db, sql))}
    findings = audit(service.db, fs)
    service.close()
    assert not bad
    assert not findings


def recording(seen: set[str], original: Any) -> Any:
    def record(self: sqlite.SqliteTx, sql: str, *args: Any) -> Any:
        if sql.split(None, 1)[0] in ("SELECT", "UPDATE", "DELETE", "INSERT"):
            seen.add(sql)
        return original(self, sql, *args)

    return record


def fill_postgresql(conn: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Rows of a few large filesystems beside the one that is worked on, and what ANALYZE says of them."""
    rows_of = "FROM generate_series(1, 20000) AS n"
    conn.execute(
        "INSERT INTO inode (fs, ino, mode, nlink, uid, gid, size, atime, mtime, ctime, rdev, parent, cseq,"
        " writer, grown, born, died)"
        f" SELECT 1000+n%4, n, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n/20, {MAX} {rows_of}"
    )
    conn.execute(
        "INSERT INTO dentry (fs, parent, name, ino, writer, born, died)"
        f" SELECT 1000+n%4, n/40, int8send(n), n, 0, n/20, {MAX} {rows_of}"
    )
    conn.execute(
        "INSERT INTO block (fs, ino, idx, parts, born, died)"
        f" SELECT 1000+n%4, n/40, n%40, '', n/20, {MAX} {rows_of}"
    )
    conn.execute(
        "INSERT INTO blob (fs, hash, pack, off, raw_len, stored_len, codec, refs, fresh)"
        f" SELECT 1000+n%4, sha256(int8send(n)), n/20, 0, 1, 1, 0, 1, 0 {rows_of}"
    )
    conn.execute("INSERT INTO change (fs, seq, session, at, what) SELECT 1000+n%4, n, 0, 0, '' " + rows_of)
    conn.execute("ANALYZE")


_PG_BAD = re.compile(
    r"Seq Scan on (inode|dentry|block|blob|change|applied|journal_entry)\b|Hash Join|Merge Join|"
    r"(?:on|using) (?:inode|dentry|block|blob|change)[^\n]*\n\s*Index Cond: \((?:\w+\.)?fs = [^)]*\)$",
    re.MULTILINE,
)


def test_postgresql_reads_no_whole_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: PostgresServer
) -> None:
    seen: dict[str, Any] = {}

    def recorded(original: Any) -> Any:
        def record(self: Any, sql: str, params: Any = ()) -> Any:
            one = params if original.__name__ != "many" else (params[0] if params else None)
            if sql.split(None, 1)[0] in ("SELECT", "UPDATE", "DELETE", "INSERT") and one is not None:
                seen.setdefault(sql, one)
            return original(self, sql, params)

        return record

    for name in ("execute", "one", "all", "many"):
        monkeypatch.setattr(postgresql.PostgresTx, name, recorded(getattr(postgresql.PostgresTx, name)))
    url = postgres_server.fresh()
    service = open_service(ServiceOptions(tmp_path, database=url), Host())
    fs = work(service)
    monkeypatch.undo()
    assert not audit(service.db, fs)
    service.close()
    with postgresql.connect(url) as conn:
        fill_postgresql(conn)
        plans = {
            sql: "\n".join(
                row[0] for row in conn.execute(f"EXPLAIN {postgresql.to_percent(sql)}", params).fetchall()
            )
            for sql, params in seen.items()
        }
        assert _PG_BAD.search(
            "\n".join(
                row[0]
                for row in conn.execute("EXPLAIN SELECT ino FROM inode WHERE fs=1 AND size>5").fetchall()
            )
        ), "the rule finds nothing"
    assert len(plans) > 40, "the work did too little to say anything"
    assert not {sql: plan for sql, plan in plans.items() if sql not in _KNOWN and _PG_BAD.search(plan)}
