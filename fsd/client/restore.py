"""The files of a checkpoint into a local directory.

Everything is checked before anything is touched: the whole manifest, the destination, and every content,
which is fetched into a directory of its own inside the destination and verified there. Then what is not
wanted goes, directories, files and at last links are made. Each step goes by open directories, component by
component, and follows no link, so that neither a manifest nor somebody who changes the tree meanwhile leads
it out of the destination.

What the policy does not cover (excluded, or not included) is neither looked into nor touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from fsd.client.manifest import DIR, FILE, LINK, Entry, Fetch, fetched
from fsd.client.policy import Policy
from fsd.client.pool import Workers
from fsd.client.sources import told
from fsd.host.files import write_all
from fsd.host.seam import Host
from fsd.model.errors import Conflict, InvalidBlob, InvalidPath, InvalidWorkspace, UnsupportedEntry
from fsd.model.limits import CAPTURE_DEPTH_MAX, COPY_PARALLEL, MIB
from fsd.model.plain import dataclass
from fsd.model.trees import parents

STAGING: Final = ".fsd-restore-"  # and random digits: where contents are verified
HOW: Final = "--force replaces what is there by the checkpoint"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_LINK: Final = "link"  # among contents, whose names are hashes
_OPEN_MAX: Final = 64  # directories kept open


@dataclass(slots=True)
class Restored:
    files: int = 0
    directories: int = 0
    links: int = 0
    removed: int = 0
    bytes: int = 0


class Restore:
    """One restore of `entries` (from `manifest.read`). `fetch` gives the bytes of a key; any thread."""

    def __init__(self, entries: list[Entry], policy: Policy, fetch: Fetch, host: Host) -> None:
        self._entries, self._policy, self._fetch = entries, policy, fetch
        self._wanted = {entry.path: entry for entry in entries}
        self._dirs = parents(self._wanted) | {e.path for e in entries if e.kind == DIR}
        self._staging = STAGING + host.token_bytes(8).hex()
        self._host = host
        self._there: dict[str, str] = {}
        self._protected: set[str] = set()
        self._leftovers: list[str] = []  # contents of restores that were killed
        self._open: dict[str, int] = {}
        self._done = Restored()

    def run(
        self,
        root: str,
        *,
        replace: bool,
        how: str = HOW,
        marked: bool = False,
        verified: Callable[[], object] | None = None,
    ) -> Restored:
        """Make `root` hold the entries. Without `replace` it has to hold nothing the policy covers
        (`Conflict`, with `how` as what to do). Raises `InvalidPath`, `UnsupportedEntry`, `InvalidBlob`, what
        `fetch` raises, and errors of the local disk; until every content is verified nothing of the
        destination was touched; `verified` is called then, and may raise. `marked`: where not all of it was
        put into its place after that, the directory of contents stays and tells so."""
        self._check()
        top = self._top(root)
        try:
            self._open[""] = top
            self._scan(top, "", 0)
            if self._there and not replace:
                raise Conflict(
                    f"{root} is not empty ({sorted(self._there)[0]!r})",
                    hint=how,
                )
            self._check_destination()
            with told(os.fsencode(root)):
                os.mkdir(self._staging, 0o700, dir_fd=top)
            begun = False
            try:
                staging = os.open(self._staging, _DIRECTORY, dir_fd=top)
                try:
                    _held(staging)
                    self._stage(staging)
                    self._host.crash_point("restore.verified")
                    if verified is not None:
                        verified()
                    begun = marked
                    with told(os.fsencode(root)):
                        self._apply(staging)
                    begun = False
                finally:
                    os.close(staging)
            finally:
                if not begun:
                    shutil.rmtree(self._staging, dir_fd=top)
        finally:
            for fd in {top, *self._open.values()}:
                os.close(fd)
        return self._done

    # before anything is touched

    def _check(self) -> None:
        for entry in self._entries:
            if entry.path.startswith(STAGING):
                raise InvalidPath(f"{entry.path!r} has the name of a restore under way")
            if entry.path.count("/") > CAPTURE_DEPTH_MAX:
                raise InvalidPath(f"{entry.path[:200]!r} lies below too many directories")
            if not self._policy.covers(entry.path, is_dir=entry.kind == DIR):
                raise InvalidPath(
                    f"the policy leaves out {entry.path!r}, which is in the checkpoint",
                    hint="restore with the --include and --exclude it was captured with",
                )

    def _top(self, root: str) -> int:
        """The destination, made if absent. A link in its place is refused."""
        try:
            os.mkdir(root, 0o777)
        except FileExistsError:
            pass  # what is there is looked at below
        except OSError as exc:
            raise InvalidWorkspace(f"{root} cannot be made: {exc.strerror}") from exc
        try:
            return os.open(root, _DIRECTORY)
        except OSError as exc:
            raise InvalidWorkspace(f"{root} is no directory that can be opened: {exc.strerror}") from exc

    def _scan(self, fd: int, path: str, depth: int) -> None:
        """What is there, as far as the policy covers it."""
        if depth > CAPTURE_DEPTH_MAX:
            raise UnsupportedEntry(f"{path[:200]!a} lies below too many directories")
        with told(os.fsencode(path or ".")):
            names = os.listdir(fd)
        for name in names:
            below = f"{path}/{name}" if path else name
            if not path and name.startswith(STAGING) and _left_over(fd, name):
                self._leftovers.append(name)
                continue
            if self._policy.excluded(below, is_dir=False):
                self._protected.add(below)
                continue
            with told(os.fsencode(below)):
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                self._scan_directory(fd, name, below, depth)
            elif not self._policy.included(below, is_dir=False):
                self._protected.add(below)
            elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                self._there[below] = LINK if stat.S_ISLNK(mode) else FILE
            else:
                raise UnsupportedEntry(f"{below!a} is neither a file nor a directory nor a link")

    def _scan_directory(self, fd: int, name: str, path: str, depth: int) -> None:
        if self._policy.excluded(path, is_dir=True):
            self._protected.add(path)
            return
        with told(os.fsencode(path)):
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        try:
            self._there[path] = DIR
            self._scan(below, path, depth + 1)
        finally:
            os.close(below)

    def _check_destination(self) -> None:
        """Nothing protected may be where, or beneath where, something else is wanted."""
        guarded = parents(self._protected)
        for path, entry in self._wanted.items():
            if path in self._protected or (entry.kind != DIR and path in guarded):
                raise InvalidPath(
                    f"{path!r} of the checkpoint would replace what the policy protects",
                    hint="move that away first",
                )
        for path in self._dirs:
            if path in self._protected:
                raise InvalidPath(f"{path!r} is needed as a directory, but the policy protects it")

    def _stage(self, staging: int) -> None:
        """Fetch and verify every content."""
        first: dict[str, Entry] = {}
        for entry in self._entries:
            if entry.kind == FILE and first.setdefault(entry.key, entry).size != entry.size:
                raise InvalidBlob(f"{entry.path!r} has another size than a file of the same content")
        with Workers(COPY_PARALLEL) as workers:
            for entry in first.values():
                workers.submit(partial(self._stage_one, staging, entry))

    def _stage_one(self, staging: int, entry: Entry) -> None:
        name = entry.key.rpartition("/")[2]
        digest, got = hashlib.sha256(), 0
        with told(os.fsencode(self._staging)):
            fd = os.open(name, _NEW, 0o600, dir_fd=staging)
        try:
            for piece in fetched(entry, self._fetch):
                digest.update(piece)
                got += len(piece)
                if got > entry.size:
                    break
                with told(os.fsencode(self._staging)):
                    write_all(fd, piece)
        finally:
            os.close(fd)
        if got != entry.size or digest.hexdigest() != name:
            raise InvalidBlob(f"{entry.path!r}: the content {entry.key} is not what its name and size say")

    # then

    def _apply(self, staging: int) -> None:
        self._remove()
        for name in self._leftovers:  # ours is there, for what they may have told
            shutil.rmtree(name, dir_fd=self._open[""])
        for path in sorted(self._dirs):
            self._make_directory(path)
        left = Counter(entry.key for entry in self._entries if entry.kind == FILE)
        for entry in self._entries:
            if entry.kind == FILE:
                left[entry.key] -= 1
                self._place(entry, staging, last=not left[entry.key])
        for entry in self._entries:
            if entry.kind == LINK:
                self._link(entry, staging)

    def _remove(self) -> None:
        """What is there and not wanted as what it is, shallowest first; what protects something stays."""
        guarded = parents(self._protected)
        gone: set[str] = set()
        for path in sorted(self._there, key=lambda one: (one.count("/"), one)):
            above = path.rpartition("/")[0]
            if above in gone:
                gone.add(path)
                continue
            wanted = DIR if path in self._dirs else None
            if path in self._wanted:
                wanted = self._wanted[path].kind
            if wanted == self._there[path] or path in guarded:
                continue
            parent, name = self._parent(path)
            if self._there[path] == DIR:
                shutil.rmtree(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
            gone.add(path)
            self._done.removed += 1

    def _parent(self, path: str) -> tuple[int, str]:
        """The open directory `path` is in, and its name there."""
        above, _, name = path.rpartition("/")
        return self._directory(above), name

    def _directory(self, path: str) -> int:
        """An open directory of the destination; no link is followed to it. Few are kept open."""
        found = self._open.get(path)
        if found is not None:
            return found
        parent, name = self._parent(path)
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        if len(self._open) >= _OPEN_MAX:
            keep = {above for above in self._open if not above or path.startswith(above + "/")}
            for other in [one for one in self._open if one not in keep]:
                os.close(self._open.pop(other))
        self._open[path] = fd
        return fd

    def _make_directory(self, path: str) -> None:
        parent, name = self._parent(path)
        try:
            os.mkdir(name, 0o777, dir_fd=parent)
            self._done.directories += 1
        except FileExistsError:
            # One that was there; opening it later refuses anything but a directory.
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None

    def _place(self, entry: Entry, staging: int, *, last: bool) -> None:
        """Move the content into place, or a copy while another entry still needs it."""
        name = entry.key.rpartition("/")[2]
        if not last:
            name = self._copied(staging, name)
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=staging)
        try:
            os.fchmod(fd, entry.mode)
            if entry.mtime_ns is not None:
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
        parent, target = self._parent(entry.path)
        os.rename(name, target, src_dir_fd=staging, dst_dir_fd=parent)
        self._done.files += 1
        self._done.bytes += entry.size

    @staticmethod
    def _copied(staging: int, name: str) -> str:
        made = name + ".copy"
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=staging)
        try:
            target = os.open(made, _NEW, 0o600, dir_fd=staging)
            try:
                while piece := os.read(source, MIB):
                    write_all(target, piece)
            finally:
                os.close(target)
        finally:
            os.close(source)
        return made

    def _link(self, entry: Entry, staging: int) -> None:
        parent, name = self._parent(entry.path)
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(name, dir_fd=parent) == entry.target:
                return
        os.symlink(entry.target, _NEW_LINK, dir_fd=staging)
        os.rename(_NEW_LINK, name, src_dir_fd=staging, dst_dir_fd=parent)
        self._done.links += 1


def _held(staging: int) -> bool:
    """Whether the directory of contents is this restore's now, as long as it is open. Where directories
    cannot be locked it is never taken for left over."""
    try:
        fcntl.flock(staging, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _left_over(top: int, name: str) -> bool:
    """Whether `name` holds contents of a restore that has ended without removing them: it was killed."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=top)
    except OSError:  # no directory, or not this user's
        return False
    try:
        return _held(fd)
    finally:
        os.close(fd)
