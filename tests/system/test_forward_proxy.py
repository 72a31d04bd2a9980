"""A network whose only way out is a forward proxy: commands and mounts tunnel through it, and say whose fault
a failure is. The server's name resolves nowhere, so that nothing can go past the proxy unseen."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificate import NAME, self_signed
from support.forward import Forward
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.wait import wait_for

from fsd.client.http import Http, HttpOptions
from fsd.client.identity import Claim, admin_identity
from fsd.host.seam import Host

AUTHORITY = f"{NAME}:8443"
MIB = 1 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFs]:
    """A filesystem on a server that speaks TLS alone."""
    cert, key = certificate
    server = Server(tmp_path_factory.mktemp("server"), "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        server.start()
        admin = admin_identity(Claim(admin_key=server.admin_key, endpoint=f"https://127.0.0.1:{server.port}"))
        made = Http(admin, Host(), HttpOptions(ca_file=str(cert))).json("POST", "/v1/file-systems", body={})
        yield TestFs(server, made["file_system_id"], made["fs_token"])
    finally:
        server.end()


@pytest.fixture
def proxy(secure: TestFs) -> Iterator[Forward]:
    made = Forward({AUTHORITY: ("127.0.0.1", secure.server.port)})
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def sandbox(
    secure: TestFs, certificate: tuple[Path, Path], proxy: Forward, tmp_path: Path
) -> Iterator[Sandbox]:
    box = Sandbox(tmp_path / "box", secure, endpoint=f"https://{AUTHORITY}")
    box.env |= {"SSL_CERT_FILE": os.fspath(certificate[0]), "HTTPS_PROXY": proxy.url}
    try:
        yield box
    finally:
        box.close()


def test_direct_commands_go_through_it(sandbox: Sandbox, proxy: Forward, tmp_path: Path) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "big").write_bytes(data)
    sandbox.fsd("cp", os.fspath(tmp_path / "big"), ":/big")
    sandbox.fsd("cp", ":/big", os.fspath(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    assert set(proxy.asked) == {AUTHORITY}
    # What it is told is where to lead, and nothing of whom it leads.
    assert all(head.split("\r\n")[1:] == [f"Host: {AUTHORITY}", "", ""] for head in proxy.heads)
    told = sandbox.fsd("doctor", check=False).stdout
    assert f"through the proxy {proxy.url} (HTTPS_PROXY)" in told


def test_a_mount_goes_through_it_and_over_its_loss(sandbox: Sandbox, proxy: Forward) -> None:
    sandbox.mount()
    with open(sandbox.mountpoint / "first", "wb") as file:
        file.write(b"1" * MIB)
        file.flush()
        os.fsync(file.fileno())
    proxy.cut()
    (sandbox.mountpoint / "second").write_bytes(b"2" * MIB)
    assert "proxy" in wait_for(lambda: _reason(sandbox), 60)
    proxy.accept()
    sandbox.fsd("drain", os.fspath(sandbox.mountpoint))
    sandbox.fsd("unmount", os.fspath(sandbox.mountpoint))
    for name, content in (("first", "1"), ("second", "2")):
        assert sandbox.fsd("cat", f":/{name}").stdout == content * MIB
    assert set(proxy.asked) == {AUTHORITY}


def _reason(sandbox: Sandbox) -> str:
    return str(sandbox.json("status", os.fspath(sandbox.mountpoint)).get("reason") or "")


def test_it_is_shown_what_it_asks_for(sandbox: Sandbox, proxy: Forward) -> None:
    proxy.wanted = "Basic " + base64.b64encode(b"us er:p@ss").decode()
    refused = sandbox.fsd("ls", ":/", check=False)
    assert refused.returncode == 1 and len(proxy.asked) == 1, refused  # a proxy that says no says so again
    assert "407" in refused.stderr and "HTTPS_PROXY=http://USER:PASSWORD@" in refused.stderr
    sandbox.env["HTTPS_PROXY"] = f"http://us%20er:p%40ss@127.0.0.1:{proxy.port}"
    sandbox.fsd("ls", ":/")
    proxy.wanted = "another"
    refused = sandbox.fsd("ls", ":/", check=False)
    assert "407" in refused.stderr and "p@ss" not in refused.stderr and "p%40ss" not in refused.stderr


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", f"refuses to connect to {AUTHORITY}: 403 Forbidden"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "is no HTTP"),
    ],
)
def test_what_it_answers_is_told_as_its_answer(
    sandbox: Sandbox, proxy: Forward, says: bytes, told: str
) -> None:
    proxy.says = says
    failed = sandbox.fsd("stat", ":/", check=False, timeout=120)
    assert failed.returncode == 1 and told in failed.stderr, failed.stderr
    assert f"the proxy {proxy.url} (HTTPS_PROXY)" in failed.stderr


def test_one_that_is_away_or_silent_is_named(sandbox: Sandbox, proxy: Forward) -> None:
    proxy.silent = True
    failed = sandbox.fsd("stat", ":/", check=False, timeout=180)
    assert failed.returncode == 1
    assert f"no answer from the proxy {proxy.url}" in failed.stderr
    proxy.cut()
    failed = sandbox.fsd("stat", ":/", check=False, timeout=120)
    assert failed.returncode == 1
    assert f"nothing listens at the proxy {proxy.url}" in failed.stderr


def test_a_certificate_of_another_is_the_servers_fault(sandbox: Sandbox, proxy: Forward) -> None:
    """The tunnel leads to somebody who cannot show the server's certificate: no token goes there."""
    proxy.names["other.fsd.invalid:8443"] = proxy.names[AUTHORITY]
    sandbox.env["FSD_ENDPOINT"] = "https://other.fsd.invalid:8443"
    failed = sandbox.fsd("stat", ":/", check=False)
    assert failed.returncode == 1
    assert "certificate of https://other.fsd.invalid:8443 is not trusted" in failed.stderr


@pytest.mark.parametrize("command", [("stat", ":/"), ("mount", "{m}")])
def test_one_of_another_kind_is_refused_at_once(sandbox: Sandbox, command: tuple[str, ...]) -> None:
    del sandbox.env["HTTPS_PROXY"]
    sandbox.env["ALL_PROXY"] = "socks5h://u:secret@127.0.0.1:1080"
    argv = [word.format(m=sandbox.mountpoint) for word in command]
    failed = sandbox.fsd(*argv, check=False)
    assert failed.returncode == 2, failed
    assert "ALL_PROXY" in failed.stderr and "socks5h://" in failed.stderr and "NO_PROXY" in failed.stderr
    assert "secret" not in failed.stderr
    assert "ALL_PROXY" in sandbox.fsd("doctor", check=False).stdout


def test_no_proxy_goes_straight(secure: TestFs, sandbox: Sandbox, proxy: Forward) -> None:
    straight = f"127.0.0.1:{secure.server.port}"
    sandbox.env |= {"NO_PROXY": "localhost,127.0.0.0/8", "FSD_ENDPOINT": f"https://{straight}"}
    sandbox.fsd("stat", ":/")
    assert proxy.asked == []
    del sandbox.env["NO_PROXY"]
    assert "403" in sandbox.fsd("stat", ":/", check=False).stderr  # it does not know this one
    assert proxy.asked == [straight]


def test_a_plain_endpoint_never_goes_through_one(shared_fs: TestFs, tmp_path: Path) -> None:
    """Plain HTTP shows the token to whoever leads it on."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0)
        box = Sandbox(tmp_path / "box", shared_fs)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        box.env |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), url)
        try:
            box.fsd("stat", ":/")
            with pytest.raises(BlockingIOError):
                trap.accept()
        finally:
            box.close()
