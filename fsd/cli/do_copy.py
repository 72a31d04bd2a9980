"""`fsd cp` and `fsd fs copy-file`: which end is where, then one of the five directions."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli.context import Context, Interrupted, path_bytes, remote_path
from fsd.cli.do_files import files, state_of
from fsd.cli.output import Document, Raw, Result
from fsd.cli.several import distinct, of_several, sources
from fsd.client import transfer
from fsd.client.files import Files
from fsd.client.transfer import CopyOptions, CopyResult, Progress
from fsd.model.errors import Conflict, FsdError, UsageError
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.model.words import counted

LOCAL: Final = "local"
REMOTE: Final = "remote"
STREAM: Final = "stream"
_PAIRS: Final = (
    "exactly one of --from-local, --from-stdin, --from-remote and one of --to-remote, --to-local, --to-stdout"
)


@dataclass(frozen=True, slots=True)
class End:
    """One side of a copy: where it is, and its path (empty for a stream)."""

    place: str
    path: bytes = b""


def ends(args: SimpleNamespace) -> tuple[End, End]:
    """Both sides, from operands or flags. Raises `UsageError`."""
    flags = (
        [(LOCAL, args.from_local), (STREAM, args.from_stdin or None), (REMOTE, args.from_remote)],
        [(LOCAL, args.to_local), (STREAM, args.to_stdout or None), (REMOTE, args.to_remote)],
    )
    named = [[(place, value) for place, value in side if value is not None] for side in flags]
    operands = [getattr(args, "source", None), getattr(args, "destination", None)]
    if any(o is not None for o in operands):
        if any(named):
            raise UsageError("operands and --from-…/--to-… flags exclude each other")
        if None in operands:
            raise UsageError("both a source and a destination are needed", hint="see `fsd cp --help`")
        return _operands(str(operands[0]), str(operands[1]))
    if any(len(side) != 1 for side in named):
        raise UsageError(f"needed: {_PAIRS}", hint="the short form: fsd cp plan.md :/tasks/plan.md")
    source, destination = (_named(*side[0]) for side in named)
    if source.place != REMOTE and destination.place != REMOTE:
        raise UsageError("one side of a copy is remote", hint=_PAIRS)
    return source, destination


def _named(place: str, value: Any) -> End:
    if place == STREAM:
        return End(STREAM)
    return End(REMOTE, remote_path(value)) if place == REMOTE else End(LOCAL, path_bytes(value))


def _operands(source: str, destination: str) -> tuple[End, End]:
    """A leading colon marks remote, `-` a stream, all else is local. Nothing is guessed."""
    both = [_operand(source), _operand(destination)]
    if all(end.place != REMOTE for end in both):
        for end in both:
            if end.place == LOCAL and end.path.startswith(b"/") and not os.path.lexists(end.path):
                raise UsageError(
                    f"neither side is remote, and {show(end.path)} does not exist here",
                    hint=f"write :{show(end.path)} if it is the remote path that is meant",
                )
        raise UsageError(
            "neither side is remote",
            hint="a leading colon marks the remote side: fsd cp plan.md :/tasks/plan.md",
        )
    return both[0], both[1]


def _operand(text: str) -> End:
    if text == "-":
        return End(STREAM)
    for mark in ("fsd:", ":"):
        if text.startswith(mark):
            return End(REMOTE, remote_path(text[len(mark) :]))
    if not text:
        raise UsageError("an empty path")
    return End(LOCAL, path_bytes(text))


def copy(context: Context, args: SimpleNamespace) -> Result:
    if getattr(args, "more", None):
        return _several(context, args)
    source, destination = ends(args)
    _check_flags(args, source, destination)
    return _one(context, args, files(context), source, destination)


def _several(context: Context, args: SimpleNamespace) -> Document:
    """Several sources, each under its own name into one directory, which is there. All of it is looked at
    before anything is copied."""
    typed, last = sources(args, "source", "destination")
    named = {}
    for source in typed:
        start, goal = ends(SimpleNamespace(**{**vars(args), "source": source, "destination": last}))
        _check_flags(args, start, goal)
        if STREAM in (start.place, goal.place):
            raise UsageError("a stream is one file: several sources go into a directory")
        named[source] = start
    if args.if_match:
        raise UsageError("--if-match is for single files")
    distinct({one: _name(end) for one, end in named.items() if not transfer.means_content(end.path)})
    api = files(context)
    into = End(goal.place, _directory(api, goal))

    def one(source: str) -> Document:
        result = _one(context, args, api, named[source], into)
        assert isinstance(result, Document), "no stream"
        return result

    return of_several(context, list(named), one)


def _name(source: End) -> bytes:
    path = os.path.abspath(source.path) if source.place == LOCAL else transfer.normal(source.path)
    return transfer.base_name(path, "the source")


def _directory(api: Files, goal: End) -> bytes:
    """The path of the directory `goal`, as one to copy into."""
    if goal.place == LOCAL:
        there = os.path.isdir(goal.path)
    else:
        found = transfer.stat_or_none(api, transfer.normal(goal.path), follow=True)
        there = found is not None and bool(found["is_dir"])
    if not there:
        make = "mkdir -p" if goal.place == LOCAL else "fsd mkdir -p"
        raise UsageError(
            f"several sources go into a directory, and {show(goal.path)} is none", hint=f"make it: `{make}`"
        )
    return goal.path.rstrip(b"/") + b"/"


def _one(context: Context, args: SimpleNamespace, api: Files, source: End, destination: End) -> Result:
    to_remote = destination.place == REMOTE
    options = CopyOptions(
        recursive=args.recursive,
        parents=True if to_remote else args.create_parents,
        overwrite=_overwrite(context, args, to_remote),
        append=args.append,
        resume=args.resume,
        owner=args.recursive and os.geteuid() == 0,
        if_match=args.if_match,
    )
    labels = _labels(args)
    goal = _goal(api, source, destination) if labels or args.mode is not None else b""
    try:
        result = _move(context, api, source, destination, options)
    except KeyboardInterrupt as exc:
        kept = "what was copied so far stays; copy again with --resume" if args.recursive else ""
        raise Interrupted("interrupted", hint=kept or "nothing was changed at the target") from exc
    if result is None:
        return Raw()
    # Mode and tags follow the content: where they fail that is told, and the content stays.
    if args.mode is not None:
        api.chmod(goal, args.mode)
    for name, value in labels:
        api.setxattr(goal, name, value)
    return _answer(result)


def _check_flags(args: SimpleNamespace, source: End, destination: End) -> None:
    """Flags that belong to one direction only are refused in the others rather than ignored."""
    uploads = destination.place == REMOTE and source.place != REMOTE
    streams = STREAM in (source.place, destination.place)
    if args.query is not None and destination.place == STREAM:
        raise UsageError("--query: a copy to stdout gives bytes (output.query_not_supported)")
    if state_of(args) and (source.place != REMOTE or destination.place == REMOTE):
        raise UsageError(
            "--checkpoint and --at-journal read a state: copy from there to here",
            hint="`fsd checkpoint restore ID PATH` brings it back there",
        )
    if args.overwrite and args.no_overwrite:
        raise UsageError("--overwrite and --no-overwrite exclude each other")
    if args.append and not uploads:
        raise UsageError("--append is for copies from here into a remote file")
    if args.if_match and not uploads:
        raise UsageError("--if-match is for copies from here into a remote file")
    if (args.tag or getattr(args, "description", None) or args.mode is not None) and (
        destination.place != REMOTE or args.recursive
    ):
        raise UsageError("--tag, --description and --mode are for single remote files")
    if streams and (args.recursive or args.resume):
        raise UsageError("a stream is one file: no --recursive, no --resume")
    if args.recursive and (args.append or args.if_match):
        raise UsageError("--append and --if-match are for single files")


def _overwrite(context: Context, args: SimpleNamespace, to_remote: bool) -> bool:
    if args.no_overwrite:
        return False
    # Scripts for ti name --overwrite to replace a local file; their uploads always replace.
    return to_remote or not context.long or bool(args.overwrite or args.resume)


def _move(
    context: Context, api: Files, source: End, destination: End, options: CopyOptions
) -> CopyResult | None:
    def progress(at: Progress) -> None:
        context.progress(f"{at.files} files, {at.bytes / 1e6:.1f} MB  {at.path}")

    watch = progress if context.streams.stderr_terminal else None
    if source.place == STREAM:
        from fsd.client.upload import upload_stream

        return upload_stream(api, context.streams.stdin, destination.path, options, watch)
    if source.place == LOCAL:
        from fsd.client.upload import upload

        return upload(api, source.path, destination.path, options, watch)
    if destination.place == REMOTE:
        return transfer.copy_remote(api, source.path, destination.path, options, watch)
    if destination.place == STREAM:
        for piece in api.read(source.path):
            context.streams.stdout.write(piece)
        context.streams.stdout.flush()
        return None
    from fsd.client.download import download

    return download(api, source.path, destination.path, options, watch)


def _labels(args: SimpleNamespace) -> list[tuple[bytes, bytes]]:
    """Tags and description as extended attributes."""
    tags = list(args.tag or [])
    if getattr(args, "description", None):
        tags.append(("description", args.description))
    return [(b"user.tag." + path_bytes(key), path_bytes(value)) for key, value in tags]


def _goal(api: Files, source: End, destination: End) -> bytes:
    """The remote file that the copy of one file makes."""
    if source.place == STREAM:
        return transfer.normal(destination.path)
    path = os.path.abspath(source.path) if source.place == LOCAL else transfer.normal(source.path)
    name = transfer.base_name(path, "the source")
    return transfer.remote_target(api, destination.path, name, recursive=False)


def _answer(result: CopyResult) -> Document:
    value = result.to_json()
    error: FsdError | None = None
    if not result.ok:
        first = result.failed[0].message if result.failed else f"{result.changed[0]} changed while copied"
        count = len(result.failed) + len(result.changed)
        error = Conflict(
            f"{count} of the files were not copied as they are; the first: {first}",
            hint="the rest is there; copy again with --resume",
        )
    return Document(value, text=_text, error=error)


def _text(value: Any) -> str:
    lines = [
        f"{value['source_path']} -> {value['target_path']}: {counted(value['files_transferred'], 'file')}, "
        f"{counted(value['bytes_transferred'], 'byte')}"
    ]
    if value["skipped"]:
        lines.append(f"{counted(value['skipped'], 'file', 'was', 'were')} there already")
    lines += [f"not copied (no regular file): {path}" for path in value.get("not_copied", [])]
    lines += [f"changed while copied: {path}" for path in value.get("changed", [])]
    lines += [f"failed: {f['path']}: {f['message']}" for f in value.get("failed", [])]
    return "\n".join(lines) + "\n"
