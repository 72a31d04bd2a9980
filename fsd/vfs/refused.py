"""What the server refused, kept under `refused/` until somebody decides: retry, export or discard.

One directory an operation, `<session>-<operation>`: `entry` (msgpack, written last, durably) and for content
`data`, the whole file as it was to become.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from fsd.host.files import fsync_dir, write_all, write_durable
from fsd.host.seam import Host
from fsd.model.blocks import Parts, pieces
from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOCK
from fsd.remote.api import Remote
from fsd.vfs.build import Fetch, Source, assemble, fetcher
from fsd.vfs.log import Log
from fsd.vfs.types import BULK, Cache

DIRECTORY = "refused"


class Refusal(NamedTuple):
    """A refused operation with what is needed to do it again. `op` is the operation's row in local numbers,
    `path` one path of the inode below the mount's root, `blocks` the whole new block list of a content
    operation, `sources` where its new blobs come from."""

    session: int
    opno: int
    op: tuple[Any, ...]
    errno: int
    reason: str
    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    blocks: tuple[tuple[int, Parts], ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SalvageJob:
    """Write refusals into `refused/`, durably. Doing it twice leaves the same."""

    state_dir: Path
    host: Host
    log: Log
    refusals: tuple[Refusal, ...]
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> None:
        root = self.state_dir / DIRECTORY
        root.mkdir(mode=0o700, exist_ok=True)
        for refusal in self.refusals:
            place = root / f"{refusal.session}-{refusal.opno}"
            place.mkdir(mode=0o700, exist_ok=True)
            lacking = 0
            if refusal.blocks or refusal.size:
                lacking = self._data(place / "data", refusal, remote, cache)
            entry = {
                "op": refusal.op,
                "errno": refusal.errno,
                "reason": refusal.reason,
                "path": refusal.path,
                "mode": refusal.mode,
                "uid": refusal.uid,
                "gid": refusal.gid,
                "size": refusal.size,
                "lacking": lacking,
            }
            write_durable(self.host, place / "entry", msgpack.packb(entry, use_bin_type=True), "refused")
        fsync_dir(root)

    def _data(self, path: Path, refusal: Refusal, remote: Remote, cache: Cache) -> int:
        """Write the file; returns how many bytes of it nobody has any more (they read as zeros)."""
        lacking = 0
        mine = {source.hash: source for source in refusal.sources}
        fetch = fetcher(remote, cache, self.log, mine)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, refusal.size)
            for index, parts in refusal.blocks:
                room = min(BLOCK, refusal.size - index * BLOCK)
                for piece in pieces(parts, 0, room):
                    try:
                        blob = _bytes_of(piece.hash, mine, self.log, fetch)
                    except IntegrityError:
                        lacking += piece.length
                        continue
                    os.lseek(fd, index * BLOCK + piece.at, os.SEEK_SET)
                    write_all(fd, memoryview(blob)[piece.boff : piece.boff + piece.length])
            os.fsync(fd)
        finally:
            os.close(fd)
        return lacking


def _bytes_of(digest: bytes, mine: dict[bytes, Source], log: Log, fetch: Fetch) -> bytes:
    source = mine.get(digest)
    return fetch([digest])[digest] if source is None else assemble(source.pieces, log, fetch)


def count_refused(state_dir: Path) -> int:
    """How many refused operations wait for a decision."""
    try:
        return sum(1 for place in (state_dir / DIRECTORY).iterdir() if (place / "entry").exists())
    except FileNotFoundError:
        return 0
