"""How much room a server has for bytes, as `statfs` of its mounts tells it."""

from __future__ import annotations

from typing import Final, NamedTuple

from fsd.model.limits import KIB, NAME_MAX

BLOCK_TOLD: Final = 4096  # f_bsize: what `df` and others count in
INODE_ROOM: Final = KIB  # what an inode, its name and its row in the feed take at the server, about


class Space(NamedTuple):
    """Bytes. `free` is what the server may still use; the rest holds other things on its disk too."""

    total: int
    free: int

    def statfs(self) -> dict[str, int]:
        """The fields of `struct statvfs`. The server has no table of inodes: as many as fit its free room."""
        return {
            "f_bsize": BLOCK_TOLD,
            "f_frsize": BLOCK_TOLD,
            "f_blocks": self.total // BLOCK_TOLD,
            "f_bfree": self.free // BLOCK_TOLD,
            "f_bavail": self.free // BLOCK_TOLD,
            "f_files": self.total // INODE_ROOM,
            "f_ffree": self.free // INODE_ROOM,
            "f_favail": self.free // INODE_ROOM,
            "f_namemax": NAME_MAX,
        }


NOMINAL: Final = Space(1 << 46, 1 << 46)  # 64 TiB: the server knows no limit (a bucket), or did not say
