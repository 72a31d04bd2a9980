"""`fsd serve` on PostgreSQL and S3, as real processes: the same answers, kill -9, and two of them at once."""

from __future__ import annotations

import io
import secrets
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.server import Server, clean_env

from fsd.blobs.s3 import S3Options
from fsd.model.limits import MIB
from fsd.wire.messages import read_feed


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


def test_a_key_is_kept_for_a_path_of_any_length(servers: list[Server]) -> None:
    """PostgreSQL has no room for it in an index: the answer was that the disk is full."""
    fs = servers[0].create()
    headers = {"Idempotency-Key": "k"}
    for cid in (secrets.token_hex(8), secrets.token_hex(4000)):
        assert fs.ask("DELETE", f"/checkpoints/{cid}", headers=headers).code == "not_found"


def test_checkpoints_of_one_server_are_those_of_the_other(servers: list[Server]) -> None:
    """A mount that polls one replica is asked for a barrier by the other; export and restore through S3."""
    first, second = servers
    fs = first.create()
    there = replace(fs, server=second)
    content = secrets.token_bytes(2 * MIB + 5)
    assert fs.ask("PUT", "/files/a", content).status == 200
    session = there.ask("POST", "/sessions", {"mount_id": "m", "host": "box", "path": "/m"}).json["session"]
    with ThreadPoolExecutor(2) as pool:
        polled = pool.submit(there.ask, "GET", f"/changes?after=1&session={session}&asked=0&wait=20")
        making = pool.submit(fs.ask, "POST", "/checkpoints", {"drain": {"timeout": 20}, "require_all": True})
        (ask,) = read_feed(polled.result(30).body).asks
        answer = {"ask": ask.id, "included": True, "fs_seq": 1}
        assert there.ask("POST", f"/sessions/{session}/barrier", answer).status == 200
        made = making.result(30)
    assert made.status == 201, made.body
    name = made.json["checkpoint_id"]
    assert there.ask("PUT", "/files/a", b"later").status == 200
    assert there.ask("GET", f"/files/a?checkpoint={name}").body == content
    with tarfile.open(fileobj=io.BytesIO(there.ask("GET", f"/export/?checkpoint={name}").body)) as tar:
        assert tar.extractfile("./a").read() == content  # type: ignore[union-attr]
    assert there.ask("POST", "/restore", {"checkpoint": name, "own_sessions": [session]}).status == 200
    assert fs.ask("GET", "/files/a").body == content


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
