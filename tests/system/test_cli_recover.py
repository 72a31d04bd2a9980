"""`fsd recover` and what the server refused: looked at, taken out, tried again, dropped."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.cli import Outcome, process
from support.server import TestFs

from fsd.host.seam import Host
from fsd.kernel.options import mount_id
from fsd.model.attrs import make_ino
from fsd.model.ops import (
    CONTENT,
    CREATE,
    RENAME,
    SETATTR,
    SETXATTR,
    Content,
    Create,
    Rename,
    Setattr,
    Setxattr,
)
from fsd.vfs.refused import Refusal, SalvageJob

INO = make_ino(9, 1)
OPS: list[tuple[Any, bytes, int, int]] = [
    (Create(1, CREATE, 1, b"d", INO, stat.S_IFDIR | 0o750, 0, 0, 0, None, 5), b"/d", stat.S_IFDIR | 0o750, 0),
    (Content(2, CONTENT, INO, 0, 3000, (), True, None, 10**18, 5), b"/d/a", stat.S_IFREG | 0o640, 3000),
    (Setxattr(3, SETXATTR, INO, b"user.tag.k", b"v", 5), b"/d/a", stat.S_IFREG | 0o640, 0),
    (Setattr(4, SETATTR, INO, 0o600, None, None, None, None, 5), b"/d/a", stat.S_IFREG | 0o640, 0),
]


@dataclass
class Left:
    """A state directory with refused changes in it, as the client writes them."""

    fs: TestFs
    state: Path
    mountpoint: Path

    @property
    def own(self) -> Path:
        return self.state / "mounts" / mount_id(self.fs.id, b"/", self.mountpoint)

    def refuse(self, *rows: tuple[Any, bytes, int, int]) -> None:
        self.own.mkdir(parents=True, exist_ok=True)
        refusals = tuple(
            Refusal(9, op.opno, tuple(op), errno.EDQUOT, "quota", path, mode, 0, 0, size, (), ())
            for op, path, mode, size in rows
        )
        SalvageJob(self.own, Host(), None, refusals).run(None, None)  # type: ignore[arg-type]

    def recover(self, *flags: str) -> Outcome:
        argv = ("recover", str(self.mountpoint), "--state-dir", str(self.state), *flags)
        return process(*argv, env=self.fs.env)


@pytest.fixture
def left(shared_fs: TestFs, tmp_path: Path) -> Left:
    made = Left(shared_fs, tmp_path / "state", tmp_path / "m")
    made.refuse(*OPS)
    return made


def test_refused_changes_are_listed_with_exit_6(left: Left) -> None:
    found = left.recover()
    assert found.code == 6
    told = found.json
    assert told["status"] == "refused"
    assert [(r["id"], r["operation"], r["path"], r["bytes"]) for r in told["refused"]] == [
        ("9-1", "create", "/d", 0),
        ("9-2", "content", "/d/a", 3000),
        ("9-3", "setxattr", "/d/a", 0),
        ("9-4", "setattr", "/d/a", 0),
    ]
    assert "--retry" in found.err


def test_retry_does_them_again_and_drops_them(left: Left) -> None:
    found = left.recover("--retry")
    assert found.code == 0, found.err
    assert found.json["retried"] == 4
    assert found.json["refused"] == []
    about = process("stat", "/d/a", env=left.fs.env).json
    assert (about["size_bytes"], about["mode"], about["tags"]) == (3000, "600", {"k": "v"})
    assert process("stat", "/d", env=left.fs.env).json["mode"] == "750"
    assert list((left.own / "refused").iterdir()) == []
    assert left.recover().json["status"] == "nothing_left"


def test_retry_replaces_nothing_that_is_there_by_now(left: Left) -> None:
    """Somebody else made the file meanwhile: what was refused goes beside it, attributes with it."""
    assert process("cp", "-", ":/d/a", stdin=b"of another", env=left.fs.env).code == 0
    found = left.recover("--retry")
    assert found.code == 0, found.err
    [beside] = found.json["beside"]
    assert beside.startswith("/d/a.conflict-")
    assert process("cat", "/d/a", env=left.fs.env).out == b"of another"
    about = process("stat", beside, env=left.fs.env).json
    assert (about["size_bytes"], about["mode"], about["tags"]) == (3000, "600", {"k": "v"})


def test_retry_goes_over_what_it_was_made_on(left: Left) -> None:
    """Twice of the same file: the second over the first. Of a file that is gone, it comes back."""
    assert process("cp", "-", ":/f", stdin=b"base", env=left.fs.env).code == 0
    ino, base = map(int, process("stat", "/f", env=left.fs.env).json["revision"].split(":"))
    assert left.recover("--discard", "--yes").code == 0
    for gone in (False, True):
        contents = [
            (
                Content(number, CONTENT, ino, base, size, (), True, None, 5, 5),
                b"/f",
                stat.S_IFREG | 0o644,
                size,
            )
            for number, size in ((11, 100), (12, 200))
        ]
        left.refuse(*contents)
        if gone:
            assert process("rm", "/f", env=left.fs.env).code == 0
        found = left.recover("--retry")
        assert (found.code, found.json["retried"], found.json["beside"]) == (0, 2, []), found.err
        assert process("stat", "/f", env=left.fs.env).json["size_bytes"] == 200


def test_what_cannot_be_repeated_stays(left: Left) -> None:
    rename = Rename(5, RENAME, 1, b"a", make_ino(9, 2), 1, b"b", 0, 0, 0, 5)
    left.refuse((rename, b"/a", stat.S_IFREG | 0o644, 0))
    found = left.recover("--retry")
    assert found.code == 6
    assert found.json["retried"] == 4
    assert [f["operation"] for f in found.json["failed"]] == ["rename"]
    assert [r["id"] for r in found.json["refused"]] == ["9-5"]


def test_export_writes_the_content_and_keeps_the_entries(left: Left, tmp_path: Path) -> None:
    target = tmp_path / "out"
    found = left.recover("--export", str(target))
    assert found.code == 6
    assert found.json["exported"] == [str(target / "d" / "a")]
    assert (target / "d" / "a").stat().st_size == 3000
    assert stat.S_IMODE((target / "d" / "a").stat().st_mode) == 0o640
    again = left.recover("--export", str(target))
    assert again.json["exported"] == [str(target / "d" / "a.refused-9-2")]
    assert left.recover("--export", str(target)).code == 1
    assert len(found.json["refused"]) == 4


def test_what_lacks_bytes_is_told_and_never_sent_with_zeros(left: Left, tmp_path: Path) -> None:
    """What is nowhere any more cannot be put over what is there; what is left can be taken out."""
    entry = left.own / "refused" / "9-2" / "entry"
    raw = msgpack.unpackb(entry.read_bytes(), use_list=False)
    entry.write_bytes(msgpack.packb({**raw, "lacking": 700}))
    listed = {one["id"]: one["lacking_bytes"] for one in left.recover().json["refused"]}
    assert listed == {"9-1": 0, "9-2": 700, "9-3": 0, "9-4": 0}
    out = left.recover("--export", str(tmp_path / "out")).json
    assert out["exported"] == out["incomplete"] == [str(tmp_path / "out" / "d" / "a")]
    found = left.recover("--retry")
    assert found.code == 6
    (failed,) = [one for one in found.json["failed"] if one["id"] == "9-2"]
    assert "700 bytes of it are nowhere" in failed["reason"]
    assert process("stat", "/d/a", env=left.fs.env).code == 5
    assert (left.own / "refused" / "9-2" / "data").stat().st_size == 3000


def test_a_path_never_leads_out_of_the_export(left: Left, tmp_path: Path) -> None:
    content = Content(7, CONTENT, INO, 0, 10, (), True, None, 5, 5)
    left.refuse((content, b"/../../escaped", stat.S_IFREG | 0o644, 10))
    target = tmp_path / "deep" / "out"
    assert left.recover("--export", str(target)).code == 6
    assert (target / "escaped").exists()


def test_discard_needs_yes_and_is_for_good(left: Left) -> None:
    assert left.recover("--discard").code == 2
    assert len(os.listdir(left.own / "refused")) == 4
    found = left.recover("--discard", "--yes")
    assert found.code == 0
    assert found.json["discarded"] == 4
    assert left.recover().json["refused"] == []


def test_a_damaged_entry_is_told_and_nothing_is_dropped(left: Left) -> None:
    (left.own / "refused" / "9-2" / "entry").write_bytes(b"\xc1")
    found = left.recover("--discard", "--yes")
    assert found.code == 1
    assert found.error["code"] == "integrity"
    assert len(os.listdir(left.own / "refused")) == 4


def test_one_decision_at_a_time(left: Left, tmp_path: Path) -> None:
    assert left.recover("--retry", "--export", str(tmp_path / "x")).code == 2
