"""What bounds the inodes in memory: names of cold directories are forgotten, and asked for when needed.

The kernel holds an inode as long as it has its name in its cache, so it is told to forget the names too; the
inode goes with its FORGET. Nothing of which the server lacks anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fsd.model.limits import INODES_MAX
from fsd.vfs.core import Core
from fsd.vfs.node import Inode
from fsd.vfs.types import Invalidation

EVERY: Final = 1.0  # seconds between two looks at everything in memory


class Evictor:
    """See the module. `limit` is the number of inodes above which something goes."""

    def __init__(self, core: Core, limit: int = INODES_MAX) -> None:
        self.core = core
        self.limit = limit
        self.next_at = 0.0

    def tick(self, now: float) -> None:
        """Shed an eighth when there are more than `limit`, the directories first that were used longest ago.
        Not while a question is open: its answer may be older than what an evicted inode had become."""
        core = self.core
        if len(core.nodes.by_ino) <= self.limit or now < self.next_at or core.asking:
            return
        self.next_at = now + EVERY
        surplus = len(core.nodes.by_ino) - self.limit * 7 // 8
        loaded = [node for node in core.nodes.by_ino.values() if node.is_dir and node.entries]
        for directory in sorted(loaded, key=lambda node: node.used):
            if surplus <= 0:
                return
            surplus -= self.forget_names(directory)

    def forget_names(self, directory: Inode) -> int:
        """Forget what the server can tell again of a directory's names; how many inodes that frees, now or
        when the kernel has forgotten them."""
        if not directory.born or directory.busy or directory.gone or directory.handles:
            return 0
        if directory.names_pending or directory.names_stale:
            return 0
        freed = forget_some(self.core, directory, list(directory.entries))
        directory.complete = False
        return freed


def forget_some(core: Core, directory: Inode, names: Iterable[bytes]) -> int:
    """Forget names of an incomplete directory, as far as the server can tell them again; how many inodes that
    frees, now or when the kernel has forgotten them."""
    freed = 0
    for name in names:
        if name in directory.names_pending or name in directory.names_stale or name not in directory.entries:
            continue
        ino = directory.entries[name]
        child = core.nodes.by_ino.get(ino) if ino is not None else None
        if child is not None:
            if not _cold(child):
                continue
            if child.lookups:
                core.invalidations.append(Invalidation(directory.ino, name))
            else:
                core.nodes.drop(child)
            freed += 1
        del directory.entries[name]
    return freed


def _cold(node: Inode) -> bool:
    """Whether only its name holds it, apart from the kernel's cache."""
    if node.handles or node.busy or node.gone:
        return False
    if node.is_dir:
        return not node.entries and not node.names_pending
    return node.nlink <= 1  # of more names only one is remembered here
