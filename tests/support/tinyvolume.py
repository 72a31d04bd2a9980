"""A volume in memory, for tests of the scheduler and the kernel layer alone.

A name that begins with `slow<ms>` parks: its first lookup for that time, and every fsync of it; with
`slow<ms>told` the kernel is told meanwhile to forget a name in the same directory. One that begins with
`held` parks in the same way until the file `go` exists, `heldsync` only its fsyncs. `boom` raises
ValueError in lookup, `boomtick` at the next tick, `hang<ms>` blocks the thread itself. Anything else behaves.
Not a model of the real volume's rules.
"""

from __future__ import annotations

import errno
import re
import stat
import threading
import time
from pathlib import Path
from typing import Any

from fsd.model.errors import PosixError
from fsd.vfs.types import Invalidation, Park, Pending, Want
from fsd.wire.messages import NO_MARK

_SLOW = re.compile(rb"slow(\d+)")
_HANG = re.compile(rb"hang(\d+)")


class TinyInode:
    def __init__(self, ino: int, mode: int, uid: int, gid: int, parent: int) -> None:
        now = time.time_ns()
        self.ino, self.mode, self.uid, self.gid, self.parent = ino, mode, uid, gid, parent
        self.nlink = 2 if stat.S_ISDIR(mode) else 1
        self.size = self.rdev = 0
        self.atime = self.mtime = self.ctime = now
        self.stamp = 1
        self.stale = False
        self.kernel: object = None
        self.data = bytearray()
        self.names: dict[bytes, int] = {}
        self.cookies: dict[bytes, int] = {}
        self.name = b""
        self.handles = 0
        self.xattrs: dict[bytes, bytes] | None = None

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class TinyCore:
    """What the kernel layer looks at in a volume's core."""

    conflicts = 0
    fence = 0
    fenced: object = None
    seq = 0
    mark = NO_MARK


class TinyVolume:
    root_ino = 7
    core = TinyCore()
    session = 1
    feed_seq = 0
    closes_alone = False
    waiting_jobs = None  # every call comes by its handler
    refused = 0  # operations the server would not take
    stuck = 0  # operations that never get there

    def __init__(self, go: Path | None = None) -> None:
        self.go = go
        self.held: list[Want] = []
        self.nodes = {7: TinyInode(7, 0o40755, 0, 0, 7)}
        self.counter = 100
        self.broken = False
        self.recovered: object = None
        self.handles: dict[int, int] = {}
        self.timers: list[tuple[float, Want]] = []
        self.known: set[tuple[int, bytes]] = set()
        self.lookups: dict[int, int] = {}
        self.invalidations: list[Invalidation] = []

    def _fail(self, number: int, what: str = "tiny") -> None:
        raise PosixError(number, what)

    def _waits(self, name: bytes, what: str) -> Want | None:
        """What a call about `name` waits for, if it does."""
        want = Want(what)
        if name.startswith(b"held"):
            self.held.append(want)
        elif slow := _SLOW.match(name):
            self.timers.append((time.monotonic() + int(slow[1]) / 1000, want))
        else:
            return None
        return want

    def node(self, ino: int) -> TinyInode:
        return self.nodes[ino]

    def _add(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> TinyInode:
        directory = self.nodes[parent]
        if name in directory.names:
            self._fail(errno.EEXIST)
        self.counter += 1
        inode = TinyInode(self.counter, mode, uid, gid, parent)
        inode.name = name
        self.nodes[inode.ino] = inode
        directory.names[name] = inode.ino
        directory.cookies[name] = inode.ino
        self.known.add((parent, name))
        return inode

    def lookup(self, parent: int, name: bytes, *caller: object) -> TinyInode | None:
        if name == b"boom":
            raise ValueError("boom, as the test asked")
        self.broken |= name == b"boomtick"
        hang = _HANG.match(name)
        if hang:
            threading.Event().wait(int(hang[1]) / 1000)
        if (
            (parent, name) not in self.known
            and not name.startswith(b"heldsync")
            and (want := self._waits(name, "a slow lookup"))
        ):
            self.known.add((parent, name))
            if name.endswith(b"told"):
                self.invalidations.append(Invalidation(parent, b"another"))
            raise Park(want)
        ino = self.nodes[parent].names.get(name)
        if ino is None:
            return None
        self.ref(ino)
        return self.nodes[ino]

    def getattr(self, ino: int) -> TinyInode:
        return self.nodes[ino]

    def setattr(self, ino: int, **changes: Any) -> TinyInode:
        inode = self.nodes[ino]
        if changes.get("mode") is not None:
            inode.mode = stat.S_IFMT(inode.mode) | changes["mode"]
        if changes.get("size") is not None:
            size = changes["size"]
            del inode.data[size:]
            inode.data.extend(bytes(size - len(inode.data)))
            inode.size = size
        inode.stamp += 1
        return inode

    def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int, umask: int = 0) -> TinyInode:
        made = self._add(parent, name, mode, uid, gid)
        self.ref(made.ino)
        return made

    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, flags: int, umask: int = 0
    ) -> tuple[TinyInode, int]:
        inode = self._add(parent, name, stat.S_IFREG | (mode & 0o7777), uid, gid)
        self.ref(inode.ino)
        return inode, self.open(inode.ino, flags)

    def unlink(self, parent: int, name: bytes) -> None:
        if self.nodes[parent].names.pop(name, None) is None:
            self._fail(errno.ENOENT)

    def rmdir(self, parent: int, name: bytes) -> None:
        self.unlink(parent, name)

    def open(self, ino: int, flags: int, *caller: object) -> int:
        self.counter += 1
        self.handles[self.counter] = ino
        return self.counter

    opendir_flags = 0

    def pages_kept(self, fh: int) -> bool:
        return False

    def at_hand(self, fh: int, most: int, *, kept: bool) -> bytes | None:
        return None

    def needs_flush(self, fh: int) -> bool:
        return True

    def opendir(self, ino: int, *caller: object) -> int:
        return self.open(ino, 0)

    def read(self, fh: int, offset: int, size: int) -> bytes:
        return bytes(self.nodes[self.handles[fh]].data[offset : offset + size])

    def write(
        self,
        fh: int,
        offset: int,
        data: bytes,
        *caller: object,
        mapped: bool = False,
        appends: bool | None = None,
    ) -> int:
        inode = self.nodes[self.handles[fh]]
        inode.data.extend(bytes(max(0, offset - len(inode.data))))
        inode.data[offset : offset + len(data)] = data
        inode.size = len(inode.data)
        inode.mtime += 1
        inode.stamp += 1
        return len(data)

    def flush(self, fh: int) -> None:
        self.handles[fh]

    def fsync(self, fh: int, datasync: bool) -> None:
        if want := self._waits(self.nodes[self.handles[fh]].name, "a slow fsync"):
            raise Park(want, again=False)

    def fsyncdir(self, fh: int) -> None:
        self.handles[fh]

    def release(self, fh: int) -> None:
        del self.handles[fh]

    def releasedir(self, fh: int) -> None:
        del self.handles[fh]

    def readdir(self, fh: int, cookie: int, limit: int = 1000) -> list[tuple[bytes, TinyInode, int]]:
        directory = self.nodes[self.handles[fh]]
        found = [
            (name, self.nodes[ino], directory.cookies[name])
            for name, ino in directory.names.items()
            if directory.cookies[name] > cookie
        ]
        return sorted(found, key=lambda row: row[2])[:limit]

    def ref(self, ino: int) -> None:
        self.lookups[ino] = self.lookups.get(ino, 0) + 1

    def forget(self, ino: int, nlookup: int) -> None:
        self.lookups[ino] = self.lookups.get(ino, 0) - nlookup

    def getxattr(self, ino: int, name: bytes) -> bytes:
        raise PosixError(errno.ENODATA, "no such attribute")

    def listxattr(self, ino: int, uid: int = 0) -> list[bytes]:
        return []

    def statfs(self) -> dict[str, int]:
        """f_files is how many inodes the kernel holds, f_ffree those whose count went below nothing."""
        held = sum(count > 0 for count in self.lookups.values())
        below = sum(count < 0 for count in self.lookups.values())
        sizes = {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1000, "f_bfree": 500, "f_namemax": 255}
        return {**sizes, "f_files": held, "f_ffree": below}

    def jobs(self) -> list[Any]:
        return []

    def finish(self, job: Any, result: object) -> None:
        raise AssertionError("no job was given out")

    def done(self, want: Want) -> bool:
        if want.error is not None:
            raise want.error
        return want.finished

    def extend(self, seconds: float) -> None:
        return

    def tick(self, now: float) -> None:
        if self.broken:
            raise ValueError("boom, as the test asked")
        for at, want in self.timers:
            if now >= at:
                want.end()
        self.timers = [(at, want) for at, want in self.timers if now < at]
        if self.held and self.go is not None and self.go.exists():
            for want in self.held:
                want.end()
            self.held.clear()

    def kernel_holds(self) -> list[Invalidation]:
        return []

    def still_absent(self, told: list[Invalidation]) -> list[Invalidation]:
        return told

    def not_made(self, told: list[Invalidation]) -> list[Invalidation]:
        return told

    def take_invalidations(self) -> list[Invalidation]:
        found, self.invalidations = self.invalidations, []
        return found

    def next_deadline(self) -> float | None:
        return min((at for at, _ in self.timers), default=None)

    def sync(self) -> None:
        """Nothing is on a disk here."""

    def barrier(self) -> Want:
        want = Want("barrier")
        if not self.stuck:
            want.end()
        return want

    def feed_silent(self, silent: bool) -> None:
        self.silent = silent

    def status(self) -> dict[str, Any]:
        return {"tiny": True, "refused": self.refused, "fs_seq": self.feed_seq}

    def pending(self) -> Pending:
        return Pending(self.refused + self.stuck, 0, 0, 0.0, b"", "")

    def close(self) -> None:
        self.handles.clear()
