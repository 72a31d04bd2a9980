"""A real PostgreSQL of Debian's, on a free loopback port, for one test session."""

from __future__ import annotations

import glob
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.processes import die_with_parent, free_ports, server_directory, stop, tail
from support.wait import wait_for


class PostgresServer:
    """One cluster. As root it runs as user `postgres`, because PostgreSQL refuses root."""

    def __init__(self) -> None:
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"))
        assert found, "PostgreSQL is not installed: run scripts/setup-test as root"
        self._bin = Path(found[-1]).parent
        self._user: dict[str, Any] = {}
        self._root = server_directory("pg", open_to_others=True)
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            self._user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(self._root, account.pw_uid, account.pw_gid)
        self._log = self._root / "log"
        self._data = self._root / "data"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        done = subprocess.run(
            [self._bin / "initdb", "-D", self._data, "-U", "fsd", "-A", "trust", "-E", "UTF8", "--no-sync"],
            cwd=self._root,
            capture_output=True,
            timeout=60,
            check=False,
            **self._user,
        )
        assert done.returncode == 0, f"initdb failed: {done.stderr.decode(errors='replace')}"

    def start(self) -> None:
        """Start (again, on the same port) and wait until it answers."""
        if not self.port:
            [self.port] = free_ports(1)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._root),
            "max_connections": "100",
            "shared_buffers": "32MB",
            "dynamic_shared_memory_type": "mmap",  # in its directory, where nothing of it can be left behind
        }
        command = [str(self._bin / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._root,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                **self._user,
            )
        wait_for(self._answers, 30, "PostgreSQL to start")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"PostgreSQL ended: {tail(self._log)}"
        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def url(self, database: str) -> str:
        return f"postgresql://fsd@127.0.0.1:{self.port}/{database}"

    def fresh(self) -> str:
        """The URL of a new, empty schema: as good as a database of its own, and sixty times quicker made."""
        name = f"t_{secrets.token_hex(6)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as conn:
            conn.execute(f'CREATE SCHEMA "{name}"')
        return f"{self.url('postgres')}?options=-c%20search_path%3D{name}"

    def dump(self, url: str, to: Path) -> None:
        """`pg_dump` of what `fresh` made."""
        self._run("pg_dump", "-n", _schema(url), "-f", str(to))

    def set_back(self, url: str, dump: Path) -> None:
        """What is there goes, and the dump takes its place."""
        self._run("psql", "-q", "-c", f'DROP SCHEMA "{_schema(url)}" CASCADE', "-f", str(dump))

    def _run(self, program: str, *words: str) -> None:
        to = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "fsd", "-d", "postgres")
        strict = ("-X", "-1", "-v", "ON_ERROR_STOP=1") if program == "psql" else ()
        done = subprocess.run(
            [self._bin / program, *to, *strict, *words], capture_output=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")

    def stop(self, number: int = signal.SIGQUIT) -> None:
        """SIGQUIT: at once, as a crash of the whole server; what was committed is there after `start`."""
        if self._process is not None:
            stop(self._process, number)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._root)


def _schema(url: str) -> str:
    return url.rpartition("%3D")[2]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


def database_of(request: pytest.FixtureRequest) -> str | None:
    """For a fixture whose parameter names an engine: the URL of a new PostgreSQL database; None: SQLite."""
    if request.param != "postgresql":
        return None
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.fresh()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def either(request: pytest.FixtureRequest) -> str | None:
    """The database of a test that runs on both engines: a URL, or None for SQLite."""
    return database_of(request)
