"""`Volume`: the client's state machine (docs: DESIGN.md beside this file).

All methods run on one thread, never block on the network, and either return, raise an `FsdError` (its
`.errno` is the answer), or raise `Park`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsd.vfs.node import Inode
from fsd.vfs.types import Invalidation, Job, Pending, Want
from fsd.wire.messages import FeedPage


class Volume:
    """See the module. Node numbers are the volume's own; `root_ino` is the mount's root."""

    root_ino: int
    session: int
    feed_seq: int  # continue the change feed behind this seq

    # names -------------------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """The inode `name` means, None if there is none. Counts one kernel lookup when found."""
        raise NotImplementedError

    def node(self, ino: int) -> Inode:
        """The inode in memory, whatever its state (ESTALE if there is none). Never parks."""
        raise NotImplementedError

    def getattr(self, ino: int) -> Inode:
        raise NotImplementedError

    def setattr(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime: int | None = None,
        mtime: int | None = None,
    ) -> Inode:
        """Change attributes; `mode` holds permission bits. `size` truncates."""
        raise NotImplementedError

    def readlink(self, ino: int) -> bytes:
        raise NotImplementedError

    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, flags: int
    ) -> tuple[Inode, int]:
        """Make and open a regular file (counts one lookup). `mode` comes with the umask applied."""
        raise NotImplementedError

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, uid: int, gid: int) -> Inode:
        raise NotImplementedError

    def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        raise NotImplementedError

    def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Inode:
        raise NotImplementedError

    def link(self, ino: int, parent: int, name: bytes) -> Inode:
        raise NotImplementedError

    def unlink(self, parent: int, name: bytes) -> None:
        raise NotImplementedError

    def rmdir(self, parent: int, name: bytes) -> None:
        raise NotImplementedError

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        raise NotImplementedError

    # files -------------------------------------------------------------------------------------------
    def open(self, ino: int, flags: int) -> int:
        """A file handle; O_TRUNC truncates, O_APPEND and the access mode are remembered."""
        raise NotImplementedError

    def read(self, fh: int, offset: int, size: int) -> bytes:
        raise NotImplementedError

    def write(self, fh: int, offset: int, data: bytes) -> int:
        """On an O_SYNC/O_DSYNC handle parks with `again=False` until committed."""
        raise NotImplementedError

    def flush(self, fh: int) -> None:
        raise NotImplementedError

    def fsync(self, fh: int, datasync: bool) -> None:
        raise NotImplementedError

    def release(self, fh: int) -> None:
        raise NotImplementedError

    def opendir(self, ino: int) -> int:
        raise NotImplementedError

    def readdir(self, fh: int, cookie: int, limit: int = 1000) -> list[tuple[bytes, Inode, int]]:
        """Entries behind `cookie` (0: from the start), without '.' and '..': (name, inode, next cookie).
        Counts no lookups: call `ref` for each one given to the kernel with attributes."""
        raise NotImplementedError

    def releasedir(self, fh: int) -> None:
        raise NotImplementedError

    def fsyncdir(self, fh: int) -> None:
        raise NotImplementedError

    def ref(self, ino: int) -> None:
        """Count one kernel lookup (an entry answered by readdirplus)."""
        raise NotImplementedError

    def forget(self, ino: int, nlookup: int) -> None:
        raise NotImplementedError

    # extended attributes -----------------------------------------------------------------------------
    def getxattr(self, ino: int, name: bytes) -> bytes:
        raise NotImplementedError

    def setxattr(self, ino: int, name: bytes, value: bytes) -> None:
        raise NotImplementedError

    def listxattr(self, ino: int) -> Sequence[bytes]:
        raise NotImplementedError

    def removexattr(self, ino: int, name: bytes) -> None:
        raise NotImplementedError

    def statfs(self) -> dict[str, int]:
        """f_bsize, f_frsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_favail, f_namemax."""
        raise NotImplementedError

    # the machine around it ---------------------------------------------------------------------------
    def jobs(self) -> list[Job]:
        """Work to hand to other threads now. Ask again after every call and every `finish` and `tick`."""
        raise NotImplementedError

    def finish(self, job: Job, result: object) -> None:
        """What `job.run` returned, or the exception it raised."""
        raise NotImplementedError

    def done(self, want: Want) -> bool:
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Flush by age, retry, end what waited too long. `now` is `host.monotonic()`."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        raise NotImplementedError

    def apply_feed(self, page: FeedPage) -> list[Invalidation]:
        raise NotImplementedError

    def take_invalidations(self) -> list[Invalidation]:
        """What else the kernel has to forget (conflicts and refusals told by a commit's answer). Ask after
        every `finish` and `tick`."""
        raise NotImplementedError

    def feed_silent(self, silent: bool) -> None:
        """While silent, cached state is asked for again before use."""
        raise NotImplementedError

    def barrier(self) -> Want:
        """Ends when everything done up to now is committed, or with the error that prevents it."""
        raise NotImplementedError

    def pending(self) -> Pending:
        raise NotImplementedError

    def status(self) -> dict[str, object]:
        raise NotImplementedError

    def close(self) -> None:
        """Close the log. What is pending stays in it."""
        raise NotImplementedError
