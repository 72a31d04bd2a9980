"""What a mount has at hand of committed content: within bounds, and never wrong bytes."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import pytest

from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOB_MEMORY, MIB, RECENT_SOURCES
from fsd.vfs import build
from fsd.vfs.build import FROM_BLOB, FROM_LOG, Source
from fsd.vfs.log import Log
from fsd.vfs.recent import Recent
from fsd.wire.frame import ZSTD, Blob


class Bytes:
    """What `read` needs of a log."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, pos: int, length: int) -> bytes:
        if pos + length > len(self.data):
            raise IntegrityError("not in the log")
        return self.data[pos : pos + length]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def over(log: Bytes) -> Recent:
    return Recent(cast(Log, log))


def test_bytes_come_from_the_log_as_long_as_it_has_them() -> None:
    log = Bytes(b"one two")
    recent = over(log)
    recent.made([Source(digest(b"one"), ((FROM_LOG, 0, 3),)), Source(digest(b"two"), ((FROM_LOG, 4, 3),))])
    assert recent.get(digest(b"one")) == b"one"
    log.data = b""
    assert recent.get(digest(b"one")) == b"one", "kept in memory"
    assert digest(b"two") in recent
    assert recent.get(digest(b"two")) is None
    assert digest(b"two") not in recent


def test_other_bytes_than_were_written_are_never_given() -> None:
    recent = over(Bytes(b"onf"))
    recent.made([Source(digest(b"one"), ((FROM_LOG, 0, 3),))])
    assert recent.get(digest(b"one")) is None


def test_what_needs_another_blob_is_left_to_the_server() -> None:
    recent = over(Bytes(b"one"))
    made = Source(digest(b"one"), ((FROM_BLOB, digest(b"x"), 0, 1), (FROM_LOG, 1, 2)))
    recent.made([made])
    assert recent.get(digest(b"one")) is None


def test_memory_and_list_are_bounded() -> None:
    recent = over(Bytes(b""))
    names = [at.to_bytes(32, "big") for at in range(BLOB_MEMORY // MIB + 3)]
    for name in names:
        recent.keep(name, bytes(MIB))
    held = [name for name in names if name in recent]
    assert held == names[3:]
    recent.made(Source(at.to_bytes(32, "little"), ()) for at in range(RECENT_SOURCES + 5))
    assert (4).to_bytes(32, "little") not in recent
    assert (5).to_bytes(32, "little") in recent


class Block(bytes):
    """Counts those there are."""

    alive = 0

    def __new__(cls, data: bytes) -> Block:
        cls.alive += 1
        return super().__new__(cls, data)

    def __del__(self) -> None:
        Block.alive -= 1


def test_a_job_keeps_no_bytes_of_blocks_beside_their_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks are read from the log to be hashed together, and go one after the other."""
    named: list[bytes | None] = []
    most = 0

    def compressed(data: bytes, *, digest: bytes | None = None) -> Blob:
        nonlocal most
        named.append(digest)
        most = max(most, len(named) + Block.alive)
        return Blob(digest or b"", ZSTD, len(data), b"small")

    def begun(task: int, *_: object) -> build._Whole:
        return build._Whole(task, (), Block(bytes([task]) * 9000))

    monkeypatch.setattr(build, "make_blob", compressed)
    monkeypatch.setattr(build, "_begun", begun)
    units = ((1, tuple(range(1, 9))),)
    [(_, made)] = build.BuildJob(units, cast(Log, None), MIB, {}).run(cast(Any, None), cast(Any, None))  # type: ignore[arg-type]
    assert not isinstance(made, IntegrityError) and [one.block for one in made] == list(range(1, 9))
    assert named == [digest(bytes([task]) * 9000) for task in range(1, 9)]
    assert Block.alive == 0 and most <= 8 + 2, "blobs and what is still to be one"
