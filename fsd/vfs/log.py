"""The one local log: append-only segments of records (format and rules: DESIGN.md beside this file).

A record is a 40-byte header and a payload. The header carries kind, record number, inode, offset, payload
length and the CRC-32 of the payload, and ends with the CRC-32 of itself. A position is
`segment << 32 | byte in the segment's file`; positions rise. Nothing written is overwritten.

`append` and the rest belong to the volume's thread; `read` may be called from any thread for positions that
are still needed (the volume frees a segment only when nothing, no running job either, needs it).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fsd.host.crc import crc32
from fsd.host.files import allocate, fsync_dir, no_space, write_durable
from fsd.host.seam import Host
from fsd.model.errors import IntegrityError, NoSpace
from fsd.model.limits import LOG_KEPT, LOG_LAZY, MIB, SEGMENT
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.segments import HEAD, HEAD_CRC, HEAD_LEN, MARKER, NAME, legible, segments
from fsd.vfs.segments import STATE as STATE
from fsd.vfs.types import BULK, Cache

MAGIC: Final = 0xF5D1
_MARK: Final = MAGIC.to_bytes(2, "big")
PAGE: Final = 4096  # what the kernel copies whole, or several of them
_SEARCH: Final = MIB  # bytes looked through at a time for records behind a damaged one
SHIFT: Final = 32
OFFSET_MASK: Final = (1 << SHIFT) - 1
# Allocated ahead of the tail. Data may not use the last RESERVE bytes, so that unlink, truncate and the
# records of commits still fit when the disk is full.
AHEAD: Final = 4 * MIB
RESERVE: Final = MIB
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPARE: Final = "spare"  # a file of SPARE_SIZE that gives its space to records which must not fail
SPARE_SIZE: Final = 2 * MIB

OP: Final = 2  # one encoded operation
WRITE: Final = 3  # ino, offset; payload: 8 bytes time, then the data
TRUNC: Final = 4  # ino, offset = new size; payload: 8 bytes time
BASE: Final = 5  # records.Base
RESERVED: Final = 6  # ino; payload: operation number kept for its content as of here
CONTENT: Final = 7  # records.Flown: a content operation with where its blobs come from
ACK: Final = 8  # records.Ack
CANCEL: Final = 9  # records.Cancel: operations that are never sent
DROP: Final = 10  # ino: its changes are not needed any more
APART: Final = 11  # records.Apart: a file that turned out to be another goes on as one of its own
PUNCH: Final = 12  # ino, offset; payload: 9 bytes time, 8 bytes length: from there on it is a hole
SHARE: Final = 13  # ino; payload: 9 bytes time, then pieces of it that are stored blobs (records.shared)
UNNAMED: Final = 14  # ino, offset = its size; payload: 9 bytes time: what follows waits for its first name


class Record(NamedTuple):
    """One record as read back. `pos` is the payload's position. `whole` False: the header is good, the
    payload is not (only met after a power cut)."""

    kind: int
    number: int
    ino: int
    offset: int
    pos: int
    length: int
    whole: bool


def segment_of(pos: int) -> int:
    return pos >> SHIFT


class Log:
    """An open log. `head` is the oldest segment kept, `tail` the position of the next record."""

    def __init__(
        self, directory: Path, host: Host, first_segment: int, *, segment_size: int = SEGMENT
    ) -> None:
        self._dir = directory
        self._host = host
        self._segment_size = segment_size
        self._fds: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # where a scan found each segment's last record to end
        self._segment = first_segment - 1
        self._at = segment_size
        self._allocated = 0
        self._number = 0
        self._begun = False  # the current segment is this process's
        self._spare = False  # the spare file has its space
        self.freed = 0  # segments deleted so far
        self._kept: dict[int, int] = {}  # deleted segments that can still be read, with their sizes
        self._kept_sizes: dict[int, int] = {}
        self.unsynced: set[int] = set()  # segments written to since the last sync
        self._syncing: frozenset[int] = frozenset()  # those that a job is making durable, or fails to
        # Segments a sync of which failed: the kernel may have given up what was dirty, and the next one says
        # that all is well. What they say counts no more for freeing others; they go with those.
        self._suspect: set[int] = set()

    # opening -----------------------------------------------------------------------------------------
    @classmethod
    def create(cls, directory: Path, host: Host, first: int = 1, *, segment_size: int = SEGMENT) -> Log:
        """A log without segments; the first `append` must be preceded by `rotate`."""
        return cls(directory, host, first, segment_size=segment_size)

    @staticmethod
    def segments(directory: Path) -> list[int]:
        """The segment numbers present, rising."""
        return segments(directory)

    @classmethod
    def reopen(cls, directory: Path, host: Host, *, segment_size: int = SEGMENT) -> Log:
        """The log as an earlier process left it, for `scan`; call `rotate` before appending."""
        numbers = cls.segments(directory)
        log = cls(directory, host, (numbers[-1] if numbers else 0) + 1, segment_size=segment_size)
        for number in numbers:
            fd = os.open(directory / (NAME % number), os.O_RDWR | os.O_CLOEXEC)
            log._fds[number] = fd
            log._sizes[number] = os.fstat(fd).st_size
            log.unsynced.add(number)  # a killed process need not have synced what it wrote
        log._spare = (directory / SPARE).exists()
        return log

    def scan(self) -> Iterator[Record]:
        """The records in order, ending before the first that is not whole (a torn tail).

        A record whose header is good but whose payload is not is yielded with `whole` False when another
        good record follows it: after a power cut pages reach the disk in any order.
        """
        expected = 0
        for segment in sorted(self._fds):
            first = self._record_at(segment, 0)
            if first is None and not expected:
                return  # what later ones say rests on this one, whose beginning was durable before they were
            if first is None or (expected and first.number != expected):
                # Left behind a hole by a power cut; what an earlier recovery appended is in a later one.
                continue
            at = 0
            while True:
                record = self._record_at(segment, at)
                if record is None or (expected and record.number != expected):
                    break
                after = at + HEAD_LEN + record.length
                if not record.whole:
                    following = self._record_at(segment, after)
                    if following is None or following.number != record.number + 1:
                        break
                expected = record.number + 1
                self._number = record.number
                yield record
                at = after
            self._ends[segment] = at

    @property
    def last_number(self) -> int:
        """The number of the last record read or written; 0: none."""
        return self._number

    def goes_on(self) -> bool:
        """After a whole `scan`: whether records follow behind the place where it ended, so that it is no torn
        tail that ended it. The record torn there itself does not count."""
        for segment, size in self._sizes.items():
            at = self._ends.get(segment, -HEAD_LEN) + HEAD_LEN
            while at < size:
                piece = self._pread(segment, _SEARCH, at)
                found = piece.find(_MARK)
                while found >= 0:
                    record = self._record_at(segment, at + found)
                    if record is not None and record.number > self._number:
                        return True
                    found = piece.find(_MARK, found + 1)
                at += max(1, len(piece) - len(_MARK) + 1)
        return False

    def end_damaged(self) -> bool:
        """After a whole `scan`, without a power cut since: whether the last record is not torn but something
        else than was written. A process that is killed in a write leaves whole pages of it, in order, and
        zeros from there on (the space was allocated ahead). A record of which the last page is there was
        written to its end, and was answered. (Where that page was to be zeros, nobody can tell.)"""
        segment = max(self._ends, default=None)
        if segment is None:
            return False
        at, last = self._ends[segment], self._last_byte(segment)
        if last < at:
            return False
        head = self._pread(segment, HEAD_LEN, at)
        end = at + HEAD_LEN
        if len(head) == HEAD_LEN and HEAD_CRC.unpack_from(head, HEAD.size)[0] == crc32(head[: HEAD.size]):
            end += HEAD.unpack_from(head)[3]
            if end > self._sizes[segment]:
                return False
        return last // PAGE >= (end - 1) // PAGE

    def _last_byte(self, segment: int) -> int:
        """Where the last byte lies that is not zero; -1: there is none."""
        end = self._sizes[segment]
        while end > 0:
            start = max(0, end - _SEARCH)
            kept = len(self._pread(segment, end - start, start).rstrip(b"\0"))
            if kept:
                return start + kept - 1
            end = start
        return -1

    def cut(self, record: Record) -> None:
        """`record`, yielded by `scan` as not whole, ends the log: it and all behind it go, so that what
        is appended from now on follows the last good record."""
        segment = segment_of(record.pos)
        os.ftruncate(self._fds[segment], (record.pos & OFFSET_MASK) - HEAD_LEN)
        self._sizes[segment] = (record.pos & OFFSET_MASK) - HEAD_LEN
        self._number = record.number - 1
        for number in sorted((n for n in self._fds if n > segment), reverse=True):
            os.close(self._fds.pop(number))
            del self._sizes[number]
            (self._dir / (NAME % number)).unlink()

    def cut_tails(self) -> None:
        """After a whole `scan`: give back what lies behind the last record of each segment (torn, or
        allocated ahead). A recovery on a full disk needs that space."""
        for segment, end in self._ends.items():
            if end < self._sizes[segment]:
                os.ftruncate(self._fds[segment], end)
                self._sizes[segment] = end

    def _record_at(self, segment: int, at: int) -> Record | None:
        head = self._pread(segment, HEAD_LEN, at)
        if len(head) < HEAD_LEN:
            return None
        (own,) = HEAD_CRC.unpack_from(head, HEAD.size)
        if own != crc32(head[: HEAD.size]):
            return None
        magic, kind, _, length, number, ino, offset, crc = HEAD.unpack_from(head)
        if magic != MAGIC or at + HEAD_LEN + length > self._sizes[segment]:
            return None
        pos = segment << SHIFT | (at + HEAD_LEN)
        whole = crc32(self._pread(segment, length, at + HEAD_LEN)) == crc
        return Record(kind, number, ino, offset, pos, length, whole)

    def _pread(self, segment: int, size: int, at: int) -> bytes:
        """What is there, with zeros for what the disk cannot read: no record has its checksum then."""
        return legible(self._fds[segment], size, at)

    # writing -----------------------------------------------------------------------------------------
    @property
    def tail(self) -> int:
        return self._segment << SHIFT | self._at

    @property
    def oldest(self) -> int:
        """The number of the oldest segment kept."""
        return next(iter(self._fds), self._segment)

    @property
    def open(self) -> bool:
        """Whether its files are open."""
        return bool(self._fds)

    @property
    def used(self) -> int:
        """Bytes of records in all segments kept (what `--buffer-size` bounds)."""
        whole = sum(self._sizes.values())
        return whole + self._at - self._sizes[self._segment] if self._begun else whole

    @property
    def much(self) -> int:
        """So many bytes are freed although changes are on their way."""
        return LOG_LAZY * self._segment_size

    def must_rotate(self, length: int) -> bool:
        """Whether a payload of `length` needs a new segment first."""
        return self._at + HEAD_LEN + length > self._segment_size

    def rotate(self, state: bytes) -> None:
        """Begin a new segment with a STATE record of payload `state`. Raises `NoSpace`; then the old segment
        goes on: one without its state at the front cannot be replayed once those before it are freed."""
        if self._begun:
            os.ftruncate(self._fds[self._segment], self._at)
            self._sizes[self._segment] = self._allocated = self._at
        before = self._segment, self._at, self._allocated, self._begun
        number = self._segment + 1
        try:
            self._begin(number, state)
        except (NoSpace, OSError):
            self._segment, self._at, self._allocated, self._begun = before
            fd = self._fds.pop(number, None)
            if fd is not None:
                del self._sizes[number]
                os.close(fd)
                (self._dir / (NAME % number)).unlink()
            raise

    def _begin(self, number: int, state: bytes) -> None:
        path = self._dir / (NAME % number)
        try:
            if self.removed():
                self.put_back()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if not (self._let_all_go() or self._give_spare()):
                raise self._no_space(exc) from exc
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._fds[number], self._sizes[number] = fd, 0
        self._begun = True
        self._segment, self._at, self._allocated = number, 0, 0
        self._host.crash_point("log.segment")
        self._write(STATE, 0, 0, [state], spare=True)

    def append(self, kind: int, ino: int, offset: int, pieces: list[bytes], *, spare: bool = True) -> int:
        """Append one record; returns the position of its payload. Raises `NoSpace`.

        `spare` False (data): the record may not use the space kept for everything else. The caller rotates
        first when `must_rotate` says so.
        """
        return self._write(kind, ino, offset, pieces, spare=spare)

    def _write(self, kind: int, ino: int, offset: int, pieces: list[bytes], *, spare: bool) -> int:
        crc, length = 0, 0
        for piece in pieces:
            crc = crc32(piece, crc)
            length += len(piece)
        head = HEAD.pack(MAGIC, kind, 0, length, self._number + 1, ino, offset, crc)
        total = HEAD_LEN + length
        end = self._at + total
        if end + RESERVE > self._allocated:
            self._allocate(end, spare)
        fd = self._fds[self._segment]
        buffers = [head, HEAD_CRC.pack(crc32(head)), *pieces]
        try:
            if length < PAGE:  # one buffer costs the call less than several
                done = os.pwrite(fd, b"".join(buffers), self._at)
            else:
                done = os.pwritev(fd, buffers, self._at)
            if done != total:
                rest = memoryview(b"".join(buffers))[done:]
                while rest:
                    rest = rest[os.pwrite(fd, rest, end - len(rest)) :]
        except OSError as exc:
            # Nothing of it may stay behind the next record, which is shorter perhaps.
            os.ftruncate(fd, self._at)
            self._allocated = self._at
            raise self._no_space(exc) from exc
        pos = self._segment << SHIFT | (self._at + HEAD_LEN)
        self._number += 1
        self._at = end
        self.unsynced.add(self._segment)
        return pos

    def prepare(self, length: int) -> None:
        """Have room in this segment for records of `length` bytes together, their headers included: appending
        them does not fail for want of it. Raises `NoSpace`. The caller rotates first, as for `append`."""
        if self._at + length + RESERVE > self._allocated:
            self._allocate(self._at + length, True)

    def _allocate(self, end: int, spare: bool) -> None:
        """Have space for a record that ends at `end` and RESERVE behind it."""
        try:
            allocate(self._fds[self._segment], self._allocated, end + AHEAD - self._allocated)
            self._allocated = end + AHEAD
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            if self._let_all_go():
                self._allocate(end, spare)
                return
            if not spare:
                raise self._no_space(exc) from exc
            if end > self._allocated:
                self._squeeze(end, exc)
            return
        if not self._spare:
            self.keep_spare()

    def _squeeze(self, end: int, exc: OSError) -> None:
        """The disk is full, or nearly, and the record must be written: use what little is left, then what
        the spare file holds."""
        fd = self._fds[self._segment]
        try:
            allocate(fd, self._allocated, end - self._allocated)
            self._allocated = end
            return
        except OSError as none_left:
            if none_left.errno not in FULL or not self._give_spare():
                raise self._no_space(exc) from none_left
        try:
            allocate(fd, self._allocated, end + SPARE_SIZE // 2 - self._allocated)
            self._allocated = end + SPARE_SIZE // 2
        except OSError as again:
            raise self._no_space(again) from again

    def keep_spare(self) -> None:
        """Have the spare file, where there is space for it, and an inode. (Of a directory that was removed
        meanwhile the next tick knows.)"""
        try:
            fd = os.open(self._dir / SPARE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno not in (*FULL, errno.ENOENT):
                raise
            return
        try:
            allocate(fd, 0, SPARE_SIZE)
            self._spare = True
        except OSError as exc:
            if exc.errno not in FULL:
                raise
        finally:
            os.close(fd)

    def _give_spare(self) -> bool:
        """Give the spare file's space back to the disk. False: it was gone already."""
        if not self._spare:
            return False
        self._spare = False
        (self._dir / SPARE).unlink(missing_ok=True)
        return True

    def _no_space(self, exc: OSError) -> Exception:
        return no_space(exc, self._dir) if exc.errno in FULL else exc

    # reading, syncing, freeing -----------------------------------------------------------------------
    def read(self, pos: int, length: int) -> bytes:
        """`length` payload bytes at `pos`. Any thread. Raises `IntegrityError` when they are not there."""
        fd = self._fds.get(pos >> SHIFT)
        if fd is None:
            fd = self._kept.get(pos >> SHIFT)
        try:
            data = b"" if fd is None else os.pread(fd, length, pos & OFFSET_MASK)
        except OSError as exc:
            raise IntegrityError(f"the log cannot be read at {pos:#x}: {exc.strerror}") from exc
        if len(data) != length:
            raise IntegrityError(f"the log lacks {length} bytes at {pos:#x}")
        return data

    def rest(self, pos: int, length: int) -> bytes:
        """As `read`, with zeros for what is not there any more. Any thread."""
        fd = self._fds.get(pos >> SHIFT, self._kept.get(pos >> SHIFT))
        try:
            data = b"" if fd is None else legible(fd, length, pos & OFFSET_MASK)
        except OSError:
            data = b""
        return data.ljust(length, b"\0")

    def sync(self) -> None:
        """Make everything appended durable, also what a job is at: before a new session is used, and where
        somebody relies on this machine's disk. Raises `OSError`."""
        wanted = self.unsynced | self._syncing
        if not wanted:
            return
        self._host.crash_point("log.sync")
        try:
            for number in sorted(wanted):
                if number in self._fds:
                    os.fdatasync(self._fds[number])
            fsync_dir(self._dir)
        except OSError:
            self._suspect |= wanted
            raise
        self.unsynced.clear()
        self._host.crash_point("log.synced")

    def removed(self) -> bool:
        """Whether somebody removed the files of the log: all with their directory, or the old ones first, as
        what tidies up by age does."""
        looked = {self._segment, self.oldest}
        return any(not os.fstat(self._fds[number]).st_nlink for number in looked if number in self._fds)

    def put_back(self) -> None:
        """What was removed is written again from the open files, durably, oldest first: at each moment what
        is there is a beginning of the log. Any thread may read meanwhile. Raises `OSError`, `NoSpace`; then
        it can be called again."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in sorted(self._fds):
            fd = self._fds[number]
            if os.fstat(fd).st_nlink:
                continue
            current = self._begun and number == self._segment
            size = self._at if current else self._sizes[number]
            path = self._dir / (NAME % number)
            write_durable(self._host, path, os.pread(fd, size, 0), "log.put_back")
            again = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(again, fd, inheritable=False)
            os.close(again)
            if current:
                self._allocated = size
        self._spare = False

    def begin_sync(self) -> SyncJob:
        """What makes everything appended so far durable, on another thread; then `end_sync`."""
        segments = self._syncing = frozenset(n for n in self.unsynced if n in self._fds)
        self.unsynced.clear()
        fds = tuple(os.dup(self._fds[n]) for n in sorted(segments))
        return SyncJob(segments, fds, self._dir, self._host)

    def end_sync(self, job: SyncJob, *, failed: bool) -> None:
        self._syncing = frozenset()
        if failed:
            self.unsynced |= job.segments
            self._suspect |= job.segments

    def freeable(self, pos: int) -> bool:
        """Whether there are segments that lie whole before `pos`, and what says so can be made durable."""
        if any(n >= pos >> SHIFT for n in self._suspect):
            return False
        return any(n < pos >> SHIFT and n != self._segment for n in self._fds)

    def free_before(self, pos: int) -> None:
        """Delete the segments that lie whole before `pos`. The caller has synced the answers, in later
        segments, that make them unneeded. Raises `OSError`: from the one on that could not be deleted they
        stay, since a recovery reads nothing behind a gap."""
        for number in sorted(n for n in self._fds if n < pos >> SHIFT and n != self._segment):
            self._host.crash_point("log.free")
            (self._dir / (NAME % number)).unlink(missing_ok=True)
            self._kept[number], self._kept_sizes[number] = self._fds.pop(number), self._sizes.pop(number)
            self._suspect.discard(number)
            self.freed += 1
            self._host.crash_point("log.freed")
        while sum(self._kept_sizes.values()) > LOG_KEPT * self._segment_size:
            self._let_go(next(iter(self._kept)))

    def _let_go(self, number: int) -> None:
        del self._kept_sizes[number]
        os.close(self._kept.pop(number))

    def _let_all_go(self) -> bool:
        """Give the disk back what deleted segments still hold. False: there was none."""
        had = bool(self._kept)
        for number in list(self._kept):
            self._let_go(number)
        return had

    def close(self) -> None:
        """Close the files and give back the space allocated ahead."""
        if self._begun and self._segment in self._fds:
            os.ftruncate(self._fds[self._segment], self._at)
        self.abandon()

    def abandon(self) -> None:
        """Close the files as a killed process would leave them."""
        self._let_all_go()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def retire(self) -> int:
        """Delete every segment: the server has everything. Returns the number to begin the next log with.

        A marker says so first, durably: a log of which only a part is left must not be replayed.
        """
        last = max(self._fds, default=self._segment)
        self.abandon()
        write_durable(self._host, self._dir / MARKER, b"%d\n" % last, "log.retired")
        return finish_retiring(self._dir, self._host) or last + 1


@dataclass(frozen=True, slots=True, eq=False)
class SyncJob:
    """Make segments durable. Owns `fds`, copies of the log's."""

    segments: frozenset[int]
    fds: tuple[int, ...]
    directory: Path
    host: Host
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> None:
        try:
            self.host.crash_point("log.sync")
            for fd in self.fds:
                os.fdatasync(fd)
            fsync_dir(self.directory)
            self.host.crash_point("log.synced")
        finally:
            for fd in self.fds:
                os.close(fd)


def finish_retiring(directory: Path, host: Host) -> int | None:
    """Complete a `retire` that was begun. Returns the number of the next segment, None if none was begun."""
    marker = directory / MARKER
    try:
        last = int(marker.read_bytes())
    except FileNotFoundError:
        return None
    for number in Log.segments(directory):
        if number <= last:
            host.crash_point("log.erase")
            (directory / (NAME % number)).unlink()
    fsync_dir(directory)
    host.crash_point("log.erased")
    marker.unlink()
    fsync_dir(directory)
    host.crash_point("log.forgotten")
    return last + 1
