"""What arrives from a server is what it says it is, or no answer: each field of each row at its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from fsd.model.attrs import Attr, Entry
from fsd.model.blocks import Part, encode
from fsd.model.errors import Unavailable, UsageError
from fsd.model.limits import DIR_INLINE_MAX, DRAIN_MAX, FILE_MAX
from fsd.remote.answers import read_answers
from fsd.wire import messages
from fsd.wire.received import attr_from, entry_from

PARTS = encode((Part(0, 4, 0, b"h" * 32),))
GOOD = Attr(5, 0o100644, 1, 0, 0, 4, -1, 2**62, 0, 0, None, 0, PARTS, {b"user.a": b"v" * 65536}, 3, 2, 3)
LINK = GOOD._replace(mode=0o120777, target=b"t" * 4095, parts=None, xattrs=None)


def sent(value: Any) -> Any:
    """As it comes out of a body."""
    return msgpack.unpackb(msgpack.packb(value), raw=False, use_list=False)


@pytest.mark.parametrize(
    "attr", [GOOD, LINK, GOOD._replace(size=FILE_MAX, uid=2**32 - 1, ino=2**63 - 1, xattrs=None)]
)
def test_what_can_be_comes_as_it_was_sent(attr: Attr) -> None:
    assert attr_from(sent(attr)) == attr
    assert entry_from(sent((b"n" * 255, attr, 7))) == Entry(b"n" * 255, attr, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"ino": value} for value in (0, -1, 2**63, "5", None, 1.0)),
        *({"mode": value} for value in (0, 0o644, 0o170000, 0o200000 + 0o100644, -1, None)),
        *({name: value} for name in ("nlink", "uid", "gid") for value in (-1, 2**32, b"0")),
        *({"size": value} for value in (-1, FILE_MAX + 1, 2**64 - 1)),
        *({name: value} for name in ("atime", "mtime", "ctime") for value in (2**63, None, "0")),
        *(
            {name: value}
            for name in ("rdev", "parent", "cseq", "writer", "born")
            for value in (-1, 2**63, ())
        ),
        *({"target": value} for value in (b"t", "t", 5)),
        *(
            {"parts": value}
            for value in (b"", b"\xc1", b"\x91\x94\x00\x00\x00\xc4\x01h", 5, encode(()) or "x")
        ),
        *(
            {"xattrs": value}
            for value in ((), {"a": b"v"}, {b"a": "v"}, {b"": b"v"}, {b"a\0": b""}, {b"a": None})
        ),
        {"xattrs": {b"a": b"v" * 65537}},
        {"xattrs": {b"%d" % number: b"v" * 30_000 for number in range(3)}},
    ],
)
def test_an_inode_that_cannot_be_is_no_answer(wrong: dict[str, Any]) -> None:
    with pytest.raises(Unavailable):
        attr_from(sent(GOOD._replace(**wrong)))


@pytest.mark.parametrize("target", [None, b"", b"a\0b", b"t" * 4096, "t"])
def test_a_link_has_a_target_that_can_be(target: Any) -> None:
    with pytest.raises(Unavailable):
        attr_from(sent(LINK._replace(target=target)))


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"a\0", b"n" * 256, "n", None, 5])
def test_a_name_that_is_none_is_no_answer(name: Any) -> None:
    with pytest.raises(Unavailable):
        entry_from(sent((name, GOOD, 7)))
    raw = messages.packb((9, ((9, 1, (), ((1, name),)),), False))
    with pytest.raises(Unavailable):
        messages.read_feed(raw)


def entries(*names: bytes) -> list[Any]:
    return [(name, GOOD, 1) for name in names]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (("lookup", 1, b"a", 0), (entries(b"b")[0], None)),
        (("lookup", 1, b"a", 0), (None, entries(b"a"))),
        (("list", 1, b"b", 10), (entries(b"b"), True)),
        (("list", 1, b"", 10), (entries(b"b", b"a"), True)),
        (("list", 1, b"", 10), (entries(b"a", b"a"), False)),
        (("list", 1, b"", 1), (entries(b"a", b"b"), False)),
        (("attrs", (6,)), [GOOD]),
        (("attrs", (5, 6)), [GOOD]),
        (("blocks", 5, 10, 2), (3, [(12, None)])),
        (("blocks", 5, 10, 2), (3, [(9, None)])),
        (("blocks", 5, 10, 2), (-1, [])),
        (("blocks", 5, 10, 2), (3, [(10, b"\xc1")])),
        (("blocks", 5, 10, 2), (3, [(10, None)] * 3)),
        (("tree", 1, 10), [(2, entries(b"a"))]),
        (("tree", 1, 10), [(1, [(b"a", GOOD._replace(xattrs=None), 1)] * (DIR_INLINE_MAX + 1))]),
        (("path", (b"a", b"b")), [*entries(b"a"), *entries(b"a")]),
    ],
)
def test_an_answer_to_another_question_is_none(question: Sequence[Any], answer: Any) -> None:
    with pytest.raises(Unavailable):
        read_answers([tuple(question)], messages.packb({"seq": 1, "answers": [answer]}))


def test_a_body_full_of_tables_is_not_taken_apart() -> None:
    raw = b"\x82\xa3seq\x01\xa7answers\xdc\x00\x01\xdd" + (60_000).to_bytes(4, "big") + b"\x80" * 60_000
    with pytest.raises(UsageError):
        messages.unpackb(raw, "an answer", 50_000)
    flat = b"\xdd" + (70_000).to_bytes(4, "big") + b"\xc0" * 70_000
    with pytest.raises(UsageError):
        messages.unpackb(flat, "an answer", 50_000)
    for read in (messages.read_answer, messages.read_feed):
        with pytest.raises(Unavailable):
            read(b"\x93\x09\xdd" + (60_000).to_bytes(4, "big") + b"\x80" * 60_000 + b"\xc2")


ANSWER = (4, b"t", 9, ((3, "conflict", 0, 7, 1, b"n", "lost"),), (b"h" * 32,), 0)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, value) for value in (-1, 2**62, None)),
        *((1, value) for value in ("t", b"t" * 65, None)),
        *((2, value) for value in (-1, 1.5)),
        *((3, value) for value in (5, ((3, "conflict", 0, 7, 1, b"n"),), ((3, "done", 0, 7, 1, b"n", ""),))),
        *((3, ((3, "refused", *row),)) for row in ((-1, 7, 1, b"n", ""), (0, None, 1, b"n", ""))),
        *((3, ((3, "refused", *row),)) for row in ((0, 7, 1, b"../n", ""), (0, 7, 1, b"n", b""))),
        *((4, value) for value in (5, (5,), (b"h",), ("h" * 32,))),
        *((5, value) for value in (-1, None)),
    ],
)
def test_an_answer_to_a_commit_that_cannot_be_is_none(at: int, value: Any) -> None:
    assert messages.read_answer(messages.packb(ANSWER)).outcomes[0].name == b"n"
    with pytest.raises(Unavailable):
        messages.read_answer(messages.packb((*ANSWER[:at], value, *ANSWER[at + 1 :])))


PAGE = (9, ((9, 1, (5,), ((1, b"n"),)),), False, ((4, 1, 2, "somebody", True),), ((3, 10),), (9, 4), (9, 1))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((0, value) for value in (-1, None)),
        *((1, value) for value in (5, ((9, 1, (5,)),), ((-1, 1, (5,), ()),), ((9, 1, (None,), ()),))),
        *((1, ((9, 1, (5,), names),)) for names in (5, (b"n",), ((None, b"n"),), ((1, b"n", 2),))),
        *((3, (row,)) for row in ((4, 1, 2, b"x", True), (4, 1, 2, "x", 1), (-1, 1, 2, "x", True), (4, 1))),
        *((4, (row,)) for row in ((3, -1), (3, None), (None, 10), (3,), 3)),
        *((5, value) for value in ((-1, 4), (4,), 5)),
        *((6, value) for value in ((-1, 4), 5)),
    ],
)
def test_a_page_of_the_feed_that_cannot_be_is_none(at: int, value: Any) -> None:
    assert messages.read_feed(messages.packb(PAGE)).asks[0].left_ms == 10 < 1000 * DRAIN_MAX
    with pytest.raises(Unavailable):
        messages.read_feed(messages.packb((*PAGE[:at], value, *PAGE[at + 1 :])))


@pytest.mark.parametrize("said", [1000 * DRAIN_MAX + 1, 2**40])
def test_a_barrier_that_a_clock_behind_makes_too_long_costs_no_page(said: float) -> None:
    """The replica that asked for it and the one that tells of it have clocks of their own."""
    page = messages.read_feed(messages.packb((*PAGE[:4], ((3, int(said)),), *PAGE[5:])))
    assert page.asks == ((3, 1000 * DRAIN_MAX),)
    assert page.changes == PAGE[1]
