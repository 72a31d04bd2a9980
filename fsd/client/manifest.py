"""The `files` of a checkpoint as the client checks them: before it sends them, and before it believes them.

A manifest comes from a server, and from whoever wrote it there: a restore takes nothing in it for granted.
The rules are those of the server's `append` (`fsd.service.contract_check`), written again for this side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from fsd.model.errors import IntegrityError, InvalidBlob, InvalidPath, MissingBlob, Unavailable
from fsd.model.limits import SYMLINK_MAX
from fsd.model.trees import parents, stays_inside

FILES: Final = "sandbox-files/sha256/"
FILE, DIR, LINK = "file", "dir", "symlink"
DEFAULT_MODE: Final = 0o644
_KEY: Final = re.compile("sandbox-files/sha256/[0-9a-f]{64}")
_SIZE_MAX: Final = 2**53

Fetch = Callable[[str], Iterator[bytes]]  # the bytes of a key


class Entry(NamedTuple):
    """One entry. `mode` are permission bits (files), `mtime_ns` None where the manifest tells none."""

    path: str
    kind: str
    key: str = ""
    size: int = 0
    target: str = ""
    mode: int = DEFAULT_MODE
    mtime_ns: int | None = None

    def to_json(self) -> dict[str, Any]:
        if self.kind == DIR:
            return {"path": self.path, "kind": DIR}
        if self.kind == LINK:
            return {"path": self.path, "kind": LINK, "target": self.target}
        made: dict[str, Any] = {
            "path": self.path,
            "kind": FILE,
            "blobKey": self.key,
            "size": self.size,
            "mode": self.mode,
        }
        if self.mtime_ns is not None:
            made["mtimeNs"] = self.mtime_ns
        return made


def fetched(entry: Entry, fetch: Fetch) -> Iterator[bytes]:
    """The bytes of a file as they come; what keeps them away is told with the file's path. Raises
    `MissingBlob`, `InvalidBlob` where the server finds them damaged, `Unavailable`."""
    try:
        yield from fetch(entry.key)
    except (MissingBlob, IntegrityError, Unavailable) as exc:
        told = InvalidBlob if isinstance(exc, IntegrityError) else type(exc)
        made = told(f"{entry.path!r}: {exc.message}", hint=exc.hint, details=exc.details)
        made.request_id = exc.request_id
        raise made from exc


def fault_of(path: object) -> str:
    """Why a path is none that a manifest holds; empty when it is one."""
    if not isinstance(path, str) or not path:
        return "is no text of one character or more"
    if "\0" in path or "\\" in path:
        return "holds a NUL or a backslash"
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "holds what is no Unicode text"
    segments = raw.split(b"/")
    if not segments[0] or re.match("[A-Za-z]:(?:/|$)", path):
        return "is not relative"
    if any(segment in (b"", b".", b"..") for segment in segments):
        return "has an empty segment, '.' or '..'"
    if any(len(segment) > 255 for segment in segments):
        return "has a name of more than 255 bytes"
    return ""


def read(raw: object) -> list[Entry]:
    """The entries of a record, all of them checked, in order of their paths' bytes. Raises `InvalidPath`.
    Linear in their number."""
    if not isinstance(raw, list):
        raise InvalidPath("the checkpoint has no list of files")
    entries = sorted((_entry(one) for one in raw), key=lambda entry: entry.path.encode())
    kinds: dict[str, str] = {}
    for entry in entries:
        if entry.path in kinds:
            raise InvalidPath(f"{entry.path!r} is in the checkpoint twice")
        kinds[entry.path] = entry.kind
    for above in parents(kinds):
        if kinds.get(above, DIR) != DIR:
            raise InvalidPath(f"something lies beneath {above!r}, which is no directory")
    return entries


def _entry(raw: object) -> Entry:
    if not isinstance(raw, dict):
        raise InvalidPath("an entry of the checkpoint is no object")
    path, kind = raw.get("path"), raw.get("kind")
    fault = fault_of(path)
    if fault or not isinstance(path, str):
        raise InvalidPath(f"the path {path!a} {fault}")
    if kind == DIR:
        return Entry(path, DIR)
    if kind == LINK:
        target = raw.get("target")
        if not isinstance(target, str) or not _text(target) or not stays_inside(path, target):
            raise InvalidPath(
                f"the link {path!r} leaves the tree: {target!a}",
                hint="`fsd checkpoint export ID | tar -x` brings such links too",
            )
        return Entry(path, LINK, target=target)
    if kind != FILE:
        raise InvalidPath(f"{path!r} is of a kind this version does not know: {kind!a}")
    key, size = raw.get("blobKey"), _whole(raw.get("size"))
    if not isinstance(key, str) or not _KEY.fullmatch(key) or size is None:
        raise InvalidPath(f"the file {path!r} has no content that can be found")
    mode = _whole(raw.get("mode"))
    return Entry(
        path,
        FILE,
        key,
        size,
        mode=DEFAULT_MODE if mode is None else mode & 0o777,
        mtime_ns=_time(raw.get("mtimeNs")),
    )


def _text(target: str) -> bool:
    try:
        return len(target.encode()) <= SYMLINK_MAX
    except UnicodeEncodeError:
        return False


def _whole(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < _SIZE_MAX else None


def _time(value: object) -> int | None:
    """ns since 1970 in a range every filesystem stores; anything else counts as not told."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 - 1 else None
