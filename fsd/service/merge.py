"""Merging a fork into the filesystem it was made from: all of its changes or none, as one commit.

What is decided (`mergeplan`) is carried out on a `View` like any commit's operations, so rows, counts, the
change feed and what mounts see are those of a commit. In the same transaction the parent's state before it is
kept as a checkpoint, and the fork's base moves to its present state: what it changes from then on is what the
next merge brings. Nothing of the fork's tree is changed.
"""

from __future__ import annotations

import fnmatch
import stat
from collections.abc import Sequence
from typing import Any, Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model import blocks
from fsd.model.attrs import Attr
from fsd.model.errors import Conflict, UsageError
from fsd.model.limits import MERGE_PATTERNS_MAX, MERGE_SHOWN_MAX
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.service import pins
from fsd.service.access import FsRef, Grant, check_own, hold, hold_tree
from fsd.service.commit import Commits
from fsd.service.difference import Change, Difference
from fsd.service.forkcopy import copy_blobs
from fsd.service.mergeplan import Plan
from fsd.service.mergewords import OURS, THEIRS, Clash, Edit
from fsd.service.native import MERGE_UNDO as UNDO
from fsd.service.native import Ask, Checkpoints
from fsd.service.packs import Packs
from fsd.service.restore import Restores
from fsd.service.restore import Wish as Restore
from fsd.service.retained import At
from fsd.service.rows import DbSource
from fsd.service.rules import Rules
from fsd.service.view import Node, View, decode_xattrs, encode_xattrs
from fsd.service.writers import WRITER, Guard, load

NOTHING: Final = "nothing"
MERGED: Final = "merged"
CONFLICTS: Final = "conflicts"
CLEAN: Final = "clean"  # of a dry run
_KINDS: Final = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


@dataclass(frozen=True, slots=True)
class Wish:
    """A merge as asked for: patterns of paths whose conflicts are decided; `ours` are looked at first."""

    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Base:
    """Where the fork's changes are counted from, and what its parent is."""

    parent: int
    base: int
    pin: int
    first: int
    head: int


@dataclass(slots=True)
class Prepared:
    """A merge decided ahead, on a snapshot: good for one try, while both filesystems are as they were."""

    base: _Base
    head: int
    plan: Plan | None


class Merges:
    """Any thread."""

    def __init__(
        self, db: Database, packs: Packs, commits: Commits, checkpoints: Checkpoints, host: Host
    ) -> None:
        self._db, self._packs, self._commits = db, packs, commits
        self._checkpoints, self._host = checkpoints, host

    def rehearse(self, parent: FsRef, fork: FsRef, wish: Wish) -> dict[str, Any]:
        """What `merge` would do; nothing is changed. Raises as it does."""

        def read(tx: Tx) -> dict[str, Any]:
            head, base, plan = self._decided(tx, parent, fork, wish)
            status = CONFLICTS if plan.clashes else CLEAN if _anything(plan) else NOTHING
            changes = Difference(tx, fork.id, base.base, base.head).changes()
            return {
                **_answer(parent, fork, base, head, plan, status),
                "changes": [_change(one) for one in changes[:MERGE_SHOWN_MAX]],
                "changes_total": len(changes),
            }

        return self._commits.when_copied(parent, lambda: self._db.read(read))

    def prepare(self, parent: FsRef, fork: FsRef, wish: Wish) -> Prepared:
        """Decide a merge on a snapshot, so that `merge` holds nobody up with it."""

        def read(tx: Tx) -> Prepared:
            head, base, plan = self._decided(tx, parent, fork, wish)
            return Prepared(base, head, plan)

        return self._commits.when_copied(parent, lambda: self._db.read(read))

    def _decided(self, tx: Tx, parent: FsRef, fork: FsRef, wish: Wish) -> tuple[int, _Base, Plan]:
        check_own(tx, parent)
        base = _base(tx, parent, fork)
        row = tx.one("SELECT seq FROM fs WHERE id=?", (parent.id,))
        assert row is not None, "check_own found it"
        return int(row[0]), base, self._plan(tx, parent, fork, base, int(row[0]), wish)

    def _plan(self, tx: Tx, parent: FsRef, fork: FsRef, base: _Base, head: int, wish: Wish) -> Plan:
        view = View(DbSource(tx, parent.id), head + 1, self._commits.new_ino, tx)
        return Plan(tx, fork.id, base.base, base.head, seq=base.first, view=view, decide=_decide(wish))

    def merge(
        self,
        tx: Tx,
        parent: FsRef,
        fork: FsRef,
        who: Grant | None,
        wish: Wish,
        ready: Prepared | None = None,
    ) -> dict[str, Any]:
        """Bring the fork's changes into the parent, in the caller's transaction; the caller wakes the
        parent's feed when `status` is `merged`. With conflicts nothing is done, and they are in the answer.
        Raises `NotFound`, `Conflict` (no fork of the parent's), `LeaseHeld`, `ForkCopying`, `TooLarge`."""
        head, _ = hold_tree(tx, parent, who)
        hold(tx, fork)  # one that was deleted since is losing its rows
        base = _base(tx, parent, fork)
        plan = None
        if ready is not None and (ready.base, ready.head) == (base, head):
            plan, ready.plan = ready.plan, None
        if plan is None:
            plan = self._plan(tx, parent, fork, base, head, wish)
        else:
            plan.use(tx, DbSource(tx, parent.id))
        view = plan.view
        if plan.clashes:
            return _answer(parent, fork, base, head, plan, CONFLICTS)
        self._check_writers(tx, parent, plan)
        undo = None
        if _anything(plan):
            label = f"before the merge of {fork.name}"
            undo = self._checkpoints.make(tx, parent, None, Ask(label=label, reason=UNDO))
            self._host.crash_point("merge.kept")
            now = self._host.wall_ns()
            _CarryOut(plan, Rules(view, me=0, mount="server"), now).run()
            copy_blobs(tx, fork.id, parent.id, dict.fromkeys(_hashes(plan), 0), now)
            head, moved = self._commits.write_view(tx, parent, view)
            assert moved, "there was something to merge"
            self._host.crash_point("merge.written")
        self._rebase(tx, fork, base)
        status = MERGED if undo else NOTHING
        return {
            **_answer(parent, fork, base, head, plan, status),
            "undo_checkpoint_id": None if undo is None else undo["checkpoint_id"],
        }

    def _check_writers(self, tx: Tx, parent: FsRef, plan: Plan) -> None:
        """Raise `LeaseHeld` where the merge would change something under another's writer lease: it is
        nobody's session, so every lease that binds is another's."""
        now = self._host.wall_ns()
        held = [lease for lease in load(tx, parent.id) if lease.kind == WRITER and lease.binds(now)]
        if held:
            Guard(tx, parent.id, plan.view, held).check_places(*_places(plan))

    def _rebase(self, tx: Tx, fork: FsRef, base: _Base) -> None:
        """The fork's changes are counted from its present state."""
        if base.head == base.base:
            return
        pin = pins.add_pin(tx, fork, base.head, "base", fork.name)
        tx.execute("UPDATE fork SET base=?, base_pin=? WHERE fs=?", (base.head, pin, fork.id))
        pins.unpin(tx, self._packs, fork, base.pin)

    def roll_back(self, tx: Tx, fork: FsRef, restores: Restores, *, force: bool) -> dict[str, Any]:
        """Restore the fork's base, in the caller's transaction. Raises `Busy`, `ForkCopying`."""
        hold_tree(tx, fork)
        base = _base(tx, None, fork)
        done = restores.restore(tx, fork, None, Restore(At(seq=base.base), force=force))
        return {
            "status": "rolled-back" if done.moved else NOTHING,
            "fork_id": fork.name,
            "base_seq": base.base,
            "fs_seq": done.seq,
            "undo_checkpoint_id": None if done.undo is None else done.undo["checkpoint_id"],
        }

    def changes(self, fork: FsRef, limit: int) -> dict[str, Any]:
        """What the fork changed since its base, the first `limit` of it in order of path."""

        def read(tx: Tx) -> dict[str, Any]:
            base = _base(tx, None, fork)
            found = Difference(tx, fork.id, base.base, base.head).changes() if base.head > base.base else []
            shown = [_change(one) for one in found[:limit]]
            return {
                "fork_id": fork.name,
                "base_seq": base.base,
                "fork_seq": base.head,
                "changes": shown,
                "changes_total": len(found),
            }

        return self._db.read(read)


def _base(tx: Tx, parent: FsRef | None, fork: FsRef) -> _Base:
    row = tx.one(
        "SELECT k.origin, k.base, k.base_pin, f.origin_seq, f.seq, k.origin_name FROM fork k CROSS JOIN fs f "
        "WHERE k.fs=? AND f.id=k.fs",
        (fork.id,),
    )
    if row is None:
        raise Conflict(f"{fork.name} is no fork")
    if parent is not None and row[0] != parent.id:
        raise Conflict(
            f"{fork.name} is a fork of {row[5]}, not of {parent.name}", hint="merge it into its own parent"
        )
    return _Base(*row[:5])


def _decide(wish: Wish) -> Any:
    for patterns in (wish.ours, wish.theirs):
        if len(patterns) > MERGE_PATTERNS_MAX:
            raise UsageError(f"at most {MERGE_PATTERNS_MAX} patterns")

    def decide(path: bytes) -> str | None:
        text = path.decode("utf-8", "surrogateescape")
        for patterns, answer in ((wish.ours, OURS), (wish.theirs, THEIRS)):
            if any(_matches(text, pattern) for pattern in patterns):
                return answer
        return None

    return decide


def _matches(path: str, pattern: str) -> bool:
    """`*` is any text, also of several components. A pattern without a leading slash matches at any depth;
    one that matches a directory matches what lies below."""
    if not pattern.startswith("/"):
        pattern = "*/" + pattern
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.rstrip("/") + "/*")


def _places(plan: Plan) -> tuple[set[int], set[int]]:
    """Where the parent changes: directories in or of which something does, files that change in place.
    What is made lies somewhere below a directory that is there already."""
    directories = {parent for parent, _ in plan.slots}
    old, new = ({getattr(slot, side) for slot in plan.slots.values()} for side in ("old", "new"))
    files: set[int] = set()
    for ino in (old | new | plan.edits.keys()) - {0}:
        node = plan.view.node(ino)
        if node is not None and node.is_dir:
            directories.add(ino)
        elif node is not None and (ino in new or ino in plan.edits):
            files.add(ino)
    return directories - plan.made.keys(), files


def _anything(plan: Plan) -> bool:
    return bool(plan.slots or plan.edits)


def _hashes(plan: Plan) -> set[bytes]:
    """Blobs that the parent's rows will name."""
    found: set[bytes] = set()
    whole = [attr for _, attr in plan.new_inodes()]
    whole += [edit.theirs for edit in plan.edits.values() if edit.content]
    for attr in whole:
        for raw in (attr.parts, *plan.blocks_of(plan.theirs, attr).values()):
            found |= blocks.hashes(blocks.decode(raw))
    return found


class _CarryOut:
    """A plan without clashes, done to the parent's view."""

    def __init__(self, plan: Plan, rules: Rules, now: int) -> None:
        self.plan, self.rules, self.view, self.now = plan, rules, rules.view, now

    def run(self) -> None:
        """Old names go before new ones come: a name may change hands. An inode goes when it has none left."""
        made = {number: self._make(number, attr) for number, attr in self.plan.new_inodes()}
        taken: list[tuple[Node, int, bytes]] = []
        for (parent, name), slot in self.plan.slots.items():
            if slot.old:
                node = self._node(slot.old)
                self.view.take(self.view.slot(parent, name))
                node.nlink -= 1
                self.rules.touch_parent(parent, self.now, -1 if node.is_dir else 0)
                taken.append((node, parent, name))
        placed: set[int] = set()
        for (parent, name), slot in self.plan.slots.items():
            if slot.new:
                node = self._node(slot.new)
                self.rules.enter(self.view.slot(parent, name), node, self.now)
                node.ctime = self.now
                placed.add(node.ino)
        for node, parent, name in taken:
            self._after_take(node, parent, name, placed)
        for number, edit in self.plan.edits.items():
            self._edit(self._node(number), edit)
        for attr, node in made.values():
            node.mtime = attr.mtime  # entering names below it touched it

    def _node(self, ino: int) -> Node:
        node = self.view.node(ino)
        assert node is not None, "what the plan names is there"
        return node

    def _after_take(self, node: Node, parent: int, name: bytes, placed: set[int]) -> None:
        node.ctime, node.changed = self.now, True
        if node.ino in placed or node.gone:
            return
        if node.is_dir or node.nlink == 0:
            self.rules.drop_last(node, parent, name)

    def _make(self, number: int, attr: Attr) -> tuple[Attr, Node]:
        node = self.rules.make_node(number, attr.mode, attr.uid, attr.gid, self.now)
        node.rdev, node.target, node.size, node.atime = attr.rdev, attr.target, attr.size, attr.atime
        node.xattrs = encode_xattrs(attr.xattrs or {})
        node.parts = attr.parts
        self.view.add_node(node)
        for idx, parts in self.plan.blocks_of(self.plan.theirs, attr).items():
            self.view.set_block(node, idx, parts)
        return attr, node

    def _edit(self, node: Node, edit: Edit) -> None:
        if edit.content:
            theirs = self.plan.blocks_of(self.plan.theirs, edit.theirs)
            for idx in self.plan.our_blocks(node).keys() | theirs.keys():
                self.view.set_block(node, idx, theirs.get(idx))
            node.size, node.parts, node.rdev = edit.theirs.size, edit.theirs.parts, edit.theirs.rdev
            node.cseq = node.grown = self.rules.seq
            node.writer = 0
        for name, value in edit.fields.items():
            setattr(node, name, value)
        if edit.xattrs:
            held = decode_xattrs(node.xattrs)
            for key, kept in edit.xattrs.items():
                held.pop(key, None)
                if kept is not None:
                    held[key] = kept
            node.xattrs = encode_xattrs(held)
        node.ctime, node.changed = self.now, True


# -- answers -----------------------------------------------------------------------------------------


def _answer(parent: FsRef, fork: FsRef, base: _Base, seq: int, plan: Plan, status: str) -> dict[str, Any]:
    applied = 0 if status in (CONFLICTS, NOTHING) else len(plan.slots) + len(plan.edits)
    clashes = sorted(plan.clashes, key=lambda one: (one.path, one.kind))
    return {
        "status": status,
        "file_system_id": parent.name,
        "fork_id": fork.name,
        "base_seq": base.base,
        "fork_seq": base.head,
        "fs_seq": seq,
        "applied": applied,
        "conflicts": [_clash(one) for one in clashes[:MERGE_SHOWN_MAX]],
        "conflicts_total": len(clashes),
    }


def _clash(one: Clash) -> dict[str, Any]:
    return {
        "path": show(one.path),
        "kind": one.kind,
        "base": _brief(one.base),
        "ours": _brief(one.ours),
        "theirs": _brief(one.theirs),
    }


def _change(one: Change) -> dict[str, Any]:
    shown: dict[str, Any] = {"path": show(one.path), "change": one.kind, "content": one.content}
    if one.source is not None:
        shown["from"] = show(one.source)
    return {**shown, "base": _brief(one.before), "theirs": _brief(one.after)}


def _brief(attr: Attr | None) -> dict[str, Any] | None:
    """An inode in a list of conflicts; None: nothing is there."""
    if attr is None:
        return None
    return {
        "kind": _KINDS.get(stat.S_IFMT(attr.mode), "other"),
        "size_bytes": attr.size,
        "mode": f"{stat.S_IMODE(attr.mode):04o}",
        "revision": f"{attr.ino}:{attr.cseq}",
    }


def patterns(given: Sequence[Any], name: str) -> tuple[str, ...]:
    """A body's list of patterns; raises `UsageError`."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) and one for one in given):
        raise UsageError(f"{name} is a list of patterns of paths")
    return tuple(given)
