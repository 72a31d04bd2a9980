"""Checkpoints over HTTP: lists, differences, going back, exports. Any thread; raises `FsdError`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fsd.client.files import json_name
from fsd.client.http import CHUNK, Http, Query, encode_name, encode_path
from fsd.model.errors import Unavailable
from fsd.model.limits import DIFF_PAGE_MAX, LIST_PAGE_MAX

JsonObject = dict[str, Any]
_RESTORE: Final = 600.0  # seconds a restore of many files may take


class Checkpoints:
    """The checkpoints of one filesystem."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._fs = f"/v1/file-systems/{http.identity.file_system_id}"
        self._base = self._fs + "/checkpoints"

    def _one(self, name: str) -> str:
        return f"{self._base}/{encode_name(name)}"

    def page(
        self, *, thread: str | None = None, limit: int = LIST_PAGE_MAX, cursor: str | None = None
    ) -> JsonObject:
        """`{checkpoints, next_cursor}`, newest first."""
        return self.http.json("GET", self._base, query={"thread": thread, "limit": limit, "cursor": cursor})

    def show(self, name: str) -> JsonObject:
        return self.http.json("GET", self._one(name))

    def delete(self, name: str) -> JsonObject:
        return self.http.json("DELETE", self._one(name), wait=_RESTORE)

    def prune(self, keep: str, *, named: bool | None = None, dry_run: bool = False) -> JsonObject:
        """Delete what `keep` does not keep, step by step; what was deleted in all. `named`: True takes all,
        False automatic ones alone; None: all for a mere number, automatic ones for rules."""
        deleted: list[str] = []
        while True:
            body: JsonObject = {"keep": keep, "dry_run": dry_run, "named": bool(named)}
            if named is None and keep.isascii() and keep.isdigit():
                body["asked_for"] = True
            answer = self.http.json("POST", self._base + "/prune", body=body, wait=_RESTORE)
            deleted += answer["deleted"]
            if dry_run or not answer["more"]:
                return {**answer, "deleted": deleted}

    def difference(self, first: str, last: str | None = None) -> JsonObject:
        """All changes between two states; `last` None: the live one."""
        after: str | None = None
        changes: list[JsonObject] = []
        spent = 0.0
        while True:
            query: Query = {"from": first, "to": last, "limit": DIFF_PAGE_MAX, "after": after}
            page = self.http.json("GET", self._fs + "/diff", query=query, wait=_RESTORE)
            changes += page["changes"]
            spent += page["server_ms"]
            after = page["next_after"]
            if after is None:
                ends = {name: page[name] for name in ("from_seq", "to_seq")}
                return {**ends, "changes": changes, "server_ms": round(spent, 3)}

    def restore(
        self,
        at: Mapping[str, str],
        path: bytes | None = None,
        *,
        force: bool = False,
        own: Sequence[int] = (),
        dry_run: bool = False,
    ) -> JsonObject:
        """Make the tree, or `path`, what it was in the state `at` (`checkpoint` or `at_journal`)."""
        body: JsonObject = {**at, "force": force, "own_sessions": list(own), "dry_run": dry_run}
        if path is not None:
            body["path"] = json_name(path)
        return self.http.json("POST", self._fs + "/restore", body=body, wait=_RESTORE)

    def undelete(self, path: bytes, *, own: Sequence[int] = (), dry_run: bool = False) -> JsonObject:
        """Bring `path` back as it was in the newest state that has it."""
        body = {"path": json_name(path), "own_sessions": list(own), "dry_run": dry_run}
        return self.http.json("POST", self._fs + "/undelete", body=body, wait=_RESTORE)

    def history(self, path: bytes, *, limit: int, follow: bool = True) -> JsonObject:
        """At most `limit` versions of a file, newest first; with `follow` under its earlier names too."""
        versions: list[JsonObject] = []
        cursor: str | None = None
        told: JsonObject = {}
        route = f"{self._fs}/history/{encode_path(path)}"
        while True:
            room = min(limit - len(versions), LIST_PAGE_MAX)
            query: Query = {"limit": room, "cursor": cursor, "follow": None if follow else "0"}
            page = self.http.json("GET", route, query=query, wait=_RESTORE)
            told = told or page
            versions += page["versions"]
            cursor = page["next_cursor"]
            if cursor is None or len(versions) >= limit:
                return {**told, "versions": versions, "next_cursor": cursor}

    def export(self, path: bytes, at: Mapping[str, str]) -> Iterator[bytes]:
        """The tar stream of a state, whole or an error; not tried again once it began."""
        route = f"{self._fs}/export/{encode_path(path)}"
        reply = self.http.retried(lambda: self.http.open(route, query=dict(at)))
        try:
            if reply.header("X-Fsd-Seq") is None:
                raise Unavailable("the answer is no export of an fsd server")
            yield from reply.pieces(CHUNK)
        finally:
            reply.close()
