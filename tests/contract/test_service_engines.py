"""The service's rules work the same on every pair of engines: nothing of SQLite grows in."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.daywork import work
from support.postgres import PostgresServer

from fsd.host.seam import Host
from fsd.service.audit import audit
from fsd.service.open import ServiceOptions, open_service


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_days_work_and_the_audit(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = None
    if engine == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh()
    service = open_service(ServiceOptions(tmp_path, database=url), Host())
    assert service.db.engine == engine
    fs = work(service)
    assert audit(service.db, fs) == []
    service.close()
