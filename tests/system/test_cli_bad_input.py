"""Bad names and bad servers through the command line: a clear error, the right exit, nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.badserver import Peer, serving
from support.cli import process
from support.server import Server, TestFs


@pytest.mark.parametrize(
    ("path", "code", "what"),
    [
        (b"/" + b"n" * 256, 1, "ENAMETOOLONG"),
        (b"/" + "ü".encode() * 128, 1, "ENAMETOOLONG"),
        (b"/a/../b", 2, ".."),
        (b"/..", 2, ".."),
        (b"relative", 2, "absolute"),
        (b"", 2, ""),
        (b"/", 2, "directory"),
        (b"/dir/", 2, "directory"),
    ],
)
def test_names_that_cannot_be_written(shared_fs: TestFs, path: bytes, code: int, what: str) -> None:
    found = process("cp", "-", b":" + path, env=shared_fs.env, stdin=b"x")
    assert found.code == code, found.err
    assert what in found.err
    assert process("ls", "/", env=shared_fs.env).json["entries"] == []


@pytest.mark.parametrize(
    "name",
    [b"n" * 255, b"a b\tc\nd", b"\xff\xfe", "ü日本".encode(), b"%2F%00", b"?q=1#f", b"-r", b"\\", b"'\""],
)
def test_names_of_any_bytes(shared_fs: TestFs, name: bytes) -> None:
    path = b"/d/" + name
    assert process("cp", "-", b":" + path, env=shared_fs.env, stdin=b"bytes").code == 0
    assert process("cat", path, env=shared_fs.env).out == b"bytes"
    (entry,) = process("ls", "/d", env=shared_fs.env).json["entries"]
    assert entry["size_bytes"] == 5
    assert process("mv", path, path + b".2" if len(name) < 200 else b"/d/x", env=shared_fs.env).code == 0
    assert process("rm", "-r", "/d", env=shared_fs.env).code == 0


def test_a_removal_by_force_minds_neither_absence_nor_a_terminal(shared_fs: TestFs) -> None:
    assert process("mkdir", "-p", "/d/e", env=shared_fs.env).code == 0
    assert process("rm", "-rf", "/d", env=shared_fs.env).json["removed"] == 2
    assert process("rm", "-rf", "/d", env=shared_fs.env).json["removed"] == 0
    assert process("rm", "-f", "/no/such/parent", env=shared_fs.env).code == 0
    assert process("rm", "/d", env=shared_fs.env).code == 5
    # What is not there is the path alone: not the server, the filesystem or the right to remove.
    assert process("mkdir", "/d", env=shared_fs.env).code == 0
    assert process("cp", "-", ":/d/x", env=shared_fs.env, stdin=b"x").code == 0
    full = process("rm", "-f", "/d", env=shared_fs.env)
    assert (full.code, full.error["details"]) == (1, {"errno": "ENOTEMPTY"})
    gone = {**shared_fs.env, "FSD_TOKEN": "fsd1." + shared_fs.env["FSD_TOKEN"][5:-20] + "A" * 20}
    assert process("rm", "-rf", "/d", env=gone).code == 3
    assert process("rm", "-rf", "/d", env={**shared_fs.env, "FSD_ENDPOINT": "http://127.0.0.1:1"}).code == 1
    assert process("ls", "-R", "/", env=shared_fs.env).json["entries"][1]["path"] == "/d/x"
    assert process("rm", "-fR", "/d", env=shared_fs.env).code == 0


def test_a_working_directory_that_was_removed(shared_fs: TestFs, tmp_path: Path) -> None:
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    for argv, code, told in (
        (("mount", "./m"), 5, "the working directory is gone"),
        (("run", "--work-dir", "here", "--", "true"), 5, "the working directory is gone"),
        (("bench", "."), 5, "the working directory is gone"),
        (("cp", "-", ":/x"), 0, ""),
        (("ls", "/"), 0, ""),
        (("unmount", "/nowhere"), 5, "nothing is mounted at /nowhere"),
    ):
        where = tmp_path / "gone"
        where.mkdir()
        done = subprocess.run(
            ["bash", "-c", script, "bash", where, sys.executable, "-m", "fsd", *argv],
            env={"PATH": os.environ["PATH"], "HOME": os.fspath(tmp_path), **shared_fs.env},
            input=b"", capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, (argv, done.stderr)
        assert told in done.stderr.decode()


def test_a_local_directory_that_is_not_there_is_the_one_named(shared_fs: TestFs, tmp_path: Path) -> None:
    assert process("cp", "-", ":/x", env=shared_fs.env, stdin=b"x").code == 0
    missing = process("cp", ":/x", f"{tmp_path}/none/x", env=shared_fs.env)
    assert (missing.code, missing.error["message"]) == (5, f"no such local directory: {tmp_path}/none")
    missing = process("cp", f"{tmp_path}/none", ":/y", env=shared_fs.env)
    assert missing.error["message"] == f"no such local file or directory: {tmp_path}/none"


HTML = b"<html><body>bad gateway</body></html>"


def _html(peer: Peer) -> None:
    while peer.request():
        peer.answer(HTML, "502 Bad Gateway", "text/html")


def _other(peer: Peer) -> None:
    while peer.request():
        peer.answer(b'{"hello": "world"}', "200 OK", "application/json")


@pytest.mark.parametrize("behave", [_html, _other], ids=lambda f: f.__name__[1:])
def test_servers_that_are_none(behave: object, shared_fs: TestFs) -> None:
    with serving(behave) as url:  # type: ignore[arg-type]
        env = {**shared_fs.env, "FSD_ENDPOINT": url}
        found = process("ls", "/", env=env, timeout=100)
    assert found.code == 1, found.err
    assert found.out == b""
    assert "Traceback" not in found.err
    assert found.error["code"] in ("unavailable", "internal")
    assert found.error["message"]


def test_a_server_without_that_filesystem(shared_server: Server, shared_fs: TestFs) -> None:
    """A token of a deleted filesystem, or of another server."""
    deleted = shared_server.create()
    assert shared_server.admin("DELETE", f"/v1/file-systems/{deleted.id}").status == 200
    found = process("ls", "/", env=deleted.env)
    assert found.code in (3, 5)
    assert deleted.token[-43:] not in found.err


def test_closed_input_is_no_empty_input(shared_fs: TestFs) -> None:
    """It would replace a file by nothing, and say that all went well."""
    process("cp", "-", ":/kept", env=shared_fs.env, stdin=b"what was there")
    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m fsd cp - :/kept <&-'],
        env=env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert b"the local standard input: Bad file descriptor" in done.stderr
    assert process("cat", "/kept", env=shared_fs.env).out == b"what was there"
