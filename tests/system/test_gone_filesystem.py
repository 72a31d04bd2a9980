"""The filesystem of a mount is deleted meanwhile, or its token: told at once, and what was not sent can be
taken out or dropped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.cli import process
from support.sandbox import Sandbox
from support.server import Server

from fsd.vfs.commit import RETRY_DENIED

MIB = 1024 * 1024


@pytest.fixture
def box(shared_server: Server, short_dir: Path) -> Iterator[Sandbox]:
    """A mount with one committed file, whose filesystem is deleted then while more is being written."""
    made = Sandbox(short_dir / "a", shared_server.create())
    try:
        made.mount()
        (made.mountpoint / "old").write_bytes(b"o" * 3 * MIB)
        made.drain()
        gone = shared_server.ask("DELETE", f"/v1/file-systems/{made.fs.id}", token=shared_server.admin_key)
        assert gone.status < 300, gone.body
        with open(made.mountpoint / "old", "r+b") as file:
            file.seek(MIB + 100)
            file.write(b"new")
        (made.mountpoint / "d").mkdir()
        (made.mountpoint / "d" / "own").write_bytes(b"own" * 500_000)
        yield made
    finally:
        made.close()


def recover(box: Sandbox, *argv: str) -> CompletedProcess[str]:
    place, state = os.fspath(box.mountpoint), os.fspath(box.state)
    return box.fsd("recover", place, "--state-dir", state, "--output", "json", *argv, check=False)


def test_it_is_told_at_once_and_what_was_not_sent_is_kept_until_it_is_taken_out(box: Sandbox) -> None:
    denied = json.loads(box.fsd("drain", str(box.mountpoint), "--output", "json", check=False).stdout)
    assert denied["pending"]["files"] and "token is unknown" in denied["reason"]
    began = time.monotonic()
    box.status()
    asked = time.monotonic()
    ended = box.fsd("unmount", str(box.mountpoint), "--output", "json", check=False)
    # No retry of a denied commit was waited for. How slow the machine is a command of the same kind tells.
    assert time.monotonic() - asked < RETRY_DENIED * 0.8 + 5 * (asked - began)
    assert ended.returncode == 6 and not os.path.ismount(box.mountpoint)
    assert json.loads(ended.stdout)["pending"]["files"] == 2
    told = recover(box)
    assert told.returncode == 3 and "--export" in told.stderr and "--discard" in told.stderr
    target = box.base / "out"
    taken = recover(box, "--export", str(target))
    assert taken.returncode == 6, taken.stderr
    found = json.loads(taken.stdout)
    assert (target / "d" / "own").read_bytes() == b"own" * 500_000
    assert len(found["exported"]) == 2 and len(found["incomplete"]) == 1
    # Only the server had the rest of it.
    changed = next(p for p in target.rglob("*") if str(p) == found["incomplete"][0]).read_bytes()
    assert len(changed) == 3 * MIB and changed.strip(b"\0") == b"new"
    assert changed[MIB + 100 : MIB + 103] == b"new"
    dropped = recover(box, "--discard", "--yes")
    assert dropped.returncode == 0 and json.loads(dropped.stdout)["status"] == "discarded"
    assert recover(box).returncode == 0


def test_without_a_token_the_filesystems_id_is_enough_to_take_files_out(box: Sandbox) -> None:
    """A sandbox that lost its environment, with the state directory alone. Nothing is sent or dropped."""
    assert box.fsd("unmount", str(box.mountpoint), check=False).returncode == 6
    place = ("recover", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), "--output", "json")
    bare = {"HOME": box.env["HOME"]}
    told = process(*place, "--export", str(box.base / "no"), env=bare)
    assert told.code == 3 and "--file-system-id" in told.err
    target = box.base / "out"
    named = ("--file-system-id", box.fs.id)
    taken = process(*place, "--export", str(target), *named, env=bare)
    assert taken.code == 6, taken.err
    found = json.loads(taken.out)
    assert found["reason"] == "no filesystem token"
    assert f"remove {found['state_dir']}" in taken.err, "nothing else drops it without a token"
    assert (target / "d" / "own").read_bytes() == b"own" * 500_000
    assert process(*place, "--discard", "--yes", *named, env=bare).code == 3
    assert process(*place, *named, env=bare).code == 3
    other = process(*place, "--export", str(target), "--file-system-id", "fs_" + "a" * 20, env=bare)
    assert other.code == 5, "nothing was left of that one"
    again = recover(box, "--export", str(box.base / "again"))
    assert len(json.loads(again.stdout)["exported"]) == 2, "it is all still there"


def test_all_that_was_made_is_taken_out_under_its_last_name(box: Sandbox) -> None:
    """Empty files too (a package's `__init__.py`), and what is in a directory that was renamed since."""
    top = box.mountpoint
    (top / "d" / "empty").touch()
    (top / "d" / "mode").touch(0o755)
    (top / "draft").mkdir()
    (top / "draft" / "f").write_bytes(b"f")
    (top / "draft" / "none").mkdir()
    (top / "draft").rename(top / "final")
    (top / "final" / "was").symlink_to("f")
    (top / "final" / "was").rename(top / "final" / "link")
    (top / "final" / "gone").symlink_to("f")
    (top / "final" / "gone").unlink()
    (top / "over").touch()
    (top / "temporary").touch()
    (top / "temporary").rename(top / "over")
    os.mkfifo(top / "fifo")
    assert box.fsd("unmount", str(top), check=False).returncode == 6
    target = box.base / "out"
    told = json.loads(recover(box, "--export", str(target)).stdout)
    assert told["not_files"]
    [changed] = told["incomplete"]  # its name is not known without the server
    paths = {str(path.relative_to(target)) for path in target.rglob("*") if changed not in (str(path),)}
    root = os.path.relpath(os.path.dirname(changed), target)
    expected = {"d", "d/own", "d/empty", "d/mode", "final", "final/f", "final/none", "final/link", "over"}
    if root != ".":
        expected = {root, *(f"{root}/{name}" for name in expected)}
    assert paths == expected
    top = target / root
    assert (top / "final" / "f").read_bytes() == b"f" and os.readlink(top / "final" / "link") == "f"
    assert (top / "d" / "empty").stat().st_size == 0 and (top / "d" / "mode").stat().st_mode & 0o777 == 0o755
