"""Bad days of the databases: full disk, damage, a second server, a server of PostgreSQL that dies."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import full_disk
from support.postgres import PostgresServer
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.meta.database import Tx, open_database
from fsd.model.errors import Busy, IntegrityError, NoSpace, Unavailable
from fsd.model.limits import MIB


def put(tx: Tx, name: str) -> int:
    return tx.execute("INSERT INTO counter (name, value) VALUES (?,1)", (name,))


def test_a_full_disk_is_told_and_nothing_is_half_done(tmp_path: Path) -> None:
    """In a mount namespace of its own, on a small disk in memory: see support/full_disk.py."""
    wrap = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*wrap, sys.executable, full_disk.__file__, str(tmp_path)],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["opened", "full", "starved", "alone", "again", "reopened"]


def test_a_second_server_on_a_data_directory_is_refused(tmp_path: Path) -> None:
    db = open_database(tmp_path, Host())
    code = (
        "import sys; from fsd.meta.database import open_database; from fsd.host.seam import Host\n"
        "from fsd.model.errors import Busy\n"
        "try: open_database(sys.argv[1], Host())\n"
        "except Busy as exc: print(exc.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=30, check=True, capture_output=True, text=True
    )
    assert f"pid {os.getpid()}" in done.stdout
    with pytest.raises(Busy):
        open_database(tmp_path, Host())
    assert db.write(lambda tx: put(tx, "still")) == 1
    db.close()
    open_database(tmp_path, Host()).close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but a text file\n" * 100, b"SQLite format 3\0" + b"\xff" * 8000]
)
def test_a_damaged_database_file_is_told_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fsd.db").write_bytes(content)
    with pytest.raises(IntegrityError, match=str(tmp_path)):
        open_database(tmp_path, Host())
    assert (tmp_path / "fsd.db").read_bytes() == content


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(Unavailable, match="data directory"):
        open_database(tmp_path / "f", Host())
    with pytest.raises(Unavailable, match="data directory"):
        open_database(tmp_path / "f" / "below", Host())


def test_a_request_that_takes_the_transaction_along_fails_alone(tmp_path: Path) -> None:
    """A full database ends SQLite's whole transaction; the others of the group are run again."""
    db = open_database(tmp_path, Host())
    pages = db.read(lambda tx: tx.one("PRAGMA page_count"))
    assert pages is not None
    db.write(lambda tx: tx.execute("CREATE TABLE big (data BLOB)"))
    db.write(lambda tx: tx.one(f"PRAGMA max_page_count={pages[0] + 5}"))
    go, inside = threading.Event(), threading.Event()
    errors: dict[str, BaseException] = {}

    def hold(tx: Tx) -> None:
        inside.set()
        assert go.wait(60)

    def small(tx: Tx) -> None:
        put(tx, threading.current_thread().name)

    def huge(tx: Tx) -> None:
        tx.execute("INSERT INTO big VALUES (zeroblob(64000000))")

    def work(name: str, fn: object) -> None:
        try:
            db.write(fn)  # type: ignore[arg-type]
        except NoSpace as exc:
            errors[name] = exc

    threads = [threading.Thread(target=work, args=("hold", hold))]
    threads[0].start()
    assert inside.wait(60)
    for name, fn in (("a", put_named("a")), ("huge", huge), ("b", put_named("b"))):
        threads.append(threading.Thread(target=work, args=(name, fn)))
        threads[-1].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert set(errors) == {"huge"}
    names = {row[0] for row in db.read(lambda tx: tx.all("SELECT name FROM counter"))}
    assert {"a", "b"} <= names
    assert db.read(lambda tx: tx.one("SELECT count(*) FROM big")) == (0,)
    db.close()


def put_named(name: str) -> object:
    return lambda tx: put(tx, name)


def test_statistics_are_ours_again_after_somebody_ran_analyze(tmp_path: Path) -> None:
    db = open_database(tmp_path, Host())
    ours = db.read(lambda tx: tx.all("SELECT tbl, idx, stat FROM sqlite_stat1 ORDER BY tbl, idx"))
    db.write(lambda tx: put(tx, "row"))
    db.close()
    with sqlite3.connect(tmp_path / "fsd.db") as conn:
        conn.execute("ANALYZE")
    conn.close()
    db = open_database(tmp_path, Host())
    assert db.read(lambda tx: tx.all("SELECT tbl, idx, stat FROM sqlite_stat1 ORDER BY tbl, idx")) == ours
    db.close()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server that may be killed without disturbing other tests."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


def test_postgresql_dies_and_comes_back(own_postgres: PostgresServer) -> None:
    """Writers go on through a crash of the server: what was acknowledged is there, once."""
    db = open_database(own_postgres.fresh(), Host())
    stop, crashed = threading.Event(), threading.Event()
    acknowledged: list[str] = []
    refused = 0

    def work(number: int) -> None:
        nonlocal refused
        turn = 0
        while not stop.is_set():
            name = f"{number}.{turn}"
            turn += 1
            try:
                db.write(lambda tx, name=name: put(tx, name))
                acknowledged.append(name)
            except Unavailable:
                refused += 1
                crashed.wait(60)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(acknowledged) > 40, 30, "writes")
    own_postgres.stop()
    with pytest.raises(Unavailable, match="PostgreSQL at 127"):
        db.read(lambda tx: tx.one("SELECT 1"))
    wait_for(lambda: refused, 60, "a write to be refused")
    own_postgres.start()
    crashed.set()
    before = len(acknowledged)
    wait_for(lambda: len(acknowledged) > before + 40, 30, "writes after the crash")
    stop.set()
    for thread in threads:
        thread.join(60)
    names = [row[0] for row in db.read(lambda tx: tx.all("SELECT name FROM counter WHERE name<>'pack'"))]
    assert len(names) == len(set(names))
    assert set(acknowledged) <= set(names)
    db.close()


def test_connections_that_postgresql_ended_are_replaced_unseen(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh()
    db = open_database(url, Host())
    db.write(lambda tx: put(tx, "a"))
    db.read(lambda tx: tx.one("SELECT 1"))
    with psycopg.connect(url, autocommit=True) as conn:
        ended = conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname=current_database()"
            " AND pid<>pg_backend_pid()"
        ).fetchall()
    assert len(ended) >= 2
    assert db.write(lambda tx: put(tx, "b")) == 1
    assert db.read(lambda tx: tx.one("SELECT count(*) FROM counter WHERE name IN ('a','b')")) == (2,)
    db.close()


def test_deadlocks_are_run_again(postgres_server: PostgresServer) -> None:
    db = open_database(postgres_server.fresh(), Host())
    db.write(lambda tx: tx.many("INSERT INTO counter VALUES (?,0)", [("x",), ("y",)]))
    met = threading.Barrier(2)
    runs: list[str] = []

    def cross(first: str, second: str) -> None:
        def work(tx: Tx) -> None:
            runs.append(first)
            tx.execute("UPDATE counter SET value=value+1 WHERE name=?", (first,))
            if len(runs) <= 2:
                met.wait(60)
            tx.execute("UPDATE counter SET value=value+1 WHERE name=?", (second,))

        db.write(work)

    threads = [threading.Thread(target=cross, args=names) for names in (("x", "y"), ("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # Who was ended may have its first row again before the other goes on: then they meet once more.
    assert len(runs) >= 3, "there was no deadlock"
    rows = db.read(lambda tx: tx.all("SELECT value FROM counter WHERE name IN ('x','y')"))
    assert rows == [(2,), (2,)]
    db.close()


def test_postgresql_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        open_database("postgresql://fsd:hidden@127.0.0.1:9/x", Host())
    assert "hidden" not in caught.value.message + caught.value.hint


def test_what_was_killed_while_it_made_the_wal_opens(tmp_path: Path) -> None:
    """Between the table of zeros and its removal: its creator is gone, or was refused the lock in between."""
    open_database(tmp_path, Host()).close()

    def leave() -> None:
        with closing(sqlite3.connect(tmp_path / "fsd.db", isolation_level=None)) as other:
            for name in ("wal_fill", "free_room"):
                other.execute(f"CREATE TABLE {name} (zeros BLOB)")
                other.execute(f"INSERT INTO {name} VALUES (zeroblob(100000))")
            other.execute("DROP TABLE free_room")

    leave()
    database = open_database(tmp_path, Host())
    try:
        leave()
        while database.give_back(100):
            pass
        names = database.read(lambda tx: tx.all("SELECT name FROM sqlite_master WHERE name='wal_fill'"))
        assert names == []
    finally:
        database.close()


def test_nothing_is_brought_into_the_database_without_syncing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the WAL is filled, which is not synced, no checkpoint may run: what others have committed in
    between would lie in the database unsynced, and their next commit over its only durable copy."""
    seen: list[tuple[int, int]] = []
    real = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                seen.append(settings(super().execute))
            return super().execute(sql, *parameters)

    def settings(ask: Callable[[str], sqlite3.Cursor]) -> tuple[int, int]:
        return tuple(ask(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "wal_autocheckpoint"))

    monkeypatch.setattr(sqlite3, "connect", lambda *given, **more: real(*given, factory=Watched, **more))
    db = open_database(tmp_path, Host())
    try:
        db.write(lambda tx: put(tx, "k"))
        assert (0, 0) in seen, "the WAL was not filled"
        assert all(every == 0 for synced, every in seen if not synced), seen
        assert seen[-1] == (2, 1500)
        assert 8 * MIB <= (tmp_path / "fsd.db-wal").stat().st_size < 9 * MIB
        assert (tmp_path / "fsd.db").stat().st_size < MIB
    finally:
        db.close()


def test_a_copy_of_a_data_directory_opens(tmp_path: Path) -> None:
    """The database's files alone are the state: a copy taken while it was closed is complete."""
    db = open_database(tmp_path / "a", Host())
    db.write(lambda tx: put(tx, "k"))
    db.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = open_database(tmp_path / "b", Host())
    assert copy.read(lambda tx: tx.one("SELECT count(*) FROM counter WHERE name='k'")) == (1,)
    copy.close()
