"""`fsd run`: pull, run, push. Its stdout belongs to the command; what fsd has to say goes to stderr."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

from fsd.cli.context import Context, remote_path
from fsd.cli.do_files import files
from fsd.cli.output import Raw
from fsd.client.run import RunOptions, RunResult, push_left
from fsd.client.run import run as run_command
from fsd.client.transfer import Progress
from fsd.model.errors import NotDrained, UsageError


def run(context: Context, args: SimpleNamespace) -> Raw:
    api = files(context)
    if args.push_left:
        if args.command:
            raise UsageError("--push-left sends what an earlier run left: no command beside it")
        return _told(context, args, push_left(api, Path(args.push_left).absolute()))
    if not args.command or not args.command[0]:
        raise UsageError("no command to run", hint="fsd run --path /tasks/x -- COMMAND")
    options = RunOptions(
        path=remote_path(args.path),
        command=args.command,
        env=context.env.variables,
        base=context.env.state_root() / "run",
        work_dir=Path(args.work_dir).absolute() if args.work_dir else None,
        label=socket.gethostname(),
    )

    def progress(at: Progress) -> None:
        context.progress(f"pulling: {at.files} files, {at.bytes / 1e6:.1f} MB")

    watch = progress if context.streams.stderr_terminal else None
    context.streams.stdout.flush()

    def say(text: str) -> None:
        context.end_progress()
        context.say(f"fsd run: {text}")

    result = run_command(api, options, watch, say)
    if result.not_started:
        context.say(f"fsd run: {result.not_started}")
    return _told(context, args, result)


def _told(context: Context, args: SimpleNamespace, result: RunResult) -> Raw:
    """Say what was not simply pushed; the exit code is the command's where all was."""
    context.end_progress()
    for clash in result.pushed.conflicts:
        context.say(f"fsd run: conflict: {json.dumps(clash._asdict(), ensure_ascii=False, default=str)}")
    for path in result.pushed.not_pushed:
        context.say(f"fsd run: not pushed (no regular file, directory or symlink): {path}")
    if result.at_work:
        who = ", ".join(f"{pid} ({name})" for pid, name in result.at_work[:20])
        after = f"is pushed by: fsd run --push-left {result.kept}" if result.kept else "is not pushed"
        context.say(f"fsd run: pushed, but still at work there: {who}; what they write from now on {after}")
    if args.output == "json":
        context.say(json.dumps(result.to_json()))
    if result.left is not None:
        reason = result.error.message if result.error else "the push was incomplete"
        code = result.command_exit
        ended = "" if code is None else f" (the command ended with {code})"
        raise NotDrained(
            f"not everything was pushed: {reason}{ended}",
            hint=f"it is all in {result.left}; send it with: fsd run --push-left {result.left}",
            details=result.to_json(),
        )
    return Raw(result.exit_code)
