"""Changes by path: what direct commands ask for, as operations of one commit.

Each method plans: it resolves paths and checks POSIX's rules in the transaction it is given, which holds the
filesystem's lock, and returns the operations. `execute` applies them as one commit of session 0; nothing can
have changed in between and every base is current. A plan that is not executed is a dry run.

Raises `NotFound`, `PosixError`, `Conflict` (a condition does not hold), `UsageError`. Any thread.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Tx
from fsd.model import ops
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.blocks import Parts, encode
from fsd.model.errors import Conflict, FsdError, PosixError, TooLarge, UsageError
from fsd.model.limits import COMMIT_OPS_MAX, COPY_BLOCKS_MAX, REMOVE_CHUNK, SYMLINK_MAX
from fsd.model.names import show
from fsd.model.plain import dataclass, field
from fsd.service.access import FsRef
from fsd.service.packs import Prepared
from fsd.service.tree import Place, block_parts, no_such, post_order, resolve, seq_of
from fsd.service.upload import Folded, Uploaded

DIR_MODE: Final = 0o755
FILE_MODE: Final = 0o644

Path = Sequence[bytes]  # components (`model.names.split_typed`)
Apply = Callable[[Tx, FsRef, list[ops.Op], Prepared | None], tuple[int, bool]]


FILES: Final = "files"
SYMLINKS: Final = "symlinks"
DIRECTORIES: Final = "directories"
SKIPPED: Final = "skipped"


@dataclass(slots=True)
class Copied:
    """What a step of a tree's copy did (`fsd.service.copytree`). Paths are the source's. `after` is where the
    next one goes on, None at the end."""

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((FILES, SYMLINKS, DIRECTORIES, SKIPPED, "bytes"), 0)
    )
    failed: list[tuple[bytes, FsdError]] = field(default_factory=list)
    not_copied: list[bytes] = field(default_factory=list)
    after: bytes | None = None


@dataclass(slots=True)
class Plan:
    """Operations of one commit and what to show of it: the path `shown`, resolved again after the commit,
    with `follow` through a last symlink. `removed` and `more` are of a removal in steps, `copied` of the copy
    of a tree."""

    ops: list[ops.Op] = field(default_factory=list)
    shown: bytes | None = None
    follow: bool = False
    removed: int = 0
    more: bool = False
    prepared: Prepared | None = None
    copied: Copied | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A change that was made. `place` is what `Plan.shown` is now. `moved`: there was a commit, of which the
    caller wakes the feed once it is durable."""

    seq: int
    moved: bool
    place: Place | None
    removed: int
    more: bool
    copied: Copied | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """How a file is written; see docs/protocol.md. `if_match` is (ino, cseq)."""

    path: Path
    parents: bool = False
    overwrite: bool = True
    append: bool = False
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    if_match: tuple[int, int] | None = None
    if_absent: bool = False


class Paths:
    """Planner of one server. `apply` is the commit engine's, `new_ino` makes numbers of the service's own
    session."""

    def __init__(self, host: Host, apply: Apply, new_ino: Callable[[], int]) -> None:
        self._host = host
        self._apply = apply
        self._new_ino = new_ino

    def execute(self, tx: Tx, fs: FsRef, plan: Plan) -> Done:
        """Apply `plan`, made in the same transaction, as one commit. A plan without operations is none."""
        if len(plan.ops) > COMMIT_OPS_MAX:
            raise TooLarge(f"{len(plan.ops)} changes in one command, at most {COMMIT_OPS_MAX}")
        seq, moved = seq_of(tx, fs.id), False
        if plan.ops:
            seq, moved = self._apply(tx, fs, plan.ops, plan.prepared)
        place = None
        if plan.shown is not None:
            components = [part for part in plan.shown.split(b"/") if part]
            place = resolve(tx, fs.id, components, follow=plan.follow)
        return Done(seq, moved, place, plan.removed, plan.more, plan.copied)

    def builder(self) -> Builder:
        """For operations that are planned elsewhere."""
        return Builder(self._new_ino, self._host.wall_ns())

    # -- files ---------------------------------------------------------------------------------------

    def put(self, tx: Tx, fs: FsRef, put: Put, content: Uploaded, folded: Folded | None) -> Plan:
        """The file gets `content`, or with `append` has it behind what it holds. Raises `FoldNeeded`."""
        fresh = put.if_absent or not put.overwrite
        # As with O_EXCL, a symlink counts as existing then, wherever it leads.
        place = resolve(tx, fs.id, put.path, follow=not fresh, parents=put.parents)
        now = self._host.wall_ns()
        build = Builder(self._new_ino, now)
        node = place.node
        check_revision(place, put.if_match)
        if node is not None:
            if fresh:
                raise _exists(place.path, node)
            need_file(place)
        elif place.slash:
            raise _directory_named(place, errno.EISDIR)
        else:
            node = self._new_file(build, place, put)
        mtime = now if put.mtime_ns is None else put.mtime_ns
        if put.append and node.size:
            parts = content.behind(tx, fs.id, node, folded)
            size, appended = node.size + content.size, node.size
        else:
            parts, size, appended = content.blocks(), content.size, None
        build.content(node, size, parts, full=appended is None, appended=appended, mtime=mtime)
        if put.mode is not None and place.node is not None and put.mode != stat.S_IMODE(node.mode):
            build.setattr(node.ino, mode=put.mode)
        return Plan(build.ops, place.path, prepared=content.prepared)

    def _new_file(self, build: Builder, place: Place, put: Put) -> Attr:
        parent = build.directories(place, place.missing[:-1], put.uid, put.gid)
        mode = FILE_MODE if put.mode is None else put.mode
        return build.create(parent, place.missing[-1], stat.S_IFREG | mode, put.uid, put.gid)

    def copy(self, tx: Tx, fs: FsRef, source: Path, target: Path, *, overwrite: bool) -> Plan:
        """One file or symlink under another name as a file of its own, sharing the content's blobs."""
        origin = resolve(tx, fs.id, source)
        node = origin.need()
        if node.is_dir:
            raise PosixError(errno.EISDIR, f"{show(origin.path)} is a directory")
        if stat.S_ISLNK(node.mode):
            return self.symlink(tx, fs, node.target or b"", target, overwrite=overwrite, mtime_ns=node.mtime)
        need_file(origin)
        place = resolve(tx, fs.id, target, follow=True)
        build = Builder(self._new_ino, self._host.wall_ns())
        there = place.node
        if there is not None:
            if not overwrite:
                raise _exists(place.path, there)
            need_file(place)
            if there.ino == node.ino:
                raise PosixError(errno.EINVAL, "source and target are the same file")
        elif place.slash:
            raise _directory_named(place, errno.ENOTDIR)
        above = place.parent if there is not None else build.base(place)
        copy_file(tx, fs.id, build, node, above, place.name, there)
        return Plan(build.ops, place.path)

    # -- names ---------------------------------------------------------------------------------------

    def mkdir(
        self,
        tx: Tx,
        fs: FsRef,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        uid: int | None = None,
        gid: int | None = None,
    ) -> Plan:
        named = path if not path or path[-1] else path[:-1]  # with or without the slash it is made
        place = resolve(tx, fs.id, named, follow=parents, parents=parents)
        if place.node is not None:
            if parents and place.node.is_dir:
                return Plan([], place.path)
            raise PosixError(errno.EEXIST, f"{show(place.path)} exists")
        build = Builder(self._new_ino, self._host.wall_ns())
        parent = build.directories(place, place.missing[:-1], uid, gid)
        wanted = stat.S_IFDIR | (DIR_MODE if mode is None else mode)
        build.create(parent, place.missing[-1], wanted, uid, gid)
        return Plan(build.ops, place.path)

    def symlink(
        self,
        tx: Tx,
        fs: FsRef,
        target: bytes,
        path: Path,
        *,
        overwrite: bool = False,
        if_match: tuple[int, int] | None = None,
        mtime_ns: int | None = None,
    ) -> Plan:
        """With `overwrite` what is there goes, unless it is a directory."""
        if not target or len(target) > SYMLINK_MAX or b"\0" in target:
            raise UsageError(f"a symlink's target has 1 to {SYMLINK_MAX} bytes and no NUL")
        place = resolve(tx, fs.id, path, itself=True)
        check_revision(place, if_match)
        build = Builder(self._new_ino, self._host.wall_ns())
        there = place.node
        if there is None and place.slash:
            raise _directory_named(place, errno.ENOENT)
        if there is not None:
            if not overwrite or there.is_dir:
                raise PosixError(errno.EEXIST, f"{show(place.path)} exists")
            if stat.S_ISLNK(there.mode) and there.target == target:
                if mtime_ns not in (None, there.mtime):
                    build.setattr(there.ino, mtime=mtime_ns)
                return Plan(build.ops, place.path)
            build.unlink(place, there)
        made = build.create(build.base(place), place.name, stat.S_IFLNK | 0o777, None, None, target=target)
        if mtime_ns is not None:
            build.setattr(made.ino, mtime=mtime_ns)
        return Plan(build.ops, place.path)

    def hardlink(self, tx: Tx, fs: FsRef, source: Path, path: Path) -> Plan:
        origin = resolve(tx, fs.id, source)
        node = origin.need()
        place = resolve(tx, fs.id, path, itself=True)
        if place.node is not None:
            raise PosixError(errno.EEXIST, f"{show(place.path)} exists")
        if place.slash:
            raise _directory_named(place, errno.ENOENT)
        if node.is_dir:
            raise PosixError(errno.EPERM, f"{show(origin.path)} is a directory, which has one name")
        build = Builder(self._new_ino, self._host.wall_ns())
        build.add(ops.Link, ops.LINK, node.ino, place.parent.ino, place.name, build.now)
        return Plan(build.ops, place.path)

    def rename(self, tx: Tx, fs: FsRef, source: Path, target: Path, *, overwrite: bool = True) -> Plan:
        """rename(2): a file over a file, a directory over an empty one; the rest the engine refuses."""
        origin = resolve(tx, fs.id, source, itself=True)
        place = resolve(tx, fs.id, target, itself=True)
        node, there = origin.need(), place.node
        if place.slash and not node.is_dir:
            raise _directory_named(place, errno.ENOTDIR)
        if node.ino == ROOT_INO or (there is not None and there.ino == ROOT_INO):
            raise PosixError(errno.EBUSY, "the root cannot be moved or replaced")
        if there is not None and not overwrite:
            raise _exists(place.path, there, hint="with overwrite (`fsd mv --overwrite`) it is replaced")
        if node.is_dir and place.path.startswith(origin.path + b"/"):
            raise PosixError(errno.EINVAL, f"{show(origin.path)} cannot move below itself")
        if origin.path.startswith(place.path + b"/"):
            raise PosixError(errno.ENOTEMPTY, f"{show(place.path)} is not empty")
        build = Builder(self._new_ino, self._host.wall_ns())
        flags = 0 if overwrite else ops.RENAME_NOREPLACE
        over, base = (0, 0) if there is None else (there.ino, there.cseq)
        build.add(
            ops.Rename,
            ops.RENAME,
            origin.parent.ino,
            origin.name,
            node.ino,
            place.parent.ino,
            place.name,
            flags,
            over,
            base,
            build.now,
        )
        return Plan(build.ops, place.path)

    def remove(
        self,
        tx: Tx,
        fs: FsRef,
        path: Path,
        *,
        recursive: bool = False,
        if_match: tuple[int, int] | None = None,
    ) -> Plan:
        """A file or an empty directory; with `recursive` the first REMOVE_CHUNK entries of a tree, deepest
        first, and `more` while some are left."""
        place = resolve(tx, fs.id, path, itself=True)
        node = place.need()
        check_revision(place, if_match)
        if node.ino == ROOT_INO:
            raise PosixError(errno.EBUSY, "the root cannot be removed")
        build = Builder(self._new_ino, self._host.wall_ns())
        if not node.is_dir:
            build.unlink(place, node)
            return Plan(build.ops, removed=1)
        below, whole = post_order(tx, fs.id, node, REMOVE_CHUNK if recursive else 0)
        if not whole and not recursive:
            raise PosixError(
                errno.ENOTEMPTY, f"{show(place.path)} is not empty", hint="remove it with --recursive"
            )
        for parent, name, attr in below:
            build.remove(parent, name, attr)
        if whole:
            build.remove(place.parent.ino, place.name, node)
        return Plan(build.ops, removed=len(build.ops), more=not whole)

    # -- attributes ----------------------------------------------------------------------------------

    def setattr(
        self,
        tx: Tx,
        fs: FsRef,
        path: Path,
        *,
        follow: bool = True,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
        atime_ns: int | None = None,
    ) -> Plan:
        """chmod, chown, utimens."""
        place = resolve(tx, fs.id, path, follow=follow)
        node = place.need()
        build = Builder(self._new_ino, self._host.wall_ns())
        build.setattr(node.ino, mode=mode, uid=uid, gid=gid, mtime=mtime_ns, atime=atime_ns)
        return Plan(build.ops, place.path)

    def setxattr(
        self, tx: Tx, fs: FsRef, path: Path, name: bytes, value: bytes | None, *, follow: bool = True
    ) -> Plan:
        """Set an extended attribute, or remove it (`value` None; ENODATA when it is not there)."""
        place = resolve(tx, fs.id, path, follow=follow)
        node = place.need()
        if value is None and name not in (node.xattrs or {}):
            raise PosixError(errno.ENODATA, f"{show(place.path)} has no attribute {show(name)}")
        build = Builder(self._new_ino, self._host.wall_ns())
        build.setxattr(node.ino, name, value)
        return Plan(build.ops, place.path)


class Builder:
    """Operations in order, numbered from 1. Knows of the inodes it makes what later operations need."""

    def __init__(self, new_ino: Callable[[], int], now: int) -> None:
        self.new_ino = new_ino
        self.now = now
        self.ops: list[ops.Op] = []

    def add(self, make: Callable[..., ops.Op], kind: int, *values: Any) -> None:
        self.ops.append(make(len(self.ops) + 1, kind, *values))

    def base(self, place: Place) -> Attr:
        """The directory a single new name goes into."""
        if not place.name:
            raise PosixError(errno.EEXIST, "the root exists")
        return place.parent

    def directories(self, place: Place, missing: Sequence[bytes], uid: int | None, gid: int | None) -> Attr:
        """Make the directories `missing` below `place.parent`; the last one."""
        here = place.parent
        for name in missing:
            here = self.create(here, name, stat.S_IFDIR | DIR_MODE, uid, gid)
        return here

    def create(
        self,
        parent: Attr,
        name: bytes,
        mode: int,
        uid: int | None,
        gid: int | None,
        *,
        target: bytes | None = None,
    ) -> Attr:
        """A new inode; owner and group are the parent's where not given. In a set-gid directory the group
        is the directory's, as on ext4."""
        if not parent.is_dir:
            raise PosixError(errno.ENOTDIR, "the parent is no directory")
        uid = parent.uid if uid is None else uid
        gid = parent.gid if gid is None or parent.mode & stat.S_ISGID else gid
        if parent.mode & stat.S_ISGID and stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
        ino = self.new_ino()
        self.add(ops.Create, ops.CREATE, parent.ino, name, ino, mode, uid, gid, 0, target, self.now)
        now = self.now
        return Attr(ino, mode, 1, uid, gid, 0, now, now, now, 0, target, 0, None, None, 0, 0, 0)

    def content(
        self, node: Attr, size: int, parts: dict[int, Parts], *, full: bool, appended: int | None, mtime: int
    ) -> None:
        stored = tuple((idx, encode(parts[idx])) for idx in sorted(parts))
        self.add(
            ops.Content,
            ops.CONTENT,
            node.ino,
            node.cseq,
            size,
            stored,
            full,
            appended,
            mtime,
            self.now,
        )

    def setattr(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime: int | None = None,
        mtime: int | None = None,
    ) -> None:
        self.add(ops.Setattr, ops.SETATTR, ino, mode, uid, gid, atime, mtime, self.now)

    def setxattr(self, ino: int, name: bytes, value: bytes | None) -> None:
        self.add(ops.Setxattr, ops.SETXATTR, ino, name, value, self.now)

    def unlink(self, place: Place, node: Attr) -> None:
        self.remove(place.parent.ino, place.name, node)

    def remove(self, parent: int, name: bytes, node: Attr) -> None:
        if node.is_dir:
            self.add(ops.Rmdir, ops.RMDIR, parent, name, node.ino, self.now)
        else:
            self.add(ops.Unlink, ops.UNLINK, parent, name, node.ino, node.cseq, self.now)


def copy_file(
    tx: Tx, fs: int, build: Builder, then: Attr, above: Attr, name: bytes, there: Attr | None
) -> None:
    """The file `then` under `name` in `above`, or over the file `there`, sharing the content's blobs. Raises
    `TooLarge`."""
    if then.blocks > COPY_BLOCKS_MAX:
        raise TooLarge("the file is too large to be copied on the server", hint="copy it through a mount")
    made = there
    if made is None:
        mode = stat.S_IFREG | stat.S_IMODE(then.mode)
        made = build.create(above, name, mode, then.uid, then.gid)
    parts = block_parts(tx, fs, then, 0, then.blocks)
    build.content(made, then.size, parts, full=True, appended=None, mtime=then.mtime)
    wanted = then.xattrs or {}
    if there is not None:
        build.setattr(there.ino, mode=stat.S_IMODE(then.mode))
        for held in (there.xattrs or {}).keys() - wanted.keys():
            build.setxattr(there.ino, held, None)
    for held, value in wanted.items():
        build.setxattr(made.ino, held, value)


def _exists(path: bytes, there: Attr, *, hint: str = "") -> Conflict:
    """Something must not be replaced: what is there, by its revision."""
    return Conflict(
        f"{show(path)} exists",
        hint=hint,
        details={"errno": "EEXIST", "revision": f"{there.ino}:{there.cseq}"},
    )


def _directory_named(place: Place, number: int) -> PosixError:
    """What is no directory was to be made, or moved, where the path asks for one."""
    return PosixError(number, f"{show(place.path)}/ names a directory", hint="leave out the slash at its end")


def check_revision(place: Place, wanted: tuple[int, int] | None) -> None:
    """Raise `Conflict` unless the path has the revision `wanted`; `details.revision` is what it has."""
    if wanted is None:
        return
    node = place.node
    if node is None:
        raise Conflict(f"{show(place.path)} is gone", details={"revision": None})
    if (node.ino, node.cseq) != wanted:
        raise Conflict(
            f"{show(place.path)} was changed: its revision is {node.ino}:{node.cseq}",
            hint="read it again and decide, or write without --if-match",
            details={"revision": f"{node.ino}:{node.cseq}"},
        )


def need_file(place: Place) -> Attr:
    """The regular file at `place`; raises `PosixError` EISDIR or EINVAL, `NotFound`."""
    if place.node is None:
        raise no_such(place.path)
    if place.node.is_dir:
        raise PosixError(errno.EISDIR, f"{show(place.path)} is a directory")
    if not place.node.is_file:
        raise PosixError(errno.EINVAL, f"{show(place.path)} is no regular file")
    return place.node
