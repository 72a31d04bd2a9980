"""The OpenAPI 3.1 document of all routes, made from the route table itself, so that none can be missing.

A handler's docstring is its summary. What a route takes and gives beyond its path is in `openapi_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fsd.server.openapi_tables import SAYS, SCHEMAS, Says
from fsd.server.route import RouteDef

_PARAM: Final = re.compile(r"\{(\w+)\}")
_JSON: Final = "application/json"


def document(routes: Sequence[RouteDef]) -> dict[str, Any]:
    """The whole document; raises KeyError for a route `SAYS` does not know."""
    paths: dict[str, Any] = {}
    for route in routes:
        said = SAYS[(route.method, route.template)]
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, said)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fsd", "version": server_version(), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {name: _schema(fields) for name, fields in SCHEMAS.items()},
            "securitySchemes": {
                "admin": {"type": "http", "scheme": "bearer", "description": "the admin key"},
                "token": {"type": "http", "scheme": "bearer", "description": "a token (fsd1.…)"},
            },
        },
    }


def server_version() -> str:
    """The installed version."""
    try:
        return version("fsd")
    except PackageNotFoundError:
        return "unknown"


def _operation(route: RouteDef, said: Says) -> dict[str, Any]:
    security: list[dict[str, list[str]]] = [
        {scheme: []} for scheme in ("admin", "token") if said.needs in (scheme, "either")
    ]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAM.findall(route.template)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": kind}}
        for name, kind in said.query.items()
    ]
    headers = said.headers if route.method in ("GET", "HEAD") else (*said.headers, "Idempotency-Key")
    parameters += [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}} for name in headers
    ]
    made: dict[str, Any] = {
        "operationId": f"{route.handler.__module__.rsplit('.', 1)[-1]}_{route.handler.__name__}",
        "summary": (route.handler.__doc__ or "").strip().splitlines()[0],
        "security": security,
        "parameters": parameters,
        "responses": {
            **{str(status): _response(gives) for status, gives in said.gives.items()},
            "default": _response("Error"),
        },
    }
    if said.body is not None:
        made["requestBody"] = {"content": _content(said.body)}
    return made


def _response(gives: str) -> dict[str, Any]:
    if gives in SCHEMAS:
        content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{gives}"}}}
        return {"description": gives, "content": content}
    return {"description": "raw", "content": {gives: {}}}


def _content(body: dict[str, str] | str) -> dict[str, Any]:
    if isinstance(body, str):
        return {body: {}}
    return {_JSON: {"schema": _schema(body, required=False)}}


def _type(kind: str) -> dict[str, Any]:
    """`any` is every value."""
    if kind == "any":
        return {}
    return {"type": [kind[1:], "null"] if kind.startswith("?") else kind}


def _schema(fields: dict[str, str], *, required: bool = True) -> dict[str, Any]:
    properties = {name: _type(kind) for name, kind in fields.items()}
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required and fields:
        made["required"] = list(fields)
    return made
