"""The kernel keeps the targets of symbolic links: an inode's never changes, and a name's new link shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]


def replaced(link: Path, target: str) -> None:
    """As `ln -sfn`."""
    made = link.with_name("made")
    made.symlink_to(target)
    made.rename(link)


def test_a_link_that_was_replaced_is_followed_to_its_new_target(trusted: Server, tmp_path: Path) -> None:
    fs = trusted.create()
    one, two = Sandbox(tmp_path / "one", fs), Sandbox(tmp_path / "two", fs)
    try:
        one.mount()
        two.mount()
        here, there = one.mountpoint / "link", two.mountpoint / "link"
        targets = ["first", "the second, which is longer", "3", "x" * 4000]
        for target in targets:
            replaced(here, target)
            assert [os.readlink(here) for _ in range(3)] == [target] * 3
            assert here.lstat().st_size == len(target)
            one.drain()
            wait_for(
                lambda wanted=target: there.is_symlink() and os.readlink(there) == wanted,
                30,
                "the other mount to follow",
            )
        here.unlink()
        here.symlink_to("again")
        assert os.readlink(here) == "again"
        with pytest.raises(FileNotFoundError):
            (one.mountpoint / "link" / "below").stat()
    finally:
        one.close()
        two.close()
