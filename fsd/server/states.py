"""Mounts of retained states over HTTP, by a token."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.model.limits import MOUNT_PIN
from fsd.model.times import rfc3339
from fsd.server.context import context, json_response, only, read_json
from fsd.server.route import RouteDef, route
from fsd.server.tree_json import at_of
from fsd.service import mountpin

ONE: Final = "/v1/file-systems/{id}/sessions/{n}/state"


async def keep_state(request: Request) -> Response:
    """Keep the state a mount shows, named as in every reading route; asked again while it is mounted."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    body, _ = await read_json(request)
    only(body)
    at = at_of(request.query_params)
    if at is None:
        raise UsageError("which state? checkpoint, at_journal or fs_seq is missing")
    number = request.path_params["n"]
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise UsageError("a session is named by its number")

    def work(tx: Tx) -> mountpin.Kept:
        return mountpin.keep(tx, fs, int(number), at, ctx.host.wall_ns())

    service = ctx.service
    kept = await ctx.run(lambda: service.forks.when_copied(fs, lambda: service.db.write(work, frees=True)))
    return json_response(
        {"fs_seq": kept.seq, "expires_at": rfc3339(kept.expires), "renew_after_s": MOUNT_PIN / 3}
    )


def routes() -> list[RouteDef]:
    return [route("POST", ONE, keep_state)]
