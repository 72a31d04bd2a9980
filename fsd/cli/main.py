"""`fsd`: find the row, parse, run its handler, print, end with the exit code its error class carries."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from fsd import __version__
from fsd.cli import helptext, parse, standard, table
from fsd.cli.context import Context, Interrupted, Streams, call
from fsd.cli.env import Environment, redactor
from fsd.cli.output import Document, Raw, Result, check_query, error_json, error_text, render, visible
from fsd.cli.table import Table
from fsd.host import threads
from fsd.model.errors import FsdError, NoSpace, NotFound, PosixError, Unsupported, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code; never raises but SystemExit from a broken pipe's signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    streams = standard.streams()
    code = run(words, Environment(dict(os.environ)), streams)
    try:
        streams.stdout.flush()
    except BrokenPipeError:
        code = _broken_pipe()
    except OSError as exc:
        # Told already where the command failed because of it: what it had written is still in the buffer.
        code = code or _fail(_output_error(exc), None, "text", streams)
        _drop_stdout()
    return code


def _broken_pipe() -> int:
    """The reader went away: end as other tools do, quietly."""
    _drop_stdout()
    return 128 + signal.SIGPIPE


def _drop_stdout() -> None:
    """What is still buffered goes nowhere: the interpreter's last flush must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _output_error(exc: OSError) -> FsdError:
    if exc.errno == errno.ENOENT and not exc.filename and _nowhere():
        return NotFound("the working directory is gone", hint="cd into one that is there")
    where = f" {exc.filename}" if exc.filename else ""
    told = f"a local file or stream{where} failed: {exc.strerror or exc}"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(told, hint="free space there")
    return PosixError(exc.errno, told) if exc.errno else FsdError(told)


def _nowhere() -> bool:
    """Whether the working directory was removed: relative paths then mean nothing."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def run(argv: list[str], env: Environment, streams: Streams) -> int:
    """One command line, from words to exit code."""
    rows = table.load()
    given = list(argv)
    argv, lead = _without_lead(argv)
    long = bool(argv) and _is_long(rows, argv)
    context: Context | None = None
    format = _guess_format(given, long, streams)
    try:
        early = _help_or_version(rows, argv, streams)
        if early is not None:
            return early
        found = rows.find(argv)
        if found is None:
            raise _unknown(rows, argv)
        command, long, words, rest = found
        if rest == ["help"]:
            rest = ["--help"]
        if command.refuse and not {"--help", "-h"} & set(rest):
            raise Unsupported(f"fsd {' '.join(words)} is refused: {command.refuse}")
        args = parse.parse(command, long, words, lead + rest)
        if args.help:
            return _write(streams, helptext.command(command, long, words))
        if args.version:
            return _write(streams, f"fsd {__version__}\n")
        format = args.output or format
        context = Context(env, rows, command, words, long, args, streams, format, env.host())
        _check_query(context)
        result = _dry_run(context) if args.dry_run else call(command.handler, context)
        return _finish(context, result)
    except FsdError as exc:
        return _fail(exc, context, format, streams)
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted"), context, format, streams)
    except BrokenPipeError:
        return _broken_pipe()
    except OSError as exc:
        error: FsdError = _output_error(exc)
        error.__cause__ = exc
        return _fail(error, context, format, streams)
    except Exception as exc:  # noqa: BLE001 - the last boundary: told as a defect, with its traceback on --debug
        error = threads.failure(exc, f"{type(exc).__name__}: {exc}", "run again with --debug and report it")
        error.__cause__ = exc
        return _fail(error, context, format, streams)


def _without_lead(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command line without the common flags before the command, and those: they mean the same there."""
    common = {name: f for f in table.COMMON for name in f.names if f.dest not in ("help", "version")}
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        if name not in common:
            break
        at += 1 if equals or common[name].convert is None else 2
    return argv[at:], argv[:at]


def _is_long(rows: Table, argv: list[str]) -> bool:
    found = rows.find(argv)
    return found[1] if found else argv[0] in ("fs", "fs-journal")


def _guess_format(argv: list[str], long: bool, streams: Streams) -> str:
    """The format for errors found before the flags are parsed, and the default after."""
    for at, word in enumerate(argv):
        value = word.partition("=")[2] if word.startswith("--output=") else ""
        if word == "--output" and at + 1 < len(argv):
            value = argv[at + 1]
        if value in ("text", "json"):
            return value
    return "text" if streams.stdout_terminal and not long else "json"


def _write(streams: Streams, text: str) -> int:
    streams.stdout.write(text.encode("utf-8", "backslashreplace"))
    return 0


def _help_or_version(rows: Table, argv: list[str], streams: Streams) -> int | None:
    """Help of the program and of groups, `fsd help …`, `--version`; None: it is a command."""
    groups = {w[0] for row in rows.rows for w in row.spellings() if len(w) == 2}
    if not argv:
        streams.stderr.write(helptext.program(rows))
        return UsageError.exit_code
    if argv[0] in ("--version", "-V", "version"):
        return _write(streams, f"fsd {__version__}\n")
    if argv[0] == "help" and len(argv) > 1:
        if argv[1:] == ["long"]:
            return _write(streams, helptext.long_page(rows))
        argv[:] = [*argv[1:], "--help"]
    elif argv[0] in ("--help", "-h", "help"):
        return _write(streams, helptext.program(rows))
    if argv[0] in groups and (argv[0],) not in rows.by_words:
        if len(argv) == 1:
            streams.stderr.write(helptext.group(rows, argv[0]))
            return UsageError.exit_code
        if argv[1] in ("help", "--help", "-h"):
            return _write(streams, helptext.group(rows, argv[0]))
        if argv[1] == "--version":
            return _write(streams, f"fsd {__version__}\n")
    return None


def _unknown(rows: Table, argv: list[str]) -> UsageError:
    """No such command: name the nearest."""
    import difflib

    typed = " ".join(argv[:2]) if rows.groups(argv[0]) else argv[0]
    known = [" ".join(w) for w in rows.by_words]
    # `prune` for `checkpoint prune`: the second word alone.
    whole = [" ".join(w) for w in rows.by_words if len(w) == 2 and w[1] == typed]
    near = whole or difflib.get_close_matches(typed, known, 1)
    hint = f"did you mean `fsd {near[0]}`?" if near else "see `fsd --help`"
    return UsageError(f"unknown command: fsd {typed}", hint=hint)


def _check_query(context: Context) -> None:
    if context.args.query is None:
        return
    if context.command.raw:
        raise UsageError(
            "--query: this command gives bytes, not a document (output.query_not_supported)",
            hint="leave --query out",
        )
    check_query(context.args.query)  # a wrong expression must not be found after the work is done


def _dry_run(context: Context) -> Document:
    from fsd.cli.dryrun import envelope

    return envelope(context)


def _finish(context: Context, result: Result) -> int:
    """Print what the handler answered."""
    context.end_progress()
    if isinstance(result, Raw):
        return result.exit_code
    text = render(result, context.format, context.args.query)
    if not isinstance(context.streams.stdout, standard.ClosedOutput):
        # Half characters stand for bytes that are no UTF-8; written so they are escapes that JSON knows too.
        context.streams.stdout.write(text.encode("utf-8", "backslashreplace"))
        context.streams.stdout.flush()
    if result.error is not None:
        return _fail(result.error, context, context.format, context.streams)
    return result.exit_code


def _fail(error: FsdError, context: Context | None, format: str, streams: Streams) -> int:
    """Tell the error and give its exit code."""
    redact = context.redact if context else redactor(None)
    if context:
        context.end_progress()
        if context.args.debug:
            import traceback

            streams.stderr.write(visible(redact("".join(traceback.format_exception(error)))))
    streams.stderr.write(error_text(error, redact))
    if format == "json":
        streams.stderr.write(error_json(error, redact))
    streams.stderr.flush()
    return error.exit_code
