"""The ASGI application over a `Service`: routes, request ids, the test clock, metrics.

`Front` is the outermost layer, plain ASGI: Starlette's own middleware costs a task and two queues a request.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsd.host.seam import Host
from fsd.meta.database import Tx
from fsd.meta.sql import chunks, in_list, values_list
from fsd.model.errors import Unavailable
from fsd.model.limits import REQUESTS_MAX
from fsd.server import (
    blobs,
    checkpoints,
    clock,
    control,
    files,
    forks,
    journals,
    leases,
    mount,
    native,
    states,
    sweep,
)
from fsd.server.context import Context, context, json_response
from fsd.server.errors import log
from fsd.server.lanes import Lanes
from fsd.server.openapi import document
from fsd.server.route import RouteDef, Shortcuts, route, told
from fsd.server.small import CALL_ID, CALL_ID_MAX, REQUEST_ID, Usual
from fsd.server.waiters import Waiters
from fsd.service.open import Service
from fsd.service.text import new_id

_ASKED: Final = 2**63  # above every seq: a barrier that is asked for is a change, too


def all_routes() -> list[RouteDef]:
    """Every route, in the order they are tried."""
    return [
        route("GET", "/healthz", healthz),
        route("GET", "/readyz", readyz),
        route("GET", "/metrics", metrics),
        route("GET", "/openapi.json", openapi),
        *control.routes(),
        *sweep.routes(),
        *forks.routes(),
        *journals.routes(),
        *files.routes(),
        *mount.routes(),
        *states.routes(),
        *leases.routes(),
        *native.routes(),
        *checkpoints.routes(),
        *blobs.routes(),
    ]


def make_app(service: Service, host: Host, admin_key: str, *, test_clock: bool) -> Front:
    """The application; `Front.context` is its `Context`, to be shut by `close`."""
    ctx = Context(service, host, admin_key, Waiters(None))
    if service.db.engine != "sqlite":
        ctx.waiters = Waiters(lambda subjects: ctx.poll(lambda: _heads(service, subjects)))
    ctx.lanes = Lanes(Usual(ctx), host.monotonic)
    routes = all_routes()
    app = Starlette(routes=[one.mounted() for one in routes], exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    app.state.fsd = ctx
    service.feed.listen(ctx.committed)
    return Front(app, ctx, Shortcuts(routes, app), test_clock=test_clock)


async def healthz(request: Request) -> Response:
    """Alive: the event loop answers."""
    return json_response({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Able to serve: the database answers and the server is not stopping."""
    ctx = context(request)
    if ctx.waiters.stopping:
        raise Unavailable("the server is stopping")
    await ctx.run(lambda: ctx.service.db.read(lambda tx: tx.one("SELECT 1")))
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    ctx = context(request)
    gauges = {"fsd_long_polls_waiting": float(ctx.waiters.count)}
    if ctx.lanes is not None:
        busy = ctx.lanes.busy
        gauges |= {"fsd_lanes": float(ctx.lanes.count), "fsd_lanes_busy": float(busy)}
        gauges["fsd_requests_in_flight"] = float(ctx.metrics.in_flight + busy)
    text = ctx.metrics.text(gauges, sweep.counters(ctx))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def openapi(request: Request) -> Response:
    """This document."""
    return json_response(document(all_routes()))


class Front:
    """Around every request: its id, its clock, its count; and an answer where the application had none."""

    def __init__(self, app: ASGIApp, ctx: Context, shortcuts: Shortcuts, *, test_clock: bool) -> None:
        self.context = ctx
        self._app = app
        self._shortcuts = shortcuts
        self._test_clock = test_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ctx = self.context
        name = new_id(ctx.host, "req_")
        scope["fsd.request_id"] = name
        echoed = [(REQUEST_ID, name.encode())]
        echoed += [(k, v) for k, v in scope["headers"] if k == CALL_ID and len(v) <= CALL_ID_MAX]
        started = ctx.host.monotonic()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *echoed]
            await send(message)

        ctx.metrics.in_flight += 1
        try:
            try:
                if ctx.metrics.in_flight - ctx.waiters.count > REQUESTS_MAX:
                    raise Unavailable("the server has too many requests at once")
                clock.take_header(scope["headers"], allowed=self._test_clock)
                handler = self._shortcuts.find(scope)
                if handler is None:
                    await self._app(scope, receive, sending)
                else:
                    response = await handler(Request(scope, receive, sending))
                    await response(scope, receive, sending)
            except Exception as exc:
                if status:
                    # The answer has begun: the only truth left to tell is to cut it off.
                    log.warning("%s: an answer was cut off: %s", name, exc)
                    raise
                await told(exc, Request(scope))(scope, receive, sending)
        finally:
            ctx.metrics.in_flight -= 1
            seconds = ctx.host.monotonic() - started
            ctx.metrics.request(scope.get("fsd.route", "none"), scope["method"], status, seconds)
            if "fsd.error" in scope:
                ctx.metrics.error(scope["fsd.error"])

    def close(self) -> None:
        """After the last request: end the worker threads, then the service."""
        if self.context.lanes is not None:
            self.context.lanes.shutdown()
        self.context.pool.shutdown()
        self.context.polls.shutdown()
        self.context.sweeps.shutdown()
        self.context.service.close()


async def _http_error(request: Request, exc: Exception) -> Response:
    return told(exc, request)


def _heads(service: Service, subjects: list[Hashable]) -> dict[Hashable, int]:
    """The current number of each subject of `Waiters`: a filesystem's seq (and more while its mounts are
    asked for barriers), a journal's next entry; -1 for one that is gone. A few queries, however many wait."""
    named: list[tuple[Any, ...]] = [one for one in subjects if isinstance(one, tuple)]
    filesystems = [one[1] for one in named if one[0] == "fs"]
    journals = [one[1:] for one in named if one[0] == "journal"]

    def read(tx: Tx) -> dict[Hashable, int]:
        found: dict[Hashable, int] = dict.fromkeys(subjects, -1)
        for some in chunks(filesystems):
            marks, values = in_list(some)
            for fs, seq in tx.all(f"SELECT id, seq FROM fs WHERE id IN {marks}", values):
                found["fs", fs] = seq
            asked = f"SELECT fs, max(id) FROM barrier WHERE fs IN {marks} GROUP BY fs"
            for fs, last in tx.all(asked, values):
                found["fs", fs] += last * _ASKED
        for pairs in chunks(journals):
            rows, values = values_list(pairs)
            for fs, name, following in tx.all(
                f"SELECT j.fs, j.id, j.next_seq FROM {rows} AS k CROSS JOIN journal j "
                "WHERE j.fs=k.column1 AND j.id=k.column2",
                values,
            ):
                found["journal", fs, name] = following
        return found

    return service.db.read(read)
