"""`fsd serve` on PostgreSQL and S3, as real processes: the same answers, kill -9, and two of them at once."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.server import Server, clean_env

from fsd.blobs.s3 import S3Options
from fsd.model.limits import MIB


@pytest.fixture
def outside(postgres_server: PostgresServer, seaweed_bucket: S3Options) -> list[str]:
    """Options of a server that keeps nothing of its own."""
    keys = f"{seaweed_bucket.access_key}:{seaweed_bucket.secret_key}"
    prefix = secrets.token_hex(6)
    blobs = f"s3://{keys}@{seaweed_bucket.bucket}/{prefix}?endpoint={seaweed_bucket.endpoint}"
    return ["--database", postgres_server.fresh(), "--blobs", blobs]


@pytest.fixture
def servers(outside: list[str], tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers over one database and one bucket, with one admin key."""
    key = secrets.token_urlsafe(32)
    made = [Server(tmp_path / f"server{number}", *outside) for number in range(2)]
    for one in made:
        one.data_dir.mkdir()
        (one.data_dir / "admin.key").write_text(key + "\n")
        (one.data_dir / "admin.key").chmod(0o600)
    try:
        for one in made:
            one.start()
        yield made
    finally:
        for one in made:
            one.end()


def test_two_servers_are_one_service_and_one_may_die(servers: list[Server]) -> None:
    first, second = servers
    fs = first.create(display_name="outside")
    small, large = b"a few bytes", secrets.token_bytes(3 * MIB + 17)
    assert fs.ask("PUT", "/files/d/small?parents=1", small).status == 200
    assert fs.ask("PUT", "/files/d/large?parents=1", large).status == 200
    first.kill()
    there = replace(fs, server=second)
    assert there.ask("GET", "/files/d/small").body == small
    assert there.ask("GET", "/files/d/large").body == large
    assert there.ask("PUT", "/files/d/small", b"newer").status == 200
    first.restart()
    assert fs.ask("GET", "/files/d/small").body == b"newer"
    names = [entry["name"] for entry in fs.ask("GET", "/list/d").json["entries"]]
    assert names == ["large", "small"]


def test_a_server_whose_database_or_bucket_is_not_there_says_so(tmp_path: Path) -> None:
    for options in (
        ["--database", "postgresql://fsd:hidden@127.0.0.1:9/x"],
        ["--blobs", "s3://a:hidden@bucket/p?endpoint=http://127.0.0.1:9"],
    ):
        server = Server(tmp_path / "server", *options)
        done = subprocess.run(
            server.command(), env=clean_env(), timeout=60, check=False, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode == 1
        assert "127.0.0.1" in said
        assert "hidden" not in said
        assert "Traceback" not in said
