"""Instance records: which provider sandbox a host resumes for a key. The last write wins, whole."""

from __future__ import annotations

from typing import Final

from fsd.meta.database import Database, Tx
from fsd.model.errors import CheckpointInvalidEntry
from fsd.service.access import FsRef, Grant, hold
from fsd.service.contract_check import JsonObject, check_id
from fsd.service.records import dumps, key_of, pack_text, unpack_text
from fsd.service.threads import NULL, Effect

_OPTIONAL: Final = ("latestSnapshotId", "latestRunId")  # absent where there is none, never null


class Instances:
    """All methods from any thread, none inside a transaction. Effects: see `fsd.service.threads`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def get(self, fs: FsRef, body: JsonObject) -> bytes:
        """The record, or null."""
        key = key_of(check_id(body.get("key"), "key"))
        sql = "SELECT record FROM instance WHERE fs=? AND key=?"
        row = self._db.read(lambda tx: tx.one(sql, (fs.id, key)))
        return NULL if row is None else unpack_text(row[0])

    def upsert(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """Replace the record of its key."""
        given = body.get("record")
        if not isinstance(given, dict):
            raise CheckpointInvalidEntry("record is no object")
        key = key_of(check_id(given.get("key"), "record.key"))
        record = {k: v for k, v in given.items() if k not in _OPTIONAL or v is not None}
        packed = pack_text(dumps(record))

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            tx.execute(
                "INSERT INTO instance (fs, key, record) VALUES (?,?,?) "
                "ON CONFLICT (fs, key) DO UPDATE SET record=excluded.record",
                (fs.id, key, packed),
            )
            return NULL

        return effect

    def delete(self, fs: FsRef, who: Grant, body: JsonObject) -> Effect:
        """A missing one is no error."""
        key = key_of(check_id(body.get("key"), "key"))

        def effect(tx: Tx) -> bytes:
            hold(tx, fs, who)
            tx.execute("DELETE FROM instance WHERE fs=? AND key=?", (fs.id, key))
            return NULL

        return effect
