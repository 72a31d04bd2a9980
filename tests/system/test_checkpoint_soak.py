"""Minutes of everything at once: writers flat out through mounts, and all that is done with checkpoints.

`FSD_TEST_SOAK=SECONDS` makes it longer.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cli import process
from support.postgres import PostgresServer
from support.server import Server
from support.soak import TABLES, Soak

from fsd.blobs.s3 import S3Options
from fsd.host.seam import Host
from fsd.meta.database import Database, check_url, open_database
from fsd.service.open import ServiceOptions, store_of

SECONDS = float(os.environ.get("FSD_TEST_SOAK", "180"))
pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(int(SECONDS * 10) + 1200)]


class Place:
    """Where a server keeps what it has, and how much there is."""

    def __init__(self, server: Server, database: str | None, blobs: str | None) -> None:
        self.server, self._database, self._blobs = server, database, blobs

    def _open(self) -> Database:
        return open_database(check_url(self._database) if self._database else self.server.data_dir, Host())

    def collected(self) -> bool:
        """Whether nothing is left of filesystems that were deleted; the server runs."""
        rows = self._left_over()
        assert rows is not None
        return int(rows[0]) == 0

    def _left_over(self) -> Any:
        sql = "SELECT count(*) FROM fs WHERE status<>'active'"
        if self._database:
            with psycopg.connect(self._database) as connection:
                return connection.execute(sql).fetchone()
        path = self.server.data_dir / "fsd.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchone()

    def held(self) -> dict[str, int]:
        """Rows by table, objects, and on SQLite bytes of the database's pages in use; of a stopped server."""
        database = self._open()
        try:
            found = {
                table: int(database.read(lambda tx, t=table: tx.one(f"SELECT count(*) FROM {t}"))[0])  # type: ignore[misc]
                for table in (*TABLES, "change", "applied", "gone", "moved", "redirect", "conflict", "fork")
            }
        finally:
            database.close()
        store = store_of(ServiceOptions(self.server.data_dir, self._database, self._blobs), Host())
        found["objects"] = len(list(store.list("packs/")))
        return found

    def audit(self) -> None:
        where = (
            ["--database", self._database] if self._database else ["--data-dir", str(self.server.data_dir)]
        )
        where += ["--blobs", self._blobs] if self._blobs else []
        told = process("audit", *where, "--read-data", timeout=300)
        assert told.code == 0, f"{told.text}\n{told.err}"


@pytest.fixture(params=["sqlite", "postgresql"])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Place]:
    """A server on SQLite and a directory, or on PostgreSQL and S3."""
    database = blobs = None
    if request.param == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres_server")
        bucket: S3Options = request.getfixturevalue("seaweed_bucket")
        database = postgres.fresh()
        keys = f"{bucket.access_key}:{bucket.secret_key}"
        blobs = f"s3://{keys}@{bucket.bucket}/{secrets.token_hex(6)}?endpoint={bucket.endpoint}"
    options = ["--test-clock", "--sweep-every", "2s"]
    options += ["--database", database] if database else []
    options += ["--blobs", blobs] if blobs else []
    server = Server(tmp_path / "server", *options)
    try:
        yield Place(server.start(), database, blobs)
    finally:
        server.end()


def test_nothing_that_a_checkpoint_shows_ever_changes(place: Place, tmp_path: Path, seed: int) -> None:
    place.server.create(display_name="another, that nobody touches")
    assert place.server.stop() == 0
    began = place.held()
    place.server.restart()
    soak = Soak(tmp_path / "soak", place.server, seed)
    try:
        soak.run(SECONDS)
        soak.finish()
        place.server.stop()
        place.audit()
        place.server.restart()
        soak.empty(place.collected)
    finally:
        print(soak.did, [writer.steps.count for writer in soak.writers])
        soak.close()
    place.server.stop()
    place.audit()
    left = place.held()
    # The filesystem itself is a root, and a row of the feed proves its head.
    assert {name: left[name] - began[name] for name in left} == {
        **dict.fromkeys(left, 0),
        "inode": 1,
        "change": 1,
    }
