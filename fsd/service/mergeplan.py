"""What of a fork's changes goes into its parent: decided in memory, nothing is changed here.

A merge is three-way, by value: *base* is the fork as it was made (or last merged), *theirs* the fork now,
*ours* the parent now. What theirs did not change stays ours; what ours did not change becomes theirs; what
both changed to the same stays; the rest is a `Clash`, unless a pattern decides it. Names, content, each
attribute and each xattr are compared for themselves, so a file edited here and renamed there is both.

An inode of the fork is the parent's of the same number. Where the parent has none of that number, it is what
the parent has under the name it had at the base, if that is of the same type (many programs replace a file to
change it); what both made under one name is one if it is equal. A directory that the fork removed and made
anew under its name is the one it was (`mergeanew`). Names are decided from the top down, so that a directory
is known before what lies in it.
"""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Collection, Iterator

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.errors import TooLarge
from fsd.model.limits import BLOCK, MERGE_BLOCKS_MAX
from fsd.service.difference import Key, Side, changed_keys
from fsd.service.mergeanew import made_anew
from fsd.service.mergeattrs import attributes, ordinary, take
from fsd.service.mergecheck import faults
from fsd.service.mergewords import (
    ATTRIBUTES,
    BOTH_ADDED,
    BOTH_CHANGED,
    BOTH_RENAMED,
    CHANGED_REMOVED,
    FILLED_REMOVED,
    LOOP,
    OURS,
    REMOVED_CHANGED,
    REMOVED_FILLED,
    REMOVED_RENAMED,
    RENAMED_REMOVED,
    THEIRS,
    Clash,
    Decide,
    Edit,
    Slot,
)
from fsd.service.view import Node, Source, View


class Plan:
    """The decided merge: `slots`, `edits` and `made` (new inodes of the parent → the fork's they are), or
    `clashes` nobody decided. `seq` is what both had in common when the fork was made."""

    def __init__(
        self, tx: Tx, fork: int, first: int, last: int, *, seq: int, view: View, decide: Decide
    ) -> None:
        keys = changed_keys(tx, fork, first, last)
        self.base, self.theirs, self.view = Side(tx, fork, first), Side(tx, fork, last), view
        self._seq, self._decide = seq, decide
        self._before, self._after = self.base.entries(keys.names), self.theirs.entries(keys.names)
        self._inos, self._with_blocks = keys.inos | keys.blocks, keys.blocks
        inos = self._inos | set(self._before.values()) | set(self._after.values())
        inos.update(parent for parent, _ in keys.names)
        self.base.load_attrs(inos)
        self.theirs.load_attrs(inos)
        view.load_nodes(inos)
        self.made: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # fork's inodes that are others of the parent's
        self._others: dict[int, int] = {}  # and back
        self._after = made_anew(
            self.base, self.theirs, self._before, self._after, lambda ino: self.number(ino) is None
        )
        names = self._before.keys() | self._after.keys()
        self._keys = {key for key in names if self._before.get(key) != self._after.get(key)}
        view.load_names(self._keys)
        self.slots: dict[Key, Slot] = {}
        self.edits: dict[int, Edit] = {}
        self.clashes: list[Clash] = []
        self._left_out: set[int] = set()  # directories the fork made that are not made here
        self._stays: set[int] = set()  # inodes of the parent no name of which goes
        self._unplaced: set[int] = set()  # and which get no new one
        self._told: set[int] = set()  # the fork's inodes a clash was told of
        self._going: set[int] = set()  # files of the parent that lose their last name
        self._joined: list[tuple[Key, int, int]] = []  # what both made: the fork's, the parent's
        self._blocks = 0
        self._gained: dict[int, list[Key]] = defaultdict(list)
        for key in self._keys:
            if key in self._after:
                self._gained[self._after[key]].append(key)
        self._run()

    def use(self, tx: Tx, source: Source) -> None:
        """Go on in another transaction, which sees both filesystems as they were; `source`: the parent's."""
        self.base.use(tx)
        self.theirs.use(tx)
        self.view.source, self.view.tx = source, tx

    def _run(self) -> None:
        self.base.load_paths(parent for parent, _ in self._keys if self._there(self.base, parent))
        self.theirs.load_paths(parent for parent, _ in self._keys if self._there(self.theirs, parent))
        for key in sorted(self._keys, key=lambda key: (self.path(key).count(b"/"), key)):
            self._name(key)
        self._drop_cancelled()
        self._removed_files()
        before = -1
        while before != len(self.slots):  # what stays keeps what it is in, and that what *it* is in
            before = len(self.slots)
            self._removed_directories()
            self._kept_by_name()
        self._replaced()
        for key, ino, number in self._joined:
            self._both_made(key, ino, number)
        for ino in sorted(self._inos):
            self._inode(ino)
        placed = {slot.new for slot in self.slots.values()}
        self.made = {number: ino for number, ino in self.made.items() if number in placed}
        decided = not self.clashes  # else names are missing in the plan
        for slot, kind, ino in faults(self.view, self.slots, self.made, self._living):
            if decided or kind == LOOP:
                self._undecidable(slot.key, kind, slot.base, ino, self._after.get(slot.key, 0))

    @staticmethod
    def _there(side: Side, ino: int) -> bool:
        return side.attr(ino) is not None

    # -- who is who ----------------------------------------------------------------------------------

    def path(self, key: Key) -> bytes:
        """Where the fork has the name, or had it."""
        side = self.theirs if key in self._after or not self._there(self.base, key[0]) else self.base
        return side.path(key)

    def number(self, ino: int) -> int | None:
        """The parent's number for the fork's inode; None: it has none, and gets none so far."""
        found = self._known(ino)
        if found is not None or self.base.attr(ino) is None:
            return found
        for parent, name in self.base.names(ino):
            there = self._directory(parent)
            found = None if there is None else self._below(there, name, ino)
            if found is not None:
                return found
        return None

    def _known(self, ino: int) -> int | None:
        if ino in self._numbers:
            return self._numbers[ino]
        return ino if ino in self.made or self.view.node(ino) is not None else None

    def _directory(self, ino: int) -> int | None:
        """`number` of a directory: by the nearest one above it that is known, however deep it lies."""
        way: list[Key] = []
        number = self._known(ino)
        while number is None:
            if self.base.attr(ino) is None:
                return None
            ((above, name),) = self.base.names(ino)
            way.append((ino, name))
            ino = above
            number = self._known(ino)
        for below, name in reversed(way):
            number = self._below(number, name, below)
            if number is None:
                return None
        return number

    def _below(self, there: int, name: bytes, ino: int) -> int | None:
        """The parent's inode of that name, if it can be the fork's `ino`."""
        was, slot = self.base.attr(ino), self.view.name(there, name)
        node = None if slot is None else self.view.node(slot.ino)
        if was is None or node is None or stat.S_IFMT(was.mode) != stat.S_IFMT(node.mode):
            return None
        if self.base.attr(node.ino) is not None or self._others.get(node.ino, ino) != ino:
            return None  # it is the fork's of its own number, or another's: two would be one
        self._numbers[ino], self._others[node.ino] = node.ino, ino
        return node.ino

    def _living(self, numbers: Collection[int]) -> set[int]:
        """Those of the parent's directories that the fork has still."""
        fork = {number: self._others.get(number, number) for number in numbers}
        self.theirs.load_attrs(fork.values())
        return {number for number, ino in fork.items() if self._there(self.theirs, ino)}

    def _is(self, ino: int, ours: int) -> bool:
        """Whether the fork's `ino` is the parent's `ours`; 0 is nothing."""
        return ino == ours or (ino != 0 and ours != 0 and self.number(ino) == ours)

    def _same_new(self, ino: int, ours: int) -> bool:
        """Whether what the fork made is equal to what the parent has there: one from now on."""
        now, node = self.theirs.attr(ino), self.view.node(ours)
        if now is None or node is None or self.base.attr(ino) is not None:
            return False
        if self.base.attr(ours) is not None and (node.is_dir or ours in self._inos):
            return False  # the parent moved it here, and the fork has it too: two would be one
        other = self._others.get(ours, ino)
        if other != ino and (self.base.attr(other) is not None or not self._alike(now, other)):
            return False
        both_dirs = now.is_dir and node.is_dir
        if not both_dirs and (now.mode != node.mode or not self._same_content(now, self.theirs, node)):
            return False
        self._numbers[ino], self._others[ours] = ours, self._others.get(ours, ino)
        return True

    def _alike(self, now: Attr, other: int) -> bool:
        """Of two new files of the fork that would be one of the parent: neither's attributes are lost."""
        attr = self.theirs.attr(other)
        return attr is not None and attributes(now) == attributes(attr)

    def _same_content(self, attr: Attr, side: Side, node: Node) -> bool:
        if (attr.size, attr.parts, attr.target, attr.device) != (
            node.size,
            node.parts,
            node.target,
            0 if node.is_file else node.rdev,
        ):
            return False
        if attr.size <= BLOCK or (attr.ino == node.ino and attr.cseq == node.cseq <= self._seq):
            return True
        return self.blocks_of(side, attr) == self.our_blocks(node)

    def blocks_of(self, side: Side, attr: Attr) -> dict[int, bytes]:
        """The stored blocks of a file from the second on, as the fork has them."""
        self._spend(attr.blocks)
        return dict(side.content((attr.ino,))[attr.ino]) if attr.size > BLOCK else {}

    def our_blocks(self, node: Node) -> dict[int, bytes]:
        self._spend(node.size // BLOCK)
        rows = self.view.blocks(node, (), 1)
        return {idx: row.parts for idx, row in rows.items() if row.parts is not None}

    def _spend(self, blocks: int) -> None:
        self._blocks += blocks
        if self._blocks > MERGE_BLOCKS_MAX:
            raise TooLarge(
                f"the files that changed have more than {MERGE_BLOCKS_MAX} blocks of content",
                hint="merge earlier next time, or copy the large files with `fsd cp`",
            )

    def _clash(self, path: bytes, kind: str, *inos: int) -> str | None:
        """Record that base, ours and theirs of `path` differ, unless a pattern decides; which one."""
        decided = self._decide(path)
        if decided is None:
            base, ours, theirs = inos
            node = self.view.node(ours) if ours else None
            self.clashes.append(
                Clash(
                    path,
                    kind,
                    self.base.attr(base) if base else None,
                    None if node is None else node.attr(),
                    self.theirs.attr(theirs) if theirs else None,
                )
            )
        return decided

    # -- names ---------------------------------------------------------------------------------------

    def _name(self, key: Key) -> None:
        was, now = self._before.get(key, 0), self._after.get(key, 0)
        there = self.number(key[0])
        if there is None:
            self._without_directory(key, was, now)
            return
        slot = self.view.name(there, key[1])
        ours = slot.ino if slot is not None else 0
        if self._is(was, ours):
            self._take_theirs(key, there, ours, was, now)
            return
        if was:
            self._both_removed(key, was)
        if now and self._is(now, ours):
            return
        if now and ours and self._same_new(now, ours):
            self._joined.append((key, now, ours))
            return
        if now or ours:
            kind = BOTH_ADDED if not was else REMOVED_CHANGED if not ours else CHANGED_REMOVED
            if was and ours and now:
                kind = BOTH_CHANGED
            if self._clash(self.path(key), kind, was, ours, now) == THEIRS:
                self._take_theirs(key, there, ours, 0, now)
            elif now:
                self._leave_out(now)

    def _without_directory(self, key: Key, was: int, now: int) -> None:
        """The parent has no such directory."""
        if was:
            self._both_removed(key, was)
        if not now:
            return
        if key[0] in self._left_out or now in self._told:
            self._leave_out(now)
        else:
            self._told.add(now)
            if self._clash(self.path(key), REMOVED_FILLED, was, 0, now) == THEIRS:
                self._undecidable(key, REMOVED_FILLED, was, 0, now)
            self._leave_out(now)

    def _undecidable(self, key: Key, kind: str, was: int, ours: int, now: int) -> None:
        """A pattern says theirs where that cannot be done: it stays a clash."""
        decide, self._decide = self._decide, lambda path: None
        self._clash(self.path(key), kind, was, ours, now)
        self._decide = decide

    def _take_theirs(self, key: Key, there: int, ours: int, was: int, now: int) -> None:
        new = 0
        if now:
            number = self.number(now)
            if number is None and self.base.attr(now) is not None:
                number = self._gone_here(key, now)
                if number is None:
                    if was and self.theirs.attr(was) is not None:
                        # It stays removed; what was there goes where the fork has it.
                        self.slots[there, key[1]] = Slot(ours, 0, key, was)
                    return
            elif number is None:
                number = now
                self.made[now] = now
            new = number
        if new != ours:
            self.slots[there, key[1]] = Slot(ours, new, key, was)

    def _gone_here(self, key: Key, now: int) -> int | None:
        """The fork gave a name to what the parent removed: a new inode for it, if so decided."""
        if now in self._told:
            return None
        self._told.add(now)
        if self._clash(self.path(key), REMOVED_RENAMED, now, 0, now) != THEIRS:
            return None
        return self._revive(now)

    def _revive(self, ino: int) -> int:
        """A removed inode's number is not used again: somebody may hold it open."""
        number = self._numbers[ino] = self.view.new_ino()
        self.made[number] = ino
        return number

    def _leave_out(self, ino: int) -> None:
        """A name of the fork's for `ino` is not made: nor is its old one taken."""
        now = self.theirs.attr(ino)
        number = self.number(ino)
        if number is not None and self.view.node(number) is not None:
            self._stays.add(number)
        elif now is not None and now.is_dir:
            self._left_out.add(ino)

    def _both_removed(self, key: Key, was: int) -> None:
        """Neither has `was` under the name any more: did the parent move it?"""
        number = self.number(was)
        if number is None or was in self._told or self.view.node(number) is None:
            return
        known = {(self.number(parent), name) for parent, name in self.base.names(was)}
        moved = [slot for slot in self.view.names_of(number) if (slot.parent, slot.name) not in known]
        if not moved:
            return
        gained = {(self.number(parent), name) for parent, name in self._gained[was]}
        still = self.theirs.attr(was) is not None
        if still and (not gained or gained == {(slot.parent, slot.name) for slot in moved}):
            return
        self._told.add(was)
        kind = BOTH_RENAMED if still else RENAMED_REMOVED
        decided = self._clash(self.path(key), kind, was, number, was if still else 0)
        if decided == THEIRS:
            for slot in moved:
                self.slots.setdefault((slot.parent, slot.name), Slot(number, 0, key, was))
        elif still:
            self._unplaced.add(number)
            self._stays.add(number)

    # -- removals ------------------------------------------------------------------------------------

    def _removed_files(self) -> None:
        """Files that lose their last name must be as the fork knew them."""
        left: dict[int, int] = {}
        for slot in self.slots.values():
            for ino, links in ((slot.old, -1), (slot.new, 1)):
                node = self.view.node(ino) if ino else None
                if node is not None and not node.is_dir:
                    left[ino] = left.get(ino, node.nlink) + links
        theirs = {number: ino for ino, number in self._numbers.items()}
        for at, slot in sorted(self.slots.items()):
            node = self.view.node(slot.old) if slot.old else None
            if node is None or node.is_dir or left[slot.old] > 0:
                continue
            self._going.add(slot.old)
            if self._is_wanted(slot, node, theirs.get(slot.old, slot.old)):
                if self._decide(self.path(slot.key)) == OURS:
                    self._going.discard(slot.old)
                    self._keep(at, slot)
                else:
                    self._undecidable(slot.key, REMOVED_CHANGED, slot.base, slot.old, slot.base)
                continue
            was = self.base.attr(slot.base) if slot.base else None
            same = was is None or self._same_content(was, self.base, node) or self._same_as_new(slot, node)
            if same and not self._loses_attributes(slot, node):
                continue
            kind = BOTH_CHANGED if slot.new else CHANGED_REMOVED
            now = self._after.get(slot.key, 0)
            if self._clash(self.path(slot.key), kind, slot.base, slot.old, now) == OURS:
                self._going.discard(slot.old)
                self._keep(at, slot)
        self._drop_cancelled()

    def _same_as_new(self, slot: Slot, node: Node) -> bool:
        """Whether what the fork has there instead is what the parent made of it."""
        now = self.theirs.attr(self.made[slot.new]) if slot.new in self.made else None
        if now is None or stat.S_IFMT(now.mode) != stat.S_IFMT(node.mode):
            return False
        return self._same_content(now, self.theirs, node)

    def _is_wanted(self, slot: Slot, node: Node, ino: int) -> bool:
        """Whether a file that would go lives on in the fork, as `ino`, under names the parent removed: then
        it goes only if nobody changed it, nor its mode, and nobody decided the name."""
        was, now = self.base.attr(ino), self.theirs.attr(ino)
        if now is None:
            return False
        if was is None or self._fork_changed(was, now) or attributes(was) != attributes(now):
            return True
        if attributes(was) != attributes(node) and slot.new not in self.made:  # else `_replaced` keeps them
            return True
        return not (slot.base and self._same_content(was, self.base, node))

    def _keep(self, at: Key, slot: Slot) -> None:
        """The parent's name stays as it is; what the fork has there stays where the parent has it."""
        del self.slots[at]
        if slot.new and slot.new not in self.made:
            self._stays.add(slot.new)

    def _drop_cancelled(self) -> None:
        placed = {slot.new for slot in self.slots.values()} - self._unplaced - {0}
        for at, slot in list(self.slots.items()):
            if slot.new in self._unplaced and slot.old in placed - self._stays:
                slot.new = 0  # what was there goes where the fork has it
            elif slot.new in self._unplaced or (slot.old in self._stays and not slot.new):
                del self.slots[at]

    def _removed_directories(self) -> None:
        """Directories that go must be empty then; from the bottom up: what stays keeps what it is in."""
        placed = {slot.new for slot in self.slots.values()}
        going = [
            (at, slot)
            for at, slot in self.slots.items()
            if slot.old and slot.old not in placed and (node := self.view.node(slot.old)) and node.is_dir
        ]
        going.sort(key=lambda one: (-self.path(one[1].key).count(b"/"), one[0]))
        counts = self.view.source.child_counts([slot.old for _, slot in going]) if going else {}
        for (parent, _name), slot in self.slots.items():
            counts[parent] = counts.get(parent, 0) + (slot.new != 0) - (slot.old != 0)
        kept: set[int] = set()
        for at, slot in going:
            node, filled = self.view.node(slot.old), counts.get(slot.old, 0)
            assert node is not None, "it is one of the parent's"
            if not filled and not self._loses_attributes(slot, node):
                continue
            if slot.old not in kept:
                kind = FILLED_REMOVED if filled else BOTH_CHANGED if slot.new else CHANGED_REMOVED
                told = self.path(slot.key), kind, slot.base, slot.old, self._after.get(slot.key, 0)
                decided = self._clash(*told)
                if decided == THEIRS and not filled:
                    continue
                if decided == THEIRS:
                    self._undecidable(slot.key, *told[1:])
            self._keep(at, slot)
            kept.add(at[0])
            counts[at[0]] = counts.get(at[0], 0) + (slot.new == 0)
        self._drop_cancelled()

    def _kept_by_name(self) -> None:
        """What stays, since its name in the fork is not made, keeps the one the fork gave to another."""
        placed = {slot.new for slot in self.slots.values()} | self._going
        found = [one for one in self.slots.items() if one[1].old in self._stays - placed]
        for at, slot in found:
            if self._decide(self.path(slot.key)) != OURS:
                self._undecidable(slot.key, REMOVED_CHANGED, slot.base, slot.old, slot.base)
            self._keep(at, slot)
        self._drop_cancelled()

    def _replaced(self) -> None:
        """What the fork replaced by something new of its type keeps the attributes the parent changed."""
        placed = {slot.new for slot in self.slots.values()}
        for slot in self.slots.values():
            was, node = self.base.attr(slot.base) if slot.base else None, self.view.node(slot.old)
            if was is None or node is None or slot.old in placed:
                continue
            now = self._heir(slot, was, node)
            if now is not None:
                self._keep_attributes(slot, was, now, node)

    def _heir(self, slot: Slot, was: Attr, node: Node) -> Attr | None:
        """What the fork made anew in the place of something of its type."""
        now = self.theirs.attr(self.made[slot.new]) if slot.new in self.made else None
        if now is None or was.ino == now.ino:
            return None
        return now if len({stat.S_IFMT(one) for one in (was.mode, node.mode, now.mode)}) == 1 else None

    def _loses_attributes(self, slot: Slot, node: Node) -> bool:
        """Whether what the parent made of mode, owner, group or xattrs of what goes would go with it."""
        was = self.base.attr(slot.base) if slot.base else None
        if was is None or attributes(was) == attributes(node):
            return False
        return self._heir(slot, was, node) is None

    def _both_made(self, key: Key, ino: int, number: int) -> None:
        """What both made under one name gets the attributes that either side gave it."""
        now, node = self.theirs.attr(ino), self.view.node(number)
        if now is None or node is None or number in self._going:
            return
        edit = Edit(now)
        clash = take(edit, ordinary(now), now, node)
        if clash and self._clash(self.path(key), ATTRIBUTES, 0, number, ino) == OURS:
            return
        if edit.fields or edit.xattrs:
            self.edits[number] = edit

    def _keep_attributes(self, slot: Slot, was: Attr, now: Attr, node: Node) -> None:
        edit = Edit(now)
        clash = take(edit, was, node, now)
        if clash and self._clash(self.path(slot.key), ATTRIBUTES, slot.base, slot.old, now.ino) == THEIRS:
            return
        if edit.fields or edit.xattrs:
            self.edits[slot.new] = edit

    # -- inodes --------------------------------------------------------------------------------------

    def _inode(self, ino: int) -> None:
        """What the fork changed of an inode that it had from the start and has still."""
        was, now = self.base.attr(ino), self.theirs.attr(ino)
        if was is None or now is None:
            return
        content, edit = self._fork_changed(was, now), Edit(now)
        number = self.number(ino)
        if number in self.made or number in self._going:
            return  # it comes back whole, or neither kept a name of it
        node = None if number is None else self.view.node(number)
        if node is None:
            if content or attributes(was) != attributes(now):
                self._changed_and_removed(ino)
            return
        if content and not self._same_content(now, self.theirs, node):
            edit.content = (
                self._same_content(was, self.base, node)
                or self._clash(self._path_of(ino), BOTH_CHANGED, ino, node.ino, ino) == THEIRS
            )
        self._merge_attributes(edit, was, now, node)
        if edit.content or edit.fields or edit.xattrs:
            self.edits[node.ino] = edit

    def _path_of(self, ino: int) -> bytes:
        if ino == ROOT_INO:
            return b"/"
        names = self.theirs.names(ino)
        self.theirs.load_paths(parent for parent, _ in names)
        return self.theirs.path(names[0])

    def _fork_changed(self, was: Attr, now: Attr) -> bool:
        if now.is_dir:
            return False
        if (was.size, was.parts) != (now.size, now.parts):
            return True
        return (
            now.ino in self._with_blocks
            and now.size > BLOCK
            and self.blocks_of(self.base, was) != self.blocks_of(self.theirs, now)
        )

    def _changed_and_removed(self, ino: int) -> None:
        """The fork changed what the parent removed: it comes back under its names, if so decided."""
        if ino in self._told:
            return
        self._told.add(ino)
        if self._clash(self._path_of(ino), REMOVED_CHANGED, ino, 0, ino) != THEIRS:
            return
        number = self._revive(ino)
        for key in self.theirs.names(ino):
            there = self.number(key[0])
            if there is None or (there, key[1]) in self.slots or self.view.name(there, key[1]):
                self._undecidable(key, REMOVED_CHANGED, ino, 0, ino)
            else:
                self.slots[there, key[1]] = Slot(0, number, key, 0)

    def _merge_attributes(self, edit: Edit, was: Attr, now: Attr, node: Node) -> None:
        clash = take(edit, was, now, node)
        ino = was.ino
        if clash and self._clash(self._path_of(ino), ATTRIBUTES, ino, node.ino, ino) == OURS:
            edit.fields, edit.xattrs = {}, {}
        newer = edit.content or node.mtime == was.mtime or now.mtime > node.mtime
        if not now.is_dir and now.mtime not in (was.mtime, node.mtime) and newer:
            edit.fields["mtime"] = now.mtime

    # -- what comes of it ----------------------------------------------------------------------------

    def new_inodes(self) -> Iterator[tuple[int, Attr]]:
        """Numbers of the parent's and the fork's inodes that are made under them."""
        for number, ino in self.made.items():
            attr = self.theirs.attr(ino)
            assert attr is not None, "what is made is in the fork"
            yield number, attr
