"""Native checkpoints, by a token: made, listed, compared, restored, exported. Fields: docs/protocol.md."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fsd.meta.database import Tx
from fsd.model.errors import NotDrained, NotFound, UsageError
from fsd.model.limits import DIFF_PAGE_MAX, DRAIN_MAX, LIST_PAGE_MAX, PRUNE_CALL, PRUNE_STEP
from fsd.server.context import (
    Context,
    context,
    flag,
    idempotent_call,
    json_response,
    only,
    query_flag,
    query_int,
    query_limit,
    read_json,
    send,
    string,
    timed,
    to_answer,
)
from fsd.server.route import RouteDef, route
from fsd.server.streaming import PiecesResponse
from fsd.server.tree_json import (
    AT_NAMES,
    at_of,
    cursor_of,
    field_path,
    kind_of,
    named,
    path_of,
    read_cursor,
    stat_object,
)
from fsd.service import thinning
from fsd.service.access import FsRef, Grant
from fsd.service.barriers import shown
from fsd.service.contract_check import check_id, check_writer
from fsd.service.difference import Change, Difference
from fsd.service.export import Export
from fsd.service.history import Resume, history, newest_with
from fsd.service.idempotency import Answer
from fsd.service.inthread import Place
from fsd.service.native import FIELDS, may_be_thinned, read_ask
from fsd.service.restore import Restored, Wish
from fsd.service.retained import At, state_of

FS: Final = "/v1/file-systems/{id}"
BASE: Final = FS + "/checkpoints"
_SESSIONS_MAX: Final = 256
_LOOK_EVERY: Final = 0.2  # for answers that came through another replica
_SEQ_MAX: Final = 2**53
_RESUME: Final = re.compile(rb"(\d{1,16}):(\d{1,19}):(.*)", re.DOTALL)


async def create(request: Request) -> Response:
    """Keep the present state as a checkpoint; with `drain` after the mounts sent what they hold."""
    ctx = context(request)
    began = ctx.host.monotonic()
    body, raw = await read_json(request)
    only(body, *FIELDS, "drain", "require_all", "thread", "writer", "expected_head_id", "source")
    place = _place_of(body)
    ask, seconds, require_all = read_ask(body), _drain(body), flag(body, "require_all") or False
    fs, who = await ctx.who(request)
    call = idempotent_call(request, who.token_id, raw)
    service = ctx.service
    sessions: list[dict[str, Any]] | None = None
    kept = None if call is None else await ctx.run(lambda: service.idempotency.kept(call))
    if kept is not None:
        return send(timed(ctx, kept, began))
    if seconds:
        sessions = await _barriers(ctx, fs, who, seconds)
        left = [one for one in sessions if not one["included"]]
        if left and require_all:
            raise NotDrained(
                f"{left[0]['host']}:{left[0]['path']} could not send all it holds: {left[0]['reason']}",
                hint="no checkpoint was made; without require_all it is made of what the server has",
                details={"sessions": sessions},
            )
    waited = ctx.host.monotonic() - began if sessions is not None else 0.0

    def finished(made: dict[str, Any]) -> Answer:
        return to_answer(made if sessions is None else {**made, "sessions": sessions}, 201)

    def around(tx: Tx, make: Callable[[Tx], dict[str, Any]]) -> Answer:
        return service.idempotency.run(tx, call, lambda inner: finished(make(inner)))

    def work() -> Answer:
        if place is None:
            return service.db.write(
                lambda tx: around(tx, lambda inner: service.checkpoints.make(inner, fs, who, ask))
            )
        return service.forks.when_copied(fs, lambda: service.in_thread.make(fs, who, ask, place, around))

    answer = await ctx.run(work)
    return send(timed(ctx, answer, began + waited))


def _place_of(body: dict[str, Any]) -> Place | None:
    """The host's thread a checkpoint goes into; None: the filesystem's own."""
    if body.get("thread") is None:
        for name in ("writer", "expected_head_id", "source"):
            if body.get(name) is not None:
                raise UsageError(f"{name} goes with thread")
        return None
    if body.get("expires_in_s") is not None:
        raise UsageError("expires_in_s is not for a host's thread: its writer deletes checkpoints")
    thread = check_id(body["thread"], "thread")
    head = body.get("expected_head_id")
    source = string(body, "source")
    return Place(
        thread,
        check_writer(body.get("writer")),
        None if head is None else check_id(head, "expected_head_id"),
        _state_text(source, "source"),
    )


def _drain(body: dict[str, Any]) -> float:
    """How many seconds mounts may take; 0: they are not asked."""
    given = body.get("drain")
    if given is None:
        return 0.0
    if not isinstance(given, dict) or set(given) - {"timeout"}:
        raise UsageError("drain is an object with timeout, in seconds")
    seconds = given.get("timeout", 10)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= DRAIN_MAX:
        raise UsageError(f"drain.timeout is a number of seconds over 0, at most {DRAIN_MAX:.0f}")
    return float(seconds)


async def _barriers(ctx: Context, fs: FsRef, who: Grant, seconds: float) -> list[dict[str, Any]]:
    """Ask the mounts and wait for their answers."""
    barriers = ctx.service.barriers
    subject = ("barriers", fs.id)
    event = ctx.waiters.register(subject)
    deadline = ctx.host.monotonic() + seconds
    try:
        asked = await ctx.run(lambda: barriers.ask(fs, who, seconds))
        ctx.waiters.wake(("fs", fs.id))
        try:
            while True:
                answers = await ctx.run(lambda: barriers.answers(asked))
                left = deadline - ctx.host.monotonic()
                if len(answers) == sum(one.id != 0 for one in asked) or left <= 0 or ctx.waiters.stopping:
                    return shown(asked, answers, seconds)
                await ctx.waiters.wait(event, min(left, _LOOK_EVERY))
        finally:
            await ctx.run(lambda: barriers.done(asked))
    finally:
        ctx.waiters.forget(subject, event)


async def list_all(request: Request) -> Response:
    """Checkpoints of all threads or of one, newest first."""
    ctx = context(request)
    limit, thread = query_limit(request), request.query_params.get("thread")
    before = query_int(request, "cursor", 0, 1, _SEQ_MAX) or None

    def work() -> object:
        fs, _ = ctx.authenticate(request)
        found, following = ctx.service.db.read(
            lambda tx: ctx.service.checkpoints.page(tx, fs, thread or None, before, limit)
        )
        return {"checkpoints": found, "next_cursor": None if following is None else str(following)}

    return json_response(await ctx.run(work))


async def show(request: Request) -> Response:
    """One checkpoint, without its files."""
    ctx = context(request)
    name = request.path_params["cid"]

    def work() -> object:
        fs, _ = ctx.authenticate(request)
        return ctx.service.db.read(lambda tx: ctx.service.checkpoints.show(tx, fs, name))

    return json_response(await ctx.run(work))


async def delete(request: Request) -> Response:
    """Remove a checkpoint and what only it could see."""
    ctx = context(request)
    began = ctx.host.monotonic()
    name = request.path_params["cid"]

    def work() -> Answer:
        fs, who = ctx.authenticate(request)
        call = idempotent_call(request, who.token_id, b"")
        service = ctx.service

        def effect(tx: Tx) -> Answer:
            return to_answer(service.checkpoints.delete(tx, fs, who, name))

        return service.db.write(lambda tx: service.idempotency.run(tx, call, effect), frees=True)

    return send(timed(ctx, await ctx.run(work), began))


async def prune(request: Request) -> Response:
    """Delete what a rule does not keep, some at a time: automatic ones alone, with `asked_for` those that
    somebody made as well, and what a restore or merge replaced only when that is an hour ago. `named` takes
    all. (What an older mount's schedule sends, a mere `keep`, must never reach what somebody made.)"""
    ctx = context(request)
    body, _ = await read_json(request)
    only(body, "keep", "named", "asked_for", "dry_run")
    keep = thinning.read_keep(string(body, "keep") or "")
    whole, dry_run = flag(body, "named") or False, flag(body, "dry_run") or False
    asked_for = flag(body, "asked_for") or False

    def work() -> object:
        fs, who = ctx.authenticate(request)
        points, apart = _points(ctx, fs, asked_for=asked_for, whole=whole)
        doomed = thinning.doomed(points, keep)
        removed, more = (doomed, False) if dry_run else _delete_some(ctx, fs, who, doomed)
        return {
            "deleted": removed,
            "kept": len(points) - len(doomed),
            "not_considered": apart,
            "more": more,
            **({"dry_run": True} if dry_run else {}),
        }

    return json_response(await ctx.run(work))


def _delete_some(ctx: Context, fs: FsRef, who: Grant, names: list[str]) -> tuple[list[str], bool]:
    """Delete each in a transaction of its own, for some seconds: the list is read once for many. Those
    that were still there (two mounts that thin out by a rule find the same ones); whether some are left."""
    removed: list[str] = []
    until = ctx.host.monotonic() + PRUNE_CALL
    for at, name in enumerate(names):
        if at >= PRUNE_STEP and ctx.host.monotonic() >= until:
            return removed, True
        try:
            ctx.service.db.write(
                lambda tx, n=name: ctx.service.checkpoints.delete(tx, fs, who, n),  # type: ignore[misc]
                frees=True,
            )
        except NotFound:
            continue  # somebody else deleted it meanwhile
        removed.append(name)
    return removed, False


def _points(ctx: Context, fs: FsRef, *, asked_for: bool, whole: bool) -> tuple[list[thinning.Point], int]:
    """The filesystem's own checkpoints that may go, as they were made, and how many others it has."""
    now = ctx.host.wall_ns()
    found: list[thinning.Point] = []
    apart = after = 0
    while page := ctx.service.db.read(lambda tx, a=after: ctx.service.checkpoints.points(tx, fs, a)):  # type: ignore[misc]
        after = page[-1][0]
        for _, name, at, reason in page:
            if whole or may_be_thinned(reason, now - at, asked_for=asked_for):
                found.append(thinning.Point(name, at))
            else:
                apart += 1
    return found, apart


# -- comparing ---------------------------------------------------------------------------------------


async def difference(request: Request) -> Response:
    """What differs between two states, in order of path."""
    ctx = context(request)
    only(request.query_params, "from", "to", "limit", "after")
    first = _state_text(request.query_params.get("from"), "from")
    last = _state_text(request.query_params.get("to"), "to")
    limit = query_limit(request, LIST_PAGE_MAX, DIFF_PAGE_MAX)
    after = read_cursor(request.query_params.get("after"))
    if first is None:
        raise UsageError("from is missing: the checkpoint to compare")

    def work() -> object:
        fs, _ = ctx.authenticate(request)
        began = ctx.host.monotonic()

        def read(tx: Tx) -> dict[str, Any]:
            was, now = state_of(tx, fs, first), state_of(tx, fs, last)
            changes = Difference(tx, was.fs, was.seq, now.seq).changes()
            rest = [one for one in changes if not after or (one.path, one.kind.encode()) > _place(after)]
            shown = rest[:limit]
            more = len(rest) > limit
            return {
                "from_seq": was.seq,
                "to_seq": now.seq,
                "total": len(changes),
                "changes": [_change(one) for one in shown],
                "next_after": cursor_of(shown[-1].path + b"\0" + shown[-1].kind.encode()) if more else None,
            }

        return {**ctx.service.db.read(read), "server_ms": ctx.ms_since(began)}

    async with ctx.compares:
        return json_response(await ctx.run(work))


def _place(after: bytes) -> tuple[bytes, bytes]:
    path, _, kind = after.partition(b"\0")
    return path, kind


def _state_text(text: str | None, where: str) -> At | None:
    """A checkpoint's id, `seq:N` or `journal:JOURNAL:SEQ`; None: the live state."""
    if not text:
        return None
    kind, colon, rest = text.partition(":")
    if colon and kind == "seq":
        return at_of({"fs_seq": rest})
    if colon and kind == "journal":
        return at_of({"at_journal": rest})
    return at_of({"checkpoint": text})


def _change(one: Change) -> dict[str, Any]:
    there = one.after or one.before
    assert there is not None, "something is or was there"
    made: dict[str, Any] = {
        **named("path", one.path),
        "change": one.kind,
        "kind": kind_of(there),
        "content_changed": one.content or one.kind in ("added", "removed"),
        "size_before": None if one.before is None else one.before.size,
        "size_after": None if one.after is None else one.after.size,
        "mode_before": None if one.before is None else f"{one.before.mode & 0o7777:o}",
        "mode_after": None if one.after is None else f"{one.after.mode & 0o7777:o}",
    }
    if one.source is not None:
        made.update(named("from", one.source))
    return made


async def versions(request: Request) -> Response:
    """What a file was in the retained states, newest first; with `follow` (the default) also under the names
    it had before."""
    ctx = context(request)
    path, limit = path_of(request), query_limit(request)
    before = _resume_of(request.query_params.get("cursor"))
    follow = not request.query_params.get("follow") or query_flag(request, "follow")

    def work() -> object:
        fs, _ = ctx.authenticate(request)

        def read(tx: Tx) -> object:
            found, following, moved_to = history(tx, fs, path, before, limit, follow=follow)
            for one in found:
                node, seq, whole = one.pop("node"), one["newest"]["fs_seq"], _whole(one.pop("path"))
                one |= named("path", whole)
                one["stat"] = None if node is None else stat_object(whole, node, seq, xattrs=False)
            cursor = None if following is None else _resume_text(following)
            moved = {} if moved_to is None else named("moved_to", _whole(moved_to))
            return {**named("path", _whole(path)), **moved, "versions": found, "next_cursor": cursor}

        return ctx.service.db.read(read)

    async with ctx.compares:
        return json_response(await ctx.run(work))


def _whole(path: Sequence[bytes]) -> bytes:
    return b"/" + b"/".join(path)


def _resume_text(at: Resume) -> str:
    return cursor_of(b"%d:%d:%b" % (at.seq, at.ino, b"/".join(at.path)))


def _resume_of(cursor: str | None) -> Resume | None:
    raw = read_cursor(cursor)
    if not raw:
        return None
    match = _RESUME.fullmatch(raw)
    if match is None or int(match[2]) >= 2**63:
        raise UsageError("cursor is not one that an answer gave")
    return Resume(int(match[1]), int(match[2]), tuple(part for part in match[3].split(b"/") if part))


# -- going back --------------------------------------------------------------------------------------


async def restore(request: Request) -> Response:
    """Make the tree, or a path, what it was in a retained state; what is replaced is kept first."""
    body, raw = await read_json(request)
    only(body, *AT_NAMES, "path", "force", "empty", "own_sessions", "dry_run")
    at = at_of({name: str(body[name]) for name in AT_NAMES if body.get(name) is not None})
    if at is None:
        raise UsageError("checkpoint is missing: the state to go back to")
    path = tuple(field_path(body, "path")) if body.get("path") is not None else ()
    force, empty = flag(body, "force") or False, flag(body, "empty") or False
    wish = Wish(at, path, force, _own(body), empty=empty)
    return await _restore(request, raw, flag(body, "dry_run") or False, lambda tx, fs: wish)


async def undelete(request: Request) -> Response:
    """Bring back a path that is gone, as it was in the newest retained state that has it; under its earlier
    name what was removed under a name that no state has."""
    body, raw = await read_json(request)
    only(body, "path", "own_sessions", "dry_run")
    path = tuple(field_path(body, "path"))

    def wish(tx: Tx, fs: FsRef) -> Wish:
        seq, there = newest_with(tx, fs, path)
        return Wish(At(seq=seq), there, force=True, own=_own(body), absent=True)

    if not path:
        raise UsageError("the root is never deleted")
    return await _restore(request, raw, flag(body, "dry_run") or False, wish)


def _own(body: dict[str, Any]) -> frozenset[int]:
    given = body.get("own_sessions") or []
    if not isinstance(given, list) or len(given) > _SESSIONS_MAX or not all(type(n) is int for n in given):
        raise UsageError(f"own_sessions is a list of at most {_SESSIONS_MAX} numbers")
    return frozenset(given)


async def _restore(
    request: Request, raw: bytes, dry_run: bool, wish: Callable[[Tx, FsRef], Wish]
) -> Response:
    ctx = context(request)
    began = ctx.host.monotonic()

    def work() -> Answer:
        fs, who = ctx.authenticate(request)
        restores, service = ctx.service.restores, ctx.service
        if dry_run:
            return service.db.read(lambda tx: _planned(tx, restores.plan(tx, fs, wish(tx, fs)), fs, wish))
        call = idempotent_call(request, who.token_id, raw)
        made: list[Restored] = []

        def effect(tx: Tx) -> Answer:
            wanted = wish(tx, fs)
            done = restores.restore(tx, fs, who, wanted)
            made.append(done)
            return to_answer(_restored(tx, fs, wanted, done))

        def run(tx: Tx) -> Answer:
            made.clear()
            return service.idempotency.run(tx, call, effect)

        answer = service.forks.when_copied(fs, lambda: service.db.write(run))
        for done in made:
            if done.moved:
                service.feed.wake(fs.id, done.seq)
        return answer

    async with ctx.compares:
        return send(timed(ctx, await ctx.run(work), began))


def _restored(tx: Tx, fs: FsRef, wish: Wish, done: Restored) -> dict[str, Any]:
    return {
        "status": "ok",
        "fs_seq": done.seq,
        "restored_seq": state_of(tx, fs, wish.at).seq,
        **named("path", b"/" + b"/".join(wish.path)),
        "changes": done.changes,
        "undo_checkpoint_id": None if done.undo is None else done.undo["checkpoint_id"],
    }


def _planned(tx: Tx, changes: int, fs: FsRef, wish: Callable[[Tx, FsRef], Wish]) -> Answer:
    wanted = wish(tx, fs)
    nothing = Restored(state_of(tx, fs).seq, False, changes, None)
    return to_answer({**_restored(tx, fs, wanted, nothing), "dry_run": True})


# -- export ------------------------------------------------------------------------------------------


async def export(request: Request) -> Response:
    """A directory, or one file, of a state as a tar stream; an error in the middle cuts it off."""
    ctx = context(request)
    path, at = path_of(request), at_of(request.query_params)
    service = ctx.service

    def work() -> tuple[Export, bytes]:
        fs, who = ctx.authenticate(request)
        opened = Export.open(service.db, service.packs, ctx.host, fs, who, at, path)
        try:
            return opened, opened.next_piece()
        except BaseException:
            opened.close()
            raise

    return _TarResponse(ctx, *await ctx.run(work))


class _TarResponse(PiecesResponse):
    """An export's pieces; its state is let go however it ends."""

    def __init__(self, ctx: Context, opened: Export, first: bytes) -> None:
        headers = {"X-Fsd-Seq": str(opened.seq)}
        super().__init__(ctx, first, opened.next_piece, 200, headers, "application/x-tar")
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._ctx.run(self._opened.close))


def routes() -> list[RouteDef]:
    return [
        route("POST", BASE, create),
        route("GET", BASE, list_all),
        route("POST", BASE + "/prune", prune),
        # Ids of a host's threads may hold anything, slashes too.
        route("GET", BASE + "/{cid:path}", show),
        route("DELETE", BASE + "/{cid:path}", delete),
        route("GET", FS + "/diff", difference),
        route("GET", FS + "/history/{path:path}", versions),
        route("POST", FS + "/restore", restore),
        route("POST", FS + "/undelete", undelete),
        route("GET", FS + "/export/{path:path}", export),
    ]
