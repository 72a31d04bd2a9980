"""`fsd grep`: lines of remote files that a regular expression matches, read by path; no mount is needed.

The expression is Python's and the caller's own: what it costs, it costs here. Files are read in parallel and
told in the order of `find`. A file with a NUL in its first piece is binary and left out.
"""

from __future__ import annotations

import base64
import re
from functools import partial
from itertools import chain, islice
from typing import Final

from fsd.client.files import Files, FindFilter, JsonObject, raw_path
from fsd.client.pool import Workers
from fsd.model.errors import Conflict, NotFound, UsageError
from fsd.model.limits import COPY_PARALLEL, GREP_LINE_MAX, GREP_LINE_SHOWN, GREP_TRIES
from fsd.model.names import show
from fsd.model.plain import dataclass, field

_BATCH: Final = 64  # files between two looks at the limit


@dataclass(slots=True)
class Found:
    """`matches` in the order of paths and lines; `truncated`: there may be more."""

    matches: list[JsonObject] = field(default_factory=list)
    files: int = 0
    binary: int = 0
    truncated: bool = False


def compiled(pattern: str, *, ignore_case: bool) -> re.Pattern[str]:
    """Raises `UsageError` for what is no regular expression."""
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as exc:
        raise UsageError(
            f"{pattern!a} is no regular expression: {exc}",
            hint="a backslash takes a sign literally",
        ) from exc


def grep(api: Files, top: bytes, pattern: re.Pattern[str], limit: int) -> Found:
    """At most `limit` matching lines of the files below `top`, or of the file `top`. A link is followed where
    it is `top`, and no other one; paths are told as they are without it."""
    found = Found()
    about = api.stat(top, follow=True)
    files = iter([about]) if about["kind"] == "file" else api.find(raw_path(about), FindFilter(kind="file"))
    while batch := list(islice(files, _BATCH)):
        _search(api, [raw_path(one) for one in batch], pattern, limit, found)
        if len(found.matches) >= limit:
            found.truncated = len(found.matches) > limit or next(files, None) is not None
            del found.matches[limit:]
            break
    return found


def _search(api: Files, paths: list[bytes], pattern: re.Pattern[str], limit: int, found: Found) -> None:
    """One batch, to its end."""
    lines: dict[int, list[JsonObject] | None] = {}

    def look(at: int, path: bytes) -> None:
        for left in reversed(range(GREP_TRIES)):
            try:
                lines[at] = _lines_of(api, path, pattern, limit + 1)
                return
            except NotFound:
                lines[at] = []  # removed since it was found
                return
            except Conflict:
                if not left:
                    raise  # whoever writes it does nothing else

    with Workers(min(COPY_PARALLEL, len(paths))) as workers:
        for at, path in enumerate(paths):
            workers.submit(partial(look, at, path))
    for at in range(len(paths)):
        matches = lines[at]
        found.files += matches is not None
        found.binary += matches is None
        found.matches += matches or []


def _lines_of(api: Files, path: bytes, pattern: re.Pattern[str], limit: int) -> list[JsonObject] | None:
    """The matching lines of a file, at most `limit`; None: it is binary."""
    matches: list[JsonObject] = []
    rest, number, first = b"", 1, True
    going_on = matched = False  # the first line is the rest of one searched in part; and it matched there
    for piece in chain(api.read(path), (b"",)):
        if first and b"\0" in piece:
            return None
        first = False
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        cut = len(rest) > GREP_LINE_MAX
        if cut or (rest and not piece):  # nothing behind the last line's end is no line
            lines.append(rest)
        for at, line in enumerate(lines):
            if at or not going_on:
                matched = False
            elif matched or not line:
                continue
            if pattern.search(line.removesuffix(b"\r").decode("utf-8", "surrogateescape")):
                matched = True
                matches.append(_told(path, number + at, line.removesuffix(b"\r")))
                if len(matches) >= limit:
                    return matches
        number += len(lines) - cut
        rest, going_on = (b"", True) if cut else (rest, going_on and not lines)
    return matches


def _shown(line: bytes) -> bytes:
    """What is told of a line, cut between characters."""
    end = min(len(line), GREP_LINE_SHOWN)
    for at in range(end, max(0, end - 4), -1):
        if at == len(line) or line[at] & 0xC0 != 0x80:
            return line[:at]
    return line[:end]


def _told(path: bytes, number: int, line: bytes) -> JsonObject:
    shown = _shown(line)
    made: JsonObject = {"path": show(path), "line": number, "text": show(shown)}
    for name, raw in (("path", path), ("text", shown)):
        try:
            raw.decode()
        except UnicodeDecodeError:
            made[f"{name}_b64"] = base64.b64encode(raw).decode()
    return made
