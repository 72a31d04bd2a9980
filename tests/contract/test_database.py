"""What every `Database` promises, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.postgres import PostgresServer
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.meta import group
from fsd.meta.database import Database, Tx, open_database, take_numbers
from fsd.meta.schema import FORMAT
from fsd.meta.sql import IN_MAX, MAX, chunks, in_list, values_list
from fsd.model.errors import Conflict, FormatTooNew, FsdError, InternalError, Unavailable
from fsd.model.limits import DB_WAIT, DB_WRITERS_MAX


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a database can be opened; empty."""
    if request.param == "sqlite":
        return str(tmp_path / "data")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.fresh()


@pytest.fixture
def db(place: str) -> Iterator[Database]:
    made = open_database(place, Host())
    yield made
    made.close()


def put(tx: Tx, name: str, value: int) -> int:
    return tx.execute("INSERT INTO counter (name, value) VALUES (?,?)", (name, value))


def value(db: Database, name: str) -> int | None:
    row = db.read(lambda tx: tx.one("SELECT value FROM counter WHERE name=?", (name,)))
    return None if row is None else int(row[0])


def test_values_come_back_as_they_were(db: Database) -> None:
    everything = bytes(range(256))
    big = 2**63 - 1

    def fill(tx: Tx) -> int:
        row = tx.one(
            "INSERT INTO fs (name, display_name, labels, status, created, seq, pinned, storage_bytes,"
            " file_count, copied) VALUES (?,?,?,?,?,?,?,?,?,?) RETURNING id",
            ("fs_x", "ä 'quoted' % ☃", "{}", "active", big, 0, -1, 0, False, True),
        )
        assert row is not None
        tx.execute(
            "INSERT INTO blob (fs, hash, pack, off, raw_len, stored_len, codec, refs, fresh)"
            " VALUES (?,?,1,2,3,4,0,0,?)",
            (row[0], everything, -big),
        )
        return int(row[0])

    fs = db.write(fill)
    row = db.read(lambda tx: tx.one("SELECT display_name, created, origin_fs, copied, file_count FROM fs"))
    assert row == ("ä 'quoted' % ☃", big, None, 1, 0)
    row = db.read(lambda tx: tx.one("SELECT hash, fresh FROM blob WHERE fs=? AND hash=?", (fs, everything)))
    assert row == (everything, -big)
    assert type(row[0]) is bytes


def test_execute_counts_rows_and_one_and_all_read(db: Database) -> None:
    def work(tx: Tx) -> None:
        tx.many("INSERT INTO counter (name, value) VALUES (?,?)", [(f"n{i}", i) for i in range(5)])
        tx.many("INSERT INTO counter (name, value) VALUES (?,?)", [])
        assert tx.execute("UPDATE counter SET value=value+10 WHERE value>=? AND name<>'pack'", (3,)) == 2
        assert tx.execute("DELETE FROM counter WHERE name=?", ("n0",)) == 1
        assert tx.execute("DELETE FROM counter WHERE name=?", ("n0",)) == 0
        assert tx.execute("INSERT INTO counter VALUES ('n1', 7) ON CONFLICT DO NOTHING") == 0
        assert tx.one("SELECT value FROM counter WHERE name=?", ("n3",)) == (13,)
        assert tx.one("SELECT value FROM counter WHERE name=?", ("none",)) is None
        rows = tx.all("SELECT name FROM counter WHERE name LIKE 'n%' ORDER BY name")
        assert rows == [("n1",), ("n2",), ("n3",), ("n4",)]
        assert tx.all("UPDATE counter SET value=0 WHERE name='n4' RETURNING name, value") == [("n4", 0)]

    db.write(work)


def test_text_is_ordered_by_code_point(db: Database) -> None:
    names = ["b", "B", "a", "_", "é", "Z", "z"]
    db.write(lambda tx: tx.many("INSERT INTO counter VALUES (?,1)", [(name,) for name in names]))
    rows = db.read(lambda tx: tx.all("SELECT name FROM counter WHERE value=1 ORDER BY name"))
    assert [row[0] for row in rows] == sorted(names)


def test_lists_of_any_length_find_all(db: Database) -> None:
    count = 2 * IN_MAX + 7
    keys = [(f"k{i}", i) for i in range(count)]
    db.write(lambda tx: tx.many("INSERT INTO counter VALUES (?,?)", keys))

    def look(tx: Tx) -> tuple[set[str], dict[str, int]]:
        found: set[str] = set()
        joined: dict[str, int] = {}
        for some in chunks([name for name, _ in keys]):
            marks, params = in_list(some)
            found |= {row[0] for row in tx.all(f"SELECT name FROM counter WHERE name IN {marks}", params)}
        for rows in chunks(keys, 100):
            marks, params = values_list(rows)
            joined |= dict(
                tx.all(
                    f"SELECT c.name, c.value FROM {marks} AS k CROSS JOIN counter c"
                    " WHERE c.name=k.column1 AND c.value=k.column2",
                    params,
                )
            )
        return found, joined

    found, joined = db.read(look)
    assert found == {name for name, _ in keys}
    assert joined == dict(keys)


def test_an_exception_undoes_its_own_work_only_and_comes_back(db: Database) -> None:
    class Mine(Exception):
        pass

    error = Mine("x")

    def fail(tx: Tx) -> None:
        put(tx, "gone", 1)
        raise error

    db.write(lambda tx: put(tx, "kept", 1))
    with pytest.raises(Mine) as caught:
        db.write(fail)
    assert caught.value is error
    assert value(db, "gone") is None
    assert value(db, "kept") == 1
    assert db.write(lambda tx: put(tx, "after", 1)) == 1


def test_a_doubled_key_is_a_conflict(db: Database) -> None:
    db.write(lambda tx: put(tx, "k", 1))
    with pytest.raises(Conflict):
        db.write(lambda tx: put(tx, "k", 2))
    assert value(db, "k") == 1


def test_wrong_sql_is_our_error_and_the_next_request_works(db: Database) -> None:
    with pytest.raises(InternalError):
        db.write(lambda tx: tx.execute("UPDATE no_such_table SET x=1"))
    with pytest.raises(InternalError):
        db.read(lambda tx: tx.all("SELECT 1 FROM no_such_table"))
    assert db.write(lambda tx: put(tx, "k", 1)) == 1


def test_a_read_cannot_write(db: Database) -> None:
    with pytest.raises(FsdError):
        db.read(lambda tx: put(tx, "k", 1))
    assert value(db, "k") is None


def test_a_transaction_inside_a_transaction_is_refused(db: Database) -> None:
    with pytest.raises(InternalError):
        db.write(lambda tx: db.write(lambda inner: put(inner, "k", 1)))
    assert value(db, "k") is None


def test_many_writers_lose_nothing_and_the_failing_ones_fail_alone(db: Database) -> None:
    threads, each = 12, 20
    failed: list[str] = []
    barrier = threading.Barrier(threads)

    def add(tx: Tx) -> None:
        tx.execute("UPDATE counter SET value=value+1 WHERE name='sum'")

    def add_then_fail(tx: Tx) -> None:
        add(tx)
        raise ValueError("mine")

    def clash(tx: Tx) -> None:
        add(tx)
        put(tx, "sum", 0)

    def work(number: int) -> None:
        barrier.wait(60)
        for turn in range(each):
            for fn, expected in ((add, None), (add_then_fail, ValueError), (clash, Conflict)):
                if fn is clash and turn % 5:
                    continue
                try:
                    db.write(fn)
                    got: type[BaseException] | None = None
                except (ValueError, FsdError) as exc:
                    got = type(exc)
                if got is not expected:
                    failed.append(f"{number}.{turn}: {got} instead of {expected}")

    db.write(lambda tx: put(tx, "sum", 0))
    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not failed
    assert value(db, "sum") == threads * each


def test_waiting_writes_share_a_transaction(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all leaders are held, writes queue; they are then committed in fewer transactions."""
    monkeypatch.setattr(group, "DB_GROUP_TIME", 60.0)
    leaders = DB_WRITERS_MAX if db.engine == "postgresql" else 1
    release = threading.Event()
    started = threading.Semaphore(0)

    def hold(tx: Tx) -> None:
        started.release()
        assert release.wait(60)

    ran: list[str] = []

    def after(tx: Tx) -> None:
        text = "SELECT CAST(txid_current() AS TEXT)" if db.engine == "postgresql" else "SELECT 'one'"
        row = tx.one(text)
        assert row is not None
        ran.append(row[0])

    holders = [threading.Thread(target=db.write, args=(hold,)) for _ in range(leaders)]
    waiting = [threading.Thread(target=db.write, args=(after,)) for _ in range(30)]
    for thread in holders:
        thread.start()
    for _ in holders:
        assert started.acquire(timeout=60)
    for thread in waiting:
        thread.start()
    queue = db._group._queue  # type: ignore[attr-defined]
    wait_for(lambda: len(queue) == len(waiting), 30, "the writes to queue")
    release.set()
    for thread in holders + waiting:
        thread.join(60)
    assert len(ran) == 30
    assert len(set(ran)) <= leaders


def test_reads_see_one_state(db: Database) -> None:
    db.write(lambda tx: put(tx, "a", 1))
    inside, written = threading.Event(), threading.Event()
    seen: list[tuple[object, object]] = []

    def look(tx: Tx) -> None:
        before = tx.one("SELECT value FROM counter WHERE name='a'")
        inside.set()
        assert written.wait(60)
        seen.append((before, tx.one("SELECT value FROM counter WHERE name='a'")))

    reader = threading.Thread(target=db.read, args=(look,))
    reader.start()
    assert inside.wait(60)
    db.write(lambda tx: tx.execute("UPDATE counter SET value=2 WHERE name='a'"))
    assert value(db, "a") == 2  # a read that begins now sees it
    written.set()
    reader.join(60)
    assert seen == [((1,), (1,))]


@pytest.mark.parametrize("at_once", [False, True])
def test_the_lock_on_a_filesystem_orders_read_then_write(db: Database, at_once: bool) -> None:
    """The pattern of a commit: lock, read, write back. Without the lock PostgreSQL would lose updates."""
    fs = db.write(
        lambda tx: tx.one(
            "INSERT INTO fs (name, display_name, labels, status, created, seq, pinned, storage_bytes,"
            " file_count, copied) VALUES ('fs_a','','{}','active',0,0,-1,0,0,1) RETURNING id"
        )
    )
    assert fs is not None

    def read(tx: Tx) -> tuple[Any, ...] | None:
        if at_once:
            return tx.locked_fs(fs[0], "seq")
        tx.lock_fs(fs[0])
        return tx.one("SELECT seq FROM fs WHERE id=?", (fs[0],))

    def commit(tx: Tx) -> int:
        row = read(tx)
        assert row is not None
        tx.execute("UPDATE fs SET seq=? WHERE id=?", (row[0] + 1, fs[0]))
        return int(row[0]) + 1

    answers: list[int] = []

    def work() -> None:
        for _ in range(25):
            answers.append(db.write(commit))

    running = [threading.Thread(target=work) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert sorted(answers) == list(range(1, 201))
    assert db.write(lambda tx: tx.locked_fs(fs[0] + 1, "seq")) is None


def test_numbers_are_given_once(db: Database) -> None:
    first = db.write(lambda tx: take_numbers(tx, "things", 10))
    second = db.write(lambda tx: take_numbers(tx, "things", 1))
    assert (first, second) == (1, 11)
    assert db.write(lambda tx: take_numbers(tx, "pack", 5)) == 1


def test_everything_is_there_after_opening_again(place: str) -> None:
    first = open_database(place, Host())
    first.write(lambda tx: put(tx, "k", MAX))
    first.close()
    with pytest.raises(Unavailable):
        first.write(lambda tx: put(tx, "l", 1))
    with pytest.raises(Unavailable):
        first.read(lambda tx: tx.one("SELECT 1"))
    again = open_database(place, Host())
    assert value(again, "k") == MAX
    assert again.read(lambda tx: tx.all("SELECT version FROM format")) == [(FORMAT,)]
    again.close()


def test_a_newer_format_is_refused_and_untouched(place: str) -> None:
    db = open_database(place, Host())
    db.write(lambda tx: tx.execute("UPDATE format SET version=?", (FORMAT + 1,)))
    db.close()
    for _ in range(2):
        with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}"):
            open_database(place, Host())


def test_a_database_of_format_6_gets_the_index_of_redirects(place: str) -> None:
    db = open_database(place, Host())

    def as_it_was(tx: Tx) -> None:
        tx.execute("DROP INDEX redirect_to")
        tx.execute("INSERT INTO redirect (session, ino, to_ino) VALUES (5,6,7)")
        tx.execute("UPDATE format SET version=6")

    db.write(as_it_was)
    db.close()
    again = open_database(place, Host())
    assert again.read(lambda tx: tx.all("SELECT version FROM format")) == [(FORMAT,)]
    assert again.read(lambda tx: tx.all("SELECT session, ino, to_ino FROM redirect")) == [(5, 6, 7)]
    again.write(lambda tx: tx.execute("DROP INDEX redirect_to"))  # it is there
    again.close()


def test_numbers_of_removed_rows_are_not_given_again(db: Database) -> None:
    def add(tx: Tx) -> int:
        row = tx.one("INSERT INTO pin (fs, seq, kind, ref) VALUES (1,1,'checkpoint','') RETURNING id")
        assert row is not None
        return int(row[0])

    first = db.write(add)
    db.write(lambda tx: tx.execute("DELETE FROM pin"))
    assert db.write(add) > first


def test_the_first_of_a_group_fails_alone(db: Database) -> None:
    """It has no savepoint: what it did is undone with the transaction, which goes on without it."""
    begun, queued = threading.Event(), threading.Event()

    def first(tx: Tx) -> None:
        put(tx, "first", 1)
        begun.set()
        assert queued.wait(60)
        raise Conflict("no")

    def others() -> None:
        assert begun.wait(60)
        running = [
            threading.Thread(target=lambda at=at: db.write(lambda tx: put(tx, f"k{at}", at))) for at in (1, 2)
        ]
        for thread in running:
            thread.start()
        queued.set()
        for thread in running:
            thread.join(60)

    behind = threading.Thread(target=others)
    behind.start()
    with pytest.raises(Conflict, match="no"):
        db.write(first)
    behind.join(60)
    assert (value(db, "k1"), value(db, "k2")) == (1, 2)
    assert value(db, "first") is None


def test_room_is_given_back_by_several_at_once(db: Database) -> None:
    """More than there are connections, so that some wait between two looks at what is left to do."""
    failed: list[Exception] = []

    def work() -> None:
        try:
            while db.give_back(1000):
                pass
        except (FsdError, LookupError) as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(DB_WRITERS_MAX + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads), failed


def test_room_is_given_back_beside_another_replica(postgres_server: PostgresServer) -> None:
    """Which is at a table just then: nobody waits for it, to be refused after half a minute."""
    url = postgres_server.fresh()
    db = open_database(url, Host())
    try:
        with psycopg.connect(url) as other:
            other.execute("LOCK TABLE blob IN SHARE UPDATE EXCLUSIVE MODE")
            began = time.monotonic()
            while db.give_back(1):
                pass
            assert time.monotonic() - began < DB_WAIT
    finally:
        db.close()


class Held(set[int]):
    """What a weak reference can be made to."""


def fails_alone(db: Database, held: Held) -> None:
    def refused(tx: Tx) -> None:
        raise Unavailable(f"{len(held)}")

    def not_there(tx: Tx) -> None:
        tx.execute(f"UPDATE nowhere SET x={len(held)}")

    for work, expected in ((refused, Unavailable), (not_there, InternalError)):
        with pytest.raises(expected):
            db.write(work)


def fails_behind_another(db: Database, held: Held) -> None:
    """In the transaction of one that waits until this one waits for it."""
    began, go = threading.Event(), threading.Event()

    def first(tx: Tx) -> int:
        began.set()
        assert go.wait(60)
        return put(tx, f"first{threading.get_ident()}", len(held))

    def second(tx: Tx) -> None:
        raise Unavailable(f"{len(held)}")

    leader = threading.Thread(target=db.write, args=(first,))
    leader.start()
    assert began.wait(60)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(Unavailable):
        db.write(second)
    leader.join(60)


@pytest.mark.parametrize("fail", [fails_alone, fails_behind_another])
def test_an_error_keeps_nothing_of_its_request(db: Database, fail: Callable[[Database, Held], None]) -> None:
    """Without the collector, which comes seldom to a server: a body of megabytes may hang on a request."""
    held = Held({1})
    kept = weakref.ref(held)
    gc.disable()
    try:
        fail(db, held)
        del held
        assert kept() is None
    finally:
        gc.enable()
