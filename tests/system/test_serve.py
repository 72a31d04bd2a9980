"""`fsd serve` as a process: start, refusals, ready line, graceful stop, long polls, a second server."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.certificate import self_signed
from support.server import Server, clean_env
from support.wait import wait_for


def serve(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`fsd serve` that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "fsd", "serve", *options],
        capture_output=True,
        text=True,
        timeout=30,
        env=clean_env(**(env or {})),
        check=False,
    )


def test_a_second_server_on_the_same_data_directory_is_refused(server: Server) -> None:
    again = serve("--data-dir", str(server.data_dir), "--listen", "127.0.0.1:0")
    assert again.returncode == 7, again.stderr
    assert str(server.data_dir) in again.stderr and str(server.pid) in again.stderr
    assert server.ask("GET", "/readyz").status == 200


def test_a_taken_port_is_busy_and_the_data_directory_is_free_again(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    taken = serve("--data-dir", str(other), "--listen", f"127.0.0.1:{server.port}")
    assert taken.returncode == 7 and str(server.port) in taken.stderr
    second = Server(tmp_path / "x")
    second.data_dir = other
    try:
        assert second.start().ask("GET", "/readyz").status == 200
    finally:
        second.end()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "0.0.0.0:0"], "TLS"),
        (["--listen", "127.0.0.1:0", "--region", "No Good"], "region"),
        (["--listen", "127.0.0.1:0", "--public-url", "ftp://x"], "URL"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "x.pem"], "--tls-key"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    got = serve("--data-dir", str(tmp_path / "d"), *options)
    assert got.returncode == 2, got.stderr
    assert says in got.stderr
    assert not (tmp_path / "d" / "fsd.db").exists()


def test_a_data_directory_that_is_a_file_or_newer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    got = serve("--data-dir", str(tmp_path / "file"), "--listen", "127.0.0.1:0")
    assert got.returncode == 2 and "file" in got.stderr


def test_behind_proxy_and_public_url_and_region(tmp_path: Path) -> None:
    options = ("--region", "eu-1", "--public-url", "https://fsd.example/base")
    server = Server(tmp_path / "s", *options)
    try:
        server.start()
        made = server.admin("POST", "/v1/file-systems", {}).json
        assert made["region_code"] == "eu-1"
        from fsd.model.token import parse

        assert parse(made["fs_token"]).regions == {"eu-1": "https://fsd.example/base"}
    finally:
        server.end()


def test_the_admin_key_is_made_once_and_can_be_given(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    try:
        server.start()
        key = server.admin_key
        assert server.stop() == 0
        server.restart()
        assert server.admin_key == key
        assert server.admin("GET", "/v1/file-systems").status == 200
        server.stop()
        given = tmp_path / "given"
        given.write_text("given-by-the-operator\n")
        given.chmod(0o600)
        server.options = ("--admin-key-file", str(given))
        server.restart()
        assert server.admin("GET", "/v1/file-systems").status == 401
        assert server.ask("GET", "/v1/file-systems", token="given-by-the-operator").status == 200
    finally:
        server.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_long_polls_at_once_and_finishes_what_runs(server: Server, number: int) -> None:
    fs = server.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    got: list[Any] = []
    polls = [
        threading.Thread(target=lambda: got.append(fs.ask("GET", "/journals/j/entries?wait=30"))),
        threading.Thread(target=lambda: got.append(fs.ask("GET", "/changes?after=0&wait=30"))),
    ]
    for poll in polls:
        poll.start()
    wait_for(lambda: "fsd_long_polls_waiting 2" in server.ask("GET", "/metrics").body.decode(), 30, "polls")
    # A request in flight: its body is half sent when the stop comes.
    slow = socket.create_connection(("127.0.0.1", server.port), timeout=50)
    body = b'{"entries":[{"type":"a"}]}'
    head = (
        f"POST /v1/file-systems/{fs.id}/journals/j/entries HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {fs.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    slow.sendall(head.encode() + body[:10])
    wait_for(lambda: "fsd_requests_in_flight 4" in server.ask("GET", "/metrics").body.decode(), 30, "it")
    assert server.process is not None
    server.process.send_signal(number)
    for poll in polls:
        poll.join(60)
    assert [one.status for one in got] == [200, 200]
    slow.sendall(body[10:])
    assert b" 200 OK" in slow.recv(4096)
    assert server.process.wait(60) == 0
    slow.close()
    server.restart()
    assert len(fs.ask("GET", "/journals/j/entries").json["entries"]) == 1


def _refuses(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=50).close()
    except ConnectionRefusedError:
        return True
    return False


def test_it_picks_a_port(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.holds = False
    try:
        server.start()
        assert server.port and server.ask("GET", "/healthz").status == 200
    finally:
        server.end()


def test_a_second_signal_does_not_wait_for_what_runs(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    try:
        server.start()
        fs = server.create()
        stuck = socket.create_connection(("127.0.0.1", server.port), timeout=50)
        stuck.sendall(
            f"POST /v1/file-systems/{fs.id}/journals HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {fs.token}\r\nContent-Length: 100\r\n\r\n".encode()
        )
        wait_for(lambda: "fsd_requests_in_flight 2" in server.ask("GET", "/metrics").body.decode(), 30, "it")
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: _refuses(server), 30, "the first signal to count")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        stuck.close()
    finally:
        server.end()


def test_systemd_is_told(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(path))
        notify.settimeout(30)
        server = Server(tmp_path / "s", env={"NOTIFY_SOCKET": str(path)})
        try:
            server.start()
            assert notify.recv(64) == b"READY=1"
            server.stop()
            assert notify.recv(64) == b"STOPPING=1"
        finally:
            server.end()


def test_tls(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    server = Server(tmp_path / "s", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        server.start()
        trust = ssl.create_default_context(cafile=str(cert))
        url = f"https://127.0.0.1:{server.port}/readyz"
        with urllib.request.urlopen(url, context=trust, timeout=50) as got:
            assert json.load(got) == {"status": "ready"}
    finally:
        server.end()


def test_openapi_describes_every_route_and_nothing_else(server: Server) -> None:
    from fsd.server.app import all_routes
    from fsd.server.openapi_tables import SAYS

    document = server.ask("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.template) for route in all_routes()} == set(SAYS)
    operations = [op for methods in document["paths"].values() for op in methods.values()]
    assert len({op["operationId"] for op in operations}) == len(operations)
    fs = server.create()
    values = defaultdict(lambda: "1", id=fs.id)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"]
            needs_token = bool(operation["security"])
            got = server.ask(method.upper(), path.format_map(values))
            assert (got.status == 401) is needs_token, (method, path, got.status)
    schemas = document["components"]["schemas"]
    described_fs = set(schemas["FileSystem"]["required"])
    assert described_fs == set(server.admin("GET", f"/v1/file-systems/{fs.id}").json)
    made = fs.ask("POST", "/journals", {"journal_id": "j"}).json
    assert set(schemas["Journal"]["required"]) == set(made)
    appended = fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]}).json
    assert set(schemas["Appended"]["required"]) == set(appended)
    verified = fs.ask("GET", "/journals/j/verify").json
    assert set(schemas["Verified"]["required"]) == set(verified)


def test_no_environment_is_needed_and_the_log_has_no_secret(server: Server) -> None:
    fs = server.create()
    server.ask("GET", f"/v1/file-systems/{fs.id}/journals", token=fs.token + "x")
    assert fs.token.encode() not in server.log.read_bytes()
    assert os.access(server.data_dir / "admin.key", os.R_OK)


def _talk(server: Server, sent: bytes) -> bytes:
    """What the server says to `sent` until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        got = b""
        try:
            sock.sendall(sent)
            while piece := sock.recv(65536):
                got += piece
        except ConnectionError:
            pass  # it closed while more was coming
        return got


def test_what_is_no_http_is_told_in_the_error_body(server: Server) -> None:
    for sent in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"):
        head, _, body = _talk(server, sent).partition(b"\r\n\r\n")
        assert b" 400 " in head, (sent, head)
        assert json.loads(body)["error"]["code"] == "invalid_argument"


def test_an_endless_head_is_bounded(server: Server) -> None:
    got = _talk(server, b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20))
    assert got == b"" or b" 400 " in got
    got = _talk(server, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000)
    assert got == b"" or b" 400 " in got
    assert server.ask("GET", "/healthz").status == 200


def test_more_connections_than_the_usual_descriptors(server: Server) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    connections = []
    try:
        for _ in range(1500):
            connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=50))
        assert server.ask("GET", "/readyz").status == 200
        assert server.create().ask("GET", "/journals").status == 200
    finally:
        for one in connections:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
