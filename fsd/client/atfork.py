"""What a forked child must not share with its parent (`multiprocessing` forks by default).

A connection that both use mixes what they send: one's request would be read as part of the other's body. And
a child has none of its parent's threads, and locks as they were: some may be held for ever.
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet


class Shared(Protocol):
    """Something whose `forked` makes it the child's own: called in the child, where no other thread is."""

    def forked(self) -> None: ...


_known: Final[WeakSet[Shared]] = WeakSet()


def watch(one: Shared) -> None:
    """Have `one.forked()` called in every child that is forked as long as `one` lives."""
    _known.add(one)


def _tell() -> None:
    for one in list(_known):
        one.forked()


os.register_at_fork(after_in_child=_tell)
