"""What a checkpoint by manifest holds, read as one reads a tree: compared, one file, a tar stream.

Its contents are fetched by name and verified on the way: a file that does not hash to its name ends with
`IntegrityError`, after its bytes and before anything behind them; one whose bytes the server finds damaged or
lacks, with what `fetched` raises.
"""

from __future__ import annotations

import errno
import hashlib
import io
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from fsd.client.manifest import DIR, FILE, FILES, LINK, Entry, Fetch, fetched
from fsd.model.errors import IntegrityError, NotFound, PosixError

JsonObject = dict[str, Any]
_KINDS: Final = {FILE: "file", DIR: "directory", LINK: "symlink"}


def difference(first: list[Entry], last: list[Entry]) -> list[JsonObject]:
    """The changes, in order of path, as the server tells those of states."""
    before, after = {one.path: one for one in first}, {one.path: one for one in last}
    paths = sorted(before.keys() | after.keys(), key=str.encode)
    found = (_change(path, before.get(path), after.get(path)) for path in paths)
    return [one for one in found if one is not None]


def _change(path: str, was: Entry | None, now: Entry | None) -> JsonObject | None:
    there = now or was
    assert there is not None, "the path is in one of them"
    content = was is None or now is None or (was.key, was.target) != (now.key, now.target)
    if was is None or now is None:
        change = "added" if was is None else "removed"
    elif was.kind != now.kind:
        change, content = "replaced", True
    elif content:
        change = "modified"
    elif was.kind == FILE and (was.mode, was.mtime_ns) != (now.mode, now.mtime_ns):
        change = "attributes"
    else:
        return None
    return {
        "path": f"/{path}",
        "change": change,
        "kind": _KINDS[there.kind],
        "content_changed": content,
        "size_before": None if was is None else was.size,
        "size_after": None if now is None else now.size,
        "mode_before": _mode(was),
        "mode_after": _mode(now),
    }


def _mode(entry: Entry | None) -> str | None:
    return None if entry is None or entry.kind != FILE else f"{entry.mode:o}"


def file_at(entries: list[Entry], path: bytes) -> Entry:
    """The file at an absolute path; raises `NotFound`, `PosixError`."""
    wanted = path.strip(b"/").decode("utf-8", "surrogateescape")
    for entry in entries:
        if entry.path == wanted and entry.kind == FILE:
            return entry
        if entry.path == wanted or entry.path.startswith(wanted + "/"):
            raise PosixError(errno.EISDIR, f"/{wanted} is no regular file")
    raise NotFound(f"no such file in the checkpoint: /{wanted}")


def read_file(entry: Entry, fetch: Fetch) -> Iterator[bytes]:
    """The bytes of a file, verified at their end."""
    made, size = hashlib.sha256(), 0
    for piece in fetched(entry, fetch):
        made.update(piece)
        size += len(piece)
        yield piece
    if size != entry.size or FILES + made.hexdigest() != entry.key:
        raise IntegrityError(f"what arrived of /{entry.path} is not what the checkpoint names")


def export(entries: list[Entry], path: bytes, fetch: Fetch, out: BinaryIO) -> None:
    """What lies at or below `path` as a tar stream. Raises `NotFound` when nothing does."""
    top = path.strip(b"/").decode("utf-8", "surrogateescape")
    chosen = [one for one in entries if not top or one.path == top or one.path.startswith(top + "/")]
    if not chosen and top:
        raise NotFound(f"no such file or directory in the checkpoint: /{top}")
    cut = len(top.rpartition("/")[0]) + 1 if "/" in top else 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in chosen:
            info = tarfile.TarInfo(entry.path[cut:])
            info.mtime = (entry.mtime_ns or 0) // 10**9
            if entry.kind == DIR:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif entry.kind == LINK:
                info.type, info.mode, info.linkname = tarfile.SYMTYPE, 0o777, entry.target
            else:
                info.size, info.mode = entry.size, entry.mode
            tar.addfile(info, _Pieces(read_file(entry, fetch)) if entry.kind == FILE else None)


class _Pieces(io.RawIOBase):
    """Pieces as a file that is read once. A short one is noticed by who reads it."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0  # of `_held`, what was read already

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, or what is left of all."""
        # One piece ahead: the end of the pieces, and what is verified there, is seen in time.
        while size < 0 or len(self._held) - self._at <= size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._held, self._at = self._held[self._at :] + piece, 0
        end = len(self._held) if size < 0 else self._at + size
        found = self._held[self._at : end]
        self._at += len(found)
        return found
