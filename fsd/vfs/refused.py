"""What the server refused, kept under `refused/` until somebody decides: retry, export or discard.

One directory an operation, `<session>-<operation>`: `entry` (msgpack, written last, durably) and for content
`data`, the whole file as it was to become, as far as it is here: `lacking` bytes of it are nowhere any more
as they were written (zeros, mostly). Content that cannot be made, since something it needs is gone, comes
here without having been sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack

from fsd.host.files import fsync_dir, write_all, write_durable
from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Parts
from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOCK, LIST_PAGE_MAX
from fsd.model.names import split_path
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.build import Fetch, Source, assemble, base_plan, fetcher, first_sources
from fsd.vfs.log import Log
from fsd.vfs.types import BULK, Cache
from fsd.wire.messages import ATTRS, LIST

DIRECTORY = "refused"
ASK_TIMEOUT: Final = 30.0
PATH_DEPTH: Final = 4096  # directories above one another, at most


class Refusal(NamedTuple):
    """A refused operation with what is needed to do it again. `op` is the operation's row in local numbers,
    `path` one path of the inode below the mount's root, `blocks` the whole new block list of a content
    operation, `sources` where its new blobs come from. A recovery knows no directories: there `path` is
    `names` below the directory `under` (its number on the wire), which the server is asked about."""

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
    under: int = 0
    names: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SalvageJob:
    """Write refusals into `refused/`, durably. Doing it twice leaves the same. `mounted` is what the mount's
    root is of the filesystem."""

    state_dir: Path
    host: Host
    log: Log
    refusals: tuple[Refusal, ...]
    mounted: bytes = b"/"
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
                "path": self._path(refusal, remote) if refusal.under else refusal.path,
                "mode": refusal.mode,
                "uid": refusal.uid,
                "gid": refusal.gid,
                "size": refusal.size,
                "lacking": lacking,
            }
            write_durable(self.host, place / "entry", msgpack.packb(entry, use_bin_type=True), "refused")
        fsync_dir(root)

    def _path(self, refusal: Refusal, remote: Remote) -> bytes:
        """Where it is below the mount's root, as the server has the directories above it now."""
        ino, names = refusal.under, list(refusal.names)
        for _ in range(PATH_DEPTH):
            if ino == ROOT_INO:
                break
            _, (attrs,) = remote.ask([(ATTRS, (ino,))], ASK_TIMEOUT)
            parent = attrs[0].parent if attrs[0] is not None and attrs[0].is_dir else 0
            name = _name_in(remote, parent, ino) if parent else None
            if name is None:
                return refusal.path
            ino = parent
            names.insert(0, name)
        top = split_path(self.mounted)
        known = ino == ROOT_INO and names[: len(top)] == top
        return b"/" + b"/".join(names[len(top) :]) if known else refusal.path

    def _data(self, path: Path, refusal: Refusal, remote: Remote, cache: Cache) -> int:
        """Write the file; returns how many bytes of it nobody has any more as they were."""
        lacking = 0
        mine = first_sources(refusal.sources)
        fetch = fetcher(remote, cache, self.log, mine)

        def bytes_of(digest: bytes) -> tuple[bytes, bool]:
            try:
                return fetch([digest])[digest], True
            except IntegrityError:
                source = mine.get(digest)
                return b"" if source is None else _rest_of(source, self.log, fetch), False

        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, refusal.size)
            for index, parts in refusal.blocks:
                at = index * BLOCK
                have: dict[bytes, tuple[bytes, bool]] = {}
                for one in base_plan(parts, 0, min(BLOCK, refusal.size - at)):
                    if len(one) == 4:
                        _, digest, boff, length = one
                        if digest not in have:
                            have[digest] = bytes_of(digest)
                        blob, whole = have[digest]
                        lacking += 0 if whole else length
                        os.lseek(fd, at, os.SEEK_SET)
                        write_all(fd, memoryview(blob)[boff : boff + length])
                    at += one[-1]
            os.fsync(fd)
        finally:
            os.close(fd)
        return lacking


def _name_in(remote: Remote, parent: int, ino: int) -> bytes | None:
    """The name of a directory in the one above it."""
    after, more = b"", True
    while more:
        _, (listed,) = remote.ask([(LIST, parent, after, LIST_PAGE_MAX)], ASK_TIMEOUT)
        entries, more = listed if listed is not None else ([], False)
        for entry in entries:
            if entry.attr.ino == ino:
                return bytes(entry.name)
        more = more and bool(entries)
        after = entries[-1].name if entries else b""
    return None


def _rest_of(source: Source, log: Log, fetch: Fetch) -> bytes:
    """What is left of a blob that cannot be made again, with zeros for the rest. Unverified."""
    out = []
    for piece in source.pieces:
        try:
            out.append(assemble([piece], log, fetch))
        except IntegrityError:
            length = piece[-1]
            out.append(log.rest(piece[1], length) if len(piece) == 3 else bytes(length))
    return b"".join(out)


def count_refused(state_dir: Path) -> int:
    """How many refused operations wait for a decision."""
    try:
        return sum(1 for place in (state_dir / DIRECTORY).iterdir() if (place / "entry").exists())
    except FileNotFoundError:
        return 0
