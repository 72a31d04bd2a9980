"""Who asks, and for which filesystem: what every call of the service gets passed.

Both are made by `tokens.Tokens` (data plane) or by the server's admin check (control plane) and are trusted
from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fsd.meta.database import Tx
from fsd.model.errors import NotFound

ADMIN: Final = "admin"


@dataclass(frozen=True, slots=True)
class FsRef:
    """A filesystem that exists and may be used: `id` is the key of its rows, `name` its public `fs_…` id."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request was authenticated by. `label` is what a person called the token, for evidence."""

    token_id: str
    label: str
    kind: Literal["owner", "admin"]


ADMIN_GRANT: Final = Grant(ADMIN, ADMIN, "admin")


def no_file_system(name: str) -> NotFound:
    """The one answer for a filesystem that does not exist, goes, or must not be known to exist."""
    return NotFound(f"no filesystem {name[:64]}", hint="check its id, and that the token belongs to it")


def hold(tx: Tx, fs: FsRef) -> tuple[int, int]:
    """Lock the filesystem's row: its seq and newest pinned seq. What writes rows of a filesystem begins with
    it, so that none is left behind by a request that a deletion overtook. Raises `NotFound` when it is not
    there (any more)."""
    tx.lock_fs(fs.id)
    row = tx.one("SELECT seq, pinned FROM fs WHERE id=? AND status='active'", (fs.id,))
    if row is None:
        raise no_file_system(fs.name)
    return int(row[0]), int(row[1])
