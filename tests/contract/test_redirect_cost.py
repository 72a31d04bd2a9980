"""What a commit costs depends on what it names, not on the conflicts its session had; both engines."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from support.bench import Bench, Mount

from fsd.meta.postgresql import PostgresTx
from fsd.meta.sql import values_list
from fsd.meta.sqlite import SqliteDatabase, SqliteTx
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.ops import CONFLICT, CREATE, REFUSED, Create
from fsd.service import redirect_rows

MANY = 5000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each statement, how many rows it gave or changed."""
    seen: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, sql: str, params: Any = ()) -> Any:
            found = original(self, sql, params)
            seen.append(len(found) if isinstance(found, list) else 0)
            return found

        return call

    for kind in (SqliteTx, PostgresTx):
        for name in ("execute", "one", "all", "many"):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    return seen


def burden(bench: Bench, m: Mount, count: int) -> None:
    """`count` numbers of the session that mean others, and as many names that went elsewhere."""
    inos = [make_ino(m.session, 1_000_000 + at) for at in range(count)]

    def fill(tx: Any) -> None:
        tx.many(
            "INSERT INTO redirect (session, ino, to_ino) VALUES (?,?,?)",
            [(m.session, ino, make_ino(m.session, 2_000_000 + at)) for at, ino in enumerate(inos)],
        )
        tx.many(
            "INSERT INTO moved (session, parent, name, ino, to_parent, to_name) VALUES (?,?,?,?,?,?)",
            [(m.session, ROOT_INO, b"lost-%d" % at, ino, ROOT_INO, b"x") for at, ino in enumerate(inos)],
        )

    bench.service.db.write(fill)


def prepared(bench: Bench, count: int) -> tuple[Mount, int, int]:
    """A session with so much behind it, and two files of its own that are there."""
    m = bench.mount()
    old, gone = m.file(ROOT_INO, b"old", b"1"), m.file(ROOT_INO, b"gone", b"1")
    m.commit()
    burden(bench, m, count)
    return m, old, gone


def queue(m: Mount, old: int, gone: int) -> None:
    """One of everything that asks: new and old content, a name that goes, one that moves over another."""
    m.file(ROOT_INO, b"new", b"2")
    m.write(old, b"3", m.seq)
    m.unlink(ROOT_INO, b"gone", gone, m.seq)
    m.rename(ROOT_INO, b"old", old, ROOT_INO, b"newer", over=0)


def test_as_many_statements_and_rows_beside_many_as_beside_none(bench: Bench, read: list[int]) -> None:
    found = {}
    for count in (0, 1, MANY):
        bench.new_fs()
        m, old, gone = prepared(bench, count)
        read.clear()
        queue(m, old, gone)
        assert m.commit() == []
        found[count] = len(read), sum(read)
    assert found[MANY] == found[1]
    assert found[MANY][1] == found[0][1], "rows were read that nothing named"
    assert found[0][0] <= found[MANY][0] <= found[0][0] + 3, "one question for each kind of name"


def test_a_conflict_costs_what_it_names(bench: Bench, read: list[int]) -> None:
    """Directories that another session made first: each becomes the other's, and is told so."""
    found = {}
    for count in (1, MANY):
        bench.new_fs()
        m, _, _ = prepared(bench, count)
        other = bench.mount("other")
        for at in range(20):
            other.mkdir(ROOT_INO, b"d%d" % at)
            m.mkdir(ROOT_INO, b"d%d" % at)
        other.commit()
        read.clear()
        assert [one.status for one in m.commit()] == [CONFLICT] * 20
        found[count] = len(read), sum(read)
    assert found[MANY] == found[1]
    assert found[MANY][0] < 40, "a question for each"


def test_a_number_that_was_redirected_and_a_name_that_moved_are_found_among_many(bench: Bench) -> None:
    """By a number that means another's directory, and by the old name of a copy, in commits of their own."""
    m, _, _ = prepared(bench, MANY)
    other = bench.mount("other")
    theirs = other.mkdir(ROOT_INO, b"d")
    other.file(ROOT_INO, b"f", b"theirs")
    other.commit()
    mine, file = m.mkdir(ROOT_INO, b"d"), m.file(ROOT_INO, b"f", b"mine")
    assert [one.status for one in m.commit()] == [CONFLICT, CONFLICT]
    m.file(mine, b"below", b"x")
    m.unlink(ROOT_INO, b"f", file, m.seq)
    assert m.commit() == []
    assert bench.find("d").ino == theirs
    assert bench.read(bench.find("d/below")) == b"x"
    assert sorted(name for name in bench.entries() if name.startswith(b"f")) == [b"f"]
    assert bench.read(bench.find("f")) == b"theirs"


def test_what_meant_the_first_copy_means_the_second(bench: Bench) -> None:
    """The other changes the copy that a conflict made, so there is a copy of it: the first number follows."""
    m, old, _ = prepared(bench, MANY)
    other = bench.mount("other")
    base, number, name = m.seq, old, b"old"
    for turn in range(2):
        other.write(number, b"theirs %d" % turn, 2**40)
        other.commit()
        m.write(number, b"mine %d" % turn, base)
        (told,) = m.commit()
        assert told.status == CONFLICT
        number, name = told.ino, told.name
    m.write(old, b"last", m.seq)
    assert m.commit() == []
    assert bench.find(name.decode()).ino == number
    assert bench.read(bench.find(name.decode())) == b"last"


def test_sqlite_steps_through_no_more_rows(bench: Bench) -> None:
    """What is read inside the engine counts as well."""
    database = bench.service.db
    if not isinstance(database, SqliteDatabase):
        return  # its plans are looked at below
    found = {}
    for count in (1, MANY):
        bench.new_fs()
        m, old, gone = prepared(bench, count)
        queue(m, old, gone)
        steps = [0]

        def step(steps: list[int] = steps) -> int:
            steps[0] += 1
            return 0

        database._conn.set_progress_handler(step, 1)
        try:
            m.commit()
        finally:
            database._conn.set_progress_handler(None, 0)
        found[count] = steps[0]
    assert found[1] > 500
    assert found[MANY] < found[1] + 200, found


def test_postgresql_looks_up_whole_keys(bench: Bench) -> None:
    if isinstance(bench.service.db, SqliteDatabase):
        return  # test_service_plans.py
    m, _, _ = prepared(bench, MANY)
    for count in (1, 500):
        numbers = values_list([(at,) for at in range(count)])
        keys = values_list([(ROOT_INO, b"n%d" % at, at) for at in range(count)])
        for sql, params, wanted in (
            (redirect_rows.TARGETS.format(numbers[0]), [*numbers[1], m.session], ("session", "ino")),
            (redirect_rows.NUMBERS.format(numbers[0]), [*numbers[1], m.session], ("to_ino", "session")),
            (
                redirect_rows.MOVES.format(keys[0]),
                [*keys[1], m.session],
                ("session", "parent", "name", "ino"),
            ),
        ):
            plan = bench.service.db.read(
                lambda tx, sql=sql, params=params: [row[0] for row in tx.all("EXPLAIN " + sql, params)]
            )
            (line,) = [line for line in plan if "Index Cond" in line]
            assert all(f"{column} = " in line for column in wanted), plan
            assert not [line for line in plan if "Filter" in line or "Seq Scan" in line], plan


@pytest.mark.parametrize("mode", [2**32, 2**40, 2**62, -1, -(2**62)])
def test_a_mode_that_no_file_has_is_refused_and_not_looked_up_by(bench: Bench, mode: int) -> None:
    """What a commit names is looked up before its operations are checked."""
    m = bench.mount()
    burden(bench, m, 1)
    bad = Create(m.number(), CREATE, ROOT_INO, b"t", m.new_ino(), mode, 0, 0, 0, None, 1)
    m.add(bad)
    m.file(ROOT_INO, b"good", b"1")
    assert [(one.opno, one.status, one.errno) for one in m.commit()] == [(bad.opno, REFUSED, errno.EINVAL)]
    assert bench.tree() == {"good": b"1"}
