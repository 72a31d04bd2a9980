"""Fixtures: the real service on each engine, with a filesystem of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bench import Bench
from support.postgres import database_of

from fsd.host.seam import Host
from fsd.meta.database import Database, open_database


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


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """An empty database of the test's own, SQLite."""
    made = open_database(tmp_path, Host())
    yield made
    made.close()
