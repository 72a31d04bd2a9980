"""Routes of journals, by a token of the filesystem. Rules and hashes: docs/journals.md."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.errors import UsageError
from fsd.model.limits import FEED_WAIT_MAX, JOURNAL_PAGE_MAX
from fsd.model.times import parse_when
from fsd.server.context import (
    JSON_TYPE,
    Context,
    context,
    flag,
    idempotent_call,
    json_response,
    only,
    query_int,
    query_limit,
    query_seconds,
    read_json,
    send,
    string,
    to_answer,
)
from fsd.server.route import RouteDef, route
from fsd.service import evidence
from fsd.service.access import FsRef
from fsd.service.entries import (
    check_actor,
    check_entries,
    check_journal_id,
    integer,
    read_envelope,
)
from fsd.service.evidence import Search
from fsd.service.idempotency import Answer, check_key
from fsd.service.journals import Append

BASE: Final = "/v1/file-systems/{id}/journals"
ONE: Final = BASE + "/{jid}"
SEQ_MAX: Final = 2**53
_HASH = re.compile(r"[0-9a-f]{64}")


async def create(request: Request) -> Response:
    """Make a journal; again with an equal envelope it is the same one."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    body, raw = await read_json(request)
    only(body, "journal_id", "kind", "title", "actor", "labels")
    given = body.get("journal_id")
    journal_id = None if given is None else check_journal_id(given)
    envelope = read_envelope(body)

    call = idempotent_call(request, who.token_id, raw)
    service = ctx.service

    def effect(tx: Tx) -> Answer:
        made, new = service.journals.create(tx, fs, journal_id, envelope, who)
        return to_answer(made, 201 if new else 200)

    return send(await ctx.run(lambda: service.db.write(lambda tx: service.idempotency.run(tx, call, effect))))


async def list_all(request: Request) -> Response:
    """Journals with their heads, in order of id."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    kind, labels = request.query_params.get("kind"), _labels(request)
    limit, cursor = query_limit(request), request.query_params.get("cursor", "")
    db = ctx.service.db
    return json_response(await ctx.run(lambda: evidence.list_journals(db, fs, kind, labels, cursor, limit)))


async def describe(request: Request) -> Response:
    """One journal with its head."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    jid = check_journal_id(request.path_params["jid"])
    return json_response(await ctx.run(lambda: ctx.service.journals.get(fs, jid)))


async def append(request: Request) -> Response:
    """Add entries, all or none; durable when answered."""
    ctx = context(request)
    fs, who = await ctx.who(request)
    jid = check_journal_id(request.path_params["jid"])
    body, _ = await read_json(request, exact=True)
    header = request.headers.get("idempotency-key")

    def work() -> dict[str, Any]:
        return ctx.service.journals.append(fs, jid, _read_append(body, header), who)

    answer = await ctx.run(work)
    ctx.waiters.wake(_subject(fs, jid))
    return send(Answer(200, to_answer(answer).body, replayed=answer["idempotent"]))


def _read_append(body: dict[str, Any], header: str | None) -> Append:
    """The append in a body. The key in the body stands before the header's."""
    only(body, "entries", "idempotency_key", "expected_seq", "barrier")
    key = string(body, "idempotency_key")
    if key is None:
        key = header
    expected = body.get("expected_seq")
    return Append(
        entries=check_entries(body.get("entries")),
        key="" if key is None else check_key(key),
        expected_seq=None if expected is None else integer(expected, "expected_seq"),
        barrier=flag(body, "barrier") or False,
    )


async def read(request: Request) -> Response:
    """Entries in order; with `wait` a long poll for the next one."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    jid = check_journal_id(request.path_params["jid"])
    after = query_int(request, "after_seq", 0, 0, SEQ_MAX)
    limit = query_limit(request, high=JOURNAL_PAGE_MAX)
    wait = query_seconds(request, "wait", FEED_WAIT_MAX)
    if wait:
        await _await_entry(ctx, fs, jid, after, wait)

    def page() -> tuple[list[str], int]:
        if wait:
            ctx.authenticate(request)  # a token revoked meanwhile gets no answer
        return ctx.service.journals.read(fs, jid, after, limit)

    texts, following = await ctx.run(page)
    return _texts("entries", texts, {"next_after_seq": following})


async def search(request: Request) -> Response:
    """Entries of all journals, or of one, that match every filter."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    query, limit = request.query_params, query_limit(request)
    now = ctx.host.wall_ns()
    actor, jid = query.get("actor"), query.get("journal_id")
    wanted = Search(
        type=query.get("type"),
        status=query.get("status"),
        actor=None if actor is None else check_actor(actor, "actor"),
        journal_id=None if jid is None else check_journal_id(jid),
        kind=query.get("kind"),
        subjects=tuple(query.getlist("subject")),
        labels=_labels(request),
        since=parse_when(query["since"], now, "since") if "since" in query else None,
        until=parse_when(query["until"], now, "until") if "until" in query else None,
    )
    cursor, db = query.get("cursor", ""), ctx.service.db
    texts, following = await ctx.run(lambda: evidence.search(db, fs, wanted, cursor, limit))
    return _texts("matches", texts, {"next_cursor": following})


async def verify(request: Request) -> Response:
    """Walk the hash chain; with `head_hash`, also look for that hash in it."""
    ctx = context(request)
    fs, _ = await ctx.who(request)
    jid = check_journal_id(request.path_params["jid"])
    trusted = request.query_params.get("head_hash")
    if trusted is not None and not _HASH.fullmatch(trusted):
        raise UsageError("head_hash is 64 hex digits in lower case")
    async with ctx.walks:  # seconds of a worker thread for a long journal
        return json_response(await ctx.run(lambda: evidence.verify(ctx.service.db, fs, jid, trusted)))


async def _await_entry(ctx: Context, fs: FsRef, jid: str, after: int, wait: float) -> None:
    """Return when the journal has an entry after `after`, or `wait` seconds have passed."""
    subject = _subject(fs, jid)
    event = ctx.waiters.register(subject)
    deadline = ctx.host.monotonic() + wait
    try:
        while await ctx.poll(lambda: ctx.service.journals.head_seq(fs, jid)) <= after:
            left = deadline - ctx.host.monotonic()
            if left <= 0 or ctx.waiters.stopping or not await ctx.waiters.wait(event, left):
                return
    finally:
        ctx.waiters.forget(subject, event)


def _subject(fs: FsRef, jid: str) -> tuple[str, int, str]:
    return ("journal", fs.id, jid)


def _labels(request: Request) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in request.query_params.getlist("label"):
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError("label is written key=value")
        pairs.append((key, value))
    return tuple(pairs)


def _texts(name: str, texts: list[str], rest: dict[str, Any]) -> Response:
    """An answer around JSON texts that are sent exactly as they are stored."""
    tail = json.dumps(rest)[1:]
    body = f'{{"{name}":[{",".join(texts)}],{tail}'
    return Response(body.encode(), media_type=JSON_TYPE)


def routes() -> list[RouteDef]:
    return [
        route("POST", BASE, create),
        route("GET", BASE, list_all),
        route("GET", ONE, describe),
        route("POST", ONE + "/entries", append),
        route("GET", ONE + "/entries", read),
        route("GET", ONE + "/verify", verify),
        route("GET", "/v1/file-systems/{id}/journal-entries", search),
    ]
