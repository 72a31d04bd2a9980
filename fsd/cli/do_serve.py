"""`fsd serve`: options from flags, then the server's own main."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fsd.cli.context import Context
from fsd.cli.env import Environment, make_claim
from fsd.cli.output import Raw


def serve(context: Context, args: SimpleNamespace) -> Raw:
    from fsd.server.serve import ServeOptions, run

    # Flags alone: a server must not take the region or the key that its shell holds for another one.
    given = make_claim(Environment({}), args, context.streams.stdin)
    options = ServeOptions(
        data_dir=Path(args.data_dir),
        listen=args.listen,
        region=given.region or "local",
        public_url=args.public_url,
        database=args.database,
        blobs=args.blobs,
        admin_key=given.admin_key,
        tls_cert=Path(args.tls_cert) if args.tls_cert else None,
        tls_key=Path(args.tls_key) if args.tls_key else None,
        insecure=args.insecure,
        behind_proxy=args.behind_proxy,
        test_clock=args.test_clock,
        output_json=args.output == "json",
        notify_socket=context.env.get(("NOTIFY_SOCKET",)),
    )
    return Raw(run(options, context.host))
