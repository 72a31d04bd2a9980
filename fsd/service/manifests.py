"""Checkpoints by contract: appended, removed, pruned, forked. Each is one transaction; the order of the
checks is the contract's. Effects: see `fsd.service.threads`.

What a checkpoint names may not be stored (yet, or any more): by contract nobody asks the blobs here.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import (
    CheckpointDuplicateId,
    Conflict,
    ForkDestinationNotEmpty,
    ForkSourceNotFound,
    ForkSourceThreadMismatch,
    NotHead,
    ParentMismatch,
    StaleHead,
    WriterLost,
)
from fsd.model.limits import LISTED_MAX
from fsd.service.access import FsRef, Grant, hold
from fsd.service.contract_check import (
    JsonObject,
    Writer,
    check_artifacts,
    check_created,
    check_files,
    check_id,
    check_keep,
    check_writer,
    keys_of,
    shown,
)
from fsd.service.records import (
    NATIVE,
    Body,
    Native,
    New,
    Record,
    ThreadRow,
    body_of,
    check_foreign,
    dumps,
    find,
    head_id,
    insert,
    is_parent,
    key_of,
    of_thread,
    pack_body,
    pack_text,
    parent_of,
    read_body,
    remove,
    set_head,
    unpack_body,
)
from fsd.service.threads import (
    NULL,
    Effect,
    Threads,
    clock_ms,
    current,
    has_transcript,
    store_transcript,
)

_OPTIONAL: Final = ("label", "sourceRunId")  # absent where there is none, never null
_POLICY: Final = "policy"  # of a record: what a capture left out, and what a restore leaves alone
_THREAD_USED: Final = "SELECT 1 FROM checkpoint WHERE fs=? AND thread=? LIMIT 1"
_COPY_NAMES: Final = (
    "INSERT INTO named (fs, name, checkpoint) "
    "SELECT fs, name, CAST(? AS BIGINT) FROM named WHERE checkpoint=?"
)


class Manifests:
    """All methods from any thread, none inside a transaction."""

    def __init__(self, db: Database, threads: Threads, native: Native | None, host: Host) -> None:
        self._db = db
        self._threads = threads
        self._native = native
        self._host = host

    def append(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`append`: add a checkpoint and make it the head, if all six checks hold."""
        given = body.get("checkpoint")
        record: JsonObject = dict(given) if isinstance(given, dict) else {}
        thread = check_id(record.get("threadId"), "checkpoint.threadId")
        writer = check_writer(body.get("writer"))
        name = check_id(record.get("id"), "checkpoint.id")
        expected = _maybe_id(body.get("expectedHeadId", 0), "expectedHeadId")
        parent = _maybe_id(record.get("parentCheckpointId"), "checkpoint.parentCheckpointId")
        check_foreign(fs, thread)
        created = check_created(record.get("createdAt"))
        names = keys_of(check_files(record.get("files")), check_artifacts(record.get("artifacts")))
        record["parentCheckpointId"] = parent
        for field in _OPTIONAL:
            if field in record and record[field] is None:
                del record[field]
        new = New(
            id=name,
            thread=thread,
            parent=parent,
            created=created,
            stored=self._host.wall_ns(),
            reason=_listed(record.get("reason")),
            label=_listed(record.get("label")),
            body=pack_body(body_of(record)),
            entries=len(record["files"]),
        )
        now = clock_ms(self._host)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            self.check_place(tx, fs, new, expected, writer, now())
            insert(tx, fs, new, names)
            return dumps({"headId": name})

        return effect

    @staticmethod
    def check_place(tx: Tx, fs: FsRef, new: New, expected: str | None, writer: Writer, now: float) -> None:
        """Steps 3 to 6 of `append`; raises one of the contract's errors."""
        _own_thread(tx, fs, writer, new.thread, now)
        if find(tx, fs, key_of(new.id)) is not None:
            raise CheckpointDuplicateId(f"there is a checkpoint {shown(new.id)} already")
        head = head_id(tx, fs, new.thread)
        if head != expected:
            raise StaleHead(f"the head is {shown(head)}, not {shown(expected)}", details={"headId": head})
        if new.parent != expected:
            raise ParentMismatch(f"the parent is {shown(new.parent)}, the expected head {shown(expected)}")

    def delete_head(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`deleteHead`: the head goes, its parent is the head; the thread is empty where that is gone."""
        thread = check_id(body.get("threadId"), "threadId")
        name = check_id(body.get("checkpointId"), "checkpointId")
        writer = check_writer(body.get("writer"))
        now = clock_ms(self._host)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            row = _own_thread(tx, fs, writer, thread, now())
            record = find(tx, fs, key_of(name))
            if record is None or row.head != record.key:
                raise NotHead(f"{shown(name)} is not the head of {shown(thread)}")
            parent = parent_of(tx, fs, record)
            remove(tx, fs, [record], self._native)
            set_head(tx, fs, thread, None if parent is None else parent.key)
            return NULL

        return effect

    def delete_checkpoints(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """`deleteCheckpoints`: of the head's chain the newest `keep` stay; the ids of the others, oldest
        first. What is not on the chain stays."""
        thread = check_id(body.get("threadId"), "threadId")
        writer = check_writer(body.get("writer"))
        keep = check_keep(body.get("keep"))
        now = clock_ms(self._host)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            row = _own_thread(tx, fs, writer, thread, now())
            doomed = chain(of_thread(tx, fs, row.key), row.head)[keep:]
            remove(tx, fs, doomed, self._native)
            return dumps({"deleted": [record.id for record in reversed(doomed)]})

        return effect

    # -- fork ------------------------------------------------------------------------------------------

    def fork(self, fs: FsRef, who: Grant, body: JsonObject) -> Forked:
        """`forkFromCheckpoint`: a checkpoint and its conversation become the root of an empty thread."""
        asked = _read_fork(body)
        check_foreign(fs, asked.thread)
        rendered = self._render_source(fs, asked)
        stored, now = self._host.wall_ns(), clock_ms(self._host)
        forked = Forked(asked.id)

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            source = _source(tx, fs, asked)
            _check_destination(tx, fs, asked, now())
            if rendered is not None and rendered.source != source.num:
                raise Conflict("the source was replaced meanwhile", hint="try again")
            raw = read_body(tx, source.num)
            assert raw is not None, "the row was found in this transaction"
            made = unpack_body(raw)
            made = made._replace(rest=dumps({**asked.rest, **_carried(source, made)}))
            if rendered is not None:
                made = made._replace(files=rendered.files)
            entries = source.entries if rendered is None else rendered.entries
            num = insert(tx, fs, _forked(asked, made, entries, stored), [])
            if rendered is None:
                tx.execute(_COPY_NAMES, (num, source.num))
            else:
                tx.many(
                    "INSERT INTO named (fs, name, checkpoint) VALUES (?,?,?)",
                    [(fs.id, name, num) for name in rendered.names],
                )
            store_transcript(tx, fs, asked.thread, pack_text(made.conversation or b"[]"))
            forked.record = made.text()
            return dumps({"checkpoint": asked.id})

        forked.effect = effect
        return forked

    def _render_source(self, fs: FsRef, asked: _Fork) -> _Rendered | None:
        """Of a native source; that takes time, so it happens before the transaction. None for any other."""

        def read(tx: Tx) -> tuple[Record, Body] | None:
            record = find(tx, fs, key_of(asked.source))
            raw = None if record is None else read_body(tx, record.num)
            return None if record is None or raw is None else (record, unpack_body(raw))

        found = self._db.read(read)
        if found is None:
            return None
        record, body = found
        made = self._threads.rendered(fs, record, body)
        if made is body:
            return None
        files = json.loads(made.files)
        return _Rendered(record.num, made.files, len(files), keys_of(files, json.loads(made.artifacts)))


class Forked:
    """A fork to be. What its effect gives is the new id alone, so that an answer kept for a day is short;
    `record` is the new checkpoint as JSON text once the effect ran."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.record = b""
        self.effect: Effect = lambda _: NULL


class _Rendered(NamedTuple):
    """The files of a native source, as JSON text, and how many: a state counts its directories, too. `names`
    of their contents."""

    source: int
    files: bytes
    entries: int
    names: list[bytes]


class _Fork(NamedTuple):
    """What a fork is asked for. `rest` is the new record but for its three long fields."""

    source_thread: str
    source: str
    thread: str
    id: str
    created: float
    writer: Writer
    rest: JsonObject


def _read_fork(body: JsonObject) -> _Fork:
    source_thread = check_id(body.get("sourceThreadId"), "sourceThreadId")
    source = check_id(body.get("sourceCheckpointId"), "sourceCheckpointId")
    thread = check_id(body.get("destinationThreadId"), "destinationThreadId")
    name = check_id(body.get("destinationCheckpointId"), "destinationCheckpointId")
    writer = check_writer(body.get("writer"))
    created = check_created(body.get("createdAt"))
    if source_thread == thread:
        raise ForkSourceThreadMismatch(f"the thread {shown(thread)} cannot be forked into itself")
    rest = {
        "id": name,
        "threadId": thread,
        "parentCheckpointId": None,
        "createdAt": body["createdAt"],
        "reason": "fork-root",
    }
    return _Fork(source_thread, source, thread, name, created, writer, rest)


def _carried(source: Record, body: Body) -> JsonObject:
    """What a fork has of its source's record beside the long fields: the policy its files were captured by,
    since who restores the fork goes by it as well. A native state was captured whole."""
    if source.kind == NATIVE:
        return {_POLICY: {"include": [], "exclude": []}}
    rest = json.loads(body.rest)
    return {_POLICY: rest[_POLICY]} if _POLICY in rest else {}


def _source(tx: Tx, fs: FsRef, asked: _Fork) -> Record:
    record = find(tx, fs, key_of(asked.source))
    if record is None:
        raise ForkSourceNotFound(f"there is no checkpoint {shown(asked.source)}")
    if record.thread != key_of(asked.source_thread):
        raise ForkSourceThreadMismatch(
            f"the checkpoint {shown(asked.source)} is not of the thread {shown(asked.source_thread)}"
        )
    return record


def _check_destination(tx: Tx, fs: FsRef, asked: _Fork, now: float) -> None:
    row = _own_thread(tx, fs, asked.writer, asked.thread, now)
    if row.head is not None or tx.one(_THREAD_USED, (fs.id, row.key)) or has_transcript(tx, fs, asked.thread):
        raise ForkDestinationNotEmpty(f"the thread {shown(asked.thread)} is not empty")
    if find(tx, fs, key_of(asked.id)) is not None:
        raise ForkDestinationNotEmpty(f"there is a checkpoint {shown(asked.id)} already")


def _forked(asked: _Fork, body: Body, entries: int, stored: int) -> New:
    return New(
        id=asked.id,
        thread=asked.thread,
        parent=None,
        created=asked.created,
        stored=stored,
        reason="fork-root",
        label=None,
        body=pack_body(body),
        entries=entries,
    )


def chain(records: list[Record], head: bytes | None) -> list[Record]:
    """The chain of a thread from its head to its oldest link; it ends where a parent was removed."""
    by_key = {record.key: record for record in records}
    made: list[Record] = []
    at = None if head is None else by_key.get(head)
    while at is not None:
        made.append(at)
        above: Any = None if at.parent is None else by_key.get(at.parent)
        at = above if above is not None and is_parent(above, at) else None
    return made


def _listed(value: object) -> str | None:
    """A host's reason or label as the filesystem's own lists show it; the record keeps what it was. By
    contract it is a text, of any length; what else it may be is shown as its JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else dumps(value).decode()
    return text[:LISTED_MAX]


def _maybe_id(value: object, what: str) -> str | None:
    return None if value is None else check_id(value, what)


def _own_thread(tx: Tx, fs: FsRef, writer: Writer, thread: str, now: float) -> ThreadRow:
    """The thread a write is of; raises `WriterLost` unless `writer` is its current one."""
    if writer.thread != thread:
        raise WriterLost(f"the writer is of {shown(writer.thread)}, the write of {shown(thread)}")
    return current(tx, fs, writer, now)
