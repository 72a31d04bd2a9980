"""The change feed: one row a commit, read in pages, waited for.

Rows are kept for 7 days, and the newest 100,000 in any case; a reader further behind is told to start over
(`reset`). In one process a commit wakes its waiters; commits of other replicas are found by looking at the
head every RECHECK seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgpack

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import HistoryChanged
from fsd.model.limits import FEED_PAGE_MAX, FEED_TOLD_MAX, FEED_WAIT_MAX, MIB
from fsd.service.access import FsRef, no_file_system
from fsd.service.view import NameKey
from fsd.service.writers import seen
from fsd.wire.messages import Change, FeedPage, Mark

KEEP_ROWS: Final = 100_000
KEEP_NS: Final = 7 * 24 * 3600 * 10**9
RECHECK: Final = 0.2
MADE_AT: Final = "SELECT at FROM change WHERE fs=? AND seq=?"
PRUNE_EVERY: Final = 256  # commits of a filesystem between two prunings
_PRUNE_ROWS: Final = 4 * PRUNE_EVERY  # at most so many rows go at a time
_STEP: Final = 50  # rows read at a time: one can be 100 KiB; divides FEED_PAGE_MAX
_PAGE_BYTES: Final = 4 * MIB


class Feed:
    """All methods from any thread; those that take a `tx` inside a `Database` function."""

    def __init__(self, db: Database, host: Host) -> None:
        self._db = db
        self._host = host
        self._changed = threading.Condition()
        self._heads: dict[int, int] = {}  # newest seq committed by this process
        self._listeners: list[Callable[[int, int, int], None]] = []

    def listen(self, callback: Callable[[int, int, int], None]) -> Callable[[], None]:
        """Call `callback(fs id, seq, by)` after each commit of this process, on the committing thread: it
        must be quick and must not raise. `by`: the session that made it and was told all of it, 0: none.
        Returns the call that ends it."""
        with self._changed:
            self._listeners.append(callback)

        def stop() -> None:
            with self._changed:
                self._listeners.remove(callback)

        return stop

    def wake(self, fs: int, seq: int, by: int = 0) -> None:
        """A commit happened; see `listen`."""
        with self._changed:
            self._heads[fs] = max(seq, self._heads.get(fs, 0))
            listeners = list(self._listeners)
            self._changed.notify_all()
        for callback in listeners:
            callback(fs, seq, by)

    def head(self, fs: FsRef) -> int:
        """The filesystem's seq now. Raises `NotFound`."""
        row = self._db.read(lambda tx: tx.one("SELECT seq FROM fs WHERE id=? AND status='active'", (fs.id,)))
        if row is None:
            raise no_file_system(fs.name)
        return int(row[0])

    def page(
        self, fs: FsRef, after: int, wait: float = 0.0, root: int = 0, known: Mark | None = None
    ) -> FeedPage:
        """As `read`; waits up to `wait` seconds while there are no changes. Blocks its thread."""
        deadline = self._host.monotonic() + min(wait, FEED_WAIT_MAX)
        while True:
            page = self.read(fs, after, root, known)
            left = deadline - self._host.monotonic()
            if page.changes or page.reset or left <= 0:
                return page
            with self._changed:
                if self._heads.get(fs.id, 0) <= after:
                    self._changed.wait(min(left, RECHECK))

    def read(self, fs: FsRef, after: int, root: int = 0, known: Mark | None = None) -> FeedPage:
        """Changes behind `after` as they are now; never waits. `root`: the directory the reader mounts,
        `known`: what it has seen (None: an older reader, which is told no mark). Raises `HistoryChanged`."""

        def look(tx: Tx) -> FeedPage:
            page, writers = _read(tx, fs, after, known)
            return page._replace(leases=seen(tx, fs.id, self._host.wall_ns(), root)) if writers else page

        return self._db.read(look)

    def append(self, tx: Tx, fs: int, seq: int, session: int, inos: list[int], names: list[NameKey]) -> int:
        """Writes the change row of commit `seq`; its time. Now and then the oldest rows go. Of more than
        FEED_TOLD_MAX changes it says nothing: an empty row tells readers to start over."""
        now = self._host.wall_ns()
        told = len(inos) + len(names) <= FEED_TOLD_MAX
        what = msgpack.packb((inos, names), use_bin_type=True) if told else b""
        tx.execute(
            "INSERT INTO change (fs, seq, session, at, what) VALUES (?,?,?,?,?)",
            (fs, seq, session, now, what),
        )
        if seq % PRUNE_EVERY == 0 and seq > KEEP_ROWS:
            self._prune(tx, fs, seq, now)
        return now

    def _prune(self, tx: Tx, fs: int, seq: int, now: int) -> None:
        oldest = tx.one("SELECT min(seq) FROM change WHERE fs=?", (fs,))
        if oldest is None or oldest[0] is None:
            return
        last = min(seq - KEEP_ROWS, oldest[0] + _PRUNE_ROWS)
        kept = tx.one(
            "SELECT min(seq) FROM change WHERE fs=? AND seq<=? AND at>=?", (fs, last, now - KEEP_NS)
        )
        if kept is not None and kept[0] is not None:
            last = kept[0] - 1
        tx.execute("DELETE FROM change WHERE fs=? AND seq<=?", (fs, last))
        tx.execute("DELETE FROM gone WHERE fs=? AND seq<=?", (fs, last))


def check_past(tx: Tx, fs: FsRef, head: int, known: Mark | None) -> None:
    """Raises `HistoryChanged` when the commit `known` is not one of this history: the service has gone back
    to an older copy. Where its row was pruned nobody can tell."""
    if known is not None and known.seq:
        compare_past(fs, head, known, _made_at(tx, fs, known.seq))


def compare_past(fs: FsRef, head: int, known: Mark | None, at: int | None) -> None:
    """As `check_past`; `at`: when the commit of that number was made, as far as its row is there."""
    if known is None or not known.seq:
        return
    if known.seq > head or at not in (None, known.at):
        raise HistoryChanged(
            f"the service went back to an older copy of its data: it does not have commit {known.seq} of "
            f"{fs.name} as this client has seen it"
        )


def _made_at(tx: Tx, fs: FsRef, seq: int) -> int | None:
    row = tx.one(MADE_AT, (fs.id, seq))
    return None if row is None else int(row[0])


def _read(tx: Tx, fs: FsRef, after: int, known: Mark | None) -> tuple[FeedPage, int]:
    """The page without leases, and how many writer leases there may be."""
    row = tx.one("SELECT seq, writers FROM fs WHERE id=? AND status='active'", (fs.id,))
    if row is None:
        raise no_file_system(fs.name)
    head = int(row[0])
    check_past(tx, fs, head, known)
    page = _changes(tx, fs, after, head)
    newest = page.changes[-1].seq if page.changes else head
    if known is not None and newest > known.seq:
        at = _made_at(tx, fs, newest)
        page = page if at is None else page._replace(mark=Mark(newest, at))
    return page, int(row[1])


def _changes(tx: Tx, fs: FsRef, after: int, head: int) -> FeedPage:
    if after == head:
        return FeedPage(head, (), False)
    oldest = tx.one("SELECT min(seq) FROM change WHERE fs=?", (fs.id,))
    if after > head or oldest is None or oldest[0] is None or oldest[0] > after + 1:
        return FeedPage(head, (), True)
    changes: list[Change] = []
    size = 0
    while len(changes) < FEED_PAGE_MAX:
        rows = tx.all(
            "SELECT seq, session, what FROM change WHERE fs=? AND seq>? ORDER BY seq LIMIT ?",
            (fs.id, changes[-1].seq if changes else after, _STEP),
        )
        for seq, session, what in rows:
            if not what:
                return FeedPage(head, (), True)
            size += len(what)
            if changes and size > _PAGE_BYTES:
                return FeedPage(head, tuple(changes), False)
            inos, names = msgpack.unpackb(what, use_list=False)
            changes.append(Change(seq, session, inos, names))
        if len(rows) < _STEP:
            break
    return FeedPage(head, tuple(changes), False)
