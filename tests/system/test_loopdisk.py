"""The disk that dies loses what was not synced and keeps what was: else the restart tests prove nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.loopdisk import LoopDisk


@pytest.mark.loop
def test_a_restart_keeps_what_was_synced_and_loses_the_rest(tmp_path: Path) -> None:
    with LoopDisk(tmp_path / "a", 16) as disk:
        synced, left = disk.path / "synced", disk.path / "left"
        fd = os.open(synced, os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"kept")
        os.fsync(fd)
        os.close(fd)
        left.write_bytes(b"not synced")
        disk.die()
        with pytest.raises(OSError) as caught:
            (disk.path / "later").write_bytes(b"x")
        assert caught.value.errno == errno.EIO
        disk.remount()
        assert synced.read_bytes() == b"kept"
        assert not left.exists() or left.read_bytes() != b"not synced"
        disk.restart()
        assert synced.read_bytes() == b"kept"
    assert not os.path.ismount(tmp_path / "a" / "disk")
