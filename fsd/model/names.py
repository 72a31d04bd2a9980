"""Rules for names, and the names fsd makes itself. Names are raw bytes everywhere."""

from __future__ import annotations

import errno
import re
from datetime import UTC, datetime

from fsd.model.errors import PosixError, UsageError
from fsd.model.limits import NAME_MAX

LOST_DIR = b".fsd-lost"
RECOVERED_MARK = b".recovered-"
_MARK_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]+")


def check_name(name: bytes) -> bytes:
    """Return `name` if it can be one directory entry; raises `PosixError` ENAMETOOLONG, EINVAL or EEXIST."""
    if len(name) > NAME_MAX:
        raise PosixError(errno.ENAMETOOLONG, f"name of {len(name)} bytes, at most {NAME_MAX}")
    if not name or b"/" in name or b"\0" in name:
        raise PosixError(errno.EINVAL, "a name is not empty and holds neither '/' nor NUL")
    if name in (b".", b".."):
        raise PosixError(errno.EEXIST, "'.' and '..' always exist")
    return name


def split_path(path: bytes) -> list[bytes]:
    """The components of an absolute remote path; '/' is the empty list.

    Repeated and trailing slashes and '.' are dropped. '..' is refused rather than resolved: a scope is
    checked on the string alone.
    """
    if not path.startswith(b"/"):
        raise UsageError(f"a remote path is absolute: {show(path)}", hint="begin it with '/'")
    parts = [p for p in path.split(b"/") if p not in (b"", b".")]
    for part in parts:
        if part == b"..":
            raise UsageError(f"'..' is not allowed in a remote path: {show(path)}")
        check_name(part)
    return parts


def split_typed(path: bytes) -> list[bytes]:
    """As `split_path`, with an empty last component where the path asks for a directory: `/a/`, `/a/.`."""
    parts = split_path(path)
    return [*parts, b""] if parts and path.endswith((b"/", b"/.")) else parts


def show(name: bytes) -> str:
    """A name for people: UTF-8 where it is, else backslash escapes. Never raises."""
    return name.decode("utf-8", "backslashreplace")


def _fit(name: bytes, suffix: bytes) -> bytes:
    """`name` + `suffix` in NAME_MAX bytes, the name cut at a character where it is UTF-8."""
    room = NAME_MAX - len(suffix)
    if len(name) <= room:
        return name + suffix
    cut = name[:room]
    try:
        name.decode()
    except UnicodeDecodeError:
        return cut + suffix
    return cut.decode("utf-8", "ignore").encode() + suffix


def _stamp(time_ns: int) -> bytes:
    at = datetime.fromtimestamp(time_ns / 1e9, UTC)
    return at.strftime("%Y%m%dT%H%M%SZ").encode()


def _mark(mount: str) -> bytes:
    return _MARK_UNSAFE.sub(b"-", mount.encode("utf-8", "replace"))[:40] or b"mount"


def conflict_name(name: bytes, mount: str, time_ns: int, attempt: int = 0) -> bytes:
    """`NAME.conflict-<mount>-<time>`, numbered from the second attempt on, within 255 bytes."""
    again = b"" if attempt == 0 else b"-%d" % attempt
    return _fit(name, b".conflict-" + _mark(mount) + b"-" + _stamp(time_ns) + again)


def recovered_name(name: bytes, mount: str, time_ns: int, attempt: int = 0) -> bytes:
    """`NAME.recovered-<mount>-<time>`, for content a power cut made doubtful."""
    again = b"" if attempt == 0 else b"-%d" % attempt
    return _fit(name, RECOVERED_MARK + _mark(mount) + b"-" + _stamp(time_ns) + again)
