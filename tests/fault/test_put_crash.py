"""The server killed at each durable step of a direct write: the file is the old one or the complete new one,
and the same request again makes it the new one exactly once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.server import Server, TestFs
from support.wait import wait_for

from fsd.client.files import Files, PutOptions
from fsd.client.http import BytesBody, Http, HttpOptions
from fsd.client.identity import Claim, data_identity
from fsd.host.seam import Host
from fsd.model.errors import Unavailable
from fsd.service.audit import audit
from fsd.service.open import ServiceOptions, open_service

MIB = 1024 * 1024
OLD = random.Random(1).randbytes(2 * MIB + 1)


def connect(fs: TestFs) -> Files:
    return Files(Http(data_identity(Claim(token=fs.token)), Host(), HttpOptions(retry_for=0.0)))


def fresh_content(seed: int) -> bytes:
    """Two packs on the way and one at the end, none of it stored before."""
    return random.Random(seed + 2).randbytes(18 * MIB + 5)


def crashed_in_put(server: Server, fs: TestFs, point: str, count: int) -> bool:
    """Start the server so that it dies at that step, and append; whether it died there."""
    server.env = {"FSD_CRASH": f"{point}:{count}"}
    server.start()
    try:
        connect(fs).write(b"/f", BytesBody(fresh_content(count)), PutOptions(append=True), key="key")
    except Unavailable:
        assert server.process is not None
        wait_for(lambda: server.process and server.process.poll() is not None, 30, "the server to die")
        return True
    finally:
        server.end()
    return False


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *(("pack.written", 3), ("pack.synced", 2), ("pack.renamed", 1), ("pack.durable", 3)),
        *(("db.commit", 4), ("db.committed", 3)),
        *(
            pytest.param(point, count, marks=pytest.mark.long)
            for point, count in (
                ("pack.written", 1),
                ("pack.renamed", 3),
                ("db.commit", 2),
                ("db.committed", 5),
            )
        ),
    ],
)
def test_killed_at(point: str, count: int, tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    try:
        fs = server.start().create()
        connect(fs).write(b"/f", BytesBody(OLD), PutOptions())
        server.end()
        assert crashed_in_put(server, fs, point, count), "it did not die inside the request"
        server.env = {}
        server.start()
        files, more = connect(fs), fresh_content(count)
        assert b"".join(files.read(b"/f")) in (OLD, OLD + more)
        files.write(b"/f", BytesBody(more), PutOptions(append=True), key="key")
        assert b"".join(files.read(b"/f")) == OLD + more
    finally:
        server.end()
    service = open_service(ServiceOptions(server.data_dir), Host())
    assert audit(service.db, service.filesystems.get(fs.id)) == []
    service.close()
