"""Pins: what keeps a state of a filesystem readable (namespace.md sections 1 and 2).

A state is retained if and only if a pin names its seq (or it is the head). Pinning is one row; unpinning
removes exactly the row versions only that pin could see, and their references. Both lock the filesystem like
a commit: otherwise a commit that read the old `pinned` would change in place what was just pinned.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from fsd.meta.database import Tx
from fsd.model import blocks
from fsd.model.errors import NotFound
from fsd.service.access import FsRef, hold
from fsd.service.packs import Packs
from fsd.service.retained import is_pinned

# W of namespace.md section 2, query 4; the unary + keeps the planners on the index of dead rows.
ONLY_SEEN: Final = "fs=? AND died>? AND died<=? AND died<140737488355327 AND +born>? AND +born<=?"
_LAST: Final = 140_737_488_355_326


def pin(tx: Tx, fs: FsRef, kind: str, ref: str, expires: int | None = None) -> tuple[int, int]:
    """Pin the head: the pin's number and the seq. Raises `NotFound`."""
    seq, pinned = hold(tx, fs)
    return add_pin(tx, fs, seq, kind, ref, expires, pinned=pinned), seq


def add_pin(
    tx: Tx, fs: FsRef, seq: int, kind: str, ref: str, expires: int | None = None, *, pinned: int = -1
) -> int:
    """Pin `seq`, which the caller, under the filesystem's lock, found to be the head or pinned already.
    `pinned`: the newest pinned seq, as far as the caller knows."""
    row = tx.one(
        "INSERT INTO pin (fs, seq, kind, ref, expires) VALUES (?,?,?,?,?) RETURNING id",
        (fs.id, seq, kind, ref, expires),
    )
    assert row is not None, "INSERT … RETURNING gives a row"
    if pinned < seq:
        tx.execute("UPDATE fs SET pinned=? WHERE id=? AND pinned<?", (seq, fs.id, seq))
    return int(row[0])


def pin_at(tx: Tx, fs: FsRef, seq: int, kind: str, ref: str, expires: int | None) -> int:
    """Pin a state that is retained already; the pin's number. Raises `NotFound` when it is not."""
    head, pinned = hold(tx, fs)
    if seq != head and not is_pinned(tx, fs.id, seq):
        raise NotFound(f"the state {seq} of {fs.name} is not kept")
    return add_pin(tx, fs, seq, kind, ref, expires, pinned=pinned)


def pin_softly(tx: Tx, fs: FsRef, ref: str, expires: int) -> None:
    """Keep the head for a journal entry until `expires` (ns): one pin a state, its time only grows. The
    caller holds the filesystem's lock."""
    known = tx.one(
        "SELECT p.id, p.expires FROM fs f CROSS JOIN pin p WHERE f.id=? "
        "AND p.fs=f.id AND p.kind='journal' AND p.seq=f.seq LIMIT 1",
        (fs.id,),
    )
    if known is None:
        pin(tx, fs, "journal", ref, expires)
    elif known[1] < expires:
        tx.execute("UPDATE pin SET expires=? WHERE id=?", (expires, known[0]))


def unpin(tx: Tx, packs: Packs, fs: FsRef, number: int) -> None:
    """Remove a pin and what only it could see. Raises `NotFound`."""
    hold(tx, fs)
    row = tx.one("SELECT seq FROM pin WHERE id=? AND fs=?", (number, fs.id))
    if row is None:
        raise NotFound(f"no pin {number} in {fs.name}")
    seq = int(row[0])
    tx.execute("DELETE FROM pin WHERE id=?", (number,))
    if tx.one("SELECT 1 FROM pin WHERE fs=? AND seq=? LIMIT 1", (fs.id, seq)) is None:
        _remove_versions(tx, packs, fs.id, seq)
    tx.execute(
        "UPDATE fs SET pinned=coalesce((SELECT max(seq) FROM pin WHERE pin.fs=fs.id),-1) WHERE id=?", (fs.id,)
    )


def _remove_versions(tx: Tx, packs: Packs, fs: int, seq: int) -> None:
    before = tx.one("SELECT max(seq) FROM pin WHERE fs=? AND seq<?", (fs, seq))
    after = tx.one("SELECT min(seq) FROM pin WHERE fs=? AND seq>?", (fs, seq))
    older = -1 if before is None or before[0] is None else int(before[0])
    newer = _LAST if after is None or after[0] is None else int(after[0])
    bounds = (fs, seq, newer, older, seq)
    refs: dict[bytes, int] = defaultdict(int)
    for table in ("inode", "block"):
        for (raw,) in tx.all(f"SELECT parts FROM {table} WHERE {ONLY_SEEN} AND parts IS NOT NULL", bounds):
            for digest in blocks.hashes(blocks.decode(raw)):
                refs[digest] -= 1
    for table in ("inode", "dentry", "block"):
        tx.execute(f"DELETE FROM {table} WHERE {ONLY_SEEN}", bounds)
    packs.adjust(tx, fs, refs)
