"""What the kernel forgot is gathered by the extension: nothing of it stays known to the mount."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


@pytest.mark.parametrize("loop", ["mini", "trio"])
def test_removed_files_are_forgotten(trusted: Server, tmp_path: Path, loop: str) -> None:
    """Also while others keep the loop busy, and one that is open until it is closed."""
    box = Sandbox(tmp_path / "box", trusted.create(), "--loop", loop)
    try:
        box.mount()
        before = box.status()["inodes"]
        for turn in range(3):
            directory = box.mountpoint / f"d{turn}"
            directory.mkdir()
            files = [directory / f"f{number}" for number in range(150)]
            for path in files:
                path.write_bytes(b"x")
            with files[0].open("rb") as handle:
                for path in files:
                    path.unlink()
                assert handle.read() == b"x"
            directory.rmdir()
        box.drain()
        wait_for(lambda: box.status()["inodes"] <= before, 60, "the files to be forgotten", every=0.2)
        for path in (box.mountpoint / "again", box.mountpoint / "d0"):
            path.write_bytes(b"again")
            assert path.read_bytes() == b"again"
    finally:
        box.close()
