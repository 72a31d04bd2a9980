"""A tree copied within the filesystem, some entries at a time, as operations of one commit each.

Contents are named, never copied. A step goes on behind the entry the last one ended with, so it costs what it
copies, and once the depth of the place it begins at: by path, each entry would be looked for from the root.
Directories at the target are filled, what is in them and not in the source stays. What cannot be copied is
told by its path, and the copy goes on.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence

from fsd.meta.database import Tx
from fsd.model.attrs import Attr
from fsd.model.errors import FsdError, PosixError, TooLarge, UsageError
from fsd.model.limits import COMMIT_OPS_MAX, COPY_BLOCKS_MAX, COPY_STEP, COPY_STEP_OPS
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.service.paths import DIRECTORIES, FILES, SKIPPED, SYMLINKS, Builder, Copied, copy_file, need_file
from fsd.service.tree import Place, Walked, child, resolve, walk


@dataclass(slots=True)
class _Open:
    """A directory that is being copied: its path below the source, itself, and its copy. `copy` None: there
    is none, and nothing below is copied. `fresh`: this step made it, so nothing is in it."""

    path: bytes
    then: Attr
    copy: Attr | None
    fresh: bool


class TreeCopy:
    """One step. In the transaction that applies `build.ops`, under the filesystem's lock. `overwrite` False:
    what is there is left as it is; `resume`: so is what has the source's size and time."""

    def __init__(self, tx: Tx, fs: int, build: Builder, *, overwrite: bool, resume: bool) -> None:
        self._tx, self._fs, self._build = tx, fs, build
        self._overwrite, self._resume = overwrite, resume
        self._stack: list[_Open] = []
        self._source = self._target = b""
        self._blocks = 0
        self.did = Copied()

    def step(self, source: Sequence[bytes], target: Sequence[bytes], after: bytes) -> Copied:
        """Copy what is in the directory `source`, behind the path `after` below it, into the directory
        `target`. Raises `NotFound`, `PosixError`, `UsageError` (a tree that would be copied into itself)."""
        origin = resolve(self._tx, self._fs, source)
        goal = resolve(self._tx, self._fs, target, follow=True)
        for place in (origin, goal):
            if not place.need().is_dir:
                raise PosixError(errno.ENOTDIR, f"{show(place.path)} is no directory")
        if (goal.path + b"/").startswith(origin.path.rstrip(b"/") + b"/"):
            raise UsageError(
                f"{show(goal.path)} lies inside {show(origin.path)}: a tree cannot be copied into itself"
            )
        self._source, self._target = origin.path.rstrip(b"/"), goal.path.rstrip(b"/")
        self._stack = [_Open(b"", origin.need(), goal.need(), False)]
        self._reopen(after)
        last = after
        for entry in walk(self._tx, self._fs, origin.need(), after, COPY_STEP):
            if not self._leave(entry.path.rpartition(b"/")[0]):
                return self.did
            self._one(entry)
            last = entry.path
            if len(self._build.ops) >= COPY_STEP_OPS or self._blocks >= COPY_BLOCKS_MAX:
                break
        if next(walk(self._tx, self._fs, origin.need(), last, 1), None) is not None:
            self.did.after = last
        elif self._leave(b""):
            self._build.setattr(goal.need().ino, mtime=origin.need().mtime)
        return self.did

    # -- directories ---------------------------------------------------------------------------------

    def _reopen(self, after: bytes) -> None:
        """The directories the last step was in."""
        path = b""
        for name in after.split(b"/") if after else ():
            above = self._stack[-1]
            then = child(self._tx, self._fs, above.then.ino, name)
            if then is None or not then.is_dir:
                return
            path = path + b"/" + name if path else name
            copy = None if above.copy is None else child(self._tx, self._fs, above.copy.ino, name)
            if copy is not None and not copy.is_dir:
                copy = None
            self._stack.append(_Open(path, then, copy, False))

    def _leave(self, above: bytes) -> bool:
        """Close the directories that the directory `above` is not in: all of them is copied, which changed
        their times. False: the step has operations enough; the next goes on behind the one closed last."""
        while self._stack[-1].path and not (above + b"/").startswith(self._stack[-1].path + b"/"):
            if len(self._build.ops) >= COPY_STEP_OPS:
                return False
            done = self._stack.pop()
            if done.copy is not None:
                self._build.setattr(done.copy.ino, mtime=done.then.mtime)
            self.did.after = done.path + b"\0"  # no name: between this one and those that come behind it
        self.did.after = None
        return True

    # -- entries -------------------------------------------------------------------------------------

    def _one(self, entry: Walked) -> None:
        above = self._stack[-1]
        name, then = entry.path.rpartition(b"/")[2], entry.attr
        if above.copy is None:
            if then.is_dir:
                self._stack.append(_Open(entry.path, then, None, False))
            return
        there = None if above.fresh else child(self._tx, self._fs, above.copy.ino, name)
        try:
            if then.is_dir:
                self._directory(above.copy, name, entry, there)
            elif stat.S_ISLNK(then.mode):
                self._symlink(above.copy, name, then, there)
            elif then.is_file:
                self._file(above.copy, name, entry, there)
            else:
                self.did.not_copied.append(self._source + b"/" + entry.path)
        except FsdError as exc:
            self.did.failed.append((self._source + b"/" + entry.path, exc))

    def _count(self, what: str) -> None:
        self.did.counts[what] += 1

    def _directory(self, above: Attr, name: bytes, entry: Walked, there: Attr | None) -> None:
        opened = _Open(entry.path, entry.attr, None, there is None)
        self._stack.append(opened)
        if there is None:
            mode = stat.S_IFDIR | stat.S_IMODE(entry.attr.mode)
            there = self._build.create(above, name, mode, None, None)
        elif not there.is_dir:
            raise PosixError(errno.ENOTDIR, f"{show(self._goal(entry.path))} is no directory")
        opened.copy = there
        self._count(DIRECTORIES)

    def _symlink(self, above: Attr, name: bytes, then: Attr, there: Attr | None) -> None:
        if there is not None:
            same = stat.S_ISLNK(there.mode) and there.target == then.target
            if not self._overwrite or (self._resume and same):
                self._count(SKIPPED)
                return
            if there.is_dir:
                raise PosixError(errno.EISDIR, f"{show(name)} is a directory at the target")
            if not same:
                self._build.remove(above.ino, name, there)
        if there is None or not same:
            there = self._build.create(above, name, stat.S_IFLNK | 0o777, None, None, target=then.target)
        if there.mtime != then.mtime:
            self._build.setattr(there.ino, mtime=then.mtime)
        self._count(SYMLINKS)

    def _file(self, above: Attr, name: bytes, entry: Walked, there: Attr | None) -> None:
        then = entry.attr
        if there is not None:
            if not self._overwrite or (self._resume and _looks_the_same(then, there)):
                self._count(SKIPPED)
                return
            there = self._file_there(entry.path, there)
            if there.ino == then.ino:
                raise PosixError(errno.EINVAL, "source and target are the same file")
        held = len(then.xattrs or {}) + (0 if there is None else len(there.xattrs or {}))
        if held > COMMIT_OPS_MAX - COPY_STEP_OPS - 10:
            raise TooLarge(f"{held} extended attributes are too many to be copied in one commit")
        copy_file(self._tx, self._fs, self._build, then, above, name, there)
        self._blocks += then.blocks
        self._count(FILES)
        self.did.counts["bytes"] += then.size

    def _file_there(self, path: bytes, there: Attr) -> Attr:
        """The file that is written over: of a symlink, what it leads to."""
        place = Place(self._goal(path), there, b"", there)
        if stat.S_ISLNK(there.mode):
            place = resolve(
                self._tx, self._fs, [part for part in place.path.split(b"/") if part], follow=True
            )
        return need_file(place)

    def _goal(self, path: bytes) -> bytes:
        return self._target + b"/" + path


def _looks_the_same(then: Attr, there: Attr) -> bool:
    return there.is_file and (then.size, then.mtime) == (there.size, there.mtime)
