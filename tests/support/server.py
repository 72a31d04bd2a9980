"""A real `fsd serve` process for tests: started, asked, stopped, killed and started again on the same port.

Fixtures: `server` is a test's own (SQLite, fresh directory), `shared_server` one for the whole run, for tests
that only need a filesystem of their own on it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.processes import die_with_parent, free_ports, give_back, tail
from support.wait import wait_for

START = 60.0
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `json` parses the body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code."""
        found: str = self.json["error"]["code"]
        return found


@dataclass(frozen=True, slots=True)
class TestFs:
    """A filesystem made for a test: its id, its owner token, and requests under /v1/file-systems/{id}."""

    __test__ = False

    server: Server
    id: str
    token: str = field(repr=False)

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        return self.server.ask(
            method, f"/v1/file-systems/{self.id}{path}", body, token=self.token, headers=headers
        )

    @property
    def env(self) -> dict[str, str]:
        """What a sandbox gets: two values."""
        return {"FSD_TOKEN": self.token, "FSD_REGION_CODE": "local"}


def clean_env(**extra: str) -> dict[str, str]:
    """This environment without any identity of fsd or ti, the test run's mark kept."""
    kept = {k: v for k, v in os.environ.items() if k == "FSD_TEST_RUN" or not k.startswith(("FSD_", "TI_"))}
    return {**kept, **extra}


class Server:
    """`options` are more arguments of `fsd serve`; `env` more environment (for example FSD_CRASH)."""

    def __init__(self, directory: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.data_dir = directory / "data"
        self.log = directory / "serve.log"
        self.options = options
        self.env = dict(env or {})
        self.port = 0
        self.holds = True  # its port is held for it; else the server picks one itself
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = directory / "serve.out"
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_key(self) -> str:
        return (self.data_dir / "admin.key").read_text().strip()

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "fsd",
            "serve",
            "--data-dir",
            str(self.data_dir),
            "--listen",
            f"127.0.0.1:{self.port}",
            "--output",
            "json",
            *self.options,
        ]

    def start(self) -> Server:
        """Returns when it listens. The port is the same at each start."""
        if self.holds and not self.port:
            [self.port] = free_ports(1)
            weakref.finalize(self, give_back, self.port)
        with self._ready.open("wb") as out, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=out, stderr=log, env=clean_env(**self.env), preexec_fn=die_with_parent
            )
        line = wait_for(self._first_line, START, "the server to listen")
        self.port = int(json.loads(line)["url"].rsplit(":", 1)[1])
        return self

    def _first_line(self) -> bytes | None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{tail(self.log)}")
        line, end, _ = self._ready.read_bytes().partition(b"\n")
        return line if end else None

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def restart(self) -> None:
        """Start again on the same port and directory after `stop` or `kill`."""
        self.start()

    def end(self) -> None:
        """Whatever state it is in: gone afterwards."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """One request on a connection of its own. `body`: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = dict(headers or {})
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, raw, sent)
            got = connection.getresponse()
            return Reply(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()

    def admin(self, method: str, path: str, body: Any = None, **more: Any) -> Reply:
        return self.ask(method, path, body, token=self.admin_key, **more)

    def create(self, **fields: Any) -> TestFs:
        """A new filesystem."""
        got = self.admin("POST", "/v1/file-systems", fields)
        assert got.status == 201, got.body
        return TestFs(self, got.json["file_system_id"], got.json["fs_token"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own."""
    made = Server(tmp_path / "server")
    try:
        yield made.start()
    finally:
        made.end()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the run: take a filesystem of your own, never stop it."""
    made = Server(tmp_path_factory.mktemp("shared-server"))
    try:
        yield made.start()
        assert made.process is not None
        assert made.process.poll() is None, f"the shared server died:\n{tail(made.log)}"
    finally:
        made.end()


@pytest.fixture
def shared_fs(shared_server: Server) -> TestFs:
    """A filesystem of the test's own on the shared server."""
    return shared_server.create()
