"""`BlobCache`: copies of blobs on the local disk, named by their hash. Never anything only it holds.

`DIR/v1/a/<hash as hex>`; `v1` is the format. A file appears by rename, without fsync: after a power cut
it may hold anything, so every read is verified, and what does not match is deleted and a miss. The time of a
file is its last use (moved at most once a minute), so several mounts share one directory with no index
and no lock between processes. The price is that the size is known by scanning: at the first store, whenever
the bound is met, and after each eighth of the bound stored by this process. Above the bound the least
recently used files go. Each further mount that shares the directory can exceed the bound by an eighth.

Large blobs are stored behind their user's back, on a thread and past the page cache: who reads a file waits
for its bytes, not for copies of them.

A cache never fails its user: a full or broken disk makes `put` a no-op and `get` a miss, both counted, and
`stats` tells the last reason. Some space is left free for the log, which shares the disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Final, NamedTuple

from fsd.host.direct import write_past_cache
from fsd.host.files import write_all
from fsd.host.seam import Host
from fsd.model.limits import CACHE_PAUSE, CACHE_RESERVE, CACHE_TOUCH, DIRECT_PIECE
from fsd.model.plain import dataclass

_TEMPORARY: Final = ".tmp"
_STALE_NS: Final = 3600 * 10**9  # a temporary file this old belongs to nobody


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since this process began; `bytes` is the size of the whole directory as last known. `skipped`
    counts stores given up for lack of space or a broken disk, `last_error` says why."""

    bytes: int
    hits: int
    misses: int
    damaged: int
    evicted: int
    skipped: int
    last_error: str


class _File(NamedTuple):
    """A cached file as a scan finds it, ordered by last use."""

    used: int
    path: str
    size: int


class BlobCache:
    """Any thread. Blocks on the local disk only."""

    def __init__(self, directory: Path, host: Host, max_bytes: int, *, behind: int = 0) -> None:
        """`max_bytes` 0 turns it off. So many bytes of large blobs as `behind` says may wait to be stored.
        Makes nothing yet: a cache on a full disk must not stop a mount."""
        self._root = os.path.join(os.fspath(directory), "v1")
        self._host, self._max = host, max_bytes
        self._lock = threading.Lock()  # the figures below
        self._scanning = threading.Lock()  # one scan at a time; others go on meanwhile
        self._total = 0
        self._since_scan = 0
        self._scanned = False
        self._pause_until = 0.0
        self._serial = 0
        self._hits = self._misses = self._damaged = self._evicted = self._skipped = 0
        self._last_error = ""
        self._behind = behind
        self._waiting: dict[bytes, bytes] = {}  # what is to be stored; the first is being
        self._waiting_bytes = 0
        self._changed = threading.Condition(self._lock)  # of `_waiting`
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, digest: bytes) -> bytes | None:
        """The verified bytes of the blob, or None."""
        with self._lock:
            waiting = self._waiting.get(digest)
            if waiting is not None:
                self._hits += 1
                return waiting
        found = self._open(digest)
        if found is None:
            self._miss()
            return None
        fd, path = found
        try:
            data = self._read(fd)
        except OSError as exc:
            self._note(exc)
            self._miss()
            return None
        finally:
            os.close(fd)
        if hashlib.sha256(data).digest() != digest:
            with self._lock:
                self._damaged += 1
            self._remove(path, len(data))
            self._miss()
            return None
        with self._lock:
            self._hits += 1
        return data

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep a copy of verified bytes, if there is room: now, or of a large blob soon."""
        if 0 < len(data) <= self._max and not self._later(digest, data):
            self._store(digest, data, past=False)

    def settle(self, timeout: float) -> bool:
        """Wait until nothing waits to be stored; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self, timeout: float) -> bool:
        """End the thread. What still waits `timeout` seconds from now is dropped; the one that is just being
        written then is finished behind the caller's back. True when nothing was dropped. Further calls do
        nothing; a blob that is put later is stored at once by whoever puts it."""
        end = self._host.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        whole = self.settle(timeout)
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, end - self._host.monotonic()))
        return whole

    def _later(self, digest: bytes, data: bytes) -> bool:
        """Leave it to the thread. False where that has enough to do: whoever reads faster than the disk takes
        copies stores through the page cache what is above."""
        if len(data) < DIRECT_PIECE:
            return False
        with self._changed:
            if digest in self._waiting:
                return True
            if self._closed or self._waiting_bytes + len(data) > self._behind:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="fsd-keep", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has none to give
                    return False
                self._thread = thread
            self._waiting[digest] = data
            self._waiting_bytes += len(data)
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                digest, data = next(iter(self._waiting.items()))
            try:
                self._store(digest, data, past=True)
            except Exception as exc:  # noqa: BLE001 - the next ones are stored all the same
                self._give_up(exc)
            with self._changed:
                if self._waiting.pop(digest, None) is not None:  # else it was dropped meanwhile
                    self._waiting_bytes -= len(data)
                self._changed.notify_all()
            del data  # an idle thread keeps nothing

    def _store(self, digest: bytes, data: bytes, *, past: bool) -> None:
        with self._lock:
            if self._host.monotonic() < self._pause_until:
                self._skipped += 1
                return
            self._serial += 1
            serial = self._serial
        path = self._path(digest)
        if os.path.exists(path):
            return
        try:
            if not self._room_for(len(data)):
                return
            self._write(path, data, serial, past=past)
        except OSError as exc:
            self._give_up(exc)
            return
        with self._lock:
            self._total += len(data)
            self._since_scan += len(data)

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                self._total,
                self._hits,
                self._misses,
                self._damaged,
                self._evicted,
                self._skipped,
                self._last_error,
            )

    def _open(self, digest: bytes) -> tuple[int, str] | None:
        """An open file and its path, which may be that of an earlier version: directories in directories."""
        path = self._path(digest)
        name = digest.hex()
        for one in (path, f"{self._root}/{name[:2]}/{name[2:4]}/{name}"):
            try:
                return os.open(one, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), one
            except FileNotFoundError:
                continue  # a miss, unless it is at the other place
            except OSError as exc:
                self._note(exc)
                return None
        return None

    def _path(self, digest: bytes) -> str:
        # Few directories: each is made anew in an empty cache, for the price of 150 KiB written.
        name = digest.hex()
        return f"{self._root}/{name[:1]}/{name}"

    def _read(self, fd: int) -> bytes:
        status = os.fstat(fd)
        now = self._host.wall_ns()
        if now - status.st_mtime_ns > CACHE_TOUCH * 1e9:
            os.utime(fd, ns=(now, now))
        pieces = []
        while piece := os.read(fd, status.st_size + 1):
            pieces.append(piece)
        return b"".join(pieces)

    def _write(self, path: str, data: bytes, serial: int, *, past: bool) -> None:
        temporary = f"{path}.{os.getpid()}.{serial}{_TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(temporary, flags, 0o600)
        try:
            try:
                if past:
                    write_past_cache(fd, [data])
                else:
                    write_all(fd, data)
                now = self._host.wall_ns()
                os.utime(fd, ns=(now, now))
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise

    def _room_for(self, size: int) -> bool:
        """Whether `size` more bytes may be stored, after evicting if need be."""
        with self._lock:
            due = (
                not self._scanned
                or self._total + size > self._max
                or self._since_scan + size > max(self._max // 8, 1)
            )
            first = not self._scanned
        # Who comes while another scans goes on with the figures there are; without any it waits.
        if due and self._scanning.acquire(blocking=first):
            try:
                self._scan(size)
            finally:
                self._scanning.release()
        disk = os.statvfs(self._root)
        free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free - size < min(CACHE_RESERVE, whole // 10):
            self._give_up(OSError(errno.ENOSPC, "little space is left on the disk"))
            return False
        with self._lock:
            return self._total + size <= self._max

    def _scan(self, coming: int) -> None:
        """Learn the true size; above the bound delete the least recently used down to seven eighths."""
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        files = sorted(self._files())
        total = sum(one.size for one in files)
        low = max(self._max * 7 // 8 - coming, 0)
        gone = 0
        if total + coming > self._max:
            for one in files:
                if total <= low:
                    break
                try:
                    os.unlink(one.path)
                except FileNotFoundError:
                    pass  # another mount evicted it; it is gone either way
                total -= one.size
                gone += 1
        with self._lock:
            self._total, self._since_scan, self._scanned = total, 0, True
            self._evicted += gone

    def _files(self) -> list[_File]:
        """Every cached file; old temporary ones are deleted on the way."""
        found = []
        stale = self._host.wall_ns() - _STALE_NS
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = f"{directory}/{name}"
                try:
                    status = os.lstat(path)
                    if name.endswith(_TEMPORARY):
                        if status.st_mtime_ns < stale:
                            os.unlink(path)
                        continue
                except FileNotFoundError:
                    continue  # another mount's eviction or rename
                found.append(_File(status.st_mtime_ns, path, status.st_size))
        return found

    def _remove(self, path: str, size: int) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return  # another mount was faster
        except OSError as exc:
            self._note(exc)
            return
        with self._lock:
            self._total = max(0, self._total - size)

    def _miss(self) -> None:
        with self._lock:
            self._misses += 1

    def _note(self, exc: OSError) -> None:
        with self._lock:
            self._last_error = str(exc)

    def _give_up(self, exc: Exception) -> None:
        """Store nothing for a while: a full disk is not asked at each blob."""
        with self._lock:
            self._skipped += 1
            self._last_error = str(exc)
            self._scanned = False  # the directory may have been deleted under us; a scan makes it again
            self._pause_until = self._host.monotonic() + CACHE_PAUSE
