"""How files look in JSON, and how ranges, cursors and revisions are read."""

from __future__ import annotations

import stat

import pytest
from starlette.requests import Request

from fsd.model.attrs import Attr
from fsd.model.errors import UsageError
from fsd.server.tree_json import (
    cursor_of,
    field_bytes,
    octal,
    path_of,
    raw_query,
    read_cursor,
    read_range,
    read_revision,
    stat_object,
)


def request(raw_path: bytes = b"/v1/file-systems/fs/stat/", query: bytes = b"", **headers: str) -> Request:
    return Request(
        {
            "type": "http",
            "method": "GET",
            "raw_path": raw_path,
            "query_string": query,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }
    )


def attr(**fields: object) -> Attr:
    base = Attr(5, stat.S_IFREG | 0o644, 1, 0, 0, 3, 1, 10**18 + 5, 2, 0, None, 0, None, None, 9, 0, 9)
    return base._replace(**fields)


def test_a_stat_object_of_odd_things() -> None:
    shown = stat_object(b"/d/\xff", attr(xattrs={b"user.tag.k": b"v", b"user.x": b"\0"}), 77)
    assert (shown["path"], shown["path_b64"], shown["name_b64"]) == ("/d/\ufffd", "L2Qv/w==", "/w==")
    assert shown["tags"] == {"k": "v"} and shown["xattrs"]["user.x"] == "AA=="
    assert (shown["mtime"], shown["revision"]) == ("2001-09-09T01:46:40.000000005Z", "5:9")
    device = stat_object(b"/", attr(mode=stat.S_IFCHR | 0o600, rdev=7), 1, xattrs=False)
    assert (device["kind"], device["rdev"], device["name"]) == ("char", 7, "")
    assert "xattrs" not in device


@pytest.mark.parametrize("ns", [-(2**63), -1, 2**63 - 1])
def test_times_no_calendar_has_are_still_shown(ns: int) -> None:
    shown = stat_object(b"/f", attr(mtime=ns), 1)
    assert shown["mtime_ns"] == ns and shown["mtime"].endswith("Z")


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("bytes=0-4", (0, 5)),
        ("bytes=5-", (5, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=8-100", (8, 10)),
        ("bytes=10-", (10, 10)),
        ("bytes=50-60", (10, 10)),
        ("bytes=6-2", (6, 6)),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=x-", None),
    ],
)
def test_ranges(text: str, span: tuple[int, int] | None) -> None:
    assert read_range(request(range=text), 10) == span
    assert read_range(request(), 10) is None


def test_paths_and_queries_of_any_bytes() -> None:
    assert path_of(request(b"/v1/file-systems/fs/stat/a%2Fb/%FF/x%20y")) == [b"a", b"b", b"\xff", b"x y"]
    assert path_of(request()) == path_of(request(b"/v1/file-systems/fs/stat")) == []
    with pytest.raises(UsageError):
        path_of(request(b"/v1/file-systems/fs/stat/a/%2e%2e/b"))
    assert raw_query(request(query=b"a=%FF+x&b=&c&a=2")) == {"a": b"2", "b": b"", "c": b""}


def test_cursors_modes_and_revisions() -> None:
    assert read_cursor(cursor_of(b"a/\xff")) == b"a/\xff" and read_cursor(None) == read_cursor("") == b""
    assert octal("0755", "mode") == 0o755 and read_revision('"1:2"', "x") == (1, 2)
    assert (
        field_bytes({"n": {"b64": "/w=="}}, "n") == b"\xff" and field_bytes({"n": "ü"}, "n") == "ü".encode()
    )
    for call in (
        lambda: read_cursor("!"),
        lambda: octal("8", "mode"),
        lambda: octal("77777", "mode"),
        lambda: read_revision("1", "x"),
        lambda: field_bytes({"n": 5}, "n"),
        lambda: field_bytes({"n": {"b64": "!"}}, "n"),
    ):
        with pytest.raises(UsageError):
            call()
