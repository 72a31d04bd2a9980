"""`fsd serve` on PostgreSQL and an S3 store: what the embedded default grows into, and its outages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.seaweed import SeaweedServer
from support.server import Reply, Server, TestFs
from support.wait import wait_for

from fsd.blobs.s3 import S3Options


@pytest.fixture
def outgrown(
    tmp_path: Path,
    postgres_server: PostgresServer,
    seaweed_server: SeaweedServer,
    seaweed_bucket: S3Options,
) -> Iterator[Server]:
    blobs = f"s3://{seaweed_bucket.bucket}/{tmp_path.name}?endpoint={seaweed_server.endpoint}"
    keys = {
        "AWS_ACCESS_KEY_ID": seaweed_server.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed_server.secret_key,
    }
    # As variables, where `ps` shows no password; other tests give flags.
    urls = {"FSD_DATABASE_URL": postgres_server.fresh(), "FSD_BLOBS_URL": blobs}
    made = Server(tmp_path / "s", env={**keys, **urls})
    try:
        yield made.start()
    finally:
        made.end()


def test_files_and_journals_on_postgresql_and_s3(outgrown: Server) -> None:
    fs = outgrown.create()
    data = os.urandom(3 << 20)
    assert fs.ask("PUT", "/files/a/b?parents=1", data).status == 200
    assert fs.ask("GET", "/files/a/b").body == data
    fs.ask("POST", "/journals", {"journal_id": "j"})
    assert fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]}).json["last_seq"] == 1
    outgrown.kill()
    outgrown.restart()
    assert fs.ask("GET", "/files/a/b").body == data
    assert fs.ask("GET", "/journals/j/verify").json["ok"]
    checks = fs.ask("GET", "/check").json
    assert checks["status"] == "ok", checks
    assert not (outgrown.data_dir / "fsd.db").exists() and not (outgrown.data_dir / "blobs").exists()
    assert outgrown.admin("DELETE", f"/v1/file-systems/{fs.id}").status == 200


def test_a_database_that_is_away_is_told_as_unavailable_and_comes_back(
    outgrown: Server, postgres_server: PostgresServer
) -> None:
    fs = outgrown.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    assert _append(fs).status == 200
    postgres_server.stop()
    try:
        for got in (outgrown.ask("GET", "/readyz"), _append(fs), fs.ask("GET", "/journals")):
            assert got.status == 503 and got.code == "unavailable" and got.json["error"]["retryable"]
            assert got.headers["retry-after"] == "1"
        assert outgrown.ask("GET", "/healthz").status == 200
    finally:
        postgres_server.start()
    wait_for(lambda: outgrown.ask("GET", "/readyz").status == 200, 30, "the database to be found again")
    assert wait_for(lambda: _append(fs), 30).json["last_seq"] == 2
    assert fs.ask("GET", "/journals/j/verify").json["entries"] == 2


def _append(fs: TestFs) -> Reply:
    return fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]})
