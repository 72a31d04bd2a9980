"""What the checkpoint contract takes and what it refuses, over HTTP on each engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.contract import (
    Json,
    Store,
    artifact,
    checkpoint,
    file,
    fork_body,
    key,
    refused,
    unchanged,
    writer,
)
from support.server import Server

TILDE, EMOJI = "\uff5e", "\U0001f600"  # in this order by UTF-8 bytes, the other way round by UTF-16 units


# What is checked before the database is asked is the same on both: PostgreSQL's turn is the long run.
pytestmark = pytest.mark.parametrize(
    "contract_server",
    ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)],
    indirect=True,
    scope="session",
)


@pytest.mark.parametrize(
    "bad", ["", "\ud800", "a\udfffb", None, 5, {}, [], True, pytest.param("x" * 70_000, id="long")]
)
def test_bad_ids_are_refused_by_writes_and_reads(store: Store, bad: Any) -> None:
    lease = store.acquire()
    good = writer(lease)
    bodies: list[tuple[str, Json]] = [
        ("get", {"id": bad}),
        ("list", {"threadId": bad}),
        ("getHead", {"threadId": bad}),
        ("loadThread", {"threadId": bad}),
        ("saveThread", {"threadId": bad, "messages": []}),
        ("acquireWriter", {"threadId": bad}),
        ("renew", {"writer": {**good, "threadId": bad}}),
        ("deleteHead", {"threadId": bad, "checkpointId": "a", "writer": good}),
        ("deleteHead", {"threadId": "t", "checkpointId": bad, "writer": good}),
        ("deleteCheckpoints", {"threadId": bad, "keep": 1, "writer": good}),
        ("append", {"checkpoint": checkpoint("a", bad), "expectedHeadId": None, "writer": good}),
        ("append", {"checkpoint": checkpoint(bad), "expectedHeadId": None, "writer": good}),
        (
            "append",
            {"checkpoint": checkpoint("a"), "expectedHeadId": None, "writer": {**good, "threadId": bad}},
        ),
        ("instances.get", {"key": bad}),
        ("instances.upsert", {"record": {"key": bad}}),
        *(
            ("forkFromCheckpoint", {**fork_body(("s", "a"), ("t", "b"), lease), name: bad})
            for name in (
                "sourceThreadId",
                "sourceCheckpointId",
                "destinationThreadId",
                "destinationCheckpointId",
            )
        ),
    ]
    if bad is not None:
        bodies += [
            ("append", {"checkpoint": checkpoint("a"), "expectedHeadId": bad, "writer": good}),
            ("append", {"checkpoint": checkpoint("a", parent=bad), "expectedHeadId": None, "writer": good}),
        ]
    for op, body in bodies:
        error = refused("INVALID_ID", lambda op=op, body=body: store.call(op, body))  # type: ignore[misc]
        assert error.status == 422
        assert error.error["message"].isascii()
    assert store.state("t") == {"counts": {}, "t": ([], None, [])}


@pytest.mark.parametrize(
    "name",
    ["a/b", "with space", "\0", pytest.param("x" * 10_000, id="long"), "ünï", "..", "{}", "a\nb", "%2F"],
)
def test_any_other_text_is_an_id(store: Store, name: str) -> None:
    lease = store.acquire(name)
    store.append(checkpoint(name, name), None, lease)
    assert store.get(name)["threadId"] == name
    assert store.head(name) == name
    assert store.ids(name) == [name]
    store.save(name, [name])
    assert store.load(name) == [name]


@pytest.mark.parametrize("created", [None, "5", True, {}, [], 1e400, pytest.param(10**400, id="huge")])
def test_a_time_that_is_no_finite_number_is_refused(store: Store, created: Any) -> None:
    """JavaScript writes its three others as null."""
    lease = store.acquire()
    record = checkpoint("a", createdAt=created)
    body = {"checkpoint": record, "expectedHeadId": None, "writer": writer(lease)}
    raw = json.dumps(body).replace("Infinity", "1e400").encode()
    reply = store.raw("append", raw)
    assert (reply.status, reply.code) == (422, "SANDBOX_SNAPSHOT_INVALID_ENTRY")
    assert store.state("t") == {"counts": {}, "t": ([], None, [])}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_bare_words_are_no_numbers(store: Store, word: str) -> None:
    lease = store.acquire()
    body = {"checkpoint": checkpoint("a", createdAt=0.5), "expectedHeadId": None, "writer": writer(lease)}
    reply = store.raw("append", json.dumps(body).replace("0.5", word).encode())
    assert reply.status == 400
    assert word in reply.json["error"]["message"]
    assert store.head() is None


@pytest.mark.parametrize("created", [0, -1, 1.5, 2**53, 2**63, pytest.param(10**300, id="huge"), 1e-300])
def test_any_finite_time_is_fine(store: Store, created: Any) -> None:
    store.grow("t", "a", createdAt=created)
    assert store.get("a")["createdAt"] == created
    assert store.ids() == ["a"]


BAD_PATHS = [
    "",
    "/abs",
    "a//b",
    "./a",
    "a/./b",
    "a/../b",
    "..",
    ".",
    "a/",
    "a/..",
    "a\\b",
    "bad\0name",
    "C:/x",
    "C:",
    "c:/",
    "a\ud800",
    "a\n/",
    None,
    7,
    ["a"],
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_bad_paths_are_refused(store: Store, path: Any) -> None:
    lease = store.acquire()
    for entry in ({**file("x"), "path": path}, {"path": path, "kind": "dir"}):
        record = checkpoint("a", files=[file("fine"), entry])
        error = unchanged(store, "INVALID_ENTRY", lambda r=record: store.append(r, None, lease))  # type: ignore[misc]
        assert error.status == 422


def test_odd_paths_are_fine(store: Store) -> None:
    paths = [
        "C:x",
        "1:/x",
        "a b",
        "...",
        "..a",
        "a..",
        ".hidden/x",
        EMOJI,
        "é",
        "e\u0301",
        "new\nline",
        "x" * 300,
    ]
    record = checkpoint("a", files=[file(path) for path in paths])
    store.append(record, None, store.acquire())
    assert store.get("a")["files"] == record["files"]


@pytest.mark.parametrize(
    "files",
    [
        None,
        "text",
        {},
        [None],
        [1],
        [[]],
        [{}],
        [{"path": "a"}],
        [{"path": "a", "kind": "socket"}],
        [{"path": "a", "kind": None}],
        [file("a"), file("a")],
        [file("a"), {"path": "a", "kind": "dir"}],
        [file("a"), file("a/b")],
        [file("a/b/c"), file("a")],
        [{"path": "a/b", "kind": "dir"}, file("a")],
        [{"path": "l", "kind": "symlink", "target": "x"}, file("l/x")],
        [{"path": "d", "kind": "dir", "blobKey": None}],
        [{"path": "d", "kind": "dir", "size": 0}],
        [{"path": "l", "kind": "symlink"}],
        [{"path": "l", "kind": "symlink", "target": ""}],
        [{"path": "l", "kind": "symlink", "target": "a\0"}],
        [{"path": "l", "kind": "symlink", "target": "/etc/passwd"}],
        [{"path": "l", "kind": "symlink", "target": ".."}],
        [{"path": "d/l", "kind": "symlink", "target": "x/../../../y"}],
        [{"path": "l", "kind": "symlink", "target": "x", "size": 1}],
        [{"path": "l", "kind": "symlink", "target": "x", "blobKey": key("x")}],
    ],
)
def test_bad_entries_are_refused(store: Store, files: Any) -> None:
    lease = store.acquire()
    unchanged(store, "INVALID_ENTRY", lambda: store.append(checkpoint("a", files=files), None, lease))


@pytest.mark.parametrize(
    "fields",
    [
        {"blobKey": None},
        {"blobKey": 5},
        {"blobKey": "x"},
        {"blobKey": key("a", "artifacts")},
        {"blobKey": key("a") + "\n"},
        {"blobKey": key("a").upper()},
        {"blobKey": key("a")[:-1]},
        {"blobKey": key("a") + "0"},
        {"blobKey": key("a")[:-1] + "\uff10"},
        {"blobKey": key("a")[:-1] + "\ud800"},
        {"size": None},
        {"size": -1},
        {"size": 1.5},
        {"size": True},
        {"size": "3"},
        {"size": 2**53},
        {"size": 1e400},
    ],
)
def test_bad_files_are_refused(store: Store, fields: Json) -> None:
    lease = store.acquire()
    record = checkpoint("a", files=[file("a")])
    record["files"][0].update(fields)
    body = {"checkpoint": record, "expectedHeadId": None, "writer": writer(lease)}
    raw = json.dumps(body).replace("Infinity", "1e400").encode()
    reply = store.raw("append", raw)
    assert (reply.status, reply.code) == (422, "SANDBOX_SNAPSHOT_INVALID_ENTRY")
    assert store.counts() == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"artifactId": ""},
        {"artifactId": None},
        {"artifactId": "\udc00"},
        {"name": ""},
        {"name": 5},
        {"mimeType": ""},
        {"mimeType": None},
        {"blobKey": key("a")},
        {"blobKey": ""},
        {"size": -1},
        {"size": False},
        {"createdAt": None},
        {"createdAt": "x"},
    ],
)
def test_bad_artifacts_are_refused(store: Store, fields: Json) -> None:
    lease = store.acquire()
    record = checkpoint("a", artifacts=[{**artifact("x"), **fields}])
    unchanged(store, "INVALID_ENTRY", lambda: store.append(record, None, lease))
    for what in (None, "x", [None], [1]):
        unchanged(
            store,
            "INVALID_ENTRY",
            lambda what=what: store.append(checkpoint("a", artifacts=what), None, lease),  # type: ignore[misc]
        )


def test_whole_floats_and_bounds_are_numbers(store: Store) -> None:
    files = [file("a", size=5.0), file("b", size=0), file("c", size=2**53 - 1)]
    store.append(checkpoint("a", files=files), None, store.acquire())
    assert [entry["size"] for entry in store.get("a")["files"]] == [5, 0, 2**53 - 1]


def test_what_nobody_knows_is_kept(store: Store) -> None:
    record = checkpoint(
        "a",
        reason="some newer reason",
        sourceRunId="run-1",
        later={"deep": [1, None, {"x": 1.5}]},
        files=[
            file("run.sh", mode=0o755, mtimeNs="170000"),
            {"path": "link", "kind": "symlink", "target": "sub/../run.sh", "hint": 1},
            {"path": "empty", "kind": "dir", "owner": None},
        ],
        artifacts=[artifact("p", extra=True), artifact("p")],
    )
    store.append(record, None, store.acquire())
    assert store.get("a") == record
    assert store.list() == [record]


def test_conversations_come_back_as_they_were(store: Store) -> None:
    deep: Any = "end"
    for _ in range(200):
        deep = [deep]
    conversation = [
        {"role": "user", "content": "cut in a \ud83d", "n": [1, 1.5, -0.5, 1e21, 12345678901234567890, 0]},
        {"content": None, "empty": {}, "list": [], "nul": "\0", "text": EMOJI + "\u2028", "deep": deep},
        "no object at all",
        None,
    ]
    store.append(checkpoint("a", conversation=conversation), None, store.acquire())
    assert store.get("a")["conversation"] == conversation
    store.save("t", conversation)
    assert store.load("t") == conversation


def test_texts_that_no_utf8_has_do_not_spoil_the_lists(store: Store) -> None:
    """A host's label may be cut in the middle of a character; the filesystem's own routes show it too."""
    lease = store.acquire()
    cut = "half \ud83d"
    store.append(checkpoint("a", label=cut, reason=[cut]), None, lease)
    long = checkpoint("b", parent="a", label="whole \U0001f4a5" + "x" * 70_000)
    store.append(long, "a", lease)
    own = f"/v1/file-systems/{store.fs.id}/checkpoints"
    assert store.ask("GET", own + "/a").json["label"] == cut
    listed = store.ask("GET", own).json["checkpoints"]
    assert [(one["label"], one["reason"]) for one in listed] == [
        (long["label"][:1024], "automatic"),
        (cut, r'["half \ud83d"]'),
    ]
    assert store.get("b") == long, "the record is whole"


def test_what_is_nested_as_deep_as_can_be_read_can_be_listed(store: Store) -> None:
    lease, head, kept = store.acquire(), None, []
    for depth in (700, 797, 798, 799, 800, 950, 970, 976, 980, 990):  # in two objects
        record = checkpoint(f"d{depth}", parent=head, conversation=["x" * 70_000])  # not on the event loop
        text = json.dumps({"checkpoint": record, "expectedHeadId": head, "writer": writer(lease)})
        deep = "[" * depth + "]" * depth
        reply = store.raw("append", text.replace('"automatic"', f'{deep}, "label": {deep}').encode())
        assert reply.status == (200 if depth <= 798 else 400), reply.body
        if reply.status == 200:
            head = record["id"]
            kept.append(head)
    listed = store.ask("GET", f"/v1/file-systems/{store.fs.id}/checkpoints")
    assert [one["checkpoint_id"] for one in listed.json["checkpoints"]] == kept[::-1]


def test_bodies_that_are_none_are_refused(store: Store) -> None:
    for raw in (b"[]", b"null", b"{", b'"x"', b"\xff", b'{"id":"a","id":"b"}', b"[" * 100_000):
        reply = store.raw("get", raw)
        assert reply.status == 400, raw[:20]
        assert reply.json["error"]["code"] == "invalid_argument"
        store.close()


def test_an_unknown_method_does_not_exist(store: Store) -> None:
    assert store.raw("getheads", b"{}").status == 404
    assert store.ask("GET", "/v1/checkpoints/get").status == 405


def test_who_has_no_token_gets_nothing(store: Store, contract_server: Server) -> None:
    for path in ("/v1/checkpoints/get", "/v1/checkpoints/append"):
        assert contract_server.ask("POST", path, {"id": "a"}).status == 401
        assert contract_server.ask("POST", path, {"id": "a"}, token=store.fs.token + "x").status == 401
        assert contract_server.ask("POST", path, b" " * 300_000, token="fsd1.x.y").status == 401
    assert contract_server.ask("GET", "/v1/blobs", token="x").status == 401


@pytest.mark.timeout(240)
def test_100_000_entries_are_no_trouble(store: Store) -> None:
    """Also the time: the checks are linear, a quadratic one would take minutes."""
    files = [file(f"d{i % 300}/e{i % 7}/f{i}", key(str(i % 50_000))) for i in range(100_000)]
    record = checkpoint("big", files=files)
    lease = store.acquire()
    began = time.monotonic()
    store.append(record, None, lease)
    assert time.monotonic() - began < 100
    got = store.get("big")
    assert len(got["files"]) == 100_000
    assert got == record
    assert len(store.counts()) == 50_000
    store.prune("t", 1, lease)
    store.delete_head("t", "big", lease)
    assert store.counts() == {}


def test_a_body_has_a_bound(store: Store) -> None:
    reply = store.ask("POST", "/v1/checkpoints/append", None, {"Content-Length": str(65 * 1024 * 1024)})
    assert (reply.status, reply.code) == (413, "too_large")
    store.close()


def test_a_portable_reading_has_no_symlinks_and_says_so(store: Store) -> None:
    files = [file("a"), {"path": "l", "kind": "symlink", "target": "a"}, {"path": "d", "kind": "dir"}]
    record = checkpoint("a", files=files)
    store.append(record, None, store.acquire())
    shorter = {**record, "files": [files[0], files[2]], "leftOut": ["l"]}
    assert store.get("a", portable=True) == shorter
    assert store.list(portable=True) == [shorter]
    reply = store.ask("POST", "/v1/checkpoints/get?portable=1", b'{"id":"a"}')
    assert reply.json["result"] == shorter
    assert store.get("a") == record


def test_a_long_list_comes_in_pieces_and_whole(store: Store) -> None:
    lease = store.acquire()
    head = None
    noise = "".join(chr(32 + (i * i) % 90) for i in range(400_000))
    for number in range(12):
        name = f"{number:02}"
        store.append(checkpoint(name, parent=head, conversation=[noise]), head, lease)
        head = name
    got = store.list()
    assert [record["id"] for record in got] == [f"{number:02}" for number in range(12)]
    assert all(record["conversation"] == [noise] for record in got)
