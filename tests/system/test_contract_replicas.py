"""Two servers over one PostgreSQL are one checkpoint store: leases, heads and counts hold across them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.contract import Json, Refused, Store, audit_stopped, checkpoint, file, key, key_for, writer
from support.postgres import PostgresServer
from support.server import Server


@pytest.fixture(scope="module")
def servers(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Both; in the end every filesystem is audited."""
    url, admin, directory = postgres_server.fresh(), secrets.token_urlsafe(32), tmp_path_factory.mktemp("two")
    made = [
        Server(directory / f"server{number}", "--database", url, "--blobs", str(directory / "blobs"))
        for number in range(2)
    ]
    try:
        for one in made:
            one.data_dir.mkdir()
            (one.data_dir / "admin.key").write_text(admin + "\n")
            (one.data_dir / "admin.key").chmod(0o600)
            one.start()
        yield made
        for one in made:
            one.stop()
        assert audit_stopped(made[0], url) == []
    finally:
        for one in made:
            one.end()


@pytest.fixture
def stores(servers: list[Server]) -> Iterator[list[Store]]:
    """A filesystem of the test's own, seen through either server."""
    first = Store(servers[0], lease_duration_ms=60_000, renew_after_ms=30_000)
    second = Store(servers[1], replace(first.fs, server=servers[1]))
    first.now = second.now = None
    yield [first, second]
    first.close()
    second.close()


def beside(stores: list[Store], *works: object) -> None:
    """Each work (a callable of a store) on a thread, every other one on the other server."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        mine = stores[number % 2].again()
        try:
            works[number](mine)  # type: ignore[operator]
        except BaseException as exc:
            failed.append(exc)
            raise
        finally:
            mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failed


def test_a_lease_of_one_server_holds_at_the_other(stores: list[Store]) -> None:
    first, second = stores
    lease = first.acquire()
    with pytest.raises(Refused, match="WRITER_CONFLICT"):
        second.acquire()
    second.append(checkpoint("a"), None, lease)
    assert first.head() == "a"
    first.release(writer(lease))
    with pytest.raises(Refused, match="WRITER_LOST"):
        second.append(checkpoint("b", parent="a"), "a", lease)
    assert second.acquire()["fence"] == lease["fence"] + 1


def test_acquires_and_appends_race_over_both(stores: list[Store]) -> None:
    won: list[Json] = []

    def acquire(store: Store) -> None:
        try:
            won.append(store.acquire())
        except Refused as exc:
            if exc.code != "WRITER_CONFLICT":
                raise

    beside(stores, *[acquire] * 6)
    assert len(won) == 1
    found: list[str] = []

    def append(number: int, store: Store) -> None:
        for turn in range(5):
            head, name = store.head(), f"{number}.{turn}"
            try:
                store.append(checkpoint(name, parent=head, files=[file("x")]), head, won[0])
                found.append(name)
            except Refused as exc:
                if exc.code != "STALE_HEAD":
                    raise

    beside(stores, *[lambda store, n=n: append(n, store) for n in range(4)])
    for store in stores:
        assert sorted(store.ids()) == sorted(found)
        assert store.counts() == {key("x"): len(found)}


def test_puts_and_sweeps_race_over_both(stores: list[Store]) -> None:
    contents = [b"%d" % number * 40_000 for number in range(3)]

    def put(store: Store) -> None:
        for data in contents * 4:
            store.put(data)

    def sweep(store: Store) -> None:
        for _ in range(8):
            store.sweep(0)

    beside(stores, put, sweep, sweep, put)
    for data in contents:
        stores[0].put(data)
        assert stores[1].blob(key_for(data)) == data
