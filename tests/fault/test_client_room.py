"""Single histories of the client's state machine: room in the log, and what is told when there is none."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.client import Client, server_tree
from support.clientcase import age, files, full_disk, other, settled

from fsd.model.errors import NoSpace
from fsd.model.limits import BLOCK, HOLD_MAX, MIB
from fsd.vfs import flush
from fsd.vfs.log import BASE, CONTENT
from fsd.vfs.volume import Volume


@pytest.fixture
def long_lists(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of eight blocks has a long list, and a segment holds all a test does."""
    monkeypatch.setattr(flush, "LONG_LIST", 8)
    client.volume.core.log._segment_size = 64 * MIB


def blocks_of(client: Client, count: int) -> tuple[int, bytearray]:
    """A file that has something in each of `count` blocks, on the server; its inode and content."""
    node, fh = client.call(lambda v: v.create(v.root_ino, b"big", 0o644, 0, 0, os.O_RDWR))
    content = bytearray((count - 1) * BLOCK + 3)
    for at in range(0, count * BLOCK, BLOCK):
        content[at : at + 3] = b"old"
        client.call(lambda v, at=at: v.write(fh, at, b"old"))  # type: ignore[misc]
    client.call(lambda v: v.fsync(fh, False))
    client.call(lambda v: v.release(fh))
    return node.ino, content


def change(client: Client, ino: int, at: int, data: bytes, *, sync: bool = True) -> None:
    fh = client.call(lambda v: v.open(ino, os.O_RDWR))
    client.call(lambda v: v.write(fh, at, data))
    if sync:
        client.call(lambda v: v.fsync(fh, False))
    client.call(lambda v: v.release(fh))


@pytest.mark.usefixtures("long_lists")
def test_a_long_block_list_is_logged_once_a_segment_and_a_recovery_knows_it(client: Client) -> None:
    """4 KiB in a big file, again and again, each flushed."""
    ino, want = blocks_of(client, 24)
    change(client, ino, 0, b"the list is logged here")
    want[:23] = b"the list is logged here"
    kinds: list[int] = []
    write = client.volume.core.log._write

    def counting(kind: int, *args: Any, **more: Any) -> int:
        kinds.append(kind)
        return write(kind, *args, **more)

    client.volume.core.log._write = counting  # type: ignore[method-assign]
    for number in range(30):
        at = client.rng.randrange(23) * BLOCK + client.rng.randrange(100) * 4096
        want[at : at + 4096] = bytes([65 + number]) * 4096
        change(client, ino, at, bytes(want[at : at + 4096]), sync=number < 28)
    assert kinds.count(CONTENT) >= 28
    assert kinds.count(BASE) == 0
    client.waiting.clear()
    client.kill()
    client.open()
    settled(client)
    assert files(client)["/big"] == bytes(want)


@pytest.mark.usefixtures("long_lists")
def test_another_s_change_of_a_long_block_list_is_told_by_the_log(client: Client) -> None:
    rival = other(client)
    ino, want = blocks_of(client, 10)
    for data in (b"one", b"two"):
        change(client, ino, 7, data)
    rival.put(rival.volume.root_ino, b"big", b"the rival's", offset=BLOCK, sync=True)
    client.feed()
    change(client, ino, 2 * BLOCK, b"new", sync=False)
    client.waiting.clear()
    client.kill()
    client.open()
    settled(client)
    want[7:10], want[BLOCK : BLOCK + 11], want[2 * BLOCK : 2 * BLOCK + 3] = b"two", b"the rival's", b"new"
    assert files(client)["/big"] == bytes(want)
    rival.volume.close()


def test_an_open_file_without_a_name_does_not_hold_the_log_for_ever(client: Client) -> None:
    """What it has moves to the end, and is there afterwards, also what the base has."""
    core = client.volume.core
    core.log._segment_size = 16 << 10
    client.volume.limit_at = 1e9
    client.volume.limit = 256 << 10
    root = client.volume.root_ino
    client.put(root, b"a", b"base" * 3000, sync=True)
    node = client.call(lambda v: v.lookup(root, b"a"))
    assert node is not None
    fh = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    client.call(lambda v: v.unlink(root, b"a"))
    client.call(lambda v: v.write(fh, 4, b"NEW!"))
    client.call(lambda v: v.setattr(node.ino, size=8000))
    client.call(lambda v: v.setattr(node.ino, size=9000))
    want = b"baseNEW!" + b"base" * 1998 + bytes(1000)
    for at in range(60):
        client.put(root, b"c", b"%02d" % at * 5000, truncate=True, offset=0)
    assert core.log.used < 256 << 10
    assert client.call(lambda v: v.read(fh, 0, 20_000)) == want
    client.kill()
    client.open()
    assert files(client) == {"/c": b"59" * 5000}


def test_open_files_without_a_name_that_fill_the_buffer_are_told_and_hang_nobody(client: Client) -> None:
    """They are never sent, so no waiting would help; what has a name goes on once they are closed."""
    client.volume.core.log._segment_size = 16 << 10
    client.volume.limit_at = 1e9
    client.volume.limit = 256 << 10
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"tmp", 0o644, 0, 0, os.O_RDWR))
    client.put(root, b"named", b"kept")
    client.call(lambda v: v.unlink(root, b"tmp"))
    started, taken = client.clock.seconds, 0

    def fill() -> None:
        nonlocal taken
        while taken < 1 << 20:
            piece = partial(Volume.write, fh=fh, offset=taken, data=bytes([taken >> 12 & 0xFF]) * 4096)
            taken += client.call(piece)

    with pytest.raises(NoSpace, match="1 open files without a name fill the log") as told:
        fill()
    assert told.value.errno == errno.ENOSPC
    assert taken > 128 << 10
    assert client.clock.seconds - started < 60
    assert files(client) == {"/named": b"kept"}
    assert client.call(lambda v: v.read(fh, 4096, 4096)) == b"\x01" * 4096
    with pytest.raises(NoSpace):
        client.put(root, b"other", b"x" * 8000)
    client.call(lambda v: v.release(fh))
    client.put(root, b"other", b"x" * 8000, truncate=True)
    settled(client)
    assert files(client)["/other"] == b"x" * 8000


def test_a_stream_into_a_file_that_had_content_is_sent_after_a_while(client: Client) -> None:
    """`job > log` for hours: a replacement that is not done after minutes is none."""
    root = client.volume.root_ino
    ino = client.put(root, b"log", b"of the last run", sync=True)
    fh = client.call(lambda v: v.open(ino, os.O_WRONLY | os.O_TRUNC))

    def pass_time(seconds: float) -> None:
        until = client.clock.seconds + seconds
        while client.clock.seconds < until:
            age(client)
            client.run_some(20)

    pass_time(HOLD_MAX + 20)
    assert files(client)["/log"] == b"of the last run", "an empty file is never published"
    client.call(lambda v: v.release(fh))
    client.until(client.volume.barrier())
    client.put(root, b"log", b"of the last run", sync=True)
    fh = client.call(lambda v: v.open(ino, os.O_WRONLY | os.O_TRUNC))
    for number in range(4):
        client.call(lambda v, at=5 * number: v.write(fh, at, b"line\n"))  # type: ignore[misc]
        pass_time(HOLD_MAX / 5)
        assert files(client)["/log"] == b"of the last run"
    pass_time(HOLD_MAX / 5 + 10)
    assert files(client)["/log"] == b"line\n" * 4
    client.call(lambda v: v.write(fh, 20, b"more\n"))
    pass_time(10)
    assert files(client)["/log"] == b"line\n" * 4 + b"more\n"
    client.call(lambda v: v.release(fh))
    settled(client)


def test_a_writer_on_a_full_disk_is_told_after_the_time_out(client: Client) -> None:
    """However often it was tried again meanwhile."""
    client.options = replace(client.options, io_timeout=10.0)
    client.volume.close()
    client.open()
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    client.net.cut = 1000
    started = client.clock.seconds
    with full_disk(client), pytest.raises(NoSpace):
        client.call(lambda v: v.write(fh, 0, b"x"))
    assert 9 < client.clock.seconds - started < 20
    client.net.cut = 0
    client.call(lambda v: v.write(fh, 0, b"y"))
    client.call(lambda v: v.release(fh))
    settled(client)
    assert files(client) == {"/a": b"y"}


def test_a_segment_begins_with_its_state_or_not_at_all(client: Client) -> None:
    """Without it nothing behind it could be recovered once the segments before it are freed."""
    root = client.volume.root_ino
    core = client.volume.core
    client.put(root, b"a", b"x", sync=True)
    core.log._segment_size = 0
    with full_disk(client), pytest.raises(NoSpace):
        client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    core.log._segment_size = 1 << 20
    client.until(client.volume.barrier())
    core.trim(renew_at=0)
    client.run_some(100)
    client.call(lambda v: v.mkdir(root, b"e", 0o755, 0, 0))
    client.kill()
    client.open()
    assert set(server_tree(client.bench)) == {"/a", "/e"}


def test_a_removal_that_found_no_room_in_the_log_did_not_happen(client: Client) -> None:
    """Of a file nobody was told of yet: its operations are cancelled by one record or not."""
    root = client.volume.root_ino
    client.put(root, b"a", b"x")
    before = client.volume.getattr(root).mtime
    log = client.volume.core.log
    write, left = log._write, [1]

    def full(*args: object, **more: object) -> int:
        if left[0] == 0:
            raise NoSpace("the test's disk is full")
        left[0] -= 1
        return write(*args, **more)  # type: ignore[arg-type]

    for records in range(3):
        left[0] = records
        log._write = full  # type: ignore[method-assign]
        try:
            client.call(lambda v: v.unlink(root, b"a"))
        except NoSpace:
            assert records == 0
            assert client.call(lambda v: v.lookup(root, b"a")) is not None
            assert client.volume.getattr(root).mtime == before
        else:
            break
        finally:
            log._write = write  # type: ignore[method-assign]
    assert client.call(lambda v: v.lookup(root, b"a")) is None
    settled(client)
    assert files(client) == {}


def test_a_closed_file_without_a_name_does_not_come_back_after_a_full_disk(client: Client) -> None:
    """That it is nobody's is logged as soon as there is room; until then the log keeps what said so."""
    core = client.volume.core
    core.log._segment_size = 4 << 10
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    client.until(client.volume.barrier())
    client.call(lambda v: v.unlink(root, b"a"))
    for at in range(10):
        client.call(lambda v, a=at: v.write(fh, a * 1000, b"x" * 1000))  # type: ignore[misc]
    client.put(root, b"b", b"y")
    client.until(client.volume.barrier())
    with full_disk(client):
        client.call(lambda v: v.release(fh))
        client.run_some(100)
    client.kill()
    client.open()
    assert files(client) == {"/b": b"y"}
