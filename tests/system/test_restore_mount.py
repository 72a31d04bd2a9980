"""Restores while the filesystem is mounted: the mounts show them, and what they still hold is not lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import TestFs
from support.wait import wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def two(shared_fs: TestFs, tmp_path: Path) -> Iterator[tuple[Sandbox, Sandbox]]:
    made = (Sandbox(tmp_path / "one", shared_fs), Sandbox(tmp_path / "two", shared_fs))
    try:
        yield made
    finally:
        for one in made:
            one.close()


def tree(sandbox: Sandbox) -> dict[str, str]:
    top = sandbox.mountpoint
    return {str(path.relative_to(top)): path.read_text() for path in sorted(top.rglob("*")) if path.is_file()}


def elsewhere(fs: TestFs, checkpoint: str, *, force: bool) -> int:
    """A restore asked for by a machine without mounts; the HTTP status."""
    return fs.ask("POST", "/restore", {"checkpoint": checkpoint, "force": force}).status


def test_a_restore_from_a_sandbox_shows_in_it_and_in_others(
    two: tuple[Sandbox, Sandbox], shared_fs: TestFs
) -> None:
    here, other = two
    here.mount()
    work = here.mountpoint / "work"
    work.mkdir()
    for number in range(50):
        (work / f"f{number}").write_text(f"one {number}")
    before = tree(here)
    name = here.json("checkpoint", "create", "--label", "x")["checkpoint_id"]
    for number in range(25):
        (work / f"f{number}").write_text(f"two {number}")
    for number in range(25, 40):
        (work / f"f{number}").unlink()
    (work / "new").mkdir()
    (work / "new" / "file").write_text("new")
    after = tree(here)
    # Not drained: what the mount here still holds goes into what is kept of the replaced state.
    done = here.json("checkpoint", "restore", name, "--yes")
    wait_for(lambda: tree(here) == before, 30, "the restored tree here")
    other.mount()
    assert tree(other) == before
    assert elsewhere(shared_fs, done["undo_checkpoint_id"], force=False) == 409
    assert elsewhere(shared_fs, done["undo_checkpoint_id"], force=True) == 200
    for one in two:
        wait_for(lambda one=one: tree(one) == after, 30, "the tree of before in both")
    (work / "f1").write_text("three")
    wait_for(lambda: tree(other)["work/f1"] == "three", 30, "the mounts to go on")


def test_what_another_mount_had_not_sent_is_kept_beside(
    two: tuple[Sandbox, Sandbox], shared_fs: TestFs
) -> None:
    here, other = two
    here.mount()
    (here.mountpoint / "a").write_text("one")
    here.drain()
    name = here.json("checkpoint", "create")["checkpoint_id"]
    (here.mountpoint / "a").write_text("two")
    here.drain()
    other.mount()
    assert (other.mountpoint / "a").read_text() == "two"
    with (other.mountpoint / "a").open("a") as file:
        file.write(" and more")
        file.flush()
        assert elsewhere(shared_fs, name, force=True) == 200
    other.drain()
    wait_for(lambda: len(tree(here)) == 2, 30, "both versions")
    found = tree(here)
    assert found.pop("a") == "one"
    ((beside, content),) = found.items()
    assert (beside.split(".conflict-")[0], content) == ("a", "two and more")


def test_a_killed_daemon_is_in_the_way_of_no_restore(two: tuple[Sandbox, Sandbox], shared_fs: TestFs) -> None:
    """Its session is known to be over as soon as its next run, or `fsd recover`, has sent what was left."""
    here, _ = two
    here.mount()
    file = here.mountpoint / "a"
    file.write_text("one")
    name = here.json("checkpoint", "create", "--label", "x")["checkpoint_id"]
    file.write_text("two")
    here.kill()
    here.detach()
    here.mount()
    here.json("checkpoint", "restore", name, "--yes")
    wait_for(lambda: file.read_text() == "one", 30, "the restored file")
    file.write_text("three")
    here.kill()
    here.detach()
    here.json("recover", str(here.mountpoint), "--state-dir", str(here.state))
    assert shared_fs.ask("GET", "/files/a").body == b"three"
    assert elsewhere(shared_fs, name, force=False) == 200
    ends = [one["ended"] for one in shared_fs.ask("GET", "/sessions").json["sessions"]]
    assert ends == ["replaced"] * len(ends) and len(ends) >= 2
