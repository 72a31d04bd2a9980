"""What reaches stdout and stderr: documents, text, errors.

A handler returns a `Document` (a JSON value, perhaps an error beside it) or `Raw` (it wrote bytes itself).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fsd.model.errors import FsdError, UsageError
from fsd.model.plain import dataclass
from fsd.wire.strictjson import show

# What a terminal would obey rather than show, line breaks and tabs apart.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Document:
    """The one JSON value a command answers. `text` renders it for people. With `error` the value is printed
    all the same and the command ends as that error says."""

    value: Any
    text: Callable[[Any], str] | None = None
    error: FsdError | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Raw:
    """The handler wrote what there was to write."""

    exit_code: int = 0


Result = Document | Raw


def render(document: Document, format: str, query: str | None) -> str:
    """The text for stdout. Raises `UsageError` for a bad query."""
    value = document.value
    if query is not None:
        value = search(query, value)
    if format == "json":
        return show(value, indent=2) + "\n"
    if query is None and document.text is not None:
        return visible(document.text(value))  # names, hosts and labels are whoever's who has a token
    return plain(value)


def check_query(query: str) -> None:
    """Raises `UsageError` when `query` is no JMESPath expression."""
    import jmespath

    try:
        jmespath.compile(query)
    except jmespath.exceptions.JMESPathError as exc:
        raise _bad_query(query, exc, "") from exc


def search(query: str, value: Any) -> Any:
    """JMESPath `query` on `value`; raises `UsageError` when it cannot be applied."""
    import jmespath

    try:
        return jmespath.search(query, value)
    except jmespath.exceptions.JMESPathError as exc:
        raise _bad_query(query, exc, "the command itself was done") from exc


def _bad_query(query: str, exc: Exception, hint: str) -> UsageError:
    reason = str(exc).splitlines()[0].rstrip(":") if str(exc) else "invalid expression"
    return UsageError(f"--query {query!r}: {reason}", hint=hint)


def scalar(value: Any) -> str:
    """One value bare."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, list)):
        return show(value)
    return str(value)


def plain(value: Any) -> str:
    """The text form of any JSON value: scalar, list of scalars, table, key and value."""
    if isinstance(value, Mapping):
        lists = [k for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], Mapping)]
        pairs = [f"{k}\t{_cell(v)}" for k, v in value.items() if k not in lists]
        tables = [table(value[k]) for k in lists]
        return "".join(line + "\n" for line in pairs) + "".join(tables)
    if isinstance(value, list):
        if any(isinstance(v, Mapping) for v in value):
            return table([v if isinstance(v, Mapping) else {"value": v} for v in value])
        return "".join(scalar(v) + "\n" for v in value)
    return scalar(value) + "\n"


def _cell(value: Any) -> str:
    """A value inside a table or beside a key: one line."""
    if isinstance(value, Mapping):
        return " ".join(f"{k}={_cell(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ",".join(_cell(v) for v in value)
    return visible(scalar(value)).replace("\n", " ").replace("\t", " ")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows of objects; columns sorted by name unless given."""
    if columns is None:
        columns = sorted({key for row in rows for key in row})
    cells = [[_cell(row.get(c)) if c in row else "" for c in columns] for row in rows]
    return align([list(columns), *cells])


def align(lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two blanks between; trailing blanks cut."""
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    made = ("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)
    return "".join(line + "\n" for line in made)


def columns(names: Sequence[str], key: str) -> Callable[[Any], str]:
    """A renderer: the list under `key` as a table with these columns, in this order."""

    def render_rows(value: Any) -> str:
        return table(value[key], names)

    return render_rows


def lines_of(items: Iterable[str]) -> str:
    return "".join(f"{item}\n" for item in items)


def visible(text: str) -> str:
    """Text from elsewhere made safe for a terminal: control characters become escapes, line breaks and
    tabs apart."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def error_text(error: FsdError, redact: Callable[[str], str]) -> str:
    """The message for people: what failed, which thing, what to do."""
    lines = [f"fsd [ERROR]: {error.message}"]
    if error.hint:
        lines.append(f"  {error.hint}")
    if error.request_id:
        lines.append(f"  request id {error.request_id}")
    return visible(redact("\n".join(lines))) + "\n"


def error_json(error: FsdError, redact: Callable[[str], str]) -> str:
    """One line of JSON for programs."""
    body = error.body(error.request_id or "")
    text = json.dumps(body, ensure_ascii=True, default=str)
    return redact(text) + "\n"
