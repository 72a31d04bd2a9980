"""Refused changes taken out are complete, and durable with all that leads to them: they may be discarded."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgpack
import pytest

from fsd.model.errors import Conflict, IntegrityError
from fsd.model.ops import CONTENT, CREATE, Content, Create
from fsd.vfs.decide import Kept, export, kept


def refused(tmp_path: Path, number: int, path: bytes, what: bytes | Create) -> Kept:
    """A refused making, or content."""
    place = tmp_path / "refused" / f"1-{number}"
    place.mkdir(parents=True)
    if isinstance(what, Create):
        return Kept(place, what, 122, "no room", path, what.mode, 0, 0, None)
    (place / "data").write_bytes(what)
    op = Content(number, CONTENT, 100 + number, 0, len(what), (), True, None, 1, 1)
    return Kept(place, op, 122, "no room", path, 0o100640, 0, 0, place / "data")


def making(number: int, mode: int, target: bytes | None = None) -> Create:
    return Create(number, CREATE, 1, b"x", 100 + number, mode, 0, 0, 0, target, 1)


def test_what_is_taken_out_is_durable_to_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories that were made for it had no durable entries: after a power cut all could be gone."""
    found = [
        refused(tmp_path, 1, b"/a/b/file", b"content"),
        refused(tmp_path, 2, b"/c/d", making(2, stat.S_IFDIR | 0o755)),
        refused(tmp_path, 3, b"/e/link", making(3, stat.S_IFLNK | 0o777, b"../a/b/file")),
    ]
    synced: list[Path] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    out = tmp_path / "out"
    made = export(found, out)
    assert made.files == [str(out / "a" / "b" / "file")] and not made.incomplete
    # A directory is synced after the last entry that was made in it.
    for directory in (tmp_path, out, out / "a", out / "a" / "b", out / "c", out / "e"):
        assert directory in synced, directory
    assert out / "a" / "b" / "file" in synced
    assert (out / "c" / "d").is_dir()


def test_a_refused_link_is_taken_out_too_and_nothing_goes_through_it(tmp_path: Path) -> None:
    """It was left out without a word: `--discard` after the export lost it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    found = [
        refused(tmp_path, 1, b"/place", making(1, stat.S_IFLNK | 0o777, os.fsencode(outside))),
        refused(tmp_path, 2, b"/place/file", b"content"),
    ]
    out = tmp_path / "out"
    made = export(found, out)
    assert os.listdir(outside) == []
    assert made.files == [str(out / "place" / "file")]
    assert os.readlink(out / "place.refused-1-1") == str(outside)


def test_a_file_where_a_directory_is_needed_is_a_conflict(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_bytes(b"mine")
    with pytest.raises(Conflict):
        export([refused(tmp_path, 1, b"/a/file", b"content")], out)
    assert (out / "a").read_bytes() == b"mine"


def entry(state: Path, name: str) -> Path:
    """A refused making as a mount leaves it."""
    place = state / "refused" / name
    place.mkdir(parents=True)
    known = {"op": making(1, stat.S_IFREG | 0o644), "errno": 122, "reason": "no room", "path": b"/x"}
    known |= {"mode": 0o100644, "uid": 0, "gid": 0, "size": 0}
    (place / "entry").write_bytes(msgpack.packb(known, use_bin_type=True))
    return place


def test_refused_changes_are_in_the_order_they_were_made(tmp_path: Path) -> None:
    places = [entry(tmp_path, name) for name in ("2-1", "1-10", "1-9")]
    assert [one.place for one in kept(tmp_path)] == [places[2], places[1], places[0]]


@pytest.mark.parametrize("name", ["1-2.bak", "1", "copy", "1-2-3"])
def test_what_somebody_put_beside_them_is_named(tmp_path: Path, name: str) -> None:
    """A copy of one ended a mount with a schedule of checkpoints, again and again."""
    entry(tmp_path, "1-2")
    place = entry(tmp_path, name)
    with pytest.raises(IntegrityError, match=re.escape(str(place))):
        kept(tmp_path)
