"""`fsd checkpoint create`, `mount` and `capture` as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import command
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

from fsd.cli.fields import names
from fsd.client import manifest
from fsd.client.contract import Contract, Writer
from fsd.client.http import Http
from fsd.client.identity import Claim, data_identity
from fsd.client.policy import from_json
from fsd.client.restore import Restore
from fsd.host.seam import Host
from fsd.model.errors import WriterConflict


@pytest.fixture
def box(trusted: Server, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "box", trusted.create())
    yield made
    made.close()


def contract(box: Sandbox) -> Contract:
    claim = Claim(token=box.env["FSD_TOKEN"], region=box.env.get("FSD_REGION_CODE"))
    return Contract(Http(data_identity(claim), Host()))


def test_a_directory_is_captured_and_comes_back(box: Sandbox, tmp_path: Path) -> None:
    work, back = tmp_path / "work", tmp_path / "back"
    for path in ("src/a.py", "src/tool", ".env", "node_modules/x/y.js"):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(f"# {path} with hunter2-hunter2\n")
    (work / "src/tool").chmod(0o755)
    (work / "link").symlink_to("src/a.py")
    (work / "big").write_bytes(os.urandom(3_000_000))
    box.env["PASSWORD"] = "hunter2-hunter2"
    more = ("--label", "draft", "--secret-env", "PASSWORD")
    first = box.json("checkpoint", "capture", str(work), "--thread", "chat/ü 1", *more)
    always, _, _ = names("checkpoint capture", long=False)
    assert set(first) == always
    assert (first["files"], first["entries"], first["parent_id"]) == (3, 4, None)
    assert first["bytes_uploaded"] == first["bytes"]
    (work / "src/a.py").write_text("changed\n")
    second = box.json("checkpoint", "capture", str(work), "--thread", "chat/ü 1")
    assert second["parent_id"] == first["checkpoint_id"]
    assert second["bytes_uploaded"] < 1000, "what is there already is not sent again"

    api = contract(box)
    record = api.call("get", {"id": first["checkpoint_id"]})
    assert record["label"] == "draft"
    assert record["policy"]["exclude"][0] == ".git"
    entries = manifest.read(record["files"])
    Restore(entries, from_json(record["policy"]), api.fetch, Host()).run(str(back), replace=False)
    assert (back / "src/a.py").read_text() == "# src/a.py with " + "\0" * 15 + "\n"
    assert (back / "big").read_bytes() == (work / "big").read_bytes()
    assert os.access(back / "src/tool", os.X_OK)
    assert os.readlink(back / "link") == "src/a.py"
    assert not (back / ".env").exists()
    assert api.call("getHead", {"threadId": "chat/ü 1"}) == second["checkpoint_id"]


def test_a_capture_that_cannot_be_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "ok").write_text("x")
    os.mkfifo(work / "pipe")
    failed = box.fsd("checkpoint", "capture", str(work), "--thread", "t", "--output", "json", check=False)
    assert failed.returncode == 1
    assert "pipe" in json.loads(failed.stderr.splitlines()[-1])["error"]["message"]
    api = contract(box)
    assert api.call("list", {"threadId": "t"}) == []
    with Writer(api, "t") as writer:
        with pytest.raises(WriterConflict):
            Writer(api, "t").__enter__()
        busy = box.fsd("checkpoint", "capture", str(work), "--thread", "t", "--exclude", "pipe", check=False)
        assert busy.returncode == 7
        assert writer.current()["threadId"] == "t"
    box.fsd("checkpoint", "capture", str(work), "--thread", "t", "--exclude", "pipe")
    assert (
        box.fsd("checkpoint", "capture", str(work / "absent"), "--thread", "t", check=False).returncode == 1
    )
    assert box.fsd("checkpoint", "capture", str(work), "--thread", "t", "--secret-env", "NONE",
                   check=False).returncode == 2  # fmt: skip


def test_both_kinds_come_back_into_a_local_directory(box: Sandbox, tmp_path: Path) -> None:
    """A state of the filesystem has everything, what a capture would leave out too."""
    tree = tmp_path / "tree"
    (tree / ".git").mkdir(parents=True)
    (tree / ".git" / "HEAD").write_text("ref")
    (tree / "run").write_text("#!/bin/sh")
    (tree / "run").chmod(0o755)
    (tree / "empty").mkdir()
    (tree / "link").symlink_to("run")
    box.fsd("cp", "-r", str(tree), ":/")
    native = box.json("checkpoint", "create")["checkpoint_id"]
    manifest_id = box.json("checkpoint", "capture", str(tree), "--thread", "t")["checkpoint_id"]
    for ident, git in ((native, True), (manifest_id, False)):
        back = tmp_path / ident
        told = box.json("checkpoint", "restore", ident, "--to", str(back))
        top = back / "tree" if (back / "tree").exists() else back
        assert (top / ".git" / "HEAD").exists() == git
        assert os.access(top / "run", os.X_OK)
        assert os.readlink(top / "link") == "run"
        assert (top / "empty").is_dir()
        assert told["files"] == (2 if git else 1)
        again = box.fsd("checkpoint", "restore", ident, "--to", str(back), check=False)
        assert again.returncode == 1
        assert "--force" in again.stderr
        box.fsd("checkpoint", "restore", ident, "--to", str(back), "--force")


def test_what_only_the_server_can_ask_for_is_said_with_remote(box: Sandbox) -> None:
    """Not taken in silence: who gives --require-all counts on every mount being in it."""
    for wrong in (("--require-all",), ("--remote", "--mount", "/mnt")):
        refused = box.fsd("checkpoint", "create", *wrong, check=False)
        assert refused.returncode == 2
        assert "--remote" in refused.stderr
    assert box.json("checkpoint", "list")["checkpoints"] == []


@pytest.mark.kernel
def test_create_goes_through_the_mount_that_is_here(box: Sandbox, tmp_path: Path) -> None:
    by_server = box.json("checkpoint", "create", "--label", "empty")
    box.mount()
    (box.mountpoint / "f").write_text("one")
    made = box.json("checkpoint", "create", "--label", "one")
    always, _, _ = names("checkpoint create", long=False)
    assert always <= set(made)
    assert made["parent_id"] == by_server["checkpoint_id"]
    (box.mountpoint / "f").write_text("two")
    named = box.json("checkpoint", "create", "--mount", str(box.mountpoint))
    assert named["fs_seq"] > made["fs_seq"]
    place = tmp_path / "at"
    place.mkdir()
    box.fsd("checkpoint", "mount", made["checkpoint_id"], str(place), "--state-dir", str(box.state))
    try:
        assert (place / "f").read_text() == "one"
    finally:
        box.fsd("unmount", str(place))
    refused = box.fsd(
        "checkpoint", "mount", "cp_none", str(place), "--state-dir", str(box.state), check=False
    )
    assert refused.returncode == 5


@pytest.mark.kernel
def test_without_a_server_it_is_told_and_nothing_is_half(server: Server, tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "box", server.create())
    try:
        box.mount()
        (box.mountpoint / "f").write_text("one")
        server.stop()
        for more in ((), ("--mount", str(box.mountpoint))):
            failed = box.fsd("checkpoint", "create", "--timeout", "1s", *more, check=False)
            assert failed.returncode == 6, failed.stderr
            assert "no checkpoint" in failed.stderr
        (box.mountpoint / "g").write_text("two")
        server.restart()
        box.fsd("drain", str(box.mountpoint))
        assert box.json("checkpoint", "list")["checkpoints"] == []
        assert box.json("checkpoint", "create")["not_flushed"] == []
    finally:
        box.close()


@pytest.mark.kernel
def test_a_daemon_killed_while_it_makes_one(server: Server, tmp_path: Path) -> None:
    """At any moment: the command fails or has made one, and what was written is there."""
    box = Sandbox(tmp_path / "box", server.create(), supervised=True)
    try:
        box.mount()
        made = 0
        for number in range(2):
            (box.mountpoint / f"f{number}").write_bytes(os.urandom(200_000))
            asking = subprocess.Popen(
                [*command(), "checkpoint", "create", "--timeout", "20s"],
                env=box.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            threading.Event().wait(0.15 + 0.1 * number)
            killed = box.daemon
            os.kill(killed, signal.SIGKILL)
            made += asking.wait(60) == 0
            box.wait_remounted(killed)
        wait_for(lambda: box.fsd("drain", str(box.mountpoint), check=False).returncode == 0, 30, "a drain")
        there = len(box.json("checkpoint", "list")["checkpoints"])
        assert made <= there <= 2
        assert len(list(box.mountpoint.iterdir())) == 2
    finally:
        box.close()
