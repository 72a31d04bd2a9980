"""Routes of the control plane: filesystems and tokens, by the admin key."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.server.context import (
    Context,
    check_fs_name,
    context,
    idempotent_call,
    json_response,
    only,
    query_flag,
    query_int,
    query_limit,
    read_json,
    send,
    string,
    to_answer,
    whole,
)
from fsd.server.route import RouteDef, route
from fsd.service.access import ACTIVE, ADMIN, DISABLED, FsRef
from fsd.service.idempotency import Answer, Call
from fsd.service.threads import check_terms, store_terms
from fsd.service.tokens import PAGE_MAX

BASE = "/v1/file-systems"
ONE = BASE + "/{id}"
OFFSET_MAX = 1_000_000


async def create(request: Request) -> Response:
    """Make a filesystem and its first owner token."""
    ctx = context(request)
    ctx.admin(request)
    body, raw = await read_json(request)
    only(body, "display_name", "labels", "lease_duration_ms", "renew_after_ms")
    labels = body.get("labels") or {}
    if not isinstance(labels, dict):
        raise UsageError("labels is an object of strings")
    name = string(body, "display_name") or ""
    terms = check_terms(body.get("lease_duration_ms"), body.get("renew_after_ms"))
    filesystems = ctx.service.filesystems

    def effect(tx: Tx) -> Answer:
        made = filesystems.create(tx, name, list(labels.items()))
        if terms is not None:
            store_terms(tx, filesystems.find(tx, made["file_system_id"]), terms)
        return to_answer(made, 201)

    return await write(ctx, request, raw, effect)


async def list_all(request: Request) -> Response:
    """Filesystems in order of id."""
    ctx = context(request)
    ctx.admin(request)
    query = request.query_params
    label = None
    if "label" in query:
        key, equals, value = query["label"].partition("=")
        if not equals:
            raise UsageError("label is written key=value")
        label = (key, value)
    limit = query_limit(request)
    page = await ctx.run(
        lambda: ctx.service.filesystems.list(
            display_name=query.get("display_name"), label=label, after=query.get("cursor", ""), limit=limit
        )
    )
    return json_response(page)


async def describe(request: Request) -> Response:
    """One filesystem; also with an owner token of it. Of a fork: what it was made from, with `chain` all the
    way up."""
    ctx = context(request)
    fs = await managed(ctx, request)
    chain = query_flag(request, "chain")

    def work() -> object:
        service = ctx.service
        found = service.filesystems.describe(fs.name)
        fork = service.db.read(lambda tx: service.forks.describe(tx, fs))
        if fork is not None:
            found = {**found, **fork}
        return {**found, "chain": service.forks.chain(fs)} if chain else found

    return json_response(await ctx.run(work))


async def check(request: Request) -> Response:
    """Try what its users need; also with an owner token of it."""
    ctx = context(request)
    fs = await managed(ctx, request)
    return json_response(await ctx.run(lambda: ctx.service.filesystems.check(fs)))


async def delete(request: Request) -> Response:
    """Unreachable at once; rows and packs go in the background. Refused while forks still read its files:
    `detach` copies them first, `cascade` deletes them too."""
    ctx = context(request)
    ctx.admin(request)
    name = check_fs_name(request.path_params["id"])
    _, raw = await read_json(request)
    cascade, detach = of_forks(request)
    service = ctx.service

    def effect(tx: Tx) -> Answer:
        return to_answer(service.filesystems.delete(tx, name, cascade=cascade))

    if detach and not await was_asked(ctx, idempotent_call(request, ADMIN, raw)):
        await ctx.run(lambda: service.forks.detach(name))
    return await write(ctx, request, raw, effect, frees=True)


def of_forks(request: Request) -> tuple[bool, bool]:
    """What becomes of the forks that still read from what is deleted: `cascade`, `detach`."""
    cascade, detach = query_flag(request, "cascade"), query_flag(request, "detach")
    if cascade and detach:
        raise UsageError("cascade and detach exclude each other")
    return cascade, detach


async def create_token(request: Request) -> Response:
    """A new owner token, shown once."""
    ctx = context(request)
    ctx.admin(request)
    body, raw = await read_json(request)
    only(body, "token_name", "ttl_s")
    name, ttl = string(body, "token_name") or "", whole(body, "ttl_s")
    fs_name = check_fs_name(request.path_params["id"])

    def effect(tx: Tx) -> Answer:
        fs = ctx.service.filesystems.find(tx, fs_name)
        return to_answer(ctx.service.tokens.create(tx, fs, name, ttl), 201)

    return await write(ctx, request, raw, effect)


async def list_tokens(request: Request) -> Response:
    """Tokens without their secrets, oldest first."""
    ctx = context(request)
    ctx.admin(request)
    fs_name = check_fs_name(request.path_params["id"])
    offset = query_int(request, "offset", 0, 0, OFFSET_MAX)
    limit = query_limit(request, PAGE_MAX, PAGE_MAX)
    expired = query_flag(request, "include_expired")

    def page() -> object:
        fs = ctx.service.filesystems.get(fs_name)
        return ctx.service.tokens.list(fs, include_expired=expired, offset=offset, limit=limit)

    return json_response(await ctx.run(page))


async def disable_token(request: Request) -> Response:
    """Refused from the next request on."""
    return await _token(
        request, lambda ctx, tx, fs, tid: ctx.service.tokens.set_status(tx, fs, tid, DISABLED)
    )


async def enable_token(request: Request) -> Response:
    """Accepted again."""
    return await _token(request, lambda ctx, tx, fs, tid: ctx.service.tokens.set_status(tx, fs, tid, ACTIVE))


async def delete_token(request: Request) -> Response:
    """Gone for good."""
    return await _token(request, lambda ctx, tx, fs, tid: ctx.service.tokens.delete(tx, fs, tid))


async def _token(request: Request, change: Callable[[Context, Tx, FsRef, str], object]) -> Response:
    ctx = context(request)
    ctx.admin(request)
    fs_name = check_fs_name(request.path_params["id"])
    _, raw = await read_json(request)

    def effect(tx: Tx) -> Answer:
        fs = ctx.service.filesystems.find(tx, fs_name)
        return to_answer(change(ctx, tx, fs, request.path_params["tid"]))

    # A full disk must not be in the way of a revocation.
    return await write(ctx, request, raw, effect, frees=True)


async def managed(ctx: Context, request: Request) -> FsRef:
    """The path's filesystem for the admin key or a token of it."""
    if ctx.is_admin(request):
        name = check_fs_name(request.path_params["id"])
        return await ctx.run(lambda: ctx.service.filesystems.get(name))
    return (await ctx.who(request))[0]


async def was_asked(ctx: Context, call: Call | None) -> bool:
    """Whether a request comes again: what it does ahead of its transaction may not be possible any more."""
    return call is not None and await ctx.run(lambda: ctx.service.idempotency.knows(call))


async def write(
    ctx: Context,
    request: Request,
    raw: bytes,
    effect: Callable[[Tx], Answer],
    *,
    asker: str = ADMIN,
    frees: bool = False,
) -> Response:
    """Effect and remembered answer in one transaction. Tokens are unsealed after it: none is stored.
    `asker`: the admin or a token's id, see `idempotent_call`; `frees`: see `Database.write`."""
    call = idempotent_call(request, asker, raw)
    service = ctx.service

    def work() -> Answer:
        return service.db.write(lambda tx: service.idempotency.run(tx, call, effect), frees=frees)

    answer = await ctx.run(work)
    shown = service.tokens.unseal(json.loads(answer.body))
    return send(Answer(answer.status, to_answer(shown).body, answer.replayed))


def routes() -> list[RouteDef]:
    return [
        route("POST", BASE, create),
        route("GET", BASE, list_all),
        route("GET", ONE, describe),
        route("GET", ONE + "/check", check),
        route("DELETE", ONE, delete),
        route("POST", ONE + "/tokens", create_token),
        route("GET", ONE + "/tokens", list_tokens),
        route("POST", ONE + "/tokens/{tid}/disable", disable_token),
        route("POST", ONE + "/tokens/{tid}/enable", enable_token),
        route("DELETE", ONE + "/tokens/{tid}", delete_token),
    ]
