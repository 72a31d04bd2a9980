"""Questions over journals: which there are, which entries match, whether a chain is whole.

Reads only, from any thread, each page in a transaction of its own: entries are never changed, so a walk over
several pages up to a head seen first is consistent.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from fsd.meta.database import Database, Tx
from fsd.meta.sql import in_list
from fsd.model.errors import NotFound, UsageError
from fsd.model.limits import JOURNAL_PAGE_MAX, LIST_SCAN_MAX
from fsd.model.plain import dataclass
from fsd.service.access import FsRef
from fsd.service.journals import COLUMNS, PAGE_BYTES, column, shown_journal, shown_text
from fsd.wire.chain import Chain

_WALK: Final = 200
_COLUMN_MAX: Final = 2**63


@dataclass(frozen=True, slots=True)
class Search:
    """Filters of a search; None or empty: not asked. `since` and `until` are ns of `observed_at`."""

    type: str | None = None
    status: str | None = None
    actor: str | None = None
    journal_id: str | None = None
    kind: str | None = None
    subjects: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    since: int | None = None
    until: int | None = None


def list_journals(
    db: Database, fs: FsRef, kind: str | None, labels: tuple[tuple[str, str], ...], after: str, limit: int
) -> dict[str, Any]:
    """Journals with their heads, in order of id; with filters perhaps fewer than `limit`, also before the
    end (after LIST_SCAN_MAX without a match)."""
    found: list[dict[str, Any]] = []
    at = after
    for _ in range(LIST_SCAN_MAX // JOURNAL_PAGE_MAX):
        rows = db.read(lambda tx, at=at: _journal_page(tx, fs, at))  # type: ignore[misc]
        for row in rows:
            at = row[0]
            if kind in (None, row[1]) and _has_labels(row[4], labels):
                found.append(shown_journal(fs.name, row))
                if len(found) > limit:
                    return {"journals": found[:limit], "next_cursor": found[limit - 1]["journal_id"]}
        if len(rows) < JOURNAL_PAGE_MAX:
            return {"journals": found, "next_cursor": None}
    return {"journals": found, "next_cursor": at}


def search(db: Database, fs: FsRef, wanted: Search, cursor: str, limit: int) -> tuple[list[str], str | None]:
    """Matches as JSON texts, oldest first, and a cursor where more may follow (also after LIST_SCAN_MAX
    entries without a match, and when PAGE_BYTES are full)."""
    at = _read_cursor(cursor) if cursor else (-1, "", 0)
    wanted_journals: dict[str, bool] = {}
    found: list[str] = []
    scanned = size = 0
    while scanned < LIST_SCAN_MAX:
        rows = db.read(lambda tx, a=at: _entry_page(tx, fs, wanted, a, wanted_journals))  # type: ignore[misc]
        for row in rows:
            observed, journal, seq, body, digest = row
            at = (observed, journal, seq)
            scanned += 1
            if not wanted_journals.get(journal, True):
                continue
            if wanted.subjects and not _has_subjects(body, wanted.subjects):
                continue
            found.append(f'{{"journal_id":{json.dumps(journal)},"entry":{shown_text(body, digest)}}}')
            size += len(body)
            if len(found) >= limit or size >= PAGE_BYTES:
                return found, _write_cursor(at)
        if len(rows) < _WALK:
            return found, None
    return found, _write_cursor(at)


def verify(db: Database, fs: FsRef, journal_id: str, trusted: str | None) -> dict[str, Any]:
    """Walk the whole chain; raises `NotFound`. Entries appended meanwhile are not looked at."""
    row = db.read(
        lambda tx: tx.one(f"SELECT {COLUMNS} FROM journal WHERE fs = ? AND id = ?", (fs.id, journal_id))
    )
    if row is None:
        raise NotFound(f"no journal {journal_id}")
    journal = shown_journal(fs.name, row)
    chain = Chain(journal, trusted)
    last = journal["next_seq"] - 1
    at = 0
    while at < last:
        rows = db.read(lambda tx, a=at: _walk(tx, fs, journal_id, a, last))  # type: ignore[misc]
        for seq, body, digest in rows:
            chain.follow(shown_text(body, digest))
            at = seq
        if len(rows) < _WALK:
            break
    return chain.finish()


def _walk(tx: Tx, fs: FsRef, journal_id: str, after: int, last: int) -> list[tuple[Any, ...]]:
    return tx.all(
        "SELECT seq, body, entry_hash FROM journal_entry WHERE fs = ? AND journal = ? AND seq > ? "
        "AND seq <= ? ORDER BY seq LIMIT ?",
        (fs.id, journal_id, after, last, _WALK),
    )


def _journal_page(tx: Tx, fs: FsRef, after: str) -> list[tuple[Any, ...]]:
    return tx.all(
        f"SELECT {COLUMNS} FROM journal WHERE fs = ? AND id > ? ORDER BY id LIMIT ?",
        [fs.id, after, JOURNAL_PAGE_MAX],
    )


def _entry_page(
    tx: Tx, fs: FsRef, wanted: Search, at: tuple[int, str, int], journals: dict[str, bool]
) -> list[tuple[Any, ...]]:
    """Entries behind `at` that pass what the database can look at. Where kind or labels are asked for,
    `journals` says afterwards of each one's journal whether it passes."""
    where = ["fs = ?", "(observed, journal, seq) > (?, ?, ?)"]
    params: list[object] = [fs.id, *at]
    for name, op, value in (
        ("journal", "=", wanted.journal_id),
        ("type", "=", wanted.type),
        ("status", "=", None if wanted.status is None else column(wanted.status)),
        ("actor", "=", wanted.actor),
        ("observed", ">=", wanted.since),
        ("observed", "<", wanted.until),
    ):
        if value is not None:
            where.append(f"{name} {op} ?")
            params.append(value)
    rows = tx.all(
        "SELECT observed, journal, seq, body, entry_hash FROM journal_entry WHERE "
        f"{' AND '.join(where)} ORDER BY observed, journal, seq LIMIT ?",
        [*params, _WALK],
    )
    names = sorted({row[1] for row in rows} - journals.keys())
    if names and (wanted.kind is not None or wanted.labels):
        marks, values = in_list(names)
        for name, kind, labels in tx.all(
            f"SELECT id, kind, labels FROM journal WHERE fs=? AND id IN {marks}", [fs.id, *values]
        ):
            journals[name] = wanted.kind in (None, kind) and _has_labels(labels, wanted.labels)
    return rows


def _has_labels(stored: str, wanted: tuple[tuple[str, str], ...]) -> bool:
    if not wanted:
        return True
    have = {(one["key"], one["value"]) for one in json.loads(stored)}
    return have.issuperset(wanted)


def _has_subjects(body: str, wanted: tuple[str, ...]) -> bool:
    # parse_int and parse_float as str: a caller's number may be too long for int().
    subjects = json.loads(body, parse_int=str, parse_float=str).get("subjects")
    return set(subjects or ()).issuperset(wanted)


def _write_cursor(at: tuple[int, str, int]) -> str:
    return base64.urlsafe_b64encode(json.dumps(at).encode()).decode()


def _read_cursor(text: str) -> tuple[int, str, int]:
    try:
        observed, journal, seq = json.loads(base64.urlsafe_b64decode(text))
    except (ValueError, TypeError, RecursionError) as exc:
        raise _no_cursor() from exc
    if type(observed) is not int or type(journal) is not str or type(seq) is not int:
        raise _no_cursor()
    if max(abs(observed), abs(seq)) >= _COLUMN_MAX or "\0" in journal:
        raise _no_cursor()
    return observed, journal, seq


def _no_cursor() -> UsageError:
    return UsageError("the cursor is none this server gave")
