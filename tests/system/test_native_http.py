"""Native checkpoints over HTTP, against a real server: routes, states by every name, restore, export."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from support.server import Server, TestFs

from fsd.meta.sqlite import FILE
from fsd.wire.messages import BarrierAsk, read_feed

PAYLOAD = bytes(range(256)) * 6000  # one and a half blocks


def put(fs: TestFs, path: str, data: bytes, query: str = "?parents=1") -> None:
    reply = fs.ask("PUT", f"/files{path}{query}", data)
    assert reply.status == 200, reply.body


def get(fs: TestFs, path: str, query: str = "") -> bytes:
    reply = fs.ask("GET", f"/files{path}{query}")
    assert reply.status == 200, reply.body
    return reply.body


def make(fs: TestFs, **body: Any) -> dict[str, Any]:
    reply = fs.ask("POST", "/checkpoints", body)
    assert reply.status == 201, reply.body
    found: dict[str, Any] = reply.json
    return found


def test_history_goes_on_where_a_page_ended(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/n0", b"x")
    for at in range(3):
        make(fs)
        fs.ask("POST", "/actions", {"action": "rename", "from": f"/n{at}", "to": f"/n{at + 1}"})
    seen, cursor = [], ""
    while True:
        page = fs.ask("GET", f"/history/n3?limit=1&cursor={cursor}").json
        seen += [one["path"] for one in page["versions"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == ["/n3", "/n2", "/n1", "/n0"]
    assert fs.ask("GET", "/history/n0").json["moved_to"] == "/n3"
    assert "moved_to" not in fs.ask("GET", "/history/n0?follow=0").json
    for query in (
        "cursor=7",
        "cursor=x",
        "cursor=OTk5OTk5OTk5OTo5OTk5OTk5OTk5OTk5OTk5OTk5Og",
        "follow=maybe",
    ):
        assert fs.ask("GET", f"/history/n3?{query}").status == 400, query


def test_a_checkpoint_from_its_making_to_its_end(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/d/one", b"first")
    put(fs, "/d/large", PAYLOAD)
    made = make(fs, label="before")
    name = made["checkpoint_id"]
    assert {"thread_id", "fs_seq", "label", "created_at", "not_flushed", "server_ms"} <= made.keys()
    assert 0 < made["server_ms"] < 5000
    put(fs, "/d/one", b"second, longer")
    put(fs, "/new", b"x")
    at = f"?checkpoint={name}"
    for query in (at, f"?fs_seq={made['fs_seq']}"):
        assert get(fs, "/d/one", query) == b"first"
        assert get(fs, "/d/large", query) == PAYLOAD
        assert fs.ask("GET", f"/stat/new{query}").status == 404
        names = [one["name"] for one in fs.ask("GET", f"/list/{query}").json["entries"]]
        assert names == ["d"]
        assert len(fs.ask("GET", f"/find/{query}&name=*").json["matches"]) == 3
    diff = fs.ask("GET", f"/diff?from={name}").json
    assert [(one["path"], one["change"]) for one in diff["changes"]] == [
        ("/d/one", "modified"),
        ("/new", "added"),
    ]
    assert (diff["changes"][0]["size_before"], diff["changes"][0]["size_after"]) == (5, 14)
    first = fs.ask("GET", f"/diff?from={name}&limit=1").json
    rest = fs.ask("GET", f"/diff?from={name}&limit=1&after={first['next_after']}").json
    assert first["changes"] + rest["changes"] == diff["changes"]
    assert rest["next_after"] is None
    found = fs.ask("GET", "/checkpoints").json["checkpoints"]
    assert found[0]["checkpoint_id"] == name
    assert fs.ask("GET", f"/checkpoints/{name}").json == found[0]
    deleted = fs.ask("DELETE", f"/checkpoints/{name}").json
    assert (deleted["status"], deleted["server_ms"] > 0, diff["server_ms"] > 0) == ("deleted", True, True)
    gone = fs.ask("GET", f"/files/d/one{at}")
    assert (gone.status, gone.code) == (404, "not_found")
    assert fs.ask("GET", f"/files/d/one?fs_seq={made['fs_seq']}").status == 404


def test_restore_undo_undelete_history(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/w/a", b"one")
    put(fs, "/w/b", b"bee")
    first = make(fs)
    put(fs, "/w/a", b"two")
    assert fs.ask("POST", "/actions", {"action": "remove", "path": "/w/b"}).status == 200
    put(fs, "/w/c", b"sea")
    dry = fs.ask("POST", "/restore", {"checkpoint": first["checkpoint_id"], "dry_run": True}).json
    assert dry["changes"] > 0
    assert get(fs, "/w/a") == b"two"
    done = fs.ask("POST", "/restore", {"checkpoint": first["checkpoint_id"]})
    assert done.status == 200, done.body
    assert (get(fs, "/w/a"), get(fs, "/w/b")) == (b"one", b"bee")
    assert fs.ask("GET", "/stat/w/c").status == 404
    undo = done.json["undo_checkpoint_id"]
    shown = fs.ask("GET", f"/checkpoints/{undo}").json
    assert shown["reason"] == "restore-undo"
    assert fs.ask("POST", "/restore", {"checkpoint": undo, "path": "/w/c"}).status == 200
    assert (get(fs, "/w/c"), get(fs, "/w/a")) == (b"sea", b"one")
    versions = fs.ask("GET", "/history/w/a").json["versions"]
    assert [one["stat"]["size_bytes"] for one in versions] == [3, 3, 3]
    assert fs.ask("POST", "/actions", {"action": "remove", "path": "/w", "recursive": True}).status == 200
    assert fs.ask("POST", "/undelete", {"path": "/w/b"}).status == 200
    assert get(fs, "/w/b") == b"bee"
    again = fs.ask("POST", "/undelete", {"path": "/w/b"})
    assert (again.status, again.code) == (409, "conflict")
    assert fs.ask("POST", "/undelete", {"path": "/never"}).status == 404
    absent = fs.ask("POST", "/restore", {"checkpoint": first["checkpoint_id"], "path": "/never"})
    assert absent.status == 404


def test_a_restore_under_a_mount_needs_force_or_to_be_its_own(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/a", b"1")
    made = make(fs)
    put(fs, "/a", b"2")
    session = fs.ask("POST", "/sessions", {"mount_id": "m1", "host": "boxA", "path": "/mnt/w"}).json
    body = {"checkpoint": made["checkpoint_id"]}
    refused = fs.ask("POST", "/restore", body)
    assert (refused.status, refused.code) == (409, "busy")
    assert "boxA" in refused.json["error"]["message"]
    assert fs.ask("POST", "/restore", {**body, "own_sessions": [session["session"]]}).status == 200
    assert get(fs, "/a") == b"1"
    put(fs, "/a", b"3")
    assert fs.ask("POST", "/restore", {**body, "force": True}).status == 200
    assert get(fs, "/a") == b"1"


def test_an_exclusive_mount_is_never_restored_under(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/own/a", b"1")
    put(fs, "/free/a", b"1")
    made = make(fs)
    put(fs, "/own/a", b"2")
    put(fs, "/free/a", b"2")
    ino = int(fs.ask("GET", "/stat/own").json["ino"])
    body = {"mount_id": "m", "host": "boxA", "path": "/m", "exclusive": {"ino": ino, "ttl_s": 60}}
    assert fs.ask("POST", "/sessions", body).status == 201
    whole = {"checkpoint": made["checkpoint_id"], "force": True}
    for wish in (whole, {**whole, "path": "/own/a"}, {**whole, "path": "/own"}):
        refused = fs.ask("POST", "/restore", wish)
        assert (refused.status, refused.code) == (409, "lease_held"), refused.body
    assert fs.ask("POST", "/restore", {**whole, "path": "/free"}).status == 200
    assert (get(fs, "/own/a"), get(fs, "/free/a")) == (b"2", b"1")


def start(fs: TestFs, name: str) -> int:
    reply = fs.ask("POST", "/sessions", {"mount_id": name, "host": name, "path": "/mnt/w"})
    assert reply.status == 201, reply.body
    found: int = reply.json["session"]
    return found


def asks(fs: TestFs, session: int, asked: int = 0, wait: float = 20) -> tuple[BarrierAsk, ...]:
    """What the feed asks a session."""
    head = fs.ask("GET", "/sessions")
    assert head.status == 200
    seq = read_feed(fs.ask("GET", "/changes?after=0").body).head
    reply = fs.ask("GET", f"/changes?after={seq}&session={session}&asked={asked}&wait={wait}")
    return read_feed(reply.body).asks


def test_mounts_are_asked_for_a_barrier(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/a", b"1")
    one, other = start(fs, "boxA"), start(fs, "boxB")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make, fs, drain={"timeout": 30})
        (ask,) = asks(fs, one)
        assert 0 < ask.left_ms <= 30_000
        assert asks(fs, one, asked=ask.id, wait=0) == ()
        put(fs, "/a", b"flushed by A")
        yes = {"ask": ask.id, "included": True, "fs_seq": 2}
        assert fs.ask("POST", f"/sessions/{one}/barrier", yes).status == 200
        (second,) = asks(fs, other)
        no = {"ask": second.id, "included": False, "pending": [1, 1, 77], "reason": "the disk is slow"}
        assert fs.ask("POST", f"/sessions/{other}/barrier", no).status == 200
        made = waiting.result(30)
    told = {entry["session"]: entry for entry in made["sessions"]}
    assert (told[one]["included"], told[one]["pending_bytes"]) == (True, 0)
    assert (told[other]["included"], told[other]["pending_bytes"]) == (False, 77)
    assert told[other]["reason"] == "the disk is slow"
    assert get(fs, "/a", f"?checkpoint={made['checkpoint_id']}") == b"flushed by A"
    late = fs.ask("POST", f"/sessions/{one}/barrier", yes)
    assert (late.status, late.code) == (404, "session_unknown")


def test_a_mount_that_does_not_answer(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/a", b"1")
    start(fs, "boxA")
    refused = fs.ask("POST", "/checkpoints", {"drain": {"timeout": 0.3}, "require_all": True})
    assert (refused.status, refused.code) == (409, "not_drained")
    assert fs.ask("GET", "/checkpoints").json["checkpoints"] == []
    made = make(fs, drain={"timeout": 0.3})
    assert [(one["host"], one["included"]) for one in made["sessions"]] == [("boxA", False)]
    for drain in (5, {"timeout": 0}, {"timeout": True}, {"seconds": 3}):
        assert fs.ask("POST", "/checkpoints", {"drain": drain}).status == 400


def op(fs: TestFs, name: str, body: dict[str, Any]) -> Any:
    reply = fs.server.ask("POST", f"/v1/checkpoints/{name}", body, token=fs.token)
    assert reply.status == 200, reply.body
    return reply.json["result"]


def test_a_native_checkpoint_in_a_hosts_thread(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/d/a", b"one")
    put(fs, "/large", PAYLOAD)
    op(fs, "saveThread", {"threadId": "chat", "messages": [{"role": "user"}]})
    writer = op(fs, "acquireWriter", {"threadId": "chat"})
    source = make(fs)
    put(fs, "/d/a", b"two")
    body = {"thread": "chat", "writer": writer, "label": "x", "source": source["checkpoint_id"]}
    key = {"Idempotency-Key": "k-thread"}
    first = fs.ask("POST", "/checkpoints", body, headers=key)
    assert first.status == 201, first.body
    again = fs.ask("POST", "/checkpoints", body, headers=key)
    assert again.json["checkpoint_id"] == first.json["checkpoint_id"]
    name = first.json["checkpoint_id"]
    record = op(fs, "get", {"id": name})
    assert [(one["path"], one["size"]) for one in record["files"]] == [("d/a", 3), ("large", len(PAYLOAD))]
    assert record["conversation"] == [{"role": "user"}]
    assert (record["label"], record["parentCheckpointId"]) == ("x", None)
    assert op(fs, "getHead", {"threadId": "chat"}) == name
    assert len(op(fs, "listBlobReferences", {})) == 2
    stale = fs.ask("POST", "/checkpoints", body)
    assert (stale.status, stale.code) == (409, "SANDBOX_SNAPSHOT_STALE_HEAD")
    second = make(fs, thread="chat", writer=writer, expected_head_id=name)
    assert second["parent_id"] == name
    assert get(fs, "/d/a", f"?checkpoint={name}") == b"one"
    assert get(fs, "/d/a", f"?checkpoint={second['checkpoint_id']}") == b"two"
    assert fs.ask("DELETE", f"/checkpoints/{name}").status == 409
    assert fs.ask("DELETE", f"/checkpoints/{source['checkpoint_id']}").status == 200
    removed = {"threadId": "chat", "checkpointId": second["checkpoint_id"], "writer": writer}
    op(fs, "deleteHead", removed)
    assert get(fs, "/d/a", f"?checkpoint={name}") == b"one"
    op(fs, "deleteHead", {**removed, "checkpointId": name})
    assert fs.ask("GET", f"/files/d/a?checkpoint={name}").status == 404
    assert op(fs, "listBlobReferences", {}) == []
    other = {"thread": f"fsd:{fs.id}", "writer": {**writer, "threadId": f"fsd:{fs.id}"}}
    assert fs.ask("POST", "/checkpoints", other).status == 422


def test_a_key_that_was_used_long_ago_is_a_new_one(server: Server) -> None:
    """Also before the sweep has forgotten it: the checkpoint goes into the host's thread, by its rules."""
    fs = server.create(lease_duration_ms=3_600_000, renew_after_ms=1_800_000)
    key = {"Idempotency-Key": "k-old"}
    writer = op(fs, "acquireWriter", {"threadId": "chat"})
    body = {"thread": "chat", "writer": writer, "expected_head_id": None}
    first = fs.ask("POST", "/checkpoints", body, headers=key)
    again = fs.ask("POST", "/checkpoints", body, headers=key)
    assert (first.status, again.status) == (201, 201)
    assert again.headers["idempotent-replay"] == "true"
    assert again.json["checkpoint_id"] == first.json["checkpoint_id"]
    with closing(sqlite3.connect(server.data_dir / FILE, timeout=60)) as db, db:
        assert db.execute("UPDATE idempotency SET expires=1 WHERE key='k-old'").rowcount == 1
    late = fs.ask("POST", "/checkpoints", body, headers=key)
    assert (late.status, late.code) == (409, "SANDBOX_SNAPSHOT_STALE_HEAD"), "the thread has a head by now"
    assert [one["thread_id"] for one in fs.ask("GET", "/checkpoints").json["checkpoints"]] == ["chat"]


def test_manifests_are_listed_and_shown_too(shared_fs: TestFs) -> None:
    fs = shared_fs
    writer = op(fs, "acquireWriter", {"threadId": "t/1"})
    record = {"id": "a/b ☃", "threadId": "t/1", "createdAt": 5, "reason": "named", "files": [],
              "conversation": [], "artifacts": []}  # fmt: skip
    op(fs, "append", {"checkpoint": record, "expectedHeadId": None, "writer": writer})
    (found,) = fs.ask("GET", "/checkpoints?thread=t%2F1").json["checkpoints"]
    assert (found["checkpoint_id"], found["kind"], found["fs_seq"]) == ("a/b ☃", "manifest", None)
    assert fs.ask("GET", "/checkpoints/a%2Fb%20%E2%98%83").json == found
    read = fs.ask("GET", "/stat/?checkpoint=a%2Fb%20%E2%98%83")
    assert (read.status, read.code) == (404, "not_found")
    assert "manifest" in read.json["error"]["message"]
    assert fs.ask("DELETE", "/checkpoints/a%2Fb%20%E2%98%83").status == 409


def test_files_as_of_a_journal_entry(shared_fs: TestFs) -> None:
    fs = shared_fs
    assert fs.ask("POST", "/journals", {"journal_id": "j"}).status == 201
    put(fs, "/f", b"then")
    assert fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "t"}]}).status == 200
    put(fs, "/f", b"now")
    assert get(fs, "/f", "?at_journal=j:1") == b"then"
    assert fs.ask("GET", "/files/f?at_journal=j:2").status == 404
    assert fs.ask("GET", "/files/f?at_journal=nonsense").status == 400
    assert fs.ask("GET", "/files/f?at_journal=j:1&fs_seq=1").status == 400
    assert fs.ask("POST", "/restore", {"at_journal": "j:1"}).status == 200
    assert get(fs, "/f") == b"then"


def test_export_is_a_tar_of_the_state(shared_fs: TestFs) -> None:
    fs = shared_fs
    long = "/t/" + "n" * 200
    put(fs, "/t/plain", b"hello", "?parents=1&mode=755&mtime_ns=1700000000123456789")
    put(fs, "/t/large", PAYLOAD)
    put(fs, long, b"long")
    put(fs, "/t/empty", b"")
    for action in (
        {"action": "symlink", "target": "plain", "path": "/t/link"},
        {"action": "hardlink", "source": "/t/plain", "path": "/t/z-hard"},
        {"action": "hardlink", "source": "/t/link", "path": "/t/z-link"},
        {"action": "mkdir", "path": {"b64": "L3Qv/w=="}},
        {"action": "setxattr", "path": "/t/plain", "name": "user.k", "value_b64": "/wA="},
    ):
        assert fs.ask("POST", "/actions", action).status == 200
    made = make(fs)
    put(fs, "/t/plain", b"changed")
    reply = fs.ask("GET", f"/export/t?checkpoint={made['checkpoint_id']}")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(reply.body), errors="surrogateescape") as tar:
        found = {one.name: one for one in tar.getmembers()}
        assert tar.extractfile(found["t/plain"]).read() == b"hello"  # type: ignore[union-attr]
        assert tar.extractfile(found["t/large"]).read() == PAYLOAD  # type: ignore[union-attr]
    assert found["t"].isdir()
    assert found[long[1:]].size == 4
    assert found["t/plain"].mode == 0o755
    assert found["t/plain"].pax_headers["mtime"] == "1700000000.123456789"
    assert found["t/plain"].pax_headers["SCHILY.xattr.user.k"] == "\udcff\0"
    assert found["t/link"].linkname == "plain"
    assert (found["t/z-hard"].islnk(), found["t/z-hard"].linkname) == (True, "t/plain")
    # Of a hard link to a symlink `tarfile` changes the mode and owner of what the symlink leads to.
    assert (found["t/z-link"].issym(), found["t/z-link"].linkname) == (True, "plain")
    assert found["t/\udcff"].isdir()
    one = fs.ask("GET", f"/export/t/plain?checkpoint={made['checkpoint_id']}")
    with tarfile.open(fileobj=io.BytesIO(one.body)) as tar:
        assert [member.name for member in tar] == ["plain"]
    live = fs.ask("GET", "/export/t/plain")
    with tarfile.open(fileobj=io.BytesIO(live.body)) as tar:
        assert tar.extractfile("plain").read() == b"changed"  # type: ignore[union-attr]


def test_prune_keeps_what_the_rule_says(shared_fs: TestFs) -> None:
    fs = shared_fs
    names = [make(fs, reason="automatic")["checkpoint_id"] for _ in range(4)]
    kept = make(fs, label="release")["checkpoint_id"]
    # A mount of an older version sends no more with its schedule's number.
    dry = fs.ask("POST", "/checkpoints/prune", {"keep": "1", "dry_run": True}).json
    assert dry["deleted"] == names[:3]
    assert (dry["kept"], dry["not_considered"]) == (1, 1)
    dry = fs.ask("POST", "/checkpoints/prune", {"keep": "1", "asked_for": True, "dry_run": True}).json
    assert dry["deleted"] == names
    assert (dry["kept"], dry["not_considered"]) == (1, 0)
    assert fs.ask("POST", "/checkpoints/prune", {"keep": "last=1,daily=7"}).json["deleted"] == names[:3]
    left = [one["checkpoint_id"] for one in fs.ask("GET", "/checkpoints").json["checkpoints"]]
    assert left == [kept, names[3]]
    for keep in ("", "0", "sometimes=3", "daily=1,daily=2"):
        assert fs.ask("POST", "/checkpoints/prune", {"keep": keep}).status == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/checkpoints", {"label": 3}, 400),
        ("POST", "/checkpoints", {"lable": "x"}, 400),
        ("GET", "/checkpoints/cp_none", None, 404),
        ("DELETE", "/checkpoints/cp_none", None, 404),
        ("GET", "/diff", None, 400),
        ("GET", "/diff?from=cp_none", None, 404),
        ("GET", "/diff?from=seq:x", None, 400),
        ("GET", "/diff?from=seq:99999", None, 404),
        ("GET", "/diff?from=seq:0&limit=0", None, 400),
        ("POST", "/restore", {}, 400),
        ("POST", "/restore", {"checkpoint": "cp_none"}, 404),
        ("POST", "/restore", {"checkpoint": "x", "fs_seq": 1}, 400),
        ("POST", "/undelete", {"path": "/"}, 400),
        ("GET", "/export/nothing", None, 404),
        ("GET", "/files/x?checkpoint=cp_none", None, 404),
    ],
)
def test_bad_input(shared_fs: TestFs, method: str, path: str, body: Any, status: int) -> None:
    reply = shared_fs.ask(method, path, body)
    assert reply.status == status, reply.body
    assert reply.json["error"]["message"]
