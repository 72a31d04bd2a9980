"""Bringing a changed local tree back: what differs from what was pulled, each against its base.

Every change is conditional on the revision that was pulled (`Base.revision`). Content is never dropped: a
file that somebody else changed too goes beside it as `NAME.conflict-<label>-<time>`, one that was removed
comes back, and a removal of what the other changed loses. `base` is updated as things arrive, so that a push
that was cut can go on.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple

from fsd.client.files import Files, JsonObject, join, raw_target
from fsd.client.pool import Workers
from fsd.client.sources import local_error, told
from fsd.client.transfer import FATAL, CopyOptions, CopyResult, Failure, Meter, stat_or_none
from fsd.client.upload import put_file
from fsd.model.errors import Conflict, FsdError, NotFound
from fsd.model.limits import BESIDE_TRIES, COPY_PARALLEL, LISTED_MAX
from fsd.model.names import conflict_name, show
from fsd.model.plain import dataclass, field

FILE, DIRECTORY, SYMLINK = "file", "directory", "symlink"


class Base(NamedTuple):
    """A pulled entry: its kind and revision on the server, and the local `signature` it had then."""

    kind: str
    revision: str
    signature: tuple[object, ...]


class Clash(NamedTuple):
    """A change that met another's. `kept_as` is where the local version went; empty: `reason` says why
    nothing was done (a removal of what was changed)."""

    path: str
    kept_as: str
    reason: str


@dataclass(slots=True)
class Pushed:
    """What a push did so far."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    removed: int = 0
    attributes: int = 0
    bytes: int = 0
    conflicts: list[Clash] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    not_pushed: list[str] = field(default_factory=list)

    def to_json(self) -> JsonObject:
        return {
            "pushed": {
                "files": self.files,
                "directories": self.directories,
                "symlinks": self.symlinks,
                "removed": self.removed,
                "attributes": self.attributes,
                "bytes": self.bytes,
            },
            "conflicts": [one._asdict() for one in self.conflicts],
            "failed": [{"path": f.path, "code": f.code, "message": f.message} for f in self.failed],
            "not_pushed": self.not_pushed,
        }


def signature(path: bytes) -> tuple[object, ...]:
    """What tells whether a local entry changed: content by its times, size and inode, and the mode."""
    with told(path):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return (SYMLINK, os.readlink(path))
        if stat.S_ISDIR(found.st_mode):
            return (DIRECTORY, stat.S_IMODE(found.st_mode))
        return (
            FILE,
            stat.S_IMODE(found.st_mode),
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )


def kind_here(mode: int) -> str | None:
    """None for what cannot be pushed (sockets, fifos, devices)."""
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISDIR(mode):
        return DIRECTORY
    return SYMLINK if stat.S_ISLNK(mode) else None


def scan(tree: bytes) -> dict[bytes, int]:
    """Every entry below the local `tree` with its mode, parents before children. What goes away meanwhile is
    left out."""
    found: dict[bytes, int] = {}
    pending = [b""]
    while pending:
        below = pending.pop()
        directory = os.path.join(tree, below)
        try:
            with told(directory), os.scandir(directory) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except NotFound:
            if not below:
                raise
            continue
        for entry in entries:
            path = os.path.join(below, entry.name)
            try:
                with told(entry.path):
                    mode = entry.stat(follow_symlinks=False).st_mode
            except NotFound:
                continue
            found[path] = mode
            if stat.S_ISDIR(mode):
                pending.append(path)
    return found


def differs(tree: bytes, base: dict[bytes, Base]) -> bool:
    """Whether the local `tree` is not what was pushed or pulled last: somebody writes there."""
    here = {below for below, mode in scan(tree).items() if kind_here(mode) is not None}
    try:
        return here != set(base) or any(
            one.signature != signature(os.path.join(tree, below)) for below, one in base.items()
        )
    except NotFound:
        return True


def _mode_of(sign: tuple[object, ...]) -> int:
    """The permissions in a file's signature."""
    mode = sign[1]
    assert isinstance(mode, int), "of a link"
    return mode


def _only_mode(known: Base, sign: tuple[object, ...]) -> bool:
    """Whether the file's permissions changed and nothing tells of its content."""
    before = known.signature
    return known.kind == FILE and before[1] != sign[1] and before[2:5] == sign[2:5]


def push(
    files: Files,
    remote: bytes,
    tree: bytes,
    base: dict[bytes, Base],
    moved: dict[bytes, bytes],
    label: str,
    done: Pushed,
) -> None:
    """Push the local `tree` to the remote directory; see the module. `moved` are the entries that are under
    another name there, by what an earlier push of the tree and this one met. Raises what concerns every file
    (`transfer.FATAL`); what concerns one is in `done.failed`."""
    _Push(files, remote, tree, base, moved, label, done).run()


class _Push:
    def __init__(
        self,
        files: Files,
        remote: bytes,
        tree: bytes,
        base: dict[bytes, Base],
        moved: dict[bytes, bytes],
        label: str,
        done: Pushed,
    ) -> None:
        self.files, self.remote, self.tree = files, remote, tree
        self.base, self.moved, self.label, self.done = base, moved, label, done
        self.lock = threading.Lock()
        self.copied = CopyResult("push", show(tree), show(remote))
        self.meter = Meter(self.copied)

    def run(self) -> None:
        here = scan(self.tree)
        self.done.not_pushed.clear()
        replaced = [b for b, one in self.base.items() if b in here and kind_here(here[b]) != one.kind]
        for below in replaced:
            self._remove_tree(below)
        if here or self.base:
            self.files.mkdir(self.remote, parents=True)
        with Workers(COPY_PARALLEL) as workers:
            self.meter.stopping = workers.stopping
            for below, mode in here.items():
                self._entry(workers, below, mode)
        gone = sorted((b for b in self.base if b not in here), key=lambda b: (-b.count(b"/"), b))
        for below in gone:
            self._try(below, lambda below=below: self._remove(below))  # type: ignore[misc]
        self.done.bytes += self.copied.bytes

    def _entry(self, workers: Workers, below: bytes, mode: int) -> None:
        kind = kind_here(mode)
        known = self.base.get(below)
        local = os.path.join(self.tree, below)
        if kind is None:
            self.done.not_pushed.append(show(below))
        elif kind == DIRECTORY:
            if known is None or known.signature != signature(local):
                self._try(below, lambda: self._directory(below, mode, known))
        elif known is None or known.signature != signature(local):
            work = self._file if kind == FILE else self._symlink
            workers.submit(lambda: self._try(below, lambda: work(below, known)))

    def _try(self, below: bytes, job: Callable[[], None]) -> None:
        try:
            job()
        except FATAL:
            raise
        except FsdError as exc:
            if isinstance(exc, NotFound) and not os.path.lexists(os.path.join(self.tree, below)):
                return  # it went away here after the scan: as if it had before
            with self.lock:
                self.done.failed.append(Failure(show(below), exc.code, exc.message))

    def _there(self, below: bytes) -> bytes:
        """Where the local entry is on the server."""
        parts = below.split(b"/")
        for count in range(len(parts), 0, -1):
            to = self.moved.get(b"/".join(parts[:count]))
            if to is not None:
                return b"/".join([to, *parts[count:]])
        return join(self.remote, below)

    def _arrived(self, below: bytes, kind: str, revision: str, what: str, sign: tuple[object, ...]) -> None:
        with self.lock:
            self.base[below] = Base(kind, revision, sign)
            setattr(self.done, what, getattr(self.done, what) + 1)

    # -- one entry -----------------------------------------------------------------------------------

    def _file(self, below: bytes, known: Base | None) -> None:
        local, goal = os.path.join(self.tree, below), self._there(below)
        sign = signature(local)
        if known is not None and _only_mode(known, sign):
            # The last one wins, whoever changed the content.
            self.files.chmod(goal, _mode_of(sign))
            self._arrived(below, FILE, known.revision, "attributes", sign)
            return
        match = known.revision if known is not None and known.kind == FILE else None
        try:
            revision = self._put(local, goal, match)
        except Conflict as exc:
            brought = self._brought(local, goal, sign)
            if brought is not None:
                revision = brought
            elif match is not None and exc.details.get("revision", 0) is None:
                goal, revision = self._beside(goal, lambda at: self._put(local, at, None), first=goal)
            else:
                goal, revision = self._beside(goal, lambda at: self._put(local, at, None))
            if brought is None:
                self._clash(below, goal, exc.message)
        self._arrived(below, FILE, revision, "files", sign)

    def _put(self, local: bytes, goal: bytes, match: str | None) -> str:
        options = CopyOptions(overwrite=match is not None, if_match=match)
        return put_file(self.files, local, goal, options, self.meter)

    def _brought(self, local: bytes, goal: bytes, sign: tuple[object, ...]) -> str | None:
        """The revision of the file at `goal` where it is the local one to the byte, the mode and the
        nanosecond: a push that was killed before it had noted so brought it. None: it is another's."""
        there = stat_or_none(self.files, goal)
        if there is None or there["kind"] != FILE:
            return None
        if (int(there["mode"], 8), there["size_bytes"], there["mtime_ns"]) != (sign[1], sign[3], sign[4]):
            return None
        reading = self.files.reading(goal)
        try:
            with told(local), open(local, "rb") as here:
                same = all(here.read(len(piece)) == piece for piece in reading.pieces()) and not here.read(1)
        except Conflict:
            return None  # it is being changed
        return reading.revision if same and signature(local) == sign else None

    def _symlink(self, below: bytes, known: Base | None) -> None:
        local, goal = os.path.join(self.tree, below), self._there(below)
        try:
            target = os.readlink(local)
        except OSError as exc:
            raise local_error(exc, local) from exc
        match = known.revision if known is not None and known.kind == SYMLINK else None

        def make(at: bytes) -> str:
            self.files.symlink(target, at)
            return str(self.files.stat(at)["revision"])

        try:
            self.files.symlink(target, goal, overwrite=match is not None, if_match=match)
            revision = str(self.files.stat(goal)["revision"])
        except FsdError as exc:
            if exc.status != 409:
                raise
            there = stat_or_none(self.files, goal)
            if there is not None and there["kind"] == SYMLINK and raw_target(there) == target:
                revision = str(there["revision"])
            else:
                goal, revision = self._beside(goal, make, first=None if there else goal)
                self._clash(below, goal, exc.message)
        self._arrived(below, SYMLINK, revision, "symlinks", (SYMLINK, target))

    def _directory(self, below: bytes, mode: int, known: Base | None) -> None:
        goal = self._there(below)
        sign = (DIRECTORY, stat.S_IMODE(mode))
        if known is not None and known.kind == DIRECTORY:
            self.files.chmod(goal, stat.S_IMODE(mode))
            self._arrived(below, DIRECTORY, known.revision, "attributes", sign)
            return
        with told(below):
            local = os.lstat(os.path.join(self.tree, below))
        owner = (local.st_uid, local.st_gid)

        def make(at: bytes) -> str:
            self.files.mkdir(at, mode=stat.S_IMODE(mode), owner=owner)
            return ""

        try:
            self.files.mkdir(goal, mode=stat.S_IMODE(mode), parents=True, owner=owner)
        except FsdError as exc:
            if exc.details.get("errno") not in ("EEXIST", "ENOTDIR"):
                raise
            goal, _ = self._beside(goal, make)
            self._clash(below, goal, exc.message)
        self._arrived(below, DIRECTORY, "", "directories", sign)

    def _beside(
        self, goal: bytes, make: Callable[[bytes], str], *, first: bytes | None = None
    ) -> tuple[bytes, str]:
        """Make it under a conflict name beside `goal` (or, before that, at `first`)."""
        parent, name = os.path.split(goal)
        now = self.files.http.host.wall_ns()
        names = [join(parent, conflict_name(name, self.label, now, at)) for at in range(BESIDE_TRIES)]
        for at in [first, *names] if first is not None else names:
            try:
                return at, make(at)
            except FsdError as exc:
                if exc.details.get("errno") != "EEXIST":
                    raise
        raise Conflict(f"no free conflict name beside {show(goal)}")

    def _clash(self, below: bytes, kept_as: bytes, reason: str) -> None:
        """From now on it is `kept_as`, whatever is done to it here: the name is the other's."""
        goal = join(self.remote, below)
        if kept_as != goal:
            try:
                self.files.note_conflict(kept_as, goal, self.label[:LISTED_MAX], reason[:LISTED_MAX])
            except FsdError as exc:  # the copy is there, and told; only the server's list lacks it
                reason += f"; not in the list of `fsd conflicts`: {exc.message}"
        with self.lock:
            self.moved[below] = kept_as
            self.done.conflicts.append(Clash(show(below), show(kept_as), reason))

    # -- removals ------------------------------------------------------------------------------------

    def _remove_tree(self, top: bytes) -> None:
        """Remove `top` and what was pulled below it, since something of another kind takes its place."""
        below = [b for b in self.base if b == top or b.startswith(top + b"/")]
        for one in sorted(below, key=lambda b: (-b.count(b"/"), b)):
            self._try(one, lambda one=one: self._remove(one))  # type: ignore[misc]

    def _remove(self, below: bytes) -> None:
        known = self.base[below]
        match = known.revision if known.kind != DIRECTORY else None
        try:
            self.files.remove(self._there(below), if_match=match or None)
        except NotFound:
            pass  # the other removed it too: what was wanted holds
        except Conflict as exc:
            if exc.details.get("revision", 0) is not None:
                self._keep(below, exc.message)
        except FsdError as exc:
            if exc.details.get("errno") not in ("ENOTEMPTY", "ENOTDIR", "EISDIR"):
                raise
            self._keep(below, exc.message)
        else:
            with self.lock:
                self.done.removed += 1
        with self.lock:
            self.base.pop(below, None)
            self.moved.pop(below, None)

    def _keep(self, below: bytes, reason: str) -> None:
        with self.lock:
            self.done.conflicts.append(Clash(show(below), "", f"not removed: {reason}"))
