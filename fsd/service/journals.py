"""Journals: ordered, tamper-evident evidence. The rules are those of docs/journals.md.

An append locks the filesystem's row, so entries have no gaps, appends serialize and `fs_seq` is the commit
number of that moment. What an entry shows, all but its hash, is stored as the text it is given back as: what
was hashed is what is read, byte for byte, and numbers keep the form they were written in.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Conflict, IdempotencyMismatch, NotFound
from fsd.model.limits import MIB
from fsd.model.plain import dataclass
from fsd.model.times import NS, rfc3339
from fsd.service import pins
from fsd.service.access import FsRef, Grant, hold
from fsd.service.entries import Envelope, Ready, content_digest, show_actor
from fsd.service.text import new_id
from fsd.wire.canonical import genesis_hash, join, member
from fsd.wire.strictjson import dumps

PAGE_BYTES: Final = 4 * MIB  # a page ends at about this size
READ_CHUNK: Final = 50  # rows of a page read at a time: at most 3.2 MiB beyond the bound
COLUMNS: Final = "id, kind, title, actor, labels, created, updated, next_seq, genesis, head"


@dataclass(frozen=True, slots=True)
class Append:
    """An append as asked: checked entries (`entries.check_entries`), `key` '' for none, `expected_seq` the
    number of the last entry the caller knows (0: none)."""

    entries: list[Ready]
    key: str
    expected_seq: int | None
    barrier: bool


@dataclass(slots=True)
class Head:
    """A journal's row while entries are added."""

    next_seq: int
    hash: str
    actor: str


class Journals:
    """All methods from any thread. The state of the files at each entry is kept for `history` seconds."""

    def __init__(self, db: Database, host: Host, history: float) -> None:
        self._db = db
        self._host = host
        self._history = history

    def create(
        self, tx: Tx, fs: FsRef, journal_id: str | None, envelope: Envelope, who: Grant
    ) -> tuple[dict[str, Any], bool]:
        """The journal, and whether it is new. The same id with an equal envelope is the same journal; with
        another raises `Conflict`."""
        hold(tx, fs, who)
        if journal_id is None:
            journal_id = new_id(self._host, "jrn_")
        else:
            row = self._row(tx, fs, journal_id)
            if row is not None:
                self._same_envelope(row, journal_id, envelope)
                return shown_journal(fs.name, row), False
        now = self._host.wall_ns()
        genesis = genesis_hash(
            {
                "file_system_id": fs.name,
                "journal_id": journal_id,
                "kind": envelope.kind,
                "title": envelope.title,
                "actor": show_actor(envelope.actor),
                "labels": envelope.shown_labels,
                "created_at": rfc3339(now),
            }
        )
        tx.execute(
            f"INSERT INTO journal (fs, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
            (
                fs.id,
                journal_id,
                envelope.kind,
                envelope.title,
                envelope.actor,
                json.dumps(envelope.shown_labels, ensure_ascii=False),
                now,
                now,
                bytes.fromhex(genesis),
                bytes.fromhex(genesis),
            ),
        )
        row = self._row(tx, fs, journal_id)
        assert row is not None, "the journal was just made"
        return shown_journal(fs.name, row), True

    def get(self, fs: FsRef, journal_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        return shown_journal(fs.name, self._db.read(lambda tx: self._need(tx, fs, journal_id)))

    def append(self, fs: FsRef, journal_id: str, append: Append, who: Grant) -> dict[str, Any]:
        """All entries or none; durable on return. Raises `NotFound`, `Conflict` (`expected_seq` does not
        hold), `IdempotencyMismatch`."""
        digest = content_digest(append.entries) if append.key else b""
        self._host.crash_point("journal.append.begin")
        answer = self._db.write(lambda tx: self._append(tx, fs, journal_id, append, digest, who))
        self._host.crash_point("journal.append.durable")
        return answer

    def read(self, fs: FsRef, journal_id: str, after_seq: int, limit: int) -> tuple[list[str], int]:
        """Entries after `after_seq` as JSON texts, and the `next_after_seq`. Fewer than `limit` come, also
        before the end, when they are large (PAGE_BYTES); none means the end."""

        def page(tx: Tx) -> tuple[list[str], int]:
            self._need(tx, fs, journal_id)
            texts: list[str] = []
            at, size = after_seq, 0
            while len(texts) < limit and size < PAGE_BYTES:
                rows = tx.all(
                    "SELECT seq, body, entry_hash FROM journal_entry WHERE fs = ? AND journal = ? "
                    "AND seq > ? ORDER BY seq LIMIT ?",
                    (fs.id, journal_id, at, min(READ_CHUNK, limit - len(texts))),
                )
                for at, body, digest in rows:  # noqa: B007 - the last seq is used behind the loop
                    texts.append(shown_text(body, digest))
                    size += len(body)
                if len(rows) < READ_CHUNK:
                    break
            return texts, at

        return self._db.read(page)

    def head_seq(self, fs: FsRef, journal_id: str) -> int:
        """The number of the last entry, 0 in an empty journal; raises `NotFound`."""
        return int(self._db.read(lambda tx: self._need(tx, fs, journal_id))[7]) - 1

    # -- inside a transaction --------------------------------------------------------------------------

    def _append(
        self, tx: Tx, fs: FsRef, journal_id: str, append: Append, digest: bytes, who: Grant
    ) -> dict[str, Any]:
        fs_seq, _ = hold(tx, fs, who)
        row = self._need(tx, fs, journal_id)
        if append.key:
            kept = self._kept(tx, fs, journal_id, append.key, digest)
            if kept is not None:
                return kept
        head = Head(int(row[7]), row[9].hex(), row[3] or f"token:{who.label}")
        if append.expected_seq is not None and append.expected_seq != head.next_seq - 1:
            raise Conflict(
                f"the journal's last entry is {head.next_seq - 1}, expected {append.expected_seq}",
                hint="read the entries in between, then append again",
                details={"last_seq": head.next_seq - 1},
            )
        first = head.next_seq
        append_id = new_id(self._host, "app_")
        self._add(tx, fs, journal_id, append, head, append_id, fs_seq)
        if self._history:
            until = self._host.wall_ns() + int(self._history * NS)
            pins.pin_softly(tx, fs, f"{journal_id}:{first}", until)
        answer = {
            "journal_id": journal_id,
            "append_id": append_id,
            "first_seq": first,
            "last_seq": head.next_seq - 1,
            "count": len(append.entries),
            "head_hash": head.hash,
            "idempotent": False,
            "checkpoint_id": None,
        }
        if append.key:
            tx.execute(
                "INSERT INTO journal_append (fs, journal, key, digest, answer) VALUES (?, ?, ?, ?, ?)",
                (fs.id, journal_id, append.key, digest, json.dumps(answer).encode()),
            )
        return answer

    def _add(
        self,
        tx: Tx,
        fs: FsRef,
        journal_id: str,
        append: Append,
        head: Head,
        append_id: str,
        fs_seq: int,
    ) -> None:
        now = self._host.wall_ns()
        rows = []
        for given in append.entries:
            entry_id = new_id(self._host, "ent_")
            added = {
                **({} if given.actor else {"actor": show_actor(head.actor)}),
                "seq": head.next_seq,
                "entry_id": entry_id,
                "observed_at": rfc3339(now),
                "fs_seq": fs_seq,
                "barrier": append.barrier,
                "prev_hash": head.hash,
            }
            members = [*given.members, *(member(name, value) for name, value in added.items())]
            prev, made = head.hash, hashlib.sha256(join(members))
            rows.append(
                (
                    fs.id,
                    journal_id,
                    head.next_seq,
                    entry_id,
                    append_id,
                    given.type,
                    column(given.status),
                    given.actor or head.actor,
                    now,
                    fs_seq,
                    int(append.barrier),
                    f"{given.text},{dumps(added)[1:]}",
                    bytes.fromhex(prev),
                    made.digest(),
                )
            )
            head.hash = made.hexdigest()
            head.next_seq += 1
        tx.many(
            "INSERT INTO journal_entry (fs, journal, seq, entry_id, append_id, type, status, actor, "
            "observed, fs_seq, barrier, body, prev_hash, entry_hash) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        tx.execute(
            "UPDATE journal SET next_seq = ?, head = ?, updated = ? WHERE fs = ? AND id = ?",
            (head.next_seq, bytes.fromhex(head.hash), now, fs.id, journal_id),
        )

    def _kept(self, tx: Tx, fs: FsRef, journal_id: str, key: str, digest: bytes) -> dict[str, Any] | None:
        row = tx.one(
            "SELECT digest, answer FROM journal_append WHERE fs = ? AND journal = ? AND key = ?",
            (fs.id, journal_id, key),
        )
        if row is None:
            return None
        if row[0] != digest:
            raise IdempotencyMismatch(
                f"the idempotency key {key} was used for other entries of this journal",
                hint="use a new key for new entries",
            )
        answer: dict[str, Any] = json.loads(row[1])
        return {**answer, "idempotent": True}

    def _row(self, tx: Tx, fs: FsRef, journal_id: str) -> tuple[Any, ...] | None:
        return tx.one(f"SELECT {COLUMNS} FROM journal WHERE fs = ? AND id = ?", (fs.id, journal_id))

    def _need(self, tx: Tx, fs: FsRef, journal_id: str) -> tuple[Any, ...]:
        row = self._row(tx, fs, journal_id)
        if row is None:
            raise NotFound(f"no journal {journal_id}", hint="create it first: fsd journal create")
        return row

    @staticmethod
    def _same_envelope(row: tuple[Any, ...], journal_id: str, given: Envelope) -> None:
        labels = tuple((one["key"], one["value"]) for one in json.loads(row[4]))
        stored = Envelope(row[1], row[2], row[3], labels)
        for name in ("kind", "title", "actor", "labels"):
            if getattr(stored, name) != getattr(given, name):
                raise Conflict(
                    f"the journal {journal_id} exists with another {name}",
                    hint="use another journal_id, or create it with the same fields",
                    details={"field": name},
                )


def shown_journal(fs_name: str, row: tuple[Any, ...]) -> dict[str, Any]:
    """A journal's row (`COLUMNS`) as it is given back."""
    journal_id, kind, title, actor, labels, created, updated, next_seq, genesis, head = row
    return {
        "file_system_id": fs_name,
        "journal_id": journal_id,
        "kind": kind,
        "title": title,
        "actor": show_actor(actor),
        "labels": json.loads(labels),
        "next_seq": next_seq,
        "genesis_hash": genesis.hex(),
        "head_hash": head.hex(),
        "created_at": rfc3339(created),
        "updated_at": rfc3339(updated),
    }


def shown_text(body: str, digest: bytes) -> str:
    """The JSON text of an entry: the stored text with its hash as the last field."""
    return f'{body[:-1]},"entry_hash":"{digest.hex()}"}}'


def column(text: str) -> str:
    """A caller's text in a column that is only searched: PostgreSQL has no NUL in text."""
    return text.replace("\0", "\\0")
