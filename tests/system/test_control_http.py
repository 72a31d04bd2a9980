"""The control plane over real HTTP: filesystems, tokens, keys, bodies, errors."""

from __future__ import annotations

import base64
import json
import os
import stat
from typing import Any

import pytest
from support.server import Server, TestFs
from support.wait import wait_for

BASE = "/v1/file-systems"


def test_create_list_describe_check_delete(shared_server: Server) -> None:
    made = shared_server.admin("POST", BASE, {"display_name": "plans ☃", "labels": {"team": "a"}})
    assert made.status == 201
    fs = made.json
    assert fs["status"] == "active" and fs["region_code"] == "local"
    assert fs["display_name"] == "plans ☃" and fs["labels"] == {"team": "a"}
    readable = json.loads(base64.urlsafe_b64decode(fs["fs_token"].split(".")[1] + "=="))
    assert readable["fs"] == fs["file_system_id"] and readable["r"] == {"local": shared_server.url}

    found = shared_server.admin("GET", f"{BASE}?display_name=plans&label=team%3Da").json
    assert [one["file_system_id"] for one in found["file_systems"]] == [fs["file_system_id"]]
    assert shared_server.admin("GET", f"{BASE}?label=team%3Db").json["file_systems"] == []

    one = f"{BASE}/{fs['file_system_id']}"
    for key in (shared_server.admin_key, fs["fs_token"]):
        described = shared_server.ask("GET", one, token=key).json
        assert described["kind"] == "native" and described["seq"] == 0
        assert described["usage"]["storage_bytes"] == 0
        checked = shared_server.ask("GET", one + "/check", token=key).json
        assert checked["status"] == "ok" and len(checked["checks"]) >= 2

    assert shared_server.admin("DELETE", one).json["status"] == "deleting"
    assert shared_server.admin("GET", one).status == 404
    assert shared_server.ask("GET", one, token=fs["fs_token"]).status == 404
    assert shared_server.admin("DELETE", one).status == 404


def test_pages_of_a_list_meet_each_filesystem_once(shared_server: Server) -> None:
    made = {shared_server.create(labels={"page": "yes"}).id for _ in range(5)}
    seen: list[str] = []
    cursor = ""
    while True:
        page = shared_server.admin("GET", f"{BASE}?label=page%3Dyes&limit=2&cursor={cursor}").json
        seen += [one["file_system_id"] for one in page["file_systems"]]
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert len(seen) == 5 and set(seen) == made


def test_deleted_filesystem_leaves_no_rows_and_no_objects(server: Server) -> None:
    fs = server.create()
    fs.ask("POST", "/journals", {"journal_id": "j"})
    fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}], "idempotency_key": "k"})
    assert fs.ask("PUT", "/files/big", os.urandom(3 << 20)).status == 200
    assert fs.ask("PUT", "/files/small", b"x").status == 200
    fs.ask("POST", "/sessions", {"mount_id": "m"})
    assert _objects(server, fs), "nothing is at stake"
    assert server.admin("DELETE", f"{BASE}/{fs.id}").status == 200
    wait_for(lambda: _rows(server) == {}, 30, "the rows to go")
    assert _objects(server, fs) == []


@pytest.mark.parametrize("point", ["collect.object", "collect.last"])
def test_a_crash_while_a_deleted_filesystem_goes_is_continued(server: Server, point: str) -> None:
    fs, kept = server.create(), server.create()
    for one in (fs, kept):
        assert one.ask("PUT", "/files/big", os.urandom(3 << 20)).status == 200
    server.stop()
    server.env = {"FSD_CRASH": point}
    server.restart()
    assert server.admin("DELETE", f"{BASE}/{fs.id}").status == 200
    assert server.process is not None
    assert server.process.wait(60) == -9
    server.env = {}
    server.restart()
    wait_for(lambda: _rows(server)["fs"] == 1, 30, "the rows to go")
    assert _objects(server, fs) == [] and _objects(server, kept)
    assert len(kept.ask("GET", "/files/big").body) == 3 << 20


def _objects(server: Server, fs: TestFs) -> list[Any]:
    return list((server.data_dir / "blobs").rglob(f"{fs.id}/*"))


def _rows(server: Server) -> dict[str, int]:
    import sqlite3

    with sqlite3.connect(f"file:{server.data_dir / 'fsd.db'}?mode=ro", uri=True) as db:
        counts = {
            table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in (
                "fs",
                "inode",
                "token",
                "journal",
                "journal_entry",
                "journal_append",
                "pack",
                "blob",
                "block",
            )
        } | {"session": db.execute("SELECT count(*) FROM session WHERE fs > 0").fetchone()[0]}
    return {table: count for table, count in counts.items() if count}


def test_tokens_are_made_listed_disabled_enabled_deleted(shared_fs: TestFs) -> None:
    server, base = shared_fs.server, f"{BASE}/{shared_fs.id}"
    made = server.admin("POST", base + "/tokens", {"token_name": "worker", "ttl_s": 3600}).json
    assert made["scope_kind"] == "owner" and made["expires_at"] is not None and not made["expired"]
    one = f"{base}/tokens/{made['token_id']}"

    def works() -> int:
        return server.ask("GET", base, token=made["fs_token"]).status

    assert works() == 200
    listed = server.admin("GET", base + "/tokens").json["tokens"]
    assert len(listed) == 2
    assert all("fs_token" not in token for token in listed)
    assert server.admin("POST", one + "/disable", {}).json["status"] == "disabled"
    assert works() == 401
    assert server.admin("POST", one + "/enable", {}).json["status"] == "active"
    assert works() == 200
    assert server.admin("DELETE", one).json["status"] == "deleted"
    assert works() == 401
    assert server.admin("DELETE", one).status == 404
    page = server.admin("GET", base + "/tokens?limit=1").json
    assert len(page["tokens"]) == 1 and page["next_offset"] is None


def test_an_expired_token_says_so(tmp_path: Any) -> None:
    server = Server(tmp_path / "s", "--test-clock")
    try:
        server.start()
        fs = server.create()
        made = server.admin("POST", f"{BASE}/{fs.id}/tokens", {"ttl_s": 60}).json
        token = made["fs_token"]
        assert server.ask("GET", f"{BASE}/{fs.id}", token=token).status == 200
        later = {"X-Fsd-Test-Now": str(4_000_000_000_000)}
        refused = server.ask("GET", f"{BASE}/{fs.id}", token=token, headers=later)
        assert refused.status == 401 and "expired" in refused.json["error"]["message"]
        at = {"X-Fsd-Test-Now": "4000000000000"}
        listed = server.admin("GET", f"{BASE}/{fs.id}/tokens", headers=at).json["tokens"]
        assert [one["token_id"] for one in listed] != [made["token_id"]] and len(listed) == 1
        expired = server.admin("GET", f"{BASE}/{fs.id}/tokens?include_expired=1", headers=at).json["tokens"]
        assert len(expired) == 2
        # Both may bear the same millisecond: their order says nothing.
        assert [one["token_id"] for one in expired if one["expired"]] == [made["token_id"]]
    finally:
        server.end()


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: "",
        lambda t: "hello",
        lambda t: t[:-1],
        lambda t: t[: len(t) // 2],
        lambda t: t[:-4] + ("AAAA" if t[-4:] != "AAAA" else "BBBB"),
        lambda t: "fsd1.e30." + t.rsplit(".", 1)[1],
        lambda t: t + "\N{SNOWMAN}".encode().decode("latin-1"),
    ],
)
def test_damaged_tokens_are_refused(shared_fs: TestFs, damage: Any) -> None:
    got = shared_fs.server.ask("GET", f"{BASE}/{shared_fs.id}/journals", token=damage(shared_fs.token))
    assert got.status == 401 and got.code == "not_authenticated"
    assert shared_fs.token.rsplit(".", 1)[1] not in got.body.decode()
    assert got.json["error"]["hint"]


def test_a_token_is_of_one_filesystem_and_says_nothing_of_others(shared_server: Server) -> None:
    mine, other = shared_server.create(), shared_server.create()
    wrong = shared_server.ask("GET", f"{BASE}/{other.id}/journals", token=mine.token)
    absent = "fs_" + "a" * 20
    nothing = shared_server.ask("GET", f"{BASE}/{absent}/journals", token=mine.token)
    assert wrong.status == nothing.status == 404
    assert wrong.json["error"]["message"].replace(other.id, absent) == nothing.json["error"]["message"]


def test_admin_routes_want_the_admin_key(shared_fs: TestFs) -> None:
    server = shared_fs.server
    for token in (None, shared_fs.token, "x", server.admin_key + "x"):
        for method, path in (
            ("POST", BASE),
            ("GET", BASE),
            ("DELETE", f"{BASE}/{shared_fs.id}"),
            ("POST", f"{BASE}/{shared_fs.id}/tokens"),
        ):
            assert server.ask(method, path, {}, token=token).status == 401
    assert server.ask("GET", f"{BASE}/{shared_fs.id}/journals", token=server.admin_key).status == 401


def test_idempotency_key_repeats_the_answer_and_the_token(shared_server: Server) -> None:
    key = {"Idempotency-Key": "create-1"}
    first = shared_server.admin("POST", BASE, {"display_name": "once"}, headers=key)
    again = shared_server.admin("POST", BASE, {"display_name": "once"}, headers=key)
    assert first.status == again.status == 201
    assert first.json == again.json and first.json["fs_token"].startswith("fsd1.")
    assert "idempotent-replay" not in first.headers and again.headers["idempotent-replay"] == "true"
    other = shared_server.admin("POST", BASE, {"display_name": "twice"}, headers=key)
    assert other.status == 409 and other.code == "idempotency_mismatch"
    found = shared_server.admin("GET", f"{BASE}?display_name=once").json["file_systems"]
    assert len(found) == 1
    for bad in ("", "a b", "ü".encode().decode("latin-1"), "x" * 129):
        refused = shared_server.admin("POST", BASE, {}, headers={"Idempotency-Key": bad})
        assert refused.status == 400


def test_no_secret_is_stored(server: Server) -> None:
    fs = server.admin("POST", BASE, {}, headers={"Idempotency-Key": "k"}).json
    secret = fs["fs_token"].rsplit(".", 1)[1].encode()
    assert server.stop() == 0
    stored = b"".join(p.read_bytes() for p in server.data_dir.iterdir() if p.is_file())
    assert fs["file_system_id"].encode() in stored
    assert secret not in stored
    assert secret not in server.log.read_bytes()
    assert stat.S_IMODE((server.data_dir / "admin.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"display_name":"a","display_name":"b"}', "twice"),
        (b'{"display_name":"\\ud800"}', "display_name"),
        (b'{"labels":{"n":NaN}}', "NaN"),
        (b'{"display_name":"a"', "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"labels":' + b"[" * 100_000, "nested"),
        (b'{"misspelt":1}', "misspelt"),
        (b'{"display_name":1}', "display_name"),
        (b'{"labels":{"a":1}}', "label"),
        (b'{"display_name":"a\\u0007"}', "control character"),
        (json.dumps({"display_name": "x" * 257}).encode(), "at most 256"),
        (json.dumps({"labels": {str(i): "" for i in range(65)}}).encode(), "at most 64"),
    ],
)
def test_bad_bodies_name_what_is_wrong(shared_server: Server, body: bytes, says: str) -> None:
    got = shared_server.admin("POST", BASE, body)
    assert got.status == 400, got.body
    assert says in got.json["error"]["message"]
    assert got.json["error"]["request_id"] == got.headers["x-request-id"]


def test_a_body_over_its_bound_is_refused_before_and_while_it_arrives(shared_server: Server) -> None:
    got = shared_server.admin("POST", BASE, b"x" * (8 * 1024 * 1024 + 1))
    assert got.status == 413 and got.code == "too_large"
    assert shared_server.admin("POST", BASE, b" " * (8 * 1024 * 1024)).status == 201
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=30)
    connection.request(
        "POST",
        BASE,
        iter([b" " * 65536] * 129),
        {"Authorization": f"Bearer {shared_server.admin_key}"},
        encode_chunked=True,
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_unknown_routes_and_methods_have_the_error_body(shared_server: Server) -> None:
    for method, path, status in (("GET", "/nope", 404), ("PATCH", BASE, 405), ("GET", BASE + "/", 404)):
        got = shared_server.admin(method, path)
        assert got.status == status
        assert set(got.json["error"]) >= {"code", "message", "hint", "retryable", "request_id"}


def test_the_test_clock_is_refused_without_its_flag(shared_server: Server) -> None:
    got = shared_server.ask("GET", "/healthz", headers={"X-Fsd-Test-Now": "1000"})
    assert got.status == 400 and "test clock" in got.json["error"]["message"]


def test_metrics_and_health_need_no_key(shared_server: Server) -> None:
    assert shared_server.ask("GET", "/healthz").json == {"status": "ok"}
    assert shared_server.ask("GET", "/readyz").json == {"status": "ready"}
    text = shared_server.ask("GET", "/metrics").body.decode()
    assert 'fsd_requests_total{route="/healthz",method="GET",status="200"}' in text
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0
