"""Filesystems as the control plane sees them: made, listed, described, checked, deleted.

Deleting marks the row, which makes the filesystem unreachable from the next request on; `collect` then
removes rows and packs in bounded chunks, the row itself last, so a crash in between is continued later.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final

from fsd.blobs.store import BlobStore
from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import MAX
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import FsdError
from fsd.model.limits import LIST_PAGE_MAX, LIST_SCAN_MAX
from fsd.model.times import rfc3339
from fsd.service.access import FsRef, no_file_system
from fsd.service.text import DISPLAY_NAME_MAX, check_labels, check_line, new_id
from fsd.service.tokens import Tokens

Page = list[dict[str, Any]]
Release = Callable[[Tx, FsRef, bool], list[str]]  # `Forks.release`
_CHUNK: Final = 2000
_COLUMNS: Final = (
    "id, name, display_name, labels, status, created, seq, storage_bytes, file_count, copied, origin_seq, "
    "(SELECT k.origin_name FROM fork k WHERE k.fs = fs.id)"
)
# What belongs to a filesystem and how a bounded part of it is found; `counter` and `idempotency` do not.
_ROWS: Final = (
    ("applied", "session, last_op", "session IN (SELECT id FROM session WHERE fs = ?)"),
    ("redirect", "session, ino", "session IN (SELECT id FROM session WHERE fs = ?)"),
    ("moved", "session, parent, name, ino", "session IN (SELECT id FROM session WHERE fs = ?)"),
    ("gone", "fs, ino", "fs = ?"),
    ("session", "id", "fs = ?"),
    ("dentry", "fs, parent, name, died", "fs = ?"),
    ("block", "fs, ino, idx, died", "fs = ?"),
    ("inode", "fs, ino, died", "fs = ?"),
    ("change", "fs, seq", "fs = ?"),
    ("lease", "fs, fence", "fs = ?"),
    ("conflict", "fs, parent, name", "fs = ?"),
    ("journal_append", "fs, journal, key", "fs = ?"),
    ("journal_entry", "fs, journal, seq", "fs = ?"),
    ("journal", "fs, id", "fs = ?"),
    ("token", "id", "fs = ?"),
    ("named", "fs, name, checkpoint", "fs = ?"),
    ("checkpoint", "num", "fs = ?"),
    ("thread", "fs, key", "fs = ?"),
    ("blob_name", "fs, name", "fs = ?"),
    ("transcript", "fs, thread", "fs = ?"),
    ("instance", "fs, key", "fs = ?"),
    ("lease_terms", "fs", "fs = ?"),
    ("fork", "fs", "fs = ?"),
    ("pin", "id", "fs = ?"),
    ("barrier", "id", "fs = ?"),
    ("blob", "fs, hash", "fs = ?"),
    # A fork's blob rows may point into packs its ancestors wrote; such packs stay.
    ("pack", "id", "fs = ? AND NOT EXISTS (SELECT 1 FROM blob WHERE blob.pack = pack.id)"),
    ("dropped", "fs, pack", "fs = ?"),
    ("sweep", "fs", "fs = ?"),
)


def new_answer(
    tokens: Tokens, tx: Tx, fs: FsRef, display_name: str, labels: dict[str, str], now: int
) -> dict[str, Any]:
    """What its maker is told of a new filesystem, its owner token made and sealed (`Tokens.unseal`)."""
    token = tokens.create_first(tx, fs)
    return {
        "file_system_id": fs.name,
        "fs_token": token["fs_token"],
        "token_id": token["token_id"],
        "region_code": tokens.region,
        "status": "active",
        "display_name": display_name,
        "labels": labels,
        "created_at": rfc3339(now),
    }


class FileSystems:
    """All methods from any thread."""

    def __init__(self, db: Database, store: BlobStore, tokens: Tokens, host: Host, release: Release) -> None:
        self._db = db
        self._release = release
        self._store = store
        self._tokens = tokens
        self._host = host

    def create(self, tx: Tx, display_name: str, labels: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """A new filesystem with an owner token, in the caller's transaction. `fs_token` is sealed
        (`Tokens.unseal`)."""
        check_line(display_name, "display_name", DISPLAY_NAME_MAX)
        pairs = dict(check_labels(labels))
        now = self._host.wall_ns()
        name = new_id(self._host, "fs_")
        row = tx.one(
            "INSERT INTO fs (name, display_name, labels, status, created, seq, pinned, storage_bytes, "
            "file_count, copied) VALUES (?, ?, ?, 'active', ?, 0, -1, 0, 1, 1) RETURNING id",
            (name, display_name, json.dumps(pairs, ensure_ascii=False), now),
        )
        assert row is not None, "INSERT … RETURNING gives a row"
        fs = FsRef(int(row[0]), name)
        tx.execute(
            "INSERT INTO inode (fs, ino, mode, nlink, uid, gid, size, atime, mtime, ctime, rdev, parent, "
            "cseq, writer, grown, born, died) VALUES (?, ?, ?, 2, 0, 0, 0, ?, ?, ?, 0, ?, 0, 0, 0, 0, ?)",
            (fs.id, ROOT_INO, stat.S_IFDIR | 0o755, now, now, now, ROOT_INO, MAX),
        )
        return new_answer(self._tokens, tx, fs, display_name, pairs, now)

    def find(self, tx: Tx, name: str) -> FsRef:
        """The active filesystem called `name`; raises `NotFound`."""
        row = tx.one("SELECT id FROM fs WHERE name = ? AND status = 'active'", (name,))
        if row is None:
            raise no_file_system(name)
        return FsRef(int(row[0]), name)

    def get(self, name: str) -> FsRef:
        """As `find`, in a transaction of its own."""
        return self._db.read(lambda tx: self.find(tx, name))

    def describe(self, name: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        row = self._db.read(
            lambda tx: tx.one(f"SELECT {_COLUMNS} FROM fs WHERE name = ? AND status = 'active'", (name,))
        )
        if row is None:
            raise no_file_system(name)
        return self._shown(row)

    def list(
        self, *, display_name: str | None, label: tuple[str, str] | None, after: str, limit: int
    ) -> dict[str, Any]:
        """A page in order of id. `display_name` is a substring, `label` one exact pair; with them perhaps
        fewer than `limit`, also before the end (after LIST_SCAN_MAX without a match)."""
        found: Page = []

        def page(cursor: str | None) -> dict[str, Any]:
            shown = found[:limit]
            return {"region_code": self._tokens.region, "file_systems": shown, "next_cursor": cursor}

        for _ in range(LIST_SCAN_MAX // LIST_PAGE_MAX):
            at = after
            rows = self._db.read(
                lambda tx, at=at: tx.all(  # type: ignore[misc]
                    f"SELECT {_COLUMNS} FROM fs WHERE status = 'active' AND name > ? ORDER BY name LIMIT ?",
                    (at, LIST_PAGE_MAX),
                )
            )
            for row in rows:
                one, after = self._shown(row), row[1]
                if display_name is not None and display_name not in one["display_name"]:
                    continue
                if label is not None and one["labels"].get(label[0]) != label[1]:
                    continue
                found.append(one)
                if len(found) > limit:
                    return page(found[limit - 1]["file_system_id"])
            if len(rows) < LIST_PAGE_MAX:
                return page(None)
        return page(after)

    def check(self, fs: FsRef) -> dict[str, Any]:
        """Try what a user of the filesystem needs: facts readable, root there, store answering."""
        checks = [
            self._try("database", lambda: self._check_root(fs), "the root directory is there"),
            self._try(
                "blobs",
                lambda: self._store.head(f"packs/{fs.name}/0000000000000000"),
                "the object store answers",
            ),
        ]
        failed = any(one["status"] != "ok" for one in checks)
        return {"file_system_id": fs.name, "status": "failed" if failed else "ok", "checks": checks}

    def delete(self, tx: Tx, name: str, *, cascade: bool = False) -> dict[str, Any]:
        """Mark it, with `cascade` the forks that read its files too. Raises `NotFound`; `Conflict` while
        there are such forks."""
        fs = self.find(tx, name)
        forks = self._release(tx, fs, cascade)
        tx.execute("UPDATE fs SET status = 'deleting' WHERE id = ?", (fs.id,))
        return {"file_system_id": name, "status": "deleting", "forks_deleted": forks}

    def collect(self) -> int:
        """Remove one bounded part of what deleted filesystems left; 0 when nothing is left to do."""
        row = self._db.read(
            lambda tx: tx.one("SELECT id, name FROM fs WHERE status = 'deleting' ORDER BY id LIMIT 1")
        )
        if row is None:
            return 0
        fs = FsRef(int(row[0]), str(row[1]))
        for table, key, where in _ROWS:
            removed = self._db.write(
                lambda tx, t=table, k=key, w=where: _delete_some(tx, fs, t, k, w),  # type: ignore[misc]
                frees=True,
            )
            if removed:
                return int(removed)
        return self._collect_objects(fs)

    def _collect_objects(self, fs: FsRef) -> int:
        """All rows are gone: the objects no pack row names go, then the filesystem's own row."""
        kept = {
            f"packs/{fs.name}/{row[0]:016x}"
            for row in self._db.read(lambda tx: tx.all("SELECT id FROM pack WHERE fs = ?", (fs.id,)))
        }
        removed = 0
        for key, _size, _mtime in self._store.list(f"packs/{fs.name}/"):
            if key in kept:
                continue
            self._host.crash_point("collect.object")
            self._store.delete(key)
            removed += 1
            if removed >= _CHUNK:
                return removed
        self._store.tidy(f"packs/{fs.name}")
        self._host.crash_point("collect.last")
        self._db.write(lambda tx: _delete_last(tx, fs), frees=True)
        return 1

    def _check_root(self, fs: FsRef) -> object:
        row = self._db.read(
            lambda tx: tx.one(
                "SELECT mode FROM inode WHERE fs = ? AND ino = ? AND died = ?", (fs.id, ROOT_INO, MAX)
            )
        )
        if row is None:
            raise FsdError("the root directory is missing")
        return row

    @staticmethod
    def _try(name: str, probe: Any, good: str) -> dict[str, str]:
        try:
            probe()
        except FsdError as exc:
            return {"name": name, "status": "failed", "message": exc.message}
        return {"name": name, "status": "ok", "message": good}

    def _shown(self, row: tuple[Any, ...]) -> dict[str, Any]:
        _id, name, display_name, labels, status, created, seq, storage, files, copied, at, origin = row
        fork = {} if origin is None else {"origin_id": origin, "origin_seq": at, "copied": bool(copied)}
        return {
            "file_system_id": name,
            "display_name": display_name,
            "labels": json.loads(labels),
            "region_code": self._tokens.region,
            "status": status,
            "kind": "native",
            "created_at": rfc3339(created),
            "seq": seq,
            "usage": {"storage_bytes": storage, "file_count": files},
            **fork,
        }


def _delete_last(tx: Tx, fs: FsRef) -> None:
    """Remove the filesystem's own row, unless a request that began before the delete has left rows since.
    While a fork's blobs lie in its packs it stays, as `kept`: its name is part of theirs."""
    tx.lock_fs(fs.id)
    if any(_delete_some(tx, fs, table, key, where) for table, key, where in _ROWS):
        return
    if tx.one("SELECT 1 FROM pack WHERE fs = ? LIMIT 1", (fs.id,)):
        tx.execute("UPDATE fs SET status = 'kept' WHERE id = ?", (fs.id,))
    else:
        tx.execute("DELETE FROM fs WHERE id = ?", (fs.id,))


def _delete_some(tx: Tx, fs: FsRef, table: str, key: str, where: str) -> int:
    return tx.execute(
        f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {where} LIMIT {_CHUNK})",
        (fs.id,),
    )
