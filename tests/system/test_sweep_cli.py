"""`fsd sweep` and `fsd audit --repair` against a real server, as an operator types them."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
from pathlib import Path

from support.cli import process
from support.server import Server
from support.wait import wait_for

from fsd.wire.frame import unpack
from fsd.wire.messages import MEDIA_TYPE, packb


def env_of(server: Server) -> dict[str, str]:
    return {"FSD_ADMIN_KEY": server.admin_key, "FSD_ENDPOINT": server.url}


def stored(server: Server) -> int:
    return sum(len(files) for _, _, files in os.walk(server.data_dir / "blobs" / "packs"))


def metric(server: Server, name: str) -> int:
    text = server.ask("GET", "/metrics").body.decode()
    [value] = re.findall(rf"^fsd_sweep_{name}_total (\d+)$", text, re.MULTILINE)
    return int(value)


def test_an_operator_sweeps(server: Server, tmp_path: Path) -> None:
    fs, other = server.create(), server.create()
    for one in (fs, other):
        assert one.ask("PUT", "/files/big", os.urandom(200_000)).status == 200
        assert one.ask("PUT", "/files/kept", os.urandom(200_000)).status == 200
        assert one.ask("PUT", "/files/big", os.urandom(200_000)).status == 200
    assert stored(server) == 6
    env = env_of(server)
    kept = process("sweep", env=env).json
    assert kept["blobs"] == 0 and kept["file_systems"] == 2, "the server's grace holds"
    planned = process("sweep", "--older-than", "0s", "--dry-run", env=env).json
    assert planned["dry_run"] and planned["would"]["blobs"] == 2
    assert stored(server) == 6
    one = process("checkpoint", "sweep", fs.id, "--older-than", "0s", env=env).json
    assert (one["file_systems"], one["blobs"], one["objects"]) == (1, 1, 1)
    done = process("sweep", "--older-than", "0s", "--vacuum", env=env)
    assert done.json["blobs"] == 1 and done.json["dry_run"] is False
    assert stored(server) == 4
    assert done.json["database"]["bytes"] > 0
    text = process("sweep", "--output", "text", env=env)
    assert "2 filesystems" in text.text
    assert metric(server, "blobs") == 2 and metric(server, "objects") == 2
    for one in (fs, other):
        assert len(one.ask("GET", "/files/big").body) == len(one.ask("GET", "/files/kept").body) == 200_000


def test_a_sweep_says_what_is_wrong_with_it(server: Server) -> None:
    env = env_of(server)
    assert process("sweep", "fs_" + "a" * 20, env=env).code == 5
    assert process("sweep", "--older-than", "soon", env=env).code == 2
    assert process("sweep", env={**env, "FSD_ADMIN_KEY": "wrong"}).code == 3
    fs = server.create()
    assert server.ask("POST", "/v1/sweep", {}, token=fs.token).status == 401
    for body in ({"older_than_ms": -1}, {"older_than_ms": "1"}, {"cursor": "x"}, {"all": True}):
        assert server.admin("POST", "/v1/sweep", body).status == 400


def test_the_server_sweeps_by_itself(tmp_path: Path) -> None:
    server = Server(tmp_path, "--sweep-every", "1s").start()
    try:
        server.create()
        wait_for(lambda: metric(server, "rounds") > 0, 30, "a round of the sweep")
    finally:
        assert server.stop() == 0


def test_options_that_would_lose_what_clients_count_on_are_refused(tmp_path: Path) -> None:
    for flag, value in (("--grace", "1m"), ("--keep-sessions", "5m"), ("--keep-changes", "5m")):
        found = process("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", flag, value)
        assert found.code == 2
        assert "at least" in found.err


def test_audit_and_repair_from_the_command_line(server: Server) -> None:
    fs = server.create()
    assert fs.ask("PUT", "/files/a", os.urandom(200_000)).status == 200
    assert server.stop() == 0
    data = str(server.data_dir)
    whole = process("audit", "--data-dir", data, "--read-data").json
    assert whole["ok"] and whole["packs"] == whole["packs_read"] == 1
    db = sqlite3.connect(server.data_dir / "fsd.db")
    db.execute("UPDATE blob SET refs=7")
    db.commit()
    db.close()
    assert process("audit", "--data-dir", data).code == 1
    planned = process("audit", "--data-dir", data, "--repair")
    assert planned.code == 1 and "nothing was changed" in planned.err
    [step] = planned.json["steps"]
    assert "becomes 1" in step["what"]
    done = process("audit", "--data-dir", data, "--repair", "--yes", "--plan", planned.json["plan"])
    assert done.code == 0 and done.json["repaired"]
    [pack] = [path for path in (server.data_dir / "blobs").rglob("*") if path.is_file()]
    pack.unlink()
    left = process("audit", "--data-dir", data, "--repair", "--yes", fs.id)
    assert left.code == 1 and "its object is missing" in left.err
    assert left.json["steps"] == [], "what is lost is no repair's"


def test_a_mount_asks_to_keep_content(server: Server) -> None:
    fs = server.create()
    data = os.urandom(1000)
    assert fs.ask("PUT", "/files/a", data).status == 200
    digest, other = hashlib.sha256(data).digest(), bytes(32)
    body = packb([digest, other])
    headers = {"Content-Type": MEDIA_TYPE}
    kept = fs.ask("POST", "/blobs?keep=1", body, headers=headers)
    header, blobs = unpack(kept.body, blobs_max=1, bytes_max=1)
    assert (header["absent"], blobs) == ((other,), [])
    header, [blob] = unpack(fs.ask("POST", "/blobs", body, headers=headers).body, blobs_max=9, bytes_max=9999)
    assert blob.hash == digest
    assert fs.ask("POST", "/blobs?keep=maybe", body, headers=headers).status == 400
