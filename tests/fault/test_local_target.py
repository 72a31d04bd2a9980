"""A file that is fetched: old or complete under its name at any time, and nothing else is left of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fsd.client.sources import LocalTarget
from fsd.host.seam import Host
from fsd.model.errors import Conflict, FsdError


@pytest.fixture(params=["nameless", "named"])
def nameless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the disk knows files without a name."""
    if request.param == "named":
        real = os.open

        def no_nameless(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", no_nameless)
    return request.param == "nameless"


def put(path: bytes, data: bytes, *, replace: bool = True) -> None:
    with LocalTarget(path, Host()) as target:
        target.write(data)
        target.finish(mode=0o640, mtime_ns=10**18 + 7, owner=None, replace=replace)


def test_new_replaced_and_refused(tmp_path: Path, nameless: bool) -> None:
    path = os.fsencode(tmp_path / "f")
    put(path, b"one", replace=False)
    found = os.stat(path)
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_nlink) == (0o640, 10**18 + 7, 1)
    put(path, b"two")
    with pytest.raises(Conflict):
        put(path, b"three", replace=False)
    assert Path(os.fsdecode(path)).read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["f"]


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path, nameless: bool) -> None:
    target = LocalTarget(os.fsencode(tmp_path / "f"), Host())
    target.write(b"half")
    left = os.listdir(tmp_path)
    assert left == [] if nameless else left[0].endswith(".part")
    target.__exit__()
    assert os.listdir(tmp_path) == []


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path: Path, nameless: bool) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(FsdError):
        put(os.fsencode(tmp_path / "f"), b"file")
    assert os.listdir(tmp_path) == ["f"] and not os.listdir(tmp_path / "f")


def test_a_relative_path_and_a_missing_directory(
    tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(b"here", b"x")
    assert Path("here").read_bytes() == b"x"
    with pytest.raises(FsdError) as told:
        put(b"not/there", b"x")
    assert told.value.errno == errno.ENOENT
