"""The control plane over HTTP: filesystems, tokens and mount sessions.

`Control` takes the admin key's identity; `describe`, `check` and `sessions` also work with a filesystem's
token. Any thread; raises `FsdError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from fsd.client.http import Http, encode_name
from fsd.model.errors import FsdError, Unavailable

JsonObject = dict[str, Any]
BASE: Final = "/v1/file-systems"
PAGE: Final = 200
_VACUUM: Final = 3600.0  # a database written anew holds one answer back


class Control:
    """Calls of the control plane, each one request (lists: one a page)."""

    def __init__(self, http: Http) -> None:
        self.http = http

    def create(
        self,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        terms: tuple[float | None, float | None] = (None, None),
    ) -> JsonObject:
        """A new filesystem with its owner token; `fs_token` is shown this once. `terms` are the seconds of a
        thread's lease and until its renewal, None: the server's default."""
        body: JsonObject = {}
        for name, seconds in zip(("lease_duration_ms", "renew_after_ms"), terms, strict=True):
            if seconds is not None:
                body[name] = seconds * 1000
        if display_name is not None:
            body["display_name"] = display_name
        if labels:
            body["labels"] = dict(labels)
        return self.http.json("POST", BASE, body=body)

    def list(self, display_name: str | None = None, label: str | None = None) -> JsonObject:
        """All filesystems that match: `{region_code, file_systems}`. `label` is `k=v`."""
        found: list[JsonObject] = []
        cursor: str | None = None
        while True:
            query = {"display_name": display_name, "label": label, "limit": PAGE, "cursor": cursor}
            page = self.http.json("GET", BASE, query=query)
            found += page["file_systems"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return {"region_code": page.get("region_code"), "file_systems": found}

    def describe(self, file_system_id: str, *, chain: bool = False) -> JsonObject:
        """With `chain` a fork's origins too, all the way up."""
        return self.http.json(
            "GET", f"{BASE}/{encode_name(file_system_id)}", query={"chain": 1 if chain else None}
        )

    def check(self, file_system_id: str) -> JsonObject:
        return self.http.json("GET", f"{BASE}/{encode_name(file_system_id)}/check")

    def delete(self, file_system_id: str, *, cascade: bool = False, detach: bool = False) -> JsonObject:
        """Refused while forks read its files: `detach` copies them first, `cascade` deletes them too."""
        query = {"cascade": 1 if cascade else None, "detach": 1 if detach else None}
        return self.http.json("DELETE", f"{BASE}/{encode_name(file_system_id)}", query=query)

    def sweep(
        self, only: str | None, older_than: float | None, *, dry_run: bool, vacuum: bool
    ) -> Iterator[JsonObject]:
        """A sweep of the filesystem `only`, or of all, in pages that each say what was done. `older_than` in
        seconds, None: the server's grace."""
        body: JsonObject = {"dry_run": dry_run, "vacuum": vacuum}
        if only is not None:
            body["file_system_id"] = only
        if older_than is not None:
            body["older_than_ms"] = int(older_than * 1000)
        while True:
            page = self.http.json("POST", "/v1/sweep", body=body, wait=_VACUUM if vacuum else 0.0)
            yield page
            if page["next_cursor"] is None:
                return
            body["cursor"] = page["next_cursor"]

    def wait_usable(self, file_system_id: str, seconds: float) -> JsonObject:
        """Until the filesystem's check answers ok, at most `seconds`; its description. Raises
        `Unavailable`; the filesystem stays in any case."""
        deadline = self.http.host.monotonic() + seconds
        while True:
            try:
                if self.check(file_system_id).get("status") == "ok":
                    return self.describe(file_system_id)
                reason = "its check fails"
            except FsdError as exc:
                if not exc.retryable:
                    raise
                reason = exc.message
            if self.http.host.monotonic() >= deadline:
                raise Unavailable(
                    f"{file_system_id} was made but is not usable yet: {reason}",
                    hint=f"`fsd check --file-system-id {file_system_id}` tells more; it was not removed",
                )
            self.http.pause(0.25)

    # -- tokens --------------------------------------------------------------------------------------

    def create_token(
        self, file_system_id: str, name: str | None = None, ttl_s: float | None = None
    ) -> JsonObject:
        """A further owner token; `fs_token` is shown this once. `ttl_s` None: it does not expire."""
        body: JsonObject = {}
        if name is not None:
            body["token_name"] = name
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        return self.http.json("POST", f"{BASE}/{encode_name(file_system_id)}/tokens", body=body)

    def token_page(
        self, file_system_id: str, *, include_expired: bool = False, offset: int = 0, limit: int = PAGE
    ) -> JsonObject:
        """One page: `{tokens, next_offset}`; `next_offset` null at the end."""
        query = {"include_expired": int(include_expired), "offset": offset, "limit": limit}
        return self.http.json("GET", f"{BASE}/{encode_name(file_system_id)}/tokens", query=query)

    def tokens(self, file_system_id: str, *, include_expired: bool = False) -> Iterator[JsonObject]:
        offset: int | None = 0
        while offset is not None:
            page = self.token_page(file_system_id, include_expired=include_expired, offset=offset)
            yield from page["tokens"]
            offset = page.get("next_offset")

    def disable_token(self, file_system_id: str, token_id: str) -> JsonObject:
        return self._token(file_system_id, token_id, "/disable")

    def enable_token(self, file_system_id: str, token_id: str) -> JsonObject:
        return self._token(file_system_id, token_id, "/enable")

    def delete_token(self, file_system_id: str, token_id: str) -> JsonObject:
        return self.http.json(
            "DELETE", f"{BASE}/{encode_name(file_system_id)}/tokens/{encode_name(token_id)}"
        )

    def _token(self, file_system_id: str, token_id: str, verb: str) -> JsonObject:
        return self.http.json(
            "POST", f"{BASE}/{encode_name(file_system_id)}/tokens/{encode_name(token_id)}{verb}", body={}
        )

    # -- mount sessions ------------------------------------------------------------------------------

    def session_page(
        self, file_system_id: str, *, limit: int = PAGE, cursor: str | None = None
    ) -> JsonObject:
        """One page: `{sessions, next_cursor}`."""
        query = {"limit": limit, "cursor": cursor}
        return self.http.json("GET", f"{BASE}/{encode_name(file_system_id)}/sessions", query=query)

    def sessions(self, file_system_id: str) -> Iterator[JsonObject]:
        """Mount sessions of a filesystem, newest first."""
        cursor: str | None = None
        while True:
            page = self.session_page(file_system_id, cursor=cursor)
            yield from page["sessions"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    # -- the server ----------------------------------------------------------------------------------

    def ready(self) -> JsonObject:
        """What `/readyz` answers; raises `Unavailable`."""
        return self.http.json("GET", "/readyz")
