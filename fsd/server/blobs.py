"""Blobs by contract over HTTP: `/v1/blobs/{key}`, by a token, which also names the filesystem.

`HEAD` makes a blob young, since a capture that is told "it is there" does not upload it; `GET` does not.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.model.errors import NotFound
from fsd.model.limits import CONTRACT_BLOB_MAX
from fsd.server.context import context, declared_length, json_response, query_limit
from fsd.server.route import RouteDef, route
from fsd.server.streaming import HAND_OVER, PiecesResponse, receive
from fsd.service.contract_check import shown
from fsd.service.names import Incoming, NameReading, Stat

BASE: Final = "/v1/blobs"
ONE: Final = BASE + "/{key:path}"


async def put(request: Request) -> Response:
    """Store bytes under the name they hash to. Again is no error, and makes the blob young."""
    ctx = context(request)
    key = request.path_params["key"]
    declared = declared_length(request, CONTRACT_BLOB_MAX)
    fs, who = await ctx.who(request)
    names = ctx.service.names
    incoming = names.begin(fs, key)

    async def store(incoming: Incoming) -> Response:
        await receive(ctx, request, incoming.add)
        stat, new = await ctx.run(lambda: names.put(fs, who, incoming))
        return json_response({"result": stat.shown()}, 201 if new else 200)

    if declared is not None and declared <= HAND_OVER:
        return await store(incoming)
    async with ctx.uploads:
        return await store(incoming)


async def get(request: Request) -> Response:
    """The bytes of a blob, verified as they are sent."""
    ctx = context(request)
    key = request.path_params["key"]

    def work() -> tuple[NameReading, bytes]:
        fs, _ = ctx.authenticate(request)
        reading = ctx.service.names.open(fs, key)
        if reading is None:
            raise _absent(key)
        return reading, reading.next_piece()

    reading, first = await ctx.run(work)
    return PiecesResponse(ctx, first, reading.next_piece, 200, _headers(reading.stat))


async def head(request: Request) -> Response:
    """Whether a blob is there. The answer makes it young: a sweep leaves it to who asked."""
    ctx = context(request)
    key = request.path_params["key"]

    def work() -> Stat:
        fs, who = ctx.authenticate(request)
        stat = ctx.service.names.touch(fs, who, key)
        if stat is None:
            raise _absent(key)
        return stat

    return Response(None, 200, _headers(await ctx.run(work)), "application/octet-stream")


async def delete(request: Request) -> Response:
    """Remove a blob that no checkpoint uses. One that is gone already is no error."""
    ctx = context(request)
    key = request.path_params["key"]

    def work() -> None:
        fs, who = ctx.authenticate(request)
        ctx.service.names.delete(fs, who, key)

    await ctx.run(work)
    return json_response({"result": None})


async def list_all(request: Request) -> Response:
    """Blobs whose keys begin with `prefix`, in order of key."""
    ctx = context(request)
    query, limit = request.query_params, query_limit(request, 1000)

    def work() -> tuple[list[Stat], str | None]:
        fs, _ = ctx.authenticate(request)
        return ctx.service.names.page(fs, query.get("prefix", ""), query.get("cursor", ""), limit)

    found, cursor = await ctx.run(work)
    return json_response({"blobs": [one.shown() for one in found], "cursor": cursor})


def _headers(stat: Stat) -> dict[str, str]:
    return {
        "Content-Length": str(stat.size),
        "ETag": f'"{stat.key.rpartition("/")[2]}"',
        "X-Fsd-Uploaded-At": str(stat.shown()["uploadedAt"]),
    }


def _absent(key: str) -> NotFound:
    return NotFound(f"no blob {shown(key)}")


def routes() -> list[RouteDef]:
    return [
        route("GET", BASE, list_all),
        route("HEAD", ONE, head),
        route("GET", ONE, get),
        route("PUT", ONE, put),
        route("DELETE", ONE, delete),
    ]
