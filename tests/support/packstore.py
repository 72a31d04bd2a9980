"""A store of packs for fault tests: fill it in a child process that dies, then look at what is there.

As a program: `packstore.py DIR POINT COUNT UPLOADS` stores UPLOADS uploads into DIR and prints the number of
each when it is acknowledged; it dies at the COUNT-th time POINT is passed ('' never).
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from fsd.blobs.directory import DirectoryStore
from fsd.host.seam import Crasher, Host
from fsd.meta.database import Database, Tx, open_database
from fsd.model.limits import COMMIT_BLOBS_MAX, UPLOAD_BLOBS_MAX
from fsd.service.packs import Packs
from fsd.wire.frame import Blob, make_blob, open_blob, unpack

FS_NAME = "fs_packs"


@dataclass
class PackStore:
    """Database, objects and packs of one data directory."""

    db: Database
    store: DirectoryStore
    packs: Packs
    fs: int

    def close(self) -> None:
        self.db.close()


def open_packs(directory: Path, host: Host) -> PackStore:
    db = open_database(directory, host)
    store = DirectoryStore(directory, host)
    return PackStore(db, store, Packs(db, store, host), db.write(make_fs))


def make_fs(tx: Tx) -> int:
    """The test's filesystem, made when it is not there."""
    tx.execute(
        "INSERT INTO fs (name, display_name, labels, status, created, seq, pinned, storage_bytes, file_count,"
        " copied) VALUES (?,'','{}','active',0,0,-1,0,0,1) ON CONFLICT DO NOTHING",
        (FS_NAME,),
    )
    row = tx.one("SELECT id FROM fs WHERE name=?", (FS_NAME,))
    assert row is not None
    return int(row[0])


def upload(number: int) -> list[Blob]:
    """The blobs of upload `number`: even ones are inline packs, odd ones objects."""
    size = 20_000 if number % 2 == 0 else 90_000
    return [make_blob(noise(f"{number}.{part}", size)) for part in range(3)]


def noise(seed: str, size: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    pieces = [hashlib.sha256(f"{seed}.{i}".encode()).digest() for i in range(size // 32 + 1)]
    return b"".join(pieces)[:size]


def check(at: PackStore, uploads: int, acknowledged: set[int]) -> int:
    """Assert the invariants after a crash; how many uploads are there.

    What was acknowledged is there; an upload is there whole or not at all; every row's bytes are there and
    have their hash; every object is a whole pack that lists itself.
    """
    present = 0
    for number in range(uploads):
        blobs = upload(number)
        found = at.packs.read(at.fs, [blob.hash for blob in blobs])
        assert len(found) in (0, len(blobs)), f"upload {number} is there in part"
        assert len(found) == len(blobs) or number not in acknowledged, f"upload {number} is lost"
        for blob in blobs:
            if found:
                assert open_blob(found[blob.hash]) == open_blob(blob)
        present += bool(found)
    rows = at.db.read(lambda tx: tx.all("SELECT hash FROM blob WHERE fs=?", (at.fs,)))
    assert len(at.packs.read(at.fs, [row[0] for row in rows])) == len(rows)
    for listed in at.store.list("packs/"):
        body = at.store.get(listed.key, 0, listed.size)
        header, blobs = unpack(body, blobs_max=UPLOAD_BLOBS_MAX, bytes_max=COMMIT_BLOBS_MAX)
        assert f"packs/{header['fs']}/{header['pack']:016x}" == listed.key
        for blob in blobs:
            open_blob(blob)
    return present


def main() -> None:
    directory, point, count, uploads = sys.argv[1:]
    at = open_packs(Path(directory), Host(crash_point=Crasher(point, int(count))))
    for number in range(int(uploads)):
        at.packs.store(at.fs, FS_NAME, upload(number))
        print(number, flush=True)
    at.close()


if __name__ == "__main__":
    main()
