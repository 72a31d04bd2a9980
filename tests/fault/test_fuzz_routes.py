"""Malformed requests to every route: each is answered in time, in the one error body, never with a defect
of the server's; and what was stored before is there afterwards, and the filesystem passes its audit."""

from __future__ import annotations

import base64
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import process
from support.fuzz import Fuzz, Made
from support.postgres import database_of
from support.server import Server, TestFs

from fsd.wire.messages import read_answer

ANSWER = 20.0  # seconds; a hang is a failure
CANARY = b"what was there before"
NEVER = ("/v1/file-systems/{id}", "DELETE")  # it would end the run


@pytest.fixture(params=["sqlite", "postgresql"])
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    url = database_of(request)
    options = ["--database", url] if url else []
    made = Server(tmp_path / "victim", *options)
    try:
        yield made.start()
    finally:
        made.end()


class Attack:
    """A filesystem with something to lose, and a fuzzer that knows its way around it."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.fs = server, server.create()
        fs = self.fs
        assert fs.ask("PUT", "/files/canary/file?parents=1", CANARY).status == 200
        assert fs.ask("PUT", "/files/keep/one?parents=1", b"1").status == 200
        assert (
            fs.ask("POST", "/actions", {"action": "symlink", "target": "loop", "path": "/loop"}).status == 200
        )
        assert fs.ask("POST", "/journals", {"journal_id": "canary"}).status == 201
        entry = {"entries": [{"type": "t", "step": "kept"}]}
        assert fs.ask("POST", "/journals/canary/entries", entry).status == 200
        assert fs.ask("POST", "/journals", {"journal_id": "j"}).status == 201
        token = server.admin("POST", f"/v1/file-systems/{fs.id}/tokens", {}).json["token_id"]
        document = server.ask("GET", "/openapi.json").json
        known = {"id": fs.id, "tid": token, "jid": "j", **self.session()}
        self.fuzz = Fuzz(seed, document, known)
        self.key = server.admin_key
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []

    def session(self) -> dict[str, str]:
        made = self.fs.ask("POST", "/sessions", {"mount_id": "fuzz"}).json
        return {"n": str(made["session"]), "ticket": made["ticket"]}

    def run(self, rounds: int) -> None:
        connection = self.connect()
        for _ in range(rounds):
            for route in self.fuzz.routes:
                if (route[1], route[0]) == NEVER:
                    continue
                made = self.fuzz.request(route)
                try:
                    status, body = self.ask(connection, made)
                except (OSError, http.client.HTTPException) as exc:
                    self.wrong.append(f"{exc!r} for {shown(made)}")
                    status, body = 0, b""
                if status in (0, 400, 413):
                    connection.close()
                    connection = self.connect()
                self.statuses[route[1], status] += 1
                self.judge(route[1], made, status, body)
        connection.close()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=ANSWER)

    def ask(self, connection: http.client.HTTPConnection, made: Made) -> tuple[int, bytes]:
        secret = self.key if made.admin else self.fs.token
        headers = {"Authorization": f"Bearer {secret}", **made.headers}
        connection.request(made.method, made.path, made.body, headers)
        got = connection.getresponse()
        return got.status, got.read()

    def judge(self, template: str, made: Made, status: int, body: bytes) -> None:
        if template.endswith("/commits") and status == 200:
            self.applied(read_answer(body))
        if 0 < status < 400 or (made.method == "HEAD" and 0 < status < 500):
            return
        try:
            error = json.loads(body)["error"]
            fine = status < 500 and error["code"] != "internal" and error["message"]
            fine = fine and {"hint", "retryable", "request_id"} <= set(error)
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            self.wrong.append(f"{status} {body[:300]!r} for {shown(made)}")

    def applied(self, answer: Any) -> None:
        fuzz = self.fuzz
        fuzz.ticket, fuzz.next = answer.ticket, answer.next_op
        if answer.next_op > 2**39:  # nothing fits behind it
            made = self.session()
            fuzz.session, fuzz.ticket, fuzz.next = int(made["n"]), base64.b64decode(made["ticket"]), 1

    def check(self) -> None:
        assert not self.wrong, "\n".join(self.wrong[:10])
        assert self.fs.ask("GET", "/files/canary/file").body == CANARY
        (entry,) = self.fs.ask("GET", "/journals/canary/entries").json["entries"]
        assert entry["step"] == "kept"
        log = self.server.log.read_text()
        assert "Traceback" not in log, log[-3000:]
        assert not self.untried(), "next to nothing got through, so their depths were not tried"
        self.audit()

    def untried(self) -> list[str]:
        """The routes that matter most of which next to nothing got through."""
        found = []
        for template in ("/commits", "/actions", "/files/{path}", "/ns", "/packs", "/entries"):
            accepted = sum(
                n for (t, s), n in self.statuses.items() if t.endswith(template) and 200 <= s < 300
            )
            if accepted <= 1:
                found.append(template)
        return found

    def audit(self) -> None:
        """The invariants, on the stopped server's database."""
        self.server.stop()
        options = self.server.options or ("--data-dir", str(self.server.data_dir))
        found = process("audit", *options, timeout=120)
        assert found.code == 0, found.out + found.err.encode()


def shown(made: Made) -> str:
    return f"{made.method} {made.path[:200]} {made.headers} {(made.body or b'')[:200]!r}"


def test_malformed_requests(victim: Server) -> None:
    attack = Attack(victim, 20)
    attack.run(25)
    for _ in range(7):  # what gets through is chance, and changes with every new route
        if attack.untried():
            attack.run(25)
    attack.check()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_many_malformed_requests(victim: Server, seed: int) -> None:
    attack = Attack(victim, 1000 + seed)
    attack.run(600)
    attack.check()


@pytest.mark.parametrize("path", ["/v1%2Ffile-systems/{id}/files/a/b", "/v1/file-systems/{id}/files%2fa/b"])
def test_an_escaped_slash_before_the_path_names_nothing(shared_fs: TestFs, path: str) -> None:
    """It would be read as one path by the routes and as another by the files."""
    got = shared_fs.server.ask("PUT", path.format(id=shared_fs.id), b"x", token=shared_fs.token)
    assert got.status == 404, got.body
    assert shared_fs.ask("GET", "/list/").json["entries"] == []


def test_a_wish_for_another_protocol_ends_the_connection_with_the_answer(shared_fs: TestFs) -> None:
    """The parser takes what follows for that protocol: a client must not send another request there."""
    connection = http.client.HTTPConnection("127.0.0.1", shared_fs.server.port, timeout=ANSWER)
    headers = {"Connection": "upgrade", "Upgrade": "websocket", "Authorization": f"Bearer {shared_fs.token}"}
    connection.request("POST", f"/v1/file-systems/{shared_fs.id}/journals", b"{}" * 500, headers)
    got = connection.getresponse()
    assert got.status < 500 and got.getheader("Connection") == "close", got.getheaders()
    connection.close()
