"""The questions that are asked of the server for a mount, as jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fsd.model.errors import IntegrityError
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.build import each, fetcher
from fsd.vfs.types import BULK, LOCAL, Cache, Want

ASK_TIMEOUT: Final = 30.0

Key = tuple[Any, ...]
Question = tuple[Any, ...]


class Together(tuple[Question, ...]):
    """Several questions whose answers are of one moment: they travel in one request. Theirs is a list."""

    __slots__ = ()


# (answer, seq) -> the next question, asked under the same want; None: there is none.
Answered = Callable[[Any, int], Question | Together | None]


@dataclass(slots=True, eq=False)
class Asked:
    """A question, who waits for it, and what to do with its answer."""

    key: Key
    question: Question | Together
    want: Want
    answered: Answered
    soft: bool = False  # something is known already: without an answer that will do
    at: float = 0.0  # when it was asked first


@dataclass(frozen=True, slots=True, eq=False)
class AskJob:
    """Several questions in one request."""

    asked: tuple[Asked, ...]
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> tuple[int, list[Any]]:
        groups = [one.question if isinstance(one.question, Together) else None for one in self.asked]
        flat = [q for group, one in zip(groups, self.asked) for q in group or (one.question,)]
        seq, answers = remote.ask(flat, ASK_TIMEOUT)
        if len(flat) == len(self.asked):
            return seq, answers
        rest = iter(answers)  # as many as were asked, says `Remote`
        return seq, [next(rest) if group is None else [next(rest) for _ in group] for group in groups]


@dataclass(frozen=True, slots=True, eq=False)
class BlobJob:
    """Fetch blobs through the cache. One that the server has lost costs the others nothing."""

    hashes: tuple[bytes, ...]
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> dict[bytes, bytes | IntegrityError]:
        return each(fetcher(remote, cache), self.hashes)


@dataclass(frozen=True, slots=True, eq=False)
class CacheJob:
    """Look for blobs in the cache alone, while the server does not answer: requests that hang may keep every
    other worker. `then`: what is not there is to be fetched; else somebody is at it already."""

    hashes: tuple[bytes, ...]
    then: bool
    lane: str = LOCAL

    def run(self, remote: Remote, cache: Cache) -> dict[bytes, bytes]:
        found = {digest: cache.get(digest) for digest in self.hashes}
        return {digest: data for digest, data in found.items() if data is not None}
