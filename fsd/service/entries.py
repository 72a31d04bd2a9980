"""What a journal and its entries may hold: the rules of names, types and sizes, checked before anything is
stored. Values are those of `strictjson.loads(…, exact=True)`. Everything here raises `UsageError` or
`TooLarge` with the field named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

from fsd.model.errors import TooLarge, UsageError
from fsd.model.limits import (
    JOURNAL_BATCH_BYTES,
    JOURNAL_BATCH_MAX,
    JOURNAL_ENTRY_MAX,
    JOURNAL_ID_MAX,
    SUBJECTS_MAX,
)
from fsd.model.plain import dataclass
from fsd.model.times import parse_rfc3339
from fsd.service.text import check_labels, check_line
from fsd.wire.canonical import Member, join, member
from fsd.wire.strictjson import Number, dumps

SERVER_FIELDS: Final = (
    "seq",
    "entry_id",
    "observed_at",
    "fs_seq",
    "barrier",
    "prev_hash",
    "entry_hash",
)
KIND_MAX: Final = 128
TITLE_MAX: Final = 1024
ACTOR_MAX: Final = 512
_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{JOURNAL_ID_MAX}}}")
_TYPE = re.compile(r"[a-z][a-z0-9_.-]{0,127}")
_TYPED_ID = re.compile(r"[^:\x00-\x1f\x7f]+:[^\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A journal's immutable fields as given. `actor` is `type:id` or ''."""

    kind: str
    title: str
    actor: str
    labels: tuple[tuple[str, str], ...]

    @property
    def shown_labels(self) -> list[dict[str, str]]:
        return [{"key": k, "value": v} for k, v in self.labels]


def check_journal_id(text: Any) -> str:
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise UsageError(
            f"journal_id has 1 to {JOURNAL_ID_MAX} of letters, digits, '_', '.', '-'",
            details={"field": "journal_id"},
        )
    return text


def read_envelope(body: dict[str, Any]) -> Envelope:
    """The envelope in the body of a create; other fields of the body are the caller's business."""
    kind = check_line(_default(body.get("kind"), "agent"), "kind", KIND_MAX)
    title = check_line(_default(body.get("title"), ""), "title", TITLE_MAX)
    actor = "" if body.get("actor") is None else check_actor(body["actor"], "actor")
    given = body.get("labels")
    rows: list[tuple[Any, Any]] = []
    if isinstance(given, dict):
        rows = list(given.items())
    elif isinstance(given, list):
        for one in given:
            if not isinstance(one, dict) or set(one) != {"key", "value"}:
                raise UsageError("each of labels is an object with key and value")
            rows.append((one["key"], one["value"]))
    elif given is not None:
        raise UsageError("labels is a list of objects with key and value")
    if not kind:
        raise UsageError("kind is empty")
    return Envelope(kind, title, actor, tuple(check_labels(rows)))


def check_actor(value: Any, where: str) -> str:
    """`type:id`, also accepted as an object with type and id."""
    if isinstance(value, dict) and set(value) == {"type", "id"}:
        parts = (value["type"], value["id"])
        if not all(isinstance(p, str) and p for p in parts) or ":" in parts[0]:
            raise UsageError(f"{where}.type and {where}.id are strings that are not empty")
        value = f"{parts[0]}:{parts[1]}"
    if not isinstance(value, str) or not _TYPED_ID.fullmatch(value):
        raise UsageError(f"{where} is written type:id", hint="for example agent:worker-1")
    if len(value) > ACTOR_MAX:
        raise UsageError(f"{where} has {len(value)} characters, at most {ACTOR_MAX}")
    return value


def show_actor(actor: str) -> dict[str, str] | None:
    """How a journal's actor and a fallback actor of an entry are written."""
    if not actor:
        return None
    kind, _, name = actor.partition(":")
    return {"type": kind, "id": name}


@dataclass(frozen=True, slots=True)
class Ready:
    """A checked entry, ready to be appended: all that needs time is done before any lock is taken.

    `text` is the caller's fields as compact JSON without the closing brace, `members` their canonical forms.
    `actor` is '' when the caller gave none.
    """

    type: str
    status: str
    actor: str
    text: str
    members: tuple[Member, ...]


def check_entries(given: Any) -> list[Ready]:
    """The entries of an append, each a caller's fields; the batch's bounds too."""
    if not isinstance(given, list) or not given:
        raise UsageError("entries is a list of 1 or more objects")
    if len(given) > JOURNAL_BATCH_MAX:
        raise TooLarge(f"{len(given)} entries in one append, at most {JOURNAL_BATCH_MAX}")
    total = 0
    ready = []
    for at, entry in enumerate(given):
        made, size = _check_entry(entry, f"entries[{at}]")
        ready.append(made)
        total += size
        if total > JOURNAL_BATCH_BYTES:
            raise TooLarge(f"more than {JOURNAL_BATCH_BYTES} bytes of entries in one append")
    return ready


def content_digest(entries: Sequence[Ready]) -> bytes:
    """What an idempotency key is bound to: SHA-256 over the entries in canonical form."""
    made = hashlib.sha256()
    for entry in entries:
        made.update(join(entry.members) + b"\n")
    return made.digest()


def _check_entry(entry: Any, where: str) -> tuple[Ready, int]:
    """Check one entry; with its size in bytes of JSON."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not an object")
    for name in entry:
        if name in SERVER_FIELDS:
            raise UsageError(
                f"{where}.{name} is set by the server", hint="leave it out", details={"field": name}
            )
        if name.startswith("fsd_"):
            raise UsageError(f"{where}.{name}: names that begin with fsd_ are reserved")
    kind = entry.get("type")
    if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
        raise UsageError(
            f"{where}.type starts with a letter a-z, then letters a-z, digits, '_', '.', '-', 128 in all",
            details={"field": "type"},
        )
    for name in ("status", "correlation_id", "parent_entry_id"):
        if not isinstance(entry.get(name), (str, type(None))):
            raise UsageError(f"{where}.{name} is not a string")
    if entry.get("occurred_at") is not None:
        if not isinstance(entry["occurred_at"], str):
            raise UsageError(f"{where}.occurred_at is not a string")
        parse_rfc3339(entry["occurred_at"], f"{where}.occurred_at")
    actor = "" if entry.get("actor") is None else check_actor(entry["actor"], f"{where}.actor")
    _check_subjects(entry.get("subjects"), f"{where}.subjects")
    text = dumps(entry)
    size = len(text.encode())
    if size > JOURNAL_ENTRY_MAX:
        raise TooLarge(f"{where} has {size} bytes of JSON, at most {JOURNAL_ENTRY_MAX}")
    # A null actor is none: the fallback takes its place.
    fields = entry if actor else {name: value for name, value in entry.items() if name != "actor"}
    members = tuple(member(name, value, f"{where}.{name}") for name, value in fields.items())
    text = text if fields is entry else dumps(fields)
    return Ready(kind, entry.get("status") or "", actor, text[:-1], members), size


def _check_subjects(given: Any, where: str) -> None:
    if given is None:
        return
    if not isinstance(given, list):
        raise UsageError(f"{where} is a list of type:id")
    if len(given) > SUBJECTS_MAX:
        raise UsageError(f"{where} has {len(given)} subjects, at most {SUBJECTS_MAX}")
    for at, one in enumerate(given):
        if not isinstance(one, str) or not _TYPED_ID.fullmatch(one):
            raise UsageError(f"{where}[{at}] is written type:id")


def integer(value: Any, where: str) -> int:
    """A whole number that is not negative, from a `Number` or an int."""
    if isinstance(value, Number) and value.is_integer and len(value.text) <= 18:
        value = int(value.text)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{where} is a whole number, 0 or more")
    return value


def _default(value: Any, instead: str) -> Any:
    return instead if value is None else value
