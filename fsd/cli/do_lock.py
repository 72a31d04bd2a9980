"""`fsd lock`: a command that runs while a lock on the server is held. Its stdout belongs to the command."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from fsd.cli.context import Context, remote_path
from fsd.cli.output import Raw
from fsd.client.http import Http
from fsd.client.leases import Leases, LockOptions, locked
from fsd.model.errors import UsageError


def lock(context: Context, args: SimpleNamespace) -> Raw:
    if not args.command or not args.command[0]:
        raise UsageError("no command to run", hint="fsd lock /tasks/db -- COMMAND")
    options = LockOptions(
        path=remote_path(args.path),
        command=args.command,
        env=context.env.variables,
        host=socket.gethostname(),
        timeout=args.timeout,
        ttl=args.lease_time,
    )
    context.streams.stdout.flush()
    return Raw(locked(Leases(Http(context.data(), context.host)), options, context.say))
