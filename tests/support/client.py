"""A client in one process with its server, with a clock, a network and a disk that a test bends at will."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import FsdError
from fsd.model.limits import INODES_MAX
from fsd.vfs.open import open_volume
from fsd.vfs.types import Job, Park, VolumeOptions, Want
from fsd.vfs.volume import Volume
from support.bench import Bench
from support.inproc import InProcess, NoCache

T = TypeVar("T")


class Clock:
    """Time that moves only when told to, and a machine that can be booted again."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.wall = 1_700_000_000_000_000_000
        self.boot = "boot-0"
        self.crash_at: Callable[[str], None] = lambda name: None

    def wall_ns(self) -> int:
        self.wall += 1_000
        return self.wall

    def monotonic(self) -> float:
        """A little later each time it is asked, so that whoever waits by it gets there."""
        self.seconds += 0.0001
        return self.seconds

    def host(self, rng: random.Random) -> Host:
        return Host(
            wall_ns=self.wall_ns,
            monotonic=self.monotonic,
            token_bytes=rng.randbytes,
            boot_id=lambda: self.boot,
            crash_point=lambda name: self.crash_at(name),
        )


class Net:
    """Random faults of the network; `cut` refuses the next calls."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cut = 0
        self.faulty = True

    def __call__(self, route: str) -> str:
        if self.cut > 0:
            self.cut -= 1
            return "refuse"
        if not self.faulty:
            return "pass"
        roll = self.rng.random()
        if roll < 0.05:
            return "refuse"
        if roll < 0.10 and route != "session":
            return "lose"
        if roll < 0.15 and route != "session":
            return "double"
        return "pass"


def server_tree(bench: Bench, ino: int = ROOT_INO, path: str = "") -> dict[str, tuple[Any, ...]]:
    """The same as `Tree.walk`, from the server."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, entry in bench.entries(ino).items():
        at, attr = f"{path}/{name.decode()}", entry.attr
        xattrs = tuple(sorted((attr.xattrs or {}).items()))
        if attr.is_dir:
            found[at] = ("dir", attr.mode & 0o7777, attr.mtime, xattrs)
            found.update(server_tree(bench, attr.ino, at))
        elif attr.is_file:
            data = bench.read(attr)
            found[at] = ("file", data, attr.mode & 0o7777, attr.nlink, attr.mtime, xattrs)
        else:
            found[at] = ("link", attr.target)
    return found


class Client:
    """One mount driven by hand: its jobs run and their replies arrive in any order."""

    def __init__(
        self, directory: Path, bench: Bench, clock: Clock, rng: random.Random, name: str = "sandbox"
    ) -> None:
        self.rng = rng
        self.clock = clock
        self.host = clock.host(rng)
        self.bench = bench
        self.net = Net(rng)
        self.remote = InProcess(bench.service, bench.fs, self.net)
        self.cache = NoCache()
        self.delayed: list[tuple[Job, object]] = []
        self.waiting: list[Job] = []
        self.recoveries = 0
        self.options = VolumeOptions(
            state_dir=directory,
            mount_id=name,
            hostname=name,
            path="/mnt",
            io_timeout=0,
            buffer_size=1 << 34,
            segment_size=rng.choice((16 << 10, 256 << 10, 64 << 20)),
        )
        self.knows_root = False  # a mount knows what it shows at its top; most tests begin without
        self.inodes_max = rng.choice((5, INODES_MAX))  # few: what is cold is forgotten all the time
        self.volume: Volume

    def open(self) -> None:
        """Mount, with a network that behaves: a mount without a server is another test."""
        faulty, self.net.faulty = self.net.faulty, False
        cut, self.net.cut = self.net.cut, 0
        try:
            self.volume = open_volume(self.options, self.host, self.remote, self.cache)
            self.volume.evictor.limit = self.inodes_max
            if not self.knows_root:
                self._forget_root()
        finally:
            self.net.faulty, self.net.cut = faulty, cut
        if self.volume.recovered is not None:
            self.recoveries += 1
        self.delayed, self.waiting = [], []

    def _forget_root(self) -> None:
        nodes, root = self.volume.core.nodes, self.volume.node(self.volume.root_ino)
        for node in {nodes.by_ino[ino] for ino in root.entries.values() if ino is not None}:
            nodes.drop(node)  # one may have several names
        root.entries.clear()
        root.complete = False

    def kill(self) -> None:
        """The daemon dies: SIGKILL. Some of its requests were on their way."""
        for job in self.waiting:
            if self.rng.random() < 0.5:
                self.run(job)
        self.volume.core.log.abandon()
        assert self.volume.lock is not None
        os.close(self.volume.lock)

    def run(self, job: Job) -> object:
        try:
            return job.run(self.remote, self.cache)
        except FsdError as exc:
            return exc

    def run_some(self, most: int) -> None:
        """Let the network make some progress, replies in any order."""
        for _ in range(most):
            self.waiting.extend(self.volume.jobs())
            if self.waiting and (not self.delayed or self.rng.random() < 0.6):
                job = self.waiting.pop(self.rng.randrange(len(self.waiting)))
                self.delayed.append((job, self.run(job)))
            elif self.delayed:
                job, result = self.delayed.pop(self.rng.randrange(len(self.delayed)))
                self.volume.finish(job, result)
            else:
                return

    def until(self, want: Want, limit: int = 20_000) -> None:
        for _ in range(limit):
            if self.volume.done(want):
                return
            before = (len(self.delayed), len(self.waiting))
            self.run_some(1)
            if before == (0, 0) == (len(self.delayed), len(self.waiting)):
                deadline = self.volume.next_deadline()
                self.clock.seconds = max(self.clock.seconds + 0.001, deadline or self.clock.seconds)
                self.volume.tick(self.clock.seconds)
        raise AssertionError(f"never ended: {want.what}; {self.volume.status()}")

    def number(self, parent: int, name: bytes) -> int:
        """The inode number of a name that is there."""
        found = self.call(lambda v: v.lookup(parent, name))
        assert found is not None, f"there is no {name!r}"
        return found.ino

    def call(self, fn: Callable[[Volume], T]) -> T:
        while True:
            try:
                return fn(self.volume)
            except Park as park:
                self.until(park.want)
                if not park.again:
                    return park.want.result  # type: ignore[return-value]

    def put(
        self,
        where: int,
        name: bytes,
        data: bytes,
        *,
        offset: int | None = None,
        truncate: bool = False,
        sync: bool = False,
    ) -> int:
        """Open or make a file, write at `offset` (None: its end), fsync if asked, close. Its inode number."""
        found = self.call(lambda v: v.lookup(where, name))
        if found is None:
            node, fh = self.call(lambda v: v.create(where, name, 0o644, 0, 0, os.O_RDWR))
        else:
            node = found
            flags = os.O_RDWR | (os.O_TRUNC if truncate else 0)
            fh = self.call(lambda v: v.open(node.ino, flags))
        at = node.size if offset is None else offset
        self.call(lambda v: v.write(fh, at, data))
        if sync:
            self.call(lambda v: v.fsync(fh, False))
        self.call(lambda v: v.flush(fh))
        self.call(lambda v: v.release(fh))
        return node.ino

    def feed(self) -> None:
        """Take in what others changed."""
        volume, feed = self.volume, self.remote.service.feed
        page = feed.page(self.remote.fs, volume.feed_seq, 0.0, volume.root_ino, volume.core.mark)
        volume.apply_feed(page)

    def view(self) -> dict[str, tuple[Any, ...]]:
        """The tree as programs see it, in the form of `Tree.walk`."""
        found: dict[str, tuple[Any, ...]] = {}
        self._visit(self.volume.root_ino, "", found)
        return found

    def _visit(self, ino: int, path: str, found: dict[str, tuple[Any, ...]]) -> None:
        for name, child in self.listing(ino):
            at = f"{path}/{name.decode()}"
            node = self.call(lambda v, i=child: v.getattr(i))  # type: ignore[misc]
            xattrs = tuple(sorted((node.xattrs or {}).items()))
            if node.is_dir:
                found[at] = ("dir", node.mode & 0o7777, node.mtime, xattrs)
                self._visit(node.ino, at, found)
            elif node.is_file:
                data = self.read_all(node.ino)
                found[at] = ("file", data, node.mode & 0o7777, node.nlink, node.mtime, xattrs)
            else:
                found[at] = ("link", self.volume.readlink(node.ino))

    def listing(self, ino: int) -> list[tuple[bytes, int]]:
        fh = self.call(lambda v: v.opendir(ino))
        rows: list[tuple[bytes, int]] = []
        cookie = 0
        while True:
            page = self.call(lambda v, c=cookie: v.readdir(fh, c, 3))  # type: ignore[misc]
            if not page:
                break
            for name, node, _ in page:
                self.volume.ref(node.ino)
                rows.append((name, node.ino))
            cookie = page[-1][2]
        self.call(lambda v: v.releasedir(fh))
        return rows

    def read_all(self, ino: int) -> bytes:
        fh = self.call(lambda v: v.open(ino, os.O_RDONLY))
        data = self.call(lambda v: v.read(fh, 0, 1 << 30))
        self.call(lambda v: v.release(fh))
        return data

    def snapshot_disk(self, to: Path) -> None:
        """A copy of the mount's state, as a clone of the machine gets it."""
        shutil.copytree(self.options.state_dir, to)


def assert_same(want: dict[str, tuple[Any, ...]], got: dict[str, tuple[Any, ...]]) -> None:
    """Equal, or say where not, shortly."""
    if want == got:
        return
    lines = [f"missing {p}" for p in sorted(want.keys() - got.keys())]
    lines += [f"too many {p}" for p in sorted(got.keys() - want.keys())]
    for path in sorted(want.keys() & got.keys()):
        if want[path] != got[path]:
            a, b = want[path], got[path]
            for x, y in zip(a, b):
                if x != y:
                    lines.append(f"{path}: want {short(x)} got {short(y)}")
    raise AssertionError("\n".join(lines))


def short(value: Any) -> str:
    if isinstance(value, bytes) and len(value) > 40:
        return f"{len(value)} bytes {value[:12].hex()}…{value[-12:].hex()}"
    return repr(value)
