"""The checkpoint contract over HTTP: one POST for each method, `/v1/checkpoints/{op}`, by a token, which also
names the filesystem. Rules: docs/checkpoints.md.

Ids are in the body, never in the path: they are any text. The answer is `{"result": …}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.model.errors import CheckpointNotFound, UsageError
from fsd.model.limits import JSON_BODY_MAX, MANIFEST_BODY_MAX, MIB
from fsd.server.context import (
    JSON_TYPE,
    PARSE_INLINE,
    Context,
    context,
    declared_length,
    flag,
    hold_slot,
    idempotent_call,
    is_large,
    query_flag,
    read_body,
    send,
)
from fsd.server.route import Handler, RouteDef, route
from fsd.server.streaming import PiecesResponse
from fsd.service.access import FsRef, Grant
from fsd.service.contract_check import shown
from fsd.service.idempotency import Answer, Call
from fsd.service.manifests import Forked
from fsd.service.open import Service
from fsd.service.threads import NULL, Effect
from fsd.wire.strictjson import loads_foreign

BASE: Final = "/v1/checkpoints/"
_PIECE: Final = MIB  # of a streamed answer, about

Body = dict[str, Any]
Write = Callable[[Service, FsRef, Grant, Body], Effect]
Read = Callable[[Service, FsRef, Body, Request], bytes | Iterator[bytes]]

# Method → what it does and its documentation. Writes are effects, run under an idempotency key.
_WRITES: Final[dict[str, tuple[Write, str]]] = {
    "append": (
        lambda service, fs, who, body: service.manifests.append(fs, who, body),
        "Add a checkpoint and make it the head of its thread, as one compare-and-swap.",
    ),
    "deleteHead": (
        lambda service, fs, who, body: service.manifests.delete_head(fs, who, body),
        "Remove the head of a thread; its parent becomes the head.",
    ),
    "deleteCheckpoints": (
        lambda service, fs, who, body: service.manifests.delete_checkpoints(fs, who, body),
        "Keep the newest checkpoints of a thread's chain and remove the older ones.",
    ),
    "acquireWriter": (
        lambda service, fs, who, body: service.threads.acquire(fs, who, body),
        "Take the writer lease of a thread; never waits.",
    ),
    "renew": (
        lambda service, fs, who, body: service.threads.renew(fs, who, body),
        "Extend a current lease by its whole duration from now on.",
    ),
    "release": (
        lambda service, fs, who, body: service.threads.release(fs, who, body),
        "End a lease; does nothing when it is not the writer's any more.",
    ),
    "saveThread": (
        lambda service, fs, who, body: service.threads.save_thread(fs, who, body),
        "Replace the saved messages of a thread.",
    ),
    "instances.upsert": (
        lambda service, fs, who, body: service.instances.upsert(fs, who, body),
        "Replace the instance record of a key.",
    ),
    "instances.delete": (
        lambda service, fs, who, body: service.instances.delete(fs, who, body),
        "Remove the instance record of a key.",
    ),
}


# What makes room, and the leases that it needs.
_FREES: Final = ("deleteHead", "deleteCheckpoints", "instances.delete", "acquireWriter", "renew", "release")


def _get(service: Service, fs: FsRef, body: Body, request: Request) -> bytes:
    return service.threads.get(fs, body, portable=_option(request, body, "portable"))


def _list(service: Service, fs: FsRef, body: Body, request: Request) -> Iterator[bytes]:
    render, portable = _option(request, body, "render"), _option(request, body, "portable")
    return service.threads.records(fs, body, render=render, portable=portable)


_READS: Final[dict[str, tuple[Read, str]]] = {
    "get": (_get, "One checkpoint, or null. A native one is rendered: its tree as entries."),
    "list": (
        _list,
        "All checkpoints of a thread, by time, then id. `render` shows the files of native ones.",
    ),
    "getHead": (
        lambda service, fs, body, _: service.threads.get_head(fs, body),
        "The id of a thread's newest checkpoint, or null.",
    ),
    "listBlobReferences": (
        lambda service, fs, _body, _: service.threads.references(fs),
        "How many checkpoints use each blob key, over all threads.",
    ),
    "missingBlobs": (
        lambda service, fs, body, _: json.dumps(service.names.missing(fs, body)).encode(),
        "The blob keys a checkpoint uses that are not stored: what a capture asks when it has appended.",
    ),
    "loadThread": (
        lambda service, fs, body, _: service.threads.load_thread(fs, body),
        "The saved messages of a thread.",
    ),
    "instances.get": (
        lambda service, fs, body, _: service.instances.get(fs, body),
        "The instance record of a key, or null.",
    ),
}


async def sweep(request: Request) -> Response:
    """Remove blob names that no checkpoint uses and that are older than `olderThanMs` (default a day)."""
    ctx = context(request)
    body, raw = await read_foreign(ctx, request)

    def work() -> Answer:
        fs, who = ctx.authenticate(request)
        call = idempotent_call(request, who.token_id, raw)
        if call is not None and (kept := ctx.service.idempotency.kept(call)) is not None:
            return kept  # what has become old since is another sweep's
        deleted = ctx.service.names.sweep(fs, who, body)
        made = Answer(200, _result(json.dumps({"deleted": deleted}).encode()))
        return ctx.service.db.write(
            lambda tx: ctx.service.idempotency.run(tx, call, lambda _: made), frees=True
        )

    return send(await ctx.run(work))


async def fork(request: Request) -> Response:
    """Copy a checkpoint with its conversation into an empty thread."""
    ctx = context(request)
    body, raw = await read_foreign(ctx, request)

    def work() -> Answer:
        fs, who = ctx.authenticate(request)
        found: list[Forked] = []

        def begin() -> Effect:
            found.append(ctx.service.manifests.fork(fs, who, body))
            return found[0].effect

        answer = _write(ctx, idempotent_call(request, who.token_id, raw), begin)
        record = b"" if answer.replayed else found[0].record
        if not record:
            name = json.loads(answer.body)["result"]["checkpoint"]
            record = ctx.service.threads.get(fs, {"id": name}, portable=False)
            if record == NULL:
                raise CheckpointNotFound(f"the fork {shown(name)} was made, and removed since")
        return Answer(answer.status, _result(b'{"checkpoint":' + record + b"}"), answer.replayed)

    return send(await ctx.run(work))


def _write(ctx: Context, call: Call | None, begin: Callable[[], Effect], *, frees: bool = False) -> Answer:
    """Run the effect that `begin` makes, or give the answer kept under the key. Blocks. `frees`: see
    `Database.write`."""
    service = ctx.service
    if call is not None and (kept := service.idempotency.kept(call)) is not None:
        return kept  # what was right then may be refused by a check before the transaction now
    effect = begin()
    return service.db.write(
        lambda tx: service.idempotency.run(tx, call, lambda tx: Answer(200, _result(effect(tx)))),
        frees=frees,
    )


def _writer(op: str, write: Write, doc: str) -> Handler:
    async def handler(request: Request) -> Response:
        ctx = context(request)
        body, raw = await read_foreign(ctx, request)

        def work() -> Answer:
            fs, who = ctx.authenticate(request)
            call = idempotent_call(request, who.token_id, raw)
            return _write(ctx, call, lambda: write(ctx.service, fs, who, body), frees=op in _FREES)

        return send(await ctx.run(work))

    return _named(handler, op, doc)


def _reader(op: str, read: Read, doc: str) -> Handler:
    async def handler(request: Request) -> Response:
        ctx = context(request)
        body, _ = await read_foreign(ctx, request)

        def work() -> bytes | tuple[bytes, Iterator[bytes]]:
            fs, _ = ctx.authenticate(request)
            found = read(ctx.service, fs, body, request)
            if isinstance(found, bytes):
                return _result(found)
            pieces = _array(found)
            return next(pieces), pieces

        made = await ctx.run(work)
        if isinstance(made, bytes):
            return Response(made, media_type=JSON_TYPE)
        first, pieces = made
        return PiecesResponse(ctx, first, lambda: next(pieces, b""), 200, {}, JSON_TYPE)

    return _named(handler, op, doc)


def _named(handler: Handler, op: str, doc: str) -> Handler:
    """What OpenAPI takes its summary and operation id from."""
    handler.__doc__, handler.__name__ = doc, op.replace(".", "_")
    return handler


def _result(text: bytes) -> bytes:
    return b'{"result":' + text + b"}"


def _array(texts: Iterator[bytes]) -> Iterator[bytes]:
    """`{"result": […]}` in pieces of about _PIECE."""
    held: list[bytes] = [b'{"result":[']
    size = 0
    for at, text in enumerate(texts):
        held += [b","] if at else []
        held.append(text)
        size += len(text)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join([*held, b"]}"])


def _option(request: Request, body: Body, name: str) -> bool:
    return query_flag(request, name) or bool(flag(body, name))


async def read_foreign(ctx: Context, request: Request) -> tuple[Body, bytes]:
    """The body and its bytes. One over JSON_BODY_MAX waits for one of a few slots; a large one at all is
    read only for somebody who has a token."""
    if is_large(request, MANIFEST_BODY_MAX):
        await ctx.who(request)
        declared = declared_length(request, MANIFEST_BODY_MAX)
        huge = declared is None or declared > JSON_BODY_MAX
        await hold_slot(request, ctx.manifests if huge else ctx.large_bodies)
    raw = await read_body(request, MANIFEST_BODY_MAX)

    def parse() -> Any:
        return loads_foreign(raw, "the body") if raw.strip() else {}

    body = parse() if len(raw) <= PARSE_INLINE else await ctx.run(parse)
    if not isinstance(body, dict):
        raise UsageError("the body is not a JSON object")
    return body, raw


def routes() -> list[RouteDef]:
    return [
        *(route("POST", BASE + op, _writer(op, *what)) for op, what in _WRITES.items()),
        *(route("POST", BASE + op, _reader(op, *what)) for op, what in _READS.items()),
        route("POST", BASE + "forkFromCheckpoint", fork),
        route("POST", BASE + "sweep", sweep),
    ]
