"""Forks and merges as a person uses them: over HTTP, on the command line, mounted while they are copied, with
two servers on one database."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path

import pytest
from support.cli import inside
from support.postgres import PostgresServer
from support.sandbox import sandbox
from support.server import Server, TestFs
from support.wait import wait_for


def fork_of(fs: TestFs, **body: object) -> TestFs:
    made = fs.ask("POST", "/forks", body)
    assert made.status == 201, made.body
    return TestFs(fs.server, made.json["file_system_id"], made.json["fs_token"])


def test_who_may_fork_merge_and_delete(shared_server: Server) -> None:
    fs, other = shared_server.create(), shared_server.create()
    assert fs.ask("PUT", "/files/a", b"a").status == 200
    child = fork_of(fs, display_name="try", labels={"k": "v"})
    assert child.ask("GET", "/files/a").body == b"a"
    assert child.ask("PUT", "/files/b", b"b").status == 200
    base = f"/v1/file-systems/{fs.id}"
    for stranger in (other.token, child.token):
        for method, path, body in (
            ("POST", "/forks", {}),
            ("GET", "/forks", None),
            ("POST", "/merges", {"fork": child.id}),
            ("GET", f"/forks/{child.id}/changes", None),
            ("POST", f"/forks/{child.id}/rollback", {}),
            ("DELETE", f"/forks/{child.id}", None),
        ):
            assert shared_server.ask(method, base + path, body, token=stranger).status == 404
    assert other.ask("POST", "/merges", {"fork": child.id}).status == 404
    assert other.ask("GET", f"/forks/{child.id}/changes").status == 404
    changes = fs.ask("GET", f"/forks/{child.id}/changes").json
    assert [(one["path"], one["change"]) for one in changes["changes"]] == [("/b", "added")]
    assert shared_server.admin("POST", base + "/merges", {"fork": child.id}).json["status"] == "merged"
    assert fs.ask("GET", "/files/b").body == b"b"
    chain = child.ask("GET", "?chain=1").json["chain"]
    assert [one["file_system_id"] for one in chain] == [child.id, fs.id]
    listed = shared_server.admin("GET", "/v1/file-systems?label=k%3Dv").json["file_systems"]
    assert {"file_system_id": child.id, "origin_id": fs.id}.items() <= listed[-1].items()
    assert fs.ask("DELETE", f"/forks/{child.id}").json["status"] == "deleting"
    assert child.ask("GET", "/files/a").status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/forks", {"labels": [1]}),
        ("/forks", {"checkpoint": 5}),
        ("/forks", {"unknown": 1}),
        ("/forks", {"layer": "x"}),
        ("/forks", {"layer": {"x": "y" * 10_000}}),
        ("/merges", {"fork": "fs_aaaaaaaaaaaaaaaaaaaa", "ours": "x"}),
        ("/merges", {"fork": "fs_aaaaaaaaaaaaaaaaaaaa", "theirs": [""]}),
        ("/merges", {"fork": "fs_aaaaaaaaaaaaaaaaaaaa", "dry_run": 1}),
    ],
)
def test_bodies_that_are_refused(shared_fs: TestFs, path: str, body: object) -> None:
    assert shared_fs.ask("POST", path, body).status == 400


def test_what_is_not_there(shared_fs: TestFs) -> None:
    for body in ({"checkpoint": "cp_none"}, {"of": "fs_aaaaaaaaaaaaaaaaaaaa"}):
        assert shared_fs.ask("POST", "/forks", body).status == 404
    for name in ("fs_aaaaaaaaaaaaaaaaaaaa", "x", ""):
        assert shared_fs.ask("POST", "/merges", {"fork": name}).status == 404
    assert shared_fs.ask("POST", "/merges", {"fork": shared_fs.id}).status == 404


def test_a_token_revoked_while_its_body_arrives_makes_and_deletes_no_fork(shared_fs: TestFs) -> None:
    server, child = shared_fs.server, fork_of(shared_fs)
    base = f"/v1/file-systems/{shared_fs.id}"
    for method, path in (("POST", "/forks"), ("DELETE", f"/forks/{child.id}")):
        token = server.admin("POST", f"{base}/tokens", {}).json
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)
        client.putrequest(method, base + path)
        client.putheader("Authorization", f"Bearer {token['fs_token']}")
        client.putheader("Content-Length", "2")
        client.putheader("Expect", "100-continue")
        client.endheaders()
        assert client.sock.recv(1000).startswith(b"HTTP/1.1 100"), "after the look at the token"
        assert server.admin("POST", f"{base}/tokens/{token['token_id']}/disable", {}).status == 200
        client.send(b"{}")
        assert client.getresponse().status == 401
        client.close()
    assert [one["file_system_id"] for one in shared_fs.ask("GET", "/forks").json["forks"]] == [child.id]


def test_the_same_request_makes_one_fork_and_shows_its_token_again(shared_fs: TestFs) -> None:
    first, second = (shared_fs.ask("POST", "/forks", {}, headers={"Idempotency-Key": "k"}) for _ in range(2))
    assert first.json == second.json and second.headers["idempotent-replay"] == "true"
    assert len(shared_fs.ask("GET", "/forks").json["forks"]) == 1


def test_an_id_is_taken_whole(shared_server: Server) -> None:
    """What follows a `?` must not be cut off: it would be another fork that goes."""
    fs = shared_server.create()
    child = fork_of(fs)
    for name in (f"{child.id}?x", f"{child.id}/x", f"x/../{child.id}"):
        assert inside("delete", name, "--yes", env=fs.env).code == 5
    assert child.ask("GET", "/list/").status == 200


def test_a_merge_and_a_rollback_that_come_again_get_their_answers(shared_fs: TestFs) -> None:
    """Also where the fork was deleted in between."""
    child = fork_of(shared_fs)
    assert child.ask("PUT", "/files/a", b"a").status == 200
    requests: tuple[tuple[str, dict[str, object]], ...] = (
        ("/merges", {"fork": child.id}),
        (f"/forks/{child.id}/rollback", {}),
    )
    first = [
        shared_fs.ask("POST", path, body, headers={"Idempotency-Key": path[1:4]}) for path, body in requests
    ]
    assert [one.json["status"] for one in first] == ["merged", "nothing"]
    assert shared_fs.ask("DELETE", f"/forks/{child.id}").status == 200
    for (path, body), answer in zip(requests, first):
        again = shared_fs.ask("POST", path, body, headers={"Idempotency-Key": path[1:4]})
        assert (again.status, again.headers["idempotent-replay"]) == (200, "true")
        assert {**again.json, "server_ms": 0} == {**answer.json, "server_ms": 0}
        assert shared_fs.ask("POST", path, body).status == 404


def test_a_deletion_that_comes_again_gets_its_answer(shared_server: Server) -> None:
    fs = shared_server.create()
    child = fork_of(fs)
    for route, token in (
        (f"/v1/file-systems/{fs.id}/forks/{child.id}", fs.token),
        (f"/v1/file-systems/{fs.id}", shared_server.admin_key),
    ):
        key = {"Idempotency-Key": "delete"}
        first, second = (
            shared_server.ask("DELETE", f"{route}?detach=1", {}, token=token, headers=key) for _ in range(2)
        )
        assert first.status == 200, first.body
        assert second.json == first.json and second.headers["idempotent-replay"] == "true"


def test_on_the_command_line(shared_server: Server, tmp_path: Path) -> None:
    fs = shared_server.create()
    env = {**fs.env}
    text = tmp_path / "text"
    text.write_text("one")
    assert inside("cp", str(text), ":/a", env=env).code == 0
    made = inside("fork", "--display-name", "try", env=env).json
    theirs = {**env, "FSD_TOKEN": made["fs_token"]}
    text.write_text("theirs")
    assert inside("cp", str(text), ":/a", env=theirs).code == 0
    dry = inside("merge", made["file_system_id"], "--dry-run", env=env)
    assert dry.code == 0 and dry.json["would"]["status"] == "clean"
    text.write_text("ours, longer")
    assert inside("cp", str(text), ":/a", env=env).code == 0
    refused = inside("merge", made["file_system_id"], env=env)
    assert refused.code == 1
    assert [(one["path"], one["kind"]) for one in refused.json["conflicts"]] == [("/a", "both-changed")]
    assert inside("merge", made["file_system_id"], "--dry-run", env=env).code == 1
    assert inside("cat", "/a", env=env).out == b"ours, longer"
    decided = inside("merge", made["file_system_id"], "--theirs", "/a", env=env)
    assert decided.code == 0 and decided.json["status"] == "merged"
    assert inside("cat", "/a", env=env).out == b"theirs"
    undo = decided.json["undo_checkpoint_id"]
    assert inside("checkpoint", "cat", undo, "/a", env=env).out == b"ours, longer"
    seen = inside("describe", made["file_system_id"], env=env)
    assert seen.code == 0 and seen.json == inside("describe", env=theirs).json
    assert inside("describe", made["file_system_id"], "--chain", env=env).code == 4
    foreign = inside("describe", "fs_aaaaaaaaaaaaaaaaaaaa", env=env)
    assert foreign.code == 5 and fs.id in foreign.error["hint"]
    told = inside("describe", "--chain", env=theirs).json["chain"]
    assert [one["file_system_id"] for one in told] == [made["file_system_id"], fs.id]
    admin = {"FSD_ADMIN_KEY": shared_server.admin_key, "FSD_ENDPOINT": shared_server.url}
    again = inside("merge", made["file_system_id"], env=admin)
    assert again.code == 0 and again.json["status"] == "nothing"
    listed = inside("fs", "list-layers", env=env).json["layers"]
    assert [(one["layer_id"], one["name"]) for one in listed] == [(made["file_system_id"], "try")]
    gone = inside("fs", "delete-layer", "--layer-ref", made["file_system_id"], env=env)
    assert gone.code == 0, gone.err
    assert inside("ls", "/", env=theirs).code == 5


def test_the_two_values_of_a_sandbox_list_and_delete_forks(shared_server: Server) -> None:
    fs, other = shared_server.create(), shared_server.create()
    child = inside("fork", "--display-name", "try", env=fs.env).json
    below = inside("fork", env={**fs.env, "FSD_TOKEN": child["fs_token"]}).json
    listed = inside("list", "--query", "file_systems[].file_system_id", env=fs.env).json
    assert listed == [fs.id, child["file_system_id"], below["file_system_id"]]
    named = inside("list", "--display-name", "tr", "--output", "text", env=fs.env).out.decode()
    assert child["file_system_id"] in named and below["file_system_id"] not in named
    name = child["file_system_id"]
    assert inside("delete", fs.id, "--yes", env=fs.env).code == 4
    assert inside("delete", name, "--yes", env=other.env).code == 5
    dry = inside("delete", name, "--dry-run", env=fs.env).json
    assert dry["request"]["path"].endswith(name) and dry["would_send_request"]
    assert inside("delete", name, env=fs.env).code == 2  # nobody can be asked
    assert inside("delete", name, "--yes", "--detach", env=fs.env).code == 0
    left = inside("list", "--query", "file_systems[].file_system_id", env=fs.env).json
    assert name not in left and fs.id in left
    kept = {**fs.env, "FSD_TOKEN": below["fs_token"]}
    assert inside("ls", "/", env=kept).code == 0


def test_a_dry_run_is_text_for_people(shared_server: Server, tmp_path: Path) -> None:
    fs = shared_server.create()
    made = inside("fork", env=fs.env).json
    text = tmp_path / "text"
    text.write_text("theirs")
    assert inside("cp", str(text), ":/a", env={**fs.env, "FSD_TOKEN": made["fs_token"]}).code == 0
    dry = inside("merge", made["file_system_id"], "--dry-run", "--output", "text", env=fs.env)
    lines = dry.out.decode().splitlines()
    assert lines[0].startswith("nothing was done") and lines[-1].split("\t") == ["added", "/a"]


def test_layers_by_their_long_names(shared_server: Server, tmp_path: Path) -> None:
    fs = shared_server.create()
    env, text = {**fs.env}, tmp_path / "text"
    text.write_text("one")

    def fs_(*argv: str, code: int = 0, **extra: str) -> dict[str, object]:
        found = inside("fs", *argv, env={**env, **extra})
        assert found.code == code, found.err
        made: dict[str, object] = found.json
        return made

    layer = fs_("create-layer", "--layer-id", "L1", "--layer-name", "first", "--tag", "t")
    assert layer["depth"] == 1 and layer["tags"] == ["t"]
    token = {"FSD_TOKEN": str(layer["fs_token"])}
    inside("cp", str(text), ":/kept", env={**env, **token})
    entries = fs_("diff-layer", "--layer-id", "L1")["entries"]
    assert isinstance(entries, list) and entries[0]["path"] == "/kept"
    assert fs_("create-layer-checkpoint", "--layer-id", "L1", "--label", "c")["label"] == "c"
    below = fs_("fork-layer", "--parent-layer-ref", "first", "--layer-id", "L2")
    assert below["parent_layer_id"] == "L1" and below["depth"] == 2 and below["root_layer_id"] == "L1"
    chain = fs_("list-layer-chain", "--layer-ref", "L2")["chain"]
    assert isinstance(chain, list) and [one["layer_id"] for one in chain] == ["L2", "L1"]
    assert fs_("commit-layer", "--layer-id", "L1")["status"] == "committed"
    assert inside("cat", "/kept", env=env).out == b"one"
    text.write_text("two, longer")
    inside("cp", str(text), ":/kept", env={**env, **token})
    assert fs_("rollback-layer", "--layer-id", "L1")["status"] == "rolled-back"
    assert inside("cat", "/kept", env={**env, **token}).out == b"one"
    text.write_text("three")
    for who in (env, {**env, **token}):
        inside("cp", str(text), ":/kept", env=who)
        text.write_text("four, longer")
    told = fs_("commit-layer", "--layer-id", "L1", code=1)
    assert told["status"] == "conflicts" and told["layer_id"] == "L1" and told["conflicts_total"] == 1
    assert inside("fs", "delete-layer", "--layer-ref", "L1", env=env).code == 1
    assert fs_("delete-layer", "--layer-ref", "L1", "--cascade")["layers_deleted"] == ["L2"]
    assert fs_("list-layers") == {"layers": []}
    assert inside("fs", "describe-layer", "--layer-id", "L1", env=env).code == 5


@pytest.mark.kernel
def test_a_fork_is_mounted_and_written_while_it_is_copied(
    trusted: Server,
    short_dir: Path,
) -> None:
    fs = trusted.create()
    for at in range(8):
        assert fs.ask("PUT", f"/files/d{at}/f?parents=1", b"%d" % at).status == 200
    child = fork_of(fs)
    with sandbox(short_dir, child) as box:
        top = box.mountpoint
        assert sorted(path.name for path in top.iterdir()) == [f"d{at}" for at in range(8)]
        assert (top / "d3" / "f").read_bytes() == b"3"
        (top / "d3" / "f").write_bytes(b"three")
        (top / "new").write_bytes(b"n")
        box.drain()
        assert (top / "d5" / "f").read_bytes() == b"5"
        assert fs.ask("GET", "/files/d3/f").body == b"3"
        with sandbox(short_dir / "p", fs) as parent:
            assert (parent.mountpoint / "d3" / "f").read_bytes() == b"3"
            assert fs.ask("POST", "/merges", {"fork": child.id}).json["status"] == "merged"
            wait_for(lambda: (parent.mountpoint / "d3" / "f").read_bytes() == b"three", 30, "the merge")
            assert (parent.mountpoint / "new").read_bytes() == b"n"
    wait_for(lambda: child.ask("GET", "").json["copied"], 30, "the copy")


def test_two_servers_copy_one_fork(tmp_path: Path, postgres_server: PostgresServer) -> None:
    url, key, blobs = postgres_server.fresh(), tmp_path / "key", str(tmp_path / "blobs")
    key.write_text("one-key-for-both-replicas\n")
    key.chmod(0o600)
    one, two = (
        Server(tmp_path / name, "--database", url, "--blobs", blobs, "--admin-key-file", str(key))
        for name in ("one", "two")
    )
    try:
        one.start()
        two.start()
        admin = {"token": key.read_text().strip()}
        made = one.ask("POST", "/v1/file-systems", {}, **admin).json
        fs = TestFs(one, made["file_system_id"], made["fs_token"])
        for at in range(10):
            assert fs.ask("PUT", f"/files/f{at}", b"%d" % at).status == 200
        children = [fork_of(fs) for _ in range(3)]
        done = []

        def write(child: TestFs, server: Server) -> None:
            there = TestFs(server, child.id, child.token)
            assert there.ask("GET", "/files/f3").body == b"3"
            done.append(there.ask("PUT", "/files/f3", b"changed").status)

        threads = [
            threading.Thread(target=write, args=(child, server))
            for child, server in zip(children, (two, one, two))
        ]
        for thread in threads:
            thread.start()
        assert fs.ask("PUT", "/files/f4", b"meanwhile").status == 200
        for thread in threads:
            thread.join(60)
        assert done == [200, 200, 200], one.log.read_text() + two.log.read_text()
        for child in children:
            merged = TestFs(two, fs.id, fs.token).ask("POST", "/merges", {"fork": child.id}).json
            assert merged["status"] in ("merged", "nothing")
        assert fs.ask("GET", "/files/f3").body == b"changed"
        assert fs.ask("GET", "/files/f4").body == b"meanwhile"
        shown = fs.ask("GET", "/forks").json["forks"]
        assert all(one["copied"] for one in shown)
    finally:
        one.end()
        two.end()
