"""The checkpoint contract as a host uses it: `Store` is one filesystem of a server with the test clock.

Fixtures: `contract_server`, one for each engine and run, and `store`, a filesystem of the test's own on it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsd.host.seam import Host
from fsd.meta.database import open_database
from fsd.service.access import FsRef
from fsd.service.audit import audit
from support.postgres import database_of
from support.server import Reply, Server, TestFs

Json = dict[str, Any]
NOW = 1_000
DURATION = 100
RENEW = 25


class Refused(Exception):
    """The server's error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status} {reply.body[:500]!r}")
        self.status = reply.status
        self.code: str = reply.code.removeprefix("SANDBOX_SNAPSHOT_")
        self.error: Json = reply.json["error"]


class Store:
    """Times are ms of the test clock in `now`; None: the server's own. One thread."""

    def __init__(self, server: Server, fs: TestFs | None = None, **terms: Any) -> None:
        self.server = server
        asked = terms or {"lease_duration_ms": DURATION, "renew_after_ms": RENEW}
        self.fs = fs or server.create(**asked)
        self.now: int | None = NOW
        self._connection: http.client.HTTPConnection | None = None

    def again(self) -> Store:
        """Another client of the same filesystem."""
        made = Store(self.server, self.fs)
        made.now = self.now
        return made

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request, on a connection that is kept."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        sent = {"Authorization": f"Bearer {self.fs.token}", **(headers or {})}
        if self.now is not None:
            sent["X-Fsd-Test-Now"] = str(self.now)
        try:
            self._connection.request(method, path, body, sent)
            got = self._connection.getresponse()
            return Reply(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def raw(self, op: str, body: bytes, **headers: str) -> Reply:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", f"/v1/checkpoints/{op}", body, sent)

    def call(self, op: str, body: Json, **headers: str) -> Any:
        """The result; raises `Refused`."""
        reply = self.raw(op, json.dumps(body).encode(), **headers)
        if reply.status >= 400:
            raise Refused(reply)
        return reply.json["result"]

    # -- methods -------------------------------------------------------------------------------------

    def acquire(self, thread: str = "t", **headers: str) -> Json:
        lease: Json = self.call("acquireWriter", {"threadId": thread}, **headers)
        return lease

    def append(self, record: Json, expected: str | None, lease: Json) -> Any:
        return self.call(
            "append", {"checkpoint": record, "expectedHeadId": expected, "writer": writer(lease)}
        )

    def grow(self, thread: str, *names: str, lease: Json | None = None, **fields: Any) -> Json:
        """Append `names` as a chain behind the head, releasing a lease of its own; the lease."""
        own = lease is None
        held = self.acquire(thread) if lease is None else lease
        head = self.head(thread)
        for name in names:
            self.append(checkpoint(name, thread, head, **fields), head, held)
            head = name
        if own:
            self.release(held)
        return held

    def get(self, name: str, **options: Any) -> Any:
        return self.call("get", {"id": name, **options})

    def list(self, thread: str = "t", **options: Any) -> Any:
        return self.call("list", {"threadId": thread, **options})

    def ids(self, thread: str = "t") -> Any:
        return [record["id"] for record in self.list(thread)]

    def head(self, thread: str = "t") -> Any:
        return self.call("getHead", {"threadId": thread})

    def delete_head(self, thread: str, name: str, lease: Json) -> Any:
        return self.call("deleteHead", {"threadId": thread, "checkpointId": name, "writer": writer(lease)})

    def prune(self, thread: str, keep: Any, lease: Json) -> Any:
        return self.call("deleteCheckpoints", {"threadId": thread, "keep": keep, "writer": writer(lease)})[
            "deleted"
        ]

    def renew(self, lease: Json) -> Any:
        return self.call("renew", {"writer": writer(lease)})

    def release(self, lease: Any) -> Any:
        return self.call("release", {"writer": lease})

    def fork(self, source: tuple[str, str], target: tuple[str, str], lease: Json, created: Any = 7) -> Any:
        """From (thread, id) to (thread, id)."""
        return self.call("forkFromCheckpoint", fork_body(source, target, lease, created))["checkpoint"]

    def counts(self) -> dict[str, int]:
        """Key → references; the order of the answer is checked."""
        rows = self.call("listBlobReferences", {})
        keys = [row["key"] for row in rows]
        assert keys == sorted(keys, key=str.encode), "in order of bytes"
        return {row["key"]: row["references"] for row in rows}

    def load(self, thread: str) -> Any:
        return self.call("loadThread", {"threadId": thread})

    def save(self, thread: str, messages: Any) -> Any:
        return self.call("saveThread", {"threadId": thread, "messages": messages})

    # -- blobs ---------------------------------------------------------------------------------------

    def put(self, data: bytes, kind: str = "files") -> str:
        """Upload; the key."""
        key = key_for(data, kind)
        reply = self.ask("PUT", f"/v1/blobs/{key}", data)
        assert reply.status in (200, 201), reply.body
        return key

    def blob(self, key: str) -> bytes | None:
        reply = self.ask("GET", f"/v1/blobs/{key}")
        assert reply.status in (200, 404), reply.body
        return reply.body if reply.status == 200 else None

    def has(self, key: str) -> bool:
        return self.ask("HEAD", f"/v1/blobs/{key}").status == 200

    def blobs(self, prefix: str = "") -> Any:
        """All, page by page."""
        found, cursor = [], ""
        while True:
            page = self.ask("GET", f"/v1/blobs?prefix={prefix}&cursor={cursor}&limit=3").json
            found += page["blobs"]
            if page["cursor"] is None:
                return found
            cursor = page["cursor"]

    def sweep(self, older: Any = 0) -> Any:
        return self.call("sweep", {"olderThanMs": older})["deleted"]

    def state(self, *threads: str) -> Json:
        """All that a refused write must not change."""
        return {
            "counts": self.counts(),
            **{thread: (self.list(thread), self.head(thread), self.load(thread)) for thread in threads},
        }


def writer(lease: Any) -> Any:
    """The three fields a host sends."""
    return {name: lease[name] for name in ("threadId", "ownerToken", "fence")}


def fork_body(source: tuple[str, str], target: tuple[str, str], lease: Any, created: Any = 7) -> Json:
    return {
        "sourceThreadId": source[0],
        "sourceCheckpointId": source[1],
        "destinationThreadId": target[0],
        "destinationCheckpointId": target[1],
        "createdAt": created,
        "writer": writer(lease),
    }


def key(mark: str, kind: str = "files") -> str:
    """A good key, for which nothing need be stored."""
    return f"sandbox-{kind}/sha256/{hashlib.sha256(mark.encode()).hexdigest()}"


def key_for(data: bytes, kind: str = "files") -> str:
    return f"sandbox-{kind}/sha256/{hashlib.sha256(data).hexdigest()}"


def file(path: str, blob: str | None = None, **more: Any) -> Json:
    return {"path": path, "kind": "file", "blobKey": blob or key(path), "size": 3, **more}


def artifact(name: str, blob: str | None = None, **more: Any) -> Json:
    made = {"artifactId": name, "name": f"{name}.png", "mimeType": "image/png", "size": 9, "createdAt": 5}
    return {**made, "blobKey": blob or key(name, "artifacts"), **more}


def checkpoint(name: Any, thread: Any = "t", parent: Any = None, **fields: Any) -> Json:
    made = {
        "id": name,
        "threadId": thread,
        "parentCheckpointId": parent,
        "createdAt": 10,
        "reason": "automatic",
        "files": [],
        "conversation": [{"role": "user", "content": f"what led to {name!r}"}],
        "artifacts": [],
    }
    return {**made, **fields}


def audit_stopped(server: Server, url: str | None) -> list[Any]:
    """Findings over every filesystem of a stopped server; at least one is looked at."""
    where: str | Path = url or server.data_dir
    database = open_database(where, Host())
    try:
        rows = database.read(lambda tx: tx.all("SELECT id, name FROM fs WHERE status = 'active' ORDER BY id"))
        assert rows, "nothing to audit"
        return [(name, one) for number, name in rows for one in audit(database, FsRef(number, name))]
    finally:
        database.close()


def refused(code: str, call: Callable[[], Any]) -> Refused:
    """The error of a call that must fail with `code`."""
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code == code, caught.value.error
    assert caught.value.error["message"]
    return caught.value


def unchanged(store: Store, code: str, call: Callable[[], Any], *threads: str) -> Refused:
    """As `refused`, and nothing is another than before."""
    before = store.state(*(threads or ("t",)))
    error = refused(code, call)
    assert store.state(*(threads or ("t",))) == before
    return error


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def contract_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with the test clock; in the end every filesystem on it is audited."""
    url = database_of(request)
    options = ["--database", url] if url else []
    made = Server(tmp_path_factory.mktemp(f"contract-{request.param}"), "--test-clock", *options)
    try:
        yield made.start()
        made.stop()
        assert audit_stopped(made, url) == []
    finally:
        made.end()


@pytest.fixture
def store(contract_server: Server) -> Iterator[Store]:
    made = Store(contract_server)
    yield made
    made.close()
