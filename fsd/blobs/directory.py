"""Objects as files of a directory. Crash points `pack.*` as in `fsd.host.files`, `pack.deleted`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fsd.blobs.store import Listed, OpenFile, Stretch, check_key
from fsd.host.files import fsync_dir, make_dirs_durable, write_durable
from fsd.host.seam import Host
from fsd.model.errors import FsdError, IntegrityError, NoSpace, NotFound, Unavailable
from fsd.model.limits import DIRECT_LEAST, DIRECT_PIECE, KIB
from fsd.model.space import Space

_SCRATCH: Final = ".unfinished"
_ENTERED_MAX: Final = 65_536  # one a filesystem; past it all are synced once more
_LOOK: Final = 128 * KIB  # what Linux reads ahead
_SCRATCH_KEEP_S: Final = 3600  # an upload takes seconds; older files are left over from a crash


class DirectoryStore:
    """`BlobStore` in `path`, which may be shared by several servers of one database.

    Unfinished objects lie in a directory of their own, which `list` never enters; those of crashed servers
    are removed at the next start.
    """

    def __init__(self, path: Path, host: Host) -> None:
        self._root = path
        self._host = host
        self._scratch = path / _SCRATCH
        self._entered: set[Path] = {path}  # directories whose entries are durable
        try:
            make_dirs_durable(path)
            self._scratch.mkdir(mode=0o700, exist_ok=True)
            self._clean()
        except OSError as exc:
            raise self._failed(exc) from exc

    def put(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        path, data = self._path(key), list(pieces)
        past = _large(data)
        try:
            try:
                self._make_parents(path.parent)
                write_durable(self._host, path, data, "pack", scratch=self._scratch, past_cache=past)
            except FileNotFoundError:  # somebody has tidied up empty directories
                self._entered = {self._root}
                self._make_parents(path.parent)
                write_durable(self._host, path, data, "pack", scratch=self._scratch, past_cache=past)
        except OSError as exc:
            raise self._failed(exc) from exc

    def get(self, key: str, offset: int, length: int) -> bytes:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = _pread_all(fd, offset, length)
            finally:
                os.close(fd)
        except FileNotFoundError as exc:
            raise NotFound(f"no object {key}") from exc
        except OSError as exc:
            raise self._failed(exc) from exc
        if len(data) != length:
            raise IntegrityError(f"object {key} ends before byte {offset + length}")
        return data

    def stretch(self, key: str, offset: int, length: int) -> Stretch:
        try:
            file = OpenFile(os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC))
            size = os.fstat(file.fd).st_size
            # A disk that gives nothing of it is told before the answer has begun. As much as it is asked for
            # first anyway: a single byte would be a read of its own.
            os.pread(file.fd, min(length, _LOOK), offset)
        except FileNotFoundError as exc:
            raise NotFound(f"no object {key}") from exc
        except OSError as exc:
            raise self._failed(exc) from exc
        if size < offset + length:
            raise IntegrityError(f"object {key} ends before byte {offset + length}")
        return Stretch(file, offset, length)

    def head(self, key: str) -> int | None:
        try:
            return os.stat(self._path(key)).st_size
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._failed(exc) from exc

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        # Only the directory the prefix reaches into is walked: listing one filesystem does not pass others.
        above = prefix.rpartition("/")[0]
        start = self._root / check_key(above) if above else self._root
        yield from self._walk(start, f"{above}/" if above else "", prefix, after)

    def _walk(self, directory: Path, inside: str, prefix: str, after: str) -> Iterator[Listed]:
        """The objects in `directory`, whose keys begin with `inside`, in order of key: `a-b` before `a/b`."""
        try:
            with os.scandir(directory) as entries:
                found = sorted(
                    (f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name, one.path)
                    for one in entries
                    if not one.name.startswith(".")
                )
        except FileNotFoundError:  # none yet, or tidied up
            return
        except OSError as exc:
            raise self._failed(exc) from exc
        for name, path in found:
            key = inside + name
            if name.endswith("/"):
                if key >= after[: len(key)] and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from self._walk(Path(path), key, prefix, after)
            elif key > after and key.startswith(prefix):
                try:
                    seen = os.stat(path)
                except FileNotFoundError:  # deleted since
                    continue
                except OSError as exc:
                    raise self._failed(exc) from exc
                yield Listed(key, seen.st_size, int(seen.st_mtime))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return  # what was wanted holds
        except OSError as exc:
            raise self._failed(exc) from exc
        # Not synced: an object that comes back after a crash is unreferenced, and swept again.
        self._host.crash_point("pack.deleted")

    def tidy(self, above: str) -> None:
        # Not synced either. Who writes into it meanwhile makes it again (`put`).
        try:
            self._path(above).rmdir()
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise self._failed(exc) from exc

    def space(self) -> Space:
        try:
            disk = os.statvfs(self._root)
        except OSError as exc:
            raise self._failed(exc) from exc
        # What only the superuser may use counts neither as free nor as used: `df` says so of this disk too.
        total = disk.f_blocks - disk.f_bfree + disk.f_bavail
        return Space(total * disk.f_frsize, disk.f_bavail * disk.f_frsize)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _make_parents(self, path: Path) -> None:
        """Make `path` with durable entries up to the root. That it is there says nothing: another thread or
        server may have made it just now and not synced it yet."""
        if path in self._entered:
            return
        self._make_parents(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        fsync_dir(path.parent)
        if len(self._entered) > _ENTERED_MAX:
            self._entered = {self._root}
        self._entered.add(path)

    def _clean(self) -> None:
        before = self._host.wall_ns() / 1e9 - _SCRATCH_KEEP_S
        with os.scandir(self._scratch) as entries:
            for entry in entries:
                path = Path(entry.path)
                try:
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        path.unlink(missing_ok=True)
                except FileNotFoundError:  # another server of this store was quicker
                    continue

    def _failed(self, exc: OSError) -> FsdError:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace(f"the disk under {self._root} is full", hint=f"free space under {self._root}")
        reason = errno.errorcode.get(exc.errno or 0, "error")
        return Unavailable(
            f"the object directory {self._root} failed: {exc.strerror} ({reason})",
            hint="look at the disk, the path and its permissions",
        )


def _large(pieces: Sequence[bytes | memoryview]) -> bool:
    """Whether they are blocks of large files. Those are read again in megabytes, which a disk gives as fast
    as they can be sent; many small ones are a tree, which somebody else may read next, piece by piece."""
    size = sum(map(len, pieces))
    return size >= DIRECT_LEAST and size >= len(pieces) * DIRECT_PIECE


def _pread_all(fd: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes; fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    pieces = [data]
    have = len(data)
    while have < length and pieces[-1]:
        pieces.append(os.pread(fd, length - have, offset + have))
        have += len(pieces[-1])
    return b"".join(pieces)
