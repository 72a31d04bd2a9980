"""Strict JSON: what both sides read from bodies that people and other languages write.

Refused with the field named: duplicate keys, lone surrogates, NaN and Infinity, invalid UTF-8, more than
`DEPTH_MAX` levels. With `exact=True` every number comes back as a `Number` that keeps its text, so that it
can be given back as it was written; `dumps` writes those and everything else compactly.

`read_written` is for the receiver of an answer: numbers are Python's, and still written as they came.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn, TypeAlias

from fsd.model.errors import UsageError

DEPTH_MAX: Final = 64
FOREIGN_DEPTH_MAX: Final = 800  # what one reader's stack took, any other's takes too: Python's ends at 1,000
_SURROGATE = re.compile("[\ud800-\udfff]")
_KEY_SHOWN: Final = 100  # characters of a key in a message
_Place: TypeAlias = "tuple[_Place, str | int] | None"  # what it lies in, and its key or index there
_INT_DIGITS: Final = 600  # int() refuses texts longer than a bound that nobody can set below 640


class Number:
    """A JSON number as written. Equal when the text is equal."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def is_integer(self) -> bool:
        """Written without fraction and exponent."""
        return not any(c in self.text for c in ".eE")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Number({self.text})"


class Written(float):
    """A number Python would show in other digits than it was written with (`1.10`, `1E5`, `-0`, an integer
    of a thousand digits): the nearest double to reckon with, `text` to show."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text


Written.__name__ = "float"  # JMESPath's functions know a number by the name of its type


def loads(raw: bytes | str, what: str, *, exact: bool = False) -> Any:
    """The value in `raw`; raises `UsageError` that names `what` and, where one is to blame, the field."""
    value = _parse(raw, what, Number if exact else None)
    check(value, what)
    return value


def loads_foreign(raw: bytes, what: str) -> Any:
    """As `loads`, for values of others that are given back as they came: lone surrogates stay (JavaScript
    cuts texts anywhere), and there are up to `FOREIGN_DEPTH_MAX` levels."""
    value = _parse(raw, what, None)
    if raw.count(b"[") + raw.count(b"{") > FOREIGN_DEPTH_MAX and _is_deeper(value, FOREIGN_DEPTH_MAX):
        raise UsageError(f"{what} is nested deeper than {FOREIGN_DEPTH_MAX} levels")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    """Whether more than `most` arrays and objects lie inside one another; level by level."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _parse(raw: bytes | str, what: str, number: type[Number] | None) -> Any:
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{what} is not UTF-8") from exc
    try:
        return json.loads(
            text,
            parse_int=number,
            parse_float=number,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except RecursionError as exc:
        raise UsageError(f"{what} is nested deeper than a reader goes") from exc
    except _BadNumberError as exc:
        raise UsageError(f"{what} holds {exc}, which is no JSON number") from exc
    except _DuplicateError as exc:
        raise UsageError(f"{what} has the field {exc} twice") from exc
    except ValueError as exc:
        raise UsageError(f"{what} is not JSON: {exc}") from exc


def loads_object(raw: bytes, what: str, *, exact: bool = False) -> dict[str, Any]:
    """As `loads`, for a body that is an object; an empty body is the empty object."""
    value = loads(raw, what, exact=exact) if raw.strip() else {}
    if not isinstance(value, dict):
        raise UsageError(f"{what} is not a JSON object")
    return value


def dumps(value: Any) -> str:
    """Compact JSON of `value`; numbers read with `exact=True` as they were written, keys in their order."""
    out: list[str] = []
    _write(value, out)
    return "".join(out)


def read_written(raw: bytes | str) -> Any:
    """The value in `raw` with every number that would change its digits as `Written`; raises `ValueError`.

    For text a strict reader has accepted already: nothing else is checked.
    """
    try:
        return json.loads(raw, parse_int=_written_int, parse_float=_written_float)
    except RecursionError as exc:
        raise ValueError("it is nested too deep") from exc


def show(value: Any, indent: int | None = None) -> str:
    """JSON of what `read_written` gave, or of any value, laid out as `json.dumps` does it; what JSON does not
    know as its text."""
    out: list[str] = []
    _show(value, indent, "\n", out)
    return "".join(out)


def check(value: Any, where: str) -> None:
    """Raise `UsageError` naming the field for a lone surrogate or too deep a nesting in `value`.

    A place is the keys that lead to it and becomes text only where something is wrong there: as a text for
    each value, a long key above a long list would cost their product."""
    stack: list[tuple[Any, _Place, int]] = [(value, None, 0)]
    while stack:
        item, place, depth = stack.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                raise UsageError(f"{_shown(where, place)} holds a lone surrogate, which no UTF-8 can carry")
        elif isinstance(item, (dict, list)):
            if depth >= DEPTH_MAX:
                raise UsageError(f"{where} is nested deeper than {DEPTH_MAX} levels")
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, inner in pairs:
                if isinstance(key, str) and _SURROGATE.search(key):
                    raise UsageError(f"a field name in {_shown(where, place)} holds a lone surrogate")
                if isinstance(inner, (str, dict, list)):
                    stack.append((inner, (place, key), depth + 1))


def step(key: str | int) -> str:
    """A key or an index as it stands in the name of a field; of a long key its beginning."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if len(key) <= _KEY_SHOWN else f".{key[:_KEY_SHOWN]}…"


def _shown(where: str, place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, key = place
        steps.append(step(key))
    return where + "".join(reversed(steps))


class _DuplicateError(Exception):
    pass


class _BadNumberError(Exception):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _BadNumberError(name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateError(repr(key))
            seen.add(key)
    return made


def _write(value: Any, out: list[str]) -> None:
    if isinstance(value, (Number, Written)):
        out.append(value.text)
    elif isinstance(value, dict):
        out.append("{")
        for at, (key, inner) in enumerate(value.items()):
            out.append("," if at else "")
            out.append(json.dumps(key, ensure_ascii=False))
            out.append(":")
            _write(inner, out)
        out.append("}")
    elif isinstance(value, (list, tuple)):
        out.append("[")
        for at, inner in enumerate(value):
            out.append("," if at else "")
            _write(inner, out)
        out.append("]")
    else:
        out.append(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _written_float(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else Written(text)


def _written_int(text: str) -> int | Written:
    return Written(text) if len(text) > _INT_DIGITS or text == "-0" else int(text)


def _show(value: Any, indent: int | None, line: str, out: list[str]) -> None:
    """`line` begins a line at the depth of `value`."""
    if isinstance(value, Written):
        out.append(value.text)
    elif isinstance(value, (dict, list, tuple)) and value:
        inner = line + " " * (indent or 0)
        between = ", " if indent is None else "," + inner
        named = isinstance(value, dict)
        out.append(("{" if named else "[") + ("" if indent is None else inner))
        for at, key in enumerate(value):
            out.append(between if at else "")
            if named:
                out.append(json.dumps(str(key), ensure_ascii=False) + ": ")
            _show(value[key] if named else key, indent, inner, out)
        out.append(("" if indent is None else line) + ("}" if named else "]"))
    else:
        out.append(json.dumps(value, ensure_ascii=False, default=str))
