"""A system that refuses fallocate (a filter of system calls, an emulated kernel): space is had by writing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client import Client
from support.clientcase import files, settled

from fsd.host.files import allocate
from fsd.meta.reserve import FILE, Reserve
from fsd.model.limits import DISK_RESERVE, MIB
from fsd.vfs.log import SPARE, SPARE_SIZE


@pytest.fixture(name="refused", params=[errno.ENOSYS, errno.EPERM], autouse=True)
def refused_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    number: int = request.param

    def refuse(fd: int, at: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return number


@pytest.fixture(name="fd")
def fd_fixture(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc")
    yield fd
    os.close(fd)


def test_a_mount_keeps_what_it_is_given(client: Client) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"x" * 5_000_000)
    client.put(root, b"b", b"before the kill")
    client.kill()
    client.open()
    client.put(root, b"c", b"after it")
    spare = (client.options.state_dir / SPARE).stat()
    assert spare.st_size == SPARE_SIZE <= spare.st_blocks * 512
    settled(client)
    assert files(client) == {"/a": b"x" * 5_000_000, "/b": b"before the kill", "/c": b"after it"}


def test_the_server_keeps_room_back(tmp_path: Path) -> None:
    made = Reserve(tmp_path)
    assert made.held and (tmp_path / FILE).stat().st_blocks * 512 >= DISK_RESERVE
    made.give_up()
    assert (tmp_path / FILE).stat().st_size == 0
    made.check()
    assert made.held


def test_what_is_in_the_file_stays(fd: int) -> None:
    allocate(fd, 0, MIB)
    assert os.pread(fd, 2 * MIB, 0) == b"abc" + bytes(MIB - 3)
    allocate(fd, 10, 20)
    assert os.fstat(fd).st_size == MIB


def test_a_disk_that_fills_up_meanwhile(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays: half of what was asked for is no use, and is room that others want."""
    real = os.pwrite

    def full(to: int, data: bytes, at: int) -> int:
        if at >= MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(to, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as told:
        allocate(fd, 3, 4 * MIB)
    assert told.value.errno == errno.ENOSPC
    assert os.pread(fd, MIB, 0) == b"abc"
