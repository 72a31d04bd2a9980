"""The command line against a real server: the seed scenario word for word, the commands in both spellings."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import Outcome, process
from support.server import Server, TestFs

ROOT = Path(__file__).parents[2]
REGION = "aws-us-east-1"

PROVISION = """\
export TI_FS_TOKEN="$(ti fs create-file-system \\
--wait \\
--query fs_token \\
--output text)"
printf %s "$TI_FS_TOKEN"
"""
FIRST = """\
printf '%s\\n' '# Plan' '1. inspect' '2. change' '3. verify' \\
| ti fs copy-file --from-stdin --to-remote /tasks/task-42/plan.md
ti fs-journal create-journal \\
--journal-id task-42 \\
--journal-kind agent \\
--title "task 42" \\
--actor agent:worker-1
ti fs-journal append-journal-entries \\
--journal-id task-42 \\
--entry-json '{"type":"task.checkpoint","step":"inspection-complete"}'
"""
READ_PLAN = "ti fs read-file --path /tasks/task-42/plan.md\n"
READ_JOURNAL = "ti fs-journal read-journal-entries --journal-id task-42 --after-seq 0\n"
PLAN = b"# Plan\n1. inspect\n2. change\n3. verify\n"


@pytest.fixture(scope="module")
def regional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the region that the scenario names."""
    made = Server(tmp_path_factory.mktemp("regional"), "--region", REGION)
    try:
        yield made.start()
    finally:
        made.end()


def shell(script: str, tools: Path, **env: str) -> bytes:
    """Run a script in an environment that holds nothing but `env` and the tools' directory."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={"PATH": f"{tools}:/usr/bin:/bin", **env},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("spelling", ["fsd", "ti"])
def test_the_seed_scenario_word_for_word(regional: Server, tmp_path: Path, spelling: str) -> None:
    tools = tmp_path / "bin"
    if spelling == "ti":
        subprocess.run([ROOT / "scripts" / "install-ti", tools], check=True, capture_output=True, timeout=30)
    else:
        tools.mkdir()
        (tools / "fsd").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsd "$@"\n')
        (tools / "fsd").chmod(0o755)

    def scene(script: str, **env: str) -> bytes:
        return shell(script.replace("ti fs", f"{spelling} fs"), tools, **env)

    trusted = {"FSD_ENDPOINT": regional.url, "FSD_ADMIN_KEY": regional.admin_key}
    token = scene(PROVISION, **trusted).decode()
    sandbox = {"TI_FS_TOKEN": token, "TI_REGION_CODE": REGION}
    scene(FIRST, **sandbox)
    assert scene(READ_PLAN, **sandbox) == PLAN
    journal = json.loads(scene(READ_JOURNAL, **sandbox))
    (entry,) = journal["entries"]
    assert entry["type"] == "task.checkpoint"
    assert entry["step"] == "inspection-complete"
    assert entry["actor"] == {"type": "agent", "id": "worker-1"}
    assert journal["next_after_seq"] == entry["seq"] == 1


def test_install_ti_does_not_replace_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "ti").write_text("#!/bin/sh\n")
    command = [ROOT / "scripts" / "install-ti", tmp_path]
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 1
    command.insert(1, "--force")
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    assert (
        subprocess.run(command[:1] + command[2:], capture_output=True, timeout=30, check=False).returncode
        == 0
    )


def fsd(fs: TestFs, *argv: str | bytes, stdin: bytes = b"", code: int = 0) -> Outcome:
    """One command with the two values; its exit code must be `code`."""
    found = process(*argv, env=fs.env, stdin=stdin)
    assert found.code == code, found.err
    return found


def test_the_control_plane_from_create_to_delete(shared_server: Server) -> None:
    env = {"FSD_ENDPOINT": shared_server.url, "FSD_ADMIN_KEY": shared_server.admin_key}

    def admin(*argv: str, code: int = 0) -> Outcome:
        found = process(*argv, env=env)
        assert found.code == code, found.err
        return found

    made = admin("create", "--display-name", "cli test", "--label", "suite=cli", "--wait").json
    assert set(made) >= {
        "file_system_id",
        "fs_token",
        "region_code",
        "status",
        "display_name",
        "labels",
    }
    fs_id, token = made["file_system_id"], made["fs_token"]
    assert made["labels"] == {"suite": "cli"}
    assert admin("fs", "create-file-system", "--label", "suite=other").json["credentials_stored"] is False

    terms = admin("create", "--lease-duration", "30s", "--renew-after", "10s").json
    lease = shared_server.ask(
        "POST", "/v1/checkpoints/acquireWriter", {"threadId": "t"}, token=terms["fs_token"]
    ).json["result"]
    assert lease["renewAfterMs"] == 10_000
    admin("create", "--lease-duration", "30s", "--renew-after", "30s", code=2)

    listed = admin("list", "--label", "suite=cli").json["file_systems"]
    assert [f["file_system_id"] for f in listed] == [fs_id]
    assert admin("list", "--display-name", "cli te", "--query", "file_systems[].file_system_id").json == [
        fs_id
    ]
    assert admin("describe", fs_id, "--query", "status", "--output", "text").text == "active\n"
    as_owner = process("fs", "describe-file-system", env={"FSD_TOKEN": token})
    assert as_owner.json["file_system_id"] == fs_id
    assert process("check", env={"FSD_TOKEN": token}).json["status"] == "ok"

    second = admin("token", "create", fs_id, "--token-name", "second", "--ttl", "1h").json
    assert second["expires_at"]
    assert process("ls", "/", env={"FSD_TOKEN": second["fs_token"]}).code == 0
    names = admin("token", "list", fs_id, "--query", "tokens[].token_name").json
    assert "second" in names
    admin("token", "disable", second["token_id"], "--file-system-id", fs_id)
    assert process("ls", "/", env={"FSD_TOKEN": second["fs_token"]}).code == 3
    admin("fs", "enable-file-system-token", "--token-id", second["token_id"], "--file-system-id", fs_id)
    assert process("ls", "/", env={"FSD_TOKEN": second["fs_token"]}).code == 0
    third = admin("token", "rotate", second["token_id"], "--file-system-id", fs_id).json
    assert third["token_name"] == "second"
    assert process("ls", "/", env={"FSD_TOKEN": second["fs_token"]}).code == 3
    assert process("ls", "/", env={"FSD_TOKEN": third["fs_token"]}).code == 0

    refused = admin("delete", fs_id, code=2)
    assert "--yes" in refused.err
    assert admin("delete", fs_id, "--yes").json["status"] == "deleting"
    assert process("ls", "/", env={"FSD_TOKEN": token}).code in (3, 5)
    assert admin("describe", fs_id, code=5).error["code"] == "not_found"


def test_files_in_the_short_spelling(shared_fs: TestFs, tmp_path: Path) -> None:
    local = tmp_path / "plan.md"
    local.write_bytes(PLAN)
    told = fsd(shared_fs, "cp", str(local), ":/tasks/a b/plan.md").json
    assert told["status"] == "ok"
    assert told["bytes_transferred"] == len(PLAN)
    assert fsd(shared_fs, "cat", "/tasks/a b/plan.md").out == PLAN
    assert fsd(shared_fs, "cat", "/tasks/a b/plan.md", "--offset", "2", "--length", "4").out == PLAN[2:6]
    assert fsd(shared_fs, "cp", ":/tasks/a b/plan.md", "-").out == PLAN
    fsd(shared_fs, "cp", "-", ":/tasks/from-stdin", stdin=b"piped")
    fsd(shared_fs, "cp", "--append", "-", ":/tasks/from-stdin", stdin=b" more")
    fsd(shared_fs, "cp", ":/tasks/from-stdin", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"piped more"
    fsd(shared_fs, "cp", ":/tasks/from-stdin", ":/tasks/copy")

    names = fsd(shared_fs, "ls", "/tasks", "--query", "entries[].name").json
    assert names == ["a b", "copy", "from-stdin"]
    assert fsd(shared_fs, "ls", "/tasks", "--output", "text").text == "a b/\ncopy\nfrom-stdin\n"
    assert fsd(shared_fs, "ls", "/tasks/copy", "--query", "entries[].name").json == ["copy"]
    deep = fsd(shared_fs, "ls", "-r", "/", "--query", "entries[].path").json
    assert "/tasks/a b/plan.md" in deep

    fsd(shared_fs, "mkdir", "-p", "-m", "750", "/tasks/x/y")
    assert fsd(shared_fs, "stat", "/tasks/x/y", "--query", "mode", "--output", "text").text == "750\n"
    fsd(shared_fs, "mv", "/tasks/copy", "/tasks/x/moved")
    there = fsd(shared_fs, "mv", "/tasks/from-stdin", "/tasks/x/moved", code=1)
    assert "--overwrite" in there.err
    fsd(shared_fs, "chmod", "600", "/tasks/x/moved")
    fsd(shared_fs, "ln", "/tasks/x/moved", "/tasks/x/hard")
    fsd(shared_fs, "ln", "-s", "moved", "/tasks/x/soft")
    about = fsd(shared_fs, "stat", "/tasks/x/hard").json
    assert (about["mode"], about["nlink"], about["size_bytes"]) == ("600", 2, 10)
    assert fsd(shared_fs, "stat", "/tasks/x/soft").json["target"] == "moved"
    assert fsd(shared_fs, "stat", "-L", "/tasks/x/soft").json["size_bytes"] == 10
    assert fsd(shared_fs, "cat", "/tasks/x/soft").out == b"piped more"
    found = fsd(shared_fs, "find", "/", "--name", "*.md", "--query", "matches[].path").json
    assert found == ["/tasks/a b/plan.md"]
    only_directories = fsd(shared_fs, "find", "/tasks", "--type", "d", "--query", "matches[].path").json
    assert set(only_directories) >= {"/tasks/a b", "/tasks/x", "/tasks/x/y"}
    assert fsd(shared_fs, "find", "/", "--min-size", "1M").json["matches"] == []

    fsd(shared_fs, "rm", "/tasks/from-stdin")
    assert fsd(shared_fs, "cat", "/tasks/from-stdin", code=5).error["code"] == "not_found"
    assert fsd(shared_fs, "rm", "/tasks/x", code=1).error["details"]["errno"] in ("ENOTEMPTY", "EISDIR")
    fsd(shared_fs, "rm", "-r", "/tasks")
    assert fsd(shared_fs, "ls", "/").json["entries"] == []


def test_files_in_the_long_spelling(shared_fs: TestFs, tmp_path: Path) -> None:
    local = tmp_path / "data"
    local.write_bytes(bytes(range(256)) * 20_000)
    done = fsd(
        shared_fs,
        *("fs", "copy-file", "--from-local", str(local), "--to-remote", "/d/data"),
        *("--tag", "kind=model", "--description", "a file"),
    ).json
    assert done["files_transferred"] == 1
    assert done["revision"]
    about = fsd(shared_fs, "fs", "describe-file", "--path", "/d/data").json
    assert about["tags"] == {"kind": "model", "description": "a file"}
    assert about["size_bytes"] == 256 * 20_000
    assert set(about) >= {"has_mode", "resource_id", "nlink", "content_type", "semantic_text", "degraded"}
    tagged = ["fs", "find-files", "--path", "/", "--tag", "kind=model", "--query", "matches[].path"]
    assert fsd(shared_fs, *tagged).json == ["/d/data"]

    back = tmp_path / "sub" / "back"
    to_local = ("fs", "copy-file", "--from-remote", "/d/data", "--to-local", str(back))
    assert fsd(shared_fs, *to_local, code=5).error["code"] == "not_found"
    fsd(shared_fs, *to_local, "--create-parents")
    assert back.read_bytes() == local.read_bytes()
    assert fsd(shared_fs, *to_local, code=1).error["code"] == "conflict"
    fsd(shared_fs, *to_local, "--overwrite")
    whole = fsd(shared_fs, "fs", "copy-file", "--from-remote", "/d/data", "--to-stdout")
    assert whole.out == local.read_bytes()

    fsd(shared_fs, "fs", "create-directory", "--path", "/e", "--mode", "700")
    fsd(shared_fs, "fs", "create-symlink", "--target", "data", "--link-path", "/d/link")
    fsd(shared_fs, "fs", "create-hardlink", "--source-path", "/d/data", "--link-path", "/e/data")
    fsd(shared_fs, "fs", "chmod-file", "--path", "/e/data", "--mode", "640")
    moving = ("fs", "move-file", "--from-remote", "/e/data", "--to-remote")
    fsd(shared_fs, *moving, "/e/other")
    fsd(shared_fs, "fs", "copy-file", "--from-stdin", "--to-remote", "/e/data", stdin=b"new")
    assert fsd(shared_fs, *moving, "/e/other", code=1).error["code"] in ("conflict", "fs_error")
    fsd(shared_fs, *moving, "/e/other", "--overwrite")
    assert fsd(shared_fs, "fs", "cat", "--path", "/e/other").out == b"new"
    listed = fsd(shared_fs, "fs", "list-files", "--path", "/").json
    assert [e["name"] for e in listed["entries"]] == ["d", "e"]
    assert set(listed["entries"][0]) >= {"name", "size_bytes", "is_dir", "mtime"}
    fsd(shared_fs, "fs", "delete-file", "--path", "/d", "--recursive")


def test_a_tree_there_and_back(shared_fs: TestFs, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "deep").mkdir(parents=True)
    for at in range(40):
        (tree / "sub" / f"f{at}").write_bytes(b"x" * at)
    (tree / "sub" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (tree / "sub" / "deep" / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("sub/f1")
    raw = os.fsencode(tree) + b"/not-\xff-utf8"
    with open(raw, "wb") as file:
        file.write(b"raw")
    told = fsd(shared_fs, "cp", "-r", str(tree), ":/trees/one").json
    assert told["files_transferred"] == 42
    again = fsd(shared_fs, "cp", "-r", "--resume", str(tree), ":/trees/one").json
    assert again["files_transferred"] == 0
    assert again["skipped"] >= 42
    fsd(shared_fs, "cp", "-r", ":/trees/one", str(tmp_path / "back"))
    assert (
        subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "back"], check=False).returncode
        == 0
    )
    assert os.access(tmp_path / "back" / "sub" / "deep" / "run.sh", os.X_OK)
    assert fsd(shared_fs, "cat", b"/trees/one/not-\xff-utf8").out == b"raw"


def test_copies_do_not_guess(shared_fs: TestFs, tmp_path: Path) -> None:
    local = tmp_path / "here"
    local.write_bytes(b"1")
    colon = fsd(shared_fs, "cp", str(local), "/tasks/plan.md", code=2)
    assert "write :/tasks/plan.md" in colon.err
    assert "leading colon" in fsd(shared_fs, "cp", str(local), str(tmp_path / "here"), code=2).err
    assert "absolute" in fsd(shared_fs, "cp", str(local), ":relative", code=2).err
    assert "exactly one" in fsd(shared_fs, "fs", "copy-file", "--from-local", str(local), code=2).err
    assert fsd(shared_fs, "cp", str(local), code=2)
    assert "query_not_supported" in fsd(shared_fs, "cp", ":/x", "-", "--query", "a", code=2).err
    assert fsd(shared_fs, "cp", "--append", ":/x", str(local), code=2)
    assert fsd(shared_fs, "cp", "/nonexistent-here", ":/x", code=5)
    assert "-r" in fsd(shared_fs, "cp", str(tmp_path), ":/x", code=2).err


def test_revisions_guard_a_write(shared_fs: TestFs) -> None:
    first = fsd(shared_fs, "cp", "-", ":/guarded", stdin=b"1").json["revision"]
    second = fsd(shared_fs, "cp", "--if-match", first, "-", ":/guarded", stdin=b"2").json["revision"]
    assert second != first
    assert (
        fsd(shared_fs, "cp", "--if-match", first, "-", ":/guarded", stdin=b"3", code=1).error["code"]
        == "conflict"
    )
    assert fsd(shared_fs, "cp", "--no-overwrite", "-", ":/guarded", stdin=b"4", code=1)
    assert fsd(shared_fs, "cat", "/guarded").out == b"2"


def test_journals_in_both_spellings(shared_fs: TestFs) -> None:
    made = fsd(shared_fs, "journal", "create", "j1", "--title", "t", "--label", "a=b").json
    assert made["journal_id"] == "j1"
    again = fsd(
        shared_fs, "fs-journal", "create-journal", "--journal-id", "j1", "--title", "t", "--label", "a=b"
    )
    assert again.json["genesis_hash"] == made["genesis_hash"]
    assert fsd(shared_fs, "journal", "create", "j1", "--title", "other", code=1).error["code"] == "conflict"

    big = '{"type":"n","n":123456789012345678901234567890,"f":1.10}'
    fsd(
        shared_fs,
        "journal",
        "append",
        "j1",
        "--entry-json",
        big,
        "--subject",
        "repo:x",
        "--source",
        "imported",
    )
    lines = b'{"type":"a"}\n\n{"type":"b","subjects":["u:1"]}\n'
    told = fsd(shared_fs, "journal", "append", "j1", stdin=lines).json
    assert (told["first_seq"], told["last_seq"], told["count"]) == (2, 3, 2)
    array = b' [ {"k": [1, "]"]} , {"k": 2} ] \n'
    append = ("fs-journal", "append-journal-entries", "--journal-id", "j1", "--json-array")
    fsd(shared_fs, *append, "--entry-type", "c", stdin=array)
    once = ("--entry-json", '{"type":"once"}', "--idempotency-key", "k1")
    one, two = (fsd(shared_fs, "journal", "append", "j1", *once).json for _ in range(2))
    assert (one["first_seq"], two["first_seq"]) == (6, 6)
    assert two["idempotent"] is True
    other = ("--entry-json", '{"type":"other"}', "--idempotency-key", "k1")
    assert fsd(shared_fs, "journal", "append", "j1", *other, code=1)
    assert fsd(shared_fs, "journal", "append", "j1", "--expected-seq", "2", *once[:2], code=1)

    read_back(shared_fs, one["head_hash"])


def read_back(shared_fs: TestFs, head: str) -> None:
    """What the journal `j1` holds, by every command that reads."""
    text = fsd(shared_fs, "journal", "read", "j1", "--after-seq", "0").text
    assert "123456789012345678901234567890" in text
    assert '"f": 1.10' in text
    assert fsd(shared_fs, "journal", "read", "j1", "--query", "sum(entries[].f)").json == 1.1
    entries = json.loads(text)["entries"]
    assert [e["type"] for e in entries] == ["n", "a", "b", "c", "c", "once"]
    assert entries[0]["subjects"] == ["repo:x"]
    assert entries[0]["source"] == "imported"
    page = fsd(shared_fs, "fs-journal", "read-journal-entries", "--journal-id", "j1", "--limit", "2").json
    assert page["next_after_seq"] == 2
    followed = fsd(shared_fs, "journal", "follow", "j1", "--count", "6").text.splitlines()
    assert [json.loads(line)["seq"] for line in followed] == [1, 2, 3, 4, 5, 6]

    checked = fsd(shared_fs, "journal", "verify", "j1").json
    assert checked["ok"] is True
    assert checked["entries"] == 6
    assert fsd(shared_fs, "journal", "verify", "j1", "--head-hash", head).json["ok"]
    assert fsd(shared_fs, "journal", "verify", "j1", "--head-hash", "0" * 64, code=1)
    listed = fsd(shared_fs, "journal", "list", "--query", "journals[].journal_id").json
    assert listed == ["j1"]
    found = fsd(shared_fs, "journal", "search", "--entry-type", "c", "--since", "1h").json
    assert [m["entry"]["seq"] for m in found["matches"]] == [4, 5]
    assert {m["journal_id"] for m in found["matches"]} == {"j1"}
    by_label = fsd(shared_fs, "journal", "search", "--label", "a=b", "--query", "matches[].title").json
    assert by_label == ["t"]
    exported = fsd(shared_fs, "journal", "export", "j1").text.splitlines()
    assert len(exported) == 7
    assert fsd(shared_fs, "journal", "read", "absent", code=5)
    verify_offline("\n".join(exported).encode(), head)


def verify_offline(export: bytes, head: str) -> None:
    """By who has the export alone: no token, no server."""

    def verify(data: bytes, code: int = 0, *more: str) -> Outcome:
        found = process("journal", "verify", "--file", "-", *more, stdin=data)
        assert found.code == code, found.err
        return found

    answer = verify(export, 0, "--head-hash", head).json
    assert (answer["ok"], answer["entries"], answer["journal_id"]) == (True, 6, "j1")
    assert verify(export.replace(b'"once"', b'"0nce"'), 1).json["first_bad_seq"] == 6
    assert verify(export.replace(b"imported", b"importe\xff"), 1).json["first_bad_seq"] == 1
    assert verify(export.rpartition(b"\n")[0], 1).json["first_bad_seq"] == 6, "one past the last"
    verify(export, 1, "--head-hash", "0" * 64)
    for data, what in (
        (b"", "empty"),
        (b"\xff\n", "first line"),
        (b"[1]\n", "begins with"),
        (b"x" * 5_000_000, "4 MiB"),
    ):
        assert what in verify(data, 2).err
    assert "export of the journal j1" in verify(export, 2, "j2").err
    assert process("journal", "verify", "--file", "/nonexistent/file").code == 5
    assert "JOURNAL is missing" in process("journal", "verify").err


@pytest.mark.parametrize(
    ("stdin", "flags", "what"),
    [
        (b"", [], "no entry"),
        (b"{", [], "entry 1"),
        (b'{"type":"a"}\n[1]\n', [], "entry 2"),
        (b'[{"type":"a"},]', ["--json-array"], "no JSON array"),
        (b'{"type":"a"}', ["--json-array"], "no JSON array"),
        (b"\xff", [], "no UTF-8"),
        (b'{"type":"a"}\n' * 501, [], "501 entries"),
        (b'{"type":"A"}', [], "type"),
        (b'{"type":"a","seq":3}', [], "seq"),
        (b'{"type":"a","fsd_x":3}', [], "fsd_x"),
        (b'{"type":"a","x":"\\ud800"}', [], "surrogate"),
    ],
)
def test_a_wrong_entry_is_named_and_nothing_is_written(
    shared_fs: TestFs,
    stdin: bytes,
    flags: list[str],
    what: str,
) -> None:
    fsd(shared_fs, "journal", "create", "j")
    assert what in fsd(shared_fs, "journal", "append", "j", *flags, stdin=stdin, code=2).err
    assert fsd(shared_fs, "journal", "read", "j").json["entries"] == []


def test_bad_identities_and_servers_that_are_down(shared_fs: TestFs, tmp_path: Path) -> None:
    token = shared_fs.token
    foreign = token[:-43] + "x" * 43
    found = process("ls", "/", env={"FSD_TOKEN": foreign})
    assert found.code == 3
    assert foreign[-43:] not in found.err
    assert process("ls", "/", env={"FSD_TOKEN": token[:-5]}).code == 3
    assert process("ls", "/", env={}).code == 3
    down = process("ls", "/", env={"FSD_TOKEN": token, "FSD_ENDPOINT": "http://127.0.0.1:9"})
    assert down.code == 1
    assert down.error["code"] == "unavailable"
    assert down.error["retryable"] is True
    secret = tmp_path / "token"
    secret.write_text(token + "\n")
    secret.chmod(0o644)
    refused = process("ls", "/", "--token-file", str(secret), env={})
    assert refused.code == 3
    assert "chmod 600" in refused.err
    secret.chmod(0o600)
    assert process("ls", "/", "--token-file", str(secret), env={}).code == 0
    assert process("ls", "/", "--token-file", "-", env={}, stdin=token.encode()).code == 0


def test_doctor_says_what_works(shared_fs: TestFs, tmp_path: Path) -> None:
    found = fsd(shared_fs, "doctor", "--state-dir", str(tmp_path))
    assert found.json["works"]["direct"] is True
    names = [c["name"] for c in found.json["checks"]]
    assert {"version", "fuse", "state", "token", "server", "clock", "filesystem"} <= set(names)
    assert process("doctor", "--state-dir", str(tmp_path), env={}).code == 3
    left = tmp_path / "mounts" / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "daemon.log").write_bytes(b"no part of it")
    assert "left-over" not in [
        c["name"] for c in fsd(shared_fs, "doctor", "--state-dir", str(tmp_path)).json["checks"]
    ]
    (left / "log.0000000000000001").write_bytes(b"x" * 10)
    told = fsd(shared_fs, "doctor", "--state-dir", str(tmp_path)).json
    assert any(c["name"] == "left-over" and "0123456789abcdef" in c["message"] for c in told["checks"])
    run = tmp_path / "run" / "run-abc"
    run.mkdir(parents=True)
    (run / "state").write_bytes(b"what was pulled")
    told = fsd(shared_fs, "doctor", "--state-dir", str(tmp_path)).json
    assert any(f"fsd run --push-left {run}" == c["hint"] for c in told["checks"])


def test_run_without_a_mount(shared_fs: TestFs, tmp_path: Path) -> None:
    fsd(shared_fs, "cp", "-", ":/jobs/in", stdin=b"1")
    env = {**shared_fs.env, "XDG_STATE_HOME": str(tmp_path)}
    script = "cat in; echo 2 > out; mkdir d; mv in d/in; exit 3"
    found = process("run", "--path", "/jobs", "--", "sh", "-c", script, env=env)
    assert found.code == 3
    assert found.out == b"1"
    assert fsd(shared_fs, "cat", "/jobs/out").out == b"2\n"
    assert fsd(shared_fs, "cat", "/jobs/d/in").out == b"1"
    assert fsd(shared_fs, "cat", "/jobs/in", code=5)
    assert list((tmp_path / "fsd" / "run").iterdir()) == []
    assert process("run", "--path", "/jobs", env=env).code == 2
    missing = process("run", "--path", "/jobs", "--", "no-such-command", env=env)
    assert missing.code == 127
    assert "no-such-command" in missing.err


def test_audit_of_a_stopped_server(server: Server, tmp_path: Path) -> None:
    fs = server.create()
    fsd(fs, "cp", "-", ":/a/b", stdin=b"x" * 100_000)
    fsd(fs, "ln", "/a/b", "/a/c")
    running = process("audit", "--data-dir", str(server.data_dir))
    assert running.code == 7
    server.stop()
    told = process("audit", "--data-dir", str(server.data_dir)).json
    assert told["ok"] and (told["file_systems"], told["packs"], told["findings"]) == (1, 1, [])
    assert process("audit", "--data-dir", str(server.data_dir), fs.id).code == 0
    assert process("audit", "--data-dir", str(tmp_path / "absent")).code == 5
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    none = process("audit", "--data-dir", str(wrong))
    assert none.code == 5 and "no data directory of" in none.err and not list(wrong.iterdir())
    with sqlite3.connect(server.data_dir / "fsd.db") as db:
        db.execute("UPDATE inode SET nlink = 7 WHERE nlink = 2")
    found = process("audit", "--data-dir", str(server.data_dir))
    assert found.code == 1
    assert found.json["ok"] is False
    assert "nlink" in found.err or "link" in found.err


def test_a_dry_run_finds_out_and_changes_nothing(shared_fs: TestFs, tmp_path: Path) -> None:
    fsd(shared_fs, "cp", "-", ":/d/a", stdin=b"x")
    before = fsd(shared_fs, "stat", "/d/a").json
    for argv in (
        *(
            ("rm", "/d/a"),
            ("rm", "-r", "/d"),
            ("mv", "/d/a", "/b"),
            ("mkdir", "/new"),
            ("chmod", "600", "/d/a"),
        ),
        *(("ln", "/d/a", "/c"), ("ln", "-s", "a", "/s"), ("cp", "-", ":/d/a"), ("cp", "-r", ":/d", ":/e")),
        *(("journal", "create", "j"), ("run", "true"), ("mount", str(tmp_path))),
    ):
        words = 2 if argv[0] == "journal" else 1
        told = process(*argv[:words], "--dry-run", *argv[words:], env=shared_fs.env).json
        assert told["dry_run"], argv
        assert told["checks"][0]["status"] == "ok"
    assert fsd(shared_fs, "stat", "/d/a").json == before
    assert fsd(shared_fs, "ls", "/", "--query", "entries[].name").json == ["d"]
    for argv, code in (
        (("mount", "/absent/m"), 5),
        (("mount", str(tmp_path), "--keep", "5"), 2),
        (("mount", str(tmp_path), "--state-dir", str(tmp_path / "s")), 2),
        (("checkpoint", "mount", "cp_0123456789abcdefghjk", "/absent/m"), 5),
    ):
        assert process(*argv, "--dry-run", env=shared_fs.env).code == code, argv
    missing = process("rm", "/absent", "--dry-run", env=shared_fs.env)
    assert missing.code == 5
    assert missing.json["checks"][-1]["status"] == "failed"
    taken = process("mkdir", "/d", "--dry-run", env=shared_fs.env)
    assert taken.code == 1
