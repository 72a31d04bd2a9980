"""Routes of forks: made, listed, merged, rolled back, deleted; by the admin key or a token of the origin.

A token of a filesystem may do to its forks, and to theirs, what it may do to the filesystem itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.model.limits import KIB
from fsd.server.context import (
    Context,
    check_fs_name,
    context,
    flag,
    idempotent_call,
    json_response,
    only,
    query_flag,
    query_limit,
    read_json,
    send,
    string,
    timed,
    to_answer,
)
from fsd.server.control import ONE, of_forks, was_asked, write
from fsd.server.route import RouteDef, route
from fsd.service.access import ADMIN_GRANT, FsRef, Grant, hold
from fsd.service.idempotency import Answer
from fsd.service.merge import Wish, patterns
from fsd.service.native import FIELDS, read_ask

FORKS: Final = ONE + "/forks"
LAYER_MAX: Final = 8 * KIB


async def who(ctx: Context, request: Request) -> tuple[FsRef, Grant]:
    """The path's filesystem, for the admin key or a token of it."""
    if ctx.is_admin(request):
        name = check_fs_name(request.path_params["id"])
        return await ctx.run(lambda: ctx.service.filesystems.get(name)), ADMIN_GRANT
    return await ctx.who(request)


async def create(request: Request) -> Response:
    """A new filesystem at the head of this one or at one of its checkpoints, with its owner token. It can be
    read, mounted and written at once."""
    ctx = context(request)
    origin, grant = await who(ctx, request)
    body, raw = await read_json(request)
    only(body, "display_name", "labels", "checkpoint", "of", "layer")
    labels = body.get("labels") or {}
    if not isinstance(labels, dict):
        raise UsageError("labels is an object of strings")
    name, checkpoint, of = string(body, "display_name") or "", string(body, "checkpoint"), string(body, "of")
    layer = _layer(body.get("layer"))
    forks = ctx.service.forks

    def effect(tx: Tx) -> Answer:
        began = ctx.host.monotonic()
        at, own = origin, grant
        if of is not None:
            hold(tx, origin, grant)
            at, own = forks.need_descendant(tx, origin, of), ADMIN_GRANT
        made = forks.create(tx, at, name, list(labels.items()), checkpoint, layer, own)
        return to_answer({**made, "server_ms": ctx.ms_since(began)}, 201)

    return await write(ctx, request, raw, effect, asker=grant.token_id)


def _layer(given: object) -> str:
    """What a layer says of itself, to be given back: a small object."""
    if given is None:
        return ""
    text = json.dumps(given)
    if not isinstance(given, dict) or len(text) > LAYER_MAX:
        raise UsageError(f"layer is an object of at most {LAYER_MAX} bytes")
    return text


async def list_all(request: Request) -> Response:
    """The forks of a filesystem in order of id; with `all` those of its forks too, and on one page."""
    ctx = context(request)
    origin, _ = await who(ctx, request)
    if query_flag(request, "all"):
        found = await ctx.run(lambda: ctx.service.forks.below(origin))
        return json_response({"forks": found, "next_cursor": None})
    after, limit = request.query_params.get("cursor", ""), query_limit(request)
    return json_response(await ctx.run(lambda: ctx.service.forks.page(origin, after, limit)))


async def delete(request: Request) -> Response:
    """Delete a fork; its own forks that still read its files are copied first with `detach`, go with
    `cascade`, and otherwise keep it."""
    ctx = context(request)
    origin, grant = await who(ctx, request)
    name = check_fs_name(request.path_params["fork"])
    _, raw = await read_json(request)
    cascade, detach = of_forks(request)
    service = ctx.service

    def effect(tx: Tx) -> Answer:
        hold(tx, origin, grant)
        fork = service.forks.need_descendant(tx, origin, name)
        return to_answer(service.filesystems.delete(tx, fork.name, cascade=cascade))

    if detach and not await was_asked(ctx, idempotent_call(request, grant.token_id, raw)):
        await ctx.run(lambda: service.db.read(lambda tx: service.forks.need_descendant(tx, origin, name)))
        await ctx.run(lambda: service.forks.detach(name))
    return await write(ctx, request, raw, effect, asker=grant.token_id, frees=True)


async def changes(request: Request) -> Response:
    """What a fork changed since it was made or last merged, the first of it in order of path."""
    ctx = context(request)
    origin, _ = await who(ctx, request)
    name, limit = check_fs_name(request.path_params["fork"]), query_limit(request)

    def work() -> object:
        service = ctx.service
        fork = service.db.read(lambda tx: service.forks.need_descendant(tx, origin, name))
        return service.merges.changes(fork, limit)

    async with ctx.compares:
        return json_response(await ctx.run(work))


async def merge(request: Request) -> Response:
    """Bring a fork's changes into what it was made from, this filesystem or a fork of it: all of them in one
    commit, or, with conflicts, none. With `dry_run` it is only tried."""
    ctx = context(request)
    parent, grant = await who(ctx, request)
    body, raw = await read_json(request)
    only(body, "fork", "dry_run", "ours", "theirs")
    name = check_fs_name(string(body, "fork") or "")
    dry_run = flag(body, "dry_run") or False
    wish = Wish(patterns(body.get("ours") or [], "ours"), patterns(body.get("theirs") or [], "theirs"))
    service = ctx.service

    def pair(tx: Tx) -> tuple[FsRef, FsRef]:
        fork = service.forks.need_descendant(tx, parent, name)
        return service.forks.origin_of(tx, fork), fork

    began = ctx.host.monotonic()
    kept = None if dry_run else await _kept(ctx, request, grant, raw)
    if kept is not None:
        return send(timed(ctx, kept, began))
    into, fork = await ctx.run(lambda: service.db.read(pair))
    async with ctx.compares:
        began = ctx.host.monotonic()
        if dry_run:
            rehearsed = await ctx.run(lambda: service.merges.rehearse(into, fork, wish))
            return json_response({**rehearsed, "server_ms": ctx.ms_since(began)})

        ready = await ctx.run(lambda: service.merges.prepare(into, fork, wish))

        def effect(tx: Tx) -> Answer:
            hold(tx, parent, grant)
            return to_answer(service.merges.merge(tx, into, fork, None, wish, ready))

        return await _change(ctx, request, into, grant, raw, effect, began)


async def checkpoint(request: Request) -> Response:
    """Make a checkpoint of a fork."""
    ctx = context(request)
    origin, grant = await who(ctx, request)
    body, raw = await read_json(request)
    only(body, *FIELDS)
    ask, name = read_ask(body), check_fs_name(request.path_params["fork"])

    def effect(tx: Tx) -> Answer:
        hold(tx, origin, grant)
        fork = ctx.service.forks.need_descendant(tx, origin, name)
        return to_answer(ctx.service.checkpoints.make(tx, fork, None, ask), 201)

    return await write(ctx, request, raw, effect, asker=grant.token_id)


async def rollback(request: Request) -> Response:
    """Take back what a fork changed since it was made or last merged. What it had is kept as a checkpoint of
    the fork. Refused while somebody has it mounted for writing, unless with `force`."""
    ctx = context(request)
    origin, grant = await who(ctx, request)
    body, raw = await read_json(request)
    only(body, "force")
    name, force = check_fs_name(request.path_params["fork"]), flag(body, "force") or False
    service = ctx.service
    kept = await _kept(ctx, request, grant, raw)
    if kept is not None:
        return send(timed(ctx, kept, ctx.host.monotonic()))
    fork = await ctx.run(lambda: service.db.read(lambda tx: service.forks.need_descendant(tx, origin, name)))

    def effect(tx: Tx) -> Answer:
        hold(tx, origin, grant)
        return to_answer(service.merges.roll_back(tx, fork, service.restores, force=force))

    async with ctx.compares:
        return await _change(ctx, request, fork, grant, raw, effect, ctx.host.monotonic())


async def _kept(ctx: Context, request: Request, grant: Grant, raw: bytes) -> Answer | None:
    """The answer to a request that comes again: the fork may be gone by then."""
    call = idempotent_call(request, grant.token_id, raw)
    return None if call is None else await ctx.run(lambda: ctx.service.idempotency.kept(call))


async def _change(
    ctx: Context,
    request: Request,
    fs: FsRef,
    grant: Grant,
    raw: bytes,
    effect: Callable[[Tx], Answer],
    began: float,
) -> Response:
    """A write to the tree of `fs`, which waits for its copy; then its feed is woken. `began`: when work on it
    did."""
    call = idempotent_call(request, grant.token_id, raw)
    service = ctx.service

    def work() -> Answer:
        answer = service.forks.when_copied(
            fs, lambda: service.db.write(lambda tx: service.idempotency.run(tx, call, effect))
        )
        service.feed.wake(fs.id, json.loads(answer.body)["fs_seq"])
        return answer

    return send(timed(ctx, await ctx.run(work), began))


def routes() -> list[RouteDef]:
    return [
        route("POST", FORKS, create),
        route("GET", FORKS, list_all),
        route("DELETE", FORKS + "/{fork}", delete),
        route("GET", FORKS + "/{fork}/changes", changes),
        route("POST", FORKS + "/{fork}/rollback", rollback),
        route("POST", FORKS + "/{fork}/checkpoints", checkpoint),
        route("POST", ONE + "/merges", merge),
    ]
