"""`Database`: the one interface to the server's facts, and `open_database`, which picks the engine.

SQL is written once, with `?` placeholders (see `fsd.meta.sql`). bytes columns come back as `bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fsd.host.seam import Host
from fsd.model.errors import UsageError

T = TypeVar("T")


class Room(NamedTuple):
    """`bytes` on the disk, of which `free_bytes` hold nothing and are used again (PostgreSQL knows only the
    first: 0)."""

    bytes: int
    free_bytes: int


class Tx(Protocol):
    """A transaction, valid only inside the function it was passed to and on that thread.

    After any method raised, the function must let the error out: on PostgreSQL nothing more can be done in
    the request.
    """

    def execute(self, sql: str, params: Sequence[object] = ()) -> int:
        """Run a statement that returns no rows; how many rows it touched."""
        ...

    def one(self, sql: str, params: Sequence[object] = ()) -> tuple[Any, ...] | None:
        """The first row, also of `… RETURNING`, or None."""
        ...

    def all(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...

    def many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        """Run a statement once for each of `rows`, in order; how many rows it touched in all."""
        ...

    def lock_fs(self, fs: int) -> None:
        """Hold filesystem `fs` against other commits, pins and sweeps until the transaction ends. Call it
        first. Costs nothing on SQLite, which has one writer."""
        ...

    def locked_fs(self, fs: int, columns: str) -> tuple[Any, ...] | None:
        """As `lock_fs`, and the `columns` of its row as they are under the lock; None: there is no such
        filesystem. One statement: on PostgreSQL each is a round trip."""
        ...


class Database(Protocol):
    """Blocking; every method may be called from any thread, but not from inside a running function."""

    engine: str  # "sqlite" | "postgresql"

    def write(self, fn: Callable[[Tx], T], *, frees: bool = False) -> T:
        """Run `fn` in a transaction that is durable when this returns; its value is returned. `frees`: it
        makes room, or is small and needed by who does (the server's start, a mount's session and signs of
        life, leases); on SQLite's full disk it may use what is kept back for that (`reserve`).

        Requests that wait are gathered into one transaction, each but the first behind a savepoint: an
        exception from `fn` undoes only its own work and is raised here. `fn` may run again after a failure
        that was not its own, and on another caller's thread: it must have no effect outside the transaction
        and its value. Raises
        `NoSpace`, `Unavailable`, `Conflict` (a unique key exists), `IntegrityError` (damaged) or
        `InternalError`; after `Unavailable` the transaction may have happened.
        """
        ...

    def check_room(self) -> None:
        """Before an object is written that a transaction is to name: raises `NoSpace` where that would be
        refused since only what makes room is taken, as the objects may lie on the same disk."""
        ...

    def read(self, fn: Callable[[Tx], T]) -> T:
        """Run `fn` on one consistent snapshot that has everything committed before; it must not write."""
        ...

    def room(self) -> Room:
        """What the database takes on its disk."""
        ...

    def give_back(self, pages: int) -> bool:
        """Return some room that is free inside the database to the disk; False: no more can be. Serving goes
        on, except once on a SQLite file made before fsd could do so in steps: then writes wait while all of
        it is written anew. Raises `NoSpace` when the disk has no room for that."""
        ...

    def close(self) -> None:
        """Wait for running requests, then let go of files, locks and connections. Later calls raise."""
        ...


def take_numbers(tx: Tx, name: str, count: int) -> int:
    """Reserve `count` numbers of counter `name` for good; the first one (counters start at 1)."""
    row = tx.one("UPDATE counter SET value=value+? WHERE name=? RETURNING value", (count, name))
    if row is None:
        tx.execute("INSERT INTO counter (name, value) VALUES (?, 0) ON CONFLICT DO NOTHING", (name,))
        row = tx.one("UPDATE counter SET value=value+? WHERE name=? RETURNING value", (count, name))
    assert row is not None, f"counter {name} was removed"
    return int(row[0]) - count + 1


def is_postgresql(url_or_dir: str) -> bool:
    return url_or_dir.startswith(("postgresql://", "postgres://"))


def check_url(url: str) -> str:
    """`url` if it is one of a database; raises `UsageError` that does not repeat it (it may hold a password).
    `open_database` would take anything else for a directory."""
    if not is_postgresql(url):
        raise UsageError(
            "the database is not given as postgresql://…",
            hint="leave it out for SQLite in the data directory",
        )
    return url


def open_database(url_or_dir: str | Path, host: Host) -> Database:
    """The database at a PostgreSQL URL, or SQLite's in a data directory (made when it does not exist).

    Creates or migrates the tables first. Raises `Busy` when another process uses the data directory,
    `FormatTooNew` when a newer fsd wrote it, `Unavailable` when PostgreSQL cannot be reached, `Unsupported`
    when psycopg is not installed.
    """
    text = str(url_or_dir)
    if is_postgresql(text):
        from fsd.meta.postgresql import open_postgresql

        return open_postgresql(text, host)
    from fsd.meta.sqlite import open_sqlite

    return open_sqlite(Path(text), host)
