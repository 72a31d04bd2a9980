"""A connection that asks for content in a row: a thread of its own answers as the event loop does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.server import Server
from support.wait import wait_for
from system.test_lane_commits import LONG, Mount, lanes, metric

from fsd.model.limits import BLOBS_GET_BYTES, BLOCK
from fsd.server.lanes import LANE_AFTER
from fsd.wire.frame import Blob, make_blob, open_blob, pack, unpack
from fsd.wire.messages import packb

COUNT = 'fsd_requests_total{route="/v1/file-systems/{id}/blobs",method="POST",status="200"}'


class Reader:
    """What one mount uploaded, large blobs and small ones, asked for over its kept connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.mount = Mount(server.create())
        sizes = [BLOCK] * 8 + [300_000, 70, 9]
        self.blobs = [make_blob(os.urandom(size)) for size in sizes]
        got, raw = self.mount.ask("POST", "/packs", pack({}, self.blobs))
        assert got.status == 200, raw

    def ask(self, blobs: list[Blob], **more: bytes) -> tuple[dict[str, str], dict[bytes, bytes], list[bytes]]:
        """Headers, contents, and what is absent."""
        body = packb([*(one.hash for one in blobs), *more.values()])
        got, raw = self.mount.ask("POST", "/blobs", body)
        assert got.status == 200, raw
        header, found = unpack(raw, blobs_max=256, bytes_max=BLOBS_GET_BYTES + BLOCK)
        contents = {one.hash: open_blob(one) for one in found}
        return {k.lower(): v for k, v in got.getheaders()}, contents, list(header["absent"])

    def to_a_lane(self) -> None:
        for _ in range(LANE_AFTER):
            self.ask(self.blobs[-1:])
        wait_for(self.lent, LONG, "a lane")

    def lent(self) -> bool:
        if lanes(self.server) == 1:
            return True
        self.ask(self.blobs[-1:])
        return False


@pytest.fixture
def reader(server: Server) -> Iterator[Reader]:
    made = Reader(server)
    yield made
    made.mount.connection.close()
    wait_for(lambda: lanes(server) == 0, LONG, "the lane to end with its client")
    assert "Traceback" not in server.log.read_text()


def test_content_is_the_same_by_either_way(reader: Reader) -> None:
    expected = {one.hash: open_blob(one) for one in reader.blobs}
    before = reader.ask(reader.blobs, no=bytes(32))
    reader.to_a_lane()
    by_lane = reader.ask(reader.blobs, no=bytes(32))
    assert lanes(reader.server) == 1
    assert before[1:] == by_lane[1:] == (expected, [bytes(32)])
    assert set(before[0]) == set(by_lane[0])
    same = ("content-type", "content-length", "x-fsd-call")
    assert [by_lane[0][one] for one in same] == [before[0][one] for one in same]
    for some in (reader.blobs[::-1], reader.blobs[1:3] + reader.blobs[-2:], reader.blobs[4:5], []):
        assert reader.ask(some)[1:] == ({one.hash: expected[one.hash] for one in some}, [])
    wait_for(lambda: metric(reader.server, COUNT) >= 6 + LANE_AFTER, LONG, "each to be counted")


@pytest.mark.parametrize(("path", "body"), [("/blobs", b"rubbish"), ("/blobs?keep=1", packb([bytes(32)]))])
def test_errors_and_what_is_to_stay_are_told_as_ever(reader: Reader, path: str, body: bytes) -> None:
    def told() -> tuple[int, Any]:
        got, raw = reader.mount.ask("POST", path, body)
        return got.status, (raw if got.status == 200 else raw.partition(b"request_id")[0], set(got.headers))

    by_loop = told()
    reader.to_a_lane()
    assert told() == by_loop
    wait_for(lambda: lanes(reader.server) == (path == "/blobs"), LONG, "the loop to have the other again")


def test_a_revocation_holds_from_the_next_question_on(reader: Reader) -> None:
    reader.to_a_lane()
    server, fs = reader.server, reader.mount.fs
    listed = server.admin("GET", f"/v1/file-systems/{fs.id}/tokens").json
    token = listed["tokens"][0]["token_id"]
    assert server.admin("POST", f"/v1/file-systems/{fs.id}/tokens/{token}/disable").status == 200
    got, raw = reader.mount.ask("POST", "/blobs", packb([reader.blobs[0].hash]))
    assert got.status == 401 and reader.blobs[0].stored not in raw
    assert lanes(server) == 1
