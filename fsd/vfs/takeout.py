"""Taking files out of a log that is not to be sent: its mount lost the writer lease, its token is not taken
any more, or its server is gone, and people decide.

The log stays as it is. The caller holds the state directory's lock (`open.prepare`). Blocks (network, disk):
what a changed file has of the server's content is fetched from there, where it can be.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fsd.host.files import fsync_dir, make_dirs_durable, write_all
from fsd.host.seam import Host
from fsd.model.errors import Conflict, IntegrityError
from fsd.model.limits import MIB
from fsd.model.names import conflict_name
from fsd.model.ops import RENAME_EXCHANGE, Create, Op, Rename, Rmdir, Unlink
from fsd.model.plain import dataclass, field
from fsd.remote.api import Remote
from fsd.vfs.aside import put_aside
from fsd.vfs.content import Flight
from fsd.vfs.core import Core
from fsd.vfs.drive import Driver
from fsd.vfs.log import Log
from fsd.vfs.node import Inode
from fsd.vfs.records import Flown, Reserved
from fsd.vfs.recover import refly, stub
from fsd.vfs.replay import Replay
from fsd.vfs.types import Cache, Park, VolumeOptions
from fsd.vfs.volume import Volume

Paths = Callable[[], dict[int, bytes]]


@dataclass(slots=True)
class Taken:
    """What was written below the target. `names` operations were about names and attributes alone (renames,
    removals, modes) or made fifos, sockets and devices, which are no files to take out. `incomplete` files
    hold zeros where only the server has the content."""

    files: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    names: int = 0


def take_out(
    options: VolumeOptions, host: Host, remote: Remote | None, cache: Cache, paths: Paths, target: Path
) -> Taken:
    """Write what the log would make of each file it changed, and the directories and symlinks it makes, below
    `target`. `paths` gives the paths of the server's directories by number; asked once, and only when needed.
    Without a `remote` nothing is asked of the server: files go as far as the log holds them. What is there
    already is never replaced: `Conflict`. Durable on return."""
    log = Log.reopen(options.state_dir, host, segment_size=options.segment_size)
    try:
        replay = Replay(log, host, partial(_put_aside, options, log, host))
        replay.run()
        return _TakeOut(options, host, log, replay, paths, target).run(remote, cache)
    finally:
        log.abandon()


def _put_aside(options: VolumeOptions, log: Log, host: Host) -> None:
    """A copy of a damaged log, before anything of it is changed."""
    put_aside(options.state_dir, log, host)


def drop(options: VolumeOptions, host: Host) -> None:
    """The log goes, with everything only it had."""
    Log.reopen(options.state_dir, host, segment_size=options.segment_size).retire()


class _TakeOut:
    def __init__(
        self, options: VolumeOptions, host: Host, log: Log, replay: Replay, paths: Paths, target: Path
    ) -> None:
        self.replay, self.target = replay, target
        self.core = Core(options, host, log)
        self.core.recovering = True
        self.volume = Volume(self.core)
        self.made = {op.ino: op for op in replay.ops.values() if isinstance(op, Create)}
        self.names = _names([replay.ops[opno] for opno in sorted(replay.ops)])
        self._paths = paths
        self._known: dict[int, bytes] | None = None
        self._by_path: dict[bytes, int] | None = None
        self._entered: dict[Path, None] = {}  # directories with new entries, made durable once, at the end
        self.taken = Taken()

    def run(self, remote: Remote | None, cache: Cache) -> Taken:
        replay, flights = self.replay, dict[int, Flight]()
        nodes: list[Inode] = []
        for ino, past in replay.files.items():
            if past.where is not None and (past.changes or replay.contents(ino) or ino in self.made):
                nodes.append(stub(self.core, ino, past))
                refly(self.volume, replay, ino, past, flights)
        driver = None if remote is None else Driver(self.volume, remote, cache)
        directories, files, links = self.places(nodes)
        for directory in directories:
            _make(directory)
        for node, place in files:
            self.taken.files.append(str(place))
            if not self.write(driver, node, place):
                self.taken.incomplete.append(str(place))
        for target, link in links:  # last: nothing is written through one
            self.enter(link.parent)
            try:
                os.symlink(target, link)
            except FileExistsError as exc:
                raise _there(link) from exc
        for directory in self._entered:
            fsync_dir(directory)
        numbers = {flight.opno for flight in flights.values()}
        self.taken.names = sum(
            1 for opno, op in replay.ops.items() if opno not in numbers and not _taken_out(op)
        )
        return self.taken

    def places(
        self, nodes: list[Inode]
    ) -> tuple[list[Path], list[tuple[Inode, Path]], list[tuple[bytes, Path]]]:
        """Where the directories, files and links go, each to a place of its own. What the server tells of
        directories may be newer than the log: of two that come to one place the later gets a name beside."""
        directories: list[Path] = []
        links: list[tuple[bytes, Path]] = []
        needed: set[Path] = set()
        for ino, where in self.names.items():
            op = self.made.get(ino)
            if op is not None and stat.S_ISDIR(op.mode):
                directories.append(self.place(*where))
            elif op is not None and op.target is not None:
                links.append((op.target, self.place(*where)))
        files = [(node, self.place(*node.where)) for node in nodes if node.where is not None]
        for place in (*directories, *(at.parent for _, at in files), *(at.parent for _, at in links)):
            needed.update((place, *place.parents))

        def own(place: Path, time: int) -> Path:
            at, attempt = place, 0
            while at in needed:
                name = conflict_name(os.fsencode(place.name), self.core.options.hostname, time, attempt)
                at, attempt = place.with_name(os.fsdecode(name)), attempt + 1
            needed.add(at)
            return at

        placed = [(node, own(at, node.mtime)) for node, at in files]
        return directories, placed, [(target, own(at, self.replay.newest)) for target, at in links]

    def place(self, parent: int, name: bytes) -> Path:
        """Where an entry of the directory `parent` goes."""
        parts: list[bytes] = [name]
        seen: set[int] = set()
        while parent not in seen:
            seen.add(parent)
            if parent in self.names:
                parent, above = self.names[parent]
                parts.append(above)
            else:
                parent, between = self.moved_above(parent)
                parts += between
        path = self.known().get(self.replay.wire.out(parent))
        top = path.split(b"/") if path is not None else [b"directory-%x" % parent]
        clean = [part for part in (*top, *reversed(parts)) if part not in (b"", b".", b"..")]
        return self.target.joinpath(*map(os.fsdecode, clean))

    def moved_above(self, directory: int) -> tuple[int, list[bytes]]:
        """The lowest directory above one of the server's that the operations move, with the names from it
        down, the last first; else the directory itself."""
        if self._by_path is None:
            self._by_path = {path: ino for ino, path in self.known().items()}
        path, names = self.known().get(self.replay.wire.out(directory), b"").rstrip(b"/"), list[bytes]()
        while path:
            path, _, name = path.rpartition(b"/")
            names.append(name)
            above = self._by_path.get(path or b"/")
            local = self.replay.wire.known(above) if above is not None else None
            if local in self.names:
                return local, names
        return directory, []

    def enter(self, directory: Path) -> None:
        """Have `directory`, for an entry in it."""
        if directory not in self._entered:
            _make(directory)
            self._entered[directory] = None

    def known(self) -> dict[int, bytes]:
        if self._known is None:
            self._known = self._paths()
        return self._known

    def write(self, driver: Driver | None, node: Inode, place: Path) -> bool:
        """The file, as it was to become; False: what only the server has is missing."""
        volume, whole = self.volume, True
        self.enter(place.parent)
        try:
            fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as exc:
            raise _there(place) from exc
        handle = volume.open(node.ino, os.O_RDONLY)
        try:
            for at in range(0, node.size, MIB):
                read = partial(volume.read, handle, at, MIB)
                try:
                    data = read() if driver is None else driver.call(read)
                except (Park, IntegrityError):
                    whole = False
                    data = self.changed(node, at, min(MIB, node.size - at))
                write_all(fd, memoryview(data))
            os.fchmod(fd, stat.S_IMODE(node.mode) & 0o777)
            os.utime(fd, ns=(node.mtime, node.mtime))
            os.fsync(fd)
        finally:
            os.close(fd)
            volume.release(handle)
        return whole

    def changed(self, node: Inode, offset: int, size: int) -> bytes:
        """What the log holds of a piece of the file, between zeros."""
        out = bytearray(size)
        for start, end, pos, ref in node.file().extents.runs(offset, offset + size):
            if ref is None:
                out[start - offset : end - offset] = self.core.log.rest(pos, end - start)
        return bytes(out)


def _names(ops: list[Op | Flown | Reserved]) -> dict[int, tuple[int, bytes]]:
    """Where what the operations make or move is in the end, by inode: directory and name. What was removed is
    not."""
    found: dict[int, tuple[int, bytes]] = {}
    for op in ops:
        if isinstance(op, Create):
            found[op.ino] = (op.parent, op.name)
        elif isinstance(op, Rename):
            if op.flags & RENAME_EXCHANGE:
                found[op.over] = (op.parent, op.name)
            elif found.get(op.over) == (op.new_parent, op.new_name):
                del found[op.over]
            found[op.ino] = (op.new_parent, op.new_name)
        elif isinstance(op, Unlink | Rmdir) and found.get(op.ino) == (op.parent, op.name):
            del found[op.ino]
    return found


def _taken_out(op: Op | Flown | Reserved) -> bool:
    """Whether what the operation does is among what is written below the target."""
    return isinstance(op, Create) and (stat.S_IFMT(op.mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))


def _make(directory: Path) -> None:
    try:
        make_dirs_durable(directory, 0o777)
    except (FileExistsError, NotADirectoryError) as exc:
        raise _there(directory) from exc


def _there(place: Path) -> Conflict:
    return Conflict(f"{place} exists", hint="export into an empty directory")
