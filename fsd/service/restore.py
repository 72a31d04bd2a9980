"""Going back to a retained state: the whole tree by its rows, one path by operations, each one commit.

What is replaced is kept first, as a checkpoint with the reason `restore-undo`, in the same transaction: a
restore loses nothing and can itself be undone. Readers see one commit; mounts learn it from the change feed.

The whole tree (namespace.md section 2): live rows born behind the state die, rows that were seen there and
died since are born again. It costs what changed since and what was kept meanwhile. Content that comes back
counts as changed now, so that writes based on what was replaced meet a conflict instead of mixing with it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Tx
from fsd.model import blocks
from fsd.model.errors import Busy, Conflict, NotFound
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.service.access import FsRef, Grant, hold_tree
from fsd.service.commit import Commits
from fsd.service.feed import Feed
from fsd.service.native import UNDO, Ask, Checkpoints
from fsd.service.packs import Packs
from fsd.service.paths import Builder
from fsd.service.restorepath import PathRestore
from fsd.service.retained import At, state_of
from fsd.service.rows import DbSource
from fsd.service.sessions import LOST_AFTER
from fsd.service.tree import resolve
from fsd.service.writers import WRITER, held_by_other, load

_LIVE: Final = "140737488355327"
_VALUES: Final = (
    "fs, ino, mode, nlink, uid, gid, size, atime, mtime, ctime, rdev, target, parent, parts, xattrs"
)
# seq, fs, seq of the state.
ENDS_SQL: Final = "UPDATE {} SET died=? WHERE fs=? AND born>? AND +died=" + _LIVE
_SEEN: Final = " WHERE fs=? AND died>? AND died<? AND died<" + _LIVE + " AND +born<=?"
# The new seq as often as it stands there, then fs, the state, the new seq, the state.
BRINGS_SQL: Final = {
    "inode": (
        f"INSERT INTO inode ({_VALUES}, cseq, writer, grown, born, died) SELECT {_VALUES}, "
        f"CAST(? AS BIGINT), 0, CAST(? AS BIGINT), CAST(? AS BIGINT), {_LIVE} FROM inode{_SEEN}"
    ),
    "dentry": (
        "INSERT INTO dentry (fs, parent, name, ino, writer, born, died) "
        f"SELECT fs, parent, name, ino, 0, CAST(? AS BIGINT), {_LIVE} FROM dentry{_SEEN}"
    ),
    "block": (
        "INSERT INTO block (fs, ino, idx, parts, born, died) "
        f"SELECT fs, ino, idx, parts, CAST(? AS BIGINT), {_LIVE} FROM block{_SEEN}"
    ),
}
# Of each table: a live row from behind the state that the state does not have as it is, or one of the state's
# whose key has nothing now. `what` are columns that are compared; some may be NULL on both sides.
_COMPARED: Final = {
    "inode": ("ino", "mode nlink uid gid size atime mtime ctime rdev parent", "target parts xattrs"),
    "dentry": ("parent name", "+ino", ""),  # not by the index of its inodes
    "block": ("ino idx", "parts", ""),
}


def _equal(columns: str) -> str:
    plus = {one.lstrip("+"): "+" * one.startswith("+") for one in columns.split()}
    return "".join(f" AND {sign}o.{one}=l.{one}" for one, sign in plus.items())


def _equal_or_null(columns: str) -> str:
    return "".join(
        f" AND (o.{one}=l.{one} OR o.{one} IS NULL AND l.{one} IS NULL)" for one in columns.split()
    )


# fs, the state, the state, the state.
CAME_SQL: Final = {
    table: (
        f"SELECT 1 FROM {table} l WHERE l.fs=? AND l.born>? AND +l.died={_LIVE} AND NOT EXISTS "
        f"(SELECT 1 FROM {table} o WHERE o.fs=l.fs{_equal(key)} AND o.died>? AND o.died<{_LIVE} "
        f"AND +o.born<=?{_equal(values)}{_equal_or_null(perhaps)}) LIMIT 1"
    )
    for table, (key, values, perhaps) in _COMPARED.items()
}
# fs, the state, the head, the state.
WENT_SQL: Final = {
    table: (
        f"SELECT 1 FROM {table} o WHERE o.fs=? AND o.died>? AND o.died<=? AND o.died<{_LIVE} AND +o.born<=? "
        f"AND NOT EXISTS (SELECT 1 FROM {table} l WHERE l.fs=o.fs{_equal(key)} AND l.died={_LIVE}) LIMIT 1"
    )
    for table, (key, _, _) in _COMPARED.items()
}
BORN_SQL: Final = "SELECT {} FROM {} WHERE fs=? AND born=?"
DIED_SQL: Final = "SELECT {} FROM {} WHERE fs=? AND died=? AND died<" + _LIVE
# Files that are removed by the restore: where they were, for content that still comes for them.
GONE_SQL: Final = (
    "INSERT INTO gone (fs, ino, seq, parent, name, mode, uid, gid, xattrs) "
    "SELECT i.fs, i.ino, i.died, d.parent, d.name, i.mode, i.uid, i.gid, i.xattrs FROM inode i "
    f"CROSS JOIN dentry d WHERE i.fs=? AND i.died=? AND i.died<{_LIVE} AND i.parent=0 "
    f"AND NOT EXISTS (SELECT 1 FROM inode x WHERE x.fs=i.fs AND x.ino=i.ino AND x.died={_LIVE}) "
    "AND d.fs=i.fs AND d.ino=i.ino AND +d.died=i.died ON CONFLICT DO NOTHING"
)
BACK_SQL: Final = (
    "DELETE FROM gone WHERE fs=? AND ino IN (SELECT i.ino FROM inode i WHERE i.fs=? AND i.born=?)"
)
WRITERS_SQL: Final = (
    "SELECT id, host, path, last_commit FROM session "
    "WHERE fs=? AND ended='' AND read_only=0 AND last_seen>=? ORDER BY id"
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A restore as asked. `path` empty: the whole tree. `force`: although others have it mounted for writing;
    `own`: sessions that are the caller's and count as nobody else. `absent`: only where nothing is now;
    `empty`: only where no more than an empty directory is."""

    at: At
    path: tuple[bytes, ...] = ()
    force: bool = False
    own: frozenset[int] = frozenset()
    absent: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """`moved`: there was a commit, of which the caller wakes the feed once it is durable. `undo` is the
    checkpoint of what was replaced; None when nothing had to be."""

    seq: int
    moved: bool
    changes: int
    undo: dict[str, Any] | None


def _is_there(tx: Tx, fs: FsRef, at: int, head: int) -> bool:
    """Whether the live tree is the state already, times included: restored before, say. It costs little where
    it is not: the first row that differs ends it."""
    for table in _COMPARED:
        if tx.one(CAME_SQL[table], (fs.id, at, at, at)) or tx.one(WENT_SQL[table], (fs.id, at, head, at)):
            return False
    return True


def _check_empty(tx: Tx, fs: FsRef, path: tuple[bytes, ...]) -> None:
    """In the restore's transaction: what somebody else put there since the caller looked is not replaced."""
    place = resolve(tx, fs.id, path, parents=True)
    if place.node is None:
        return
    if not place.node.is_dir or DbSource(tx, fs.id).child_counts([place.node.ino]):
        raise Conflict(f"{show(place.path)} is not empty", hint="what is there would be replaced")


class Restores:
    """Inside a `Database` function; any thread."""

    def __init__(
        self, packs: Packs, commits: Commits, feed: Feed, checkpoints: Checkpoints, host: Host
    ) -> None:
        self._packs, self._commits, self._feed = packs, commits, feed
        self._checkpoints, self._host = checkpoints, host

    def restore(self, tx: Tx, fs: FsRef, who: Grant | None, wish: Wish) -> Restored:
        """Raises `NotFound` (the state, the path in it), `Busy` (others write), `Conflict` (`absent`,
        `empty`)."""
        head, _ = hold_tree(tx, fs, who)
        state = state_of(tx, fs, wish.at)
        assert state.at is not None, "a retained state has a seq"
        self.check_writers(tx, fs, wish)
        if wish.empty:
            _check_empty(tx, fs, wish.path)
        if wish.path:
            return self._path(tx, fs, wish, state.at, head)
        if state.at == head or _is_there(tx, fs, state.at, head):
            return Restored(head, False, 0, None)
        return self._whole(tx, fs, wish, state.at, head)

    def check_writers(self, tx: Tx, fs: FsRef, wish: Wish) -> None:
        """Raises `Busy` when others could be writing what would be replaced."""
        now = self._host.wall_ns()
        for lease in load(tx, fs.id):
            if lease.kind == WRITER and lease.binds(now) and lease.session not in wish.own and not wish.path:
                raise held_by_other(lease)  # of a path the commit itself looks
        rows = tx.all(WRITERS_SQL, (fs.id, now - int(LOST_AFTER * 1e9)))
        others = [row for row in rows if int(row[0]) not in wish.own]
        if others and not wish.force:
            first = others[0]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise Busy(
                f"{first[1] or 'a sandbox'} has it mounted for writing at {first[2]}{more}",
                hint="unmount it there, or pass --force: what is replaced is kept as a checkpoint anyway",
                details={"sessions": [int(row[0]) for row in others[:100]]},
            )

    # -- the whole tree --------------------------------------------------------------------------------

    def _whole(self, tx: Tx, fs: FsRef, wish: Wish, at: int, head: int) -> Restored:
        undo = self._keep(tx, fs, wish)
        seq = head + 1
        for table in BRINGS_SQL:
            tx.execute(ENDS_SQL.format(table), (seq, fs.id, at))
            self._host.crash_point("restore.ends")
        for table, sql in BRINGS_SQL.items():
            times = 3 if table == "inode" else 1
            tx.execute(sql, (*[seq] * times, fs.id, at, seq, at))
            self._host.crash_point("restore.brings")
        inos, names = self._changed(tx, fs, seq)
        if not inos and not names:
            return Restored(head, False, 0, undo)
        self._figures(tx, fs, seq)
        tx.execute(GONE_SQL, (fs.id, seq))
        tx.execute(BACK_SQL, (fs.id, fs.id, seq))
        self._feed.append(tx, fs.id, seq, 0, sorted(inos), sorted(names))
        return Restored(seq, True, len(inos | {ino for ino, _ in names}), undo)

    def _keep(self, tx: Tx, fs: FsRef, wish: Wish) -> dict[str, Any]:
        """The checkpoint of what is replaced."""
        what = f"before a restore of {show(b'/' + b'/'.join(wish.path))}"[:200]
        return self._checkpoints.make(tx, fs, None, Ask(label=what, reason=UNDO))

    @staticmethod
    def _changed(tx: Tx, fs: FsRef, seq: int) -> tuple[set[int], set[tuple[int, bytes]]]:
        """Inodes and names with rows that the commit made or ended."""
        inos: set[int] = set()
        names: set[tuple[int, bytes]] = set()
        for sql in (BORN_SQL, DIED_SQL):
            for table in ("inode", "block"):
                inos.update(row[0] for row in tx.all(sql.format("ino", table), (fs.id, seq)))
            names.update(
                (row[0], row[1]) for row in tx.all(sql.format("parent, name", "dentry"), (fs.id, seq))
            )
        return inos, names

    def _figures(self, tx: Tx, fs: FsRef, seq: int) -> None:
        """Blob counts of the rows that were born, and what the filesystem's row says of the live tree."""
        refs: dict[bytes, int] = defaultdict(int)
        size = 0
        for sql, sign in ((BORN_SQL, 1), (DIED_SQL, -1)):
            for table in ("inode", "block"):
                for (raw,) in tx.all(sql.format("parts", table) + " AND parts IS NOT NULL", (fs.id, seq)):
                    parts = blocks.decode(raw)
                    size += sign * blocks.stored_bytes(parts)
                    for digest in blocks.hashes(parts) if sign > 0 else ():
                        refs[digest] += 1
        self._packs.adjust(tx, fs.id, refs)
        born = tx.one(BORN_SQL.format("count(*)", "inode"), (fs.id, seq))
        died = tx.one(DIED_SQL.format("count(*)", "inode"), (fs.id, seq))
        assert born is not None, "a count is one row"
        assert died is not None, "a count is one row"
        tx.execute(
            "UPDATE fs SET seq=?, storage_bytes=storage_bytes+?, file_count=file_count+? WHERE id=?",
            (seq, size, born[0] - died[0], fs.id),
        )

    # -- a path ----------------------------------------------------------------------------------------

    def _path(self, tx: Tx, fs: FsRef, wish: Wish, at: int, head: int) -> Restored:
        if wish.absent:
            place = resolve(tx, fs.id, wish.path, parents=True)
            if place.node is not None:
                raise Conflict(f"{show(place.path)} exists", hint="fsd checkpoint restore replaces it")
        build = Builder(self._commits.new_ino, self._host.wall_ns())
        planned = PathRestore(tx, fs.id, at, head, build).plan(wish.path)
        if not planned:
            return Restored(head, False, 0, None)
        undo = None if wish.absent else self._keep(tx, fs, wish)
        seq, moved = self._commits.direct(tx, fs, planned)
        return Restored(seq, moved, len(planned), undo)

    def plan(self, tx: Tx, fs: FsRef, wish: Wish) -> int:
        """How many changes a restore would make, for a dry run. Raises as `restore`."""
        state, now = state_of(tx, fs, wish.at), state_of(tx, fs)
        self.check_writers(tx, fs, wish)
        if state.at is None or now.at is not None:
            raise NotFound("the fork is still being copied", hint="try again in a moment")
        if wish.empty:
            _check_empty(tx, fs, wish.path)
        build = Builder(lambda: 0, self._host.wall_ns())
        return len(PathRestore(tx, fs.id, state.at, now.seq, build).plan(wish.path))
