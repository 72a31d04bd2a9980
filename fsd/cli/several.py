"""Commands that take several paths: each for itself, as `rm`, `mkdir` and `ls` of a system do, or all into
one directory, as `cp` and `mv` do.

One path prints what it always printed. Of several, `results` holds what each alone would print and `failed`
what went wrong; a path that fails is told and does not keep the others from being done, and the command ends
as the first failure says.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli.context import Context, Interrupted, remote_path
from fsd.cli.output import Document
from fsd.cli.table import Flag, operand
from fsd.model.errors import FsdError, NotAuthenticated, Unavailable, UsageError

_OF_ALL: Final = (Unavailable, NotAuthenticated)  # the other paths would get the same answer


def others(position: int) -> Flag:
    """The operands behind a command's first path."""
    return operand("others", "further paths, each for itself", metavar="PATH", position=position, many=True)


def more(position: int) -> Flag:
    """The operands behind source and target of a command: then the last is a directory that all go into."""
    return operand(
        "more", "with several sources the last is a directory", metavar="PATH", position=position, many=True
    )


def sources(args: SimpleNamespace, source: str, target: str) -> tuple[list[str], str]:
    """What goes, and where: the operands of these names and those behind."""
    named: list[str] = [getattr(args, source), getattr(args, target), *(getattr(args, "more", None) or [])]
    return named[:-1], named[-1]


def distinct(names: dict[str, bytes]) -> None:
    """Raises `UsageError` where two paths have one name: in a directory one would replace the other."""
    at: dict[bytes, str] = {}
    for path, name in names.items():
        if name in at:
            raise UsageError(f"{at[name]} and {path} have one name: one would replace the other")
        at[name] = path


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
    return one(asked[0]) if len(asked) == 1 else of_several(context, asked, one, titles=titles)


def of_several(
    context: Context, asked: list[str], one: Callable[[str], Document], *, titles: bool = False
) -> Document:
    """As `each`, of these paths, of which there are two at least."""
    done, failed, first = tried(context, asked, one)
    first = first or next((document.error for _, document in done if document.error is not None), None)

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
            if isinstance(exc, Interrupted):
                raise
            failed.append({"path": path, "code": exc.code, "message": exc.message})
            if first is not None:
                context.say(f"fsd: {exc.message}")
            first = first or exc
            if isinstance(exc, _OF_ALL):
                break
    return done, failed, first
