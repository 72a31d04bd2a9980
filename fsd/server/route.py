"""A route and what happens around every handler: the one error translation and the metrics' label.

Each route module has `routes() -> list[RouteDef]`; `app` mounts them and `openapi` describes them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from fsd.model.plain import dataclass
from fsd.server.context import bearer, release_large
from fsd.server.errors import answer, log, translate

Handler = Callable[[Request], Awaitable[Response]]
DATA: Final = "/v1/"  # all routes below it want an Authorization header
FILE_SYSTEMS: Final = "/v1/file-systems/"
CUT: Final = 499  # what the metrics count for a client that went away; it is never sent


@dataclass(frozen=True, slots=True)
class RouteDef:
    """`path` in Starlette's form, for example `/v1/file-systems/{id}/stat/{path:path}`."""

    method: str
    path: str
    handler: Handler

    def mounted(self) -> Route:
        made = Route(self.path, _wrapped(self), methods=[self.method])
        # A name may hold a line break, which Starlette's `.*` stops at.
        made.path_regex = re.compile(made.path_regex.pattern, re.DOTALL)
        return made

    @property
    def template(self) -> str:
        """The path as people and OpenAPI write it."""
        return self.path.replace(":path}", "}")


def route(method: str, path: str, handler: Handler) -> RouteDef:
    return RouteDef(method, path, handler)


class Shortcuts:
    """The routes of the form /v1/file-systems/{id}/WORD, by method and word. The hot ones are among them, and
    Starlette would try some forty regular expressions before it comes to a commit: 0.1 ms of CPU. No other
    route matches such a path, so the order of routes decides nothing here."""

    def __init__(self, routes: Sequence[RouteDef], app: ASGIApp) -> None:
        self._app = app
        self._found: dict[tuple[str, str], Handler] = {}
        for one in routes:
            start, _, word = one.path.rpartition("/")
            if start == FILE_SYSTEMS + "{id}" and word.replace("-", "").isalpha():
                self._found[one.method, word] = _wrapped(one)

    def find(self, scope: Scope) -> Handler | None:
        """The handler of a request, whose scope is made ready for it; None: look for it as for any other."""
        path: str = scope["path"]
        if not path.startswith(FILE_SYSTEMS) or scope.get("root_path"):
            return None
        name, _, word = path[len(FILE_SYSTEMS) :].partition("/")
        handler = self._found.get((scope["method"], word))
        if handler is None or not name:
            return None
        scope["path_params"] = {"id": name}
        scope["app"] = self._app
        return handler


def request_id(request: Request) -> str:
    found: str = request.scope["fsd.request_id"]
    return found


def _wrapped(made: RouteDef) -> Handler:
    async def run(request: Request) -> Response:
        request.scope["fsd.route"] = made.template
        try:
            if made.path.startswith(DATA):
                bearer(request)  # who brings no secret learns nothing else about the request
            return await made.handler(request)
        except ClientDisconnect:
            # Nobody is left to answer.
            log.info("%s: the client went away", request_id(request))
            return Response(status_code=CUT)
        except Exception as exc:  # noqa: BLE001 - the boundary: every defect becomes a logged answer
            return told(exc, request)
        finally:
            release_large(request)

    return run


def told(exc: Exception, request: Request) -> Response:
    """The answer to `exc`. A function of its own: in a frame that `exc` came through, a name for the error
    would be a circle that keeps the request's body."""
    error = translate(exc, request_id(request))
    request.scope["fsd.error"] = error.code
    return answer(error, request_id(request))
