"""Sparse files: `st_blocks` counts what is stored, so du, cp and tar see the holes, everywhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.wait import wait_for

from fsd.model.limits import MIB

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


def room(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_holes_take_no_room_here_there_and_after_a_remount(box: Sandbox, tmp_path: Path) -> None:
    top = box.mountpoint
    with (top / "image").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(5 << 30)
        file.write(b"x" * 8192)
    (top / "plain").write_bytes(os.urandom(3 * MIB + 5))
    (top / "edge").write_bytes(b"y" * 100)
    os.truncate(top / "edge", 600_000)
    assert room(top / "image") == 8192
    assert room(top / "plain") == 3 * MIB + 512
    assert room(top / "edge") == 512

    box.drain()
    bound = {"image": 2 * MIB, "plain": 3 * MIB + 512, "edge": 512}
    with sandbox(tmp_path / "two", box.fs) as other:
        for name, most in bound.items():
            assert 0 < room(other.mountpoint / name) <= most
            assert room(other.mountpoint / name) == room(top / name)
            assert os.stat(other.mountpoint / name).st_rdev == 0

        # A change there is counted here.
        with (other.mountpoint / "image").open("r+b") as file:
            file.seek(9 << 30)
            file.write(b"z" * 4096)
        os.truncate(other.mountpoint / "plain", 1 << 30)
        other.drain()
        wait_for(lambda: os.stat(top / "plain").st_size == 1 << 30, 30, "the new size")
        assert room(top / "plain") == 3 * MIB + 512
        wait_for(lambda: room(top / "image") == room(other.mountpoint / "image") > 8192, 30, "the new block")
    os.truncate(top / "image", 0)
    assert room(top / "image") == 0


def test_tools_keep_holes(box: Sandbox) -> None:
    top = box.mountpoint
    script = """
        truncate -s 300M image; printf end | dd of=image bs=1 seek=200M conv=notrunc status=none
        test $(du -k image | cut -f 1) -lt 2048
        cp image copied; cmp image copied
        test $(du -k copied | cut -f 1) -lt 2048
        tar -Scf image.tar image; test $(stat -c %s image.tar) -lt 4000000
        mkdir out; tar -xf image.tar -C out; cmp image out/image
        rsync -S image rsynced; cmp image rsynced
        test $(du -k rsynced | cut -f 1) -lt 2048
    """
    done = subprocess.run(
        ["bash", "-euc", script], cwd=top, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
