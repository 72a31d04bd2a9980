"""Which state of a filesystem a request reads: the live one, or one that a pin keeps.

A state can be read if and only if it is the head or a pin names its seq (namespace.md section 1). What a
request names (`At`) is found in the transaction that reads, so what it reads cannot go away under it.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from fsd.meta.database import Tx
from fsd.model.errors import NotFound
from fsd.service.access import FsRef, no_file_system


class At(NamedTuple):
    """A retained state by one of its names: a checkpoint's id, a seq, or (journal id, entry number)."""

    checkpoint: str | None = None
    seq: int | None = None
    entry: tuple[str, int] | None = None


class State(NamedTuple):
    """Whose rows are read (`fs`), and at which seq (`at`, None: the live ones). `seq` is what is told."""

    fs: int
    at: int | None
    seq: int


def state_of(tx: Tx, fs: FsRef, at: At | None = None) -> State:
    """The state that `at` names, None the live one. Raises `NotFound`, with the reason."""
    row = tx.one("SELECT seq, copied FROM fs WHERE id=? AND status='active'", (fs.id,))
    if row is None:
        raise no_file_system(fs.name)
    head = int(row[0])
    rows_of = fs.id if row[1] else source(tx, fs.id)
    if at is None:
        return State(rows_of, None if row[1] else head, head)
    seq = _seq(tx, fs, at, head)
    return State(rows_of, seq, seq)


def source(tx: Tx, fs: int) -> int:
    """Whose rows show the tree of a filesystem: its own, unless it is a fork that is not copied yet. Those of
    its origin then, at the seq that is both its origin's and its own; and so on along forks of forks, whose
    seq is the same all the way, since nobody can have written to what is not copied."""
    while True:
        row = tx.one("SELECT copied, origin_fs FROM fs WHERE id=?", (fs,))
        if row is None or row[0]:
            return fs  # None: deleted meanwhile, nothing is found of it
        fs = int(row[1])


def still(tx: Tx, fs: FsRef, state: State) -> State:
    """`state` of `fs`, found in an earlier transaction and kept by a pin of `fs`, as it is read now: a fork
    that was copied since has the rows itself, and its origin may have let them go."""
    return state if state.fs == fs.id else state._replace(fs=source(tx, fs.id))


def is_pinned(tx: Tx, fs: int, seq: int) -> bool:
    return tx.one("SELECT 1 FROM pin WHERE fs=? AND seq=? LIMIT 1", (fs, seq)) is not None


def _seq(tx: Tx, fs: FsRef, at: At, head: int) -> int:
    if at.checkpoint is not None:
        return checkpoint_seq(tx, fs, at.checkpoint)
    if at.entry is not None:
        journal, number = at.entry
        row = tx.one(
            "SELECT fs_seq FROM journal_entry WHERE fs=? AND journal=? AND seq=?", (fs.id, journal, number)
        )
        if row is None:
            raise NotFound(f"the journal {journal} has no entry {number}")
        seq, what = int(row[0]), f"the files as of entry {number} of the journal {journal}"
    else:
        assert at.seq is not None, "At names a state"
        seq, what = at.seq, f"the state {at.seq}"
    if seq != head and not is_pinned(tx, fs.id, seq):
        raise NotFound(
            f"{what} are not kept any more" if at.entry else f"{what} is not kept",
            hint="only checkpoints and what --history still covers can be read; see fsd checkpoint list",
        )
    return seq


def checkpoint_seq(tx: Tx, fs: FsRef, checkpoint: str) -> int:
    """The seq a native checkpoint keeps. Raises `NotFound`, also for one made by manifest."""
    key = hashlib.sha256(checkpoint.encode("utf-8", "surrogatepass")).digest()
    row = tx.one("SELECT fs_seq FROM checkpoint WHERE fs=? AND key=?", (fs.id, key))
    if row is None:
        raise NotFound(f"no checkpoint {checkpoint}", hint="see fsd checkpoint list")
    if row[0] is None:
        raise NotFound(
            f"the checkpoint {checkpoint} is a manifest: it names contents, no state of this filesystem",
            hint="fsd checkpoint show --files, diff, cat, export and restore --to DIR know it",
        )
    return int(row[0])
