"""The SQLite engine: WAL, synchronous=FULL, one writer at a time with group commit, a pool of readers.

One process per data directory, by a lock on it. The writing connection belongs to whoever leads the group
commit; a reading connection to the thread that took it. Crash points: `db.commit`, `db.committed`.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from fsd.host.files import fsync_dir, lock_directory, make_dirs_durable
from fsd.host.seam import Host
from fsd.meta.database import Room, Tx
from fsd.meta.group import Ended, Gathering, GroupCommit, Request, settle
from fsd.meta.reserve import Reserve, give_up_to_open
from fsd.meta.schema import STATISTICS, migrate
from fsd.model.errors import Conflict, FsdError, IntegrityError, InternalError, NoSpace, Unavailable
from fsd.model.limits import DB_READERS_MAX, DB_WAIT, MIB

T = TypeVar("T")
log = logging.getLogger(__name__)

FILE: Final = "fsd.db"
TYPES: Final = {
    "KEY": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "BLOB": "BLOB",
    "TEXT": "TEXT",
    "KEYED": "WITHOUT ROWID",
    "HOT": "",
}
# The WAL is filled once to this size and then overwritten: a growing file makes the first seconds' commits
# slow (p90 3.4 ms against 0.6). Checkpoints begin well below it.
_WAL_FILL: Final = 8 * MIB
_FILL_ROOM: Final = 4 * _WAL_FILL  # free before it is filled: the database grows as much meanwhile
_CHECKPOINT_PAGES: Final = 1500
_CHECKPOINT_WAIT: Final = 1000  # ms: writes wait too
_INCREMENTAL: Final = 2  # PRAGMA auto_vacuum: free pages can be given back in steps


class SqliteTx:
    """`Tx` on one connection."""

    __slots__ = ("_conn",)

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn

    def execute(self, sql: str, params: Sequence[object] = ()) -> int:
        return self._conn.execute(sql, params).rowcount

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._conn.execute(sql, params).fetchone()
        return row

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return self._conn.execute(sql, params).fetchall()

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        return self._conn.executemany(sql, rows).rowcount if rows else 0

    def lock_fs(self, fs: int) -> None:
        return None

    def locked_fs(self, fs: int, columns: str) -> tuple[Any, ...] | None:
        return self.one(f"SELECT {columns} FROM fs WHERE id=?", (fs,))


class _TransactionLost(Exception):
    """SQLite ended the whole transaction under a request (disk full, I/O error)."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class SqliteDatabase:
    """`Database` over one file. Made by `open_sqlite`, which owns the order of the steps at start."""

    engine = "sqlite"

    def __init__(self, directory: Path, host: Host, lock: int, conn: sqlite3.Connection) -> None:
        self._directory = directory
        self._host = host
        self._lock = lock
        self._conn = conn
        self._group = GroupCommit(self._run, leaders=1, monotonic=host.monotonic)
        # None stands for a connection not yet opened. Last in, first out: the warmest cache is used again.
        self._readers: queue.LifoQueue[sqlite3.Connection | None] = queue.LifoQueue()
        for _ in range(DB_READERS_MAX):
            self._readers.put(None)
        self._closed = False
        self._reserve = Reserve(directory)

    def write(self, fn: Callable[[Tx], T], *, frees: bool = False) -> T:
        if not frees:
            self._reserve.check()
            return self._group.submit(fn)
        had = self._reserve.held
        try:
            return self._group.submit(fn)
        except NoSpace:
            if not had:
                raise
            self._reserve.give_up()
        return self._group.submit(fn)

    def check_room(self) -> None:
        self._reserve.check()

    def read(self, fn: Callable[[Tx], T]) -> T:
        try:
            conn = self._readers.get(timeout=DB_WAIT)
        except queue.Empty:
            raise Unavailable("all connections to the database are busy", hint="try again") from None
        try:
            if self._closed:
                raise Unavailable("the database is closed", hint="the server is stopping; try again")
            if conn is None:
                conn = _connect(self._directory / FILE)
                conn.execute("PRAGMA query_only=ON")
                conn.execute("PRAGMA cache_size=-4096")
            conn.execute("BEGIN")
            try:
                return fn(SqliteTx(conn))
            finally:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
        except sqlite3.Error as exc:
            raise self._translate(exc) from exc
        finally:
            self._readers.put(conn)

    def room(self) -> Room:
        return self.read(_room)

    def give_back(self, pages: int) -> bool:
        free = self.read(lambda tx: _pragma(tx, "freelist_count"))
        if not free:
            return False
        if self.read(lambda tx: _pragma(tx, "auto_vacuum")) != _INCREMENTAL:
            return self._rebuild()
        # One page a statement: the sqlite3 module steps a statement without columns once.
        self.write(
            lambda tx: [tx.execute("PRAGMA incremental_vacuum(1)") for _ in range(min(free, pages))],
            frees=True,
        )
        if free > pages:
            return True
        self._checkpoint()
        return False

    def _rebuild(self) -> bool:
        """Write the whole file anew, in the form that can give back room in steps from now on."""
        log.warning("writing %s anew to give back its room: writes wait meanwhile", self._directory / FILE)
        try:
            conn = _connect(self._directory / FILE)
            try:
                conn.execute("VACUUM")
            finally:
                conn.close()
        except sqlite3.Error as exc:
            raise self._translate(exc) from exc
        self._checkpoint()
        return False

    def _checkpoint(self) -> None:
        """Bring what the file, and a WAL that large changes made long, no longer need back to the disk. Where
        readers stand in the way for long, the next one does it."""
        try:
            conn = _connect(self._directory / FILE)
            try:
                conn.execute(f"PRAGMA busy_timeout={_CHECKPOINT_WAIT}")
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                _fill_wal(conn, self._directory)
            finally:
                conn.close()
        except sqlite3.Error as exc:
            raise self._translate(exc) from exc

    def close(self) -> None:
        self._group.close()
        self._closed = True
        for _ in range(DB_READERS_MAX):
            reader = self._readers.get()
            if reader is not None:
                reader.close()
        for _ in range(DB_READERS_MAX):  # who waits for one learns that there are none
            self._readers.put(None)
        self._conn.close()
        os.close(self._lock)

    def _run(self, gathering: Gathering) -> None:
        """One transaction for all; when it fails as a whole, one each, so that only the guilty one fails."""
        error = self._transaction(gathering)
        try:
            if error is None:
                return
            if len(gathering.taken) == 1:
                gathering.taken[0].fail(error)
                return
            for request in gathering.taken:
                error = self._transaction(Gathering(request, lambda: None))
                if error is not None:
                    request.fail(error)
        finally:
            del error

    def _transaction(self, gathering: Gathering) -> BaseException | None:
        """Run and settle a gathering; an error means that nothing of it happened and nothing is settled."""
        ended: Ended = []
        try:
            self._conn.execute("BEGIN IMMEDIATE")
            for request in gathering:
                ended.append((request, *(self._request(request) if ended else self._first(request))))
            self._host.crash_point("db.commit")
            self._conn.execute("COMMIT")
            self._host.crash_point("db.committed")
            settle(ended)
        except _TransactionLost as exc:
            self._abandon()
            return self._told(exc.cause)
        except sqlite3.Error as exc:
            self._abandon()
            return self._translate(exc)
        except BaseException:
            self._abandon()
            raise
        finally:
            ended.clear()
        return None

    def _first(self, request: Request) -> tuple[Any, BaseException | None]:
        """Nothing precedes it in the transaction, so that is what is rolled back: no savepoint, which costs a
        lone commit 10 us."""
        try:
            return request.fn(SqliteTx(self._conn)), None
        except Exception as exc:  # raised again on the caller's thread
            if not self._conn.in_transaction:
                raise _TransactionLost(exc) from exc
            self._conn.execute("ROLLBACK")
            self._conn.execute("BEGIN IMMEDIATE")
            return None, self._told(exc)

    def _request(self, request: Request) -> tuple[Any, BaseException | None]:
        """Behind others, whose work its failure must not undo."""
        self._conn.execute("SAVEPOINT request")
        try:
            value = request.fn(SqliteTx(self._conn))
        except Exception as exc:  # raised again on the caller's thread
            if not self._conn.in_transaction:
                raise _TransactionLost(exc) from exc
            self._conn.execute("ROLLBACK TO request")
            self._conn.execute("RELEASE request")
            return None, self._told(exc)
        self._conn.execute("RELEASE request")
        return value, None

    def _abandon(self) -> None:
        """Leave the writing connection without a transaction, whatever happened to it."""
        try:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
        except sqlite3.Error:
            log.exception("rolling back failed; the connection to %s is opened anew", self._directory)
            self._conn.close()
            self._conn = _connect(self._directory / FILE)

    def _told(self, error: BaseException) -> BaseException:
        return self._translate(error) if isinstance(error, sqlite3.Error) else error

    def _translate(self, exc: sqlite3.Error) -> FsdError:
        return translate(exc, self._directory)


def _pragma(tx: Tx, name: str) -> int:
    row = tx.one(f"PRAGMA {name}")
    assert row is not None, f"PRAGMA {name} gives a row"
    return int(row[0])


def _room(tx: Tx) -> Room:
    page = _pragma(tx, "page_size")
    return Room(_pragma(tx, "page_count") * page, _pragma(tx, "freelist_count") * page)


def translate(exc: sqlite3.Error, directory: Path) -> FsdError:
    """The error of the one tree that `exc` stands for; the caller raises it `from exc`."""
    made: FsdError
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _disk_is_full(directory)):
        made = NoSpace(f"the disk under {directory} is full", hint=f"free space under {directory}")
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        made = Unavailable(f"the database under {directory} is locked by another program", hint="try again")
    elif code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        made = Unavailable(
            f"the database under {directory} cannot be opened or written: {exc}",
            hint="check the directory's owner and permissions",
        )
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        made = IntegrityError(f"the database under {directory} is damaged: {exc}")
    elif code == sqlite3.SQLITE_CONSTRAINT:
        made = Conflict(f"a row with this key exists already: {exc}")
    else:
        made = InternalError(f"the database under {directory} failed: {exc}")
    made.__cause__ = exc
    return made


def _disk_is_full(directory: Path) -> bool:
    return _free(directory) < MIB


def _free(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _connect(path: Path) -> sqlite3.Connection:
    """A connection in WAL mode that waits for locks. Any thread may use it, one at a time."""
    conn = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=DB_WAIT
    )
    try:
        for pragma in (
            f"auto_vacuum={_INCREMENTAL}",  # of a new file; an old one changes with the next VACUUM
            "journal_mode=WAL",
            "synchronous=FULL",
            f"wal_autocheckpoint={_CHECKPOINT_PAGES}",
            "cache_size=-16384",
            "temp_store=MEMORY",
        ):
            conn.execute(f"PRAGMA {pragma}")
    except BaseException:
        conn.close()
        raise
    return conn


def open_sqlite(directory: Path, host: Host) -> SqliteDatabase:
    """The database in `directory`, which is made if need be. Raises as `open_database` says."""
    try:
        make_dirs_durable(directory)
        lock = lock_directory(directory, "data directory")
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"the disk under {directory} is full") from exc
        raise Unavailable(
            f"the data directory {directory} cannot be used: {exc.strerror}",
            hint="check path and permissions",
        ) from exc
    try:
        try:
            conn = _prepared(directory)
        except NoSpace:
            # To be read, too, a database needs some room beside it.
            if not give_up_to_open(directory):
                raise
            conn = _prepared(directory)
        try:
            fsync_dir(directory)
            return SqliteDatabase(directory, host, lock, conn)
        except BaseException:
            conn.close()
            raise
    except BaseException:
        os.close(lock)
        raise


def _prepared(directory: Path) -> sqlite3.Connection:
    """The writing connection, of a database that is as this version wants it."""
    conn = None
    try:
        os.close(os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        conn = _connect(directory / FILE)
        _migrate(conn, directory)
        _write_statistics(conn)
        _fill_wal(conn, directory)
        return conn
    except BaseException as exc:
        if conn is not None:
            conn.close()
        if isinstance(exc, sqlite3.Error):
            raise translate(exc, directory) from exc
        raise


def _migrate(conn: sqlite3.Connection, directory: Path) -> None:
    conn.execute("BEGIN IMMEDIATE")
    try:
        migrate(SqliteTx(conn), TYPES, f"the data directory {directory}")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
    conn.execute("COMMIT")


def _write_statistics(conn: sqlite3.Connection) -> None:
    """Fixed `sqlite_stat1` rows: without any SQLite scans whole filesystems, with measured ones it learns
    that `fs` is useless. Written at each start in case somebody ran ANALYZE. Readers open afterwards."""
    have = {row[0] for row in conn.execute("SELECT name FROM sqlite_schema WHERE type='table'")}
    if "sqlite_stat1" not in have:
        conn.execute("ANALYZE sqlite_schema")  # makes the table, measures nothing of ours
    conn.execute("BEGIN IMMEDIATE")
    conn.execute("DELETE FROM sqlite_stat1")
    conn.executemany("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (?,?,?)", STATISTICS)
    if "sqlite_stat4" in have:
        conn.execute("DELETE FROM sqlite_stat4")
    conn.execute("COMMIT")
    conn.execute("ANALYZE sqlite_schema")  # loads the rows into this connection


def _fill_wal(conn: sqlite3.Connection, directory: Path) -> None:
    """Grow the WAL once, without waiting for the disk, and the database not at all. Where there is little
    room it is left alone: filled with what cannot be brought into the database, nothing could be written any
    more, no removal either. Whoever was killed or kept waiting in the middle left the table."""
    try:
        conn.execute("DROP TABLE IF EXISTS wal_fill")
        conn.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        if (directory / f"{FILE}-wal").stat().st_size < _WAL_FILL and _free(directory) >= _FILL_ROOM:
            pages = _pragma(SqliteTx(conn), "page_count")
            # No checkpoint without syncing: it would bring in what others have committed since, and their
            # next commit would write over the only durable copy of that.
            conn.execute("PRAGMA wal_autocheckpoint=0")
            conn.execute("PRAGMA synchronous=OFF")
            conn.execute("BEGIN IMMEDIATE")
            conn.execute("CREATE TABLE wal_fill (zeros BLOB)")
            conn.execute("INSERT INTO wal_fill VALUES (zeroblob(?))", (_WAL_FILL,))
            conn.execute("COMMIT")
            _restore_syncing(conn)
            # Else what follows would lie behind it and make it twice as long.
            conn.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            conn.execute("DROP TABLE wal_fill")
            # The pages it lay in go from the file's end again; a script is stepped to its end.
            grown = _pragma(SqliteTx(conn), "page_count") - pages
            conn.executescript(f"PRAGMA incremental_vacuum({max(grown, 1)})")
            conn.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    except sqlite3.Error as exc:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        error = translate(exc, directory)
        if not isinstance(error, NoSpace):
            raise error from exc
        log.warning("%s; the server starts, to read and to make room", error.message)
    finally:
        _restore_syncing(conn)


def _restore_syncing(conn: sqlite3.Connection) -> None:
    conn.execute("PRAGMA synchronous=FULL")
    conn.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
