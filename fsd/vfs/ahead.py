"""Who reads a large file in order finds its next blocks already on their way.

Few at first, and later half of READ_AHEAD in one request, while the other half is read. Several readers share
what there is room for: blocks read ahead drove each other out of memory before they were used, and each was
fetched three times for two readers, six times for four.
"""

from __future__ import annotations

from typing import Final

from fsd.model.blocks import Parts
from fsd.model.limits import BLOB_MEMORY, BLOCK
from fsd.vfs.calls import Handle
from fsd.vfs.content import Content
from fsd.vfs.core import Core
from fsd.vfs.loads import READ_AHEAD, Loader

ROOM: Final = BLOB_MEMORY // BLOCK  # blocks, each reader's own among them
LATELY: Final = 1.0  # seconds since its last read in order in which a reader has its share


class Ahead:
    """See the module. The volume's thread."""

    def __init__(self, core: Core, loader: Loader) -> None:
        self._core, self._loader = core, loader
        self._readers: dict[int, float] = {}  # handles, and when they last read in order; the oldest first

    def read(self, handle: Handle, content: Content, offset: int, end: int) -> None:
        """A program reads [offset, end) of a file."""
        in_order, handle.next_read = offset == handle.next_read, end
        first = (end - 1) // BLOCK + 1
        if not in_order or not content.shown(first):
            return
        reach = min(READ_AHEAD, 2 + offset // BLOCK, self._share(handle))
        lacking: dict[bytes, None] = {}
        ends = False
        for index in range(first, first + reach):
            parts: Parts = content.shown(index)
            if not parts:
                ends = True
                break
            lacking.update((part.hash, None) for part in parts if not self._loader.comes(part.hash))
        if ends or len(lacking) >= reach // 2:
            self._loader.ahead(lacking)

    def _share(self, handle: Handle) -> int:
        """How many blocks this reader may have on their way or unread."""
        now = self._core.now()
        self._readers.pop(handle.fh, None)
        self._readers[handle.fh] = now
        while (oldest := next(iter(self._readers))) != handle.fh and self._readers[oldest] < now - LATELY:
            del self._readers[oldest]
        return ROOM // len(self._readers) - 1
