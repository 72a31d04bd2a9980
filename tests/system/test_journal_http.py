"""Journals over real HTTP: what is kept, what is refused, keys, order, pages, long polls, search."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.server import Reply, Server, TestFs

ENTRY = {"type": "task.checkpoint", "step": "inspection-complete"}


def append(fs: TestFs, entries: list[Any], journal: str = "task-42", **more: Any) -> Reply:
    return fs.ask("POST", f"/journals/{journal}/entries", {"entries": entries, **more})


def read(fs: TestFs, journal: str = "task-42", query: str = "") -> dict[str, Any]:
    got = fs.ask("GET", f"/journals/{journal}/entries{query}")
    assert got.status == 200, got.body
    found: dict[str, Any] = got.json
    return found


@pytest.fixture
def fs(shared_fs: TestFs) -> TestFs:
    """A filesystem with the journal task-42."""
    made = shared_fs.ask(
        "POST",
        "/journals",
        {"journal_id": "task-42", "kind": "agent", "title": "task 42", "actor": "agent:worker-1"},
    )
    assert made.status == 201, made.body
    return shared_fs


def test_the_seed_entry_comes_back_with_its_step(fs: TestFs) -> None:
    answer = append(fs, [ENTRY]).json
    assert (answer["first_seq"], answer["last_seq"], answer["count"]) == (1, 1, 1)
    assert answer["idempotent"] is False
    (entry,) = read(fs)["entries"]
    assert entry["type"] == "task.checkpoint" and entry["step"] == "inspection-complete"
    assert entry["actor"] == {"type": "agent", "id": "worker-1"}
    assert entry["seq"] == 1 and entry["entry_hash"] == answer["head_hash"]
    assert entry["fs_seq"] == 0 and entry["barrier"] is False
    journal = fs.ask("GET", "/journals/task-42").json
    assert journal["head_hash"] == answer["head_hash"] and journal["next_seq"] == 2
    assert fs.ask("GET", "/journals/task-42/verify").json["ok"]


def test_creating_again_is_the_same_journal_unless_the_envelope_differs(fs: TestFs) -> None:
    same = {"journal_id": "task-42", "title": "task 42", "actor": {"type": "agent", "id": "worker-1"}}
    again = fs.ask("POST", "/journals", same)
    assert again.status == 200 and again.json["journal_id"] == "task-42"
    for field, value in (
        ("kind", "x"),
        ("title", ""),
        ("actor", "a:b"),
        ("labels", [{"key": "a", "value": "b"}]),
    ):
        got = fs.ask("POST", "/journals", {**same, field: value})
        assert got.status == 409 and got.json["error"]["details"] == {"field": field}
    made = fs.ask("POST", "/journals", {})
    assert made.status == 201 and made.json["kind"] == "agent"
    assert made.json["journal_id"] != fs.ask("POST", "/journals", {}).json["journal_id"]


def test_unknown_fields_and_numbers_survive_as_written(fs: TestFs) -> None:
    text = (
        '{"type":"a.b","big":123456789012345678901234567890,"neg":-9007199254740993,"f":1.10,"e":1E+2,'
        '"z":-0,"deep":{"x":[1,2.50,{"y":null}]},"status":"Mixed CASE","artifacts":[1],"source":"me",'
        '"schema_version":3,"text":"\\u0000\\n\\u2028☃\U0001f600","summary":[true,{}],"":"empty name"}'
    )
    raw = ('{"entries":[' + text + "]}").encode()
    assert fs.ask("POST", "/journals/task-42/entries", raw).status == 200
    body = fs.ask("GET", "/journals/task-42/entries").body.decode()
    for kept in (
        '"big":123456789012345678901234567890',
        '"neg":-9007199254740993',
        '"f":1.10',
        '"e":1E+2',
        '"z":-0',
        '"deep":{"x":[1,2.50,{"y":null}]}',
    ):
        assert kept in body
    sent, (got,) = json.loads(text), json.loads(body)["entries"]
    assert {name: got[name] for name in sent} == sent
    assert fs.ask("GET", "/journals/task-42/verify").json["ok"]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({}, "type"),
        ({"type": "Upper"}, "type"),
        ({"type": "a" * 129}, "type"),
        ({"type": "a\n"}, "type"),
        ({"type": 1}, "type"),
        ({"type": "a", "seq": 1}, "seq is set by the server"),
        ({"type": "a", "entry_hash": "x"}, "entry_hash is set by the server"),
        ({"type": "a", "fs_seq": 0}, "fs_seq is set by the server"),
        ({"type": "a", "fsd_x": 0}, "fsd_"),
        ({"type": "a", "status": 1}, "status"),
        ({"type": "a", "occurred_at": "yesterday"}, "occurred_at"),
        ({"type": "a", "occurred_at": "2026-02-30T00:00:00Z"}, "occurred_at"),
        ({"type": "a", "actor": "nobody"}, "actor"),
        ({"type": "a", "subjects": ["x"]}, "subjects[0]"),
        ({"type": "a", "subjects": ["a:b"] * 65}, "at most 64"),
        ({"type": "a", "x": {"y": "\ud800"}}, "x.y holds a lone surrogate"),
        ([], "not an object"),
    ],
)
def test_refused_entries_name_the_field_and_store_nothing(fs: TestFs, entry: Any, says: str) -> None:
    got = append(fs, [ENTRY, entry])
    assert got.status == 400, got.body
    assert says in got.json["error"]["message"] and "entries[1]" in got.json["error"]["message"]
    assert read(fs)["entries"] == []


def test_refused_numbers_and_duplicates(fs: TestFs) -> None:
    for raw, says in (
        (b'{"entries":[{"type":"a","x":{"n":1e400}}]}', "entries[0].x.n"),
        (b'{"entries":[{"type":"a","n":Infinity}]}', "Infinity"),
        (b'{"entries":[{"type":"a","type":"b"}]}', "twice"),
        (b'{"entries":[]}', "1 or more"),
        (b'{"entries":{}}', "list"),
        (b'{"entries":[{"type":"a"}],"expected_seq":-1}', "expected_seq"),
        (b'{"entries":[{"type":"a"}],"expected_seq":1.0}', "expected_seq"),
        (b'{"entries":[{"type":"a"}],"surprise":1}', "surprise"),
    ):
        got = fs.ask("POST", "/journals/task-42/entries", raw)
        assert got.status == 400 and says in got.json["error"]["message"], got.body
    assert read(fs)["entries"] == []


def test_bounds_of_entry_and_batch(fs: TestFs) -> None:
    room = 64 * 1024 - len(json.dumps({"type": "a", "x": ""}, separators=(",", ":")))
    assert append(fs, [{"type": "a", "x": "y" * room}]).status == 200
    got = append(fs, [{"type": "a", "x": "y" * (room + 1)}])
    assert got.status == 413 and "65537 bytes" in got.json["error"]["message"]
    assert append(fs, [{"type": "a"}] * 500).json["last_seq"] == 501
    assert append(fs, [{"type": "a"}] * 501).status == 413
    assert append(fs, [{"type": "a", "x": "y" * 60_000}] * 70).status == 413
    assert read(fs, query="?after_seq=501")["entries"] == []


def test_idempotency_key_is_bound_to_the_content(fs: TestFs) -> None:
    first = append(fs, [ENTRY], idempotency_key="step-1").json
    again = append(fs, [dict(reversed(ENTRY.items()))], idempotency_key="step-1", barrier=True)
    assert again.json == {**first, "idempotent": True}
    assert again.headers["idempotent-replay"] == "true"
    other = append(fs, [{**ENTRY, "step": "x"}], idempotency_key="step-1")
    assert other.status == 409 and other.code == "idempotency_mismatch"
    header = {"Idempotency-Key": "step-2"}
    body = {"entries": [ENTRY]}
    one = fs.ask("POST", "/journals/task-42/entries", body, headers=header).json
    two = fs.ask("POST", "/journals/task-42/entries", body, headers=header).json
    assert two == {**one, "idempotent": True} and one["first_seq"] == 2
    assert len(read(fs)["entries"]) == 2
    assert append(fs, [ENTRY], idempotency_key="a b").status == 400


def test_expected_seq_is_a_compare_and_swap(fs: TestFs) -> None:
    assert append(fs, [ENTRY], expected_seq=0).status == 200
    late = append(fs, [ENTRY], expected_seq=0)
    assert late.status == 409 and late.json["error"]["details"] == {"last_seq": 1}
    assert append(fs, [ENTRY, ENTRY], expected_seq=1).json["last_seq"] == 3


def test_concurrent_appends_have_no_gap_and_none_is_lost(fs: TestFs) -> None:
    def work(thread: int) -> list[tuple[int, int]]:
        got = []
        for at in range(12):
            answer = append(fs, [{"type": "t", "thread": thread, "at": at}] * (1 + at % 3))
            assert answer.status == 200, answer.body
            got.append((answer.json["first_seq"], answer.json["last_seq"]))
        return got

    with ThreadPoolExecutor(8) as pool:
        ranges = sorted(r for part in pool.map(work, range(8)) for r in part)
    expected = 1
    for first, last in ranges:
        assert first == expected
        expected = last + 1
    entries = read(fs, query="?limit=1000")["entries"]
    assert [e["seq"] for e in entries] == list(range(1, expected))
    for thread in range(8):
        order = [e["at"] for e in entries if e["thread"] == thread]
        assert order == sorted(order) and set(order) == set(range(12))
    assert fs.ask("GET", "/journals/task-42/verify").json == {
        **fs.ask("GET", "/journals/task-42/verify").json,
        "ok": True,
        "entries": expected - 1,
    }


def test_pages_end_with_an_empty_list(fs: TestFs) -> None:
    append(fs, [{"type": "a", "n": n} for n in range(7)])
    seen, after = [], 0
    while True:
        page = read(fs, query=f"?after_seq={after}&limit=3")
        after = page["next_after_seq"]
        if not page["entries"]:
            break
        seen += [e["n"] for e in page["entries"]]
    assert seen == list(range(7)) and after == 7
    for bad in ("limit=0", "limit=1001", "after_seq=-1", "after_seq=x", "wait=nan"):
        assert fs.ask("GET", f"/journals/task-42/entries?{bad}").status == 400


def test_large_pages_end_early_and_nothing_is_left_out(fs: TestFs) -> None:
    for _ in range(4):
        assert append(fs, [{"type": "a", "x": "y" * 60_000}] * 60).status == 200
    sizes, after = [], 0
    while True:
        page = read(fs, query=f"?after_seq={after}&limit=1000")
        if not page["entries"]:
            break
        assert [e["seq"] for e in page["entries"]] == list(range(after + 1, page["next_after_seq"] + 1))
        after = page["next_after_seq"]
        sizes.append(len(json.dumps(page)))
    assert after == 240 and len(sizes) > 2 and max(sizes) < 8 << 20
    seen, cursor = [], ""
    while True:
        got = fs.ask("GET", f"/journal-entries?limit=1000&cursor={cursor}")
        assert len(got.body) < 8 << 20
        seen += [m["entry"]["seq"] for m in got.json["matches"]]
        cursor = got.json["next_cursor"]
        if cursor is None:
            break
    assert seen == list(range(1, 241))


def test_a_long_poll_returns_with_the_entry(fs: TestFs) -> None:
    got: list[dict[str, Any]] = []
    poll = threading.Thread(target=lambda: got.append(read(fs, query="?after_seq=0&wait=30")))
    poll.start()
    metrics = "fsd_long_polls_waiting"
    from support.wait import wait_for

    wait_for(lambda: f"{metrics} 0" not in fs.server.ask("GET", "/metrics").body.decode(), 30, "the poll")
    append(fs, [ENTRY])
    appended = time.monotonic()
    poll.join(60)
    assert got and got[0]["entries"][0]["step"] == "inspection-complete"
    assert time.monotonic() - appended < 25
    assert read(fs, query="?after_seq=1&wait=0.1")["entries"] == []


def test_list_and_search(fs: TestFs) -> None:
    labelled = {"journal_id": "b", "kind": "ci", "labels": [{"key": "team", "value": "x"}]}
    fs.ask("POST", "/journals", labelled)
    append(fs, [{"type": "a", "status": "ok", "subjects": ["file:x", "file:y"]}, {"type": "b"}])
    append(fs, [{"type": "a", "status": "bad", "actor": "human:me"}], "b")

    def ids(query: str) -> list[str]:
        return [j["journal_id"] for j in fs.ask("GET", f"/journals?{query}").json["journals"]]

    assert ids("") == ["b", "task-42"]
    assert ids("kind=ci") == ids("label=team%3Dx") == ["b"]
    assert ids("label=team%3Dy") == []
    first = fs.ask("GET", "/journals?limit=1").json
    assert first["next_cursor"] == "b" and ids("limit=1&cursor=b") == ["task-42"]

    def found(query: str) -> list[tuple[str, int]]:
        got = fs.ask("GET", f"/journal-entries?{query}")
        assert got.status == 200, got.body
        # Within one tick of the clock the order is that of the journals' ids.
        return sorted((m["journal_id"], m["entry"]["seq"]) for m in got.json["matches"])

    assert found("") == [("b", 1), ("task-42", 1), ("task-42", 2)]
    assert found("type=a") == [("b", 1), ("task-42", 1)]
    assert found("type=a&status=bad") == [("b", 1)]
    assert found("actor=agent:worker-1&journal_id=task-42&type=b") == [("task-42", 2)]
    assert found("actor=human:me") == found("label=team%3Dx") == found("kind=ci") == [("b", 1)]
    assert found("subject=file:x&subject=file:y") == [("task-42", 1)]
    assert found("subject=file:x&subject=file:z") == []
    assert (
        len(found("since=1h")) == 3 and found("until=1h") == [] and found("since=2200-01-01T00:00:00Z") == []
    )
    page = fs.ask("GET", "/journal-entries?limit=2").json
    rest = fs.ask("GET", f"/journal-entries?cursor={page['next_cursor']}").json
    assert len(page["matches"]) == 2 and len(rest["matches"]) == 1 and rest["next_cursor"] is None
    both = page["matches"] + rest["matches"]
    assert len({(m["journal_id"], m["entry"]["seq"]) for m in both}) == 3
    # Times beyond what a row can hold mean what they say.
    assert found("since=9999-12-31T23:59:59Z") == [] == found("until=0001-01-01T00:00:00Z")
    assert len(found("since=999999999w")) == len(found("until=9999-12-31T23:59:59Z")) == 3
    for bad in ("since=soon", "actor=x", "cursor=x", "label=x", "limit=0"):
        assert fs.ask("GET", f"/journal-entries?{bad}").status == 400


def test_absent_and_bad_journal_ids(fs: TestFs) -> None:
    for bad in ("a%20b", "a%0A", "%E2%98%83", "x" * 129):
        assert fs.ask("GET", f"/journals/{bad}/entries").status == 400
    assert append(fs, [ENTRY], "absent").status == 404
    assert fs.ask("GET", "/journals/absent/entries").status == 404
    assert fs.ask("GET", "/journals/absent/verify").status == 404


def test_the_actor_falls_back_to_the_token(shared_server: Server) -> None:
    fs = shared_server.create()
    made = shared_server.admin("POST", f"/v1/file-systems/{fs.id}/tokens", {"token_name": "builder"}).json
    fs.ask("POST", "/journals", {"journal_id": "j"})
    named = TestFs(shared_server, fs.id, made["fs_token"])
    append(named, [{"type": "a"}, {"type": "a", "actor": "human:me"}], "j")
    one, two = read(fs, "j")["entries"]
    assert one["actor"] == {"type": "token", "id": "builder"} and two["actor"] == "human:me"
