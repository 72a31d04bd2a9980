"""Reading a directory while it changes: what stays is listed once, and a position stays what it was."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

_libc = ctypes.CDLL(None, use_errno=True)
_HEAD = struct.Struct("=QqHB")  # d_ino, d_off, d_reclen, d_type


def getdents(fd: int, size: int) -> list[tuple[bytes, int]]:
    """Some entries of a directory, as many as fit in `size` bytes: (name, position behind it)."""
    buffer = ctypes.create_string_buffer(size)
    length = _libc.getdents64(fd, buffer, size)
    if length < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    found, at = [], 0
    while at < length:
        _, position, record, _ = _HEAD.unpack_from(buffer.raw, at)
        found.append((buffer.raw[at + _HEAD.size : at + record].split(b"\0", 1)[0], position))
        at += record
    return found


def touch(name: bytes) -> None:
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o644))


@pytest.fixture
def top(shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on a mount; the working directory."""
    box = Sandbox(tmp_path / "box", shared_server.create())
    try:
        box.mount()
        made = box.mountpoint / "d"
        made.mkdir()
        monkeypatch.chdir(made)
        yield made
        monkeypatch.undo()
    finally:
        box.close()


def test_entries_come_and_go_while_it_is_read(top: Path, seed: int) -> None:
    chance = random.Random(seed)
    stay, go = [b"stay%d" % n for n in range(1200)], [b"go%d" % n for n in range(600)]
    for name in [*stay, *go]:
        touch(name)
    fd = os.open(top, os.O_RDONLY)
    seen: list[tuple[bytes, int]] = []
    while got := getdents(fd, chance.choice((400, 1000, 5000))):
        seen += got
        for number in range(12):
            if go:
                os.unlink(go.pop(chance.randrange(len(go))))
            touch(b"new%d.%d" % (len(seen), number))
            os.rename(b"new%d.%d" % (len(seen), number), b"newer%d.%d" % (len(seen), number))
        os.link(chance.choice(stay), b"link%d" % len(seen))
    often = Counter(name for name, _ in seen)
    assert not {name: count for name, count in often.items() if count > 1}
    assert not [name for name in (*stay, b".", b"..") if often[name] != 1]
    for at in chance.sample(range(len(seen) - 1), 40):
        os.lseek(fd, seen[at][1], os.SEEK_SET)
        behind = (n for n, _ in seen[at + 1 :] if n in (b".", b"..") or os.path.lexists(n))
        assert [name for name, _ in getdents(fd, 400)][:1] == [*behind][:1], at
    os.lseek(fd, 0, os.SEEK_SET)
    again = []
    while got := getdents(fd, 32768):
        again += [name for name, _ in got]
    assert sorted(again) == sorted([b".", b"..", *os.listdir(b".")])
    os.close(fd)


def test_all_of_it_is_removed_as_it_is_read(top: Path) -> None:
    for number in range(700):
        touch(b"%d" % number)
    fd = os.open(top, os.O_RDONLY)
    while got := getdents(fd, 2000):
        for name, _ in got:
            if name not in (b".", b".."):
                os.unlink(name)
    os.close(fd)
    assert os.listdir(top) == []
