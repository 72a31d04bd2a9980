"""Who asks, and for which filesystem: what every call of the service gets passed.

Both are made by `tokens.Tokens` (data plane) or by the server's admin check (control plane) and are trusted
from there on.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from fsd.meta.database import Tx
from fsd.model.errors import ForkCopying, NotAuthenticated, NotFound
from fsd.model.plain import dataclass

ADMIN: Final = "admin"
ACTIVE: Final = "active"
DISABLED: Final = "disabled"


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


class Held(NamedTuple):
    """A filesystem as it is under its lock. `pinned`: its newest pinned seq; `copied`: its rows are its own;
    `inodes` of the live tree."""

    seq: int
    pinned: int
    copied: bool
    inodes: int


def no_file_system(name: str) -> NotFound:
    """The one answer for a filesystem that does not exist, goes, or must not be known to exist."""
    return NotFound(f"no filesystem {name[:64]}", hint="check its id, and that the token belongs to it")


def hold(tx: Tx, fs: FsRef, who: Grant | None = None) -> tuple[int, int]:
    """Lock the filesystem's row: its seq and newest pinned seq. What writes rows of a filesystem begins with
    it, so that none is left behind by a request that a deletion overtook, and with `who` asks for it, so that
    nothing becomes durable after the revocation of that token was answered: both hold this lock.

    Raises `NotFound` when the filesystem is not there (any more), `NotAuthenticated` when the token is not.
    """
    return held(tx, fs, who)[:2]


def hold_tree(tx: Tx, fs: FsRef, who: Grant | None = None) -> tuple[int, int]:
    """As `hold`, for what changes the tree. Raises `ForkCopying` while the filesystem is a fork whose rows
    are still its origin's: outside of the transaction the caller waits (`Forks.when_copied`), or lets its own
    caller come again."""
    found = held(tx, fs, who)
    check_copied(fs, found)
    return found[:2]


def check_copied(fs: FsRef, found: Held) -> None:
    """See `hold_tree`."""
    if not found.copied:
        raise _copying(fs)


def check_own(tx: Tx, fs: FsRef) -> None:
    """Before live rows are read to plan a change that is not made (a dry run): as `hold_tree`, without a
    lock."""
    row = tx.one("SELECT copied FROM fs WHERE id=? AND status='active'", (fs.id,))
    if row is None:
        raise no_file_system(fs.name)
    if not row[0]:
        raise _copying(fs)


def _copying(fs: FsRef) -> ForkCopying:
    return ForkCopying(f"the fork {fs.name} is still being copied")


def held(tx: Tx, fs: FsRef, who: Grant | None = None) -> Held:
    """As `hold`, with all that is known of it then."""
    found = locked(tx, fs)
    if who is not None:
        check_token(tx, fs, who)
    return found


def locked(tx: Tx, fs: FsRef) -> Held:
    """As `held`, for whoever asks for the token next (`check_token`), or has asked for it."""
    row = tx.locked_fs(fs.id, "seq, pinned, copied, file_count, status")
    if row is None or row[4] != "active":
        raise no_file_system(fs.name)
    return Held(int(row[0]), int(row[1]), bool(row[2]), int(row[3]))


def check_token(tx: Tx, fs: FsRef, who: Grant) -> None:
    if who.kind != ADMIN:
        token = tx.one("SELECT status FROM token WHERE id=? AND fs=?", (who.token_id, fs.id))
        check_status(who.token_id, None if token is None else token[0])


def check_status(token_id: str, status: str | None) -> None:
    """Raises `NotAuthenticated` unless the token exists (None: it does not) and is active."""
    if status is None:
        raise NotAuthenticated(
            "the token is unknown here: wrong, truncated or deleted, or its filesystem was"
        )
    if status != ACTIVE:
        raise NotAuthenticated(
            f"the token {token_id} is disabled",
            hint=f"set FSD_TOKEN to another, or `fsd token enable {token_id}` where the admin key is",
        )
