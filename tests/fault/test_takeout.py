"""Files taken out of a log are durable with all that leads to them: the log may be dropped then."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.cli.do_recover import NoCache
from fsd.model.attrs import ROOT_INO
from fsd.vfs.takeout import take_out

FILES = 30


def test_each_directory_is_synced_once_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that got only a link or a directory was not synced, and one with files once for each."""
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    client.net.faulty = False
    client.open()
    root = client.volume.root_ino
    assert client.call(lambda v: v.lookup(root, b"none")) is None
    client.net.cut = 1 << 30
    top = client.volume.mkdir(root, b"top", 0o755, 0, 0).ino
    links = client.volume.mkdir(top, b"links", 0o755, 0, 0).ino
    client.volume.mkdir(top, b"empty", 0o755, 0, 0)
    client.volume.symlink(links, b"link", b"there", 0, 0)
    for number in range(FILES):
        client.put(top, b"f%d" % number, b"<%d>" % number)
    client.kill()
    synced: Counter[str] = Counter()
    fsync = os.fsync

    def counted(fd: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{fd}")] += 1
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    target = tmp_path / "out" / "here"
    taken = take_out(client.options, client.host, None, NoCache(), lambda: {ROOT_INO: b"/"}, target)
    assert len(taken.files) == FILES and not taken.incomplete and not taken.names
    for number in range(FILES):
        file = target / "top" / f"f{number}"
        assert file.read_bytes() == b"<%d>" % number
        assert synced[str(file)] == 1
    assert os.readlink(target / "top" / "links" / "link") == "there"
    assert (target / "top" / "empty").is_dir()
    # Once for each directory that was made in it, and once for its other entries.
    wanted = {tmp_path: 1, tmp_path / "out": 1, target: 1, target / "top": 3, target / "top" / "links": 1}
    assert {path: synced[str(path)] for path in wanted} == wanted
    client.bench.close()
