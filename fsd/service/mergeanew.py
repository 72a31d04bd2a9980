"""Directories that a fork removed and made anew under their names are the ones they were.

`rm -r` and `mkdir`, a build, a tree written beside and swapped in: an inode of its own, and to who looks
the same directory. So a merge compares what lies in it name by name, as where the parent made it anew;
what the parent put into it stays in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from fsd.model.limits import BLOCK
from fsd.service.difference import Key, Side

Entries = Mapping[Key, int]


def made_anew(
    base: Side, theirs: Side, before: Entries, after: Entries, is_gone: Callable[[int], bool]
) -> dict[Key, int]:
    """Have `theirs` know them by the numbers they had; `after` in these numbers.

    Where the parent has none of it (`is_gone` of the number it had), only one that shows what it showed: that
    one stays gone, any other is a thing of the fork's that is decided as a whole."""
    pairs = _Pairs(base, theirs, before, after)
    look = [(before[key], after[key], False) for key in before.keys() & after.keys()]
    while look:
        was, now, same = look.pop()
        if not pairs.succeeds(was, now):
            continue
        if not same and is_gone(was):
            if not pairs.shows_the_same(was, now):
                continue
            same = True  # and so does all below it
        theirs.succeed(was, now)
        look += [(old, new, same) for old, new in pairs.below(was, now) if old]
    return {(theirs.known_as(parent), name): theirs.known_as(ino) for (parent, name), ino in after.items()}


class _Pairs:
    def __init__(self, base: Side, theirs: Side, before: Entries, after: Entries) -> None:
        self.base, self.theirs, self.before = base, theirs, before
        self.entries: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        for (parent, name), ino in after.items():
            self.entries[parent].append((name, ino))

    def succeeds(self, was: int, now: int) -> bool:
        """Both directories, the one in the fork no more, the other not from the start."""
        old, new = self.base.attr(was), self.theirs.attr(now)
        if old is None or new is None or not (old.is_dir and new.is_dir):
            return False
        return self.theirs.attr(was) is None and self.base.attr(now) is None

    def below(self, was: int, now: int) -> list[tuple[int, int]]:
        """What is in the new one, each with what the old one had under the name; 0: nothing."""
        return [(self.before.get((was, name), 0), ino) for name, ino in self.entries[now]]

    def shows_the_same(self, was: int, now: int) -> bool:
        """Whether all in the new one was in the old one as it is (which may have had more)."""
        look = [(was, now)]
        while look:
            was, now = look.pop()
            old, new = self.base.attr(was), self.theirs.attr(now)
            if old is None or new is None or new.size > BLOCK:
                return False
            if (old.mode, old.uid, old.gid, old.xattrs) != (new.mode, new.uid, new.gid, new.xattrs):
                return False
            if new.is_dir:
                if was != now and not self.succeeds(was, now):
                    return False
                look += [] if was == now else self.below(was, now)
            elif (old.size, old.parts, old.target, old.device) != (
                new.size,
                new.parts,
                new.target,
                new.device,
            ):
                return False
        return True
