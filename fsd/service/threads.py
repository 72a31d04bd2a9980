"""Threads of the checkpoint contract: writer leases, heads, what is read, and saved transcripts.

Writes are made in two steps: the method checks its input and takes the caller's clock, what it returns is
the *effect*, which runs in one transaction that holds the filesystem and gives the result as JSON text. An
effect may run again, and on another thread.

A lease is current while its row has the writer's token and fence and `expires` is later than the clock. Times
are whole ms of the server's clock (a request's own on a server with a test clock).
"""

from __future__ import annotations

import contextvars
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import (
    CheckpointInvalidEntry,
    CheckpointInvalidId,
    UsageError,
    WriterConflict,
    WriterLost,
)
from fsd.model.limits import LEASE_MS, LEASE_MS_MAX, LEASE_RENEW_MS, MANIFEST_PAGE
from fsd.service.access import FsRef, Grant, hold
from fsd.service.contract_check import (
    JsonObject,
    Writer,
    check_id,
    check_writer,
    finite,
    key_text,
    shown,
)
from fsd.service.records import (
    LIST_SQL,
    NATIVE,
    Body,
    Native,
    Record,
    ThreadRow,
    check_foreign,
    dumps,
    find,
    find_thread,
    head_id,
    key_of,
    own_thread,
    pack_text,
    read_body,
    unpack_body,
    unpack_text,
)

Effect = Callable[[Tx], bytes]
NULL: Final = b"null"
_KEYS_PAGE: Final = 10_000
REFERENCES_SQL: Final = (
    "SELECT name, count(*) FROM named WHERE fs=? AND name>? GROUP BY name ORDER BY name LIMIT ?"
)
_ACQUIRE: Final = (
    "INSERT INTO thread (fs, key, id, head, fence, owner, expires) VALUES (?,?,?,NULL,?,?,?) "
    "ON CONFLICT (fs, key) DO UPDATE SET fence=excluded.fence, owner=excluded.owner, expires=excluded.expires"
)


def clock_ms(host: Host) -> Callable[[], int]:
    """The caller's clock in ms, for use inside a transaction on whatever thread runs it."""
    around = contextvars.copy_context()
    return lambda: around.run(host.wall_ns) // 1_000_000


def number(value: float) -> int | float:
    """A double as JSON shows it: 5, not 5.0."""
    return int(value) if value.is_integer() else value


def check_terms(duration: object, renew_after: object) -> tuple[float, float] | None:
    """Lease duration and renewal hint in ms, what is None at its default; None when both are. Raises
    `UsageError`."""
    if duration is None and renew_after is None:
        return None
    made = []
    for name, value, default in (
        ("lease_duration_ms", duration, LEASE_MS),
        ("renew_after_ms", renew_after, LEASE_RENEW_MS),
    ):
        ms = default if value is None else finite(value)
        if ms is None or not 0 < ms <= LEASE_MS_MAX:
            raise UsageError(f"{name} is a number above 0, at most {LEASE_MS_MAX:.0f}, not {shown(value)}")
        made.append(ms)
    if made[1] >= made[0]:
        raise UsageError(
            f"renew_after_ms is less than lease_duration_ms, not {number(made[1])} of {number(made[0])}"
        )
    return made[0], made[1]


def store_terms(tx: Tx, fs: FsRef, terms: tuple[float, float]) -> None:
    """Of a filesystem that is being made."""
    tx.execute("INSERT INTO lease_terms (fs, duration, renew_after) VALUES (?,?,?)", (fs.id, *terms))


def read_terms(tx: Tx, fs: FsRef) -> tuple[float, float]:
    row = tx.one("SELECT duration, renew_after FROM lease_terms WHERE fs=?", (fs.id,))
    return (LEASE_MS, LEASE_RENEW_MS) if row is None else (float(row[0]), float(row[1]))


def current(tx: Tx, fs: FsRef, writer: Writer, now: float) -> ThreadRow:
    """The thread of a current writer; raises `WriterLost`."""
    row = find_thread(tx, fs, writer.thread)
    if row is None or not _owns(row, writer):
        raise WriterLost(f"the lease on {shown(writer.thread)} was released or replaced")
    if row.expires <= now:
        raise WriterLost(f"the lease on {shown(writer.thread)} expired at {number(row.expires)}")
    return row


def _owns(row: ThreadRow, writer: Writer) -> bool:
    same = hmac.compare_digest(row.owner, hashlib.sha256(writer.token.encode()).digest())
    return same and row.fence == writer.fence


class Threads:
    """All methods from any thread, none inside a transaction."""

    def __init__(self, db: Database, native: Native | None, host: Host) -> None:
        self._db = db
        self._native = native
        self._host = host

    # -- leases ----------------------------------------------------------------------------------------

    def acquire(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`acquireWriter`: never waits; raises `WriterConflict` while a lease lives."""
        thread = check_id(body.get("threadId"), "threadId")
        check_foreign(fs, thread)
        now = clock_ms(self._host)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            at, row = now(), find_thread(tx, fs, thread)
            if row is not None and row.owner and row.expires > at:
                left = number(row.expires - at)
                raise WriterConflict(f"another writer holds {shown(thread)}, for {left} ms if not renewed")
            duration, renew_after = read_terms(tx, fs)
            token = self._host.token_bytes(24).hex()
            fence, expires = (0 if row is None else row.fence) + 1, at + duration
            owner = hashlib.sha256(token.encode()).digest()
            tx.execute(_ACQUIRE, (fs.id, key_of(thread), thread.encode(), fence, owner, expires))
            return dumps(
                {
                    "threadId": thread,
                    "ownerToken": token,
                    "fence": fence,
                    "expiresAt": number(expires),
                    "renewAfterMs": number(renew_after),
                }
            )

        return effect

    def renew(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`renew`: the whole duration from now on."""
        writer, now = check_writer(body.get("writer")), clock_ms(self._host)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            at = now()
            row = current(tx, fs, writer, at)
            expires = at + read_terms(tx, fs)[0]
            tx.execute("UPDATE thread SET expires=? WHERE fs=? AND key=?", (expires, fs.id, row.key))
            return dumps({"expiresAt": number(expires)})

        return effect

    def release(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`release`: never raises; does nothing unless the lease is the writer's, expired or not."""
        try:
            writer = check_writer(body.get("writer"))
        except CheckpointInvalidId:
            return lambda _: NULL

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            row = find_thread(tx, fs, writer.thread)
            if row is not None and _owns(row, writer):
                tx.execute("UPDATE thread SET owner=?, expires=0 WHERE fs=? AND key=?", (b"", fs.id, row.key))
            return NULL

        return effect

    # -- reads -----------------------------------------------------------------------------------------

    def get_head(self, fs: FsRef, body: JsonObject) -> bytes:
        thread = check_id(body.get("threadId"), "threadId")
        return dumps(self._db.read(lambda tx: head_id(tx, fs, thread)))

    def get(self, fs: FsRef, body: JsonObject, *, portable: bool) -> bytes:
        """The record, rendered; `portable` leaves out what an old reader refuses."""
        name = check_id(body.get("id"), "id")

        def read(tx: Tx) -> tuple[Record, bytes] | None:
            record = find(tx, fs, key_of(name))
            raw = None if record is None else read_body(tx, record.num)
            return None if record is None or raw is None else (record, raw)

        found = self._db.read(read)
        if found is None:
            return NULL
        record, raw = found
        made = self.rendered(fs, record, unpack_body(raw))
        return (portable_body(made) if portable else made).text()

    def rendered(self, fs: FsRef, record: Record, body: Body) -> Body:
        """The body with its files, where it is a native record that has none in it."""
        if record.kind != NATIVE or record.thread != key_of(own_thread(fs)):
            return body
        assert self._native is not None, "who made a native checkpoint can render it"
        return body._replace(files=dumps(self._native.render(fs, record)))

    def records(self, fs: FsRef, body: JsonObject, *, render: bool, portable: bool) -> Iterator[bytes]:
        """`list`: the records of a thread as JSON texts, some at a time: those there were when it began and
        still are when their turn comes. Blocks."""
        thread = check_id(body.get("threadId"), "threadId")
        rows = self._db.read(lambda tx: tx.all(LIST_SQL, (fs.id, key_of(thread))))

        def texts() -> Iterator[bytes]:
            for page in _pages(rows):
                for record, made in self._bodies(fs, page):
                    shown_body = self.rendered(fs, record, made) if render else made
                    yield (portable_body(shown_body) if portable else shown_body).text()

        return texts()

    def _bodies(self, fs: FsRef, nums: list[int]) -> list[tuple[Record, Body]]:
        def read(tx: Tx) -> dict[int, tuple[Any, ...]]:
            found: dict[int, tuple[Any, ...]] = {}
            for some in chunks(nums):
                marks, values = in_list(some)
                rows = tx.all(
                    "SELECT num, key, id, thread, parent, created, kind, fs_seq, pin, entries, body "
                    f"FROM checkpoint WHERE num IN {marks}",
                    values,
                )
                found.update((row[0], row) for row in rows)
            return found

        found = self._db.read(read)
        rows = [found[num] for num in nums if num in found]
        return [(Record(*row[:-1]), unpack_body(row[-1])) for row in rows]

    def references(self, fs: FsRef) -> Iterator[bytes]:
        """`listBlobReferences` as JSON texts, in order of key, a page a transaction. Blocks."""
        after = b""
        while True:
            rows = self._db.read(lambda tx, at=after: tx.all(REFERENCES_SQL, (fs.id, at, _KEYS_PAGE)))  # type: ignore[misc]
            for name, count in rows:
                yield b'{"key":"%s","references":%d}' % (key_text(name).encode(), count)
            if len(rows) < _KEYS_PAGE:
                return
            after = rows[-1][0]

    # -- transcripts -----------------------------------------------------------------------------------

    def load_thread(self, fs: FsRef, body: JsonObject) -> bytes:
        """`loadThread`: the messages last saved, or `[]`."""
        thread = check_id(body.get("threadId"), "threadId")
        sql = "SELECT messages FROM transcript WHERE fs=? AND thread=?"
        row = self._db.read(lambda tx: tx.one(sql, (fs.id, key_of(thread))))
        return b"[]" if row is None else unpack_text(row[0])

    def save_thread(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`saveThread`: replaces the messages. An empty list is state, too."""
        thread, messages = check_id(body.get("threadId"), "threadId"), body.get("messages")
        check_foreign(fs, thread)
        if not isinstance(messages, list):
            raise CheckpointInvalidEntry("messages is no array")
        packed = pack_text(dumps(messages))

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            store_transcript(tx, fs, thread, packed)
            return NULL

        return effect


def store_transcript(tx: Tx, fs: FsRef, thread: str, packed: bytes) -> None:
    tx.execute(
        "INSERT INTO transcript (fs, thread, messages) VALUES (?,?,?) "
        "ON CONFLICT (fs, thread) DO UPDATE SET messages=excluded.messages",
        (fs.id, key_of(thread), packed),
    )


def has_transcript(tx: Tx, fs: FsRef, thread: str) -> bool:
    sql = "SELECT 1 FROM transcript WHERE fs=? AND thread=?"
    return tx.one(sql, (fs.id, key_of(thread))) is not None


def portable_body(body: Body) -> Body:
    """Without symlinks; `leftOut` says which paths they had."""
    entries = json.loads(body.files)
    left = [entry["path"] for entry in entries if entry["kind"] == "symlink"]
    if not left:
        return body
    rest = {**json.loads(body.rest), "leftOut": left}
    kept = [entry for entry in entries if entry["kind"] != "symlink"]
    return body._replace(rest=dumps(rest), files=dumps(kept))


def _pages(rows: list[tuple[Any, ...]]) -> Iterator[list[int]]:
    """Numbers of checkpoints whose packed bodies are read together."""
    page: list[int] = []
    size = 0
    for num, _, length in rows:
        if page and size + length > MANIFEST_PAGE:
            yield page
            page, size = [], 0
        page.append(num)
        size += length
    if page:
        yield page
