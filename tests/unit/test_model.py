"""Names, tokens, blocks, operations and errors: the words both sides share."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsd.model import blocks, errors, names, ops, token
from fsd.model.limits import BLOCK, NAME_MAX, PATCHES_MAX


class Source:
    def token_bytes(self, count: int) -> bytes:
        return os.urandom(count)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (b"", errno.EINVAL),
        (b"a/b", errno.EINVAL),
        (b"a\0", errno.EINVAL),
        (b".", errno.EEXIST),
        (b"..", errno.EEXIST),
        (b"x" * 256, errno.ENAMETOOLONG),
    ],
)
def test_bad_names_have_the_errno_linux_gives(name: bytes, number: int) -> None:
    with pytest.raises(errors.PosixError) as caught:
        names.check_name(name)
    assert caught.value.errno == number


@pytest.mark.parametrize("name", [b"x" * 255, b"\xff\xfe", b" ", b"...", "é".encode()])
def test_any_other_bytes_are_a_name(name: bytes) -> None:
    assert names.check_name(name) == name


def test_paths_are_split_and_dotdot_is_refused_not_resolved() -> None:
    assert names.split_path(b"//a/./b//") == [b"a", b"b"]
    assert names.split_path(b"/") == []
    with pytest.raises(errors.UsageError):
        names.split_path(b"/a/../b")
    with pytest.raises(errors.UsageError):
        names.split_path(b"a/b")


@given(st.binary(min_size=1, max_size=255), st.text(max_size=80), st.integers(0, 2**61), st.integers(0, 50))
def test_conflict_names_fit_and_stay_utf8(name: bytes, mount: str, at: int, attempt: int) -> None:
    made = names.conflict_name(name, mount, at, attempt)
    assert len(made) <= NAME_MAX
    assert b".conflict-" in made
    assert b"/" not in made or b"/" in name
    try:
        name.decode()
    except UnicodeDecodeError:
        return
    made.decode()


def test_a_token_survives_its_text_and_hides_in_logs() -> None:
    made = token.make(Source(), "fs_a", "tok_b", {"local": "http://127.0.0.1:1"})
    assert token.parse(made.text() + "\n") == made
    assert made.secret not in repr(made)
    assert made.secret not in token.redact(f"sent {made.text()} to it")


@pytest.mark.parametrize("cut", [1, 10, 44, 60])
def test_a_truncated_token_is_told_as_such(cut: int) -> None:
    text = token.make(Source(), "fs_a", "tok_b", {"local": "http://127.0.0.1:1"}).text()
    with pytest.raises(errors.NotAuthenticated, match="truncated"):
        token.parse(text[:-cut])


def test_an_unknown_region_lists_those_the_token_knows() -> None:
    made = token.make(Source(), "fs_a", "tok_b", {"eu": "http://e", "us": "http://u"})
    assert made.endpoint("eu") == "http://e"
    with pytest.raises(errors.UnknownRegion, match="eu, us"):
        made.endpoint("mars")
    with pytest.raises(errors.UnknownRegion):
        made.endpoint(None)


_spans = st.tuples(st.integers(0, 300), st.integers(1, 200), st.integers(0, 100))


@given(st.lists(_spans, max_size=12), st.integers(0, 500), st.integers(1, 300), st.integers(0, 520))
def test_pieces_of_overlaid_and_clipped_parts_read_like_the_bytes(
    writes: list[tuple[int, int, int]], off: int, length: int, cut: int
) -> None:
    blobs = {bytes([i]) * 32: os.urandom(400) for i in range(len(writes))}
    model = bytearray(1024)
    parts: blocks.Parts = ()
    for (at, count, boff), digest in zip(writes, blobs):
        model[at : at + count] = blobs[digest][boff : boff + count]
        parts = blocks.overlay(parts, blocks.Part(at, count, boff, digest))
    parts = blocks.clip(parts, cut)
    model[cut:] = bytes(len(model) - cut)
    got = bytearray(length)
    for piece in blocks.pieces(blocks.decode(blocks.encode(parts)), off, length):
        got[piece.at : piece.at + piece.length] = blobs[piece.hash][piece.boff : piece.boff + piece.length]
    assert bytes(got) == bytes(model[off : off + length])


@pytest.mark.parametrize(
    "bad",
    [
        [(0, BLOCK + 1, 0, b"h" * 32)],
        [(-1, 1, 0, b"h" * 32)],
        [(0, 0, 0, b"h" * 32)],
        [(0, 1, 0, b"h" * 31)],
        [(0, 1, 0)],
        [(0, 1, 0, b"h" * 32)] * (PATCHES_MAX + 2),
        7,
    ],
)
def test_parts_that_break_a_rule_are_refused(bad: object) -> None:
    import msgpack

    with pytest.raises(errors.UsageError):
        blocks.decode(msgpack.packb(bad))
    with pytest.raises(errors.UsageError):  # the same bytes are no better when they come again
        blocks.decode(msgpack.packb(bad))


def test_parts_are_the_same_however_often_they_are_decoded() -> None:
    """More than are remembered, each of them twice, as bytes and as a piece of a body."""
    made = [
        (blocks.Part(0, 1 + at, at, os.urandom(32)), blocks.Part(at, 1, 0, b"x" * 32)) for at in range(600)
    ]
    for _ in range(2):
        for parts in made:
            raw = blocks.encode(parts)
            assert raw is not None
            assert blocks.decode(raw) == blocks.decode(raw) == parts
            assert blocks.decode(memoryview(raw)) == parts  # type: ignore[arg-type]


def test_operations_travel_unchanged() -> None:
    sent: list[ops.Op] = [
        ops.Create(1, ops.CREATE, 1, b"n", 7, 0o100644, 0, 0, 0, None, 5),
        ops.Setattr(2, ops.SETATTR, 7, None, 3, None, None, 9, 9),
        ops.Content(5, ops.CONTENT, 7, 0, 3, ((0, b"p"), (1, None)), True, None, 1, 2),
    ]
    assert ops.decode_all(ops.encode_all(sent)) == sent


@pytest.mark.parametrize(
    "row",
    [
        (1, 99),
        (1,),
        (1, ops.LINK, 7, 1, "text", 5),
        (1, ops.LINK, 7, 1, b"n"),
        (1, ops.LINK, True, 1, b"n", 5),
        (1, ops.LINK, 2**63, 1, b"n", 5),
        "no row",
    ],
)
def test_a_malformed_operation_is_a_usage_error(row: object) -> None:
    with pytest.raises(errors.UsageError):
        ops.decode_one(row)


def test_operation_numbers_must_rise() -> None:
    link = ops.Link(2, ops.LINK, 7, 1, b"n", 5)
    with pytest.raises(errors.UsageError):
        ops.decode_all(ops.encode_all([link, link]))


def test_every_error_comes_back_as_itself_over_the_wire() -> None:
    made = errors.from_body(errors.PosixError(errno.ENOTEMPTY, "rmdir /a").body("r1"), 409)
    assert made.errno == errno.ENOTEMPTY
    assert made.request_id == "r1"
    for cls in (errors.Busy, errors.NotFound, errors.SessionForked, errors.NotDrained, errors.TooLarge):
        again = errors.from_body(cls("m", hint="h").body("r2"), cls.status)
        assert type(again) is cls
        assert (again.message, again.hint) == ("m", "h")


@pytest.mark.parametrize("body", [None, "x", [], {}, {"error": "x"}, {"error": {"code": 5}}])
def test_an_answer_that_is_no_error_body_is_unavailable(body: object) -> None:
    assert type(errors.from_body(body, 502)) is errors.Unavailable


def test_error_codes_are_unique() -> None:
    seen: dict[str, type[errors.FsdError]] = {}

    def walk(cls: type[errors.FsdError]) -> None:
        for sub in cls.__subclasses__():
            assert sub.code not in seen or seen[sub.code] is sub, sub
            seen[sub.code] = sub
            walk(sub)

    walk(errors.FsdError)
    assert len(seen) > 15
