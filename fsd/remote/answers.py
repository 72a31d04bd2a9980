"""Received namespace answers as `Attr` and `Entry` objects, one form for each kind of question.

Everything that has not the form it must have is `Unavailable`: a changed or cut answer is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fsd.model.attrs import Attr, Entry
from fsd.model.blocks import Parts
from fsd.model.blocks import decode as decode_parts
from fsd.model.errors import FsdError, Unavailable, UsageError
from fsd.model.limits import DIR_INLINE_MAX, NS_BATCH_MAX, NS_ENTRIES_MAX
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE, unpackb
from fsd.wire.received import attr_from, entry_from

_COUNT_MAX: Final = 2**62
_TABLES: Final = 2 * NS_ENTRIES_MAX  # each inode may have one, of its attributes


def _entries(rows: Any, most: int) -> list[Entry]:
    if len(_rows(rows)) > most:
        raise Unavailable("an answer about the namespace has more entries than were asked for")
    return [entry_from(row) for row in rows]


def _named(row: Any, name: Any) -> Entry:
    made = entry_from(row)
    if made.name != name:
        raise Unavailable("the answer about a name is about another one")
    return made


def _rows(value: Any, length: int | None = None) -> tuple[Any, ...]:
    if type(value) is not tuple or (length is not None and len(value) != length):
        raise Unavailable("an answer about the namespace cannot be read")
    return value


def _lookup(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    entry, listing = _rows(answer, 2)
    return (
        None if entry is None else _named(entry, question[2]),
        None if listing is None else _entries(listing, question[3]),
    )


def _list(question: Sequence[Any], answer: Any) -> Any:
    """Names rise from one page to the next, or whoever asks for page after page would never end."""
    if answer is None:
        return None
    rows, more = _rows(answer, 2)
    entries, before = _entries(rows, question[3]), question[2]
    for entry in entries:
        if entry.name <= before:
            raise Unavailable("the names of a directory in the answer are out of order")
        before = entry.name
    return entries, bool(more)


def _attrs(question: Sequence[Any], answer: Any) -> Any:
    rows = _rows(answer, len(question[1]))
    return [None if row is None else _numbered(row, ino) for row, ino in zip(rows, question[1])]


def _numbered(row: Any, ino: Any) -> Attr:
    made = attr_from(row)
    if made.ino != ino:
        raise Unavailable("the answer about an inode is about another one")
    return made


def _blocks(question: Sequence[Any], answer: Any) -> Any:
    """Blocks come decoded."""
    if answer is None:
        return None
    cseq, rows = _rows(answer, 2)
    first, count = question[2:]
    if type(cseq) is not int or cseq < 0 or len(_rows(rows)) > count:
        raise Unavailable("the answer about a file's blocks cannot be read")
    found = []
    for row in rows:
        index, parts = _rows(row, 2)
        if type(index) is not int or not first <= index < first + count:
            raise Unavailable("a block in the answer was not asked for")
        found.append((index, _parts(parts)))
    return cseq, found


def _parts(raw: Any) -> Parts:
    if raw is not None and type(raw) is not bytes:
        raise Unavailable("a block in the answer cannot be read")
    try:
        return decode_parts(raw)
    except FsdError as exc:
        raise Unavailable("a block in the answer cannot be read") from exc


def _tree(question: Sequence[Any], answer: Any) -> Any:
    if answer is None:
        return None
    found: list[tuple[int, list[Entry]]] = []
    left = max(question[2], DIR_INLINE_MAX)  # the first directory may be larger than what is asked for
    for row in _rows(answer):
        ino, rows = _rows(row, 2)
        if type(ino) is not int or (not found and ino != question[1]):
            raise Unavailable("a directory in the answer cannot be read")
        found.append((ino, _entries(rows, left)))
        left -= len(rows)
    return found


def _path(question: Sequence[Any], answer: Any) -> Any:
    rows = _rows(answer, len(question[1]))
    return [None if row is None else _named(row, name) for row, name in zip(rows, question[1])]


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
        body = unpackb(raw, "the answer", _TABLES)
        seq, rows = body["seq"], body["answers"]
    except (UsageError, KeyError, TypeError, IndexError) as exc:
        raise Unavailable("the answer to a question is no answer (cut or changed on the way)") from exc
    if type(seq) is not int or not 0 <= seq < _COUNT_MAX or len(_rows(rows)) != len(questions):
        raise Unavailable("the answer to a question does not answer it")
    return seq, [_FORMS[q[0]](q, row) for q, row in zip(questions, rows)]
