"""How files look in JSON, and how paths, ranges and revisions are read from requests."""

from __future__ import annotations

import base64
import binascii
import re
import stat
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from fsd.model.attrs import Attr
from fsd.model.errors import NotFound, TooLarge, UsageError
from fsd.model.limits import PATH_BYTES_MAX
from fsd.model.names import split_typed
from fsd.model.times import rfc3339
from fsd.service.entries import check_journal_id
from fsd.service.retained import At

_PATH_AT: Final = 5  # "", "v1", "file-systems", the id, the kind of route, the rest
_REVISION = re.compile(r"(\d{1,19}):(\d{1,19})")
_ENTRY = re.compile(r"(.*):(\d{1,15})")
AT_NAMES: Final = ("checkpoint", "at_journal", "fs_seq")  # of the query string: which state to read
CHECKPOINT_ID_MAX: Final = 1024
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_TAG: Final = b"user.tag."
_KINDS: Final = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
KIND_NAMES: Final = frozenset(_KINDS.values())


def kind_of(attr: Attr) -> str:
    return kind_of_mode(attr.mode)


def kind_of_mode(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "file")


def revision_of(attr: Attr) -> str:
    return f"{attr.ino}:{attr.cseq}"


def stat_object(path: bytes, attr: Attr, seq: int, *, xattrs: bool = True) -> dict[str, Any]:
    """The documented stat object. Listings leave out `xattrs`, which can be large."""
    name = path.rsplit(b"/", 1)[-1]
    found: dict[str, Any] = {
        **named("path", path),
        **named("name", name),
        "kind": kind_of(attr),
        "is_dir": attr.is_dir,
        "size_bytes": attr.size,
        "mode": f"{stat.S_IMODE(attr.mode):o}",
        "uid": attr.uid,
        "gid": attr.gid,
        "nlink": attr.nlink,
        "mtime": _time(attr.mtime),
        "ctime": _time(attr.ctime),
        "atime": _time(attr.atime),
        "mtime_ns": attr.mtime,
        "ctime_ns": attr.ctime,
        "atime_ns": attr.atime,
        "ino": str(attr.ino),
        "revision": revision_of(attr),
    }
    if attr.target is not None:
        found.update(named("target", attr.target))
    if stat.S_ISCHR(attr.mode) or stat.S_ISBLK(attr.mode):
        found["rdev"] = attr.rdev
    held = attr.xattrs or {}
    found["tags"] = tags_of(attr)
    if xattrs:
        found["xattrs"] = {
            _text(name): base64.b64encode(value).decode() for name, value in sorted(held.items())
        }
    found["fs_seq"] = seq
    return found


def tags_of(attr: Attr) -> dict[str, str]:
    """The `user.tag.*` attributes, without that prefix."""
    held = attr.xattrs or {}
    return {
        _text(name[len(_TAG) :]): _text(value)
        for name, value in sorted(held.items())
        if name.startswith(_TAG)
    }


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def named(field: str, raw: bytes) -> dict[str, str]:
    """`field` as text, and beside it as base64 where the text is not the whole truth."""
    try:
        return {field: raw.decode()}
    except UnicodeDecodeError:
        return {field: _text(raw), f"{field}_b64": base64.b64encode(raw).decode()}


def _time(ns: int) -> str:
    """A time of any inode: 64 bits of nanoseconds lie between 1677 and 2262."""
    return rfc3339(ns, 9)


def path_of(request: Request) -> list[bytes]:
    """The components of the path at the end of the route, any bytes; as `split_typed`, for `tree.resolve`."""
    raw: bytes = request.scope["raw_path"]
    parts = raw.split(b"/", _PATH_AT)
    if any(b"%2f" in part.lower() for part in parts[:_PATH_AT]):
        # The route was found in the decoded path, where that is a '/': another path than the one behind here.
        raise NotFound("no such route", hint="only behind the kind of route may a path hold %2F")
    return _split(b"/" + unquote_to_bytes(parts[_PATH_AT] if len(parts) > _PATH_AT else b""))


def _split(path: bytes) -> list[bytes]:
    if len(path) > PATH_BYTES_MAX:
        raise TooLarge(f"a path of {len(path)} bytes, at most {PATH_BYTES_MAX}")
    return split_typed(path)


def field_path(body: Mapping[str, Any], name: str) -> list[bytes]:
    """A path in a JSON body, as `path_of`."""
    return _split(field_bytes(body, name))


def field_bytes(body: Mapping[str, Any], name: str) -> bytes:
    """A name or path in a JSON body: a string, or `{"b64": …}`; raises `UsageError`."""
    value = body.get(name)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str):
        return from_b64(value["b64"], name)
    raise UsageError(f'{name} is a string or {{"b64": "…"}}', details={"field": name})


def from_b64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"{name} is no base64", details={"field": name}) from exc


def field_mode(body: Mapping[str, Any], name: str = "mode") -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageError(f"{name} is a string of octal digits", details={"field": name})
    return octal(value, name)


def octal(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-7]{1,5}", text) or int(text, 8) > 0o7777:
        raise UsageError(f"{name} is octal, 0 to 7777", details={"field": name})
    return int(text, 8)


def read_revision(text: str, where: str) -> tuple[int, int]:
    """`ino:cseq`, in quotes or not."""
    match = _REVISION.fullmatch(text.strip().strip('"'))
    if match is None:
        raise UsageError(f"{where} is a revision, two numbers ino:version", details={"field": where})
    return int(match.group(1)), int(match.group(2))


def read_range(request: Request, size: int) -> tuple[int, int] | None:
    """The span [first, end) a `Range` header asks for, inside the file; None without one (or with several
    ranges, which are not supported and may be ignored)."""
    text = request.headers.get("range")
    match = None if text is None else _RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(size - int(last), 0), size
    start = min(int(first), size)
    return start, size if not last else max(min(int(last) + 1, size), start)


def at_of(query: Mapping[str, str]) -> At | None:
    """Which retained state a query string names; None: the live one."""
    given = {name: query[name] for name in AT_NAMES if query.get(name)}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} name two states: give one of them")
    for name, text in given.items():
        if name == "checkpoint":
            if len(text) > CHECKPOINT_ID_MAX:
                raise UsageError(f"a checkpoint's id has at most {CHECKPOINT_ID_MAX} characters")
            return At(checkpoint=text)
        if name == "at_journal":
            return At(entry=read_entry(text))
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise UsageError("fs_seq is a whole number")
        return At(seq=int(text))
    return None


def read_entry(text: str) -> tuple[str, int]:
    """`JOURNAL:SEQ`: an entry of a journal."""
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise UsageError("an entry of a journal is written JOURNAL:SEQ", details={"field": "at_journal"})
    return check_journal_id(match.group(1)), int(match.group(2))


def raw_query(request: Request) -> dict[str, bytes]:
    """The query string with values of any bytes; the last of equal names counts."""
    found: dict[str, bytes] = {}
    for pair in request.scope["query_string"].split(b"&"):
        name, _, value = pair.partition(b"=")
        if name:
            found[_text(unquote_to_bytes(name))] = unquote_to_bytes(value.replace(b"+", b" "))
    return found


def cursor_of(path: bytes) -> str:
    """Where a listing goes on: opaque to clients."""
    return base64.urlsafe_b64encode(path).decode().rstrip("=")


def read_cursor(text: str | None) -> bytes:
    if not text:
        return b""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError("after is no cursor of this listing") from exc
