"""The mount's hot routes over real HTTP: sessions, commits, packs, questions, content, feed."""

from __future__ import annotations

import http.client
import os
import random
import threading
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from support.server import TestFs
from support.wait import wait_for

from fsd.model import blocks, ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.wire import messages
from fsd.wire.frame import make_blob, pack, unpack
from fsd.wire.messages import make_commit, read_answer, read_feed
from fsd.wire.received import entry_from

MODE = 0o100644


def start(fs: TestFs, mount_id: str = "m1", **more: Any) -> dict[str, Any]:
    got = fs.ask("POST", "/sessions", {"mount_id": mount_id, "host": "box", "path": "/mnt", **more})
    assert got.status == 201, got.body
    found: dict[str, Any] = got.json
    return found


def ticket_of(session: dict[str, Any]) -> bytes:
    import base64

    return base64.b64decode(session["ticket"])


def create_file(session: dict[str, Any], at: int, name: bytes, data: bytes, opno: int) -> list[Any]:
    """The operations that make a file of one blob."""
    ino = make_ino(session["session"], at)
    blob = make_blob(data)
    parts = blocks.encode((blocks.Part(0, len(data), 0, blob.hash),))
    return [
        ops.Create(opno, ops.CREATE, ROOT_INO, name, ino, MODE, 0, 0, 0, None, 1),
        ops.Content(opno + 1, ops.CONTENT, ino, 0, len(data), ((0, parts),), True, None, 2, 2),
    ]


def commit(fs: TestFs, session: dict[str, Any], ticket: bytes, made: list[Any], blobs: list[Any]) -> Any:
    sent = make_commit(session["session"], ticket, made, (0, 0, 0), blobs)
    got = fs.ask("POST", "/commits", b"".join(messages.commit_pieces(sent)))
    assert got.status == 200, got.body
    return read_answer(got.body)


def ask(fs: TestFs, *questions: Any) -> list[Any]:
    got = fs.ask("POST", "/ns", messages.packb(list(questions)))
    assert got.status == 200, got.body
    answers: list[Any] = list(msgpack.unpackb(got.body, use_list=False)["answers"])
    return answers


def test_a_newer_client_is_told_what_this_server_does_not_know(shared_fs: TestFs) -> None:
    """It looks for the beginning of the message and asks again without the field (`HttpRemote`)."""
    got = shared_fs.ask("POST", "/sessions", {"mount_id": "m", "of_a_later_version": 1})
    assert got.status == 400
    assert got.json["error"]["message"].startswith("unknown field 'of_a_later_version';")
    assert "newer" in got.json["error"]["hint"]


def test_a_commit_with_its_blob_is_seen_by_everybody(shared_fs: TestFs) -> None:
    fs = shared_fs
    session = start(fs)
    data = b"# Plan\n1. inspect\n"
    blob = make_blob(data)
    answer = commit(fs, session, ticket_of(session), create_file(session, 1, b"plan.md", data, 1), [blob])
    assert answer.seq == session["seq"] + 1 and answer.next_op == 3 and not answer.outcomes
    (found,) = ask(fs, (messages.LOOKUP, ROOT_INO, b"plan.md", 100))
    entry = entry_from(found[0])
    assert entry.name == b"plan.md" and entry.attr.size == len(data)
    got = fs.ask("POST", "/blobs", messages.packb([blob.hash, b"x" * 32]))
    header, blobs = unpack(got.body, blobs_max=2, bytes_max=1000)
    assert header["absent"] == (b"x" * 32,) and blobs[0].hash == blob.hash
    page = read_feed(fs.ask("GET", f"/changes?after={session['seq']}").body)
    assert page.head == answer.seq and page.changes[0].session == session["session"]
    assert fs.ask("GET", "/files/plan.md").body == data


def test_the_same_commit_again_is_the_same_answer(shared_fs: TestFs) -> None:
    session = start(shared_fs)
    made = create_file(session, 1, b"a", b"data", 1)
    first = commit(shared_fs, session, ticket_of(session), made, [make_blob(b"data")])
    again = commit(shared_fs, session, ticket_of(session), made, [make_blob(b"data")])
    assert first == again
    forked = make_commit(
        session["session"],
        ticket_of(session),
        create_file(session, 1, b"b", b"data", 1),
        (0, 0, 0),
        [make_blob(b"data")],
    )
    got = shared_fs.ask("POST", "/commits", b"".join(messages.commit_pieces(forked)))
    assert got.status == 409 and got.code == "session_forked"


def test_packs_ahead_of_a_commit_and_many_blobs_back(shared_fs: TestFs) -> None:
    data = [os.urandom(1 << 20) for _ in range(18)]
    made = [make_blob(one) for one in data]
    for group in (made[:9], made[9:]):
        got = shared_fs.ask("POST", "/packs", pack({}, group))
        assert got.status == 200 and msgpack.unpackb(got.body) == {"stored": 9}
    asked = [blob.hash for blob in made]
    back: list[bytes] = []
    while len(back) < len(asked):
        got = shared_fs.ask("POST", "/blobs", messages.packb(asked[len(back) :]))
        _, blobs = unpack(got.body, blobs_max=256, bytes_max=17 << 20)
        assert blobs
        back += [blob.hash for blob in blobs]
    assert back == asked


def test_missing_blobs_are_named_and_nothing_is_applied(shared_fs: TestFs) -> None:
    session = start(shared_fs)
    answer = commit(shared_fs, session, ticket_of(session), create_file(session, 1, b"a", b"absent", 1), [])
    assert answer.missing == (make_blob(b"absent").hash,) and answer.seq == session["seq"]
    (found,) = ask(shared_fs, (messages.LOOKUP, ROOT_INO, b"a", 10))
    assert found[0] is None


def test_a_long_poll_of_the_feed_returns_with_the_commit(shared_fs: TestFs) -> None:
    session, reader = start(shared_fs), start(shared_fs, "m2")
    got: list[Any] = []

    def poll() -> None:
        url = f"/changes?after={session['seq']}&session={reader['session']}&wait=30"
        got.append(read_feed(shared_fs.ask("GET", url).body))

    polls = [threading.Thread(target=poll) for _ in range(40)]
    for one in polls:
        one.start()

    def waiting() -> bool:
        text = shared_fs.server.ask("GET", "/metrics").body.decode()
        return "fsd_long_polls_waiting 40" in text

    wait_for(waiting, 30, "40 polls")
    assert shared_fs.ask("GET", "/journals").status == 200, "polls hold no thread that others need"
    answer = commit(
        shared_fs,
        session,
        ticket_of(session),
        create_file(session, 1, b"a", b"d", 1),
        [make_blob(b"d")],
    )
    for one in polls:
        one.join(20)
    assert len(got) == 40 and {page.head for page in got} == {answer.seq}


@pytest.mark.parametrize("subject", ["feed", "journal"])
def test_a_token_revoked_while_it_polls_gets_no_answer(shared_fs: TestFs, subject: str) -> None:
    fs = shared_fs
    session = start(fs)
    fs.ask("POST", "/journals", {"journal_id": "j"})
    made = fs.server.ask("POST", f"/v1/file-systems/{fs.id}/tokens", {}, token=fs.server.admin_key).json
    other = replace(fs, token=made["fs_token"])
    path = f"/changes?after={session['seq']}&wait=30"
    if subject == "journal":
        path = "/journals/j/entries?after_seq=0&wait=30"
    got: list[Any] = []
    poll = threading.Thread(target=lambda: got.append(other.ask("GET", path)))
    poll.start()

    def waiting() -> bool:
        return "fsd_long_polls_waiting 0" not in fs.server.ask("GET", "/metrics").body.decode()

    wait_for(waiting, 30, "the poll")
    route = f"/v1/file-systems/{fs.id}/tokens/{made['token_id']}/disable"
    assert fs.server.ask("POST", route, {}, token=fs.server.admin_key).status == 200
    if subject == "journal":
        fs.ask("POST", "/journals/j/entries", {"entries": [{"type": "a"}]})
    else:
        fs.ask("POST", "/actions", {"action": "mkdir", "path": "/d"})
    poll.join(20)
    assert (got[0].status, got[0].code) == (401, "not_authenticated")


def test_large_bodies_of_nobody_are_refused_unread(shared_fs: TestFs) -> None:
    """Only the head is sent: an answer shows that nobody waits for the rest."""
    for route in ("/actions", "/commits", "/packs", "/ns", "/journals"):
        client = http.client.HTTPConnection("127.0.0.1", shared_fs.server.port, timeout=50)
        client.putrequest("POST", f"/v1/file-systems/{shared_fs.id}{route}")
        client.putheader("Authorization", f"Bearer {shared_fs.token[:-3]}AAA")
        client.putheader("Content-Length", "1000000")
        client.endheaders()
        assert client.getresponse().status == 401, route
        client.close()


def test_sessions_are_started_reported_ended_and_listed(shared_fs: TestFs) -> None:
    key = {"Idempotency-Key": "start-1"}
    body = {"mount_id": "place", "host": "box", "path": "/mnt", "read_only": False, "version": "1"}
    first = shared_fs.ask("POST", "/sessions", body, headers=key).json
    assert shared_fs.ask("POST", "/sessions", body, headers=key).json == first
    assert first["previous"] is None and first["block_size"] == 1 << 20
    number = first["session"]
    assert shared_fs.ask("POST", f"/sessions/{number}/report", {"pending": [1, 2, 3]}).status == 200
    (shown,) = shared_fs.ask("GET", "/sessions").json["sessions"]
    assert shown["pending"] == {"operations": 1, "files": 2, "bytes": 3} and shown["ended"] == "active"
    assert shown["started_at"].endswith("Z") and shown["last_commit_at"] is None
    end = {"ended": "clean", "pending": [0, 0, 0]}
    assert shared_fs.ask("POST", f"/sessions/{number}/end", end).status == 200
    second = start(shared_fs, "place")
    assert second["previous"]["ended"] == "clean" and second["session"] > number
    page = shared_fs.ask("GET", "/sessions?limit=1").json
    assert page["sessions"][0]["session"] == second["session"]
    rest = shared_fs.ask("GET", f"/sessions?cursor={page['next_cursor']}").json
    assert [one["session"] for one in rest["sessions"]] == [number]
    other = shared_fs.server.create()
    assert other.ask("POST", f"/sessions/{number}/end", end).code == "session_unknown"


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/commits", b"", 400),
        ("/commits", b"<html>", 400),
        ("/commits", b"FSD1\x00\x00\x00\x05abc", 400),
        ("/commits", b"FSD1\xff\xff\xff\xff", 413),
        ("/packs", b"FSD1" + b"\0" * 4, 400),
        ("/ns", b"\xc1", 400),
        ("/ns", msgpack.packb({"a": 1}), 400),
        ("/ns", msgpack.packb([["lookup"]]), 400),
        ("/ns", msgpack.packb([["lookup", 1, b"a", 1]] * 257), 413),
        ("/blobs", msgpack.packb([b"short"]), 400),
        ("/blobs", msgpack.packb([b"x" * 32] * 257), 413),
        ("/sessions", b"{}", 400),
        ("/sessions/1/end", b'{"ended":"clean","pending":[1]}', 400),
        ("/sessions/x/end", b'{"ended":"clean"}', 400),
        ("/sessions/0/end", b'{"ended":"dead"}', 400),
    ],
)
def test_damaged_bodies_are_refused(shared_fs: TestFs, route: str, body: bytes, status: int) -> None:
    got = shared_fs.ask("POST", route, body)
    assert got.status == status, got.body
    assert got.json["error"]["code"] in ("invalid_argument", "too_large", "damaged_body")


def test_bodies_over_the_bound_of_a_route_are_refused_unread(shared_fs: TestFs) -> None:
    for route, size in (("/ns", (1 << 20) + 1), ("/blobs", (16 << 10) + 1), ("/packs", (32 << 20) + 1)):
        got = shared_fs.ask("POST", route, b"x" * size)
        assert got.status == 413, (route, got.status)


def test_a_pack_with_wrong_bytes_is_refused(shared_fs: TestFs) -> None:
    blob = make_blob(os.urandom(1000))
    got = shared_fs.ask("POST", "/packs", pack({}, [blob._replace(hash=b"x" * 32)]))
    assert got.status == 400 and got.code == "damaged_body" and got.json["error"]["retryable"]


def test_the_caller_gets_its_call_id_back(shared_fs: TestFs) -> None:
    got = shared_fs.ask("GET", "/changes?after=0", headers={"X-Fsd-Call": "abc"})
    assert got.headers["x-fsd-call"] == "abc"


def test_a_commit_of_a_token_that_was_just_revoked_is_refused(shared_fs: TestFs) -> None:
    """Its last commit was a moment ago: nothing that is remembered of it may let another one through."""
    fs = shared_fs
    made = fs.server.ask("POST", f"/v1/file-systems/{fs.id}/tokens", {}, token=fs.server.admin_key).json
    other = replace(fs, token=made["fs_token"])
    session = start(other)
    blob = make_blob(b"x")
    answer = commit(other, session, ticket_of(session), create_file(session, 1, b"a", b"x", 1), [blob])
    route = f"/v1/file-systems/{fs.id}/tokens/{made['token_id']}/disable"
    assert fs.server.ask("POST", route, {}, token=fs.server.admin_key).status == 200
    late = make_commit(
        session["session"], answer.ticket, create_file(session, 2, b"b", b"x", 3), (0, 0, 0), [blob]
    )
    got = other.ask("POST", "/commits", b"".join(messages.commit_pieces(late)))
    assert (got.status, got.code) == (401, "not_authenticated")
    found = ask(fs, ("list", ROOT_INO, b"", 10))[0][0]
    assert [entry[0] for entry in found] == [b"a"]


def test_a_large_body_arrives_in_any_pieces_or_not_at_all(shared_fs: TestFs, seed: int) -> None:
    """Behind its first piece it goes past the HTTP server's buffer. One that is cut off leaves nothing."""
    rng = random.Random(seed)
    blobs = [make_blob(rng.randbytes(1024 * 1024 - at)) for at in range(3)]
    whole = pack({}, blobs)
    for cut in (None, 2_000_000):
        client = http.client.HTTPConnection("127.0.0.1", shared_fs.server.port, timeout=30)
        client.putrequest("POST", f"/v1/file-systems/{shared_fs.id}/packs")
        client.putheader("Authorization", f"Bearer {shared_fs.token}")
        client.putheader("Content-Length", str(len(whole)))
        client.endheaders()
        at = 0
        while at < len(whole[:cut]):
            size = rng.choice((1, 100, 65_536, 65_537, 300_000))
            client.send(whole[:cut][at : at + size])
            at += size
        if cut is None:
            assert client.getresponse().status == 200
        client.close()
    got = shared_fs.ask("POST", "/blobs", messages.packb([one.hash for one in blobs]))
    assert unpack(got.body, blobs_max=9, bytes_max=2**30)[1] == blobs
    assert shared_fs.ask("POST", "/packs", whole).status == 200
