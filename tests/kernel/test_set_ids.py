"""Set-id bits and capabilities of programs end with a change of the file, by the rules of a local disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import setids
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.root, pytest.mark.timeout(240)]
HERE = Path(__file__).parents[1]
# Who may not change an owner to nobody else is told so; by then the kernel has taken the capabilities away.
CORNERS = [
    f"{change} to nobody else, by {who}, {mode}, with a capability"
    for change in ("chown", "chown another's handle")
    for who in ("member", "stranger", "stranger in a namespace")
    for mode in ("6777", "6766", "4777", "2767")
]
Boxes = Callable[..., Sandbox]


@pytest.fixture
def boxes(trusted: Server, tmp_path: Path) -> Iterator[Boxes]:
    fs = trusted.create()
    made: list[Sandbox] = []

    def box(*options: str, bare: bool = False) -> Sandbox:
        """`bare`: without the extension that sees what the kernel says of privileges."""
        one = Sandbox(tmp_path / f"box{len(made)}", fs, *options)
        if bare:
            hidden = one.base / "hidden"
            hidden.mkdir()
            (hidden / "sitecustomize.py").write_text(
                "import sys\nsys.modules['fsd.kernel._requests'] = None\n"
            )
            one.env["PYTHONPATH"] = os.fspath(hidden)
        made.append(one)
        one.mount()
        return one

    yield box
    for one in made:
        one.close()


def play(directory: Path, thorough: bool) -> dict[str, list[Any]]:
    """What comes of all changes in a new directory."""
    directory.mkdir()
    argv = [sys.executable, "-m", "support.setids", os.fspath(directory), *(["--thorough"] * thorough)]
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, timeout=200, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def compare(box: Sandbox, local: Path, thorough: bool) -> dict[str, str]:
    """Where the mount differs."""
    here, there = play(local, thorough), play(box.mountpoint / "d", thorough)
    assert here.keys() == there.keys()
    assert len(here) > 400
    return {what: f"{here[what]}, not {there[what]}" for what in here if here[what] != there[what]}


def same_elsewhere(box: Sandbox, other: Sandbox, thorough: bool) -> None:
    """Another mount shows what this one does."""
    box.drain()
    told = setids.again(box.mountpoint / "d", thorough)
    wait_for(lambda: (other.mountpoint / "d").exists(), 30, "the directory to show")
    wait_for(
        lambda: setids.again(other.mountpoint / "d", thorough) == told, 60, "the other mount to show the same"
    )


def test_changes_take_away_what_they_do_on_a_local_disk(boxes: Boxes, tmp_path: Path) -> None:
    box = boxes()
    found = compare(box, tmp_path / "local", False)
    assert not found
    same_elsewhere(box, boxes(), False)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), ("--acl",), ("--loop", "trio")])
def test_all_changes_of_all_modes(boxes: Boxes, tmp_path: Path, options: tuple[str, ...]) -> None:
    box = boxes(*options)
    found = compare(box, tmp_path / "local", True)
    assert not {what: how for what, how in found.items() if what not in CORNERS}
    same_elsewhere(box, boxes(*options), True)


def test_without_the_extension_the_kernel_sees_to_it(boxes: Boxes, tmp_path: Path) -> None:
    """What we cannot know differs: whether it was stored through a mapping, who writes on whose handle. That
    we go by the user alone shows where root lacks a capability, or another has one."""
    found = compare(boxes(bare=True), tmp_path / "local", False)
    unknown = ("store through a mapping", "write on another's handle")
    left = {what: how for what, how in found.items() if not what.startswith(unknown) and "CAP_" not in what}
    # The mode alone, asked for right after a write, where the group may not execute.
    assert all(", 2767" in what and "owner outside" in what for what in left), left
    assert any(what.startswith(unknown) for what in found), "the extension was there all the same"


def test_what_another_mount_set_ends_with_a_write_here(boxes: Boxes) -> None:
    """The kernel has seen that there is nothing to take away, and does not ask again."""
    one, two = boxes(), boxes()
    there, here = one.mountpoint / "f", two.mountpoint / "f"
    there.write_bytes(b"program")
    there.chmod(0o777)
    one.drain()
    wait_for(here.exists, 30, "the file to show")
    handle = os.open(here, os.O_RDWR)
    try:
        os.pwrite(handle, b"P", 0)
        os.pwrite(handle, b"R", 1)
        two.drain()
        wait_for(lambda: there.read_bytes() == b"PRogram", 30, "what was written to show")
        there.chmod(0o6777)
        os.setxattr(there, setids.CAPABILITY, setids.SOME)
        one.drain()
        seq = one.status()["fs_seq"]
        two.fsd("wait", os.fspath(two.mountpoint), "--seq", str(seq))
        by_stranger(handle)
        assert here.stat().st_mode & 0o7777 == 0o777
        with pytest.raises(OSError, match="No data available"):
            os.getxattr(here, setids.CAPABILITY)
    finally:
        os.close(handle)
    two.drain()
    wait_for(lambda: there.stat().st_mode & 0o7777 == 0o777, 30, "the mode to show")
    assert setids.CAPABILITY not in os.listxattr(there)


def by_stranger(handle: int) -> None:
    """Somebody who inherited the handle writes."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            setids.become(setids.PEOPLE["stranger"])
            os.pwrite(handle, b"O", 2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
