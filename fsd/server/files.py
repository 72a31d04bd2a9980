"""The tree by path, by a token: what direct commands use. Rules and objects: docs/protocol.md.

Bodies stream: a PUT is cut into blocks that are stored as it arrives and named in one transaction at its end;
a GET is read ahead by one piece. A body that ends early changes nothing.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fsd.meta.database import Tx
from fsd.model.attrs import Attr
from fsd.model.errors import Conflict, InternalError, PosixError, UsageError
from fsd.model.limits import APPEND_FOLDS_MAX, FILE_MAX, FIND_SCAN_MAX, LIST_PAGE_BYTES, LIST_PAGE_MAX, MIB
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.model.spans import Span, read_spans, total, write_spans
from fsd.server import actions
from fsd.server.actions import ID_MAX, TIME_MAX, change
from fsd.server.context import (
    Context,
    context,
    declared_length,
    json_response,
    only,
    query_flag,
    query_int,
    query_limit,
    send,
    to_answer,
)
from fsd.server.route import RouteDef, route
from fsd.server.streaming import HAND_OVER, PiecesResponse, receive
from fsd.server.tree_json import (
    AT_NAMES,
    KIND_NAMES,
    at_of,
    cursor_of,
    kind_of,
    named,
    octal,
    path_of,
    raw_query,
    read_cursor,
    read_range,
    read_revision,
    revision_of,
    stat_object,
    tags_of,
)
from fsd.service.access import FsRef, Grant, check_own
from fsd.service.idempotency import Answer, Call, check_key
from fsd.service.namespace import list_some, weight
from fsd.service.paths import Done, Put, need_file
from fsd.service.retained import State, state_of
from fsd.service.tree import Place, resolve, walk
from fsd.service.upload import Folded, FoldNeeded, Reading, Spread, Uploaded, Uploading, fold

ONE: Final = "/v1/file-systems/{id}"
CHECK_FIRST: Final = 4 * MIB  # of a body larger than this, path and conditions are checked before it is read
NOTHING: Final = Uploaded(0, (), None)
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")


# -- reading -----------------------------------------------------------------------------------------


async def stat(request: Request) -> Response:
    """What is at a path."""
    ctx = context(request)
    path, follow = path_of(request), query_flag(request, "follow")
    at = at_of(request.query_params)

    def work() -> object:
        fs, _ = ctx.authenticate(request)

        def read(tx: Tx) -> object:
            state = state_of(tx, fs, at)
            place = resolve(tx, state.fs, path, follow=follow, at=state.at)
            return stat_object(place.path, place.need(), state.seq)

        return ctx.service.db.read(read)

    return json_response(await ctx.run(work))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file ready to be sent: the span of it and its first bytes."""

    attr: Attr
    span: tuple[int, int]
    partial: bool
    reading: Reading
    first: bytes
    data: list[Span] | None  # where what is sent lies, when holes are not


async def get_file(request: Request) -> Response:
    """The bytes of a file, or a range of them, of one state; with `holes=0` the data alone."""
    ctx = context(request)
    path, at = path_of(request), at_of(request.query_params)
    sparse = bool(request.query_params.get("holes")) and not query_flag(request, "holes")
    match = request.headers.get("if-match")
    wanted = None if match is None or match.strip() == "*" else read_revision(match, "If-Match")

    def work() -> _Opened:
        fs, _ = ctx.authenticate(request)

        def read(tx: Tx) -> tuple[Attr, tuple[int, int] | None, Reading]:
            state = state_of(tx, fs, at)
            place = resolve(tx, state.fs, path, follow=True, at=state.at)
            attr = need_file(place)
            if wanted is not None and (attr.ino, attr.cseq) != wanted:
                raise Conflict(
                    f"{show(place.path)} has revision {revision_of(attr)} now",
                    details={"revision": revision_of(attr)},
                )
            asked = read_range(request, attr.size)
            first, end = asked or (0, attr.size)
            service = ctx.service
            opened = Reading.open(tx, service.db, service.packs, fs, state, attr, first, end)
            return attr, asked, opened

        attr, asked, reading = ctx.service.db.read(read)
        data = reading.skip_holes() if sparse else None
        return _Opened(attr, asked or (0, attr.size), asked is not None, reading, reading.next_piece(), data)

    return _file_response(ctx, await ctx.run(work))


def _file_response(ctx: Context, opened: _Opened) -> Response:
    """Sends an opened file while the next piece is being read."""
    first, end = opened.span
    headers = {
        "Content-Length": str(end - first),
        "ETag": f'"{revision_of(opened.attr)}"',
        "X-Fsd-Size": str(opened.attr.size),
        "Accept-Ranges": "bytes",
    }
    if opened.data is not None:
        # Of another length than the range: no 206, whatever lies in between may count.
        headers |= {"Content-Length": str(total(opened.data)), "X-Fsd-Data": write_spans(opened.data)}
        return PiecesResponse(ctx, opened.first, opened.reading.next_piece, 200, headers)
    if opened.partial:
        span = f"{first}-{end - 1}" if end > first else "*"
        headers["Content-Range"] = f"bytes {span}/{opened.attr.size}"
    status = 206 if opened.partial else 200
    return PiecesResponse(ctx, opened.first, opened.reading.next_piece, status, headers)


async def list_directory(request: Request) -> Response:
    """Entries of a directory in order of names, or of all below it, parents first, a page at a time."""
    ctx = context(request)
    path, recursive = path_of(request), query_flag(request, "recursive")
    limit, at = query_limit(request, LIST_PAGE_MAX), at_of(request.query_params)
    after = read_cursor(request.query_params.get("after"))

    def work() -> object:
        fs, _ = ctx.authenticate(request)

        def read(tx: Tx) -> object:
            state = state_of(tx, fs, at)
            top = resolve(tx, state.fs, path, follow=True, at=state.at)
            entries: list[dict[str, Any]] = []
            more, last, room = None, after, LIST_PAGE_BYTES
            for below, attr in _below(tx, state, top, after, limit + 1, recursive=recursive):
                if len(entries) == limit or room < 0:
                    more = cursor_of(last)
                    break
                last, room = below, room - weight(attr)
                entries.append(stat_object(_join(top.path, below), attr, state.seq, xattrs=False))
            return {**named("path", top.path), "entries": entries, "next_after": more, "fs_seq": state.seq}

        return ctx.service.db.read(read)

    return json_response(await ctx.run(work))


def _below(
    tx: Tx, state: State, top: Place, after: bytes, limit: int, *, recursive: bool
) -> Iterator[tuple[bytes, Attr]]:
    need = top.need()
    if not need.is_dir:
        raise PosixError(errno.ENOTDIR, f"{show(top.path)} is no directory")
    if recursive:
        yield from walk(tx, state.fs, need, after, limit, state.at)
        return
    for entry in list_some(tx, state.fs, need.ino, after, limit, state.at):
        yield entry.name, entry.attr


def _join(top: bytes, below: bytes) -> bytes:
    return top.rstrip(b"/") + b"/" + below


async def find(request: Request) -> Response:
    """Entries below a path that pass every filter. A page may hold none and yet not be the last."""
    ctx = context(request)
    path, limit = path_of(request), query_limit(request, LIST_PAGE_MAX)
    after = read_cursor(request.query_params.get("after"))
    passes, at = _filter(request), at_of(request.query_params)

    def work() -> object:
        fs, _ = ctx.authenticate(request)

        def read(tx: Tx) -> object:
            state = state_of(tx, fs, at)
            top = resolve(tx, state.fs, path, follow=True, at=state.at)
            matches: list[dict[str, Any]] = []
            below, seen, room = after, 0, LIST_PAGE_BYTES
            for below, attr in _below(tx, state, top, after, FIND_SCAN_MAX, recursive=True):
                seen += 1
                if passes(below, attr):
                    matches.append(stat_object(_join(top.path, below), attr, state.seq, xattrs=False))
                    room -= weight(attr)
                    if len(matches) == limit or room < 0:
                        break
            done = seen < FIND_SCAN_MAX and len(matches) < limit and room >= 0
            following = None if done else cursor_of(below)
            return {"matches": matches, "next_after": following, "fs_seq": state.seq}

        return ctx.service.db.read(read)

    return json_response(await ctx.run(work))


def _filter(request: Request) -> Callable[[bytes, Attr], bool]:
    query = raw_query(request)
    only(
        query,
        *("name", "type", "min_size", "max_size", "newer_ns", "older_ns", "tag", "limit", "after"),
        *AT_NAMES,
    )
    name, tag = query.get("name"), query.get("tag", b"").decode("utf-8", "replace")
    kind = query.get("type", b"").decode("utf-8", "replace")
    if kind and kind not in KIND_NAMES:
        raise UsageError(f"type is one of {', '.join(sorted(KIND_NAMES))}")
    min_size = query_int(request, "min_size", 0, 0, FILE_MAX)
    max_size = query_int(request, "max_size", FILE_MAX, 0, FILE_MAX)
    newer = query_int(request, "newer_ns", -TIME_MAX - 1, 0, TIME_MAX)
    older = query_int(request, "older_ns", TIME_MAX + 1, 0, TIME_MAX)
    key, equals, value = tag.partition("=")

    def passes(path: bytes, attr: Attr) -> bool:
        last = path.rsplit(b"/", 1)[-1]
        if name is not None and not fnmatch.fnmatchcase(last, name):
            return False
        if (kind and kind_of(attr) != kind) or not min_size <= attr.size <= max_size:
            return False
        if not newer < attr.mtime < older:
            return False
        held = tags_of(attr) if key else {}
        return not key or (key in held and (not equals or held[key] == value))

    return passes


# -- writing -----------------------------------------------------------------------------------------


async def put_file(request: Request) -> Response:
    """Write a whole file, or append; all or nothing, durable when answered."""
    ctx = context(request)
    put, size, data = _read_put(request)
    declared = declared_length(request, FILE_MAX)
    fs, who = await ctx.who(request)
    if declared is None or declared > CHECK_FIRST:
        await ctx.run(lambda: _check_first(ctx, request, fs, who, put))
    if declared is not None and declared <= HAND_OVER:
        return await _store(ctx, request, fs, who, put, size, data)
    async with ctx.uploads:
        return await _store(ctx, request, fs, who, put, size, data)


async def _store(
    ctx: Context, request: Request, fs: FsRef, who: Grant, put: Put, size: int | None, data: list[Span] | None
) -> Response:
    """Receive the body and name it. `size` is what the caller said it has, or with `data` the file."""
    whole = Uploading(ctx.service.packs, fs)
    uploading: Uploading | Spread = whole
    wanted = size
    if data is not None and size is not None:
        uploading, wanted = Spread(whole, data, size), total(data)
    received = await receive(ctx, request, uploading.add)
    declared = declared_length(request, FILE_MAX)
    for said in (wanted, declared):
        if said is not None and received != said:
            raise UsageError(f"the body has {received} bytes, the request says {said}")
    return send(await ctx.run(lambda: _finish_put(ctx, request, fs, who, put, uploading)))


def _check_first(ctx: Context, request: Request, fs: FsRef, who: Grant, put: Put) -> None:
    """Refuse a large body before it is read when it is clear already that it cannot be written. A request
    that comes again under its key must read it: its answer may be kept."""
    call = _put_call(request, who, NOTHING)
    if call is not None and ctx.service.idempotency.knows(call):
        return

    def plan(tx: Tx) -> None:
        check_own(tx, fs)
        ctx.service.paths.put(tx, fs, put, NOTHING, None)

    try:
        ctx.service.forks.when_copied(fs, lambda: ctx.service.db.read(plan))
    except FoldNeeded:
        return  # found again, and done, at the end


def _read_put(request: Request) -> tuple[Put, int | None, list[Span] | None]:
    """How to write; the size and where the data is, as far as the caller said."""
    only(
        request.query_params,
        *("parents", "overwrite", "append", "mode", "uid", "gid", "mtime_ns", "size", "data"),
    )
    query = request.query_params
    match, absent = request.headers.get("if-match"), request.headers.get("if-none-match")
    if absent is not None and absent.strip() != "*":
        raise UsageError("If-None-Match is * on a PUT")
    overwrite = "overwrite" not in query or query_flag(request, "overwrite")
    put = Put(
        path=path_of(request),
        parents=query_flag(request, "parents"),
        overwrite=overwrite,
        append=query_flag(request, "append"),
        mode=octal(query["mode"], "mode") if query.get("mode") else None,
        uid=_number(request, "uid", ID_MAX),
        gid=_number(request, "gid", ID_MAX),
        mtime_ns=_number(request, "mtime_ns", TIME_MAX),
        if_match=None if match is None else read_revision(match, "If-Match"),
        if_absent=absent is not None,
    )
    if not put.path:
        raise UsageError("the root is a directory")
    size, data = _number(request, "size", FILE_MAX), query.get("data")
    if data is None:
        return put, size, None
    if size is None or size < 0 or put.append:
        raise UsageError("data needs the file's size, and cannot be appended")
    return put, size, read_spans(data, 0, size)


def _number(request: Request, name: str, high: int) -> int | None:
    """A whole number of the query string; None when absent."""
    if not request.query_params.get(name):
        return None
    text = request.query_params[name]
    if not _WHOLE.fullmatch(text) or not -high <= int(text) <= high:
        raise UsageError(f"{name} is a whole number of at most {high}")
    return int(text)


def _finish_put(
    ctx: Context, request: Request, fs: FsRef, who: Grant, put: Put, uploading: Uploading | Spread
) -> Answer:
    """Name the stored content: one transaction. Blocks."""
    content = uploading.finish()
    call = _put_call(request, who, content)
    folded: Folded | None = None
    packs = ctx.service.packs
    with packs.landing(fs.name, content.prepared):
        for _ in range(APPEND_FOLDS_MAX):
            try:
                return change(
                    ctx,
                    fs,
                    who,
                    call,
                    lambda tx, f=folded: _put_answer(ctx, tx, fs, put, content, f),  # type: ignore[misc]
                )
            except FoldNeeded as needed:
                folded = fold(packs, fs, needed)
    raise InternalError("the file is being appended to by others all the time", hint="try again")


def _put_answer(
    ctx: Context, tx: Tx, fs: FsRef, put: Put, content: Uploaded, folded: Folded | None
) -> tuple[Answer, Done]:
    paths = ctx.service.paths
    done = paths.execute(tx, fs, paths.put(tx, fs, put, content, folded))
    assert done.place is not None, "a file was written somewhere"
    return to_answer(stat_object(done.place.path, done.place.need(), done.seq)), done


def _put_call(request: Request, who: Grant, content: Uploaded) -> Call | None:
    """The idempotency key bound to path, options, conditions and content."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    digest = hashlib.sha256()
    for part in (
        request.scope["raw_path"],
        request.scope["query_string"],
        request.headers.get("if-match", "").encode(),
        request.headers.get("if-none-match", "").encode(),
        *(b"%d:%b" % (piece.length, piece.hash or b"") for piece in content.pieces),
    ):
        digest.update(b"%d:" % len(part) + part)
    return Call(f"{who.token_id} PUT", check_key(key), digest.digest())


def routes() -> list[RouteDef]:
    return [
        route("GET", ONE + "/stat/{path:path}", stat),
        route("GET", ONE + "/files/{path:path}", get_file),
        route("PUT", ONE + "/files/{path:path}", put_file),
        route("GET", ONE + "/list/{path:path}", list_directory),
        route("POST", ONE + "/actions", actions.act),
        route("GET", ONE + "/find/{path:path}", find),
    ]
