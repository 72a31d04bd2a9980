"""A session's rows of `redirect` and `moved`: looked up (`DbRedirects`), and what a commit adds (`store`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fsd.meta.database import Tx
from fsd.meta.sql import chunks, values_list
from fsd.service.redirects import MoveKey, Redirects
from fsd.service.view import NameKey

# Joins and no `IN`: with a list of hundreds PostgreSQL reads all rows of the session instead.
TARGETS: Final = (
    "SELECT r.ino, r.to_ino FROM {} AS k CROSS JOIN redirect r WHERE r.session=? AND r.ino=k.column1"
)
NUMBERS: Final = (
    "SELECT r.ino, r.to_ino FROM {} AS k CROSS JOIN redirect r WHERE r.session=? AND r.to_ino=k.column1"
)
MOVES: Final = (
    "SELECT m.parent, m.name, m.ino, m.to_parent, m.to_name FROM {} AS k CROSS JOIN moved m "
    "WHERE m.session=? AND m.parent=k.column1 AND m.name=k.column2 AND m.ino=k.column3"
)


class DbRedirects:
    """The rows of `session` in `tx` (a `redirects.Source`)."""

    def __init__(self, tx: Tx, session: int) -> None:
        self._tx, self._session = tx, session

    def targets(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        return self._pairs(TARGETS, numbers)

    def numbers(self, targets: Sequence[int]) -> list[tuple[int, int]]:
        return self._pairs(NUMBERS, targets)

    def _pairs(self, sql: str, values: Sequence[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for some in chunks(values):
            marks, params = values_list([(value,) for value in some])
            rows = self._tx.all(sql.format(marks), (*params, self._session))
            found.extend((number, target) for number, target in rows)
        return found

    def moves(self, keys: Sequence[MoveKey]) -> list[tuple[MoveKey, NameKey]]:
        found: list[tuple[MoveKey, NameKey]] = []
        for some in chunks(keys):
            rows, params = values_list(some)
            for row in self._tx.all(MOVES.format(rows), (*params, self._session)):
                found.append(((row[0], row[1], row[2]), (row[3], row[4])))
        return found


def store(tx: Tx, session: int, redirects: Redirects) -> None:
    """Write what the commit added."""
    if redirects.new_numbers:
        tx.many(
            "INSERT INTO redirect (session, ino, to_ino) VALUES (?,?,?) "
            "ON CONFLICT (session, ino) DO UPDATE SET to_ino=excluded.to_ino",
            [(session, number, to) for number, to in sorted(redirects.new_numbers.items())],
        )
    if redirects.new_moves:
        tx.many(
            "INSERT INTO moved (session, parent, name, ino, to_parent, to_name) VALUES (?,?,?,?,?,?) "
            "ON CONFLICT (session, parent, name, ino) DO UPDATE SET to_parent=excluded.to_parent, "
            "to_name=excluded.to_name",
            [(session, *key, *to) for key, to in sorted(redirects.new_moves.items())],
        )
