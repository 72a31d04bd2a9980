"""Commands about a filesystem that is mounted here: what was just written through the mount is part of what
they do, and what they have the service change is seen through it when they return."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.wait import wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def here(shared_fs: TestFs, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "one", shared_fs)
    try:
        made.mount()
        yield made
    finally:
        made.close()


def test_back_at_once_what_was_removed_at_once(here: Sandbox) -> None:
    """No step waits for anything, as in a script."""
    work = here.mountpoint / "proj" / "src"
    work.mkdir(parents=True)
    (work / "a").write_text("one\n")
    made = here.json("checkpoint", "create")["checkpoint_id"]
    shutil.rmtree(here.mountpoint / "proj")
    assert here.json("undelete", "/proj", "--dry-run")["would"]["changes"] > 0
    assert here.json("undelete", "/proj")["path"] == "/proj"
    assert (work / "a").read_text() == "one\n"

    (work / "a").write_text("two\n")
    (work / "b").write_text("new\n")
    changes = here.json("checkpoint", "diff", made)["changes"]
    assert {one["path"] for one in changes} == {"/proj/src/a", "/proj/src/b"}
    undo = here.json("checkpoint", "restore", made, "/proj")["undo_checkpoint_id"]
    assert (work / "a").read_text() == "one\n" and not (work / "b").exists()
    here.fsd("checkpoint", "restore", undo, "--yes")
    assert (work / "a").read_text() == "two\n" and (work / "b").read_text() == "new\n"


def test_a_fork_and_its_merge_hold_what_both_mounts_hold(here: Sandbox, tmp_path: Path) -> None:
    (here.mountpoint / "plan").write_text("one\n")
    child = here.json("fork", "--display-name", "try")
    of = TestFs(here.fs.server, child["file_system_id"], child["fs_token"])
    there = Sandbox(tmp_path / "two", of)
    there.env["XDG_RUNTIME_DIR"] = here.env["XDG_RUNTIME_DIR"]  # the same machine
    try:
        there.mount()
        assert (there.mountpoint / "plan").read_text() == "one\n"
        (there.mountpoint / "plan").write_text("two\n")
        (here.mountpoint / "plan").write_text("three\n")
        clash = here.fsd("merge", of.id, "--dry-run", check=False)
        assert clash.returncode == 1, "both wrote it: a look that knows of neither would call it clean"
        assert here.fsd("merge", of.id, check=False).returncode == 1
        assert here.json("merge", of.id, "--theirs", "/plan")["status"] == "merged"
        assert (here.mountpoint / "plan").read_text() == "two\n"
    finally:
        there.close()


def test_a_merge_into_a_fork_sends_what_that_one_holds(here: Sandbox, tmp_path: Path) -> None:
    """With the token of what both were made from: its own mounts have no part in it."""
    (here.mountpoint / "plan").write_text("one\n")
    boxes = []
    try:
        made = here.json("fork")
        for name in ("first", "second"):
            of = TestFs(here.fs.server, made["file_system_id"], made["fs_token"])
            boxes.append(Sandbox(tmp_path / name, of))
            boxes[-1].env["XDG_RUNTIME_DIR"] = here.env["XDG_RUNTIME_DIR"]
            boxes[-1].mount()
            if name == "first":
                made = boxes[0].json("fork")
        first, second = boxes
        (second.mountpoint / "plan").write_text("two\n")
        (first.mountpoint / "plan").write_text("three\n")
        assert here.fsd("merge", second.fs.id, check=False).returncode == 1, "both wrote it"
        done = here.fsd("merge", second.fs.id, "--theirs", "/plan", "--output", "json")
        assert "does not show" not in done.stderr, "no wait for another's commit number"
        assert (first.mountpoint / "plan").read_text() == "two\n"
        assert (here.mountpoint / "plan").read_text() == "one\n"
    finally:
        for box in boxes:
            box.close()


def test_a_layer_rolled_back_under_a_mount_here(here: Sandbox, tmp_path: Path) -> None:
    """What it had not sent is in what is kept, and the mount shows what was before at once."""
    (here.mountpoint / "plan").write_text("one\n")
    made = here.json("fs", "create-layer", "--layer-id", "try")
    there = Sandbox(tmp_path / "two", TestFs(here.fs.server, made["file_system_id"], made["fs_token"]))
    there.env["XDG_RUNTIME_DIR"] = here.env["XDG_RUNTIME_DIR"]
    try:
        there.mount()
        (there.mountpoint / "plan").write_text("two\n")
        (there.mountpoint / "new").write_text("new\n")
        assert here.fsd("fs", "rollback-layer", "--layer-id", "try", check=False).returncode == 7
        done = here.json("fs", "rollback-layer", "--layer-id", "try", "--force")
        assert {at.name: at.read_text() for at in there.mountpoint.iterdir()} == {"plan": "one\n"}
        there.fsd("checkpoint", "restore", done["undo_checkpoint_id"], "--yes")
        assert {at.name: at.read_text() for at in there.mountpoint.iterdir()} == {
            "plan": "two\n",
            "new": "new\n",
        }
    finally:
        there.close()


@pytest.mark.long
def test_what_cannot_be_sent_stops_them_and_is_named(server: Server, tmp_path: Path) -> None:
    """A mount whose token is refused: nothing is made of what lacks its files, unless that is asked for."""
    fs = server.create()
    box = Sandbox(tmp_path / "box", fs)
    try:
        box.mount()
        (box.mountpoint / "known").write_text("one\n")
        made = box.json("checkpoint", "create")["checkpoint_id"]
        box.drain()
        route = f"/v1/file-systems/{fs.id}/tokens"
        (old,) = server.ask("GET", route, token=server.admin_key).json["tokens"]
        box.env["FSD_TOKEN"] = server.ask("POST", route, {}, token=server.admin_key).json["fs_token"]
        with open(box.mountpoint / "known", "r+") as file:
            done = server.ask("POST", f"{route}/{old['token_id']}/disable", {}, token=server.admin_key)
            assert done.status == 200
            wait_for(lambda: "is disabled" in (box.status()["reason"] or ""), 60, "the refusal to be told")
            file.write("two\n")
        for argv in (["fork"], ["undelete", "/known"], ["merge", "fs_" + "a" * 20], ["fs", "create-layer"]):
            refused = box.fsd(*argv, check=False)
            assert refused.returncode == 6, (argv, refused.stderr)
            assert os.fspath(box.mountpoint) in refused.stderr and "--no-barrier" in refused.stderr
        looked = box.fsd("checkpoint", "diff", made, "--output", "json")
        assert "not looked at" in looked.stderr
        assert box.fsd("fork", "--no-barrier").returncode == 0
        assert box.fsd("fs", "create-layer", "--no-barrier").returncode == 0
    finally:
        box.close()
