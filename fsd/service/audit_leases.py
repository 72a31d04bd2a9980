"""The audit's part about leases: the count that spares commits a question, fences, and no two writers."""

from __future__ import annotations

from collections.abc import Callable

from fsd.meta.database import Tx
from fsd.service.access import FsRef
from fsd.service.writers import WRITER, load, upwards

Say = Callable[[str, str, str], None]


def audit_leases(tx: Tx, fs: FsRef, say: Say) -> None:
    """Tell `say` (rule, where, what) what is broken."""
    row = tx.one("SELECT writers, fence FROM fs WHERE id=?", (fs.id,))
    assert row is not None, "the audit found it"
    writers = [one for one in load(tx, fs.id) if one.kind == WRITER and not one.ended]
    if row[0] != len(writers):
        say("counted", "fs", f"writers is {row[0]}, there are {len(writers)} writer leases")
    for one in load(tx, fs.id):
        if not 0 < one.fence <= row[1]:
            say("one way", f"lease {one.fence}", f"its fence is above the filesystem's, {row[1]}")
    # A rename may bring one that expired together with another's: only those count that bound at the newest
    # change, the latest time that is known here.
    row = tx.one("SELECT at FROM change WHERE fs=? ORDER BY seq DESC LIMIT 1", (fs.id,))
    bound = [one for one in writers if row is None or one.binds(int(row[0]))]
    above = {one.fence: set(upwards(tx, fs.id, one.ino)) for one in bound}
    for one in bound:
        for other in bound:
            if other.fence > one.fence and one.ino in above[other.fence]:
                say("one way", f"lease {other.fence}", f"it lies in the subtree of lease {one.fence}")
