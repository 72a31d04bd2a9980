"""Small files of a directory that a program reads one after the other are fetched together.

A cold `grep -r` would otherwise wait for one request a file. Who reads here and there fetches little more:
the window opens with the second file of a directory that is not here, grows while what it brought is read,
also into the next directory, and closes when it is not; the more often that happened in a row, the later it
opens again. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fsd.model.blocks import decode, hashes
from fsd.model.limits import SIBLING_SIZE, SIBLINGS_BYTES, SIBLINGS_MAX
from fsd.vfs.core import Core
from fsd.vfs.loads import Loader
from fsd.vfs.node import Inode

FIRST: Final = 4
GROWTH: Final = 4
PATIENCE_MAX: Final = 16


class Siblings:
    """See the module. `missed` and `read` are told of reads of files."""

    def __init__(self, core: Core, loader: Loader) -> None:
        self._core = core
        self._loader = loader
        self._directory = 0  # of the last file that was not here
        self._window = 0
        self._brought: set[bytes] = set()  # and not read yet
        self._number = 0  # of what was brought last
        self._again = 0  # files that were not here, in the directory of the one before
        self._patience = 1  # so many of them until the window opens

    def read(self, digest: bytes) -> None:
        """A program got bytes of a blob that was here."""
        if self._brought:
            self._brought.discard(digest)

    def missed(self, node: Inode) -> None:
        """A program waits for bytes of `node` that were not on their way: bring those of the files behind
        it, in their order."""
        if node.where is None or node.size > SIBLING_SIZE:
            return
        useful = self._number > 0 and len(self._brought) * 2 <= self._number
        again = node.where[0] == self._directory
        self._directory = node.where[0]
        if useful:
            self._window = min(SIBLINGS_MAX, self._window * GROWTH)
            self._patience = 1
        elif self._number:
            self._window, self._again = 0, 0
            self._patience = min(PATIENCE_MAX, self._patience * 2)
        else:
            self._again += again
            self._window = FIRST if again and self._again >= self._patience else 0
        brought = list(dict.fromkeys(self._behind(node)))
        self._brought = set(brought)
        self._number = len(brought)
        self._loader.ahead(brought)

    def _behind(self, node: Inode) -> Iterator[bytes]:
        """Blobs of the next files in the directory that are not at hand."""
        above = self._core.nodes.by_ino.get(self._directory)
        if above is None or not self._window:
            return
        inos = iter(above.entries.values())
        for ino in inos:
            if ino == node.ino:
                break
        number = size = 0
        for ino in inos:
            child = self._core.nodes.by_ino.get(ino) if ino is not None else None
            if child is None or child.parts is None or child.content is not None or child.stale:
                continue
            if not 0 < child.size <= SIBLING_SIZE:
                continue
            number, size = number + 1, size + child.size
            if number > self._window or size > SIBLINGS_BYTES:
                return
            for digest in hashes(decode(child.parts)):
                if digest not in self._core.recent:
                    yield digest
