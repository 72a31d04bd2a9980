"""Pieces of SQL text that both engines take.

Texts use `?` placeholders. What differs between SQLite and PostgreSQL and must be written with care:
`INSERT … SELECT ?` needs `CAST(? AS BIGINT)`; a failed statement ends the whole request on PostgreSQL, so
write `INSERT … ON CONFLICT DO NOTHING` and look at the count instead of catching; `one("… RETURNING id")`
gives new keys; text cannot hold NUL characters; `MIN`/`MAX` of two values is not portable, use CASE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeVar

T = TypeVar("T")

MAX: Final = 140737488355327  # 2^47-1, `died` of what lives; a literal in the text: partial indexes need it
IN_MAX: Final = 512  # values of one list: a bounded number of statement shapes, far from both engines' limits


@lru_cache(maxsize=64)
def _marks(count: int) -> str:
    return "(" + ",".join("?" * count) + ")"


def in_list(values: Sequence[object]) -> tuple[str, list[object]]:
    """`(?,?,…)` for `IN` and its parameters. Filled up with the last value to a power of two, so that the
    engines' statement caches see ten shapes instead of five hundred. At most IN_MAX values, at least one."""
    count = len(values)
    assert 0 < count <= IN_MAX, f"{count} values in a list"
    size = 1 << (count - 1).bit_length()
    return _marks(size), [*values, *[values[-1]] * (size - count)]


@lru_cache(maxsize=256)
def _rows(count: int, width: int) -> str:
    return "(VALUES " + ",".join([_marks(width)] * count) + ")"


def values_list(rows: Sequence[Sequence[object]]) -> tuple[str, list[object]]:
    """`(VALUES (?,?),…)` for `FROM … AS k` and its parameters; its columns are called column1, column2, ….

    Write `FROM (VALUES …) AS k CROSS JOIN t WHERE t.a=k.column1 …`: the order of the join stays. Filled up
    like `in_list`, so a result may come several times: put it into a dict. At most IN_MAX rows.
    """
    count = len(rows)
    assert 0 < count <= IN_MAX, f"{count} rows in a list"
    size = 1 << (count - 1).bit_length()
    flat = [value for row in rows for value in row]
    return _rows(size, len(rows[0])), flat + list(rows[-1]) * (size - count)


def chunks(values: Sequence[T], size: int = IN_MAX) -> Iterator[Sequence[T]]:
    """`values` in pieces of at most `size`, for statements with a list."""
    for at in range(0, len(values), size):
        yield values[at : at + size]
