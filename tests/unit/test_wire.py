"""Frames, commits, answers and feed pages: what is damaged is told, and never inflated blindly."""

from __future__ import annotations

import hashlib
import json
import os

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fsd.model.errors import DamagedBody, FsdError, IntegrityError, TooLarge, Unavailable, UsageError
from fsd.model.limits import BLOCK, KIB
from fsd.model.ops import LINK, Link, Outcome
from fsd.model.space import Space
from fsd.wire import frame, messages
from fsd.wire.strictjson import dumps, read_written, show


@given(st.lists(st.binary(min_size=1, max_size=5000), max_size=8))
def test_a_frame_gives_back_header_and_blobs(contents: list[bytes]) -> None:
    made = [frame.make_blob(data) for data in contents]
    header, got = frame.unpack(frame.pack({"a": 1}, made), blobs_max=8, bytes_max=BLOCK)
    assert header == {"a": 1}
    assert [frame.open_blob(blob) for blob in got] == contents


def test_text_is_compressed_and_random_bytes_are_not() -> None:
    assert frame.make_blob(b"many words " * 1000).codec == frame.ZSTD
    assert frame.make_blob(os.urandom(20_000)).codec == frame.RAW


def test_blobs_made_together_are_those_made_one_by_one() -> None:
    datas = [b"", b"x", bytes(511), bytes(512), b"many words " * 900, os.urandom(5000), bytes(64 * KIB)]
    datas += [os.urandom(64 * KIB), bytes(64 * KIB + 1), b"words " * 30_000]
    made = frame.make_blobs(datas, [hashlib.sha256(data).digest() for data in datas])
    assert made[:8] == [frame.make_blob(data) for data in datas[:8]]
    assert [blob.codec for blob in made[8:]] == [frame.RAW] * 2  # more than a sample: those are made alone


def test_every_truncation_of_a_frame_is_refused() -> None:
    body = frame.pack({"a": 1}, [frame.make_blob(b"hello")])
    for length in range(len(body)):
        with pytest.raises((UsageError, TooLarge)):
            frame.unpack(body[:length], blobs_max=8, bytes_max=BLOCK)
    with pytest.raises(UsageError):
        frame.unpack(body + b"x", blobs_max=8, bytes_max=BLOCK)


def test_a_flipped_byte_never_reaches_an_application() -> None:
    blob = frame.make_blob(b"some words " * 200)
    for at in range(len(blob.stored)):
        bent = bytearray(blob.stored)
        bent[at] ^= 0x40
        with pytest.raises(IntegrityError):
            frame.open_blob(blob._replace(stored=bytes(bent)))


def test_a_bomb_is_not_inflated() -> None:
    data = bytes(64 * BLOCK)
    bomb = zstandard.ZstdCompressor().compress(data)
    with pytest.raises(IntegrityError):
        frame.open_blob(frame.Blob(hashlib.sha256(data).digest(), frame.ZSTD, len(data), bomb))
    with pytest.raises(IntegrityError):
        frame.open_blob(frame.Blob(hashlib.sha256(data).digest(), frame.ZSTD, BLOCK, bomb))


def test_limits_hold_before_the_bytes_are_looked_at() -> None:
    body = frame.pack({}, [frame.make_blob(b"a"), frame.make_blob(b"b")])
    with pytest.raises(TooLarge):
        frame.unpack(body, blobs_max=1, bytes_max=BLOCK)
    with pytest.raises(TooLarge):
        frame.unpack(body, blobs_max=2, bytes_max=1)


def test_a_commit_arrives_as_it_was_made_and_is_bound_to_its_digest() -> None:
    made = messages.make_commit(5, b"t" * 16, [Link(1, LINK, 7, 1, b"n", 3)], (1, 2, 3), [])
    body = b"".join(messages.commit_pieces(made))
    got = messages.read_commit(body)
    assert got.ops == made.ops
    assert got.pending == (1, 2, 3)
    other = made._replace(digest=b"0" * 32)
    with pytest.raises(DamagedBody, match="digest"):
        messages.read_commit(b"".join(messages.commit_pieces(other)))


@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_ours(raw: bytes) -> None:
    with pytest.raises(FsdError):
        messages.read_commit(raw)
    with pytest.raises(Unavailable):
        messages.read_answer(raw)
    with pytest.raises(Unavailable):
        messages.read_feed(raw)


def test_answers_and_feed_pages_come_back() -> None:
    answer = messages.CommitAnswer(
        4, b"t", 9, (Outcome(3, "conflict", 0, 7, 1, b"n.conflict-x", "lost"),), (b"h" * 32,), 0
    )
    assert messages.read_answer(answer.encode()) == answer
    page = messages.FeedPage(9, (messages.Change(9, 1, (5,), ((1, b"n"),)),), False)
    assert messages.read_feed(page.encode()) == page
    lease = messages.LeaseSeen(4, 1, 2, "somebody", True)
    for more in ({"leases": (lease,)}, {"asks": (messages.BarrierAsk(3, 10),)}, {"space": Space(9, 4)}):
        assert messages.read_feed(page._replace(**more).encode()) == page._replace(**more)
    with pytest.raises(Unavailable):
        messages.read_feed(messages.packb((9, (), False, (), (), (9, -1))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pending", (float("inf"), 0, 0)),
        ("pending", (-1, 0, 0)),
        ("pending", (2**63, 0, 0)),
        ("pending", (1, 2)),
        ("pending", 5),
        ("session", 2**63),
        ("session", -1),
        ("session", "1"),
        ("ticket", "text"),
    ],
)
def test_header_fields_of_a_commit_are_of_their_types(field: str, value: object) -> None:
    made = messages.make_commit(5, b"t", [], (0, 0, 0), [])
    header = {
        "v": 1,
        "ops": made.ops_raw,
        "digest": made.digest,
        "session": 5,
        "ticket": b"t",
        "pending": (0, 0, 0),
    }
    with pytest.raises(UsageError):
        messages.read_commit(frame.pack({**header, field: value}, []))


@pytest.mark.parametrize(
    "row",
    [[2**40, 0, 1, 0], [b"x" * 32, float("inf"), 1, 0], ["x" * 32, 0, 1, 0], [b"x" * 32, 0, 1, 2.0], [1]],
)
def test_rows_of_a_blob_table_are_of_their_types(row: list[object]) -> None:
    raw = msgpack.packb({"blobs": [row]}, use_bin_type=True)
    with pytest.raises(UsageError):
        frame.unpack(b"FSD1" + len(raw).to_bytes(4, "big") + raw, blobs_max=9, bytes_max=BLOCK)


@pytest.mark.parametrize(
    "text", ["1.10", "1E5", "-0", "-0.0", "1e400", "0.1", "1", "123456789012345678901234567890", "9" * 5000]
)
def test_numbers_of_an_answer_are_shown_as_written(text: str) -> None:
    body = f'{{"a": [{text}, {{"b": {text}}}], "c": []}}'
    value = read_written(body)
    assert show(value) == body
    assert dumps(value) == body.replace(" ", "")
    assert value["a"][0] == pytest.approx(float(text))


def test_what_is_shown_is_laid_out_as_json_does_it() -> None:
    value = {"a": [1, {"b": None, "c": {}}, []], "d": True, "e": "ü\n", "f": (1.5, "x"), "g": {"h": {"i": 2}}}
    for indent in (None, 2):
        assert show(value, indent) == json.dumps(value, indent=indent, ensure_ascii=False)
    assert show(b"x") == json.dumps("b'x'")


def test_answers_nested_too_deep_are_no_json() -> None:
    with pytest.raises(ValueError, match="deep"):
        read_written("[" * 100_000)
