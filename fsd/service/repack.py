"""Packs that hold more dead bytes than live ones: dropped, rewritten, or gathered out of their rows.

A pack of a filesystem may hold blobs of its forks too, and is looked at as a whole. `look` and `choose` plan;
`drop` and `repack` do it, each in one transaction that looks again: nobody's blob row ever points at a pack
that is not there. A new pack's object is durable before any row names it, and an old one stays for the
grace (table `dropped`), so that a copy of the database up to that age finds what it describes.

Who copies blob rows from one filesystem to another holds the lock of the one they come from until its
transaction ends (`Tx.lock_fs`): a row seen to be gone then means that no copy of it is under way.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import IntegrityError, NoSpace, NotFound
from fsd.model.limits import REPACK_BYTES, REPACK_INLINE, REPACK_WORTH, SWEEP_PACKS, UPLOAD_BLOBS_MAX
from fsd.model.plain import dataclass
from fsd.service.access import FsRef
from fsd.service.packs import Location, Made, Packs, check_in_time
from fsd.wire.frame import Blob, open_blob

log = logging.getLogger(__name__)

PACKS_SQL: Final = (
    "SELECT id, size, CASE WHEN data IS NULL THEN 0 ELSE 1 END, created FROM pack"
    " WHERE fs=? AND id>? AND id<=? ORDER BY id LIMIT ?"
)
# Bytes that several filesystems share count once. Idle blobs are about to go.
LIVE_SQL: Final = (
    "SELECT k.pack, count(*), CAST(sum(k.n) AS BIGINT) FROM (SELECT DISTINCT pack, off, stored_len AS n"
    " FROM blob WHERE pack IN {} AND NOT (refs=0 AND fresh<?)) AS k GROUP BY k.pack"
)
BLOBS_SQL: Final = (
    "SELECT b.fs, b.hash, b.pack, b.off, b.raw_len, b.stored_len, b.codec,"
    " substr(p.data, CAST(b.off+1 AS INTEGER), CAST(b.stored_len AS INTEGER))"
    " FROM pack p CROSS JOIN blob b WHERE p.id IN {} AND b.pack=p.id"
)
DROP_SQL: Final = (
    "DELETE FROM pack WHERE id=? AND NOT EXISTS (SELECT 1 FROM blob b WHERE b.pack=pack.id)"
    " RETURNING fs, size, CASE WHEN data IS NULL THEN 0 ELSE 1 END"
)


class Look(NamedTuple):
    """A pack and what of it is alive."""

    id: int
    size: int
    inline: bool
    created: int
    blobs: int
    live: int  # bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with the packs up to number `last`: `dead` hold nothing, the live blobs of `batch` fit into
    one new pack."""

    dead: list[Look]
    batch: list[Look]
    last: int


def look(tx: Tx, fs: int, after: int, top: int, idle: int) -> list[Look]:
    """The next packs of a filesystem. Blobs without references and not used since `idle` (ns) are dead."""
    rows = tx.all(PACKS_SQL, (fs, after, top, SWEEP_PACKS))
    live: dict[int, tuple[int, int]] = {}
    for some in chunks([row[0] for row in rows]):
        marks, params = in_list(some)
        live.update((row[0], (row[1], row[2])) for row in tx.all(LIVE_SQL.format(marks), [*params, idle]))
    return [Look(row[0], row[1], bool(row[2]), row[3], *live.get(row[0], (0, 0))) for row in rows]


def choose(looks: Sequence[Look], idle: int) -> Choice:
    """Plan: sparse objects are rewritten; inline packs that have outlived the grace are gathered when there
    are many or they hold, or waste, much."""
    dead: list[Look] = []
    batch: list[Look] = []
    last = size = count = 0
    for one in looks:
        if not one.blobs:
            dead.append(one)
        elif one.created < idle if one.inline else one.live * 2 < one.size:
            if batch and (size + one.live > REPACK_BYTES or count + one.blobs > UPLOAD_BLOBS_MAX):
                break
            batch.append(one)
            size, count = size + one.live, count + one.blobs
        last = one.id
    inline = [one for one in batch if one.inline]
    worth = (
        len(inline) >= REPACK_INLINE
        or sum(one.live for one in inline) >= REPACK_WORTH
        or sum(one.size - one.live for one in inline) >= REPACK_WORTH
    )
    return Choice(dead, batch if worth else [one for one in batch if not one.inline], last)


def drop(db: Database, dead: Sequence[Look], since: int) -> list[int]:
    """Remove the rows of packs without blobs; their objects wait in `dropped`. Which ones went."""
    if not dead:
        return []
    return db.write(lambda tx: [one.id for one in dead if _drop(tx, one.id, since)], frees=True)


def _drop(tx: Tx, pack: int, since: int) -> bool:
    row = tx.one(DROP_SQL, (pack,))
    if row is None:
        return False
    if not row[2]:
        tx.execute(
            "INSERT INTO dropped (fs, pack, size, since) VALUES (?,?,?,?)", (row[0], pack, row[1], since)
        )
    return True


class Repacked(NamedTuple):
    """`went`: packs that are no more; `bytes` written into the new one; `damaged`: packs that were left."""

    went: list[int]
    bytes: int
    damaged: int


def repack(db: Database, packs: Packs, host: Host, owner: FsRef, batch: Sequence[Look]) -> Repacked:
    """Write the blobs of `batch`, packs of `owner`, into one new pack and move their rows there, those of
    every filesystem. Each blob is verified on the way; a pack with a damaged one is left as it is. Raises
    `NotFound` when the owner was deleted meanwhile; nothing happened then."""
    locations, whose = _rows(db, owner, [one.id for one in batch])
    blobs: dict[bytes, Blob] = {}
    taken: list[int] = []
    for pack, group in locations.items():
        found = _read(packs, group)
        if found is not None:
            blobs |= found
            taken.append(pack)
    damaged = _still_there(db, sorted(locations.keys() - set(taken)))
    if not blobs:
        return Repacked([], 0, damaged)
    made = packs.write(owner.name, list(blobs.values()))
    host.crash_point("sweep.written")
    filesystems = {fs for pack in taken for fs in whose[pack]} | {owner.id}
    try:
        went = db.write(lambda tx: _move(tx, owner, taken, made, filesystems, host.wall_ns()))
    except (NotFound, NoSpace):
        if made.data is None:
            packs.discard(owner.name, made.number)
        raise
    host.crash_point("sweep.moved")
    return Repacked(went, made.size, damaged)


def _rows(
    db: Database, owner: FsRef, numbers: Sequence[int]
) -> tuple[dict[int, list[Location]], dict[int, set[int]]]:
    """Where the blobs of the packs are, each once, and which filesystems' they are."""
    marks, params = in_list(numbers)
    locations: dict[int, list[Location]] = defaultdict(list)
    whose: dict[int, set[int]] = defaultdict(set)
    seen: set[bytes] = set()
    for fs, digest, pack, off, raw, stored, codec, data in db.read(
        lambda tx: tx.all(BLOBS_SQL.format(marks), params)
    ):
        whose[pack].add(fs)
        group = locations[pack]
        if digest not in seen:
            seen.add(digest)
            group.append(Location(digest, pack, owner.name, off, raw, stored, codec, data))
    return locations, whose


def _read(packs: Packs, group: list[Location]) -> dict[bytes, Blob] | None:
    """The verified blobs of one pack; None when one of them is damaged, or its object gone."""
    try:
        found, moved = packs.fetch(group)
        for blob in found.values():
            open_blob(blob)
    except IntegrityError:
        return None
    return None if moved else found


def _still_there(db: Database, unread: list[int]) -> int:
    """How many packs that could not be read are damaged: one that is gone was another sweep's."""
    if not unread:
        return 0
    marks, params = in_list(unread)
    rows = db.read(lambda tx: tx.all(f"SELECT id FROM pack WHERE id IN {marks}", params))
    if rows:
        log.warning("sweep: packs %s are left as they are, damaged: run fsd audit", [row[0] for row in rows])
    return len(rows)


def _move(tx: Tx, owner: FsRef, old: list[int], made: Made, filesystems: set[int], now: int) -> list[int]:
    """One transaction: the new pack, every blob row of the old ones, the old ones. A blob that was swept
    meanwhile stays away; a row that came meanwhile stays where it is, and its pack with it."""
    for fs in sorted(filesystems):
        tx.lock_fs(fs)
    if tx.one("SELECT 1 FROM fs WHERE id=? AND status IN ('active','kept')", (owner.id,)) is None:
        raise NotFound(f"no filesystem {owner.name}")
    check_in_time(made, now)
    tx.execute(
        "INSERT INTO pack (id, fs, size, data, created) VALUES (?,?,?,?,?)",
        (made.number, owner.id, made.size, made.data, now),
    )
    place = {digest: (off, stored, codec) for digest, off, _raw, stored, codec in made.rows}
    marks, params = in_list(old)
    rows = tx.all(f"SELECT fs, hash, pack FROM blob WHERE pack IN {marks}", params)
    tx.many(
        "UPDATE blob SET pack=?, off=?, stored_len=?, codec=? WHERE fs=? AND hash=? AND pack=?",
        [
            (made.number, *place[digest], fs, digest, pack)
            for fs, digest, pack in sorted(rows)
            if digest in place and fs in filesystems
        ],
    )
    return [pack for pack in old if _drop(tx, pack, now)]
