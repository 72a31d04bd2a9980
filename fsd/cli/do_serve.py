"""`fsd serve`: options from flags, then the server's own main."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fsd.cli.context import Context
from fsd.cli.env import BLOBS, DATABASE, Environment, make_claim, store_url
from fsd.cli.output import Raw


def serve(context: Context, args: SimpleNamespace) -> Raw:
    from fsd.server.serve import ServeOptions, run
    from fsd.service.retention import Retention

    # Flags alone: a server must not take the region or the key that its shell holds for another one.
    given = make_claim(Environment({}), args, context.streams.stdin)
    env, say = context.env, context.say
    retention = Retention(args.grace, args.history, args.keep_changes, args.keep_sessions, args.sweep_every)
    options = ServeOptions(
        data_dir=Path(args.data_dir),
        listen=args.listen,
        region=given.region or "local",
        public_url=args.public_url,
        database=store_url(env, args.database, DATABASE, "--database", say),
        blobs=store_url(env, args.blobs, BLOBS, "--blobs", say),
        admin_key=given.admin_key,
        tls_cert=Path(args.tls_cert) if args.tls_cert else None,
        tls_key=Path(args.tls_key) if args.tls_key else None,
        insecure=args.insecure,
        behind_proxy=args.behind_proxy,
        test_clock=args.test_clock,
        output_json=args.output == "json",
        notify_socket=env.get(("NOTIFY_SOCKET",)),
        retention=retention,
    )
    return Raw(run(options, context.host))
