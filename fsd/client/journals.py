"""Journals over HTTP. Entries are sent as the JSON text the caller wrote, so numbers arrive as written, and
those read keep their digits (`strictjson.show` writes them).

Any thread; raises `FsdError`. An append carries one key through all its tries: a lost answer never makes a
second entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsd.client.http import Http, encode_json, encode_name
from fsd.model.errors import UsageError
from fsd.model.limits import (
    FEED_WAIT_MAX,
    JOURNAL_BATCH_BYTES,
    JOURNAL_BATCH_MAX,
    JOURNAL_ENTRY_MAX,
    JOURNAL_PAGE_MAX,
)
from fsd.wire.strictjson import read_written

JsonObject = dict[str, Any]


def check_entry(text: str, where: str) -> str:
    """`text` if it is one JSON object of a sendable size; raises `UsageError` naming `where` it came from.

    The rules for fields are the server's.
    """
    try:
        found = read_written(text)
    except ValueError as exc:
        raise UsageError(f"{where} is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no JSON object", hint='for example {"type": "task.checkpoint"}')
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise UsageError(f"{where} holds a lone surrogate") from exc
    if size > JOURNAL_ENTRY_MAX:
        raise UsageError(f"{where} has {size} bytes, at most {JOURNAL_ENTRY_MAX}")
    return text


class Journals:
    """The journals of one filesystem."""

    def __init__(self, http: Http, file_system_id: str | None = None) -> None:
        self.http = http
        self._base = f"/v1/file-systems/{file_system_id or http.identity.file_system_id}/journals"

    def _route(self, journal_id: str, rest: str = "") -> str:
        if not journal_id:
            raise UsageError("no journal id")
        return f"{self._base}/{encode_name(journal_id)}{rest}"

    def create(
        self,
        journal_id: str | None = None,
        *,
        kind: str | None = None,
        title: str | None = None,
        actor: str | None = None,
        labels: Sequence[tuple[str, str]] = (),
    ) -> JsonObject:
        """A journal, or the one that exists with an equal envelope; `Conflict` with a different one."""
        body: JsonObject = {"journal_id": journal_id, "kind": kind, "title": title, "actor": actor}
        body = {name: value for name, value in body.items() if value is not None}
        if labels:
            body["labels"] = [{"key": key, "value": value} for key, value in labels]
        return self.http.json("POST", self._base, body=body)

    def append(
        self,
        journal_id: str,
        entries: Sequence[str],
        *,
        idempotency_key: str | None = None,
        expected_seq: int | None = None,
        barrier: bool | None = None,
    ) -> JsonObject:
        """Append `entries`, each the text of a JSON object, as one batch, all or nothing."""
        if not 1 <= len(entries) <= JOURNAL_BATCH_MAX:
            raise UsageError(f"{len(entries)} entries in one append, 1 to {JOURNAL_BATCH_MAX} are possible")
        texts = [check_entry(text, f"entry {at}") for at, text in enumerate(entries, 1)]
        if sum(len(text.encode()) for text in texts) > JOURNAL_BATCH_BYTES:
            raise UsageError(f"the entries have more than {JOURNAL_BATCH_BYTES} bytes together")
        key = idempotency_key or self.http.new_key()
        rest: JsonObject = {"idempotency_key": key, "expected_seq": expected_seq, "barrier": barrier}
        tail = encode_json({name: value for name, value in rest.items() if value is not None})
        raw = b'{"entries":[' + ",".join(texts).encode() + b"]," + tail[1:]
        # The header's key is of this request alone; the body's is what binds the entries to the journal.
        return self.http.json("POST", self._route(journal_id, "/entries"), raw=raw)

    def read_page(
        self,
        journal_id: str,
        *,
        after_seq: int = 0,
        limit: int = 100,
        wait: float = 0.0,
    ) -> JsonObject:
        """`{entries, next_after_seq}`; with `wait` seconds the server holds an empty answer back so long."""
        query: dict[str, str | int] = {"after_seq": after_seq, "limit": limit}
        if wait:
            query["wait"] = f"{min(wait, FEED_WAIT_MAX):g}"
        route = self._route(journal_id, "/entries")
        return self.http.json("GET", route, query=query, wait=wait, written=True)

    def entries(self, journal_id: str, *, after_seq: int = 0) -> Iterator[JsonObject]:
        """All entries behind `after_seq`, in order."""
        while True:
            page = self.read_page(journal_id, after_seq=after_seq, limit=JOURNAL_PAGE_MAX)
            yield from page["entries"]
            if not page["entries"]:
                return
            after_seq = page["next_after_seq"]

    def follow(self, journal_id: str, *, after_seq: int = 0) -> Iterator[JsonObject]:
        """As `entries`, and then new ones as they come, for ever."""
        while True:
            page = self.read_page(
                journal_id, after_seq=after_seq, limit=JOURNAL_PAGE_MAX, wait=FEED_WAIT_MAX - 5
            )
            yield from page["entries"]
            after_seq = page["next_after_seq"]

    def describe(self, journal_id: str) -> JsonObject:
        return self.http.json("GET", self._route(journal_id))

    def list(self, *, kind: str | None = None, labels: Sequence[str] = ()) -> Iterator[JsonObject]:
        """Journals with their heads; `labels` are `k=v`, all must hold."""
        cursor: str | None = None
        while True:
            query: list[tuple[str, str | int | None]] = [("kind", kind), ("limit", 200), ("cursor", cursor)]
            query += [("label", label) for label in labels]
            page = self.http.json("GET", self._base, query=query)
            yield from page["journals"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def search(self, filters: Mapping[str, Sequence[str]], *, limit: int = 100) -> JsonObject:
        """Matching entries: filters as in the query of `GET …/journal-entries`, values repeated."""
        query: list[tuple[str, str | int | None]] = [("limit", limit)]
        query += [(name, value) for name, values in filters.items() for value in values]
        base = self._base.removesuffix("/journals")
        return self.http.json("GET", f"{base}/journal-entries", query=query, written=True)

    def verify(self, journal_id: str, head_hash: str | None = None) -> JsonObject:
        """The server's check of the chain; with a trusted `head_hash` also that it is in it."""
        return self.http.json(
            "GET", self._route(journal_id, "/verify"), query={"head_hash": head_hash}, wait=60.0
        )
