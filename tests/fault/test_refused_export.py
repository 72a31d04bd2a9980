"""Refused changes taken out are complete, and durable with all that leads to them: they may be discarded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fsd.model.errors import Conflict
from fsd.model.ops import CONTENT, CREATE, Content, Create
from fsd.vfs.decide import Kept, export


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
