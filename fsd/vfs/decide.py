"""What a person decides about refused changes (`refused/`, see `refused.py`): look, take out, drop.

The caller holds the state directory's lock (`open.prepare`). An entry counts while its file `entry` exists,
so dropping removes that first. Raises `IntegrityError` for an entry that cannot be read; nothing is skipped.
"""

from __future__ import annotations

import os
import stat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from fsd.host.files import fsync_dir, make_dirs_durable
from fsd.host.seam import Host
from fsd.model.errors import Conflict, FsdError, IntegrityError
from fsd.model.limits import MIB
from fsd.model.names import show
from fsd.model.ops import CONTENT, Content, Create, Op, decode_one
from fsd.vfs.refused import DIRECTORY

ENTRY = "entry"
DATA = "data"


class Kept(NamedTuple):
    """One refused operation. `path` is absolute below the mount's root; `data` the whole content it was to
    give the file, None when that was empty or it was about something else; `lacking` bytes of it are nowhere
    any more (zeros, mostly)."""

    place: Path
    op: Op
    errno: int
    reason: str
    path: bytes
    mode: int
    uid: int
    gid: int
    data: Path | None
    lacking: int = 0

    @property
    def kind(self) -> str:
        return type(self.op).__name__.lower()

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.place.name,
            "operation": self.kind,
            "path": show(self.path),
            "errno": self.errno,
            "reason": self.reason,
            "bytes": self.data.stat().st_size if self.data is not None else 0,
            "lacking_bytes": self.lacking,
        }


def kept(state_dir: Path) -> list[Kept]:
    """Every refused operation that waits for a decision, in the order they were made."""
    root = state_dir / DIRECTORY
    if not root.is_dir():
        return []
    found = [_read(place) for place in root.iterdir() if (place / ENTRY).exists()]
    return [one for _, one in sorted(found, key=itemgetter(0))]


def _read(place: Path) -> tuple[tuple[int, int], Kept]:
    """The change, behind what it is in the order of."""
    try:
        session, number = map(int, place.name.split("-"))
        raw = msgpack.unpackb((place / ENTRY).read_bytes(), raw=False, use_list=False)
        data = place / DATA
        is_content = raw["op"][1] == CONTENT
        one = Kept(
            place=place,
            op=decode_one(raw["op"]),
            errno=int(raw["errno"]),
            reason=str(raw["reason"]),
            path=bytes(raw["path"]),
            mode=int(raw["mode"]),
            uid=int(raw["uid"]),
            gid=int(raw["gid"]),
            data=data if is_content and data.exists() else None,
            lacking=int(raw.get("lacking", 0)),
        )
        return (session, number), one
    except (ValueError, KeyError, TypeError, FsdError, msgpack.exceptions.UnpackException) as exc:
        raise IntegrityError(
            f"the refused change in {place} cannot be read",
            hint="look at its data; what is none of fsd's there, a copy say, belongs elsewhere",
        ) from exc


def discard(one: Kept, host: Host) -> None:
    """Drop it for good, durably."""
    host.crash_point("refused.discard")
    (one.place / ENTRY).unlink()
    fsync_dir(one.place)
    host.crash_point("refused.discarded")
    import shutil  # with what it loads, seven modules that a mount does without

    shutil.rmtree(one.place)


class Exported(NamedTuple):
    """The files made below the target; `incomplete` are those that lack bytes."""

    files: list[str]
    incomplete: list[str]


def export(found: list[Kept], target: Path) -> Exported:
    """Write the content of refused changes below `target` under their paths, and the directories and symlinks
    that were to be made. What is there already is never replaced: `Conflict`. Durable on return. The entries
    stay."""
    made = Exported([], [])
    links: list[tuple[Kept, bytes]] = []
    for one in found:
        if isinstance(one.op, Create) and stat.S_ISDIR(one.op.mode):
            _make(_inside(target, one.path))
        elif isinstance(one.op, Create) and one.op.target is not None:
            links.append((one, one.op.target))
        elif isinstance(one.op, Content):
            place = _free(one, target)
            _copy(one, place)
            made.files.append(str(place))
            if one.lacking:
                made.incomplete.append(str(place))
    for one, pointed in links:  # last: nothing is written through one
        place = _free(one, target)
        os.symlink(pointed, place)
        fsync_dir(place.parent)
    return made


def _free(one: Kept, target: Path) -> Path:
    """Where it goes, with all above. A name may have been refused more than once: the number tells them
    apart."""
    place = _inside(target, one.path)
    if os.path.lexists(place):
        place = place.with_name(f"{place.name}.refused-{one.place.name}")
    if os.path.lexists(place):
        raise Conflict(f"{place} exists", hint="export into an empty directory")
    _make(place.parent)
    return place


def _make(directory: Path) -> None:
    try:
        make_dirs_durable(directory, 0o777)
    except (FileExistsError, NotADirectoryError) as exc:
        raise Conflict(f"{directory} exists", hint="export into an empty directory") from exc


def _inside(target: Path, path: bytes) -> Path:
    parts = [part for part in path.split(b"/") if part not in (b"", b".", b"..")]
    return target.joinpath(*map(os.fsdecode, parts or [b"root"]))


def _copy(one: Kept, place: Path) -> None:
    with open(place, "xb") as made:
        if one.data is not None:
            import shutil

            with open(one.data, "rb") as source:
                shutil.copyfileobj(source, made, MIB)
        made.flush()
        os.fchmod(made.fileno(), one.mode & 0o777)
        os.fsync(made.fileno())
    fsync_dir(place.parent)
