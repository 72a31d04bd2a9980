"""Routes that are found by a word: the same handlers as Starlette finds, and nothing else. No disk."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Match

from fsd.server.app import all_routes
from fsd.server.route import Shortcuts

ROUTES = all_routes()
APP = Starlette(routes=[one.mounted() for one in ROUTES])


def scope(method: str, path: str, **more: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", **more}


def starlette(asked: dict[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Path of the route and its parameters, as the router would decide."""
    for one in APP.routes:
        match, found = one.matches(asked)
        if match is Match.FULL:
            return one.path, found["path_params"]  # type: ignore[attr-defined]
    return None


def test_every_shortcut_is_the_routers_choice() -> None:
    shortcuts, seen = Shortcuts(ROUTES, APP), 0
    for one in ROUTES:
        asked = scope(one.method, one.path.replace("{id}", "fs_aaaaaaaaaaaaaaaaaaaa"))
        if "{" in asked["path"] or shortcuts.find(asked) is None:
            continue
        seen += 1
        assert starlette(scope(one.method, asked["path"])) == (one.path, asked["path_params"])
    assert seen > 10
    assert shortcuts.find(scope("POST", "/v1/file-systems/fs_a/commits")) is not None


@pytest.mark.parametrize(
    "asked",
    [
        scope("GET", "/v1/file-systems/fs_a/commits"),  # 405 is the router's to say
        scope("POST", "/v1/file-systems/fs_a/commits/"),
        scope("POST", "/v1/file-systems/fs_a/nothing"),
        scope("POST", "/v1/file-systems//commits"),
        scope("POST", "/v1/file-systems/fs_a/b/commits"),
        scope("POST", "/v1/file-systems/commits"),
        scope("HEAD", "/v1/file-systems/fs_a/changes"),
        scope("POST", "/v1/file-systems/fs_a/commits", root_path="/v1"),
        scope("GET", "/healthz"),
    ],
)
def test_what_is_no_such_route_is_left_to_the_router(asked: dict[str, Any]) -> None:
    before = dict(asked)
    assert Shortcuts(ROUTES, APP).find(asked) is None
    assert asked == before
