"""The disk under the state directory turned read-only, as ext4 does on an error: what was acknowledged before
is there to the last byte, and what the commands say to do sends it."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import signal
from pathlib import Path

import pytest
from support.loopdisk import LoopDisk
from support.sandbox import Sandbox
from support.server import Server


@pytest.mark.loop
@pytest.mark.long
def test_what_waits_on_a_disk_that_turned_read_only(server: Server, tmp_path: Path) -> None:
    fs = server.create()
    with LoopDisk(tmp_path / "a", 64) as disk:
        box = Sandbox(tmp_path / "box", fs, "--io-timeout", "60s", state=disk.path / "state")
        try:
            box.mount()
            os.listdir(box.mountpoint)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGSTOP)
            written = {f"f{number}": secrets.token_bytes(20_000) for number in range(20)}
            for name, data in written.items():
                (box.mountpoint / name).write_bytes(data)
            (box.mountpoint / "f0").rename(box.mountpoint / "moved")
            written["moved"] = written.pop("f0")
            disk.turn_read_only()
            os.kill(server.process.pid, signal.SIGCONT)
            with pytest.raises(OSError) as told:
                (box.mountpoint / "late").write_bytes(b"x")
            assert told.value.errno == errno.EIO
            assert {name: (box.mountpoint / name).read_bytes() for name in written} == written
            assert box.status()["pending"]["files"] == 20
            place = os.fspath(box.mountpoint)
            left = box.fsd("unmount", place, "--timeout", "2s", check=False)
            assert left.returncode == 6, left.stderr
            assert os.strerror(errno.EROFS) in left.stderr
            for again in ("recover", "mount"):
                refused = box.fsd(again, place, "--state-dir", os.fspath(box.state), check=False)
                assert refused.returncode == 2, refused.stderr
                assert f"cp -a {box.state} NEW" in refused.stderr
            copy = tmp_path / "copy"
            shutil.copytree(box.state, copy)
            sent = box.fsd("recover", place, "--state-dir", os.fspath(copy), "--output", "json")
            assert json.loads(sent.stdout)["sent"]["files"] == 20
        finally:
            box.close()
    other = Sandbox(tmp_path / "other", fs)
    try:
        other.mount()
        assert {
            name: (other.mountpoint / name).read_bytes() for name in os.listdir(other.mountpoint)
        } == written
        other.unmount()
    finally:
        other.close()
