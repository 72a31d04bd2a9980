"""The file calls: open, read, write, truncate, fsync, close."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Final, NoReturn

from fsd.model.blocks import pieces, seen
from fsd.model.errors import DiskFailed, IntegrityError, NoSpace, PosixError
from fsd.model.limits import BLOCK, FILE_MAX, MIB
from fsd.vfs.ahead import Ahead
from fsd.vfs.calls import Handle
from fsd.vfs.commit import Committer
from fsd.vfs.compact import compact
from fsd.vfs.content import Content, Flight
from fsd.vfs.core import Core
from fsd.vfs.extents import Ref, Run
from fsd.vfs.loads import Loader
from fsd.vfs.log import PAGE, TRUNC, WRITE
from fsd.vfs.names import NameCalls
from fsd.vfs.node import Inode
from fsd.vfs.records import TIME
from fsd.vfs.types import Park, Want

SYNC_FLAGS: Final = os.O_SYNC | os.O_DSYNC
IN_VAIN: Final = 1.0  # seconds after a read's time-out in which another on its handle does not wait again
SET_IDS: Final = stat.S_ISUID | stat.S_ISGID


def set_id_bits(
    node: Inode, uid: int, groups: Callable[[], Collection[int]], kills: bool | None = None
) -> int:
    """What a change of the content by this user takes away from the mode. The set-group-ID bit without
    the group's right to execute means nothing, and a member of the group may keep it. `kills`: whether the
    kernel says that this user may not keep them; where it says nothing root alone may."""
    if node.is_dir or not (uid != 0 if kills is None else kills):
        return 0
    taken = node.mode & stat.S_ISUID
    if node.mode & stat.S_ISGID and (node.mode & stat.S_IXGRP or node.gid not in groups()):
        taken |= stat.S_ISGID
    return taken


def _in_one_blob(content: Content, offset: int, size: int) -> Ref | None:
    """Where the bytes of a range that has no changes are part of a single blob; None: they are not."""
    index = offset // BLOCK
    if (offset + size - 1) // BLOCK != index:
        return None
    found = pieces(content.shown(index), offset - index * BLOCK, size)
    if len(found) != 1 or found[0].at or found[0].length != size:
        return None
    return Ref(found[0].hash, found[0].boff)


class FileCalls(NameCalls):
    """See the module."""

    def __init__(self, core: Core, committer: Committer, loader: Loader) -> None:
        super().__init__(core, committer, loader)
        self.ahead = Ahead(core, loader)

    # opening -----------------------------------------------------------------------------------------
    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, flags: int, umask: int = 0
    ) -> tuple[Inode, int]:
        """Make and open a regular file (counts one lookup). `umask` is taken off `mode`; see `make`. ESTALE
        without O_EXCL where the name means something: the kernel did not know of that, and looks again."""
        if not flags & os.O_EXCL and self.child(self.core.nodes.directory(parent), name) is not None:
            raise PosixError(errno.ESTALE, "the name means something by now")
        node = self.make(parent, name, 0o100000 | mode & 0o7777, uid, gid, umask=umask)
        node.paged = 1  # the kernel has nothing of it yet
        return node, self.opened(node, flags)

    def create_unnamed(
        self, parent: int, mode: int, uid: int, gid: int, flags: int, umask: int = 0
    ) -> tuple[Inode, int]:
        """The same without a name (O_TMPFILE)."""
        node = self.make_unnamed(parent, mode, uid, gid, umask)
        return node, self.opened(node, flags)

    def open(
        self,
        ino: int,
        flags: int,
        uid: int = 0,
        groups: Callable[[], Collection[int]] = frozenset,
        asker: object = None,
        kills: bool | None = None,
        thread: int = 0,
    ) -> int:
        """A file handle; O_TRUNC truncates, O_APPEND and the access mode are remembered.

        `uid` and `groups` are the caller's: whoever changes a file takes its set-id bits away. The kernel
        leaves that to us for O_TRUNC, and for set-group-ID without the right to execute. Where it says
        whether this caller does (`kills`) it leaves all of it to us, and says it of each write too. `asker`
        stands for the request, `thread` is the caller, 0 where that is not seen (see `as_of_now`).
        """
        node = self.core.nodes.get(ino)
        if self.asks(asker) and not node.busy:
            self.as_of_now(node, asker, thread)
        self.current(node)
        if node.is_dir:
            raise PosixError(errno.EISDIR, "it is a directory")
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self.must_be_writable(node)
        truncate = bool(flags & os.O_TRUNC) and node.is_file
        if node.is_file and not truncate:
            self.know_blocks(node)
        if truncate:
            self.emptied(node, set_id_bits(node, uid, groups, kills))
            if kills is not None:
                self.drop_capability(node)
        fh = self.opened(node, flags)
        if asker is not None:
            self.answered(asker)
            self.sent_back.pop(thread, None)
        if kills is None and self.handles[fh].writable:
            self.handles[fh].takes = set_id_bits(node, uid, groups) & stat.S_ISGID
        return fh

    def emptied(self, node: Inode, taken: int) -> None:
        """O_TRUNC; `taken` bits go from the mode."""
        time = None
        if node.size > 0:
            self.one_more(node)
            self.truncate(node, 0)
            node.file().hold = True
        else:
            # Nothing to cut, but `> stamp` makes it new, also for whom compares times.
            time = self.core.stamp()
        if taken or time is not None:
            self.set_attributes(node, mode=node.mode & ~taken if taken else None, mtime=time)

    def one_more(self, node: Inode) -> None:
        """Before a truncation, which needs no room in the log, makes it a changed file: park while there are
        as many as are kept."""
        if not node.gone and (node.content is None or not node.content.unclean):
            self.room_in_memory()

    def opened(self, node: Inode, flags: int) -> int:
        fh = self.new_handle(node, flags)
        if flags & os.O_ACCMODE != os.O_RDONLY and node.is_file:
            node.file().writers += 1
        return fh

    def release(self, fh: int) -> None:
        handle = self.handles.pop(fh)
        if handle.drops >= 0:
            self.dropped(handle)
        node = handle.node
        node.handles -= 1
        content = node.content
        if content is not None and handle.writable:
            content.writers -= 1
            if content.writers == 0 and content.hold:
                content.hold = False
                self.core.stir()
            if content.writers == 0 and content.window and not node.gone:
                self.flusher.closed(content)
        if node.handles == 0 and node.ino in self.core.orphans:
            del self.core.orphans[node.ino]
            self.core.unnamed.discard(node.ino)
            if content is not None:
                content.window = False
                if content.first is not None:
                    self.core.undropped[node.ino] = content.first
                    self.core.say_dropped()
            self.core.trim()
        self.core.settle(node)
        self.core.forget_if_unused(node)

    # reading -----------------------------------------------------------------------------------------
    def read(self, fh: int, offset: int, size: int) -> bytes:
        handle = self.handle(fh)
        try:
            return self.read_handle(handle, offset, size)
        except Park as park:
            self.not_again_in_vain(handle)
            handle.waits = park.want
            raise

    def not_again_in_vain(self, handle: Handle) -> None:
        """The kernel asks for more than its caller did, and when that has ended for lack of an answer for the
        caller's part alone: who has waited the I/O time-out once does not wait another."""
        before, now = handle.waits, self.core.now()
        if before is None or before.error is None or before.deadline is None:
            return
        if before.deadline <= now < before.deadline + IN_VAIN:
            raise before.told()

    def read_handle(self, handle: Handle, offset: int, size: int) -> bytes:
        if handle.drops >= 0:
            self.dropped(handle)
        node = handle.node
        self.current(node)
        size = min(size, node.size - offset)
        if size <= 0:
            return b""
        content = node.file()
        self.know_blocks(node)
        runs = content.extents.runs(offset, offset + size)
        log = self.core.log
        if len(runs) == 1 and runs[0].start == offset and runs[0].end == offset + size and not runs[0].ref:
            return log.read(runs[0].pos, size)
        if not runs and (found := self.lone_piece(handle, content, offset, size)) is not None:
            return found
        covered = sum(run.end - run.start for run in runs if run.ref is None)
        stored = self.stored_views(handle, content, offset, size, runs) if covered < size else ()
        out = bytearray(size)  # after the last that may park: a megabyte of zeros is not for nothing
        for at, view in stored:
            out[at : at + len(view)] = view
        for start, end, pos, ref in runs:
            if ref is None:
                out[start - offset : end - offset] = log.read(pos, end - start)
            elif not ref.hash:
                out[start - offset : end - offset] = bytes(end - start)
        return bytes(out)

    def lone_piece(self, handle: Handle, content: Content, offset: int, size: int) -> bytes | None:
        """The bytes where they are part of one blob and that is in memory; what is a whole blob, as a reader
        of a large file asks for, is not copied."""
        found = _in_one_blob(content, offset, size)
        data = None if found is None else self.core.recent.get(found.hash)
        if found is None or data is None:
            return None
        self.siblings.read(found.hash)
        if found.boff + size == len(data):
            self.core.recent.passed(found.hash)
        self.ahead.read(handle, content, offset, offset + size)
        return data[found.boff : found.boff + size]

    def stored_views(
        self, handle: Handle, content: Content, offset: int, size: int, runs: Sequence[Run]
    ) -> list[tuple[int, memoryview]]:
        """What the base contributes and what `runs` name of blobs, with their places from `offset` on, later
        ones over earlier; parks for blobs that are not in memory."""
        plan: list[tuple[int, int, int, bytes]] = []
        end = offset + size
        lacking: set[bytes] = set()
        have: dict[bytes, bytes] = {}
        for index in range(offset // BLOCK, (end - 1) // BLOCK + 1):
            parts = content.shown(index)
            if not parts:
                continue
            start = max(offset, index * BLOCK)
            stop = min(end, (index + 1) * BLOCK)
            for piece in seen(pieces(parts, start - index * BLOCK, stop - start)):
                plan.append((start - offset + piece.at, piece.length, piece.boff, piece.hash))
        for start, stop, _, ref in runs:
            if ref is not None and ref.hash:
                plan.append((start - offset, stop - start, ref.boff, ref.hash))
        for _, _, _, digest in plan:
            if digest in have or digest in lacking:
                continue
            data = self.core.recent.get(digest)
            if data is None:
                lacking.add(digest)
            else:
                have[digest] = data
                self.siblings.read(digest)
        self.ahead.read(handle, content, offset, end)
        if lacking:
            coming = all(digest in self.loader.blob_wants for digest in lacking)
            want = self.loader.want_blobs(lacking)
            if not coming:
                self.siblings.missed(handle.node)
            raise Park(want)
        for _, length, boff, digest in plan:
            if boff + length == len(have[digest]):
                self.core.recent.passed(digest)
        return [(at, memoryview(have[digest])[boff : boff + length]) for at, length, boff, digest in plan]

    def at_hand(self, fh: int, most: int, *, kept: bool) -> bytes | None:
        """All of a file of at most `most` bytes that is opened for reading, as `read` gives it, where that is
        a look into memory or into the log, and may be asked for: of one whose pages are `kept` only the last,
        if that was not written whole. Else None."""
        node = self.handle(fh).node
        size, content = node.size, node.content
        if content is None or node.stale or not 0 < size <= most or (kept and not size % PAGE):
            return None
        runs = content.extents.runs(0, size)
        if not runs:
            found = _in_one_blob(content, 0, size)
            data = None if found is None else self.core.recent.in_memory(found.hash)
            if found is None or data is None:
                return None
            self.siblings.read(found.hash)
            return data[found.boff : found.boff + size]
        if len(runs) > 1 or runs[0].start or runs[0].end != size or runs[0].ref:
            return None
        try:
            return self.core.log.read(runs[0].pos, size)
        except IntegrityError:
            return None  # a read that comes is told

    # writing -----------------------------------------------------------------------------------------
    def write(
        self,
        fh: int,
        offset: int,
        data: bytes,
        kills: bool | None = None,
        groups: Callable[[], Collection[int]] = frozenset,
        *,
        mapped: bool = False,
        appends: bool | None = None,
    ) -> int:
        """On an O_SYNC/O_DSYNC handle parks with `again=False` until committed. `kills` and `groups`: the
        writer's, as for open.

        `mapped`: pages of a shared mapping, which have their place in the file whatever handle the kernel
        writes them by, and take no bits of the mode. `appends`: whether the handle has O_APPEND now, which
        fcntl changes; None: as it was opened."""
        handle = self.handle(fh)
        if handle.drops >= 0:
            self.dropped(handle)
        node = handle.node
        if not handle.writable:
            raise PosixError(errno.EBADF, "not open for writing")
        core = self.core
        if core.guarded:
            self.must_be_writable(node)
        append = (bool(handle.flags & os.O_APPEND) if appends is None else appends) and not mapped
        if append:
            self.current(node)
            offset = node.size
        end = offset + len(data)
        if end > FILE_MAX:
            raise PosixError(errno.EFBIG, "a file has at most 16 TiB")
        if not data:
            return 0
        content = node.file()
        if content.base is None or content.void:
            self.know_blocks(node)
        if not mapped:
            if kills is None:
                self.take_bits(handle)
            else:
                self.take_privileges(node, kills, groups)
        self.room(len(data))
        time = core.stamp()
        try:
            pos = self.flusher.log_change(node, WRITE, offset, [TIME.pack(time, append), data], spare=False)
        except NoSpace as exc:
            self.out_of_space(exc)
        self.disk_since = None
        pos += TIME.size
        if node.rdev or offset > node.size:
            over = min(end, node.size)
            filled = over - offset - content.stored(offset, over) if over > offset else 0
            node.rdev += max(0, offset - node.size) - filled
        content.wrote(offset, end, pos, core.now(), append=append)
        node.size = max(node.size, end)
        self.content_changed(node, time)
        if not node.gone and self.flusher.big(node):
            self.flusher.freeze(node)
        if handle.flags & SYNC_FLAGS and not node.gone:
            self.wait_out(self.sync_want(handle), len(data))
        return len(data)

    def take_privileges(self, node: Inode, kills: bool, groups: Callable[[], Collection[int]]) -> None:
        """What a write takes away, where the kernel leaves it to us. Attributes that another mount may have
        changed are asked for, as the kernel does where it sees to it; not while the server is away."""
        if node.stale and not self.core.down:
            self.current(node)
        if kills and node.mode & SET_IDS:
            taken = set_id_bits(node, 0, groups, kills)
            if taken:
                self.set_attributes(node, mode=node.mode & ~taken)
        if node.xattrs:
            self.drop_capability(node)

    def out_of_space(self, exc: NoSpace) -> NoReturn:
        """The disk under the log is full: send what there is and wait for room, or say so at once when
        nothing can be freed, or it is the disk that fails."""
        core = self.core
        if isinstance(exc, DiskFailed):
            raise exc
        core.trim(renew_at=MIB)
        compact(core)
        if core.sync_job is None and not core.dirty and not len(core.queue):
            raise NoSpace(exc.message, hint=exc.hint.partition(";")[0])  # nothing goes on being sent
        if self.flusher.round_until is None:
            self.flusher.start_round(core.now(), everything=True)
        raise Park(self.disk_want())

    def truncate(self, node: Inode, size: int) -> None:
        """Set the size; what lies behind never comes back."""
        if size > FILE_MAX:
            raise PosixError(errno.EFBIG, "a file has at most 16 TiB")
        content = node.file()
        if size > 0:
            self.know_blocks(node)
        core = self.core
        time = core.stamp()
        pos = self.flusher.log_change(node, TRUNC, size, [TIME.pack(time, 0)])
        if size > node.size:
            node.rdev += size - node.size
        elif node.rdev:
            node.rdev -= node.size - size - content.stored(size, node.size) if size else node.rdev
        content.cut(size, pos, core.now())
        node.size = size
        self.content_changed(node, time)

    def take_bits(self, handle: Handle) -> None:
        """Before a change of the content: what whoever opened the handle takes from the file's mode goes, and
        what the file may do as a program."""
        node = handle.node
        if handle.takes & node.mode:
            self.set_attributes(node, mode=node.mode & ~handle.takes)
        self.drop_capability(node)

    def content_changed(self, node: Inode, time: int) -> None:
        """Behind a change of the content, with its size."""
        node.mtime = node.ctime = time
        node.stamp += 1
        if self.core.nodes.also:
            self.changed_twin(node)

    def changed_twin(self, node: Inode) -> None:
        """Where the kernel has the file as two, it does not know of one what was done to the other."""
        if node.ino in self.core.nodes.also:
            self.core.invalidate(node.ino)

    def setattr(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime: int | None = None,
        mtime: int | None = None,
        by: int = 0,
        groups: Callable[[], Collection[int]] = frozenset,
        kills: bool | None = None,
        chowns: bool | None = None,
    ) -> Inode:
        """Change attributes; `mode` holds permission bits. `size` truncates. `by`, `groups` and `kills` are
        the caller's, as for open; of a change of owner `kills` says that it takes bits away, whoever asks.
        For `chowns` see `nothing_set`."""
        node = self.core.nodes.get(ino)
        self.must_be_writable(node)
        self.current(node)
        if size is not None:
            if not node.is_file:
                raise PosixError(errno.EISDIR if node.is_dir else errno.EINVAL, "it has no size to set")
            had = node.size
            self.one_more(node)
            self.truncate(node, size)
            if size == 0 and had > 0 and node.file().writers:
                node.file().hold = True
        # Where the kernel takes bits away itself, a mode set by who is not the owner is taken for that, which
        # comes before a write. (Who has CAP_FOWNER may set one too.)
        writes = mode is not None and kills is None and by not in (0, node.uid)
        if size is not None or uid is not None or gid is not None or writes:
            taken = set_id_bits(node, by, groups, kills)
            if taken:
                mode = (node.mode if mode is None else mode) & ~taken
            if kills is not None and not node.is_dir:
                self.drop_capability(node)
        if all(field is None for field in (mode, uid, gid, size, atime, mtime)):
            mode = self.nothing_set(node, by, groups, kills, chowns)
        if size is None or any(field is not None for field in (mode, uid, gid, atime, mtime)):
            self.set_attributes(node, mode, uid, gid, atime, mtime)
        return node

    @staticmethod
    def nothing_set(
        node: Inode, by: int, groups: Callable[[], Collection[int]], kills: bool | None, chowns: bool | None
    ) -> int | None:
        """The mode to set, if any, by a request that sets nothing. It is that of chown(-1, -1), which anybody
        may: it moves ctime, and where it takes bits of the mode away only the owner may. Or it comes before
        a write, fallocate or copy_file_range by who may not keep bits that the kernel leaves to us. `chowns`
        says which; None: not known, so where the file is open for writing it is taken for the latter."""
        if chowns is None:
            chowns = node.content is None or not node.content.writers
        taken = set_id_bits(node, by, groups, True if chowns and kills is not None else kills)
        if chowns and taken and by not in (0, node.uid):
            raise PosixError(errno.EPERM, "not the owner")
        return node.mode & ~taken if taken else None

    # making durable ----------------------------------------------------------------------------------
    def sync_want(self, handle: Handle) -> Want:
        """The file's content up to now and every operation before are committed when it ends."""
        node = handle.node
        flights: list[Flight] = []
        if node.content is not None and not node.gone:
            node.content.hold = False
            flights = self.flusher.freeze(node, inline=True)
        want = self.core.commit_want("fsync", flights, ino=node.ino, fh=handle.fh)
        self.committer.kick()
        return want

    def told(self, handle: Handle) -> None:
        """Raise the error the handle has not been told yet."""
        if handle.error is not None:
            error, handle.error = handle.error, None
            raise error

    def flush(self, fh: int) -> None:
        """close(2) of one descriptor. With durability "close" also that a new file exists, empty or not."""
        handle = self.handle(fh)
        self.told(handle)
        node = handle.node
        unclean = node.content is not None and node.content.unclean
        if self.core.options.durability == "close" and (unclean or (handle.writable and node.busy)):
            self.wait_out(self.sync_want(handle))

    @property
    def closes_alone(self) -> bool:
        """Whether close(2) waits for nobody."""
        return self.core.options.durability != "close"

    def untold(self, fh: int) -> bool:
        """Whether there is an error that the open `fh` is to be told. Results make one, calls do not."""
        return self.handles[fh].error is not None

    def needs_flush(self, fh: int) -> bool:
        """Whether a close of `fh` has anything to do or to tell. Who only reads is told by fsync alone of a
        flush that failed, as on NFS."""
        return self.handle(fh).writable or self.core.options.durability == "close"

    def fsync(self, fh: int, datasync: bool) -> None:
        handle = self.handle(fh)
        self.told(handle)
        self.wait_out(self.sync_want(handle))

    def statfs(self) -> dict[str, int]:
        """The server's room, from memory: what waits here to be sent is not taken off."""
        return self.core.space.statfs()
