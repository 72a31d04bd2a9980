"""A retained state as a tar stream, in pieces: bounded memory, every block verified.

POSIX tar with extended headers: names of any bytes and length, times to the nanosecond as far as its numbers
go, hard links, symlinks, devices, extended attributes (`SCHILY.xattr.…`, which GNU tar and bsdtar read). The
state is pinned while it is sent, so a checkpoint deleted meanwhile does not pull it away.
"""

from __future__ import annotations

import stat
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fsd.host.seam import Host
from fsd.meta.database import Database, Tx
from fsd.model import acl, blocks
from fsd.model.attrs import Attr
from fsd.model.errors import IntegrityError, NotFound
from fsd.model.limits import EXPORT_PAGE, EXPORT_PIN, UPLOAD_PACK
from fsd.model.names import show
from fsd.service import pins
from fsd.service.access import FsRef, Grant, hold
from fsd.service.packs import Packs
from fsd.service.retained import At, State, state_of, still
from fsd.service.tree import Walked, resolve, walk
from fsd.service.upload import Reading, assemble, open_blobs

_TYPES: Final = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
_END: Final = bytes(2 * tarfile.BLOCKSIZE)
_BATCH: Final = 256  # small entries whose contents are fetched together
_GATHER: Final = 256 * 1024  # bytes of small entries that are sent together


class Export:
    """One stream. `next_piece` blocks; one thread at a time; `close` once, however it ended."""

    def __init__(
        self, db: Database, packs: Packs, host: Host, fs: FsRef, state: State, pin: int, top: Walked
    ) -> None:
        self._db, self._packs, self._host, self._fs = db, packs, host, fs
        self._state, self._pin, self._top = state, pin, top
        self._queue: deque[Walked] = deque([top])
        self._after = b""
        self._walked = not top.attr.is_dir
        self._reading: Reading | None = None
        self._at = b""  # whose content it reads
        self._padding = 0
        self._done = False
        self._links: dict[int, bytes] = {}  # inode with more names → the first one sent
        self.skipped = 0  # sockets, which tar has no form for

    @classmethod
    def open(
        cls,
        db: Database,
        packs: Packs,
        host: Host,
        fs: FsRef,
        who: Grant,
        at: At | None,
        path: Sequence[bytes],
    ) -> Export:
        """Pin the state, `None` the live one. Raises `NotFound`."""

        def begin(tx: Tx) -> tuple[State, int, Walked]:
            hold(tx, fs, who)
            state = state_of(tx, fs, at)
            expires = host.wall_ns() + int(EXPORT_PIN * 1e9)
            number = pins.pin_at(tx, fs, state.seq, "mount", "export", expires)
            place = resolve(tx, state.fs, path, at=state.seq)
            name = place.name or b"."
            return State(state.fs, state.seq, state.seq), number, Walked(name, place.need())

        return cls(db, packs, host, fs, *db.write(begin))

    @property
    def seq(self) -> int:
        return self._state.seq

    def close(self) -> None:
        """Let go of the state."""
        try:
            self._db.write(lambda tx: pins.unpin(tx, self._packs, self._fs, self._pin), frees=True)
        except NotFound:  # the filesystem was deleted, or the pin's time was over
            return

    def next_piece(self) -> bytes:
        """The next bytes, up to some MiB; empty at the end. Raises `IntegrityError` when a block is lost or
        damaged, `NotFound` when the filesystem was deleted."""
        made: list[bytes] = []
        size = 0
        while size < _GATHER and not self._done:
            piece = self._some()
            made.append(piece)
            size += len(piece)
        return b"".join(made)

    def _some(self) -> bytes:
        if self._reading is not None:
            with _named(self._at):
                piece = self._reading.next_piece()
            if piece:
                return piece
            self._reading = None
            return bytes(self._padding)
        if not self._queue and not self._walked:
            self._walk()
        if not self._queue:
            self._done = True
            return _END
        few = self._small_ones()
        return few if few else self._entry(self._queue.popleft())

    def _small_ones(self) -> bytes:
        """The next entries up to the first file of several blocks: what they hold is fetched together."""
        batch: list[Walked] = []
        size = 0
        while self._queue and len(batch) < _BATCH and size < UPLOAD_PACK and self._queue[0].attr.blocks < 2:
            batch.append(self._queue.popleft())
            size += batch[-1].attr.size
        need: set[bytes] = set()
        need = need.union(*(blocks.hashes(one.attr.first_block()) for one in batch))
        data = self._blobs(batch, need) if need else {}
        return b"".join(piece for one in batch for piece in self._small_one(one, data))

    def _blobs(self, batch: Sequence[Walked], need: set[bytes]) -> dict[bytes, bytes]:
        try:
            return open_blobs(self._packs, self._fs.id, need)
        except IntegrityError:
            for one in batch:  # whose it is
                with _named(one.path):
                    open_blobs(self._packs, self._fs.id, blocks.hashes(one.attr.first_block()))
            raise

    def _small_one(self, one: Walked, data: dict[bytes, bytes]) -> Iterator[bytes]:
        attr = one.attr
        header, content = self._head(one)
        yield header
        if content:
            yield assemble(attr.first_block(), 0, attr.size, data)
            yield bytes(-attr.size % tarfile.BLOCKSIZE)

    def _walk(self) -> None:
        def read(tx: Tx) -> list[Walked]:
            state_of(tx, self._fs)  # the filesystem may go while it is sent
            attr, at = self._top.attr, self._state.at
            rows_of = still(tx, self._fs, self._state).fs
            return list(walk(tx, rows_of, attr, self._after, EXPORT_PAGE, at))

        found = self._db.read(read)
        self._walked = len(found) < EXPORT_PAGE
        if found:
            self._after = found[-1].path
        below = self._top.path + b"/"
        self._queue.extend(Walked(below + one.path, one.attr) for one in found)

    def _entry(self, one: Walked) -> bytes:
        """The head of an entry whose content, if it has any to send, is read piece by piece."""
        attr = one.attr
        header, content = self._head(one)
        if content:

            def read(tx: Tx) -> Reading:
                state = still(tx, self._fs, self._state)
                return Reading.open(tx, self._db, self._packs, self._fs, state, attr, 0, attr.size)

            self._reading, self._at = self._db.read(read), one.path
            self._padding = -attr.size % tarfile.BLOCKSIZE
        return header

    def _head(self, one: Walked) -> tuple[bytes, bool]:
        """An entry's headers, and whether its content follows."""
        attr = one.attr
        kind = _TYPES.get(stat.S_IFMT(attr.mode))
        if kind is None:
            self.skipped += 1
            return b"", False
        first = self._links.get(attr.ino)
        # A symlink of several names is several symlinks: of a hard link to one Python's `tarfile` changes the
        # owner, mode and times of what the link leads to, outside of where it unpacks.
        if first is None and attr.nlink > 1 and kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            self._links[attr.ino] = one.path
        content = attr.is_file and first is None and attr.size > 0
        return _header(one.path, attr, kind if first is None else tarfile.LNKTYPE, first), content


@contextmanager
def _named(path: bytes) -> Iterator[None]:
    """What is lost or damaged is told by the name of the file."""
    try:
        yield
    except IntegrityError as exc:
        shown = show(path.removeprefix(b"./"))
        raise IntegrityError(f"{shown}: {exc.message}", hint=exc.hint, details=exc.details) from exc


def _header(path: bytes, attr: Attr, kind: bytes, first: bytes | None) -> bytes:
    """The entry's headers."""
    info = tarfile.TarInfo(_text(path))
    info.type, info.mode = kind, stat.S_IMODE(attr.mode)
    info.uid, info.gid = attr.uid, attr.gid
    info.size = attr.size if kind == tarfile.REGTYPE else 0
    info.mtime = attr.mtime // 10**9
    target = first if first is not None else attr.target
    if target is not None:
        info.linkname = _text(target)
    if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        info.devmajor, info.devminor = _device(attr.rdev)
    more = dict(_extended(attr))
    if attr.mtime % 10**9:
        sign, whole = "-" if attr.mtime < 0 else "", abs(attr.mtime)
        more["mtime"] = f"{sign}{whole // 10**9}.{whole % 10**9:09d}"
    info.pax_headers = more
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _extended(attr: Attr) -> Iterator[tuple[str, str]]:
    """Extended attributes as pax headers; ACLs in the form that tar and bsdtar read them in."""
    for name, value in sorted((attr.xattrs or {}).items()):
        if name in acl.NAMES:
            shown = acl.shown(value, attr.mode) if name == acl.ACCESS else acl.checked(value)
            if shown is not None:
                yield f"SCHILY.acl.{name.rpartition(b'_')[2].decode()}", acl.text(shown)
        else:
            # A record ends its keyword with "="; GNU tar writes and reads such names so.
            keyword = name.replace(b"%", b"%25").replace(b"=", b"%3D")
            yield f"SCHILY.xattr.{_text(keyword)}", _text(value)


def _device(rdev: int) -> tuple[int, int]:
    """Major and minor number, as Linux packs them."""
    major = (rdev >> 8) & 0xFFF | (rdev >> 32) & ~0xFFF
    minor = rdev & 0xFF | (rdev >> 12) & ~0xFF & 0xFFFFFFFF
    return major, minor


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
