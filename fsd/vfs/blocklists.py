"""Block lists of files that were closed: opened again they need no question, nor a server that is there."""

from __future__ import annotations

from collections import OrderedDict

from fsd.model.limits import BLOCK_LISTS_MAX
from fsd.vfs.content import Blocks


class BlockLists:
    """The least recently used go first, above BLOCK_LISTS_MAX blocks in all. A list is never changed."""

    def __init__(self) -> None:
        self._lists: OrderedDict[int, tuple[int, Blocks]] = OrderedDict()
        self._blocks = 0

    def keep(self, ino: int, cseq: int, blocks: Blocks) -> None:
        """`blocks` is the whole list of content `cseq`."""
        self._drop(ino)
        self._lists[ino] = cseq, blocks
        self._blocks += 1 + len(blocks)
        while self._blocks > BLOCK_LISTS_MAX:
            self._drop(next(iter(self._lists)))

    def get(self, ino: int, cseq: int) -> Blocks | None:
        """The list of that very content, if it is here."""
        found = self._lists.get(ino)
        if found is None or found[0] != cseq:
            return None
        self._lists.move_to_end(ino)
        return found[1]

    def _drop(self, ino: int) -> None:
        found = self._lists.pop(ino, None)
        if found is not None:
            self._blocks -= 1 + len(found[1])
