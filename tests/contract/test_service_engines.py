"""The service's rules work the same on every pair of engines: nothing of SQLite grows in."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from support.daywork import Mount, content_of, work
from support.postgres import PostgresServer

from fsd.host.seam import Host
from fsd.model import ops
from fsd.model.attrs import ROOT_INO
from fsd.service.audit import audit
from fsd.service.open import ServiceOptions, open_service
from fsd.service.retained import At
from fsd.wire.frame import make_blob
from fsd.wire.messages import LIST, TREE


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
    # Trees, of what is live and of what is kept: the directories of an answer are counted first.
    seq, (live,) = service.namespace.ask(fs, [(TREE, ROOT_INO, 1000)])
    assert live
    _, (kept,) = service.namespace.ask(fs, [(TREE, ROOT_INO, 1000)], At(seq=seq))
    assert [directory for directory, _ in kept] == [directory for directory, _ in live]
    service.close()


def test_two_servers_of_one_postgresql_commit_to_one_filesystem(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """Replicas: each mount talks to one of them, all write into one directory, and nothing is lost."""
    options = ServiceOptions(tmp_path, database=postgres_server.fresh())
    services = [open_service(options, Host()) for _ in range(2)]
    services[0].tokens.announce({"r1": "http://127.0.0.1:1"}, b"m" * 32)
    made = services[0].db.write(lambda tx: services[0].filesystems.create(tx, "shared", []))
    fs = services[1].filesystems.get(made["file_system_id"])
    mounts = [Mount(services[number % 2], fs, f"m{number}") for number in range(6)]
    blob = make_blob(b"the same in all")  # one row that every commit counts up
    files, failed = 15, []

    def run(mount: Mount, number: int) -> None:
        try:
            for turn in range(files):
                ino = mount.ino()
                create = mount.create(ROOT_INO, f"{number}.{turn}".encode(), ino, stat.S_IFREG | 0o644)
                content = ops.Content(
                    mount.op(), ops.CONTENT, ino, 0, blob.raw_len, content_of([blob]), True, None, 1, 1
                )
                mount.commit([create, content], [blob])
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=run, args=(mount, number)) for number, mount in enumerate(mounts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    for service in services:
        seq, [(entries, more)] = service.namespace.ask(fs, [(LIST, ROOT_INO, b"", 1000)])
        assert len(entries) == len(mounts) * files
        assert not more
        assert seq == len(mounts) * files
        assert audit(service.db, fs) == []
        service.close()
