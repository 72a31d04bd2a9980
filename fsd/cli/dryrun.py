"""`--dry-run`: what a command would send, checked as far as that needs no change.

The plan is the row's; the checks are done for real: arguments, identity, and for file actions and mounts
whether it would work.
"""

from __future__ import annotations

import string
from functools import partial
from typing import Any

from fsd.cli.context import Context, call
from fsd.cli.output import Document, render
from fsd.cli.several import sources
from fsd.model.errors import FsdError

HIDDEN = {
    "help", "version", "output", "query", "region", "endpoint", "insecure", "debug", "profile", "dry_run",
    "yes", "fs_token", "token_file", "admin_key_file", "file_system_id",
}  # fmt: skip

# Handlers that know of a dry run: the server says what it would do.
_COUNTED = {
    "do_sweep:sweep", "do_checkpoint:restore", "do_checkpoint:undelete", "do_checkpoint:delete",
    "do_checkpoint:prune", "do_fork:merge",
}  # fmt: skip


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return f"<{key.replace('_', '-')}>"


def envelope(context: Context) -> Document:
    """The plan as a document; the first failed check becomes the command's error."""
    row, args = context.command, context.args
    fields = _Fields({k: v for k, v in vars(args).items() if v not in (None, [], "")})
    if "others" in fields:  # of several paths a request each
        fields["path"] = ", ".join([args.path, *args.others])
    for first, last in (("source", "destination"), ("from_remote", "to_remote")):
        if "more" in fields and first in fields:
            those, fields[last] = sources(args, first, last)
            fields[first] = ", ".join(those)
    checks = [{"name": "arguments", "status": "ok", "message": "the command line is complete"}]
    error: FsdError | None = None
    try:
        identity = _identify(context)
        if identity:
            fields["fs"] = fields["file_system_id"] = identity
            checks.append({"name": "identity", "status": "ok", "message": identity})
    except FsdError as exc:
        error = exc
        checks.append({"name": "identity", "status": "failed", "message": context.redact(exc.message)})
    counted: Document | None = None
    if error is None:
        counted, error = _ask(context, checks)
    method, path, description = row.plan
    formatter = string.Formatter()
    return Document(
        {
            "dry_run": True,
            "command": "fsd " + " ".join(context.words),
            "operation": row.words_of_operation(),
            "would_send_request": method != "-" and error is None,
            "request": {
                "method": method,
                "path": formatter.vformat(path, (), fields),
                "description": formatter.vformat(description, (), fields),
                "body": {
                    k: v for k, v in vars(args).items() if k not in HIDDEN and v not in (None, [], False)
                },
            },
            "checks": checks,
            **({} if counted is None else {"would": counted.value}),
        },
        text=None if counted is None else partial(_counted_text, counted),
        error=error,
    )


def _counted_text(counted: Document, _: Any) -> str:
    """For people: what the command itself would print."""
    return "nothing was done; this would be:\n" + render(counted, "text", None)


def _ask(context: Context, checks: list[dict[str, str]]) -> tuple[Document | None, FsdError | None]:
    """What can be found out without changing anything: the server tries a file action and takes it back, or
    counts what a sweep would remove (the document); a mount point is looked at."""
    row = context.command
    try:
        if row.handler.startswith("do_files:") and row.plan[0] == "POST":
            context.args.yes = True
            done = call(row.handler, context)
            if isinstance(done, Document) and done.error is not None:  # of several paths some
                raise done.error
            checks.append({"name": "server", "status": "ok", "message": "the server would do it"})
        elif row.handler in _COUNTED:
            counted = call(row.handler, context)
            assert isinstance(counted, Document)
            checks.append({"name": "server", "status": "ok", "message": "the server has counted"})
            return counted, counted.error
        elif row.handler == "do_mount:mount":
            from fsd.cli.do_mount import mount_options
            from fsd.kernel.mountpoint import check_place, require_fuse, resolve

            options = mount_options(context, context.args)
            require_fuse()
            check_place(resolve(options.mountpoint), {"the state directory": options.state_dir})
            checks.append({"name": "mount", "status": "ok", "message": "it can be mounted there"})
    except FsdError as exc:
        checks.append({"name": row.name, "status": "failed", "message": context.redact(exc.message)})
        return None, exc
    return None, None


def _identify(context: Context) -> str:
    """Who would be asked about what; raises what the command itself would."""
    needs = context.command.identity
    if needs == "":
        return ""
    if needs == "token":
        return context.data().file_system_id
    if needs == "either":
        return context.file_system_id()
    if needs == "origin":
        context.admin_or_origin()
        return getattr(context.args, "file_system_id", None) or "admin key or token"
    context.admin()
    if any(f.dest == "file_system_id" for f in context.command.flags):
        return context.file_system_id()
    return "admin key"
