"""Where files taken out of a log go: to the places they had for the programs, and nowhere outside."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.cli.do_recover import NoCache
from fsd.model.attrs import ROOT_INO
from fsd.vfs.takeout import Taken, take_out


@pytest.fixture(name="client")
def client_fixture(tmp_path: Path) -> Iterator[Client]:
    """A mount that knows `/data` with `/data/old` and `/data/sub` in it, and has no server any more."""
    made = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    made.net.faulty = False
    made.open()
    root = made.volume.root_ino
    data = made.call(lambda v: v.mkdir(root, b"data", 0o755, 0, 0)).ino
    made.put(data, b"old", b"what was there")
    sub = made.call(lambda v: v.mkdir(data, b"sub", 0o755, 0, 0)).ino
    made.until(made.volume.barrier())
    for name in (b"data.before", b"new"):
        assert made.call(lambda v, name=name: v.lookup(root, name)) is None  # type: ignore[misc]
        assert made.call(lambda v, name=name: v.lookup(data, name)) is None  # type: ignore[misc]
        assert made.call(lambda v, name=name: v.lookup(sub, name)) is None  # type: ignore[misc]
    made.net.cut = 1 << 30
    yield made
    made.bench.close()


def data_of(client: Client) -> int:
    found = client.call(lambda v: v.lookup(v.root_ino, b"data"))
    assert found is not None
    return found.ino


def taken_out(client: Client, data: int, target: Path) -> Taken:
    client.kill()
    paths = {ROOT_INO: b"/", data: b"/data"}
    return take_out(client.options, client.host, None, NoCache(), lambda: paths, target)


def test_nothing_is_written_through_a_link_in_a_renamed_directorys_old_place(
    client: Client, tmp_path: Path
) -> None:
    """`mv data data.before; ln -s /elsewhere data`: what was written into data.before landed elsewhere."""
    root, data, outside = client.volume.root_ino, data_of(client), tmp_path / "outside"
    outside.mkdir()
    client.call(lambda v: v.rename(root, b"data", root, b"data.before", 0))
    client.call(lambda v: v.symlink(root, b"data", os.fsencode(outside), 0, 0))
    client.put(data, b"new", b"written later")
    sub = client.call(lambda v: v.lookup(data, b"sub"))
    assert sub is not None
    client.put(sub.ino, b"new", b"and below")
    out = tmp_path / "out"
    client.kill()
    paths = {ROOT_INO: b"/", data: b"/data", sub.ino: b"/data/sub"}
    taken = take_out(client.options, client.host, None, NoCache(), lambda: paths, out)
    assert os.listdir(outside) == []
    assert (out / "data.before" / "new").read_bytes() == b"written later"
    assert (out / "data.before" / "sub" / "new").read_bytes() == b"and below"
    assert os.readlink(out / "data") == str(outside)
    assert taken.files == [str(out / "data.before" / "new"), str(out / "data.before" / "sub" / "new")]


@pytest.mark.parametrize("directory", [False, True])
def test_something_new_in_a_renamed_directorys_old_place_is_not_in_the_way(
    client: Client, tmp_path: Path, directory: bool
) -> None:
    """A file there ended the export with "exists", in an empty target; of two directories one was made."""
    root, data = client.volume.root_ino, data_of(client)
    client.call(lambda v: v.rename(root, b"data", root, b"data.before", 0))
    if directory:
        there = client.call(lambda v: v.mkdir(root, b"data", 0o755, 0, 0)).ino
        client.put(there, b"new", b"in the new one")
    else:
        client.put(root, b"data", b"a file now")
    client.put(data, b"new", b"in the old one")
    out = tmp_path / "out"
    taken = taken_out(client, data, out)
    assert (out / "data.before" / "new").read_bytes() == b"in the old one"
    if directory:
        assert (out / "data" / "new").read_bytes() == b"in the new one"
    else:
        assert (out / "data").read_bytes() == b"a file now"
    assert len(taken.files) == 2


def test_directories_that_changed_places(client: Client, tmp_path: Path) -> None:
    """Each file is where programs saw it, whichever of the two the server has where."""
    root, data = client.volume.root_ino, data_of(client)
    made = client.call(lambda v: v.mkdir(root, b"new", 0o755, 0, 0)).ino
    client.call(lambda v: v.rename(root, b"data", root, b"new", 2))
    client.put(data, b"of-data", b"1")
    client.put(made, b"of-new", b"2")
    client.call(lambda v: v.rename(root, b"data", data, b"inner", 0))
    out = tmp_path / "out"
    taken = taken_out(client, data, out)
    assert (out / "new" / "of-data").read_bytes() == b"1"
    assert (out / "new" / "inner" / "of-new").read_bytes() == b"2"
    assert len(taken.files) == 2


def test_what_two_directories_have_of_one_name_is_both_kept(client: Client, tmp_path: Path) -> None:
    """Another mount's rename, which the paths tell and the log does not, may bring two to one place."""
    root, data = client.volume.root_ino, data_of(client)
    other = client.call(lambda v: v.mkdir(root, b"new", 0o755, 0, 0)).ino
    client.put(data, b"same", b"of data")
    client.put(other, b"same", b"of new")
    client.call(lambda v: v.symlink(root, b"link", b"nowhere", 0, 0))
    client.put(other, b"link", b"no link")
    client.kill()
    paths = {ROOT_INO: b"/", data: b"/new"}
    out = tmp_path / "out"
    taken = take_out(client.options, client.host, None, NoCache(), lambda: paths, out)
    assert len(taken.files) == len(set(taken.files)) == 3
    assert sorted(Path(file).read_bytes() for file in taken.files) == [b"no link", b"of data", b"of new"]
    assert os.readlink(out / "link") == "nowhere"
