"""Blobs that are made again from others whose commits are not answered yet."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from support.client import Client, server_tree
from support.clientcase import age, busy, finish, settled, take

from fsd.model.errors import IntegrityError
from fsd.vfs.build import FROM_BLOB, FROM_LOG, BuildJob, Piece, Source, fetcher, first_sources
from fsd.wire.frame import Blob, make_blob

SIZE = 3000


def write(client: Client, fh: int, data: bytes) -> None:
    """A change of a part of the file, made in the background: what it is made of need not be in memory."""
    client.call(lambda v: v.write(fh, 10, data))
    age(client)
    finish(client, take(client, BuildJob))


def opened(client: Client, first: bytes) -> int:
    client.put(client.volume.root_ino, b"a", first, sync=True)
    node = client.call(lambda v: v.lookup(v.root_ino, b"a"))
    assert node is not None
    fh: int = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    return fh


@pytest.mark.parametrize(
    "turns", [(b"b", b"a", b"b"), (b"a", b"a"), (b"b", b"c", b"b", b"a", b"c", b"b", b"x")]
)
def test_content_that_comes_back(client: Client, turns: Sequence[bytes]) -> None:
    """Each content is made of the one before, so the blobs that do are made of each other, by their names."""
    fh = opened(client, b"a" * SIZE)
    out = busy(client)
    for turn in turns:
        write(client, fh, turn * 200)
    finish(client, out)
    client.call(lambda v: v.release(fh))
    settled(client)
    want = b"a" * 10 + turns[-1] * 200
    assert server_tree(client.bench)["/a"][1] == want + b"a" * (SIZE - len(want))


class Place:
    """The log, the cache and the server of a `fetcher`, in memory."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.cached: dict[bytes, bytes] = {}
        self.stored: dict[bytes, Blob] = {}
        self.asked: list[bytes] = []
        self.gone = 0  # below this the log has nothing any more
        self.sources: list[Source] = []

    def get(self, digest: bytes) -> bytes | None:
        return self.cached.get(digest)

    def put(self, digest: bytes, data: bytes) -> None:
        self.cached[digest] = data

    def read(self, pos: int, length: int) -> bytes:
        if pos < self.gone:
            raise IntegrityError("the segment went")
        return bytes(self.bytes[pos : pos + length])

    def blobs(self, wanted: Sequence[bytes], timeout: float) -> tuple[list[Blob], list[bytes]]:
        self.asked += wanted
        got = [self.stored[one] for one in wanted if one in self.stored]
        return got, [one for one in wanted if one not in self.stored]

    def store(self, data: bytes) -> bytes:
        blob = make_blob(data)
        self.stored[blob.hash] = blob
        return blob.hash

    def make(self, data: bytes, base: bytes | None = None, written: int = 1) -> bytes:
        """A blob of `data`: its first bytes written and the rest of the blob `base`, or all of it written."""
        mine = data if base is None else data[:written]
        plan: list[Piece] = [(FROM_LOG, len(self.bytes), len(mine))]
        if base is not None:
            plan.append((FROM_BLOB, base, written, len(data) - written))
        self.bytes += mine
        digest = make_blob(data).hash
        self.sources.append(Source(digest, tuple(plan)))
        return digest

    def fetch(self, *wanted: bytes) -> dict[bytes, bytes]:
        known = first_sources(self.sources)
        return fetcher(self, self, self, known)(wanted)  # type: ignore[arg-type]


def test_a_chain_of_any_length() -> None:
    """The server was away for an hour, and a part of a file was written every two seconds."""
    place = Place()
    contents = [at.to_bytes(4, "big") + b"x" * 96 for at in range(1800)]
    made = [place.store(contents[0])]
    for data in contents[1:]:
        made.append(place.make(data, made[-1], written=4))
    assert place.fetch(made[-1], made[600]) == {made[-1]: contents[-1], made[600]: contents[600]}
    assert len(place.asked) == 1


def test_circles_end_at_what_the_server_has() -> None:
    place = Place()
    a, b, c = (letter + b"x" * 99 for letter in (b"a", b"b", b"c"))
    of_a = place.store(a)
    of_b = place.make(b, of_a)
    of_c = place.make(c, of_b)
    assert place.make(a, of_c) == of_a
    assert place.make(a, of_a) == of_a
    assert place.fetch(of_a, of_b, of_c) == {of_a: a, of_b: b, of_c: c}
    assert place.fetch(of_c) == {of_c: c}


def test_the_first_making_of_a_content_counts() -> None:
    """The server has none of it: what was written whole at first is what all of it comes from."""
    place = Place()
    a, b = (letter + b"x" * 99 for letter in (b"a", b"b"))
    of_a = place.make(a)
    of_b = place.make(b, of_a)
    assert place.make(a, of_b) == of_a
    assert place.fetch(of_b) == {of_b: b}
    assert place.asked == []


def test_what_the_log_has_no_more_is_the_servers() -> None:
    place = Place()
    a, b, c = (letter + b"x" * 99 for letter in (b"a", b"b", b"c"))
    of_a = place.make(a)
    of_b = place.make(b, of_a)
    place.gone = len(place.bytes)
    of_c = place.make(c, of_b)
    place.store(b)
    assert place.fetch(of_c) == {of_c: c}
    del place.stored[of_b], place.cached[of_b]
    with pytest.raises(IntegrityError, match="the server lacks 1 blobs"):
        place.fetch(of_c)


def test_damaged_bytes_of_the_log_are_not_taken() -> None:
    place = Place()
    a, b = (letter + b"x" * 99 for letter in (b"a", b"b"))
    of_a = place.store(a)
    of_b = place.make(b, of_a)
    place.bytes[-1] ^= 1
    with pytest.raises(IntegrityError, match=of_b.hex()):
        place.fetch(of_b)
    place.store(b)
    assert place.fetch(of_b) == {of_b: b}
