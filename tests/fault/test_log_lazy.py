"""The log is made durable, so that parts of it can go, when nothing is on its way: not beside a flush."""

from __future__ import annotations

import os

import pytest
from support.client import Client
from support.clientcase import files, settled

from fsd.model.limits import KIB, LOG_LAZY, MIB
from fsd.vfs.log import Log, segment_of

SEGMENT = 32 * KIB
Syncs = list[int]


@pytest.fixture(name="syncs")
def syncs_fixture(client: Client, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    """The descriptors of the log that were synced. Its segments are small."""
    client.volume.core.log._segment_size = SEGMENT
    found: Syncs = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(client.options.state_dir)):
            found.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return found


class Busy:
    """Files that are written one after the other; the newest is not sent before there is a newer one."""

    def __init__(self, client: Client) -> None:
        self.client, self.count = client, 0
        self.open = self._changed()

    def _changed(self) -> int:
        root, name = self.client.volume.root_ino, b"f%d" % self.count
        self.count += 1
        _, fh = self.client.call(lambda v: v.create(root, name, 0o644, 0, 0, os.O_RDWR))
        self.client.call(lambda v: v.write(fh, 0, os.urandom(9000)))
        return fh

    def go_on(self) -> None:
        before, self.open = self.open, self._changed()
        self.client.call(lambda v: v.fsync(before, False))
        self.client.call(lambda v: v.release(before))
        self.client.run_some(20)
        core = self.client.volume.core
        assert core.dirty, "nothing is under way"
        assert segment_of(core.needed()) > segment_of(core.log.tail) - 2, "it is needed"

    def end(self) -> None:
        self.client.call(lambda v: v.release(self.open))
        settled(self.client)
        self.client.run_some(20)


def test_it_waits_while_changes_are_on_their_way(client: Client, syncs: Syncs) -> None:
    log = client.volume.core.log
    busy = Busy(client)
    while log.used < (LOG_LAZY - 1) * SEGMENT:
        busy.go_on()
    assert syncs == [] and log.freed == 0
    assert len(Log.segments(client.options.state_dir)) >= LOG_LAZY - 1
    busy.end()
    assert syncs and log.freed >= LOG_LAZY - 1
    assert len(Log.segments(client.options.state_dir)) <= 2
    assert len(files(client)) == busy.count


@pytest.mark.parametrize("lazy", [3 * SEGMENT, LOG_LAZY * SEGMENT, 1000 * SEGMENT])
def test_not_when_much_has_come_together(client: Client, syncs: Syncs, lazy: int) -> None:
    core = client.volume.core
    busy = Busy(client)
    core.lazy = lazy
    for _ in range(30):
        busy.go_on()
        # What is needed keeps its segment, and what was written since.
        assert core.log.used <= min(lazy, LOG_LAZY * SEGMENT) + 2 * SEGMENT
    assert syncs and core.log.freed
    busy.end()


def test_nor_when_the_room_is_needed(client: Client, syncs: Syncs) -> None:
    core = client.volume.core
    busy = Busy(client)
    for _ in range(10):
        busy.go_on()
    assert core.log.used > 2 * SEGMENT
    assert core.log.freed == 0
    core.trim(renew_at=MIB)
    client.run_some(20)
    assert core.dirty and syncs and core.log.freed
    busy.end()


def test_how_much_is_much(client: Client) -> None:
    """At most half of what the log may have: above that, writers are made to wait soon."""
    volume = client.volume
    assert volume.core.lazy == volume.limit // 2 > 0
    volume.limit_at = 0.0
    volume.tick(client.clock.monotonic())
    assert volume.core.lazy == volume.limit // 2
