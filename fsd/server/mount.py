"""The mount's hot routes, by a token: sessions, commits, packs, namespace questions, content, change feed.

Each small request is one hop to a worker thread, where the token is looked up and the service called. A body
that is large is read only after its token was found good.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import TooLarge, Unavailable, UsageError
from fsd.model.limits import (
    BLOCK,
    COMMIT_BLOBS_MAX,
    COMMIT_HEADER_MAX,
    FEED_WAIT_MAX,
    MIB,
    NS_BATCH_MAX,
    SENT_AT_ONCE_MAX,
    UPLOAD_BLOBS_MAX,
    UPLOAD_MAX,
)
from fsd.model.space import Space
from fsd.model.times import rfc3339
from fsd.server.content import HASHES_MAX, content_of, read_hashes
from fsd.server.context import (
    Context,
    context,
    declared_length,
    flag,
    hold_large,
    idempotent_call,
    is_large,
    json_response,
    only,
    query_flag,
    query_int,
    query_limit,
    query_seconds,
    read_body,
    read_json,
    receive_body,
    send,
    string,
    to_answer,
    whole,
)
from fsd.server.lanes import LANES
from fsd.server.leases import read_exclusive
from fsd.server.openapi import server_version
from fsd.server.route import RouteDef, route
from fsd.server.streaming import JoinedResponse, Piece
from fsd.server.tree_json import at_of
from fsd.service.access import FsRef, Grant
from fsd.service.barriers import BarrierAnswer
from fsd.service.idempotency import Answer
from fsd.service.sessions import Pending, SessionInfo, SessionStart
from fsd.wire.frame import pack
from fsd.wire.messages import (
    MEDIA_TYPE,
    FeedPage,
    Mark,
    packb,
    read_commit,
    read_frame,
    unpackb,
)

T = TypeVar("T")
# An answer's body: whole, or as pieces that are not worth joining.
Told: TypeAlias = bytes | list[Piece]

ONE: Final = "/v1/file-systems/{id}"
_SESSION_MAX: Final = 2**31
_SEQ_MAX: Final = 2**53
_COMMIT_MAX: Final = COMMIT_HEADER_MAX + COMMIT_BLOBS_MAX + 8
_PACK_MAX: Final = UPLOAD_MAX + COMMIT_HEADER_MAX
_QUESTIONS_MAX: Final = MIB
_REASON_MAX: Final = 500
_COUNT_MAX: Final = 2**62


async def start_session(request: Request) -> Response:
    """Open a mount session: its number, its first ticket, and how the last one of the place ended."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, raw = await read_json(request)
    only(body, "mount_id", "host", "path", "remote_path", "read_only", "version", "exclusive", "known")
    texts = {name: string(body, name) for name in ("mount_id", "host", "path", "remote_path", "version")}
    if not texts["mount_id"]:
        raise UsageError("mount_id is missing")
    info = SessionInfo(
        mount_id=texts["mount_id"],
        host=texts["host"] or "",
        path=texts["path"] or "",
        remote_path=texts["remote_path"] or "/",
        read_only=flag(body, "read_only") or False,
        version=texts["version"] or "",
    )

    exclusive = read_exclusive(body.get("exclusive"), info.remote_path)
    known = _known(body.get("known"))
    call = idempotent_call(request, who.token_id, raw)
    service = ctx.service

    def effect(tx: Tx) -> Answer:
        made = service.sessions.begin(tx, fs, info, who, known)
        lease = None
        if exclusive is not None:
            lease = service.leases.take(tx, fs, made.session, info.host, info.path, exclusive)
        return to_answer({**_started(made), "fence": lease.fence if lease is not None else 0}, 201)

    def work() -> Answer:
        answer = service.db.write(lambda tx: service.idempotency.run(tx, call, effect), frees=True)
        if exclusive is not None:
            service.leases.announced(fs)
        return answer

    return send(await ctx.run(work))


async def end_session(request: Request) -> Response:
    """The mount says how it ended and what it still holds."""
    ended: list[str] = []

    def check(body: dict[str, Any]) -> None:
        only(body, "ended", "pending")
        ended.append(string(body, "ended") or "")

    return await _note(request, check, lambda ctx, fs, n, p: ctx.service.sessions.end(fs, n, ended[0], p))


async def report_session(request: Request) -> Response:
    """A sign of life, and what the mount still holds."""
    return await _note(
        request,
        lambda body: only(body, "pending"),
        lambda ctx, fs, n, p: ctx.service.sessions.report(fs, n, p),
    )


async def list_sessions(request: Request) -> Response:
    """Mount sessions, newest first."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    limit = query_limit(request)
    before = query_int(request, "cursor", 0, 1, _SESSION_MAX) or None

    def work() -> object:
        found = [_shown(row) for row in ctx.service.sessions.list(fs, limit, before)]
        more = len(found) == limit
        return {"sessions": found, "next_cursor": str(found[-1]["session"]) if more else None}

    return json_response(await ctx.run(work))


async def commit(request: Request) -> Response:
    """Apply a session's operations in order, each with its outcome, in one transaction."""

    def work(ctx: Context, fs: FsRef, who: Grant, body: bytes | bytearray) -> bytes:
        return ctx.service.commits.commit(fs, read_commit(body), who).encode()

    answer = await _hot(request, _COMMIT_MAX, work, recall=True)
    if (declared_length(request, _COMMIT_MAX) or SENT_AT_ONCE_MAX + 1) <= SENT_AT_ONCE_MAX:
        request.scope[LANES] = context(request).lanes
    return answer


async def store_packs(request: Request) -> Response:
    """Store blobs ahead of the commit that names them; durable when answered."""

    def work(ctx: Context, fs: FsRef, _who: Grant, body: bytes | bytearray) -> bytes:
        _, blobs = read_frame(body, blobs_max=UPLOAD_BLOBS_MAX, bytes_max=UPLOAD_MAX, views=True)
        ctx.service.packs.store(fs.id, fs.name, blobs)
        return packb({"stored": len(blobs)})

    return await _hot(request, _PACK_MAX, work)


async def ask(request: Request) -> Response:
    """Questions about the namespace, all answered from one state, the live one or a retained one."""
    at = at_of(request.query_params)

    def work(ctx: Context, fs: FsRef, _who: Grant, body: bytes | bytearray) -> bytes:
        questions = unpackb(body, "the questions")
        if not isinstance(questions, tuple):
            raise UsageError("the questions are no list")
        if len(questions) > NS_BATCH_MAX:
            raise TooLarge(f"{len(questions)} questions in one request, at most {NS_BATCH_MAX}")
        seq, answers = ctx.service.namespace.ask(fs, questions, at)
        return packb({"seq": seq, "answers": answers})

    return await _hot(request, _QUESTIONS_MAX, work)


async def get_blobs(request: Request) -> Response:
    """Content by hash, in stored form, in the order asked, cut at a bound. With `keep` no content: what is
    there counts as used now, so that it stays for the grace."""
    keep = query_flag(request, "keep")

    def work(ctx: Context, fs: FsRef, _who: Grant, body: bytes | bytearray) -> Told:
        if keep:
            return pack({"absent": ctx.service.packs.keep(fs, set(read_hashes(body)))}, [])
        return content_of(ctx.service, fs, body)

    answer = await _hot(request, HASHES_MAX, work)
    if not keep:
        request.scope[LANES] = context(request).lanes
    return answer


async def changes(request: Request) -> Response:
    """The change feed after a seq; a long poll that holds no thread. The token is looked up before each
    answer: one revoked meanwhile gets none."""
    ctx = context(request)
    fs = await ctx.recalled(request)
    after = query_int(request, "after", 0, 0, _SEQ_MAX)
    session = query_int(request, "session", 0, 0, _SESSION_MAX)
    root = query_int(request, "root", 0, 0, _COUNT_MAX)
    wait = query_seconds(request, "wait", FEED_WAIT_MAX)
    known = None
    if "known" in request.query_params:
        known = Mark(
            query_int(request, "known", 0, 0, _SEQ_MAX), query_int(request, "known_at", 0, 0, _COUNT_MAX)
        )
    told = "asked" in request.query_params  # else the reader knows nothing of barriers
    asked = query_int(request, "asked", 0, 0, _SEQ_MAX)
    subject = ("fs", fs.id)
    waiter = ctx.waiters.register(subject, session)
    deadline = ctx.host.monotonic() + wait
    unseen = session  # 0 once the session was told of this sign of life

    def look() -> FeedPage:
        nonlocal unseen
        ctx.authenticate(request)
        if unseen:
            ctx.service.sessions.seen(fs, unseen)
            unseen = 0
        page = ctx.service.feed.read(fs, after, root, known)
        asks = ctx.service.barriers.asks(fs, session, asked) if session and told else ()
        return page._replace(asks=asks, space=_space(ctx))

    try:
        while True:
            page = await ctx.poll(look)
            left = deadline - ctx.host.monotonic()
            if page.changes or page.reset or page.asks or left <= 0 or ctx.waiters.stopping:
                return _raw(ctx, page.encode())
            await ctx.waiters.wait(waiter, left)
    finally:
        ctx.waiters.forget(subject, waiter)


async def answer_barrier(request: Request) -> Response:
    """The mount says what became of a barrier it was asked for in the feed."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    body, _ = await read_json(request)
    only(body, "ask", "included", "fs_seq", "pending", "reason")
    ask, included, seq = whole(body, "ask"), flag(body, "included"), whole(body, "fs_seq")
    reason = string(body, "reason")
    number = request.path_params["n"]
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise UsageError("a session is named by its number")
    if ask is None or included is None:
        raise UsageError("ask and included are missing")
    answer = BarrierAnswer(included, seq or 0, _pending(body.get("pending")), (reason or "")[:_REASON_MAX])
    await ctx.run(lambda: ctx.service.barriers.answer(fs, int(number), ask, answer))
    ctx.waiters.wake(("barriers", fs.id))
    return json_response({"ask": ask, "status": "ok"})


def _space(ctx: Context) -> Space | None:
    """A store that is away keeps nobody from the feed: the mount goes on with what it knows."""
    try:
        return ctx.service.store.space()
    except Unavailable:
        return None


def _started(made: SessionStart) -> dict[str, Any]:
    previous = made.previous
    if previous is not None:
        previous = {**previous, "last_commit_at": _time(previous["last_commit_at"])}
    return {
        "session": made.session,
        "ticket": base64.b64encode(made.ticket).decode(),
        "seq": made.seq,
        "previous": previous,
        "server_version": server_version(),
        "block_size": BLOCK,
    }


async def _note(
    request: Request,
    check: Callable[[dict[str, Any]], None],
    note: Callable[[Context, FsRef, int, Pending], None],
) -> Response:
    """End and report: small notes that may be repeated without harm, so they need no kept answer."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    body, _ = await read_json(request)
    check(body)
    number = request.path_params["n"]
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise UsageError("a session is named by its number")
    pending = _pending(body.get("pending"))
    await ctx.run(lambda: note(ctx, fs, int(number), pending))
    return json_response({"session": int(number), "status": "ok"})


def _pending(given: Any) -> Pending:
    if given is None:
        return (0, 0, 0)
    if (
        not isinstance(given, list)
        or len(given) != 3
        or not all(type(one) is int and 0 <= one < _COUNT_MAX for one in given)
    ):
        raise UsageError("pending is [operations, files, bytes]")
    return (given[0], given[1], given[2])


async def _hot(
    request: Request,
    limit: int,
    work: Callable[[Context, FsRef, Grant, bytes | bytearray], Told],
    *,
    recall: bool = False,
) -> Response:
    """`recall`: the work's transaction looks at the token, so a small body need not do so before."""
    ctx = context(request)
    if not is_large(request, limit):
        body = await read_body(request, limit)

        def both() -> Told:
            fs, who = ctx.recall(request) if recall else ctx.authenticate(request)
            return work(ctx, fs, who, body)

        return _raw(ctx, await ctx.run(both))
    fs, who = await ctx.who(request)
    await hold_large(request, limit)
    large = await receive_body(request, limit)
    return _raw(ctx, await ctx.run(lambda: work(ctx, fs, who, large)))


def _known(given: Any) -> Mark | None:
    if given is None:
        return None
    if (
        not isinstance(given, list)
        or len(given) != 2
        or not all(type(one) is int and 0 <= one < _COUNT_MAX for one in given)
    ):
        raise UsageError("known is [seq, time of that commit]")
    return Mark(given[0], given[1])


def _raw(ctx: Context, body: Told) -> Response:
    if isinstance(body, bytes):
        return Response(body, media_type=MEDIA_TYPE)
    return JoinedResponse(ctx, body, MEDIA_TYPE)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    times = {name: _time(row[name]) for name in ("started_at", "last_seen_at", "last_commit_at")}
    return {**row, **times}


def _time(ns: int | None) -> str | None:
    return None if ns is None else rfc3339(ns)


def routes() -> list[RouteDef]:
    return [
        route("POST", ONE + "/sessions", start_session),
        route("GET", ONE + "/sessions", list_sessions),
        route("POST", ONE + "/sessions/{n}/end", end_session),
        route("POST", ONE + "/sessions/{n}/report", report_session),
        route("POST", ONE + "/sessions/{n}/barrier", answer_barrier),
        route("POST", ONE + "/commits", commit),
        route("POST", ONE + "/packs", store_packs),
        route("POST", ONE + "/ns", ask),
        route("POST", ONE + "/blobs", get_blobs),
        route("GET", ONE + "/changes", changes),
    ]
