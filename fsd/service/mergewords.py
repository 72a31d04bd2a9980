"""The words of a merge: what clashes, and what a plan holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from fsd.model.attrs import Attr
from fsd.model.plain import dataclass, field
from fsd.service.difference import Key

OURS: Final = "ours"
THEIRS: Final = "theirs"
Decide = Callable[[bytes], str | None]  # of a path: OURS, THEIRS, or None: nobody said

# Kinds of clashes: what the parent and the fork did.
BOTH_ADDED: Final = "both-added"
BOTH_CHANGED: Final = "both-changed"
BOTH_RENAMED: Final = "both-renamed"
ATTRIBUTES: Final = "attributes"
CHANGED_REMOVED: Final = "changed-removed"  # the parent changed it, the fork removed it
REMOVED_CHANGED: Final = "removed-changed"
RENAMED_REMOVED: Final = "renamed-removed"
REMOVED_RENAMED: Final = "removed-renamed"
FILLED_REMOVED: Final = "filled-removed"  # the parent put something into a directory the fork removed
REMOVED_FILLED: Final = "removed-filled"
LOOP: Final = "loop"  # directories moved into each other


class Clash(NamedTuple):
    """Something both changed. The three are what is there, None: nothing."""

    path: bytes
    kind: str
    base: Attr | None
    ours: Attr | None
    theirs: Attr | None


@dataclass(slots=True)
class Slot:
    """A name of the parent that will change: from `old` to `new`, numbers of the parent, 0: nothing. `key` is
    the fork's name for it, `base` the fork's inode that `old` is, 0 where it is another."""

    old: int
    new: int
    key: Key
    base: int


@dataclass(slots=True)
class Edit:
    """An inode of the parent that changes in place. `content`: it gets that of `theirs`."""

    theirs: Attr
    content: bool = False
    fields: dict[str, int] = field(default_factory=dict)
    xattrs: dict[bytes, bytes | None] = field(default_factory=dict)  # None: removed
