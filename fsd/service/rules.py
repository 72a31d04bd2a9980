"""What the rules that decide every operation of a commit have in common. In memory, no I/O of their own.

A rule is a function `f(rules, op)` in `rules_names`, `rules_rename`, `rules_attrs` or `rules_content`;
`decide.apply` picks it. It changes `rules.view` completely or not at all: all checks come before the first
change. It returns None when the operation was simply applied, or the `Outcome` that tells where the change
went (CONFLICT). It raises `Refuse` when nothing is done, and `NeedFull` when a content operation meets a
conflict without its whole block list. The rules are those of design section 3 (Sharing), numbered in
comments; the why of each is in DESIGN.md.
"""

from __future__ import annotations

import errno
import stat
from typing import Final, NamedTuple

from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Parts
from fsd.model.errors import PosixError
from fsd.model.limits import BESIDE_NAMES_MAX
from fsd.model.names import LOST_DIR, check_name, conflict_name, show
from fsd.model.ops import CONFLICT, Op, Outcome
from fsd.service.redirects import Redirects
from fsd.service.view import GoneFile, Name, NameKey, Node, View

ID_MAX: Final = 2**32 - 1


class Refuse(Exception):
    """The operation is not done; `errno` and a reason for people. `at`: where the inode lives instead."""

    def __init__(self, number: int, reason: str, at: Name | None = None) -> None:
        super().__init__(reason)
        self.errno, self.reason, self.at = number, reason, at


class NeedFull(Exception):
    """Content operation `opno` must come again with its full block list."""

    def __init__(self, opno: int) -> None:
        super().__init__(opno)
        self.opno = opno


class Beside(NamedTuple):
    """Something that was given the entry (`parent`, `name`) and was meant for (`wanted_parent`, `wanted`)."""

    parent: int
    name: bytes
    ino: int
    wanted_parent: int
    wanted: bytes
    reason: str


class Rules:
    """The state of one commit's application. One thread, one commit.

    `me` is the session (0: a direct command, built on the locked state), `mount` its name in conflict names,
    `home` the path of the directory it mounts (where its lost files go).
    Numbers a session uses may have been redirected, and its names moved: `redirects` (None: none were).
    `folds` maps the parts of a block to equal ones in one blob, for appends (None: do not append).
    """

    def __init__(
        self,
        view: View,
        *,
        me: int,
        mount: str,
        home: tuple[bytes, ...] = (),
        redirects: Redirects | None = None,
        folds: dict[Parts, Parts] | None = None,
    ) -> None:
        self.view, self.me, self.mount, self.home = view, me, mount, home
        self.seq = view.seq
        self.new_ino = view.new_ino
        self.redirects = Redirects() if redirects is None else redirects
        self.folds = folds
        self.put_beside: list[Beside] = []  # for the record of conflicts

    # Words used by several rules.

    def real(self, ino: int) -> int:
        """The inode a session's number means now."""
        return self.redirects.real(ino)

    def never_made(self, op: Op) -> bool:
        """Whether `op` is about an inode, or in a directory, whose creation was refused. It is refused too:
        done alone it would go into the lost-and-found without a name, and the rest be kept by the client."""
        if self.redirects.none:
            return False
        nothing = self.redirects.nothing
        parents = (getattr(op, "parent", None), getattr(op, "new_parent", None))
        return nothing(op.ino) or any(nothing(parent) for parent in parents if parent)

    def remember_move(self, parent: int, name: bytes, ino: int, to: NameKey) -> None:
        """From now on the session means by (parent, name) of `ino` the entry `to`."""
        self.redirects.move((parent, name, ino), to)

    def locate(self, parent: int, name: bytes, ino: int) -> Name | None:
        """The entry a session means by (parent, name) of `ino`: there, or where a conflict moved it."""
        slot = self.view.name(parent, name)
        if slot is not None and slot.ino == ino:
            return slot
        to = self.redirects.moved((parent, name, ino))
        if to is None:
            return None
        slot = self.view.name(*to)
        return slot if slot is not None and slot.ino == ino else None

    def directory(self, ino: int) -> Node | None:
        node = self.view.node(ino)
        return node if node is not None and node.is_dir else None

    def free_name(self, parent: int, name: bytes, time: int) -> Name:
        """An absent entry called NAME.conflict-… in `parent`."""
        for attempt in range(BESIDE_NAMES_MAX):
            slot = self.view.slot(parent, conflict_name(name, self.mount, time, attempt))
            if not slot.ino:
                return slot
        raise Refuse(errno.EEXIST, f"no free conflict name for {show(name)}")

    def home_dir(self) -> Node:
        """The root of the mount; the root of all where that is gone."""
        root = self.view.node(ROOT_INO)
        assert root is not None, "a filesystem has a root"
        here = root
        for name in self.home:
            slot = self.view.name(here.ino, name)
            below = None if slot is None else self.directory(slot.ino)
            if below is None:
                return root
            here = below
        return here

    def lost_dir(self, time: int) -> Node:
        """`.fsd-lost` at the root of the mount, made when it is not there. World-writable like /tmp: whoever
        lost something must be able to take it out. Where the name is no directory: the mount's root."""
        home = self.home_dir()
        slot = self.view.slot(home.ino, LOST_DIR)
        if slot.ino:
            return self.directory(slot.ino) or home
        node = self.make_node(self.new_ino(), stat.S_IFDIR | 0o1777, 0, 0, time)
        self.view.add_node(node)
        self.enter(slot, node, time)
        return node

    def lost_place(self) -> int:
        """Where `lost_dir` is, or would be made."""
        home = self.home_dir()
        slot = self.view.name(home.ino, LOST_DIR)
        return home.ino if slot is None or self.directory(slot.ino) is None else slot.ino

    def make_node(self, ino: int, mode: int, uid: int, gid: int, time: int) -> Node:
        """A new inode without a name yet (`nlink` 0)."""
        return Node(
            ino,
            mode,
            1 if stat.S_ISDIR(mode) else 0,
            uid,
            gid,
            0,
            time,
            time,
            time,
            0,
            None,
            0,
            None,
            None,
            self.seq,
            self.me,
            self.seq,
            self.seq,
            stored=False,
        )

    def enter(self, slot: Name, node: Node, time: int) -> None:
        """Give `node` the absent name `slot`: links, parent's times and links."""
        self.view.place(slot, node.ino, self.me)
        node.nlink += 1
        node.changed = True
        if node.is_dir:
            node.parent = slot.parent
        self.touch_parent(slot.parent, time, 1 if node.is_dir else 0)

    def leave(self, slot: Name, node: Node, time: int) -> None:
        """Take the name `slot` from `node`; with its last one the inode goes."""
        self.view.take(slot)
        self.touch_parent(slot.parent, time, -1 if node.is_dir else 0)
        node.nlink -= 1
        node.ctime = time
        node.changed = True
        if node.is_dir or node.nlink == 0:
            self.drop_last(node, slot.parent, slot.name)

    def drop_last(self, node: Node, parent: int, name: bytes) -> None:
        """`node`, whose last name that was, goes."""
        gone = GoneFile(parent, name, node.mode, node.uid, node.gid, node.xattrs)
        self.view.drop(node, gone if node.is_file else None)

    def touch_parent(self, ino: int, time: int, links: int) -> None:
        parent = self.view.node(ino)
        assert parent is not None, "an entry's parent exists"
        parent.mtime = parent.ctime = time
        parent.nlink += links
        parent.changed = True

    def changed_since(self, node: Node, base: int) -> bool:
        """Whether another session changed the content after `base`."""
        return node.cseq > base and node.writer != self.me

    def beside(self, slot: Name, parent: int, name: bytes, reason: str) -> None:
        """What has the entry `slot` now was meant for another."""
        if self.me and (slot.parent, slot.name) != (parent, name):
            self.put_beside.append(Beside(slot.parent, slot.name, slot.ino, parent, name, reason))

    def told(
        self, op: Op, number: int, reason: str, ino: int = 0, parent: int = 0, name: bytes = b""
    ) -> Outcome:
        return Outcome(op.opno, CONFLICT, number, ino, parent, name, reason)


def check_new_name(name: bytes) -> None:
    """Refuse what can be no entry's name."""
    try:
        check_name(name)
    except PosixError as exc:
        raise Refuse(exc.errno, exc.message) from exc
