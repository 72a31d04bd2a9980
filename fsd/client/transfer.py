"""Copies between here and there: what every direction shares, and the copies within the server.

`upload.py` and `download.py` hold the other directions; `fsd cp` calls `upload`, `download`, `upload_stream`,
`download_stream` and `copy_remote`. Paths are bytes; remote ones absolute. A copy of a tree goes on after a
file that failed and tells it in the result; an error that concerns all files ends it.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, Final

from fsd.client.files import Files, JsonObject, join, raw_path
from fsd.model.errors import (
    FsdError,
    NoSpace,
    NotAuthenticated,
    NotFound,
    QuotaExceeded,
    Unavailable,
    UsageError,
)
from fsd.model.limits import COPY_PARALLEL
from fsd.model.names import show, split_path, split_typed
from fsd.model.plain import dataclass, field

# Errors after which no other file would fare better.
FATAL: Final = (NotAuthenticated, Unavailable, NoSpace, QuotaExceeded)
STEP_COUNTS: Final = ("files", "directories", "symlinks", "skipped", "bytes")  # of a step on the server


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy. `parents`: make missing directories of the target. `resume`: leave files whose size and
    mtime are already there. `preserve`: give the copy the source's mode and mtime, and on upload its owner.
    `owner`: on download the remote owner too (needs root). `if_match`: revision of a single remote target."""

    recursive: bool = False
    parents: bool = True
    overwrite: bool = True
    append: bool = False
    resume: bool = False
    preserve: bool = True
    owner: bool = False
    if_match: str | None = None
    parallel: int = COPY_PARALLEL


@dataclass(frozen=True, slots=True)
class Failure:
    """One path that was not copied, or not as it should be."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Handed to the progress callback, on any thread, never two at a time."""

    files: int
    bytes: int
    path: str


ProgressFn = Callable[[Progress], None]


@dataclass(slots=True)
class CopyResult:
    """What a copy did. `not_copied` are sockets, fifos and devices; `changed` local files that were written
    while they were read."""

    operation: str
    source_path: str
    target_path: str
    files: int = 0
    directories: int = 0
    symlinks: int = 0
    skipped: int = 0
    bytes: int = 0
    revision: str | None = None
    failed: list[Failure] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    not_copied: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed and not self.changed

    def to_json(self) -> JsonObject:
        found: JsonObject = {
            "operation": self.operation,
            "source_path": self.source_path,
            "target_path": self.target_path,
            "bytes_transferred": self.bytes,
            "files_transferred": self.files,
            "directories": self.directories,
            "symlinks": self.symlinks,
            "skipped": self.skipped,
            "revision": self.revision,
            "status": "ok" if self.ok else "incomplete",
        }
        if self.failed:
            found["failed"] = [{"path": f.path, "code": f.code, "message": f.message} for f in self.failed]
        if self.changed:
            found["changed"] = self.changed
        if self.not_copied:
            found["not_copied"] = self.not_copied
        return found


class Stopped(Exception):
    """The copy is being ended (Ctrl-C, or an error elsewhere); never seen outside this package."""


class Meter:
    """The counts of one running copy, from all its threads; also where long transfers learn to stop."""

    def __init__(self, result: CopyResult, progress: ProgressFn | None = None) -> None:
        self.result = result
        self._progress = progress
        self._lock = threading.Lock()
        self._path = ""
        self.stopping: threading.Event | None = None

    def add(self, count: int) -> None:
        """`count` bytes moved (negative: they move again). Raises `Stopped`."""
        if self.stopping is not None and self.stopping.is_set():
            raise Stopped
        with self._lock:
            self.result.bytes += count
            self._tell()

    def did(self, what: str, path: bytes) -> None:
        """One of the result's counters went up by one."""
        with self._lock:
            setattr(self.result, what, getattr(self.result, what) + 1)
            self._path = show(path)
            self._tell()

    def step(self, counts: Mapping[str, int], path: bytes) -> None:
        """Several counters went up, by what the server did in one request."""
        with self._lock:
            for name, count in counts.items():
                setattr(self.result, name, getattr(self.result, name) + count)
            self._path = show(path)
            self._tell()

    def failed(self, path: bytes, error: FsdError) -> None:
        self.told(path, error.code, error.message)

    def told(self, path: bytes, code: str, message: str) -> None:
        """A path that was not copied, as the server says."""
        with self._lock:
            self.result.failed.append(Failure(show(path), code, message))

    def changed(self, path: bytes) -> None:
        with self._lock:
            self.result.changed.append(show(path))

    def not_copied(self, path: bytes) -> None:
        with self._lock:
            self.result.not_copied.append(show(path))

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(Progress(self.result.files, self.result.bytes, self._path))

    def attempt(self, path: bytes, job: Callable[[], None]) -> Callable[[], None]:
        """`job` with its failure recorded instead of raised, unless it concerns every file."""

        def run() -> None:
            self.tried(path, job)

        return run

    def tried(self, path: bytes, job: Callable[[], None]) -> bool:
        """`job` done now; False: it failed, which is recorded."""
        try:
            job()
        except FATAL:
            raise
        except FsdError as exc:
            self.failed(path, exc)
            return False
        return True


def normal(path: bytes) -> bytes:
    """A remote path in one spelling; raises `UsageError` or `PosixError` (a component too long)."""
    return b"/" + b"/".join(split_path(path))


def normal_source(path: bytes) -> bytes:
    """As `normal`, for what must be there: a slash at the end stays, which asks for a directory."""
    parts = split_typed(path)
    return b"/" + b"/".join(parts)


def means_into(path: bytes) -> bool:
    """Whether a target as typed means "into this directory, under the source's name"."""
    return path.endswith(b"/") or os.path.basename(path) in (b".", b"..")


def means_content(source: bytes) -> bool:
    """Whether a tree as typed (`dir/.`, `.`) means "what is in it", which has no name to go under."""
    return os.path.basename(source.rstrip(b"/")) in (b".", b"..")


def stat_or_none(files: Files, path: bytes, *, follow: bool = False) -> JsonObject | None:
    """The stat object, or None when nothing is there."""
    try:
        return files.stat(path, follow=follow)
    except NotFound:
        return None
    except FsdError as exc:
        if exc.details.get("errno") in ("ENOENT", "ENOTDIR"):
            return None
        raise


def remote_target(files: Files, target: bytes, source_name: bytes, *, recursive: bool) -> bytes:
    """Where a copy to the remote `target`, as typed, goes.

    Into it when it is typed as a directory (`/dir/`) and, for a single file, when a directory is there. A
    tree goes to exactly `target`, so that an interrupted copy can be repeated, and so does what is in a tree
    (no `source_name`).
    """
    path = normal(target)
    if means_into(target):
        return join(path, source_name) if source_name else path
    if not recursive:
        there = stat_or_none(files, path, follow=True)
        if there is not None and there["is_dir"]:
            return join(raw_path(there), source_name)
    return path


def base_name(path: bytes, what: str) -> bytes:
    """The last component of a source, to be used under a directory; raises `UsageError` for `/`."""
    name = os.path.basename(path.rstrip(b"/"))
    if name in (b"", b".", b".."):
        raise UsageError(f"{what} has no name of its own; give the target's")
    return name


def copy_remote(
    files: Files,
    source: bytes,
    target: bytes,
    options: CopyOptions,
    progress: ProgressFn | None = None,
) -> CopyResult:
    """Copy within the server; file content is shared, not moved."""
    origin = files.stat(normal_source(source))
    where = raw_path(origin)
    if origin["is_dir"] and not options.recursive:
        raise UsageError(f"{show(where)} is a directory", hint="copy it with -r")
    recursive = bool(origin["is_dir"])
    needs_name = not recursive or (means_into(target) and not means_content(source))
    name = base_name(where, "the source") if needs_name else b""
    goal = remote_target(files, target, name, recursive=recursive)
    result = CopyResult("copy", show(where), show(goal))
    meter = Meter(result, progress)
    if not recursive:
        if options.parents:
            _make_parents(files, goal)
        answer = files.copy(where, goal, overwrite=options.overwrite)
        meter.did("files", goal)
        result.bytes = int(origin["size_bytes"])
        result.revision = (answer.get("stat") or {}).get("revision")
        return result
    if (real_path(files, goal) + b"/").startswith(where.rstrip(b"/") + b"/"):
        raise UsageError(f"{show(goal)} lies inside {show(where)}: a tree cannot be copied into itself")
    _copy_tree(files, where, goal, options, meter)
    return result


def real_path(files: Files, path: bytes) -> bytes:
    """`path` without symlinks, as far as it exists."""
    there = stat_or_none(files, path, follow=True)
    if there is not None or path == b"/":
        return raw_path(there) if there is not None else path
    return join(real_path(files, os.path.dirname(path)), os.path.basename(path))


def _make_parents(files: Files, path: bytes) -> None:
    parent = os.path.dirname(path)
    if parent != b"/" and stat_or_none(files, parent, follow=True) is None:
        files.mkdir(parent, parents=True)


def _copy_tree(files: Files, source: bytes, target: bytes, options: CopyOptions, meter: Meter) -> None:
    """Step by step on the server; the next one goes on where the last ended."""
    files.mkdir(target, parents=True)
    after: str | None = None
    while True:
        did = files.copy_tree(source, target, overwrite=options.overwrite, resume=options.resume, after=after)
        meter.step({name: int(did[name]) for name in STEP_COUNTS}, target)
        for one in did["failed"]:
            meter.told(_path_of(one), str(one["code"]), str(one["message"]))
        for one in did["not_copied"]:
            meter.not_copied(_path_of(one))
        after = did["next_after"]
        if after is None:
            return


def _path_of(told: JsonObject) -> bytes:
    encoded = told.get("path_b64")
    return base64.b64decode(encoded) if encoded else str(told["path"]).encode()


def download_stream(
    files: Files, path: bytes, out: BinaryIO, *, offset: int = 0, length: int | None = None
) -> int:
    """Write the bytes [offset, offset+length) of a remote file to `out`; how many there were.

    Bytes already written stay written when an error is raised.
    """
    written = 0
    for piece in files.read(normal_source(path), offset=offset, length=length):
        out.write(piece)
        written += len(piece)
    out.flush()
    return written
