"""Native checkpoints: a retained state of a filesystem with a record, in the thread `fsd:<filesystem id>`.

Making one is a row and a pin in one transaction under the filesystem's lock, whatever the size of the tree;
what it shows never changes until it is deleted (invariant 9, *frozen*). Deleting one removes the rows only it
could see. The record is the contract's, with `files` empty: they are made when they are asked for
(`fsd.service.render`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Conflict, NotFound, UsageError
from fsd.model.limits import CHECKPOINT_LABEL_MAX, LIST_PAGE_MAX, NOT_FLUSHED_MAX, PRUNE_STEP, UNDO_KEEP
from fsd.model.plain import dataclass
from fsd.model.times import NS, rfc3339
from fsd.service import pins, records
from fsd.service.access import FsRef, Grant, held, hold
from fsd.service.packs import Packs
from fsd.service.records import NATIVE, New, Record, key_of, own_thread
from fsd.service.render import Renderer
from fsd.service.retained import At
from fsd.service.text import check_line, new_id

AUTOMATIC: Final = "automatic"
NAMED: Final = "named"
UNDO: Final = "restore-undo"
MERGE_UNDO: Final = "merge-undo"
_KEEP_MAX: Final = 100 * 365 * 86_400.0
_REASON_MAX: Final = 64
_COLUMNS: Final = "num, id, thread, parent, created, reason, label, kind, fs_seq, pin, entries, expires"
LIST_SQL: Final = f"SELECT {_COLUMNS} FROM checkpoint WHERE fs=? AND num<? ORDER BY num DESC LIMIT ?"
LIST_THREAD_SQL: Final = (
    f"SELECT {_COLUMNS} FROM checkpoint WHERE fs=? AND thread=? AND num<? ORDER BY num DESC LIMIT ?"
)
# What thinning looks at; the rest of a record costs more than all of this.
POINTS_SQL: Final = (
    "SELECT num, id, stored, reason FROM checkpoint WHERE fs=? AND thread=? AND num>? ORDER BY num LIMIT ?"
)
NEW_HEAD_SQL: Final = (
    "UPDATE thread SET head=(SELECT c.key FROM checkpoint c WHERE c.fs=? AND c.thread=? "
    "ORDER BY c.num DESC LIMIT 1) WHERE fs=? AND key=? AND head=?"
)
# Of the filesystems' own threads alone: a host's records are its own business.
EXPIRED_SQL: Final = (
    "SELECT f.id, f.name, c.id FROM checkpoint c CROSS JOIN fs f WHERE c.expires IS NOT NULL AND c.expires<? "
    "AND c.kind='native' AND f.id=c.fs AND f.status='active' AND EXISTS (SELECT 1 FROM thread t "
    "WHERE t.fs=c.fs AND t.key=c.thread AND t.fence=0) ORDER BY c.expires LIMIT ?"
)
FIELDS: Final = ("label", "reason", "expires_in_s", "not_flushed")


@dataclass(frozen=True, slots=True)
class Ask:
    """A checkpoint as asked for. `keep_s`: seconds after which it goes by itself, None: it stays.
    `not_flushed` is what its caller could not bring into it; it is only given back."""

    label: str | None = None
    reason: str = NAMED
    keep_s: float | None = None
    not_flushed: tuple[Any, ...] = ()


def read_ask(body: Mapping[str, Any]) -> Ask:
    """The `FIELDS` of a body; other fields are the caller's business. Raises `UsageError`."""
    label, reason = body.get("label"), body.get("reason")
    if label is not None and not check_line(label, "label", CHECKPOINT_LABEL_MAX):
        raise UsageError("label is empty", hint="leave it out")
    if reason is not None and not check_line(reason, "reason", _REASON_MAX):
        raise UsageError("reason is empty", hint=f"leave it out, or give {AUTOMATIC} or {NAMED}")
    keep = body.get("expires_in_s")
    if keep is not None and (
        not isinstance(keep, (int, float)) or isinstance(keep, bool) or not 0 < keep <= _KEEP_MAX
    ):
        raise UsageError("expires_in_s is a number of seconds over 0")
    left = body.get("not_flushed") or ()
    if not isinstance(left, (list, tuple)) or len(left) > NOT_FLUSHED_MAX:
        raise UsageError(f"not_flushed is a list of at most {NOT_FLUSHED_MAX}")
    return Ask(label, reason or NAMED, keep, tuple(left))


def may_be_thinned(reason: str, age: int, *, asked_for: bool) -> bool:
    """Whether a rule may let go of a checkpoint so many ns old: one nobody asked for (`asked_for`: any), and
    of those that undo a restore or a merge none while it is still likely to be wanted."""
    if reason in (UNDO, MERGE_UNDO):
        return age >= UNDO_KEEP * NS
    return asked_for or reason == AUTOMATIC


def no_checkpoint(name: str) -> NotFound:
    return NotFound(f"no checkpoint {name[:80]}", hint="see fsd checkpoint list")


class Checkpoints:
    """Any thread. All methods but `render`, `files` and `expire` inside a `Database` function; what they make
    is durable when that is. For the contract's part of the service it is a `records.Native`."""

    def __init__(self, db: Database, packs: Packs, host: Host) -> None:
        self._db = db
        self._packs = packs
        self._host = host
        self._renderer = Renderer(db, packs, host)

    def render(self, fs: FsRef, record: Record) -> list[dict[str, Any]]:
        """The entries of the tree that `record` shows (`Renderer.render`). Blocks; never in a transaction."""
        return self.files(fs, At(checkpoint=record.id))

    def files(self, fs: FsRef, at: At) -> list[dict[str, Any]]:
        """The entries of any retained state; as `render`."""
        return self._renderer.render(fs, at)

    def from_commit(self, tx: Tx, fs: FsRef, who: Grant, body: dict[str, Any]) -> dict[str, Any]:
        """As `make`, for a commit that asks for a checkpoint of the state after it."""
        return self.make(tx, fs, who, read_ask(body))

    def make(self, tx: Tx, fs: FsRef, who: Grant | None, ask: Ask) -> dict[str, Any]:
        """Keep the present state: one row and a pin. Raises `NotFound`, `NotAuthenticated`."""
        seq, pinned, _, inodes = held(tx, fs, who)
        name, now, thread = new_id(self._host, "cp_"), self._host.wall_ns(), own_thread(fs)
        # Before anything is written: where it raises, a commit that asked for the checkpoint goes on.
        parent = records.head_id(tx, fs, thread)
        number = pins.add_pin(tx, fs, seq, "checkpoint", name, pinned=pinned)
        entries = inodes - 1  # the root is none
        record: dict[str, Any] = {
            "id": name,
            "threadId": thread,
            "parentCheckpointId": parent,
            "createdAt": now / 1e6,
            "reason": ask.reason,
            "files": [],
            "conversation": [],
            "artifacts": [],
            "native": {"fsSeq": seq, "entries": entries},
        }
        if ask.label is not None:
            record["label"] = ask.label
        self._host.crash_point("checkpoint.make")
        records.insert(
            tx,
            fs,
            New(
                id=name,
                thread=thread,
                parent=parent,
                created=now / 1e6,
                stored=now,
                reason=ask.reason,
                label=ask.label,
                body=records.pack_body(records.body_of(record)),
                entries=entries,
                kind=NATIVE,
                fs_seq=seq,
                pin=number,
                expires=None if ask.keep_s is None else now + int(ask.keep_s * NS),
            ),
            (),
        )
        return {
            "checkpoint_id": name,
            "thread_id": thread,
            "parent_id": parent,
            "fs_seq": seq,
            "label": ask.label,
            "reason": ask.reason,
            "entries": entries,
            "created_at": rfc3339(now),
            "not_flushed": list(ask.not_flushed),
        }

    def show(self, tx: Tx, fs: FsRef, name: str) -> dict[str, Any]:
        """A checkpoint of either kind, without its files. Raises `NotFound`."""
        return _Shown(tx, fs).one(_need(tx, fs, name))

    def page(
        self, tx: Tx, fs: FsRef, thread: str | None, before: int | None, limit: int
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Checkpoints of all threads or of one, newest first, those stored before number `before`; and where
        the next page begins, None at the end."""
        limit = max(1, min(limit, LIST_PAGE_MAX))
        first = 2**62 if before is None else before
        if thread is None:
            rows = tx.all(LIST_SQL, (fs.id, first, limit + 1))
        else:
            rows = tx.all(LIST_THREAD_SQL, (fs.id, key_of(thread), first, limit + 1))
        shown = _Shown(tx, fs)
        following = int(rows[limit - 1][0]) if len(rows) > limit else None
        return [shown.one(row) for row in rows[:limit]], following

    def points(self, tx: Tx, fs: FsRef, after: int) -> list[tuple[int, str, int, str]]:
        """Some of the filesystem's own checkpoints behind number `after`, in the order they were made:
        number, id, time in ns, reason. None of them: there are no more."""
        rows = tx.all(POINTS_SQL, (fs.id, key_of(own_thread(fs)), after, LIST_PAGE_MAX))
        return [(num, name.decode(), stored, json.loads(reason)) for num, name, stored, reason in rows]

    def delete(self, tx: Tx, fs: FsRef, who: Grant | None, name: str) -> dict[str, Any]:
        """Remove a checkpoint of the filesystem's own thread and what only it could see. Raises `NotFound`,
        `Conflict` for one of a host's thread."""
        hold(tx, fs, who)
        record = records.find(tx, fs, key_of(name))
        if record is None:
            raise no_checkpoint(name)
        own = key_of(own_thread(fs))
        if record.thread != own:
            raise Conflict(
                f"the checkpoint {name} belongs to a host's thread",
                hint="its writer deletes it: deleteHead or deleteCheckpoints of the checkpoint contract",
            )
        records.remove(tx, fs, [record], self)
        self._host.crash_point("checkpoint.delete")
        tx.execute(NEW_HEAD_SQL, (fs.id, own, fs.id, own, record.key))
        return {"checkpoint_id": name, "status": "deleted", "fs_seq": record.fs_seq}

    def expire(self) -> int:
        """Delete some checkpoints of filesystems in use whose time is over, each in a transaction of its own;
        how many there were. Blocks; never in a transaction."""
        now = self._host.wall_ns()
        found = self._db.read(lambda tx: tx.all(EXPIRED_SQL, (now, PRUNE_STEP)))
        for fs, name, checkpoint in found:
            of = FsRef(int(fs), name)
            try:
                self._db.write(
                    lambda tx, f=of, c=checkpoint: self.delete(tx, f, None, c.decode()),  # type: ignore[misc]
                    frees=True,
                )
            except (NotFound, Conflict):  # another was quicker
                continue
        return len(found)

    def drop(self, tx: Tx, fs: FsRef, record: Record) -> None:
        """`record` is being removed by its thread: let go of its pin. Holds the filesystem."""
        assert record.pin is not None, "a native checkpoint has a pin"
        pins.unpin(tx, self._packs, fs, record.pin)


def _need(tx: Tx, fs: FsRef, name: str) -> tuple[Any, ...]:
    row = tx.one(f"SELECT {_COLUMNS} FROM checkpoint WHERE fs=? AND key=?", (fs.id, key_of(name)))
    if row is None:
        raise no_checkpoint(name)
    return row


class _Shown:
    """Rows of checkpoints as they are given back; ids of threads and parents are looked up once each."""

    def __init__(self, tx: Tx, fs: FsRef) -> None:
        self._tx, self._fs = tx, fs
        self._ids: dict[tuple[str, bytes], str | None] = {}

    def one(self, row: tuple[Any, ...]) -> dict[str, Any]:
        _num, name, thread, parent, created, reason, label, kind, seq, _pin, entries, expires = row
        self._ids["checkpoint", key_of(name.decode())] = name.decode()
        return {
            "checkpoint_id": name.decode(),
            "thread_id": self._id("thread", thread),
            "parent_id": None if parent is None else self._id("checkpoint", parent),
            "kind": kind,
            "reason": json.loads(reason),
            "label": None if label is None else json.loads(label),
            "fs_seq": seq,
            "entries": entries,
            "created_at": _time(created),
            "expires_at": None if expires is None else rfc3339(expires),
        }

    def _id(self, table: str, key: bytes) -> str | None:
        """None for a parent that was deleted."""
        if (table, key) not in self._ids:
            row = self._tx.one(f"SELECT id FROM {table} WHERE fs=? AND key=?", (self._fs.id, key))
            self._ids[table, key] = None if row is None else row[0].decode()
        return self._ids[table, key]


def _time(ms: float) -> str | None:
    """A contract time as text; None for one outside of what dates can say."""
    return rfc3339(int(ms * 1e6)) if 0 <= ms < 9e12 else None
