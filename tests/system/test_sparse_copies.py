"""Files with holes on their way by path: only their data travels, and the holes stay holes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.filesclient import connect
from support.proxy import FaultProxy, on, truncate
from support.server import TestFs

from fsd.client.download import download
from fsd.client.files import Files
from fsd.client.transfer import CopyOptions
from fsd.client.upload import upload
from fsd.model.errors import UsageError
from fsd.model.limits import BLOCK, SPANS_MAX
from fsd.model.spans import Span, merged, read_spans, total, write_spans

MIB, GIB = 1 << 20, 1 << 30
ONE = CopyOptions()


def sparse(path: Path, size: int, pieces: Sequence[tuple[int, bytes]]) -> Path:
    with path.open("wb") as out:
        for at, data in pieces:
            out.seek(at)
            out.write(data)
        out.truncate(size)
    return path


def raw(path: Path) -> bytes:
    return os.fsencode(path)


def test_ten_gigabytes_of_nothing_are_not_sent(files: Files, tmp_path: Path) -> None:
    size = 10 * GIB + 5
    pieces = [(0, b"first"), (3 * GIB + 70_000, os.urandom(2 * MIB)), (size - 4, b"last")]
    there = sparse(tmp_path / "there", size, pieces)
    done = upload(files, raw(there), b"/large", ONE)
    assert done.ok
    assert 2 * MIB < done.bytes < 3 * MIB
    assert files.stat(b"/large")["size_bytes"] == size
    back = tmp_path / "back"
    got = download(files, b"/large", raw(back), ONE)
    assert 2 * MIB < got.bytes < 5 * MIB  # blocks that are half data come whole
    found = back.stat()
    assert (found.st_size, found.st_mtime_ns) == (size, there.stat().st_mtime_ns)
    assert found.st_blocks * 512 < 8 * MIB
    with back.open("rb") as file:
        for at, data in pieces:
            file.seek(at)
            assert file.read(len(data)) == data
        file.seek(GIB)
        assert not file.read(MIB).strip(b"\0")


def test_nothing_but_a_hole(files: Files, tmp_path: Path) -> None:
    there = sparse(tmp_path / "there", 5 * MIB + 3, [])
    assert upload(files, raw(there), b"/hole", ONE).bytes == 0
    got = download(files, b"/hole", raw(tmp_path / "back"), ONE)
    assert (got.ok, got.bytes) == (True, 0)
    assert (tmp_path / "back").read_bytes() == bytes(5 * MIB + 3)
    assert (tmp_path / "back").stat().st_blocks == 0


def test_the_holes_of_a_file_of_any_size_are_not_sent(shared_fs: TestFs, files: Files) -> None:
    size = 3000 * GIB
    spans = write_spans([(0, 4), (2000 * GIB, 2000 * GIB + 4)])
    assert shared_fs.ask("PUT", f"/files/huge?size={size}&data={spans}", b"onetwo..").status == 200
    sent, holes = bytearray(), 0
    for one in files.reading(b"/huge").runs():
        if isinstance(one, int):
            holes += one
            continue
        sent += one
        assert len(sent) < 3 * MIB  # a block that is data in part comes whole
    assert (bytes(sent).replace(b"\0", b""), len(sent) + holes) == (b"onetwo..", size)
    assert next(files.read(b"/huge", offset=2000 * GIB)).startswith(b"wo..")


def some(rng: random.Random, size: int) -> list[tuple[int, bytes]]:
    ends = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, size // 2, size - 1)
    middle = size // 2 // BLOCK * BLOCK
    pieces = [(middle, rng.randbytes(min(BLOCK, size - middle)))]  # enough for an answer that breaks
    for _ in range(rng.choice((1, 3, 9, 150))):
        at = rng.choice(ends) if rng.random() < 0.3 else rng.randrange(size)
        length = min(size - at, rng.choice((1, 100, 5000, 70_000, BLOCK)))
        pieces.append((at, rng.randbytes(length)))
    return pieces


@pytest.mark.parametrize("number", range(4))
def test_what_comes_back_is_what_went(
    files: Files, shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path, number: int
) -> None:
    """Also where the answer breaks in the middle and is continued."""
    rng = random.Random(number)
    size = rng.choice((BLOCK, 4 * BLOCK + 17, 30 * BLOCK, 41 * BLOCK + 1))
    there = sparse(tmp_path / "there", size, some(rng, size))
    assert upload(files, raw(there), b"/random", ONE).ok
    back = tmp_path / "back"
    for _ in range(2):
        proxy.next(truncate(rng.randrange(1000, 200_000)), on("files"))
    assert download(connect(shared_fs, proxy.url), b"/random", raw(back), ONE).ok
    assert proxy.pending() == 0
    assert back.read_bytes() == there.read_bytes()
    assert b"".join(files.read(b"/random")) == there.read_bytes()
    runs = list(files.reading(b"/random", offset=size // 3, length=size // 2).runs())
    got = b"".join(bytes(one) if isinstance(one, int) else one for one in runs)
    assert got == there.read_bytes()[size // 3 : size // 3 + size // 2]


def test_a_checkpoint_of_a_sparse_file(shared_fs: TestFs, files: Files, tmp_path: Path) -> None:
    there = sparse(tmp_path / "there", 40 * MIB, [(10 * MIB, b"then")])
    upload(files, raw(there), b"/state", ONE)
    made = shared_fs.ask("POST", "/checkpoints", {}).json["checkpoint_id"]
    upload(files, raw(sparse(tmp_path / "now", 20 * MIB, [(0, b"now")])), b"/state", ONE)
    then = Files(files.http, at={"checkpoint": made})
    assert download(then, b"/state", raw(tmp_path / "back"), ONE).bytes <= MIB
    assert (tmp_path / "back").read_bytes() == there.read_bytes()


BAD: list[tuple[str, bytes, dict[str, Any]]] = [
    ("0-3", b"data", {"size": None}),
    ("0-3", b"data", {"append": 1}),
    ("0-3", b"dat", {}),
    ("0-3", b"data!", {}),
    ("none", b"data", {}),
    ("0-9", b"0123456789", {"size": 5}),
    ("4-7,0-3", b"datadata", {}),
    ("0-3,3-7", b"data1234", {}),
    ("3-0", b"data", {}),
    ("0-", b"data", {}),
    ("-1-3", b"data", {}),
    ("0-3,", b"data", {}),
    ("", b"", {}),
    ("0-99999999999999999", b"data", {}),
    (",".join(f"{at * 2}-{at * 2}" for at in range(SPANS_MAX + 1)), bytes(SPANS_MAX + 1), {"size": 999}),
]


@pytest.mark.parametrize("at", range(len(BAD)))
def test_ranges_that_are_none_change_nothing(shared_fs: TestFs, files: Files, at: int) -> None:
    data, body, more = BAD[at]
    assert shared_fs.ask("PUT", "/files/f", b"before").status == 200
    query = {"size": 100, "data": data, **more}
    text = "&".join(f"{name}={value}" for name, value in query.items() if value is not None)
    answer = shared_fs.ask("PUT", f"/files/f?{text}", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_argument")
    assert b"".join(files.read(b"/f")) == b"before"


@pytest.mark.parametrize(("holes", "status"), [("1", 200), ("", 200), ("no", 400), ("2", 400), ("-0", 400)])
def test_holes_are_left_out_or_not(shared_fs: TestFs, holes: str, status: int) -> None:
    assert shared_fs.ask("PUT", "/files/h?size=3000000&data=0-3", b"data").status == 200
    answer = shared_fs.ask("GET", f"/files/h?holes={holes}")
    assert (answer.status, "x-fsd-data" in answer.headers) == (status, False)


def test_a_key_is_for_one_content(shared_fs: TestFs, files: Files) -> None:
    key = {"Idempotency-Key": "sparse-1"}
    first = shared_fs.ask("PUT", "/files/k?size=3000000&data=2000000-2000003", b"data", headers=key)
    again = shared_fs.ask("PUT", "/files/k?size=3000000&data=2000000-2000003", b"data", headers=key)
    assert (first.status, again.status, again.json) == (200, 200, first.json)
    other = shared_fs.ask("PUT", "/files/k?size=3000000&data=2000001-2000004", b"data", headers=key)
    assert other.status == 409
    assert b"".join(files.read(b"/k")) == bytes(2_000_000) + b"data" + bytes(999_996)


def test_an_older_server_gets_the_zeros(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked = files.write, []

    def older(*args: Any, sparse: object = None, **more: Any) -> Any:
        asked.append(sparse)
        if sparse is not None:
            next(iter(args[1].pieces()))  # some of it was sent, and counted
            raise UsageError("unknown parameter data")
        return write(*args, **more)

    monkeypatch.setattr(files, "write", older)
    there = sparse(tmp_path / "there", 5 * MIB, [(2 * MIB, b"data")])
    done = upload(files, raw(there), b"/older", ONE)
    assert (done.ok, done.bytes, len(asked)) == (True, 5 * MIB, 2)
    assert b"".join(files.read(b"/older")) == there.read_bytes()


def test_spans_are_few_and_say_what_they_hold() -> None:
    rng = random.Random(1)
    for count in (0, 1, 5, SPANS_MAX, 5000):
        starts = sorted(rng.sample(range(0, 10**12, 7), count))
        given: list[Span] = [(at, at + rng.randrange(1, 10**6)) for at in starts]
        made = merged(given)
        assert len(made) <= SPANS_MAX
        assert all(end < start for (_, end), (start, _) in pairwise(made))
        assert all(any(low <= start and end <= high for low, high in made) for start, end in given)
        assert read_spans(write_spans(made), 0, 2 * 10**12) == made
        assert total(made) >= max((end - start for start, end in given), default=0)
