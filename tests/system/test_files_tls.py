"""Direct commands over TLS: trust, distrust, large bodies both ways, early refusals."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificate import self_signed
from support.server import Server, TestFs

from fsd.client.files import Files, PutOptions
from fsd.client.http import BytesBody, Http, HttpOptions
from fsd.client.identity import Claim, admin_identity, data_identity
from fsd.client.transfer import CopyOptions
from fsd.client.upload import upload_stream
from fsd.host.seam import Host
from fsd.model.errors import Conflict, Unavailable
from fsd.model.limits import STREAM_SPOOL

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(
    certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestFs, str]]:
    """A filesystem on a server with TLS, and its endpoint."""
    cert, key = certificate
    server = Server(tmp_path_factory.mktemp("tls-server"), "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        server.start()
        url = f"https://127.0.0.1:{server.port}"
        admin = admin_identity(Claim(admin_key=server.admin_key, endpoint=url))
        http = Http(admin, Host(), HttpOptions(ca_file=str(cert)))
        made = http.json("POST", "/v1/file-systems", body={})
        yield TestFs(server, made["file_system_id"], made["fs_token"]), url
    finally:
        server.end()


def connect(secure: tuple[TestFs, str], **options: object) -> Files:
    fs, url = secure
    return Files(Http(data_identity(Claim(token=fs.token, endpoint=url)), Host(), HttpOptions(**options)))  # type: ignore[arg-type]


def test_a_token_names_the_https_endpoint(secure: tuple[TestFs, str]) -> None:
    fs, url = secure
    assert data_identity(Claim(token=fs.token)).endpoint == url


def test_large_bodies_go_both_ways(secure: tuple[TestFs, str], certificate: tuple[Path, Path]) -> None:
    files = connect(secure, ca_file=str(certificate[0]))
    data = os.urandom(STREAM_SPOOL + 5 * MIB)
    files.write(b"/f", BytesBody(data))
    assert b"".join(files.read(b"/f")) == data
    assert upload_stream(files, io.BytesIO(data), b"/g", CopyOptions()).bytes == len(data)
    assert b"".join(files.read(b"/g")) == data


def test_a_refusal_while_sending_is_heard(secure: tuple[TestFs, str], certificate: tuple[Path, Path]) -> None:
    files = connect(secure, ca_file=str(certificate[0]))
    files.write(b"/taken", BytesBody(b"x"))
    with pytest.raises(Conflict):
        files.write(b"/taken", BytesBody(bytes(32 * MIB)), PutOptions(overwrite=False))
    assert files.stat(b"/taken")["size_bytes"] == 1


def test_an_unknown_certificate_is_refused_at_once(secure: tuple[TestFs, str]) -> None:
    with pytest.raises(Unavailable, match="not trusted"):
        connect(secure, retry_for=60.0).stat(b"/")


def test_certificates_to_trust_that_cannot_be_read_are_named(
    secure: tuple[TestFs, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hint() -> str:
        with pytest.raises(Unavailable, match="not trusted") as told:
            connect(secure).stat(b"/")
        return told.value.hint or ""

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert hint().startswith("give the CA's certificate in SSL_CERT_FILE")
    named = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    assert hint() == f"SSL_CERT_FILE is {named}, which cannot be used: no such file or directory"
    named.write_text("nothing\n")
    assert hint() == f"SSL_CERT_FILE is {named}, which cannot be used: no certificate in PEM form is in it"
    of_somebody_else, _ = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(of_somebody_else))
    assert hint().startswith("give the CA's certificate in SSL_CERT_FILE")
