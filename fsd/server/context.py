"""What every route handler works with: the service, the bounded thread pools, who asks, bodies, answers.

Handlers are coroutines on the event loop; whatever blocks (the service) goes through `Context.run`. Long
polls have a small pool of their own, so that they never stand before a commit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from fsd import __version__
from fsd.host.seam import Host
from fsd.model.errors import NotAuthenticated, TooLarge, Unavailable, UsageError
from fsd.model.limits import (
    BODY_IDLE,
    BODY_RATE,
    COMPARES_MAX,
    JSON_BODY_MAX,
    KIB,
    LARGE_BODIES_MAX,
    LIST_PAGE_MAX,
    MANIFESTS_MAX,
    UPLOADS_MAX,
    WALKS_MAX,
)
from fsd.model.plain import dataclass, field
from fsd.server.body import ARRIVING, Arriving
from fsd.server.lanes import Lanes
from fsd.server.metrics import Metrics
from fsd.server.waiters import Waiters
from fsd.server.workers import Workers
from fsd.service.access import FsRef, Grant, no_file_system
from fsd.service.idempotency import Answer, Call, check_key
from fsd.service.open import Service
from fsd.service.tokens import token_key
from fsd.wire.strictjson import loads_object

T = TypeVar("T")
log = logging.getLogger(__name__)

THREADS: Final = 24
POLL_THREADS: Final = 4
AUTH_AFTER_BODY: Final = 256 * KIB  # a body this small is read before its token is looked up: one hop less
PARSE_INLINE: Final = 64 * KIB  # a JSON body this small is parsed on the event loop
JSON_TYPE: Final = "application/json"
HELD: Final = "fsd.held"  # in a request's scope: the slot of its large body
KNOWN: Final = "fsd.known"  # and that its token, or the admin key, was looked at and found good
_SCOPE_MAX: Final = 512  # characters of a key's scope: PostgreSQL's index entries hold some 2,700 bytes
_SPAN_MAX: Final = 1e15  # seconds; whatever is meant, it is less


@dataclass(slots=True)
class Context:
    """One running server. Made by `app.make_app`; reached by handlers as `context(request)`. `loop` is set
    before the first request."""

    service: Service
    host: Host
    admin_key: str = field(repr=False)
    waiters: Waiters
    metrics: Metrics = field(default_factory=Metrics)
    pool: Workers = field(default_factory=lambda: Workers(THREADS, "request"))
    loop: asyncio.AbstractEventLoop | None = None
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADS_MAX))
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_BODIES_MAX))
    manifests: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MANIFESTS_MAX))
    walks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WALKS_MAX))
    compares: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(COMPARES_MAX))
    polls: Workers = field(default_factory=lambda: Workers(POLL_THREADS, "poll"))
    sweeps: Workers = field(default_factory=lambda: Workers(1, "sweep"))
    lanes: Lanes | None = None

    async def run(self, fn: Callable[[], T]) -> T:
        """`fn()` on a worker thread, with this request's context (the test clock)."""
        return await self.pool.run(fn)

    async def poll(self, fn: Callable[[], T]) -> T:
        """As `run`, for long polls."""
        return await self.polls.run(fn)

    def admin(self, request: Request) -> None:
        """Raise `NotAuthenticated` unless the request carries the admin key."""
        if not self.is_admin(request):
            raise NotAuthenticated("the admin key is wrong", hint="check FSD_ADMIN_KEY or --admin-key-file")

    def is_admin(self, request: Request) -> bool:
        """Compared in constant time."""
        found = hmac.compare_digest(bearer(request).encode(), self.admin_key.encode())
        if found:
            request.scope[KNOWN] = True
        return found

    def authenticate(self, request: Request) -> tuple[FsRef, Grant]:
        """Whose token the request carries, for the filesystem in its path. Blocks: call it inside `run`."""
        found = self.service.tokens.authenticate(bearer(request), request.path_params.get("id"))
        request.scope[KNOWN] = True
        return found

    def recall(self, request: Request) -> tuple[FsRef, Grant]:
        """As `authenticate`, before a change whose transaction looks at the token itself: `Tokens.recall`."""
        return self.service.tokens.recall(bearer(request), request.path_params.get("id"))

    async def recalled(self, request: Request) -> FsRef:
        """Which filesystem `recall` finds, without a hop where it is remembered."""
        found = self.service.tokens.remembered(token_key(bearer(request)), request.path_params.get("id"))
        if found is None:
            found = await self.run(lambda: self.recall(request))
        return found[0]

    async def who(self, request: Request) -> tuple[FsRef, Grant]:
        """`authenticate` on a worker thread."""
        return await self.run(lambda: self.authenticate(request))

    def ms_since(self, began: float) -> float:
        """`server_ms` of an answer: from `began`, on the monotonic clock."""
        return round((self.host.monotonic() - began) * 1000, 3)

    def committed(self, fs: int, _seq: int, by: int) -> None:
        """The service's listener: wakes the long polls of a filesystem. Any thread."""
        if self.loop is not None and self.waiters.waiting(("fs", fs), by):
            self.loop.call_soon_threadsafe(self.waiters.wake, ("fs", fs), by)


def context(request: Request) -> Context:
    made: Context = request.app.state.fsd
    return made


def bearer(request: Request) -> str:
    """The secret in the Authorization header; raises `NotAuthenticated` when there is none."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not value.strip():
        raise NotAuthenticated(
            "no token", hint="send Authorization: Bearer …; on the command line set FSD_TOKEN"
        )
    return value.strip()


def declared_length(request: Request, limit: int) -> int | None:
    """Content-Length, None when the body is chunked; raises `TooLarge` before a byte is read."""
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise UsageError("Content-Length is no number")
    if len(text) > 18 or int(text) > limit:
        raise TooLarge(f"a body of {text} bytes, at most {limit} on this route")
    return int(text)


def is_large(request: Request, limit: int) -> bool:
    """Whether the body may be larger than AUTH_AFTER_BODY: who sends it is looked up before it is read."""
    declared = declared_length(request, limit)
    if declared is None:
        return "transfer-encoding" in request.headers  # without that there is no body
    return declared > AUTH_AFTER_BODY


async def hold_large(request: Request, limit: int) -> None:
    """Wait until a large body may be held in memory, until the request has ended (`release_large`)."""
    if is_large(request, limit):
        await hold_slot(request, context(request).large_bodies)


async def hold_slot(request: Request, slots: asyncio.Semaphore) -> None:
    """As `hold_large`, of a kind of body; once a request."""
    if HELD not in request.scope:
        await slots.acquire()
        request.scope[HELD] = slots


def release_large(request: Request) -> None:
    """The request has ended."""
    slots = request.scope.pop(HELD, None)
    if slots is not None:
        slots.release()


async def read_body(request: Request, limit: int) -> bytes:
    """As `receive_body`, as bytes: of a large one a copy."""
    return bytes(await receive_body(request, limit))


async def receive_body(request: Request, limit: int) -> bytes | bytearray:
    """The whole body; bounded while it arrives, in the time without progress, and in all: one that drips is
    given up, or a few connections without any token could fill the server."""
    declared = declared_length(request, limit)
    clock = asyncio.get_running_loop().time
    began = clock()
    body = Arriving(began, declared)
    whole = False

    def late() -> float:
        return min(body.heard, began + body.size / BODY_RATE) + BODY_IDLE

    more = True
    try:
        while more:
            try:
                # Not `request.stream()`: one message is a small body's all, and a timeout each costs.
                async with asyncio.timeout_at(late()):
                    message = await request.receive()
            except TimeoutError as exc:
                if late() > clock():
                    continue  # more of it came meanwhile, and no message
                took = clock() - began
                raise Unavailable(f"the body came too slowly: {body.size} bytes in {took:.0f} s") from exc
            if message["type"] == "http.disconnect":
                raise UsageError("the body was cut off")
            more = message.get("more_body", False)
            body.take(message.get("body", b""), clock())
            if body.size > limit:
                raise TooLarge(f"a body of more than {limit} bytes on this route")
            if more and declared is not None:
                request.scope[ARRIVING] = body
        whole = True
    finally:
        request.scope.pop(ARRIVING, None)
        if not whole:
            body.drop()
    if declared is not None and body.size != declared:
        raise UsageError(f"the body has {body.size} bytes, Content-Length says {declared}")
    return body.whole()


async def read_json(request: Request, *, exact: bool = False) -> tuple[dict[str, Any], bytes]:
    """The body as a strict JSON object, and its bytes. One that `is_large` is read only for somebody whose
    token is good, whatever the caller looked at before: a few unknown ones would hold all its slots."""
    if KNOWN not in request.scope and is_large(request, JSON_BODY_MAX):
        await context(request).who(request)
    await hold_large(request, JSON_BODY_MAX)
    raw = await read_body(request, JSON_BODY_MAX)
    if len(raw) <= PARSE_INLINE:
        return loads_object(raw, "the body", exact=exact), raw
    # Megabytes of small values take a second of CPU: not on the event loop.
    made = await context(request).run(lambda: loads_object(raw, "the body", exact=exact))
    return made, raw


def only(body: Mapping[str, Any], *names: str) -> None:
    """Raise `UsageError` for a field the route does not know: a misspelt one must not be ignored."""
    for name in body:
        if name not in names:
            # Newer clients look for the beginning of this and leave out what an older server does not know.
            raise UsageError(
                f"unknown field {name!r}; this route takes {', '.join(names) or 'none'}",
                hint=f"check its spelling; a client newer than this server (fsd {__version__}) may know it",
            )


def string(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} is not a string")
    return value


def whole(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number that the databases' 64 bits hold."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UsageError(f"{name} is not a whole number")
    if value is not None and not -(2**63) <= value < 2**63:
        raise UsageError(f"{name} is out of range")
    return value


def seconds(body: Mapping[str, Any], name: str, default: float) -> float:
    """A time span; what is in range is for the caller to say."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} is a number of seconds")
    if not -_SPAN_MAX < value < _SPAN_MAX:  # not a NaN either; an int of any size compares
        raise UsageError(f"{name} is out of range")
    return float(value)


def flag(body: Mapping[str, Any], name: str) -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} is neither true nor false")
    return value


def query_int(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query string, within bounds; raises `UsageError`."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not low <= int(text) <= high:
        raise UsageError(f"{name} is a whole number from {low} to {high}")
    return int(text)


def query_limit(request: Request, default: int = 100, high: int = LIST_PAGE_MAX) -> int:
    return query_int(request, "limit", default, 1, high)


def query_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "")
    if text in ("", "0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise UsageError(f"{name} is 0 or 1")


def query_seconds(request: Request, name: str, high: float) -> float:
    """Seconds to wait, cut to `high`; 0 when absent."""
    text = request.query_params.get(name)
    try:
        value = float(text or 0)
    except ValueError as exc:
        raise UsageError(f"{name} is a number of seconds") from exc
    if not value >= 0:
        raise UsageError(f"{name} is a number of seconds, 0 or more")
    return min(value, high)


def idempotent_call(request: Request, who: str, body: bytes) -> Call | None:
    """The request's `Idempotency-Key` bound to all that decides its effect; None without the header.

    `who` is the admin or a token: nobody gets at another's kept answers.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    target = f"{request.method} {request.scope['path']}"
    digest = hashlib.sha256(f"{target}?{request.url.query}\n".encode() + body).digest()
    scope = f"{who} {target}"
    if len(scope) > _SCOPE_MAX:
        scope = f"{who} sha256:{hashlib.sha256(target.encode()).hexdigest()}"
    return Call(scope, check_key(key), digest)


def _encoded(value: object) -> bytes:
    """JSON; escaped where a host's text (a label by contract) holds a lone surrogate, which no UTF-8 has."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def to_answer(value: object, status: int = 200) -> Answer:
    """`value` as the answer that can be kept under an idempotency key."""
    return Answer(status, _encoded(value))


def json_response(value: object, status: int = 200) -> Response:
    return Response(_encoded(value), status, media_type=JSON_TYPE)


def timed(ctx: Context, answer: Answer, began: float) -> Answer:
    """With the time the server spent on it since `began`."""
    value = {**json.loads(answer.body), "server_ms": ctx.ms_since(began)}
    return Answer(answer.status, _encoded(value), answer.replayed)


def send(answer: Answer) -> Response:
    headers = {"Idempotent-Replay": "true"} if answer.replayed else None
    return Response(answer.body, answer.status, headers, media_type=JSON_TYPE)


def check_fs_name(name: str) -> str:
    """The `{id}` of a path; anything that cannot be one does not exist."""
    if len(name) != 23 or not name.startswith("fs_"):
        raise no_file_system(name)
    return name
