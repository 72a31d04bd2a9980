"""A local directory into the files of a checkpoint, without a mount.

The walk goes by open directories and never follows a link, so nobody who changes the tree meanwhile leads it
elsewhere. What a manifest cannot hold (devices, sockets, links that leave the tree, names that are no UTF-8)
fails the capture by name, unless the policy leaves it out; nothing is skipped in silence. A file is read
once: its hash, its size and what is sent are of the same bytes, and one that changed meanwhile is read again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from typing import IO, Final, Protocol

from fsd.client.manifest import DIR, FILE, FILES, LINK, Entry, fault_of
from fsd.client.policy import Policy
from fsd.client.pool import Workers
from fsd.client.redact import Secrets
from fsd.client.restore import STAGING
from fsd.model.errors import InvalidPath, InvalidWorkspace, NoSpace, TooLarge, UnsupportedEntry
from fsd.model.limits import (
    CAPTURE_DEPTH_MAX,
    CAPTURE_ENTRIES_MAX,
    CAPTURE_SPOOL,
    CAPTURE_TRIES,
    CONTRACT_BLOB_MAX,
    COPY_PARALLEL,
    MIB,
)
from fsd.model.plain import dataclass, field
from fsd.model.trees import stays_inside

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class BlobStore(Protocol):
    """Where content goes. Any thread."""

    def has(self, key: str) -> bool: ...

    def put(self, key: str, size: int, spool: IO[bytes]) -> None:
        """Store `size` bytes from the beginning of `spool` under `key`."""
        ...


@dataclass(slots=True)
class Captured:
    """What a capture found. `bytes` are those of all files, `uploaded` those that were sent."""

    entries: list[Entry] = field(default_factory=list)
    bytes: int = 0
    uploaded: int = 0
    skipped: list[str] = field(default_factory=list)  # links that were left out


class Capture:
    """One capture. `run` blocks; the files are read and sent by a few threads."""

    def __init__(
        self, policy: Policy, secrets: Secrets, store: BlobStore, *, file_max: int = CONTRACT_BLOB_MAX
    ) -> None:
        self._policy, self._secrets, self._store = policy, secrets, store
        self._file_max = file_max
        self._found = Captured()
        self._guard = threading.Lock()
        self._sent: set[str] = set()
        self._opened: set[int] = set()  # files that wait for a worker, or are being read

    def run(self, root: str) -> Captured:
        """Capture the directory `root`. Raises `InvalidWorkspace`, `UnsupportedEntry`, `InvalidPath`,
        `TooLarge`, and what the store raises; what was sent until then stays in the store."""
        try:
            top = os.open(root, _DIRECTORY)
        except OSError as exc:
            raise InvalidWorkspace(f"{root} is no directory that can be read: {exc.strerror}") from exc
        try:
            with Workers(COPY_PARALLEL) as workers:
                self._walk(top, "", 0, workers)
        finally:
            os.close(top)
            for fd in self._opened:  # of jobs that an error elsewhere kept from beginning
                os.close(fd)
        self._found.entries.sort(key=lambda entry: entry.path.encode())
        return self._found

    def _walk(self, fd: int, path: str, depth: int, workers: Workers) -> bool:
        """Capture what is in an open directory; whether there was anything to capture."""
        if depth > CAPTURE_DEPTH_MAX:
            raise TooLarge(f"{path[:200]} lies below more than {CAPTURE_DEPTH_MAX} directories")
        any_found = False
        for name in sorted(self._names(fd, path)):
            below = f"{path}/{name}" if path else name
            left_over = not path and name.startswith(STAGING)  # of a restore that was killed
            if not left_over and not self._policy.excluded(below, is_dir=False):
                any_found |= self._one(fd, name, below, depth, workers)
        return any_found

    def _names(self, fd: int, path: str) -> list[str]:
        try:
            return os.listdir(fd)
        except OSError as exc:
            raise InvalidWorkspace(f"the directory {path or '.'} cannot be read: {exc.strerror}") from exc

    def _one(self, fd: int, name: str, path: str, depth: int, workers: Workers) -> bool:
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as exc:
            raise InvalidWorkspace(f"{path!a} went away or cannot be read: {exc.strerror}") from exc
        if stat.S_ISDIR(info.st_mode):
            return self._directory(fd, name, path, depth, workers)
        if not self._policy.included(path, is_dir=False):
            return False
        fault = fault_of(path)
        if fault:
            raise InvalidPath(f"{path!a} {fault}", hint="rename it, or leave it out with --exclude")
        if stat.S_ISLNK(info.st_mode):
            return self._link(fd, name, path)
        if not stat.S_ISREG(info.st_mode):
            raise UnsupportedEntry(f"{path!r} is neither a file nor a directory nor a link")
        try:
            opened = os.open(name, _FILE, dir_fd=fd)
        except OSError as exc:
            raise InvalidWorkspace(f"{path!r} cannot be read: {exc.strerror}") from exc
        with self._guard:
            self._opened.add(opened)
        workers.submit(partial(self._file, opened, path))
        return True

    def _directory(self, fd: int, name: str, path: str, depth: int, workers: Workers) -> bool:
        if self._policy.excluded(path, is_dir=True):
            return False
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        except OSError as exc:
            raise InvalidWorkspace(f"the directory {path!a} cannot be read: {exc.strerror}") from exc
        try:
            if self._walk(below, path, depth + 1, workers):
                return True
        finally:
            os.close(below)
        if not self._policy.included(path, is_dir=True):
            return False
        fault = fault_of(path)
        if fault:
            raise InvalidPath(f"{path!a} {fault}", hint="rename it, or leave it out with --exclude")
        self._add(Entry(path, DIR))
        return True

    def _link(self, fd: int, name: str, path: str) -> bool:
        try:
            target = os.readlink(name, dir_fd=fd)
        except OSError as exc:
            raise InvalidWorkspace(f"{path!r} went away or cannot be read: {exc.strerror}") from exc
        try:
            target.encode()
            good = stays_inside(path, target)
        except UnicodeEncodeError:
            good = False
        if good:
            self._add(Entry(path, LINK, target=target))
            return True
        if not self._policy.skip_links:
            raise UnsupportedEntry(
                f"the link {path!r} leads out of the directory: {target!a}",
                hint="leave it out with --exclude, or all such links with --skip-links",
            )
        self._found.skipped.append(path)
        return False

    def _add(self, entry: Entry) -> None:
        with self._guard:
            if len(self._found.entries) >= CAPTURE_ENTRIES_MAX:
                raise TooLarge(
                    f"more than {CAPTURE_ENTRIES_MAX} entries",
                    hint="leave some out with --exclude, or mount the filesystem and use native checkpoints",
                )
            self._found.entries.append(entry)
            self._found.bytes += entry.size

    # files

    def _file(self, fd: int, path: str) -> None:
        """Read, send and enter one file; closes `fd`. A worker's thread."""
        try:
            with tempfile.SpooledTemporaryFile(max_size=CAPTURE_SPOOL) as spool:
                for _ in range(CAPTURE_TRIES):
                    before = os.fstat(fd)
                    if not stat.S_ISREG(before.st_mode):
                        raise UnsupportedEntry(f"{path!r} became something else than a file")
                    if before.st_size > self._file_max:
                        raise TooLarge(f"{path!r} has {before.st_size} bytes, at most {self._file_max}")
                    digest, size = self._read(fd, spool)
                    after = os.fstat(fd)
                    if _version(before) == _version(after):
                        break
                else:
                    raise InvalidWorkspace(
                        f"{path!r} changes faster than it can be read",
                        hint="stop its writer, or mount the filesystem: a mount's checkpoint is consistent",
                    )
                entry = Entry(
                    path,
                    FILE,
                    FILES + digest,
                    size,
                    mode=stat.S_IMODE(before.st_mode) & 0o777,
                    mtime_ns=before.st_mtime_ns,
                )
                self._add(entry)
                if self._is_new(entry.key) and not self._store.has(entry.key):
                    self._store.put(entry.key, size, spool)
                    with self._guard:
                        self._found.uploaded += size
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(
                    f"{path!r} does not fit into the temporary directory {tempfile.gettempdir()}",
                    hint="free space there, or set TMPDIR",
                ) from exc
            raise InvalidWorkspace(f"{path!r} cannot be read: {exc.strerror}") from exc
        finally:
            with self._guard:
                self._opened.discard(fd)
            os.close(fd)

    def _read(self, fd: int, spool: IO[bytes]) -> tuple[str, int]:
        spool.seek(0)
        spool.truncate()
        digest, size = hashlib.sha256(), 0
        for piece in self._secrets.redacted(_pieces(fd)):
            digest.update(piece)
            spool.write(piece)
            size += len(piece)
            if size > self._file_max:
                raise TooLarge(f"a file grew over {self._file_max} bytes while it was read")
        return digest.hexdigest(), size

    def _is_new(self, key: str) -> bool:
        """Whether this capture has not sent it yet."""
        with self._guard:
            if key in self._sent:
                return False
            self._sent.add(key)
            return True


def _version(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _pieces(fd: int) -> Iterator[bytes]:
    at = 0
    while piece := os.pread(fd, MIB, at):
        yield piece
        at += len(piece)
