"""The kernel keeps pages of a file over its opens only while they are what a read would be answered with.

The model of the kernel keeps whole files: what it read, with what programs of this mount wrote on top. No
invalidation ever reaches it, so what a page is worth rests on the answers to opens alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from property.test_two_mounts import Duo
from support.client import Client
from support.clientcase import other


class Pages(Duo):
    """Two mounts, and the pages the kernel of each has."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, seed)
        self.pages: list[dict[int, bytes]] = [{}, {}]
        self.kept = 0

    def put(self, at: int, client: Client, fh: int, ino: int) -> None:
        super().put(at, client, fh, ino)
        pages, end = self.pages[at], client.volume.node(ino).size
        if ino in pages:
            written = client.call(lambda v: v.read(fh, 0, end))
            old = pages[ino]
            start = min(len(old), end)
            pages[ino] = old[:start] + written[start:]

    def do_look(self, at: int, client: Client) -> None:
        """A program opens each file and reads it."""
        pages = self.pages[at]
        for _, ino in client.listing(client.volume.root_ino):
            if not client.volume.node(ino).is_file:
                continue
            fh = client.call(lambda v, i=ino: v.open(i, os.O_RDONLY))  # type: ignore[misc]
            kept = client.volume.pages_kept(fh)
            data = client.call(lambda v, f=fh: v.read(f, 0, 1 << 30))  # type: ignore[misc]
            if kept and ino in pages:
                self.kept += 1
                assert pages[ino] == data, f"{client.options.mount_id}: old pages of {ino:x} were kept"
            pages[ino] = data
            client.call(lambda v, f=fh: v.release(f))  # type: ignore[misc]

    def do_crash(self, at: int, client: Client) -> None:
        super().do_crash(at, client)
        self.pages[at].clear()


def test_pages_count_as_dropped_when_the_open_has_come_to_its_end(client: Client) -> None:
    """The kernel drops them some time after the answer. Who opens meanwhile would find the old ones."""
    ino = client.put(client.volume.root_ino, b"f", b"one", sync=True)
    writer, volume = other(client), client.volume

    def opened() -> tuple[int, bool]:
        fh = client.call(lambda v: v.open(ino, os.O_RDONLY))
        return fh, volume.pages_kept(fh)

    def changed(data: bytes) -> None:
        writer.put(writer.volume.root_ino, b"f", data, offset=0, sync=True)
        volume.apply_feed(client.remote.changes(volume.feed_seq, volume.session, 0.0))

    assert opened()[1], "nobody else changed it"
    changed(b"two")
    first, kept = opened()
    assert not kept
    assert not opened()[1], "the first may not have dropped them yet"
    assert client.call(lambda v: v.read(first, 0, 10)) == b"two"
    assert opened()[1]
    changed(b"three")
    second, kept = opened()
    assert not kept
    changed(b"four")
    client.call(lambda v: v.read(second, 0, 10))
    assert not opened()[1], "what it dropped was older"
    third, _ = opened()
    client.call(lambda v: v.release(third))
    assert opened()[1]
    writer.volume.close()


def play(directory: Path, seed: int, steps: int) -> int:
    duo = Pages(directory, seed)
    for _ in range(steps):
        duo.step()
    duo.finish()
    return duo.kept


def test_old_pages_are_never_kept(tmp_path: Path, seed: int) -> None:
    kept = 0
    for at in range(40):  # how much is kept in a day is chance
        kept += play(tmp_path / str(at), seed + at, 150)
        if at >= 3 and kept > 20:
            break
    assert kept > 20, "nothing was kept: this checked nothing"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_old_pages_are_never_kept_in_many_days(tmp_path: Path, seed: int) -> None:
    assert sum(play(tmp_path / str(at), seed * 1000 + at, 200) for at in range(150)) > 1000
