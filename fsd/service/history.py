"""Versions of one file over the retained states, and the newest that still has it.

States are looked at newest first, each by its path as it was then, so a file that was replaced or came back
under its name is found all the same. Where nothing has the path, the inode it was in the next newer state is
looked for: under the name it has there it is followed on (`_Trail`). So a name comes before an inode: who
moved one file over another gets, of that name, what the name was. Runs of states that show the same are one
version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsd.meta.database import Tx
from fsd.model.attrs import Attr
from fsd.model.errors import NotFound, PosixError
from fsd.model.limits import HISTORY_GONE_MAX, HISTORY_PAGES_MAX, HISTORY_STATES_MAX
from fsd.model.names import show
from fsd.model.times import rfc3339
from fsd.service.access import FsRef
from fsd.service.difference import Side
from fsd.service.records import key_of
from fsd.service.retained import At, State, state_of
from fsd.service.tree import resolve

PINS_SQL: Final = (
    "SELECT seq, kind, ref FROM pin WHERE fs=? AND seq<? AND kind IN ('checkpoint','journal') "
    "ORDER BY seq DESC LIMIT ?"
)
# Files removed last: where each was.
GONE_SQL: Final = "SELECT ino, parent, name FROM gone WHERE fs=? ORDER BY seq DESC LIMIT ?"
_NEWEST: Final = 2**62
Path = tuple[bytes, ...]


class _State(NamedTuple):
    """A retained state and what keeps it: (kind, ref) of each pin."""

    seq: int
    pins: list[tuple[str, str]]


class Version(NamedTuple):
    """What a file was over a run of states, and under which path. `node` None: nothing was there."""

    path: Path
    node: Attr | None
    newest: int
    oldest: int
    states: int


class Resume(NamedTuple):
    """Where to go on: with the states before `seq`, of what was `ino` (0: nothing) under `path`."""

    seq: int
    ino: int
    path: Path


class Found(NamedTuple):
    """Versions, newest first; where to go on, if there are more; and where what had the path and lost it is
    now, if it is anywhere."""

    versions: list[dict[str, Any]]
    following: Resume | None
    moved_to: Path | None


class _Trail:
    """A file on its way back through the states. `path` and `ino` (0: none so far) are what it was in the
    last one asked for."""

    def __init__(self, tx: Tx, fs: FsRef, path: Path, ino: int, *, follow: bool) -> None:
        self._tx, self._fs, self._follow = tx, fs, follow
        self.path, self.ino = path, ino

    def at(self, at: At | None) -> Attr | None:
        """What it was in a state older than those before."""
        state = state_of(self._tx, self._fs, at)
        node = _look(self._tx, state, self.path)
        if node is None and self._follow and self.ino:
            other = _where(self._tx, state, self.ino, self.path)
            if other is not None:
                self.path, node = other, _look(self._tx, state, other)
        if node is not None:
            self.ino = node.ino
        return node


def history(
    tx: Tx, fs: FsRef, components: Sequence[bytes], before: Resume | None, limit: int, *, follow: bool = True
) -> Found:
    """Versions of a file, beginning with the live one. `follow`: under the names it had before, too."""
    found: list[Version] = []
    names: dict[int, _State] = {}
    asked = tuple(components)
    if before is None:
        trail = _Trail(tx, fs, asked, 0, follow=follow)
        head, node = state_of(tx, fs), trail.at(None)
        found.append(Version(trail.path, node, head.seq, head.seq, 0))
        if node is None and follow:
            trail.ino = _removed(tx, fs, asked)
    else:
        trail = _Trail(tx, fs, before.path, before.ino, follow=follow)
    was = (trail.path, trail.ino)
    last = None if before is None else before.seq
    for state in _states(tx, fs, last, HISTORY_STATES_MAX):
        last, names[state.seq] = state.seq, state
        was = (trail.path, trail.ino)
        node = trail.at(At(seq=state.seq))
        if found and found[-1].path == trail.path and _same(found[-1].node, node):
            found[-1] = found[-1]._replace(oldest=state.seq, states=found[-1].states + 1)
        elif len(found) == limit:
            last = state.seq + 1
            break
        else:
            found.append(Version(trail.path, node, state.seq, state.seq, 1))
            was = (trail.path, trail.ino)
    more = len(names) == HISTORY_STATES_MAX or len(found) == limit
    if more and last is not None and next(_states(tx, fs, last, 1), None) is None:
        more = False
    following = Resume(last, was[1], was[0]) if more and last is not None else None
    moved = _moved_to(tx, fs, asked, found) if before is None and follow else None
    shown = [_shown(tx, fs, version, names) for version in found]
    if before is None:
        shown[0]["live"] = True
    return Found(shown, following, moved)


def _moved_to(tx: Tx, fs: FsRef, asked: Path, found: Sequence[Version]) -> Path | None:
    if found[0].node is not None:
        return None
    ino = next((one.node.ino for one in found if one.node is not None and one.path == asked), None)
    return None if ino is None else _where(tx, state_of(tx, fs), ino, asked)


def newest_with(tx: Tx, fs: FsRef, components: Sequence[bytes]) -> tuple[int, Path]:
    """The seq of the newest retained state that has the path, and the path. Where none has it: of the file
    that was removed under it, with the path it had there. Raises `NotFound`."""
    asked = tuple(components)
    for state in _looked_through(tx, fs):
        if _look(tx, state_of(tx, fs, At(seq=state.seq)), asked) is not None:
            return state.seq, asked
    if ino := _removed(tx, fs, asked):
        for state in _looked_through(tx, fs):
            path = _where(tx, state_of(tx, fs, At(seq=state.seq)), ino, asked)
            if path is not None:
                return state.seq, path
    raise NotFound(
        f"no retained state has {show(b'/' + b'/'.join(components))}",
        hint="fsd checkpoint list says which states there are",
    )


def _looked_through(tx: Tx, fs: FsRef) -> Iterator[_State]:
    """The retained states, newest first, as many as are looked through for something that was removed."""
    before: int | None = None
    for _ in range(HISTORY_PAGES_MAX):
        states = list(_states(tx, fs, before, HISTORY_STATES_MAX))
        yield from states
        if len(states) < HISTORY_STATES_MAX:
            return
        before = states[-1].seq


def _removed(tx: Tx, fs: FsRef, path: Path) -> int:
    """The inode of the file that was removed last under `path`, within the feed's time; else 0."""
    if not path or not path[-1]:  # the root, or a directory: those remembered are files
        return 0
    state = state_of(tx, fs)
    above = _look(tx, state, path[:-1])
    if above is None:
        return 0
    rows = tx.all(GONE_SQL, (fs.id, HISTORY_GONE_MAX))
    return next((int(ino) for ino, parent, name in rows if (parent, name) == (above.ino, path[-1])), 0)


def _where(tx: Tx, state: State, ino: int, near: Path) -> Path | None:
    """The path of an inode in a state. Of several names one in the directory of `near` is taken first, then
    one that is called as `near` is, then the first in order."""
    side = Side(tx, state.fs, state.seq)
    keys = side.names(ino)
    side.load_paths(parent for parent, _ in keys)
    paths = [tuple(side.path(key)[1:].split(b"/")) for key in keys]
    return min(paths, key=lambda path: (path[:-1] != near[:-1], path[-1:] != near[-1:], path), default=None)


def _states(tx: Tx, fs: FsRef, before: int | None, limit: int) -> Iterator[_State]:
    """At most `limit` retained states before a seq, newest first."""
    at = _NEWEST if before is None else before
    while limit > 0:
        rows = tx.all(PINS_SQL, (fs.id, at, limit + 1))
        seqs = list(dict.fromkeys(int(row[0]) for row in rows))
        # The oldest seq of a full page may have more pins behind it.
        whole = seqs if len(rows) <= limit else seqs[:-1] or seqs
        for seq in whole:
            yield _State(seq, [(kind, ref) for one, kind, ref in rows if one == seq])
            limit -= 1
            if not limit:
                return
        if len(rows) <= limit or not whole:
            return
        at = whole[-1]


def _look(tx: Tx, state: State, components: Sequence[bytes]) -> Attr | None:
    try:
        return resolve(tx, state.fs, components, parents=True, at=state.at).node
    except (NotFound, PosixError):  # a symlink that led elsewhere then, a file in place of a directory
        return None


def _same(one: Attr | None, other: Attr | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.ino, one.cseq, one.mode, one.uid, one.gid, one.mtime, one.target, one.xattrs) == (
        other.ino,
        other.cseq,
        other.mode,
        other.uid,
        other.gid,
        other.mtime,
        other.target,
        other.xattrs,
    )


def _shown(tx: Tx, fs: FsRef, version: Version, names: dict[int, _State]) -> dict[str, Any]:
    """`path` and `node` are for the caller, who says them in its own words."""
    return {
        "path": version.path,
        "node": version.node,
        "live": False,
        "newest": _state(tx, fs, version.newest, names),
        "oldest": _state(tx, fs, version.oldest, names),
        "states": version.states,
    }


def _state(tx: Tx, fs: FsRef, seq: int, names: dict[int, _State]) -> dict[str, Any]:
    """A state by the best of its names: a checkpoint's, else a journal entry's."""
    made: dict[str, Any] = {"fs_seq": seq, "checkpoint_id": None, "label": None, "entry": None, "at": None}
    pins = names[seq].pins if seq in names else []
    for kind, ref in sorted(pins):
        if kind == "checkpoint" and made["checkpoint_id"] is None:
            row = tx.one("SELECT label, stored FROM checkpoint WHERE fs=? AND key=?", (fs.id, key_of(ref)))
            if row is not None:
                made["checkpoint_id"], made["at"] = ref, rfc3339(int(row[1]))
                made["label"] = None if row[0] is None else json.loads(row[0])
        elif kind == "journal":
            made["entry"] = ref
    return made
