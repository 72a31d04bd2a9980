"""The commands of checkpoints against a real server."""

from __future__ import annotations

import io
import random
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.cli import Outcome, inside
from support.server import Server, TestFs

from fsd.cli.fields import names
from fsd.client import connect


def run(fs: TestFs, *argv: str, code: int = 0, stdin: bytes = b"") -> Outcome:
    done = inside(*argv, env=fs.env, stdin=stdin)
    assert done.code == code, (argv, done.code, done.out, done.err)
    return done


def put(fs: TestFs, path: str, data: bytes) -> None:
    run(fs, "cp", "-", f":{path}", stdin=data)


def create(fs: TestFs, *argv: str) -> str:
    made = run(fs, "checkpoint", "create", *argv).json
    assert {"checkpoint_id", "thread_id", "fs_seq", "label", "created_at", "not_flushed", "server_ms"} <= set(
        made
    )
    found: str = made["checkpoint_id"]
    return found


def test_a_day_with_checkpoints(shared_fs: TestFs, tmp_path: Path) -> None:
    fs = shared_fs
    put(fs, "/tasks/plan.md", b"one\n")
    put(fs, "/tasks/notes.md", b"notes\n")
    first = create(fs, "--label", "first draft")
    put(fs, "/tasks/plan.md", b"two\n")
    run(fs, "mv", "/tasks/notes.md", "/tasks/journal.md")
    put(fs, "/tasks/more.md", b"more\n")

    shown = run(fs, "checkpoint", "list").json
    assert [one["checkpoint_id"] for one in shown["checkpoints"]] == [first]
    assert "first draft" in run(fs, "checkpoint", "list", "--output", "text").text
    assert run(fs, "checkpoint", "show", first, "--query", "label").json == "first draft"
    files = run(fs, "checkpoint", "show", first, "--files").json["files"]
    assert [one["path"] for one in files] == ["tasks/notes.md", "tasks/plan.md"]

    changes = run(fs, "checkpoint", "diff", first).json["changes"]
    assert [(one["path"], one["change"]) for one in changes] == [
        ("/tasks/journal.md", "renamed"),
        ("/tasks/more.md", "added"),
        ("/tasks/plan.md", "modified"),
    ]
    text = run(fs, "checkpoint", "diff", first, "--output", "text").text
    assert "/tasks/notes.md -> /tasks/journal.md" in text
    assert run(fs, "checkpoint", "cat", first, "/tasks/plan.md").out == b"one\n"
    assert run(fs, "cat", "/tasks/plan.md", "--checkpoint", first).out == b"one\n"
    assert run(fs, "ls", "/tasks", "--checkpoint", first, "--output", "text").text == "notes.md\nplan.md\n"
    assert run(fs, "stat", "/tasks/plan.md", "--checkpoint", first).json["size_bytes"] == 4
    assert len(run(fs, "find", "/", "--type", "file", "--checkpoint", first).json["matches"]) == 2
    run(fs, "cp", "-r", "--checkpoint", first, ":/tasks", str(tmp_path / "then"))
    assert (tmp_path / "then" / "plan.md").read_bytes() == b"one\n"
    assert not (tmp_path / "then" / "more.md").exists()
    run(fs, "cp", "--checkpoint", first, str(tmp_path / "then" / "plan.md"), ":/x", code=2)

    tar = run(fs, "checkpoint", "export", first, "/tasks").out
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert archive.getnames() == ["tasks", "tasks/notes.md", "tasks/plan.md"]
    run(fs, "checkpoint", "restore", first, "--to", str(tmp_path / "local"))
    assert (tmp_path / "local" / "tasks" / "plan.md").read_bytes() == b"one\n"

    dry = run(fs, "checkpoint", "restore", first, "--dry-run", "--yes").json
    assert dry["would"]["changes"] > 0
    assert run(fs, "cat", "/tasks/plan.md").out == b"two\n"
    done = run(fs, "checkpoint", "restore", first, "/tasks/plan.md").json
    assert run(fs, "cat", "/tasks/plan.md").out == b"one\n"
    assert run(fs, "cat", "/tasks/more.md").out == b"more\n"
    run(fs, "checkpoint", "restore", first, code=2)  # the whole tree: nobody can be asked
    run(fs, "checkpoint", "restore", "/a", "--yes", code=2)  # a path alone is no checkpoint
    run(fs, "checkpoint", "restore", first, "--yes")
    assert run(fs, "ls", "/tasks", "--output", "text").text == "notes.md\nplan.md\n"
    run(fs, "checkpoint", "restore", done["undo_checkpoint_id"], "--yes")
    assert run(fs, "cat", "/tasks/plan.md").out == b"two\n"

    undeleted(fs, first)
    renamed(fs)
    deleted_and_thinned(fs, first)


def undeleted(fs: TestFs, first: str) -> None:
    run(fs, "rm", "/tasks/more.md")
    back = run(fs, "undelete", "/tasks/more.md").json
    assert back["undo_checkpoint_id"] is None
    assert run(fs, "cat", "/tasks/more.md").out == b"more\n"
    run(fs, "undelete", "/tasks/more.md", code=1)
    run(fs, "undelete", "/never", code=5)
    never = run(fs, "history", "/never", code=5)
    assert "/never" in never.err and never.out == b""
    run(fs, "history", "/tasks", "--limit", "1")
    versions = run(fs, "history", "/tasks/plan.md").json["versions"]
    assert versions[0]["live"]
    assert first in {one["newest"]["checkpoint_id"] for one in versions}


def renamed(fs: TestFs) -> None:
    """A file has its history under a new name, and can be had under its old one."""
    run(fs, "mv", "/tasks/plan.md", "/tasks/plan two.md")
    found = run(fs, "history", "/tasks/plan two.md").json["versions"]
    assert [one["path"] for one in found[:2]] == ["/tasks/plan two.md", "/tasks/plan.md"]
    assert found[1]["stat"]["path"] == "/tasks/plan.md"
    text = run(fs, "history", "/tasks/plan two.md", "--output", "text").text.splitlines()
    assert text[0].startswith("now") and "  /tasks/plan.md" in text[1]
    alone = run(fs, "history", "/tasks/plan two.md", "--no-follow").json["versions"]
    assert {one["path"] for one in alone} == {"/tasks/plan two.md"} and alone[-1]["stat"] is None
    old = run(fs, "history", "/tasks/plan.md")
    assert old.json["moved_to"] == "/tasks/plan two.md"
    told = run(fs, "history", "/tasks/plan.md", "--output", "text").text
    assert "is /tasks/plan two.md now" in told.splitlines()[0]
    assert run(fs, "undelete", "/tasks/plan.md").json["path"] == "/tasks/plan.md"
    assert run(fs, "cat", "/tasks/plan.md").out == b"one\n", "as the newest state has it"
    run(fs, "rm", "/tasks/plan two.md")
    assert run(fs, "history", "/tasks/plan two.md", "--limit", "1").json["next_cursor"] is not None
    assert run(fs, "history", "/tasks/plan two.md").json["versions"][0]["stat"] is None
    gone = run(fs, "undelete", "/tasks/plan two.md", code=1)
    assert "/tasks/plan.md" in gone.err, "where it would come back something is"
    run(fs, "rm", "/tasks/plan.md")
    assert run(fs, "undelete", "/tasks/plan two.md").json["path"] == "/tasks/plan.md"


def deleted_and_thinned(fs: TestFs, first: str) -> None:
    """The end of a day that left four checkpoints, `first` the oldest."""
    run(fs, "checkpoint", "delete", first, code=2)
    assert run(fs, "checkpoint", "delete", first, "--dry-run").json["would"]["checkpoint_id"] == first
    assert run(fs, "checkpoint", "delete", first, "--yes").json["status"] == "deleted"
    run(fs, "checkpoint", "show", first, code=5)
    run(fs, "cat", "/tasks/plan.md", "--checkpoint", first, code=5)
    text = run(fs, "checkpoint", "prune", "--keep", "last=1", "--yes", "--output", "text").text
    assert text.startswith("nothing to delete, 0 kept\n3 checkpoints not looked at: made by somebody"), text
    text = run(fs, "checkpoint", "prune", "--keep", "1", "--automatic", "--yes", "--output", "text").text
    assert text.startswith("nothing to delete, 0 kept\n3 checkpoints not looked at: made by somebody"), text
    run(fs, "checkpoint", "prune", "--keep", "1", "--automatic", "--named", "--yes", code=2)
    pruned = run(fs, "checkpoint", "prune", "--keep", "1", "--named", "--yes").json
    assert (len(pruned["deleted"]), pruned["kept"], pruned["not_considered"]) == (2, 1, 0)
    run(fs, "checkpoint", "prune", "--keep", "sometimes", "--yes", code=2)


def host_checkpoints(fs: TestFs, thread: str, *names: str) -> None:
    """A thread of a host's with checkpoints of these ids."""
    with connect(fs.token) as client, client.checkpoints.writer(thread) as writer:
        head = None
        for name in names:
            record: dict[str, Any] = {
                "id": name,
                "threadId": thread,
                "parentCheckpointId": head,
                "createdAt": 1,
            }
            record |= {"reason": "named", "files": [], "conversation": [], "artifacts": []}
            head = client.checkpoints.append(record, expected_head_id=head, writer=writer)


def test_the_beginning_of_an_id_is_enough(shared_fs: TestFs, tmp_path: Path) -> None:
    fs = shared_fs
    put(fs, "/a", b"one")
    first = create(fs)
    short = first[:9]
    put(fs, "/a", b"two")
    assert run(fs, "checkpoint", "show", short).json["checkpoint_id"] == first
    assert [one["path"] for one in run(fs, "checkpoint", "diff", short).json["changes"]] == ["/a"]
    assert run(fs, "checkpoint", "diff", "seq:1", short).json["to_seq"] == 1
    assert run(fs, "checkpoint", "cat", short, "/a").out == b"one"
    assert run(fs, "cat", "/a", "--checkpoint", short).out == b"one"
    with tarfile.open(fileobj=io.BytesIO(run(fs, "checkpoint", "export", short).out)) as archive:
        assert "./a" in archive.getnames()
    run(fs, "cp", "--checkpoint", short, ":/a", str(tmp_path / "a"))
    made = run(fs, "checkpoint", "restore", short, "--to", str(tmp_path / "all")).json
    assert (made["checkpoint_id"], (tmp_path / "all/a").read_bytes()) == (first, b"one")
    assert run(fs, "fork", "--checkpoint", short).json["origin_checkpoint"] == first
    run(fs, "checkpoint", "restore", short, "/a")
    assert run(fs, "cat", "/a").out == b"one"
    run(fs, "checkpoint", "show", first[:7], code=5)  # too little to be looked for
    run(fs, "checkpoint", "show", "cp_00000000", code=5)

    host_checkpoints(fs, "t", "turn-000001", "turn-0000012", "turn-0000013")
    told = run(fs, "checkpoint", "show", "turn-0000", code=2).error
    assert told["details"]["checkpoints"] == ["turn-0000013", "turn-0000012", "turn-000001"]
    assert "turn-0000012" in told["message"]
    assert run(fs, "checkpoint", "show", "turn-000001").json["checkpoint_id"] == "turn-000001"
    assert run(fs, "checkpoint", "show", "turn-0000012").json["checkpoint_id"] == "turn-0000012"
    run(fs, "checkpoint", "delete", "turn-000", "--yes", code=2)
    assert run(fs, "checkpoint", "delete", short, "--yes").json["checkpoint_id"] == first
    run(fs, "checkpoint", "show", short, code=5)


def test_into_a_hosts_thread(shared_fs: TestFs) -> None:
    fs = shared_fs
    put(fs, "/a", b"one")
    made = run(fs, "checkpoint", "create", "--thread", "chat/17", "--label", "draft").json
    assert (made["thread_id"], made["parent_id"]) == ("chat/17", None)
    put(fs, "/a", b"two")
    second = run(fs, "checkpoint", "create", "--thread", "chat/17").json
    assert second["parent_id"] == made["checkpoint_id"]
    assert run(fs, "checkpoint", "cat", made["checkpoint_id"], "/a").out == b"one"
    listed = run(fs, "checkpoint", "list", "--thread", "chat/17").json["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == [second["checkpoint_id"], made["checkpoint_id"]]
    run(fs, "checkpoint", "delete", made["checkpoint_id"], "--yes", code=1)
    run(fs, "checkpoint", "create", "--thread", "t", "--keep-for", "1h", code=2)


def test_manifests_are_read_like_states(shared_fs: TestFs, tmp_path: Path) -> None:
    fs = shared_fs
    local = tmp_path / "tree"
    (local / "d").mkdir(parents=True)
    (local / "d" / "a").write_bytes(b"one")
    (local / "b").write_bytes(bytes(3_000_000))
    (local / "b").chmod(0o600)
    first = run(fs, "checkpoint", "capture", str(local), "--thread", "t").json["checkpoint_id"]
    (local / "d" / "a").write_bytes(b"two!")
    (local / "link").symlink_to("b")
    (local / "b").chmod(0o644)
    second = run(fs, "checkpoint", "capture", str(local), "--thread", "t").json["checkpoint_id"]
    for bound in ("0", "2999999"):
        refused = run(
            fs, "checkpoint", "capture", str(local), "--thread", "t", "--max-file-size", bound, code=2
        )
        assert f"bytes, at most {bound}" in refused.err
    changes = run(fs, "checkpoint", "diff", first, second).json["changes"]
    assert [(one["path"], one["change"]) for one in changes] == [
        ("/b", "attributes"),
        ("/d/a", "modified"),
        ("/link", "added"),
    ]
    run(fs, "checkpoint", "diff", first, code=2)
    assert run(fs, "checkpoint", "cat", first, "/d/a").out == b"one"
    run(fs, "checkpoint", "cat", first, "/d", code=1)
    run(fs, "checkpoint", "cat", first, "/none", code=5)
    with tarfile.open(fileobj=io.BytesIO(run(fs, "checkpoint", "export", second).out)) as tar:
        found = {one.name: one for one in tar}
        assert sorted(found) == ["b", "d/a", "link"]
        assert tar.extractfile(found["b"]).read() == bytes(3_000_000)  # type: ignore[union-attr]
        assert (found["link"].linkname, found["b"].mode) == ("b", 0o644)
    with tarfile.open(fileobj=io.BytesIO(run(fs, "checkpoint", "export", second, "/d").out)) as tar:
        assert tar.getnames() == ["d/a"]
    # A native one and a manifest can be compared too.
    put(fs, "/d/a", b"two!")
    native = create(fs)
    mixed = run(fs, "checkpoint", "diff", native, second).json["changes"]
    assert {one["path"]: one["change"] for one in mixed}["/b"] == "added"
    run(fs, "checkpoint", "restore", second, "--yes", code=5)
    run(fs, "checkpoint", "restore", second, "--to", str(tmp_path / "back"))
    assert (tmp_path / "back" / "d" / "a").read_bytes() == b"two!"


def test_files_as_of_a_journal_entry(shared_fs: TestFs) -> None:
    fs = shared_fs
    run(fs, "journal", "create", "j")
    put(fs, "/f", b"then")
    run(fs, "journal", "append", "j", "--entry-json", '{"type":"t"}')
    put(fs, "/f", b"now")
    assert run(fs, "cat", "/f", "--at-journal", "j:1").out == b"then"
    run(fs, "cat", "/f", "--at-journal", "j:9", code=5)
    run(fs, "cat", "/f", "--at-journal", "j", code=2)
    run(fs, "cat", "/f", "--at-journal", "j:1", "--checkpoint", "cp_x", code=2)
    run(fs, "checkpoint", "restore", "/f", "--at-journal", "j:1")
    assert run(fs, "cat", "/f").out == b"then"


@pytest.mark.parametrize("command", ["list", "show", "diff", "restore", "delete", "prune"])
def test_fields_are_the_documented_ones(shared_fs: TestFs, command: str) -> None:
    fs = shared_fs
    put(fs, "/a", b"1")
    name = create(fs)
    put(fs, "/a", b"2")
    argv = {
        "list": [],
        "show": [name],
        "diff": [name],
        "restore": [name, "--yes"],
        "delete": [name, "--yes"],
        "prune": ["--keep", "1", "--yes"],
    }[command]
    answer = run(fs, "checkpoint", command, *argv).json
    required, optional, _ = names(f"checkpoint {command}", False)
    assert required <= set(answer) <= required | optional


def test_text_of_ids(shared_fs: TestFs) -> None:
    fs = shared_fs
    assert re.fullmatch(r"cp_[a-z2-7]{20}", create(fs))


def test_an_export_that_is_cut_off_is_no_success(server: Server) -> None:
    """A damaged block in the middle: the stream ends without its end, and the command says so."""
    fs = server.create()
    put(fs, "/a", b"fine")
    put(fs, "/b", random.Random(1).randbytes(6_000_000))
    put(fs, "/c", b"behind")
    name = create(fs)
    for pack in (server.data_dir / "blobs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 100_000:
            raw = bytearray(pack.read_bytes())
            raw[-1000] ^= 1
            pack.write_bytes(raw)
    done = inside("checkpoint", "export", name, env=fs.env)
    assert done.code == 1, done.err
    assert len(done.out) < 6_100_000, "what lies behind the damage is not sent"
    inside_cat = inside("checkpoint", "cat", name, "/b", env=fs.env)
    assert inside_cat.code == 1
    assert inside("checkpoint", "cat", name, "/a", env=fs.env).out == b"fine"


def test_tar_reads_odd_times_and_names(shared_fs: TestFs, tmp_path: Path) -> None:
    times = {"a": -1, "b": -123456789012345678, "c": 1, "d": 4 * 10**18, "e": -(10**9), "f": 0}
    for name, ns in times.items():
        assert shared_fs.ask("PUT", f"/files/odd/{name}?parents=1&mtime_ns={ns}", b"x").status == 200
    given = {"action": "setxattr", "path": "/odd/a", "name": "user.x=y%", "value_b64": "dj0K"}
    assert shared_fs.ask("POST", "/actions", given).status == 200
    archive = tmp_path / "odd.tar"
    archive.write_bytes(shared_fs.ask("GET", "/export/odd").body)
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True, capture_output=True)
    assert {name: (tmp_path / "odd" / name).stat().st_mtime_ns for name in times} == times
    with tarfile.open(archive) as tar:
        # As GNU tar writes it: a keyword ends with its first "=".
        assert tar.getmember("odd/a").pax_headers["SCHILY.xattr.user.x%3Dy%25"] == "v=\n"
