"""A state of the filesystem as a checkpoint of a host's thread: a native one by the contract's rules.

Its files are rendered and counted when it is made, under the thread's lease and with the expected head, as an
`append` would be; it keeps the state itself too, so it can be mounted, compared and restored like any other.
The state is pinned while it is rendered, which takes time and is done outside of the transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import NotFound, Unavailable
from fsd.model.limits import EXPORT_PIN
from fsd.model.times import NS, rfc3339
from fsd.service import pins, records
from fsd.service.access import FsRef, Grant, hold
from fsd.service.contract_check import JsonObject, Writer, keys_of
from fsd.service.manifests import Manifests
from fsd.service.native import Ask, Checkpoints
from fsd.service.packs import Packs
from fsd.service.records import NATIVE, New
from fsd.service.retained import At, state_of
from fsd.service.text import new_id
from fsd.service.threads import clock_ms

T = TypeVar("T")
Effect = Callable[[Tx], dict[str, Any]]
TRANSCRIPT_SQL: Final = "SELECT messages FROM transcript WHERE fs=? AND thread=?"


class Place(NamedTuple):
    """Where it goes: the thread, its current writer, the head that is expected (None: an empty thread), and
    which state (None: the live one)."""

    thread: str
    writer: Writer
    expected: str | None
    source: At | None


class InThread:
    """Any thread; blocks; never inside a transaction."""

    def __init__(self, db: Database, packs: Packs, checkpoints: Checkpoints, host: Host) -> None:
        self._db, self._packs, self._checkpoints, self._host = db, packs, checkpoints, host

    def make(self, fs: FsRef, who: Grant, ask: Ask, place: Place, around: Callable[[Tx, Effect], T]) -> T:
        """`around(tx, effect)` runs the effect that makes it, with what has to be one transaction with it;
        its value. Raises the contract's errors of `append` (the writer, the head), `NotFound`, and what
        rendering raises; then nothing is left of it."""
        records.check_foreign(fs, place.thread)
        pin, seq = self._db.write(lambda tx: self._hold_state(tx, fs, who, place))
        try:
            files = self._checkpoints.files(fs, At(seq=seq))
            now = clock_ms(self._host)

            def effect(tx: Tx) -> dict[str, Any]:
                return self._append(tx, fs, who, ask, place, pin, seq, files, now())

            return self._db.write(lambda tx: around(tx, effect))
        except BaseException:
            self._let_go(fs, pin)
            raise

    def _hold_state(self, tx: Tx, fs: FsRef, who: Grant, place: Place) -> tuple[int, int]:
        hold(tx, fs, who)
        seq = state_of(tx, fs, place.source).seq
        until = self._host.wall_ns() + int(EXPORT_PIN * NS)
        return pins.pin_at(tx, fs, seq, "mount", "render", until), seq

    def _let_go(self, fs: FsRef, pin: int) -> None:
        def write(tx: Tx) -> None:
            row = tx.one("SELECT kind FROM pin WHERE id=? AND fs=?", (pin, fs.id))
            if row is not None and row[0] == "mount":  # else it was made after all: the answer was lost
                pins.unpin(tx, self._packs, fs, pin)

        try:
            self._db.write(write, frees=True)
        except NotFound:  # the filesystem was deleted
            return

    def _append(
        self,
        tx: Tx,
        fs: FsRef,
        who: Grant,
        ask: Ask,
        place: Place,
        pin: int,
        seq: int,
        files: list[JsonObject],
        now: float,
    ) -> dict[str, Any]:
        hold(tx, fs, who)
        name, stored = new_id(self._host, "cp_"), self._host.wall_ns()
        row = tx.one(TRANSCRIPT_SQL, (fs.id, records.key_of(place.thread)))
        record: JsonObject = {
            "id": name,
            "threadId": place.thread,
            "parentCheckpointId": place.expected,
            "createdAt": stored / 1e6,
            "reason": ask.reason,
            "files": files,
            "conversation": [] if row is None else json.loads(records.unpack_text(row[0])),
            "artifacts": [],
            "native": {"fsSeq": seq, "entries": len(files)},
        }
        if ask.label is not None:
            record["label"] = ask.label
        new = New(
            id=name,
            thread=place.thread,
            parent=place.expected,
            created=stored / 1e6,
            stored=stored,
            reason=ask.reason,
            label=ask.label,
            body=records.pack_body(records.body_of(record)),
            entries=len(files),
            kind=NATIVE,
            fs_seq=seq,
            pin=pin,
        )
        Manifests.check_place(tx, fs, new, place.expected, place.writer, now)
        if not tx.execute("UPDATE pin SET kind='checkpoint', ref=?, expires=NULL WHERE id=?", (name, pin)):
            raise Unavailable("the state was let go while it was read", hint="try again")
        self._host.crash_point("checkpoint.inthread")
        records.insert(tx, fs, new, keys_of(files, []))
        return {
            "checkpoint_id": name,
            "thread_id": place.thread,
            "parent_id": place.expected,
            "fs_seq": seq,
            "label": ask.label,
            "reason": ask.reason,
            "entries": len(files),
            "created_at": rfc3339(stored),
            "not_flushed": list(ask.not_flushed),
        }
