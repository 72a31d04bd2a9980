"""A server that answers and says what cannot be: parts of real answers are changed for other values, for
values of the same answer, or bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from fsd.model.errors import UsageError
from fsd.remote.answers import read_answers
from fsd.service.access import ADMIN_GRANT
from fsd.wire import messages
from fsd.wire.messages import NO_MARK, Commit, CommitAnswer, FeedPage, Mark, commit_pieces, packb
from support.inproc import InProcess

VALUES: Final[tuple[Any, ...]] = (
    *(
        0,
        1,
        -1,
        2,
        7,
        255,
        2**15,
        2**31,
        2**32,
        2**40,
        2**41 + 1,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -(2**63),
    ),
    *(
        None,
        True,
        False,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "text",
        b"",
        b".",
        b"..",
        b"/",
        b"a/b",
        b"n\0",
        b"x" * 256,
    ),
    *(
        b"\x90",
        b"\xc1",
        b"h" * 32,
        b"\x91\x94\x00\x00\x00\xc4\x20" + b"h" * 32,
        (),
        ((),),
        {},
        {b"k": 1},
        {"k": b"v"},
    ),
    *((None,) * 17, (0,) * 17, 0o40755, 0o100644, 0o120777, 0o20644, 0o170000),
)


def changed(rng: random.Random, value: Any, pool: list[Any], rate: float) -> Any:
    """`value` with about one in `1 / rate` of its parts changed."""
    if rng.random() < rate:
        return rng.choice(pool) if pool and rng.random() < 0.6 else rng.choice(VALUES)
    if isinstance(value, tuple):
        rows = [changed(rng, one, pool, rate) for one in value]
        if rows and rng.random() < rate:
            at = rng.randrange(len(rows))
            rows[at : at + 1] = rng.choice(([], [rows[at]] * 2, [rows[at], rng.choice(VALUES)]))
        return tuple(rows)
    if isinstance(value, dict):
        return {key: changed(rng, one, pool, rate) for key, one in value.items()}
    return value


def parts(value: Any) -> list[Any]:
    """Every part of an answer, itself last."""
    rows = (
        list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    )
    return [part for row in rows for part in parts(row)] + [value]


def lied(rng: random.Random, raw: bytes) -> bytes:
    """The answer `raw`, changed."""
    if rng.random() < 0.15:
        bent = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
        return bytes(bent)
    value = msgpack.unpackb(raw, raw=False, use_list=False)
    pool = parts(value)
    made = changed(rng, value, pool, rng.choice((1, 2, 5)) / len(pool))
    try:
        return packb(made)
    except (OverflowError, ValueError) as exc:
        raise UsageError("not to be said in msgpack") from exc


class Lying(InProcess):
    """`rate` of the answers about names, of commits and of the feed are changed."""

    def __init__(self, *given: Any, rng: random.Random) -> None:
        super().__init__(*given)
        self.rng = rng
        self.rate = 0.0
        self.lies = 0

    def _said(self, raw: bytes) -> bytes:
        if self.rng.random() >= self.rate:
            return raw
        self.lies += 1
        try:
            return lied(self.rng, raw)
        except UsageError:
            return b"\xc1"

    def ask(self, questions: Sequence[tuple[Any, ...]], timeout: float) -> tuple[int, list[Any]]:
        def act() -> tuple[int, list[Any]]:
            asked = messages.unpackb(packb(list(questions)), "questions")
            seq, answers = self.service.namespace.ask(self.fs, asked)
            return read_answers(questions, self._said(packb({"seq": seq, "answers": answers})))

        return self._call("ask", act)  # type: ignore[no-any-return]

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        body = b"".join(commit_pieces(commit))

        def act() -> CommitAnswer:
            answer = self.service.commits.commit(self.fs, messages.read_commit(body), ADMIN_GRANT)
            return messages.read_answer(self._said(answer.encode()))

        return self._call("commit", act)  # type: ignore[no-any-return]

    def changes(
        self,
        after: int,
        session: int,
        wait: float,
        root: int = 0,
        asked: int | None = None,
        known: Mark = NO_MARK,
    ) -> FeedPage:
        def act() -> FeedPage:
            page = self.service.feed.page(self.fs, after, wait, root, known)
            return messages.read_feed(self._said(page.encode()))

        return self._call("changes", act)  # type: ignore[no-any-return]
