"""Writer leases as a commit meets them: whose subtree is whose, and what that forbids. No state of its own.

A lease belongs to a mount session and binds everybody else under its top. It is looked at in the transaction
of the commit, under the filesystem's lock, which every change of a lease holds as well (invariant 4). A
filesystem without leases costs a commit nothing: `fs.writers`, read with the session, is 0.

An expired lease binds nobody. Until somebody takes it its session goes on as if nothing had happened; then
the commits that carry its fence are refused (`LeaseLost`): what was written under it is its mount's to decide
about. A commit without a fence claims nothing and follows the rules for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsd.meta.database import Tx
from fsd.meta.sql import MAX, chunks, in_list
from fsd.model.errors import LeaseHeld, LeaseLost
from fsd.model.names import show
from fsd.model.ops import (
    Content,
    Create,
    Link,
    Op,
    Rename,
    Rmdir,
    Setattr,
    Setxattr,
    Unlink,
)
from fsd.model.times import rfc3339
from fsd.service.rules import Rules
from fsd.service.view import View
from fsd.wire.messages import LeaseSeen

WRITER: Final = "writer"
LOCK: Final = "lock"
COLUMNS: Final = "fence, kind, ino, path, session, host, place, since, expires, ended"
PARENTS: Final = f"SELECT ino, parent FROM dentry WHERE fs=? AND ino IN {{}} AND died={MAX}"
PARENT: Final = f"SELECT parent FROM inode WHERE fs=? AND ino=? AND died={MAX}"
LEASES: Final = f"SELECT {COLUMNS} FROM lease WHERE fs=? ORDER BY fence"


class Lease(NamedTuple):
    """A row of `lease`."""

    fence: int
    kind: str
    ino: int
    path: bytes
    session: int
    host: str
    place: str
    since: int
    expires: int
    ended: str

    def binds(self, now: int) -> bool:
        return not self.ended and self.expires > now

    def holder(self) -> dict[str, Any]:
        """Who has it, for people and programs."""
        return {
            "fence": self.fence,
            "path": show(self.path),
            "host": self.host,
            "mount" if self.kind == WRITER else "command": self.place,
            "since": rfc3339(self.since),
        }

    def __str__(self) -> str:
        what = "is the writer of" if self.kind == WRITER else "holds the lock"
        return f"{self.host}:{self.place} {what} {show(self.path)} since {rfc3339(self.since)}"


def load(tx: Tx, fs: int) -> list[Lease]:
    """All of a filesystem, locks and ended ones too."""
    return [Lease._make(row) for row in tx.all(LEASES, (fs,))]


def upwards(tx: Tx, fs: int, ino: int) -> list[int]:
    """A directory and those above it; of one that is gone only itself."""
    way: list[int] = []
    while ino and ino not in way:
        way.append(ino)
        row = tx.one(PARENT, (fs, ino))
        ino = 0 if row is None else int(row[0])
    return way


def seen(tx: Tx, fs: int, now: int, root: int) -> tuple[LeaseSeen, ...]:
    """The writer leases that bind, for a mount of the directory `root`."""
    held = [one for one in load(tx, fs) if one.kind == WRITER and one.binds(now)]
    above = set(upwards(tx, fs, root)) if held else set()
    return tuple(LeaseSeen(one.fence, one.ino, one.session, str(one), one.ino in above) for one in held)


def writers_of(tx: Tx, fs: int) -> int:
    """How many writer leases there are, perhaps expired ones; for who holds the filesystem's lock."""
    row = tx.one("SELECT writers FROM fs WHERE id=?", (fs,))
    return 0 if row is None else int(row[0])


def held_by_other(lease: Lease) -> LeaseHeld:
    return LeaseHeld(str(lease), details={"holder": lease.holder()})


class Guard:
    """What the leases `held`, all of others, forbid in one commit. One thread, one commit."""

    def __init__(self, tx: Tx, fs: int, view: View, held: Sequence[Lease]) -> None:
        self._tx, self._fs, self._view = tx, fs, view
        self._tops = {lease.ino: lease for lease in held}
        self._known: dict[int, Lease | None] = {}
        self._parents: dict[int, set[int]] = {}

    def prefetch(self, rules: Rules, ops: Sequence[Op]) -> None:
        """Load in which directories the files of `ops` have names, in a few queries."""
        self._load({rules.real(op.ino) for op in ops if isinstance(op, Content | Setattr | Setxattr | Link)})

    def _load(self, inos: set[int]) -> None:
        for some in chunks(sorted(inos - self._parents.keys())):
            marks, values = in_list(some)
            self._parents.update((ino, set()) for ino in some)
            for ino, parent in self._tx.all(PARENTS.format(marks), (self._fs, *values)):
                self._parents[ino].add(parent)

    def directories_of(self, ino: int) -> set[int]:
        """Where a file has names, those it lost in this commit among them: it lost none under a lease."""
        return self._parents.get(ino, set()) | self._view.placed_in(ino)

    def over(self, ino: int) -> Lease | None:
        """The lease on the directory `ino` or on one above it."""
        way: list[int] = []
        found: Lease | None = None
        while ino not in self._known:
            way.append(ino)
            found = self._tops.get(ino)
            node = self._view.node(ino)
            if found is not None or node is None or node.parent in (0, ino):
                break
            ino = node.parent
        else:
            found = self._known[ino]
        self._known.update(dict.fromkeys(way, found))
        return found

    def check_places(self, directories: Iterable[int], files: set[int]) -> None:
        """Of changes that are no operations (a merge's): in these directories, to files wherever they have
        names. Raises `LeaseHeld`."""
        self._load(files)
        around = [self._parents[ino] for ino in files]
        for directory in {*directories}.union(*around):
            found = self.over(directory)
            if found is not None:
                raise held_by_other(found)

    def forbids(self, rules: Rules, op: Op) -> Lease | None:
        """The lease that `op` would break."""
        for directory in self._directories(rules, op):
            found = self.over(directory)
            if found is not None:
                return found
        if isinstance(op, Rename):
            self._known.clear()  # it may move a directory
        return None

    def check(self, rules: Rules, op: Op) -> None:
        """Raises `LeaseHeld`."""
        found = self.forbids(rules, op)
        if found is not None:
            raise held_by_other(found)

    def _directories(self, rules: Rules, op: Op) -> Iterator[int]:
        """The directories in which `op` changes something, as things are now: below them names or inodes."""
        ino = rules.real(op.ino)
        node = rules.view.node(ino)
        if node is not None and node.is_dir:
            yield ino
        elif isinstance(op, Content | Setattr | Setxattr | Link) and node is not None:
            yield from self.directories_of(ino)
        elif isinstance(op, Content):  # it would come back where it was, or into the lost-and-found
            gone = rules.view.gone(ino)
            yield _or_lost(rules, 0 if gone is None else gone.parent)
        if isinstance(op, Create | Link | Unlink | Rmdir | Rename):
            yield from _named(rules, rules.real(op.parent), op.name, ino)
        if isinstance(op, Rename):
            over = rules.real(op.over)
            yield from _named(rules, rules.real(op.new_parent), op.new_name, over)
            if over and rules.directory(over) is not None:
                yield over


def _or_lost(rules: Rules, directory: int) -> int:
    """`directory`, if there is one of that number; else where what was meant for it goes."""
    return directory if rules.directory(directory) is not None else rules.lost_place()


def _named(rules: Rules, parent: int, name: bytes, ino: int) -> Iterator[int]:
    """The directory of a name (where it is gone the lost-and-found's), and the one a conflict moved it to."""
    yield _or_lost(rules, parent)
    slot = rules.locate(parent, name, ino) if ino else None
    if slot is not None:
        yield slot.parent


def guard_of(tx: Tx, fs: int, view: View, writers: int, session: int, fence: int, now: int) -> Guard | None:
    """What binds a commit of `session` (0: a direct command) made under `fence` (0: under none); `writers` is
    the filesystem's count of them. Raises `LeaseLost` when the fence is the session's no more."""
    if not writers and not fence:
        return None
    leases = [lease for lease in load(tx, fs) if lease.kind == WRITER]
    if fence:
        check_own(leases, session, fence)
    others = [one for one in leases if one.session != session and one.binds(now)]
    return Guard(tx, fs, view, others) if others else None


def check_own(leases: Sequence[Lease], session: int, fence: int) -> Lease:
    """The session's lease of this fence, or of a later one that replaced it while nobody else had it. Raises
    `LeaseLost`."""
    mine = [one for one in leases if one.session == session and one.fence >= fence]
    for one in mine:
        if not one.ended:
            return one
    if mine:
        raise LeaseLost(f"the writer lease of {show(mine[0].path)} was lost: {mine[0].ended}")
    raise LeaseLost("the writer lease is not this mount's any more")
