"""Mounts of retained states: a pin of the mount's own keeps the state while the mount lives.

Deleting the checkpoint it was mounted by takes nothing from under it. The mount asks again now and then; a
pin nobody asked for again goes with the sweep.
"""

from __future__ import annotations

from typing import Final

from fsd.meta.database import Tx
from fsd.model.errors import ForkCopying
from fsd.model.limits import MOUNT_PIN
from fsd.model.plain import dataclass
from fsd.model.times import NS
from fsd.service import pins
from fsd.service.access import FsRef, hold
from fsd.service.retained import At, state_of
from fsd.service.sessions import unknown

KIND: Final = "mount"
FIND_SQL: Final = "SELECT id FROM pin WHERE fs=? AND seq=? AND kind=? AND ref=?"


@dataclass(frozen=True, slots=True)
class Kept:
    """The state a mount shows, and until when (ns) it stays if the mount does not ask again."""

    seq: int
    expires: int


def keep(tx: Tx, fs: FsRef, session: int, at: At, now: int) -> Kept:
    """Pin the state `at` for a mount session, or extend its pin. Raises `NotFound` when the state is not
    retained (any more), `SessionUnknown`, `ForkCopying` while the state is still the origin's: outside of
    the transaction the caller waits (`Forks.when_copied`)."""
    hold(tx, fs)
    if tx.one("SELECT 1 FROM session WHERE id=? AND fs=?", (session, fs.id)) is None:
        raise unknown(session)
    state = state_of(tx, fs, at)
    if state.fs != fs.id:
        raise ForkCopying(f"the fork {fs.name} is still being copied: its states are not its own yet")
    ref, expires = str(session), now + int(MOUNT_PIN * NS)
    known = tx.one(FIND_SQL, (fs.id, state.seq, KIND, ref))
    if known is None:
        pins.pin_at(tx, fs, state.seq, KIND, ref, expires)
    else:
        tx.execute("UPDATE pin SET expires=? WHERE id=?", (expires, known[0]))
    return Kept(state.seq, expires)
