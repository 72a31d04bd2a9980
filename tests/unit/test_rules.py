"""The rules on a view in memory, without a database: what they read, and what they leave alone."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Sequence

import pytest

from fsd.model import ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.blocks import Part, decode, encode
from fsd.model.limits import BLOCK, PATCHES_MAX
from fsd.model.ops import Content, Create, Rename, Unlink
from fsd.service.decide import apply
from fsd.service.rules import NeedFull, Rules
from fsd.service.rules_content import NeedFold
from fsd.service.view import Block, GoneFile, Name, NameKey, Node, View

ME, OTHER = 3, 4
F = make_ino(OTHER, 1)


class Memory:
    """A `Source` over dictionaries; counts the calls."""

    def __init__(self) -> None:
        self.node_rows: dict[int, Node] = {}
        self.name_rows: dict[NameKey, Name] = {}
        self.block_rows: dict[tuple[int, int], bytes] = {}
        self.calls: list[str] = []

    def nodes(self, inos: Sequence[int]) -> list[Node]:
        self.calls.append("nodes")
        return [self.node_rows[ino] for ino in inos if ino in self.node_rows]

    def names(self, keys: Sequence[NameKey]) -> list[Name]:
        self.calls.append("names")
        return [self.name_rows[key] for key in keys if key in self.name_rows]

    def names_of(self, ino: int) -> list[Name]:
        self.calls.append("names_of")
        return [name for name in self.name_rows.values() if name.orig_ino == ino]

    def child_counts(self, parents: Sequence[int]) -> dict[int, int]:
        self.calls.append("child_counts")
        counts: dict[int, int] = {}
        for parent, _ in self.name_rows:
            counts[parent] = counts.get(parent, 0) + 1
        return {parent: counts[parent] for parent in parents if parent in counts}

    def blocks(self, ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, bytes, int]]:
        self.calls.append("blocks")
        return [
            (ino, idx, parts, 5)
            for (ino, idx), parts in self.block_rows.items()
            if any(ino == one and first <= idx <= last for one, first, last in ranges)
        ]

    def gone(self, ino: int) -> GoneFile | None:
        self.calls.append("gone")
        return None


def part(size: int, mark: int = 1, off: int = 0) -> Part:
    return Part(off, size, 0, bytes([mark]) * 32)


def file(ino: int, size: int, parts: tuple[Part, ...], *, cseq: int = 5, writer: int = OTHER) -> Node:
    return Node(
        ino,
        stat.S_IFREG | 0o644,
        1,
        0,
        0,
        size,
        1,
        1,
        1,
        0,
        None,
        0,
        encode(parts),
        None,
        cseq,
        writer,
        cseq,
        5,
    )


def make(*files: tuple[bytes, Node], folds: bool = True) -> tuple[Memory, View, Rules]:
    memory = Memory()
    memory.node_rows[ROOT_INO] = Node(
        ROOT_INO, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 1, 1, 1, 0, None, ROOT_INO, None, None, 0, 0, 0, 0
    )
    for name, node in files:
        memory.node_rows[node.ino] = node
        memory.name_rows[ROOT_INO, name] = Name(ROOT_INO, name, node.ino, OTHER, 5)
    numbers = itertools.count(make_ino(9, 1))
    view = View(memory, 6, lambda: next(numbers))
    return memory, view, Rules(view, me=ME, mount="m", folds={} if folds else None)


def content(
    size: int, parts: tuple[Part, ...], base: int, *, full: bool = False, appended: int | None = None
) -> Content:
    return Content(1, ops.CONTENT, F, base, size, ((0, encode(parts)),), full, appended, 9, 9)


def snapshot(view: View) -> object:
    nodes = {
        ino: tuple(getattr(node, slot) for slot in Node.__slots__)
        for ino, node in view.node_map.items()
        if node is not None
    }
    names = {key: (name.ino, name.touched) for key, name in view.name_map.items() if name.ino or name.touched}
    return nodes, names


def test_many_operations_are_loaded_in_a_few_calls() -> None:
    memory, view, rules = make(
        *((b"f%d" % at, file(make_ino(OTHER, at + 1), 3, (part(3),))) for at in range(100))
    )
    batch: list[ops.Op] = [
        Unlink(at + 1, ops.UNLINK, ROOT_INO, b"f%d" % at, make_ino(OTHER, at + 1), 5, 9) for at in range(50)
    ]
    batch += [
        Create(
            at + 100, ops.CREATE, ROOT_INO, b"n%d" % at, make_ino(ME, at + 1), stat.S_IFREG, 0, 0, 0, None, 9
        )
        for at in range(50)
    ]
    view.prefetch(batch, {})
    assert all(apply(rules, op) is None for op in batch)
    assert memory.calls == ["nodes", "names"]


def test_need_full_leaves_the_view_alone() -> None:
    _, view, rules = make((b"f", file(F, 3, (part(3),))))
    view.prefetch([op := content(4, (part(4, 2),), 4)], {})
    before = snapshot(view)
    with pytest.raises(NeedFull):
        apply(rules, op)
    assert snapshot(view) == before


def test_a_refusal_leaves_the_view_alone() -> None:
    _, view, rules = make((b"f", file(F, 3, (part(3),))))
    op = Rename(1, ops.RENAME, ROOT_INO, b"gone", 77, ROOT_INO, b"x", 0, 0, 0, 9)
    view.prefetch([op], {})
    before = snapshot(view)
    outcome = apply(rules, op)
    assert outcome is not None
    assert outcome.status == ops.REFUSED
    assert snapshot(view) == before


def test_an_own_newer_version_is_no_conflict() -> None:
    _, view, rules = make((b"f", file(F, 3, (part(3),), writer=ME)))
    assert apply(rules, content(4, (part(4, 2),), 1)) is None
    node = view.node(F)
    assert node is not None
    assert (node.cseq, node.writer, node.size) == (6, ME, 4)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_truncation_keeps_exactly_what_lies_before(size: int) -> None:
    memory, view, rules = make((b"f", file(F, 3 * BLOCK, (part(BLOCK, 1),), writer=ME)))
    memory.block_rows = {(F, idx): encode((part(BLOCK, 1 + idx),)) or b"" for idx in (1, 2)}
    assert apply(rules, Content(1, ops.CONTENT, F, 5, size, (), False, None, 9, 9)) is None
    node = view.node(F)
    assert node is not None
    rows: dict[int, Block] = view.blocks(node, (), 1)
    stored = {0: node.parts} | {idx: row.parts for idx, row in rows.items()}
    kept = {idx: sum(p.length for p in decode(raw)) for idx, raw in stored.items() if raw is not None}
    wanted = {idx: min(BLOCK, size - idx * BLOCK) for idx in range(3) if size > idx * BLOCK}
    assert kept == wanted
    if size >= 2 * BLOCK:
        assert not rows.get(1, Block(None, -1)).touched, "a block that stays is not written"


def test_appends_share_a_block_until_it_must_be_folded() -> None:
    many = tuple(part(1, 1, at) for at in range(PATCHES_MAX + 1))
    _, view, rules = make((b"f", file(F, len(many), many)))
    node = view.node(F)
    assert node is not None
    node.grown = 1
    op = content(3, (part(3, 2),), 1, appended=2)
    with pytest.raises(NeedFold) as caught:
        apply(rules, op)
    assert caught.value.parts == many
    assert rules.folds is not None
    rules.folds[many] = (part(len(many), 7),)
    outcome = apply(rules, op)
    assert outcome is not None
    assert (outcome.ino, outcome.name) == (F, b"")
    assert decode(node.parts) == (part(len(many), 7), Part(len(many), 1, 2, bytes([2]) * 32))
    assert (node.size, node.writer) == (len(many) + 1, 0)


def test_without_folding_an_append_becomes_a_copy() -> None:
    _, view, rules = make((b"f", file(F, 2, (part(2),))), folds=False)
    node = view.node(F)
    assert node is not None
    node.grown = 1
    outcome = apply(rules, content(3, (part(3, 2),), 1, full=True, appended=2))
    assert outcome is not None
    assert outcome.ino == make_ino(9, 1)
    assert outcome.name.startswith(b"f.conflict-m-")
    assert node.size == 2
