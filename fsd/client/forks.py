"""Forks of a filesystem over HTTP: made, listed, merged, rolled back, deleted.

With the admin key's identity or a token of the filesystem. Any thread; raises `FsdError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fsd.client.control import BASE, JsonObject
from fsd.client.http import Http, encode_name

LONG: Final = 600.0  # what a merge of very many changes may take


class Forks:
    """Forks of the filesystem `file_system_id` and theirs; each call is one request."""

    def __init__(self, http: Http, file_system_id: str) -> None:
        self._http = http
        self.file_system_id = file_system_id
        self.path = f"{BASE}/{file_system_id}"

    def _one(self, fork: str) -> str:
        return f"{self.path}/forks/{encode_name(fork)}"

    def create(
        self,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
        of: str | None = None,
        layer: Mapping[str, Any] | None = None,
    ) -> JsonObject:
        """A fork of the head or of a checkpoint, `of` one of the forks; `fs_token` is shown this once."""
        given = {
            "display_name": display_name,
            "labels": dict(labels) if labels else None,
            "checkpoint": checkpoint,
            "of": of,
            "layer": dict(layer) if layer else None,
        }
        body = {name: value for name, value in given.items() if value is not None}
        return self._http.json("POST", f"{self.path}/forks", body=body)

    def below(self) -> list[JsonObject]:
        """All forks, their forks and so on, origins before forks."""
        found: list[JsonObject] = self._http.json("GET", f"{self.path}/forks", query={"all": 1})["forks"]
        return found

    def merge(
        self, fork: str, *, ours: Sequence[str] = (), theirs: Sequence[str] = (), dry_run: bool = False
    ) -> JsonObject:
        """Bring a fork's changes into what it was made from. `status`: merged, nothing, conflicts; of a dry
        run also clean."""
        body = {"fork": fork, "ours": list(ours), "theirs": list(theirs), "dry_run": dry_run}
        return self._http.json("POST", f"{self.path}/merges", body=body, wait=LONG)

    def changes(self, fork: str, limit: int = 1000) -> JsonObject:
        """What a fork changed since it was made or last merged."""
        return self._http.json("GET", self._one(fork) + "/changes", query={"limit": limit})

    def checkpoint(self, fork: str, label: str | None = None) -> JsonObject:
        """A checkpoint of a fork."""
        body = {} if label is None else {"label": label}
        return self._http.json("POST", self._one(fork) + "/checkpoints", body=body)

    def rollback(self, fork: str, *, force: bool = False) -> JsonObject:
        """Take back what a fork changed since then."""
        path = self._one(fork) + "/rollback"
        return self._http.json("POST", path, body={"force": force}, wait=LONG)

    def delete(self, fork: str, *, cascade: bool = False, detach: bool = False) -> JsonObject:
        """Delete a fork, with `cascade` those that still read its files too; `detach` copies those first."""
        query = {"cascade": int(cascade), "detach": int(detach)}
        return self._http.json("DELETE", self._one(fork), query=query)
