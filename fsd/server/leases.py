"""Leases by a token: the locks of `fsd lock`, and keeping, giving up and listing leases of both kinds. And
the record of what conflicts put beside.

A mount's writer lease comes with its session (`POST …/sessions`, `exclusive`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.model.limits import LEASE_TTL, LISTED_MAX
from fsd.model.times import rfc3339
from fsd.server.context import (
    context,
    idempotent_call,
    json_response,
    only,
    query_flag,
    query_limit,
    read_json,
    seconds,
    send,
    string,
    to_answer,
    whole,
)
from fsd.server.route import RouteDef, route
from fsd.server.tree_json import field_path, from_b64, kind_of_mode, named, path_of
from fsd.service.access import hold_tree
from fsd.service.conflicts import Conflict, note_copy
from fsd.service.idempotency import Answer
from fsd.service.leases import Exclusive
from fsd.service.tree import resolve
from fsd.service.writers import Lease

ONE: Final = "/v1/file-systems/{id}"
_NUMBER_MAX: Final = 2**62


def read_exclusive(given: Any, remote_path: str) -> Exclusive | None:
    """The `exclusive` of a session's start: `{ino, ttl_s?, before?: [session, ticket, next]}`."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise UsageError("exclusive is an object")
    only(given, "ino", "ttl_s", "before")
    ino, before, after = whole(given, "ino"), given.get("before"), None
    if ino is None or not 0 <= ino < _NUMBER_MAX or (ino == 0 and before is None):
        raise UsageError("exclusive.ino is the number of a directory")
    if before is not None:
        if not isinstance(before, list) or [type(one) for one in before] != [int, str, int]:
            raise UsageError("exclusive.before is [session, ticket, next operation]")
        after = (before[0], from_b64(before[1], "exclusive.before"), before[2])
    return Exclusive(ino, remote_path.encode("utf-8", "replace"), _ttl(given), after)


async def take_lock(request: Request) -> Response:
    """Take the lock called PATH; 409 `lease_held` names who has it. A path need not exist."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, raw = await read_json(request)
    only(body, "path", "host", "command", "ttl_s")
    path = b"/" + b"/".join(part for part in field_path(body, "path") if part)
    host, command, ttl = string(body, "host") or "", string(body, "command") or "", _ttl(body)
    call = idempotent_call(request, who.token_id, raw)
    service = ctx.service

    def effect(tx: Tx) -> Answer:
        return to_answer(_shown(service.leases.lock(tx, fs, path, host, command, ttl, who)), 201)

    return send(await ctx.run(lambda: service.db.write(lambda tx: service.idempotency.run(tx, call, effect))))


async def list_leases(request: Request) -> Response:
    """The leases that are held."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    return json_response(
        {"leases": [_shown(one) for one in await ctx.run(lambda: ctx.service.leases.held(fs))]}
    )


async def renew_lease(request: Request) -> Response:
    """Some more time for a lease; 409 `lease_lost` when somebody else took it. May be repeated. A writer
    lease that had expired comes back under a new fence."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, _ = await read_json(request)
    only(body, "ttl_s", "session")
    fence, session, ttl = _fence(request), whole(body, "session") or 0, _ttl(body)
    lease = await ctx.run(lambda: ctx.service.leases.renew(fs, session, fence, ttl, who))
    return json_response(_shown(lease))


async def release_lease(request: Request) -> Response:
    """Give a lease up. One that is not held (any more) is released already."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, _ = await read_json(request)
    only(body)
    fence = _fence(request)
    await ctx.run(lambda: ctx.service.leases.release(fs, fence, who))
    return json_response({"fence": fence, "status": "released"})


async def list_conflicts(request: Request) -> Response:
    """What conflicts put beside below a path, or meant for it, and nobody has removed or renamed since. With
    `count` only how many."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    top = b"/" + b"/".join(part for part in path_of(request) if part)
    if query_flag(request, "count"):
        return json_response({"count": await ctx.run(lambda: ctx.service.conflicts.count(fs, top))})
    limit, after = query_limit(request), _cursor(request)
    found, last = await ctx.run(lambda: ctx.service.conflicts.page(fs, top, after, limit))
    cursor = None if last is None else base64.urlsafe_b64encode(b"%d/" % last[0] + last[1]).decode()
    return json_response({"conflicts": [_conflict(one) for one in found], "next_cursor": cursor})


async def note_conflict(request: Request) -> Response:
    """Put something into the record of conflicts: what a client put beside at the path itself."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, _ = await read_json(request)
    only(body, "original", "host", "detail")
    copy, original = path_of(request), field_path(body, "original")
    host, detail = string(body, "host") or "", string(body, "detail") or ""
    if max(len(host), len(detail)) > LISTED_MAX or "\0" in host + detail:  # PostgreSQL takes no NUL
        raise UsageError(f"host and detail have at most {LISTED_MAX} characters and no NUL")

    def note(tx: Tx) -> int:
        seq, _ = hold_tree(tx, fs, who)
        place = resolve(tx, fs.id, copy, itself=True)
        wanted = b"/" + b"/".join(part for part in original if part)
        now = ctx.host.wall_ns()
        note_copy(tx, fs.id, place, original=wanted, host=host, reason=detail, seq=seq, now=now)
        return seq

    service = ctx.service
    seq = await ctx.run(lambda: service.forks.when_copied(fs, lambda: service.db.write(note)))
    return json_response({"status": "ok", "fs_seq": seq})


def _cursor(request: Request) -> tuple[int, bytes] | None:
    text = request.query_params.get("cursor")
    if not text:
        return None
    try:
        parent, _, name = base64.urlsafe_b64decode(text.encode()).partition(b"/")
        number = int(parent)
        if not 0 <= number < _NUMBER_MAX:
            raise ValueError(number)
    except (ValueError, UnicodeEncodeError) as exc:
        raise UsageError("the cursor is none this route gave") from exc
    return number, name


def _conflict(one: Conflict) -> dict[str, Any]:
    return {
        **named("path", one.path),
        **named("original", one.original),
        "kind": kind_of_mode(one.mode),
        "reason": one.kind,
        "detail": one.reason,
        "host": one.host,
        "mount": one.place,
        "session": one.session,
        "at": rfc3339(one.at),
        "fs_seq": one.seq,
        "ino": str(one.ino),
    }


def _fence(request: Request) -> int:
    text = request.path_params["fence"]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageError("a lease is named by its fence, a number")
    return int(text)


def _ttl(body: Mapping[str, Any]) -> float:
    return seconds(body, "ttl_s", LEASE_TTL)


def _shown(lease: Lease) -> dict[str, Any]:
    kept = {"session": lease.session} if lease.session else {}
    return {"kind": lease.kind, **lease.holder(), **kept, "expires": rfc3339(lease.expires)}


def routes() -> list[RouteDef]:
    return [
        route("POST", ONE + "/leases", take_lock),
        route("GET", ONE + "/leases", list_leases),
        route("POST", ONE + "/leases/{fence}/renew", renew_lease),
        route("POST", ONE + "/leases/{fence}/release", release_lease),
        route("GET", ONE + "/conflicts/{path:path}", list_conflicts),
        route("POST", ONE + "/conflicts/{path:path}", note_conflict),
    ]
