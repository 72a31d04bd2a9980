"""Versions of one path over the retained states, and the newest that still has it.

States are looked at newest first, each by its path as it was then, so a file that was replaced or came back
under its name is found all the same. Runs of states that show the same are one version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsd.meta.database import Tx
from fsd.model.attrs import Attr
from fsd.model.errors import NotFound, PosixError
from fsd.model.limits import HISTORY_STATES_MAX
from fsd.model.names import show
from fsd.model.times import rfc3339
from fsd.service.access import FsRef
from fsd.service.records import key_of
from fsd.service.retained import At, state_of
from fsd.service.tree import resolve

PINS_SQL: Final = (
    "SELECT seq, kind, ref FROM pin WHERE fs=? AND seq<? AND kind IN ('checkpoint','journal') "
    "ORDER BY seq DESC LIMIT ?"
)
_NEWEST: Final = 2**62
_PAGES_MAX: Final = 40  # of states that are looked through for a file that was removed


class _State(NamedTuple):
    """A retained state and what keeps it: (kind, ref) of each pin."""

    seq: int
    pins: list[tuple[str, str]]


class Version(NamedTuple):
    """What a path was over a run of states. `node` None: nothing was there."""

    node: Attr | None
    newest: int
    oldest: int
    states: int


def history(
    tx: Tx, fs: FsRef, components: Sequence[bytes], before: int | None, limit: int
) -> tuple[list[dict[str, Any]], int | None]:
    """Versions of a path, newest first, beginning with the live one; and where to go on (`before`)."""
    found: list[Version] = []
    names: dict[int, _State] = {}
    if before is None:
        head = state_of(tx, fs)
        found.append(Version(_look(tx, fs, components, None), head.seq, head.seq, 0))
    last = before
    for state in _states(tx, fs, before, HISTORY_STATES_MAX):
        last, names[state.seq] = state.seq, state
        node = _look(tx, fs, components, At(seq=state.seq))
        if found and _same(found[-1].node, node):
            found[-1] = found[-1]._replace(oldest=state.seq, states=found[-1].states + 1)
        elif len(found) == limit:
            last = state.seq + 1
            break
        else:
            found.append(Version(node, state.seq, state.seq, 1))
    more = len(names) == HISTORY_STATES_MAX or len(found) == limit
    if more and last is not None and next(_states(tx, fs, last, 1), None) is None:
        more = False
    return [_shown(tx, fs, version, names) for version in found], last if more else None


def newest_with(tx: Tx, fs: FsRef, components: Sequence[bytes]) -> int:
    """The seq of the newest retained state in which the path exists. Raises `NotFound`."""
    before: int | None = None
    for _ in range(_PAGES_MAX):
        states = list(_states(tx, fs, before, HISTORY_STATES_MAX))
        for state in states:
            if _look(tx, fs, components, At(seq=state.seq)) is not None:
                return state.seq
        if len(states) < HISTORY_STATES_MAX:
            break
        before = states[-1].seq
    raise NotFound(
        f"no retained state has {show(b'/' + b'/'.join(components))}",
        hint="fsd checkpoint list says which states there are",
    )


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


def _look(tx: Tx, fs: FsRef, components: Sequence[bytes], at: At | None) -> Attr | None:
    state = state_of(tx, fs, at)
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
    """`node` is for the caller, who takes it out and says it in its own words."""
    return {
        "node": version.node,
        "live": version.newest not in names or version.states == 0,
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
