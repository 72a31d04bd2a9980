"""The times of a file whose content is still to be sent, after the daemon was killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.client import Client
from support.clientcase import settled

from fsd.model.ops import RENAME_EXCHANGE
from fsd.vfs.volume import Volume

# Each changes ctime of the inode and nothing of its content.
CHANGES: dict[str, Callable[[Volume, int, int], object]] = {
    "setxattr": lambda v, root, ino: v.setxattr(ino, b"user.new", b"1"),
    "removexattr": lambda v, root, ino: v.removexattr(ino, b"user.old"),
    "link": lambda v, root, ino: v.link(ino, root, b"third"),
    "unlink": lambda v, root, ino: v.unlink(root, b"second"),
    "rename": lambda v, root, ino: v.rename(root, b"f", root, b"moved", 0),
    "rename over": lambda v, root, ino: v.rename(root, b"other", root, b"second", 0),
    "exchanged": lambda v, root, ino: v.rename(root, b"other", root, b"f", RENAME_EXCHANGE),
    "chmod": lambda v, root, ino: v.setattr(ino, mode=0o600),
    "chown": lambda v, root, ino: v.setattr(ino, uid=7),
    "utimens": lambda v, root, ino: v.setattr(ino, mtime=5_000_000_000),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("old", [False, True], ids=["new file", "file the server has"])
def test_the_times_are_those_that_were_shown(client: Client, change: str, old: bool) -> None:
    root = client.volume.root_ino
    ino = client.put(root, b"f", b"data")
    client.put(root, b"other", b"another file")
    client.call(lambda v: v.setxattr(ino, b"user.old", b"1"))
    client.call(lambda v: v.link(ino, root, b"second"))
    if old:
        settled(client)
    client.put(root, b"f", b"more", offset=2)  # not sent: it comes behind what follows
    client.call(lambda v: CHANGES[change](v, root, ino))
    shown = client.call(lambda v: v.getattr(ino))
    times = shown.mtime, shown.ctime

    client.kill()
    client.open()
    name = "moved" if change == "rename" else "other" if change == "exchanged" else "f"
    found = client.call(lambda v: v.lookup(v.root_ino, name.encode()))
    assert found is not None
    assert (found.mtime, found.ctime) == times
    settled(client)
    attr = client.bench.find(f"/{name}")
    assert (attr.mtime, attr.ctime) == times
