"""Barriers of mounts for a checkpoint made from outside: asked for, told in the feed, answered, waited for.

A barrier is a row for each mount session that writes; the mount finds it in its next page of the change feed,
commits what it held, and answers. Whoever asked waits for the answers until its time is over, makes the
checkpoint then, and removes the rows; what a crash leaves is removed by the next who asks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.meta.sql import chunks, in_list
from fsd.model.errors import SessionUnknown
from fsd.model.limits import DRAIN_SESSIONS_MAX
from fsd.service.access import FsRef, Grant, hold
from fsd.service.sessions import LOST_AFTER, Pending
from fsd.wire.messages import BarrierAsk

WRITERS_SQL: Final = (
    "SELECT id, host, path, pending FROM session "
    "WHERE fs=? AND ended='' AND read_only=0 AND last_seen>=? ORDER BY id LIMIT ?"
)
ASKS_SQL: Final = (
    "SELECT id, expires FROM barrier WHERE fs=? AND session=? AND id>? AND answer='' AND expires>?"
)


class BarrierAnswer(NamedTuple):
    """`included`: everything written before the ask is committed, at `seq` at the latest; else `pending` is
    what is left and `reason` why."""

    included: bool
    seq: int
    pending: Pending
    reason: str


class Asked(NamedTuple):
    """A session that was asked. `pending` is what it last said it holds. `id` 0: it was not, since there are
    more than may be at once; one such stands for all of them."""

    id: int
    session: int
    host: str
    path: str
    pending: dict[str, int]


class Barriers:
    """Any thread; none inside a transaction."""

    def __init__(self, db: Database, host: Host) -> None:
        self._db = db
        self._host = host

    def ask(self, fs: FsRef, who: Grant, seconds: float) -> list[Asked]:
        """Ask every mount that writes; `seconds`: how long its answer is waited for."""
        now = self._host.wall_ns()
        until = now + int(seconds * 1e9)

        def write(tx: Tx) -> list[Asked]:
            hold(tx, fs, who)
            tx.execute("DELETE FROM barrier WHERE fs=? AND expires<?", (fs.id, now))
            found: list[Asked] = []
            seen = now - int(LOST_AFTER * 1e9)
            for session, host, path, pending in tx.all(WRITERS_SQL, (fs.id, seen, DRAIN_SESSIONS_MAX + 1)):
                if len(found) == DRAIN_SESSIONS_MAX:
                    found.append(Asked(0, int(session), host, path, json.loads(pending)))
                    break
                row = tx.one(
                    "INSERT INTO barrier (fs, session, asked, expires, answer) VALUES (?,?,?,?,'') "
                    "RETURNING id",
                    (fs.id, session, now, until),
                )
                assert row is not None, "INSERT … RETURNING gives a row"
                found.append(Asked(int(row[0]), int(session), host, path, json.loads(pending)))
            return found

        return self._db.write(write)

    def asks(self, fs: FsRef, session: int, after: int) -> tuple[BarrierAsk, ...]:
        """What a session is asked for and has not answered, behind the ask number `after`."""
        now = self._host.wall_ns()
        rows = self._db.read(lambda tx: tx.all(ASKS_SQL, (fs.id, session, after, now)))
        return tuple(BarrierAsk(int(number), max(1, (expires - now) // 10**6)) for number, expires in rows)

    def answer(self, fs: FsRef, session: int, ask: int, answer: BarrierAnswer) -> None:
        """The first answer counts. Raises `SessionUnknown` when the session was not asked that, or nobody
        waits for it any more."""
        text = json.dumps(answer._asdict())

        def write(tx: Tx) -> bool:
            hold(tx, fs)
            tx.execute(
                "UPDATE barrier SET answer=? WHERE id=? AND fs=? AND session=? AND answer=''",
                (text, ask, fs.id, session),
            )
            row = tx.one("SELECT 1 FROM barrier WHERE id=? AND fs=? AND session=?", (ask, fs.id, session))
            return row is not None

        if not self._db.write(write):
            raise SessionUnknown(f"session {session} is not asked for the barrier {ask} (any more)")

    def answers(self, asked: Sequence[Asked]) -> dict[int, BarrierAnswer]:
        """The answers so far, by ask."""
        found: dict[int, BarrierAnswer] = {}
        for some in chunks([one.id for one in asked]):
            marks, values = in_list(some)
            rows = self._db.read(
                lambda tx, m=marks, v=values: tx.all(  # type: ignore[misc]
                    f"SELECT id, answer FROM barrier WHERE answer<>'' AND id IN {m}", v
                )
            )
            for number, text in rows:
                given = json.loads(text)
                found[int(number)] = BarrierAnswer(**{**given, "pending": tuple(given["pending"])})
        return found

    def done(self, asked: Sequence[Asked]) -> None:
        """Nobody waits any more."""
        for some in chunks([one.id for one in asked]):
            marks, values = in_list(some)
            self._db.write(
                lambda tx, m=marks, v=values: tx.execute(f"DELETE FROM barrier WHERE id IN {m}", v),  # type: ignore[misc]
                frees=True,
            )


def shown(asked: Sequence[Asked], answers: dict[int, BarrierAnswer], timeout: float) -> list[dict[str, Any]]:
    """Each session that was asked, and what it said."""
    found = []
    for one in asked:
        answer = answers.get(one.id)
        made: dict[str, Any] = {"session": one.session, "host": one.host, "path": one.path}
        if answer is None:
            late = f"no answer within {timeout:g} s"
            made |= {
                "included": False,
                "pending_bytes": one.pending.get("bytes", 0),
                "reason": late if one.id else f"not asked: more than {DRAIN_SESSIONS_MAX} mounts write",
            }
        else:
            made |= {
                "included": answer.included,
                "pending_bytes": 0 if answer.included else answer.pending[2],
                "reason": answer.reason or None,
            }
        found.append(made)
    return found
