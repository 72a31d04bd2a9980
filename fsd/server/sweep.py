"""The route of a person's sweep, and the server's own in the background."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.model.errors import FsdError, UsageError
from fsd.server.context import (
    Context,
    check_fs_name,
    context,
    flag,
    json_response,
    only,
    read_json,
    string,
    whole,
)
from fsd.server.route import RouteDef, route
from fsd.service.sweep import Terms

log = logging.getLogger(__name__)

_IDLE: Final = 5.0  # seconds between looks for a filesystem that is due
_FIRST: Final = 30.0  # after a start: requests that waited for the server come first
_PAUSE: Final = 0.02  # between two steps: requests come first
_OLDER_MAX: Final = 10 * 366 * 24 * 3600 * 1000


async def sweep(request: Request) -> Response:
    """Remove what nothing shows any more, for some seconds: `next_cursor` says where to go on. The same call
    again does no harm, so the answer is not kept under its key."""
    ctx = context(request)
    ctx.admin(request)
    body, _ = await read_json(request)
    only(body, "file_system_id", "older_than_ms", "dry_run", "vacuum", "cursor")
    name, older = string(body, "file_system_id"), whole(body, "older_than_ms")
    if older is not None and not 0 <= older <= _OLDER_MAX:
        raise UsageError(f"older_than_ms is from 0 to {_OLDER_MAX}")
    keep = ctx.service.retention
    terms = Terms(keep.grace if older is None else older / 1000, flag(body, "dry_run") or False)
    # A call that is sent again must find the lease its first copy took.
    key = request.headers.get("idempotency-key") or ctx.host.token_bytes(16).hex()
    token = hashlib.sha256(key.encode()).hexdigest()[:16]
    cursor, vacuum = string(body, "cursor") or "", flag(body, "vacuum") or False
    if name is not None:
        check_fs_name(name)
    return json_response(
        await ctx.run(lambda: ctx.service.sweep.call(name, terms, cursor, vacuum=vacuum, token=token))
    )


async def in_background(ctx: Context) -> None:
    """One step after the other for as long as the server runs, on a thread of its own."""
    every = ctx.service.retention.every or _FIRST
    idle = min(_IDLE, every)
    await asyncio.sleep(min(_FIRST, every))
    while True:
        try:
            more = await ctx.sweeps.run(ctx.service.sweep.turn)
        except FsdError as exc:
            log.warning("sweep: %s; it is tried again", exc)
            more = False
        except Exception:  # a defect of one step must not end all later ones
            log.exception("sweep failed; it is tried again")
            more = False
        await asyncio.sleep(_PAUSE if more else idle)


def counters(ctx: Context) -> dict[str, float]:
    """What the sweep did, as metrics."""
    return {f"fsd_sweep_{name}_total": float(count) for name, count in ctx.service.sweep.totals().items()}


def routes() -> list[RouteDef]:
    return [route("POST", "/v1/sweep", sweep)]
