"""The record of conflicts: what was put beside, whose it is, and where it was meant to be.

A row names the entry that a commit gave to a losing change (a conflict copy, something in a lost-and-found, a
file a power cut made doubtful). It counts while that entry means that inode: who removes or renames the copy
has resolved it. Rows that do not count any more are dropped when others come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsd.meta.database import Database, Tx
from fsd.meta.sql import MAX
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import UsageError
from fsd.model.limits import CONFLICTS_MAX, LIST_PAGE_MAX, LIST_SCAN_MAX
from fsd.model.names import LOST_DIR, RECOVERED_MARK
from fsd.service.access import FsRef
from fsd.service.rules import Beside
from fsd.service.tree import Place
from fsd.service.view import View

_PRUNE: Final = 64  # old rows looked at when some are added
_PAGE: Final = 256

OPEN: Final = (
    "SELECT c.parent, c.name, c.ino, c.seq, c.at, c.session, c.host, c.place, c.original, c.reason, i.mode "
    "FROM conflict c CROSS JOIN dentry d CROSS JOIN inode i "
    "WHERE c.fs=? AND (c.parent, c.name) > (?, ?) "
    f"AND d.fs=c.fs AND d.parent=c.parent AND d.name=c.name AND d.died={MAX} AND d.ino=c.ino "
    f"AND i.fs=c.fs AND i.ino=c.ino AND i.died={MAX} ORDER BY c.parent, c.name LIMIT ?"
)
OLDEST: Final = (
    "SELECT c.parent, c.name, c.ino, d.ino FROM (SELECT fs, parent, name, ino FROM conflict "
    "WHERE fs=? ORDER BY seq LIMIT ?) c LEFT JOIN dentry d "
    f"ON d.fs=c.fs AND d.parent=c.parent AND d.name=c.name AND d.died={MAX}"
)
_INSERT: Final = (
    "INSERT INTO conflict (fs, parent, name, ino, seq, at, session, host, place, original, reason) "
    "VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (fs, parent, name) DO UPDATE SET ino=excluded.ino, "
    "seq=excluded.seq, at=excluded.at, session=excluded.session, host=excluded.host, "
    "place=excluded.place, original=excluded.original, reason=excluded.reason"
)
COUNT: Final = "SELECT count(*) FROM conflict WHERE fs=?"
NAMED: Final = f"SELECT parent, name FROM dentry WHERE fs=? AND ino=? AND died={MAX} LIMIT 1"


class Conflict(NamedTuple):
    """One that is not resolved. `path` is where the copy is, `original` where the change was meant to be (a
    bare name where that directory was gone already), `kind` conflict, lost or recovered."""

    path: bytes
    original: bytes
    kind: str
    reason: str
    host: str
    place: str
    session: int
    at: int
    seq: int
    ino: int
    mode: int


def note(
    tx: Tx, fs: int, view: View, beside: Sequence[Beside], *, session: int, host: str, seq: int, now: int
) -> None:
    """Remember what a commit put beside, in its transaction."""
    row = tx.one("SELECT path FROM session WHERE id=?", (session,))
    place = "" if row is None else str(row[0])
    tx.many(
        _INSERT,
        [
            (fs, one.parent, one.name, one.ino, seq, now, session, host, place, _path(view, one), one.reason)
            for one in {(one.parent, one.name): one for one in beside}.values()
        ],
    )
    _prune(tx, fs)


def note_copy(
    tx: Tx, fs: int, copy: Place, *, original: bytes, host: str, reason: str, seq: int, now: int
) -> None:
    """Remember what a client put beside itself: `copy`, which was meant for the path `original`. Once more
    replaces what was said before. Raises `NotFound` when nothing is there."""
    ino = copy.need().ino
    if ino == ROOT_INO:
        raise UsageError("the root is no copy of anything")
    tx.execute(_INSERT, (fs, copy.parent.ino, copy.name, ino, seq, now, 0, host, "", original, reason))
    _prune(tx, fs)


def _path(view: View, one: Beside) -> bytes:
    """Where it was meant to be, from the root; its name alone where the directory is gone."""
    parts, ino = [one.wanted], one.wanted_parent
    seen: set[int] = set()
    while ino != ROOT_INO:
        node = view.node(ino) if ino else None
        names = view.names_of(ino) if node is not None and node.is_dir and ino not in seen else []
        if not names:
            return one.wanted
        seen.add(ino)
        parts.append(names[0].name)
        ino = names[0].parent
    return b"/" + b"/".join(reversed(parts))


def _prune(tx: Tx, fs: int) -> None:
    gone = [
        (fs, parent, name)
        for parent, name, ino, there in tx.all(OLDEST, (fs, _PRUNE))
        if there is None or there != ino
    ]
    if gone:
        tx.many("DELETE FROM conflict WHERE fs=? AND parent=? AND name=?", gone)
    row = tx.one(COUNT, (fs,))
    over = (0 if row is None else int(row[0])) - CONFLICTS_MAX
    if over > 0:
        tx.execute(
            "DELETE FROM conflict WHERE fs=? AND seq <= "
            "(SELECT seq FROM conflict WHERE fs=? ORDER BY seq LIMIT 1 OFFSET ?)",
            (fs, fs, over - 1),
        )


class Conflicts:
    """Questions about the record. Any thread."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def page(
        self, fs: FsRef, top: bytes, after: tuple[int, bytes] | None, limit: int
    ) -> tuple[list[Conflict], tuple[int, bytes] | None]:
        """Those whose copy is, or was meant to be, below the path `top`; and where to go on (None: at the
        end). One request looks at LIST_SCAN_MAX rows: a page may hold none and yet not be the last."""
        return self._db.read(lambda tx: _page(tx, fs.id, top, after or (0, b""), min(limit, LIST_PAGE_MAX)))

    def count(self, fs: FsRef, top: bytes) -> int:
        """How many there are, as far as one request looks (LIST_SCAN_MAX rows)."""

        def look(tx: Tx) -> int:
            places = _Places(tx, fs.id)
            return sum(1 for _, row in _open(tx, fs.id, (0, b"")) if _shown(places, row, top) is not None)

        return self._db.read(look)


def _page(
    tx: Tx, fs: int, top: bytes, after: tuple[int, bytes], limit: int
) -> tuple[list[Conflict], tuple[int, bytes] | None]:
    places, found, at = _Places(tx, fs), list[Conflict](), 0
    for at, row in _open(tx, fs, after):
        one = _shown(places, row, top)
        if one is not None:
            found.append(one)
        if len(found) >= limit or at >= LIST_SCAN_MAX:
            return found, (int(row[0]), bytes(row[1]))
    return found, None


def _open(tx: Tx, fs: int, after: tuple[int, bytes]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Numbered rows behind `after`, at most LIST_SCAN_MAX."""
    count = 0
    while count < LIST_SCAN_MAX:
        rows = tx.all(OPEN, (fs, *after, _PAGE))
        for row in rows:
            count += 1
            yield count, row
        if len(rows) < _PAGE:
            return
        after = (int(rows[-1][0]), bytes(rows[-1][1]))


class _Places:
    """Paths of directories, each looked up once."""

    def __init__(self, tx: Tx, fs: int) -> None:
        self._tx, self._fs = tx, fs
        self._known: dict[int, tuple[bytes, ...] | None] = {ROOT_INO: ()}

    def of(self, ino: int) -> tuple[bytes, ...] | None:
        """The components of its path; None when it is not in the tree."""
        way: list[tuple[int, bytes]] = []
        while ino not in self._known and len(way) < 10_000:
            row = self._tx.one(NAMED, (self._fs, ino))
            if row is None:
                self._known[ino] = None
                break
            way.append((ino, bytes(row[1])))
            ino = int(row[0])
        found = self._known.get(ino)
        for below, name in reversed(way):
            found = None if found is None else (*found, name)
            self._known[below] = found
        return found


def _shown(places: _Places, row: tuple[Any, ...], top: bytes) -> Conflict | None:
    """The row for people, None unless it is about something below `top`."""
    parent, name, ino, seq, at, session, host, place, original, reason, mode = row
    above = places.of(parent)
    if above is None:
        return None
    path = b"/" + b"/".join((*above, name))
    inside = top.rstrip(b"/") + b"/"
    if not path.startswith(inside) and not original.startswith(inside):
        return None
    kind = "conflict"
    if RECOVERED_MARK in name:
        kind = "recovered"
    elif above and above[-1] == LOST_DIR:
        kind = "lost"
    return Conflict(path, bytes(original), kind, reason, host, place, session, at, seq, ino, mode)
