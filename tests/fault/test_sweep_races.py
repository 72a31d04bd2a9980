"""The sweep beside uploads, commits, kept states, reads, other sweeps: nothing lost, all room comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.churn import Churn
from support.postgres import database_of
from support.sweeping import SweepBench

from fsd.blobs.s3 import S3Options, S3Store
from fsd.host.seam import Host
from fsd.meta.database import open_database
from fsd.service.open import Service, ServiceOptions, assemble, open_service
from fsd.service.retention import Retention

Place = tuple[SweepBench, list[Service]]


@pytest.fixture(params=["sqlite", "postgresql", pytest.param("s3", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A bench and its replicas: one on SQLite, two on PostgreSQL, one on SQLite with an S3 bucket."""
    url = database_of(request)
    bench = SweepBench(tmp_path / "data", database=url)
    services = [bench.service]
    if request.param == "postgresql":
        services.append(open_service(ServiceOptions(tmp_path / "data", url), bench.host))
    if request.param == "s3":
        bench.service.close()
        options: S3Options = request.getfixturevalue("seaweed_bucket")
        store = S3Store(replace(options, prefix=f"{random.randbytes(6).hex()}/"), Host())
        db = open_database(tmp_path / "data", bench.host)
        bench.service = assemble(db, store, bench.host, Retention())
        services = [bench.service]
    for service in services:
        service.tokens.announce({"local": "http://127.0.0.1:1"}, b"k" * 32)
    yield bench, services
    bench.audit()
    for service in services:
        service.close()


def churn(place: Place, seed: int, seconds: float) -> Churn:
    bench, services = place
    work = Churn(bench, services, random.Random(seed))
    work.run(seconds)
    bench.audit()
    work.empty()
    assert work.swept["packs_damaged"] == 0
    for table in ("blob", "pack", "dropped", "pin"):
        assert bench.rows(table) == 0, f"rows are left in {table}"
    assert bench.objects() == {}
    print(f"{work.commits} commits, {work.resent} sent again, {work.compared} states, {work.forked} forks")
    print(work.swept)
    return work


def test_nothing_is_lost_while_all_goes_on(place: Place, seed: int) -> None:
    churn(place, seed, 1.0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_in_minutes(place: Place, seed: int) -> None:
    work = churn(place, seed, 120.0)
    assert work.swept["packs_rewritten"] and work.resent
