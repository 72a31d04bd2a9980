"""Received namespace answers as `Attr` and `Entry` objects, one form for each kind of question.

Everything that has not the form it must have is `Unavailable`: a changed or cut answer is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsd.model.attrs import Entry
from fsd.model.errors import Unavailable, UsageError
from fsd.model.limits import NS_BATCH_MAX
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE, attr_from, entry_from, unpackb


def _entries(rows: Any) -> list[Entry]:
    return [entry_from(row) for row in _rows(rows)]


def _rows(value: Any, length: int | None = None) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or (length is not None and len(value) != length):
        raise Unavailable("an answer about the namespace cannot be read")
    return value


def _lookup(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    entry, listing = _rows(answer, 2)
    return (
        None if entry is None else entry_from(entry),
        None if listing is None else _entries(listing),
    )


def _list(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    rows, more = _rows(answer, 2)
    return _entries(rows), bool(more)


def _attrs(question: Sequence[Any], answer: Any) -> Any:
    rows = _rows(answer, len(question[1]))
    return [None if row is None else attr_from(row) for row in rows]


def _blocks(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    cseq, rows = _rows(answer, 2)
    found = []
    for row in _rows(rows):
        index, parts = _rows(row, 2)
        if type(index) is not int or not (parts is None or isinstance(parts, bytes)):
            raise Unavailable("a block in the answer cannot be read")
        found.append((index, parts))
    if type(cseq) is not int:
        raise Unavailable("a content version in the answer cannot be read")
    return cseq, found


def _tree(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    found = []
    for row in _rows(answer):
        ino, rows = _rows(row, 2)
        if type(ino) is not int:
            raise Unavailable("a directory in the answer cannot be read")
        found.append((ino, _entries(rows)))
    return found


def _path(question: Sequence[Any], answer: Any) -> Any:
    rows = _rows(answer, len(question[1]))
    return [None if row is None else entry_from(row) for row in rows]


_FORMS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    LOOKUP: _lookup,
    LIST: _list,
    ATTRS: _attrs,
    BLOCKS: _blocks,
    TREE: _tree,
    PATH: _path,
}


def check_questions(questions: Sequence[tuple[Any, ...]]) -> None:
    """Raises `UsageError` for what must not be sent: our own defect, told before the wire."""
    if not 0 < len(questions) <= NS_BATCH_MAX:
        raise UsageError(f"{len(questions)} questions at once, 1 to {NS_BATCH_MAX} are possible")
    for question in questions:
        if question[0] not in _FORMS:
            raise UsageError(f"an unknown question {question[0]!r}")


def read_answers(questions: Sequence[tuple[Any, ...]], raw: bytes) -> tuple[int, list[Any]]:
    """(seq, answers in the order of `questions`); raises `Unavailable`."""
    try:
        body = unpackb(raw, "the answer")
        seq, rows = body["seq"], body["answers"]
    except (UsageError, KeyError, TypeError, IndexError) as exc:
        raise Unavailable("the answer to a question is no answer (cut or changed on the way)") from exc
    if type(seq) is not int or len(_rows(rows)) != len(questions):
        raise Unavailable("the answer to a question does not answer it")
    return seq, [_FORMS[q[0]](q, row) for q, row in zip(questions, rows)]
