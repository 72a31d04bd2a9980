"""Where the bytes of an upload come from, and where those of a download go: local files and streams.

Errors of the local disk become `FsdError` here, so that they are never taken for the server's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Final, Protocol

from fsd.client.http import Body
from fsd.host.files import write_all
from fsd.host.seam import Host
from fsd.model.errors import Conflict, FsdError, NoSpace, NotFound, PosixError, UsageError
from fsd.model.limits import MIB, STREAM_SPOOL
from fsd.model.names import show
from fsd.model.spans import Span, merged, total

CHUNK: Final = MIB
_SPARSE_MIN: Final = MIB  # bytes of a file that is worth a look for holes
_PAGE: Final = 65536  # what a file of /sys may claim to have: a page, whose size differs


class LocalChanged(Conflict):
    """A local file changed while it was being read; nothing was written with the mixture."""

    code = "local_changed"


def local_error(exc: OSError, path: bytes) -> FsdError:
    """What a failed call on the local disk means for the command."""
    number = exc.errno or errno.EIO
    if number in (errno.ENOENT,):
        parent = os.path.dirname(path)
        if parent and not os.path.lexists(parent):
            return NotFound(f"no such local directory: {show(parent)}")
        return NotFound(f"no such local file or directory: {show(path)}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"the local disk is full at {show(path)}", hint="free space there")
    return PosixError(number, f"the local {show(path)}: {os.strerror(number)}")


@contextmanager
def told(path: bytes) -> Iterator[None]:
    """Turns an OSError about the local `path` into an `FsdError`."""
    try:
        yield
    except OSError as exc:
        raise local_error(exc, path) from exc


class LocalFile:
    """A regular local file opened for one upload: exactly the bytes it had when opened, or `LocalChanged`.

    Files of /proc and /sys have sizes that mean nothing: they are read to their end, as cp does.
    One thread. Use as a context manager.
    """

    repeatable = True

    def __init__(self, path: bytes) -> None:
        self.path = path
        with told(path):
            # O_NONBLOCK: a fifo put here meanwhile must not hang the copy.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.stat = os.fstat(self._fd)
            if not stat.S_ISREG(self.stat.st_mode):
                raise UsageError(f"{show(path)} is no regular file")
            with told(path):
                self._made_up = self._is_made_up()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def _is_made_up(self) -> bool:
        """Whether the kernel makes the content as it is read: nothing stored, another length than said."""
        size = self.stat.st_size
        return not self.stat.st_blocks and size <= _PAGE and len(os.pread(self._fd, size + 1, 0)) != size

    @property
    def length(self) -> int | None:
        return None if self._made_up else self.stat.st_size

    def pieces(self) -> Iterator[bytes]:
        at = 0
        while self._made_up:
            with told(self.path):
                piece = os.pread(self._fd, CHUNK, at)
            if not piece:
                return
            yield piece
            at += len(piece)
        yield from self.read(at, self.stat.st_size)

    def read(self, at: int, end: int) -> Iterator[bytes]:
        while at < end:
            with told(self.path):
                piece = os.pread(self._fd, min(CHUNK, end - at), at)
            if not piece:
                raise LocalChanged(f"{show(self.path)} became shorter while it was copied")
            yield piece
            at += len(piece)

    def data(self) -> list[Span] | None:
        """Where the data of a sparse file is; None for another one, and where the disk does not tell."""
        size = self.stat.st_size
        if size < _SPARSE_MIN or self.stat.st_blocks * 512 >= size:
            return None
        spans = merged(self._extents())
        return None if spans == [(0, size)] else spans

    def _extents(self) -> Iterator[Span]:
        at, size = 0, self.stat.st_size
        while at < size:
            try:
                start = os.lseek(self._fd, at, os.SEEK_DATA)
                end = min(size, os.lseek(self._fd, start, os.SEEK_HOLE))
            except OSError as exc:
                if exc.errno != errno.ENXIO:  # no data behind this
                    yield at, size
                return
            if start >= size or end <= start:
                return
            yield start, end
            at = end

    def changed(self) -> bool:
        """Whether the file was written since it was opened."""
        if self._made_up:
            return False  # another time with each look
        now = os.fstat(self._fd)
        before = self.stat
        return (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (
            before.st_size,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )


class DataBody:
    """The data of a sparse local file, without what lies between."""

    repeatable = True

    def __init__(self, local: LocalFile, spans: Sequence[Span]) -> None:
        self._local, self._spans = local, spans

    @property
    def length(self) -> int | None:
        return total(self._spans)

    def pieces(self) -> Iterator[bytes]:
        for start, end in self._spans:
            yield from self._local.read(start, end)


class StreamBody:
    """A pipe or device as a body of unknown length. Up to STREAM_SPOOL bytes are kept and can be repeated."""

    def __init__(self, stream: BinaryIO, name: bytes = b"standard input") -> None:
        self._stream, self._name = stream, name
        head = bytearray()
        ended = False
        while len(head) < STREAM_SPOOL and not ended:
            piece = self._read(STREAM_SPOOL - len(head))
            ended = not piece
            head += piece
        self._head = bytes(head)
        self.repeatable = ended

    @property
    def length(self) -> int | None:
        return len(self._head) if self.repeatable else None

    def _read(self, size: int) -> bytes:
        with told(self._name):
            return self._stream.read(size) or b""

    def pieces(self) -> Iterator[bytes]:
        view = memoryview(self._head)
        for at in range(0, len(view), CHUNK):
            yield bytes(view[at : at + CHUNK])
        if self.repeatable:
            return
        self._head = b""
        while piece := self._read(CHUNK):
            yield piece


class Counter(Protocol):
    """What `Metered` and downloads report moved bytes to; may raise to end the transfer."""

    def add(self, count: int) -> None: ...


class Metered:
    """A body whose bytes are counted as they are sent. `count(n)` is called on the sending thread."""

    def __init__(self, body: Body, count: Counter) -> None:
        self._body, self._count = body, count
        self._sent = 0

    @property
    def length(self) -> int | None:
        return self._body.length

    @property
    def repeatable(self) -> bool:
        return self._body.repeatable

    def take_back(self) -> None:
        """What was sent does not count: it is sent again from its start, or as another body."""
        self._count.add(-self._sent)
        self._sent = 0

    def pieces(self) -> Iterator[bytes]:
        self.take_back()
        for piece in self._body.pieces():
            self._sent += len(piece)
            self._count.add(len(piece))
            yield piece


_ZEROS: Final = bytes(1 << 20)


def _is_hole(piece: bytes) -> bool:
    """A look at the first byte spares most pieces the comparison."""
    return 4096 <= len(piece) <= len(_ZEROS) and not piece[0] and piece == _ZEROS[: len(piece)]


_OWN: Final = b"/proc/self/fd/%d"


def _nameless(directory: bytes) -> int | None:
    """A new file in `directory` that has no name yet and can be given one; None where that cannot be had."""
    try:
        fd = os.open(directory or b".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # whatever is in the way of both, the other way will tell
    if os.path.exists(_OWN % fd):
        return fd
    os.close(fd)
    return None


class LocalTarget:
    """A local file being replaced: one without a name until `finish`, so it is old or complete, and nothing
    is left where this process is killed. (Where the disk knows no such files: a temporary beside it.)
    Pieces of zeros become holes, so that a sparse file takes no more room here than where it came from.

    One thread. Use as a context manager; without `finish` what was written goes away.
    """

    def __init__(self, path: bytes, host: Host) -> None:
        self.path = path
        directory, name = os.path.split(path)
        mark = host.token_bytes(6).hex().encode()
        self._temporary = os.path.join(directory, b"." + name[:200] + b"." + mark + b".part")
        self._hole = False  # the file ends in one so far
        fd = _nameless(directory)
        self._named = fd is None  # whether the temporary name is there
        with told(path):
            made = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._temporary, made, 0o600) if fd is None else fd

    def __enter__(self) -> LocalTarget:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
        if self._named:
            with told(self.path):
                os.unlink(self._temporary)

    def write(self, piece: bytes) -> None:
        with told(self.path):
            self._hole = _is_hole(piece)
            if self._hole:
                os.lseek(self._fd, len(piece), os.SEEK_CUR)
            else:
                write_all(self._fd, piece)

    def hole(self, length: int) -> None:
        """So many zeros, which take no room."""
        with told(self.path):
            self._hole = True
            os.lseek(self._fd, length, os.SEEK_CUR)

    def finish(
        self, *, mode: int, mtime_ns: int | None, owner: tuple[int, int] | None, replace: bool
    ) -> None:
        """Give the file its attributes and its name. Without `replace` an existing name is a `Conflict`."""
        with told(self.path):
            if self._hole:
                os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR))
            if owner is not None:
                os.fchown(self._fd, *owner)
            os.fchmod(self._fd, mode)
            if mtime_ns is not None:
                os.utime(self._fd, ns=(mtime_ns, mtime_ns))
            if replace and self._named:
                os.rename(self._temporary, self.path)
                self._named = False
                return
            try:
                self._link(self.path)
            except FileExistsError as exc:
                if not replace:
                    raise Conflict(f"the local {show(self.path)} exists") from exc
                self._link(self._temporary)
                self._named = True
                os.rename(self._temporary, self.path)
                self._named = False

    def _link(self, path: bytes) -> None:
        if self._named:
            os.link(self._temporary, path)
        else:
            # With a directory's number it is linkat(2), which follows this link; link(2) does not.
            os.link(_OWN % self._fd, path, src_dir_fd=self._fd, follow_symlinks=True)
