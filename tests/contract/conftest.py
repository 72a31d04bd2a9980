"""Fixtures: the real service on each engine, with a filesystem of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench
from support.postgres import database_of

from fsd.host.seam import Host
from fsd.meta.database import Database, open_database
from fsd.service.access import FsRef
from fsd.service.audit import audit


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp(request.param), database=database_of(request)) as made:
        yield made


@pytest.fixture
def bench(service: Bench) -> Iterator[Bench]:
    """A filesystem of its own for each test; the invariants hold after it."""
    service.new_fs()
    yield service
    service.audit()


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """An empty database, SQLite. To be looked at: the module's tests share it."""
    made = open_database(tmp_path_factory.mktemp("db"), Host())
    yield made
    made.close()


@pytest.fixture
def all_audited(bench: Bench) -> Iterator[None]:
    """Every filesystem of the test passes the audit, not the bench's last one alone."""
    first = bench.fs
    yield
    rows = bench.service.db.read(
        lambda tx: tx.all("SELECT id, name FROM fs WHERE status='active' AND id>=?", (first.id,))
    )
    for row in rows:
        found = audit(bench.service.db, FsRef(*row))
        assert not found, (row, found)
