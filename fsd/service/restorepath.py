"""One path brought back as it was in a retained state, as operations of one commit.

What is there is made what was there: an inode of the same kind is changed in place, what is missing is made
anew under new numbers (whoever removed it may still hold the old one open), what was not there goes. Nothing
outside of the path changes: a file that has a name there too gets a new inode here. Hard links among what is
restored stay links. Directories in which nothing changed are passed over, so it costs what changed since and
not what exists. Contents are named, never copied.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from typing import Final

from fsd.meta.database import Tx
from fsd.model import ops
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.errors import TooLarge
from fsd.model.limits import RESTORE_OPS_MAX
from fsd.service.difference import Side, attributes_differ, changed_keys
from fsd.service.namespace import list_some
from fsd.service.paths import Builder
from fsd.service.tree import block_parts, resolve

_PAGE: Final = 1000


class PathRestore:
    """Plans in the transaction that applies the plan, under the filesystem's lock. `at`: the retained state,
    `head`: the live one's seq."""

    def __init__(self, tx: Tx, fs: int, at: int, head: int, build: Builder) -> None:
        self._tx, self._fs, self._at, self._head = tx, fs, at, head
        self._build = build
        self._links: dict[int, int] = {}  # inode of then → inode that is it now
        self._taken: dict[int, int] = {}  # the reverse, of what had several names already
        self._todo: list[Callable[[], None]] = []
        self._touched: set[int] = set()
        self._live = Side(tx, fs, head)
        self._top = b""

    def plan(self, components: Sequence[bytes]) -> list[ops.Op]:
        """Raises `NotFound` when nothing was there, `TooLarge`."""
        was = resolve(self._tx, self._fs, components, at=self._at)
        then = was.need()
        canonical = [part for part in was.path.split(b"/") if part]
        self._top = was.path.rstrip(b"/")
        self._touched = self._directories()
        now = resolve(self._tx, self._fs, canonical, parents=True)
        parent = now.parent.ino
        for depth in range(len(canonical) - len(now.missing), len(canonical) - 1):
            above = resolve(self._tx, self._fs, canonical[: depth + 1], at=self._at).need()
            parent = self._create(parent, canonical[depth], above)
            self._later_attributes(parent, above, None)
        self._one(parent, now.missing[-1] if now.missing else now.name, then, now.node)
        while self._todo:
            self._todo.pop()()
            if len(self._build.ops) > RESTORE_OPS_MAX:
                raise TooLarge(
                    f"more than {RESTORE_OPS_MAX} changes in one restore of a path",
                    hint="restore the whole tree, or smaller parts",
                )
        return self._build.ops

    def _directories(self) -> set[int]:
        """Directories below which anything differs between then and now, on either side."""
        keys = changed_keys(self._tx, self._fs, self._at, self._head)
        found: set[int] = {parent for parent, _ in keys.names}
        for at in (self._at, self._head):
            side = Side(self._tx, self._fs, at)
            inos = keys.inos | keys.blocks
            side.load_names(inos)
            waiting = found | {parent for ino in inos for parent, _ in side.names(ino)} | inos
            side.load_paths(waiting)
            seen: set[int] = set()
            while waiting:
                ino = waiting.pop()
                if ino in seen:
                    continue
                seen.add(ino)
                if ino != ROOT_INO:
                    waiting.update(parent for parent, _ in side.names(ino))
            found |= seen
        return found

    # -- one entry -------------------------------------------------------------------------------------

    def _one(self, parent: int, name: bytes, then: Attr, now: Attr | None) -> None:
        """Make `name` what it was."""
        if now is not None and self._fits(then, now):
            self._update(then, now)
            return
        if now is not None:
            self._drop(parent, name, now, lambda: self._make(parent, name, then))
        else:
            self._make(parent, name, then)

    def _fits(self, then: Attr, now: Attr) -> bool:
        """Whether what is there can become what was there."""
        if stat.S_IFMT(then.mode) != stat.S_IFMT(now.mode):
            return False
        if then.is_dir:
            return True
        if self._links.get(then.ino, now.ino) != now.ino or self._taken.get(now.ino, then.ino) != then.ino:
            return False  # it was a link to something else that is restored already, or is one now
        if now.nlink > 1 and self._named_outside(now) and self._differs(then, now):
            return False
        return then.is_file or (then.target, then.rdev) == (now.target, now.rdev)

    def _named_outside(self, now: Attr) -> bool:
        """Whether a file has a name that is not below the path."""
        keys = self._live.names(now.ino)
        self._live.load_paths(parent for parent, _ in keys)
        return any(not (self._live.path(key) + b"/").startswith(self._top + b"/") for key in keys)

    def _differs(self, then: Attr, now: Attr) -> bool:
        return self._content_differs(then, now) or attributes_differ(then, now)

    def _update(self, then: Attr, now: Attr) -> None:
        if then.is_dir:
            if then.ino == now.ino and now.ino not in self._touched:
                return
            self._later_attributes(now.ino, then, now)
            self._directory(then, now)
            return
        if then.ino in self._links:
            return
        self._link(then, now.ino, now.nlink)
        if then.is_file and self._content_differs(then, now):
            self._content(now, then)
            now = now._replace(mtime=then.mtime)
        self._attributes(now.ino, then, now)

    def _directory(self, then: Attr, now: Attr) -> None:
        """What is in it, in order of names."""
        was, there = self._list(then.ino, self._at), self._list(now.ino, None)
        for name in sorted(was.keys() | there.keys(), reverse=True):
            if name in was:
                self._later_one(now.ino, name, was[name], there.get(name))
            else:
                self._later_drop(now.ino, name, there[name])

    def _later_one(self, parent: int, name: bytes, then: Attr, now: Attr | None) -> None:
        self._todo.append(lambda: self._one(parent, name, then, now))

    def _later_drop(self, parent: int, name: bytes, now: Attr) -> None:
        self._todo.append(lambda: self._drop(parent, name, now, None))

    def _list(self, ino: int, at: int | None) -> dict[bytes, Attr]:
        found: dict[bytes, Attr] = {}
        after = b""
        while page := list_some(self._tx, self._fs, ino, after, _PAGE, at):
            found.update((entry.name, entry.attr) for entry in page)
            if len(page) < _PAGE:
                break
            after = page[-1].name
        return found

    # -- making and removing ---------------------------------------------------------------------------

    def _make(self, parent: int, name: bytes, then: Attr) -> None:
        linked = None if then.is_dir else self._links.get(then.ino)
        if linked is not None:
            self._build.add(ops.Link, ops.LINK, linked, parent, name, self._build.now)
            return
        ino = self._create(parent, name, then)
        if then.is_dir:
            self._later_attributes(ino, then, None)
            for below, attr in sorted(self._list(then.ino, self._at).items(), reverse=True):
                self._later_one(ino, below, attr, None)
            return
        self._link(then, ino, 1)
        if then.size and then.is_file:
            self._content(then._replace(ino=ino, cseq=0), then)
        self._attributes(ino, then, None)

    def _create(self, parent: int, name: bytes, then: Attr) -> int:
        ino = self._build.new_ino()
        self._build.add(
            ops.Create,
            ops.CREATE,
            parent,
            name,
            ino,
            then.mode,
            then.uid,
            then.gid,
            then.rdev,
            then.target,
            self._build.now,
        )
        return ino

    def _drop(self, parent: int, name: bytes, now: Attr, following: Callable[[], None] | None) -> None:
        """Remove an entry with everything below; then `following`."""
        if following is not None:
            self._todo.append(following)
        if not now.is_dir:
            self._build.remove(parent, name, now)
            return
        self._todo.append(lambda: self._build.remove(parent, name, now))
        for below, attr in sorted(self._list(now.ino, None).items(), reverse=True):
            self._later_drop(now.ino, below, attr)

    # -- content and attributes ------------------------------------------------------------------------

    def _link(self, then: Attr, ino: int, nlink: int) -> None:
        """`ino` is from now on what `then` was."""
        if then.nlink > 1:
            self._links[then.ino] = ino
        if nlink > 1:
            self._taken[ino] = then.ino

    def _content_differs(self, then: Attr, now: Attr) -> bool:
        if (then.size, then.parts) != (now.size, now.parts):
            return True
        if then.blocks < 2 or (then.ino, then.cseq) == (now.ino, now.cseq):
            return False
        count = then.blocks
        old = block_parts(self._tx, self._fs, then, 0, count, self._at)
        return old != block_parts(self._tx, self._fs, now, 0, count)

    def _content(self, node: Attr, then: Attr) -> None:
        """`node` gets the content of then."""
        parts = block_parts(self._tx, self._fs, then, 0, then.blocks, self._at)
        self._build.content(node, then.size, parts, full=True, appended=None, mtime=then.mtime)

    def _later_attributes(self, ino: int, then: Attr, now: Attr | None) -> None:
        """A directory's, once what is in it is done: that changes its time."""
        begun = len(self._build.ops)

        def finish() -> None:
            same = len(self._build.ops) == begun
            self._attributes(ino, then, now if same or now is None else now._replace(mtime=then.mtime + 1))

        self._todo.append(finish)

    def _attributes(self, ino: int, then: Attr, now: Attr | None) -> None:
        """Mode, owner, times, xattrs; `now` None: of an inode just made, with that mode and owner."""
        fields: dict[str, int] = {}
        if now is None:
            fields = {"atime": then.atime, "mtime": then.mtime}
        else:
            pairs = {"uid": (then.uid, now.uid), "gid": (then.gid, now.gid), "mtime": (then.mtime, now.mtime)}
            pairs["mode"] = (stat.S_IMODE(then.mode), stat.S_IMODE(now.mode))
            fields = {name: was for name, (was, there) in pairs.items() if was != there}
        if fields:
            self._build.setattr(ino, **fields)
        had = {} if now is None else now.xattrs or {}
        wanted = then.xattrs or {}
        for name in sorted(had.keys() - wanted.keys()):
            self._build.setxattr(ino, name, None)
        for name, value in sorted(wanted.items()):
            if had.get(name) != value:
                self._build.setxattr(ino, name, value)
