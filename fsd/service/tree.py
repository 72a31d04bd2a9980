"""The tree by path: resolving, listing and walking the names of one filesystem, and reading content.

Everything here reads only and takes the transaction it reads in; a change built on what was found is made
in the same one (`fsd.service.paths`). `at` is a retained seq, None the live rows. Any thread.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO, Attr, Entry
from fsd.model.blocks import Parts
from fsd.model.blocks import decode as decode_parts
from fsd.model.errors import NotFound, PosixError
from fsd.model.limits import LINK_HOPS_MAX
from fsd.model.names import check_name, show
from fsd.service import namespace

_NO_SLASH: Final = "without the slash at its end the path means what is there"
_PAGE: Final = 256  # entries of a directory fetched at a time while walking


def seq_of(tx: Tx, fs: int) -> int:
    """The filesystem's seq; raises `NotFound` when it is being deleted."""
    row = tx.one("SELECT seq FROM fs WHERE id=? AND status='active'", (fs,))
    if row is None:
        raise NotFound("the filesystem was deleted")
    return int(row[0])


def inode(tx: Tx, fs: int, ino: int, at: int | None = None) -> Attr | None:
    return namespace.attrs(tx, fs, (ino,), at)[0]


def child(tx: Tx, fs: int, parent: int, name: bytes, at: int | None = None) -> Attr | None:
    """What the directory `parent` has under `name`."""
    found = namespace.lookup(tx, fs, parent, name, at)
    return None if found is None else found.attr


class Place(NamedTuple):
    """Where a path leads. `path` is in one spelling, without symlinks where they were followed. `node` None:
    nothing is there, but its directory `parent` exists. The root is its own parent, under an empty name.
    `missing` are the components below `parent` that do not exist, only with `parents` more than one.
    `slash`: the path asks for a directory, and `node` is one or None."""

    path: bytes
    parent: Attr
    name: bytes
    node: Attr | None
    missing: tuple[bytes, ...] = ()
    slash: bool = False

    def need(self) -> Attr:
        """The inode; raises `NotFound`."""
        if self.node is None:
            raise no_such(self.path)
        return self.node


def no_such(path: bytes) -> NotFound:
    return NotFound(f"no such file or directory: {show(path)}", details={"errno": "ENOENT"})


def resolve(
    tx: Tx,
    fs: int,
    components: Sequence[bytes],
    *,
    follow: bool = False,
    parents: bool = False,
    itself: bool = False,
    at: int | None = None,
) -> Place:
    """Walk from the root. Symlinks before the last component are followed, the last one with `follow`.

    An empty component at the end asks for a directory there (`names.split_typed`); a symlink is followed for
    it, unless the name `itself` is meant.

    With `parents` a path whose directories do not exist is a `Place` too. Raises `NotFound`, `PosixError`
    (ENOTDIR, ELOOP); a symlink to an absolute path leads out of the filesystem and is `NotFound`.
    """
    root = inode(tx, fs, ROOT_INO, at)
    assert root is not None, "a filesystem has a root"
    stack: list[tuple[bytes, Attr]] = [(b"", root)]
    slash = bool(components) and not components[-1]
    todo = list(reversed(components[:-1] if slash else components))
    follow = follow or (slash and not itself)
    hops = 0
    while todo:
        name = todo.pop()
        here = stack[-1][1]
        if not here.is_dir:
            raise PosixError(errno.ENOTDIR, f"{show(_path(stack))} is no directory")
        if name == b"..":
            if len(stack) > 1:
                stack.pop()
            continue
        found = child(tx, fs, here.ino, check_name(name), at)
        if found is None:
            path = _path(stack) + (b"/" if len(stack) > 1 else b"") + name
            if b".." in todo or (todo and not parents):
                raise no_such(path)
            missing = (name, *reversed(todo))
            return Place(b"/".join((path, *missing[1:])), here, name, None, missing, slash)
        if stat.S_ISLNK(found.mode) and (todo or follow):
            hops += 1
            if hops > LINK_HOPS_MAX:
                raise PosixError(errno.ELOOP, f"more than {LINK_HOPS_MAX} symlinks at {show(name)}")
            behind = _target(stack, name, found)
            if not behind[-1]:
                behind.pop()
                slash = slash or not todo
            todo += reversed(behind)
            continue
        stack.append((name, found))
    name, node = stack[-1]
    if slash and not node.is_dir:
        raise PosixError(errno.ENOTDIR, f"{show(_path(stack))} is no directory", hint=_NO_SLASH)
    parent = stack[-2][1] if len(stack) > 1 else node
    return Place(_path(stack), parent, name, node, slash=slash)


def _path(stack: list[tuple[bytes, Attr]]) -> bytes:
    return b"/" + b"/".join(name for name, _ in stack[1:])


def _target(stack: list[tuple[bytes, Attr]], name: bytes, link: Attr) -> list[bytes]:
    target = link.target or b""
    if target.startswith(b"/"):
        where = _path(stack).rstrip(b"/") + b"/" + name
        raise NotFound(
            f"the symlink {show(where)} leads to {show(target)}, which is outside of this filesystem",
            details={"errno": "ENOENT"},
        )
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    return [*parts, b""] if target.endswith((b"/", b"/.")) or not parts else parts


class Walked(NamedTuple):
    """One entry below the top of a walk; `path` is relative to it, without a leading slash."""

    path: bytes
    attr: Attr


def walk(tx: Tx, fs: int, top: Attr, after: bytes, limit: int, at: int | None = None) -> Iterator[Walked]:
    """At most `limit` entries below the directory `top`, depth first, in order of names, parents before
    children, those that come after the relative path `after` (empty: from the start)."""
    stack: list[tuple[bytes, Iterator[Entry]]] = []
    here: Attr | None = top
    names = after.split(b"/") if after else []
    for depth, name in enumerate(names):
        # `after` may be gone meanwhile: what comes behind it in order is still well defined.
        if here is None or not here.is_dir:
            break
        prefix = b"".join(part + b"/" for part in names[:depth])
        stack.append((prefix, _behind(tx, fs, here.ino, name, at)))
        here = child(tx, fs, here.ino, name, at)
    else:
        if here is not None and here.is_dir:
            stack.append((after + b"/" if after else b"", _behind(tx, fs, here.ino, b"", at)))
    while stack and limit > 0:
        prefix, entries = stack[-1]
        entry = next(entries, None)
        if entry is None:
            stack.pop()
            continue
        limit -= 1
        yield Walked(prefix + entry.name, entry.attr)
        if entry.attr.is_dir:
            stack.append((prefix + entry.name + b"/", _behind(tx, fs, entry.attr.ino, b"", at)))


def _behind(tx: Tx, fs: int, ino: int, name: bytes, at: int | None = None) -> Iterator[Entry]:
    """The directory's entries behind `name`, fetched in pages as they are wanted."""
    while page := namespace.list_some(tx, fs, ino, name, _PAGE, at):
        yield from page
        if len(page) < _PAGE:
            return
        name = page[-1].name


def block_parts(
    tx: Tx, fs: int, attr: Attr, first: int, count: int, at: int | None = None
) -> dict[int, Parts]:
    """The parts of blocks [first, first+count) of a file; blocks that are holes are left out."""
    found: dict[int, Parts] = {}
    if first == 0 and attr.parts is not None:
        found[0] = decode_parts(attr.parts)
    rows = namespace.block_rows(tx, fs, attr.ino, first, count, at)
    found.update((int(idx), decode_parts(parts)) for idx, parts in rows)
    return found


def post_order(tx: Tx, fs: int, top: Attr, limit: int) -> tuple[list[tuple[int, bytes, Attr]], bool]:
    """The first `limit` entries below `top` to remove, children before parents, as (parent, name, inode);
    and whether they are all."""
    found: list[tuple[int, bytes, Attr]] = []
    stack: list[tuple[Iterator[Entry], tuple[int, bytes, Attr] | None]] = [
        (_behind(tx, fs, top.ino, b""), None)
    ]
    while stack:
        entries, directory = stack[-1]
        entry = next(entries, None)
        if entry is not None and entry.attr.is_dir:
            parent = directory[2].ino if directory else top.ino
            below = _behind(tx, fs, entry.attr.ino, b"")
            stack.append((below, (parent, entry.name, entry.attr)))
            continue
        if entry is None:
            stack.pop()
            if directory is None:
                break
            one = directory
        else:
            one = (directory[2].ino if directory else top.ino, entry.name, entry.attr)
        if len(found) >= limit:
            return found, False
        found.append(one)
    return found, True
