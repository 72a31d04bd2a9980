"""Commands that take several paths: each for itself, as `rm`, `mkdir` and `ls` of a system do.

One path prints what it always printed. Of several, `results` holds what each alone would print and `failed`
what went wrong; a path that fails is told and does not keep the others from being done, and the command ends
as the first failure says.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli.context import Context, remote_path
from fsd.cli.output import Document
from fsd.cli.table import Flag, operand
from fsd.model.errors import FsdError, NotAuthenticated, Unavailable

_OF_ALL: Final = (Unavailable, NotAuthenticated)  # the other paths would get the same answer


def others(position: int) -> Flag:
    """The operands behind a command's first path."""
    return operand("others", "further paths, each for itself", metavar="PATH", position=position, many=True)


def paths(args: SimpleNamespace) -> list[str]:
    """All of them, as typed. Raises `UsageError` where one is wrong: it is told before anything is done."""
    asked = [args.path, *getattr(args, "others", [])]
    for path in asked:
        remote_path(path)
    return asked


def each(
    context: Context, args: SimpleNamespace, one: Callable[[str], Document], *, titles: bool = False
) -> Document:
    """`one` of every path. With `titles` the text of several names each path above what is printed of it."""
    asked = paths(args)
    if len(asked) == 1:
        return one(asked[0])
    done, failed, first = tried(context, asked, one)

    def text(value: Any) -> str:
        parts = []
        for path, document in done:
            shown = document.text(document.value) if document.text is not None else ""
            parts.append(f"{path}:\n{shown}" if titles else shown)
        return ("\n" if titles else "").join(parts)

    results = [document.value for _, document in done]
    return Document({"results": results, "failed": failed}, text=text, error=first)


def tried(
    context: Context, asked: list[str], one: Callable[[str], Document]
) -> tuple[list[tuple[str, Document]], list[dict[str, Any]], FsdError | None]:
    """What was done, what failed, and the first error; the rest of the errors are told at once."""
    done: list[tuple[str, Document]] = []
    failed: list[dict[str, Any]] = []
    first: FsdError | None = None
    for path in asked:
        try:
            done.append((path, one(path)))
        except FsdError as exc:
            failed.append({"path": path, "code": exc.code, "message": exc.message})
            if first is not None:
                context.say(f"fsd: {exc.message}")
            first = first or exc
            if isinstance(exc, _OF_ALL):
                break
    return done, failed, first
