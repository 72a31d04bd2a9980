"""Deleted files that programs still have open: the server is asked now and then to keep what they may read.

With its last name a file's content loses its references on the server, and goes there after the grace. What
was written here and not committed is in the log; the rest is the server's, so while a handle is open its
blobs are named often enough to stay. One that is missing all the same is sent again where the cache has it.
The same holds for what a copy within the mount took over from another file, until the copy is committed.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Final

from fsd.model import blocks
from fsd.model.errors import FsdError
from fsd.model.limits import GRACE_LEAST, KEEP_BLOBS_MAX
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.core import Core
from fsd.vfs.types import BULK, Cache
from fsd.wire.frame import make_blob

log = logging.getLogger(__name__)

EVERY: Final = GRACE_LEAST / 3  # seconds
_AGAIN: Final = EVERY / 10  # after a failure
_TIMEOUT: Final = 30.0
_TOGETHER: Final = 8  # blobs of up to 1 MiB sent again at once


@dataclass(frozen=True, slots=True, eq=False)
class KeepJob:
    """Name the blobs; send again what is missing and cached. The result is how many are lost."""

    hashes: tuple[bytes, ...]
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> int:
        absent = remote.keep(self.hashes, _TIMEOUT)
        lost = 0
        while absent:
            some, absent = absent[:_TOGETHER], absent[_TOGETHER:]
            found = [data for data in map(cache.get, some) if data is not None]
            if found:
                remote.upload([make_blob(data) for data in found], _TIMEOUT)
            lost += len(some) - len(found)
        return lost


class Keeper:
    """On the volume's thread."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.at: float | None = None
        self._running = False
        self._lost = 0

    def wake(self, now: float) -> None:
        if not (self.core.orphans or self.core.sharing):
            self.at = None
        elif self.at is None:
            self.at = now + EVERY
        elif now >= self.at:
            self.at = now + EVERY
            if self._running:
                return
            hashes = tuple(islice(self._needed(), KEEP_BLOBS_MAX))
            if hashes:
                self._running = True
                self.core.jobs.append(KeepJob(hashes))

    def _needed(self) -> dict[bytes, None]:
        """The blobs behind the open deleted files, and those of copies."""
        found: dict[bytes, None] = {}
        for ino in self.core.orphans:
            node = self.core.nodes.get(ino)
            if node.content is not None and node.content.base:
                for parts in node.content.base.values():
                    found.update(dict.fromkeys(blocks.hashes(parts)))
        for ino in list(self.core.sharing):
            copy = self.core.nodes.by_ino.get(ino)
            named = [] if copy is None or copy.content is None else list(copy.content.named())
            if not named:
                del self.core.sharing[ino]
            found.update(dict.fromkeys(named))
        return found

    def finish(self, job: KeepJob, answer: int | FsdError) -> None:
        self._running = False
        if isinstance(answer, FsdError):
            self.at = self.core.now() + _AGAIN
        elif answer > self._lost:
            log.warning(
                "%d blobs of deleted files that are still open, or of copies, are gone on the server", answer
            )
        self._lost = answer if isinstance(answer, int) else self._lost
