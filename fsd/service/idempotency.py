"""Idempotency keys of the HTTP API: one effect a key, and its answer kept for 24 h.

The key's row is written first, in the transaction of the effect. On PostgreSQL a second request with the same
key waits there until the first has ended; on SQLite there is one writer anyway. So an effect and the
memory of it are one transaction and a lost answer never makes a second effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model.errors import Conflict, IdempotencyMismatch, UsageError
from fsd.model.limits import IDEMPOTENCY_KEEP, IDEMPOTENCY_KEY_MAX
from fsd.model.plain import dataclass
from fsd.model.times import NS

_KEY = re.compile(rf"[A-Za-z0-9_.:-]{{1,{IDEMPOTENCY_KEY_MAX}}}")
_SWEEP_CHUNK: Final = 500
_EXPIRED: Final = "SELECT scope, key FROM idempotency WHERE expires < ?"
_RESERVED: Final = 0  # the status between a key's row and its answer, never seen outside the transaction


def check_key(key: str) -> str:
    """`key` if it is one; raises `UsageError`."""
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"an idempotency key has 1 to {IDEMPOTENCY_KEY_MAX} of letters, digits, '_', '.', ':', '-'"
        )
    return key


@dataclass(frozen=True, slots=True)
class Call:
    """A request that carries a key. `scope` says whose key it is and for which route; `digest` is over all
    that decides the effect."""

    scope: str
    key: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What is kept and sent: HTTP status and the JSON body's bytes. `replayed` when it is an old one."""

    status: int
    body: bytes
    replayed: bool = False


class Idempotency:
    """All methods from any thread."""

    def __init__(self, db: Database, host: Host) -> None:
        self._db = db
        self._host = host

    def run(self, tx: Tx, call: Call | None, effect: Callable[[Tx], Answer]) -> Answer:
        """The effect and the memory of its answer, both in `tx`; or the answer kept under the same key.

        An effect that raises is not remembered: it did nothing. Raises `IdempotencyMismatch`.
        """
        if call is None:
            return effect(tx)
        kept = self._reserve(tx, call)
        if kept is not None:
            return kept
        answer = effect(tx)
        self._keep(tx, call, answer)
        return answer

    def knows(self, call: Call) -> bool:
        """Whether the key was used already, whatever for: its request is judged when it is whole. Not where
        that was so long ago that it counts as new."""
        row = self._db.read(
            lambda tx: tx.one(
                "SELECT 1 FROM idempotency WHERE scope = ? AND key = ? AND expires >= ?",
                (call.scope, call.key, self._host.wall_ns()),
            )
        )
        return row is not None

    def kept(self, call: Call) -> Answer | None:
        """The answer kept under the key, for who would otherwise check what may have changed since. Raises
        `IdempotencyMismatch`."""
        row = self._db.read(
            lambda tx: tx.one(
                "SELECT digest, status, answer, expires FROM idempotency WHERE scope = ? AND key = ?",
                (call.scope, call.key),
            )
        )
        if row is None or row[3] < self._host.wall_ns():
            return None
        return self._replay(call, row[0], row[1], row[2])

    def sweep(self) -> int:
        """Forget expired keys, a bounded number; returns how many."""
        now = self._host.wall_ns()
        if self._db.read(lambda tx: tx.one(_EXPIRED + " LIMIT 1", (now,))) is None:
            return 0
        return self._db.write(
            lambda tx: tx.execute(
                f"DELETE FROM idempotency WHERE (scope, key) IN ({_EXPIRED} LIMIT {_SWEEP_CHUNK})", (now,)
            ),
            frees=True,
        )

    def _reserve(self, tx: Tx, call: Call) -> Answer | None:
        now = self._host.wall_ns()
        for _ in range(2):
            made = tx.execute(
                "INSERT INTO idempotency (scope, key, digest, status, answer, expires) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (scope, key) DO NOTHING",
                (call.scope, call.key, call.digest, _RESERVED, b"", now),
            )
            if made == 1:
                return None
            row = tx.one(
                "SELECT digest, status, answer, expires FROM idempotency WHERE scope = ? AND key = ?",
                (call.scope, call.key),
            )
            if row is not None and row[3] >= now:
                return self._replay(call, row[0], row[1], row[2])
            self._release(tx, call)
        raise Conflict(f"the idempotency key {call.key} is being used by another request")

    def _replay(self, call: Call, digest: bytes, status: int, body: bytes) -> Answer:
        if digest != call.digest:
            raise IdempotencyMismatch(
                f"the idempotency key {call.key} was used for another request",
                hint="use a new key for a new request",
            )
        return Answer(status, body, replayed=True)

    def _keep(self, tx: Tx, call: Call, answer: Answer) -> None:
        expires = self._host.wall_ns() + int(IDEMPOTENCY_KEEP * NS)
        tx.execute(
            "UPDATE idempotency SET status = ?, answer = ?, expires = ? WHERE scope = ? AND key = ?",
            (answer.status, answer.body, expires, call.scope, call.key),
        )

    def _release(self, tx: Tx, call: Call) -> None:
        tx.execute("DELETE FROM idempotency WHERE scope = ? AND key = ?", (call.scope, call.key))
