"""What a mount has at hand of committed content: within bounds, and never wrong bytes."""

from __future__ import annotations

import hashlib
from typing import cast

from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOB_MEMORY, MIB, RECENT_SOURCES
from fsd.vfs.build import FROM_BLOB, FROM_LOG, Source
from fsd.vfs.log import Log
from fsd.vfs.recent import Recent


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
