"""Whether what a merge decided leaves a tree: each directory under one name, in something that is there, and
none gone that the fork still has.

Names are decided one by one, each with its own answer of who wins; together they can ask for what no tree
is. That is looked for in the whole plan, whatever led to it: what is found is a clash, never done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from fsd.model.attrs import ROOT_INO
from fsd.service.difference import Key
from fsd.service.mergewords import BOTH_RENAMED, FILLED_REMOVED, LOOP, REMOVED_CHANGED, REMOVED_FILLED, Slot
from fsd.service.view import View

Fault = tuple[Slot, str, int]  # the name that cannot be changed, the kind of clash, the inode it is of
Lives = Callable[[Collection[int]], set[int]]  # which of the parent's directories the fork has still


def faults(view: View, slots: Mapping[Key, Slot], made: Collection[int], lives: Lives) -> Iterator[Fault]:
    """What keeps `slots` from being done to `view`; `made` are the numbers that come to be with them."""
    tree = _Tree(view, slots, made)
    yield from tree.names()
    yield from tree.directories(lives)
    yield from tree.loops()


class _Tree:
    def __init__(self, view: View, slots: Mapping[Key, Slot], made: Collection[int]) -> None:
        self.view, self.slots, self.made = view, slots, made
        self.left: dict[int, int] = {}  # directories that lose or get names → how many they have then
        self.above: dict[int, tuple[int, Slot]] = {}  # directories that get a name → what that is in
        self.taken: dict[int, Slot] = {}
        for (parent, _name), slot in slots.items():
            if self._is_dir(slot.old):
                self.left[slot.old] = self.left.get(slot.old, 1) - 1
                self.taken[slot.old] = slot
            if self._is_dir(slot.new):
                self.left[slot.new] = self.left.get(slot.new, 0 if slot.new in made else 1) + 1
                self.above[slot.new] = (parent, slot)

    def _is_dir(self, ino: int) -> bool:
        node = self.view.node(ino) if ino and ino not in self.made else None
        return ino in self.made or (node is not None and node.is_dir)

    def names(self) -> Iterator[Fault]:
        """A directory with more than one. (A file that is made counts as one here: it may have several.)"""
        for ino, (_parent, slot) in self.above.items():
            if self.left[ino] > 1 and ino not in self.made:
                yield slot, BOTH_RENAMED, ino

    def directories(self, lives: Lives) -> Iterator[Fault]:
        """Something new in a directory that goes or never comes; something left in one that goes, or one that
        goes from where the parent moved it, while the fork has it where it was."""
        for (parent, _name), slot in self.slots.items():
            node = None if parent in self.made else self.view.node(parent)
            there = parent in self.made or (node is not None and self.left.get(parent, 1) > 0)
            if slot.new and not there:
                yield slot, REMOVED_FILLED, slot.new
        going = [ino for ino, names in self.left.items() if names == 0]
        counts = self.view.source.child_counts(going) if going else {}
        for (parent, _name), slot in self.slots.items():
            counts[parent] = counts.get(parent, 0) + (slot.new != 0) - (slot.old != 0)
        living = lives(going)
        for ino in going:
            if counts.get(ino, 0):
                yield self.taken[ino], FILLED_REMOVED, ino
            elif ino in living:
                yield self.taken[ino], REMOVED_CHANGED, ino

    def loops(self) -> Iterator[Fault]:
        """No directory may come to lie below itself."""
        for ino, (_parent, slot) in self.above.items():
            at, seen = ino, {ino}
            while at not in (0, ROOT_INO):
                node = None if at in self.above else self.view.node(at)
                at = self.above[at][0] if at in self.above else 0 if node is None else node.parent
                if at in seen:
                    yield slot, LOOP, ino
                    break
                seen.add(at)
