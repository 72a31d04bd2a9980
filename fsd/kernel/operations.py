"""The kernel's requests, translated to calls of `Volume`. Nothing else: no rule of the filesystem is here.

A body is a plain function that runs inline on the FUSE thread. `handler` makes it pyfuse3's coroutine:
`Park` waits and calls again, an `FsdError` becomes its errno, any other exception is logged and EIO, since
one that escapes would leave the caller in an uninterruptible wait for good.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields, StatvfsData

from fsd.kernel import requests
from fsd.kernel.callers import as_owner, groups_of, sets_nothing
from fsd.kernel.direct import Both, DirectWrites
from fsd.kernel.entries import FOREVER, TIMEOUT, Entries
from fsd.kernel.handlers import handler, translated
from fsd.kernel.machine import Machine
from fsd.kernel.replies import without_flush
from fsd.kernel.requests import (
    Change,
    acts_as_owner,
    changes_owner,
    file_bytes,
    may_keep_bits,
    newest,
    take_forgotten,
    take_released,
)
from fsd.kernel.shortcut import Shortcut
from fsd.kernel.xattrs import check_class
from fsd.model.errors import PosixError, Unavailable
from fsd.vfs.node import Inode
from fsd.vfs.types import Park, Want

if TYPE_CHECKING:
    from fsd.kernel._extra import Request

log = logging.getLogger(__name__)
R = TypeVar("R")

# The kernel asks for at most 32 KiB (some 200 entries) in a common getdents; more would be thrown away.
READDIR_PAGE = 256
# Marks the handle of a write whose bytes are pages of a shared mapping (`_extra.c` does).
MAPPED = 1 << 63
# What `ls -l` asks of each file. Where the kernel has SELinux it answers itself, elsewhere nobody has labels:
# told so (and not only that this file has none) ls asks of one file of a mount and of no other.
_LABEL = b"security.selinux"
# Files up to this size are read without a handler where their bytes are at hand.
READ_HERE_MAX = 64 * 1024
# The name in a `create` that is O_TMPFILE (`_extra.c`).
_UNNAMED = b"/"


class FsdOperations(pyfuse3.Operations):
    """One mount's handlers. FUSE thread only.

    `answered` is the monotonic time of the last answer that the kernel may keep; the notifier sends an
    invalidation twice when it is recent. `told_of_privileges`: the kernel leaves set-id bits to us, and says
    of each request whether they go (`requests`).
    """

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        machine: Machine,
        *,
        xattr: bool = True,
        immutable: bool = False,
        ask: bool = False,
        acl: bool = False,
    ) -> None:
        """`ask`: consistency `open`. The kernel keeps no attributes and no absent names then. `acl`: POSIX
        ACLs; the kernel leaves the umask to us then, if it was told to (`handshake`)."""
        super().__init__()
        self.enable_acl = acl
        self.machine = machine
        self.volume = machine.volume
        self._root = machine.volume.root_ino
        self.entries = Entries(self._root, FOREVER if immutable else TIMEOUT, keep=not ask)
        self._keep_cache = immutable
        self._xattr = xattr
        self._now = machine.host.monotonic
        self.direct = DirectWrites(machine)
        self._openers: dict[int, int] = {}
        self._directories: dict[int, int] = {}
        self.answered = 0.0
        self.came_to: tuple[str, Park] | None = None
        self.told_of_privileges = False
        self._known_ahead = self._closes_alone = False
        self.own: set[int] = set()  # processes of the daemon's own, which must not wait for it

    async def parked(self, body: Callable[..., R], args: tuple[Any, ...], park: Park) -> R:
        """Wait, then call `body` again, until it answers or `io_timeout` has passed since the start."""
        machine = self.machine
        since = machine.clock()
        caller = args[-1] if args else None
        # A write may be asynchronous too.
        inherited = isinstance(caller, Change) or not hasattr(caller, "pid")
        pid = self._caller(args[0]) if inherited else caller.pid  # type: ignore[union-attr]
        while True:
            try:
                await machine.wait(
                    park.want,
                    within=machine.handler_timeout(),
                    since=since,
                    pid=pid,
                    inherited=inherited,
                    undone=park.again,
                )
                if isinstance(park, Both):
                    park.after.result = park.want.result
                    raise Park(park.after, again=False)
                if not park.again:
                    return park.want.result  # type: ignore[return-value]
                return body(self, *args)
            except Park as exc:
                # Each wait may have ended well, and the next begin at once: together they are bounded too.
                if machine.is_over(since):
                    late = exc.want.late or Unavailable(f"no answer in time: {exc.want.what}")
                    raise translated(late, body.__name__) from None
                park = exc.with_traceback(None)
            except Exception as exc:  # noqa: BLE001 - translated, never swallowed
                raise translated(exc, body.__name__) from None

    def _caller(self, fh: int) -> int:
        """The thread that made the call on a handle whose handler was called, and nothing else since; where
        requests are not seen the one that opened it. Nobody (0) where pages of a mapping are written: they
        would be lost with whoever has them written."""
        if not self.told_of_privileges:
            return self._openers.get(fh, 0)
        change = newest()
        return 0 if change.from_pages else change.pid

    def answer_ahead(self) -> Callable[[], None] | None:
        """Have what the kernel is about to ask answered without a handler (`requests`). The loop then calls
        what is returned before it does anything but go on with requests."""
        self._known_ahead = self._xattr and requests.answer_here()
        self._closes_alone = self._known_ahead and self.volume.closes_alone
        self.machine.news = self._forget_ahead if self._known_ahead else None
        if self._known_ahead and self.volume.waiting_jobs is not None:
            Shortcut(self).take()
        return self.machine.news

    def _forget_ahead(self) -> None:
        if requests.forget_answers():
            self.answered = self._now()
        for parent, name in requests.take_absent():
            self.entries.absent(self.ino(parent), name)
        released = take_released()
        if released is not None:
            self.were_released(released)

    def were_released(self, handles: Sequence[int]) -> None:
        """Of handles whose release is answered."""
        for fh in handles:
            try:
                self._release(fh)
            except Exception:
                log.exception("release of %d failed", fh)

    def _told_file(self, nodeid: int, inode: Inode) -> None:
        """The kernel is told the attributes of a file that is open, or will be."""
        if self._known_ahead and not inode.xattrs and inode.is_file:
            requests.bare_file(nodeid)

    def told_handle(self, fh: int) -> None:
        """A handle that may write: what the close of it says."""
        if self._closes_alone and not self.volume.untold(fh):
            requests.quiet_handle(fh)

    def changed_in(self, parent: int) -> None:
        """A name in a directory changed: its attributes are what the kernel asks for next."""
        if self._known_ahead:
            node = self.volume.node(self.ino(parent))
            requests.changed_directory(parent, node.mtime, node.ctime, node.nlink, node.size)

    def abort(self) -> None:
        """Answer everything that is parked with EIO."""
        self.machine.fail_requests(Unavailable("the mount ends"))

    def ino(self, nodeid: int) -> int:
        return self._root if nodeid == 1 else nodeid

    def now_answered(self) -> None:
        self.answered = self._now()

    def _entry(self, inode: Inode) -> EntryAttributes:
        self.now_answered()
        return self.entries.of(inode)

    # names

    @handler
    def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        inode = self.volume.lookup(self.ino(parent), name, ctx, ctx.pid)
        self.answered = self._now()
        return self.entries.absent(self.ino(parent), name) if inode is None else self.entries.of(inode)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self._forget(inode_list)

    def forget_kept(self) -> None:
        """What the kernel forgot since the last call and nobody has handled."""
        self._forget(take_forgotten())

    def _forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for nodeid, nlookup in inode_list:
            if nodeid == 1:
                continue
            try:
                self.volume.forget(nodeid, nlookup)
            except Exception:
                log.exception("forget of %d failed", nodeid)

    @handler
    def getattr(self, nodeid: int, ctx: RequestContext) -> EntryAttributes:
        inode = self.volume.getattr(self.ino(nodeid))
        self.told_attributes(nodeid, inode)
        return self.entries.of(inode)

    def told_attributes(self, nodeid: int, inode: Inode) -> None:
        self.now_answered()
        if inode.handles:
            self._told_file(nodeid, inode)

    def _change(self) -> Change | None:
        """What the kernel says of the request whose handler is called, before anything is awaited; None where
        it says nothing and takes privileges away itself."""
        return newest() if self.told_of_privileges else None

    async def setattr(
        self, nodeid: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        return await self.set_attributes(nodeid, attr, fields, self._change(), ctx)

    @handler
    def set_attributes(
        self,
        nodeid: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        change: Change | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        kills, chowns, by = None if change is None else change.kills, None, ctx.uid
        if sets_nothing(fields):
            chowns = changes_owner(ctx.pid)
            if change is not None:  # of such a request the kernel does not say it
                kills = not may_keep_bits(ctx.pid, ctx.uid)
                by = 0 if chowns and acts_as_owner(ctx.pid, ctx.uid) else ctx.uid
        inode = self.volume.setattr(
            self.ino(nodeid),
            mode=attr.st_mode & 0o7777 if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime=attr.st_atime_ns if fields.update_atime else None,
            mtime=attr.st_mtime_ns if fields.update_mtime else None,
            by=by,
            groups=functools.partial(groups_of if kills is None or fields.update_size else as_owner, ctx),
            kills=kills,
            chowns=chowns,
        )
        self.set_already(nodeid, inode)
        return self._entry(inode)

    def set_already(self, nodeid: int, inode: Inode) -> None:
        """Attributes were set."""
        if inode.handles:
            self._told_file(nodeid, inode)
        if inode.is_dir and self._known_ahead:  # by a further number of it perhaps
            self._forget_ahead()

    @handler
    def readlink(self, nodeid: int, ctx: RequestContext) -> bytes:
        return self.volume.readlink(self.ino(nodeid))

    @handler
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        made = self.volume.mknod(self.ino(parent), name, mode, rdev, ctx.uid, ctx.gid, ctx.umask)
        self.changed_in(parent)
        return self._entry(made)

    @handler
    def mkdir(self, parent: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        made = self.volume.mkdir(self.ino(parent), name, mode, ctx.uid, ctx.gid, ctx.umask)
        self.changed_in(parent)
        return self._entry(made)

    @handler
    def symlink(self, parent: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        made = self.volume.symlink(self.ino(parent), name, target, ctx.uid, ctx.gid)
        self.changed_in(parent)
        return self._entry(made)

    @handler
    def link(self, nodeid: int, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        linked = self.volume.link(self.ino(nodeid), self.ino(parent), name)
        self.changed_in(parent)
        return self._entry(linked)

    @handler
    def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        self.volume.unlink(self.ino(parent), name)
        self.changed_in(parent)

    @handler
    def rmdir(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        self.volume.rmdir(self.ino(parent), name)
        self.changed_in(parent)

    @handler
    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: RequestContext
    ) -> None:
        self.volume.rename(self.ino(parent), name, self.ino(new_parent), new_name, flags)
        self.changed_in(parent)
        if new_parent != parent:
            self.changed_in(new_parent)

    # files

    @handler
    def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        where = self.ino(parent)
        if name == _UNNAMED:
            inode, fh = self.volume.create_unnamed(where, mode, ctx.uid, ctx.gid, flags, ctx.umask)
        else:
            inode, fh = self.volume.create(where, name, mode, ctx.uid, ctx.gid, flags, ctx.umask)
        self.made_and_opened(0 if name == _UNNAMED else parent, inode, fh, flags, ctx.pid)
        return FileInfo(fh=fh), self._entry(inode)

    def made_and_opened(self, parent: int, inode: Inode, fh: int, flags: int, pid: int) -> None:
        """A new file is told of, as open."""
        if parent:
            self.changed_in(parent)
        self._told_file(inode.ino, inode)
        self._opened(fh, flags, inode.ino, pid)
        if self._closes_alone:  # of a new one there is nothing to be told
            requests.quiet_handle(fh)

    async def open(self, nodeid: int, flags: int, ctx: RequestContext) -> FileInfo:
        answer, told = await self.open_file(nodeid, flags, self._change(), ctx)
        if told is not None:
            try:
                await self.open_waits(told, ctx)
            except FUSEError:
                await self.release(answer.fh)  # of an open that failed the kernel has nothing to release
                raise
        return answer

    @handler
    def open_file(
        self, nodeid: int, flags: int, change: Change | None, ctx: RequestContext
    ) -> tuple[FileInfo, Want | None]:
        """The answer, and what it is to wait for."""
        ino = self.ino(nodeid)
        kills = None if change is None else change.kills
        mode = self.volume.node(ino).mode
        groups = functools.partial(groups_of, ctx)
        fh = self.volume.open(ino, flags, ctx.uid, groups, ctx, kills, ctx.pid)
        self._opened(fh, flags, ino, ctx.pid)
        kept = self.volume.pages_kept(fh) and not self.direct.writes(ino)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._told_file(nodeid, self.volume.node(ino))
            self.told_handle(fh)
        elif self._known_ahead and not flags & (os.O_DIRECT | os.O_TRUNC) and not self.direct.writers:
            data = self.volume.at_hand(fh, READ_HERE_MAX, kept=kept)
            if data is not None:
                file_bytes(fh, data)
        without_flush(not self.volume.needs_flush(fh))
        answer = FileInfo(fh=fh, keep_cache=kept or self._keep_cache)
        if flags & os.O_TRUNC and self.volume.node(ino).mode != mode:
            # Of a file that was emptied the kernel keeps the mode, which the answer cannot tell.
            return answer, self.direct.give_up_pages(ino)
        return answer, None

    @handler
    def open_waits(self, told: Want, ctx: RequestContext) -> None:
        raise Park(told, again=False)

    def _opened(self, fh: int, flags: int, ino: int, pid: int) -> None:
        self._openers[fh] = pid
        if flags & os.O_DIRECT and flags & os.O_ACCMODE != os.O_RDONLY:
            self.direct.opened(fh, ino)

    @handler
    def read(self, fh: int, offset: int, size: int) -> bytes:
        if self.direct.writers:
            self._through_pages(fh)
        return self.volume.read(fh, offset, size)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        return await self.write_file(fh, offset, data, self._change())

    @handler
    def write_file(self, fh: int, offset: int, data: bytes, change: Change | None) -> int:
        mapped = fh >= MAPPED
        if mapped:
            fh -= MAPPED
        try:
            if change is None:
                done = self.volume.write(fh, offset, data, mapped=mapped)
            else:
                mapped |= change.from_pages
                by = change.kills, change.groups
                done = self.volume.write(fh, offset, data, *by, mapped=mapped, appends=change.appends)
        except Park as park:
            if self.direct.writers and not park.again:  # it was done, and is being committed
                self._written_too(fh, park)
            raise
        self.told_handle(fh)
        if self.direct.writers:
            self._written(fh, done)
        return done

    def _through_pages(self, fh: int) -> None:
        handle = self.volume.handle(fh)
        if not handle.flags & os.O_DIRECT:
            self.direct.through_pages(handle.node.ino)

    def _written_too(self, fh: int, park: Park) -> None:
        """Raises a park for both where the kernel has pages to drop."""
        try:
            self._written(fh, 0)
        except Park as drop:
            raise Both(park.want, drop.want) from None

    def _written(self, fh: int, done: int) -> None:
        if fh in self.direct.writers:
            self.direct.written(fh, done)
        else:
            self._through_pages(fh)

    @handler
    def lseek(self, fh: int, offset: int, whence: int, request: Request) -> int:
        """SEEK_DATA and SEEK_HOLE; the rest the kernel does itself. What was stored through a mapping may be
        in the kernel alone: before a hole is told it gives that up, while this request is parked."""
        found = self.volume.seek(fh, offset, whence)
        if found.hole and not request.flushed and self.volume.may_be_mapped(fh):
            request.flushed = True
            raise Park(self.direct.give_up_pages(self.volume.handle(fh).node.ino))
        if found.offset is None:
            raise FUSEError(errno.ENXIO)
        return found.offset

    @handler
    def fallocate(self, fh: int, mode: int, offset: int, length: int, request: Request) -> None:
        self.volume.allocate(fh, mode, offset, length)

    @handler
    def copy_file_range(
        self,
        fh_in: int,
        offset_in: int,
        fh_out: int,
        offset_out: int,
        size: int,
        flags: int,
        request: Request,
    ) -> int:
        return self.volume.copy_range(fh_in, offset_in, fh_out, offset_out, size, flags)

    def flush_handle(self, fh: int) -> None:
        if self._openers.get(fh) not in self.own:
            self.volume.flush(fh)

    flush = handler(flush_handle)

    def fsync_handle(self, fh: int, datasync: bool = False) -> None:
        if self._openers.get(fh) not in self.own:
            self.volume.fsync(fh, datasync)

    fsync = handler(fsync_handle)

    @handler
    def release(self, fh: int) -> None:
        self._release(fh)

    def _release(self, fh: int) -> None:
        self.volume.release(fh)
        self._openers.pop(fh, None)
        self.direct.closed(fh)

    # directories

    @handler
    def opendir(self, nodeid: int, ctx: RequestContext) -> int:
        return self.open_directory(nodeid, ctx, ctx.pid)

    def open_directory(self, nodeid: int, asker: object, pid: int) -> int:
        ino = self.ino(nodeid)
        fh = self.volume.opendir(ino, asker)
        self._directories[fh] = ino
        self._openers[fh] = pid
        return fh

    @handler
    def readdir(self, fh: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        """Cookies 1 and 2 stand behind '.' and '..'; the volume's follow, moved by 2.

        Nothing is given to `token` before the last call that may park, since a body that is called again
        would give it twice.
        """
        page: list[tuple[bytes, Inode, int]] = []
        if start == 0 or start == 1:
            page = self.volume.readdir(fh, 0, READDIR_PAGE)
            if not self._dots(fh, start, token):
                return
        else:
            page = self.volume.readdir(fh, start - 2, READDIR_PAGE)
        entry_of, ref = self.entries.passing, self.volume.ref
        self.answered = self._now()
        for name, inode, cookie in page:
            if not pyfuse3.readdir_reply(token, name, entry_of(inode), cookie + 2):
                return
            ref(inode.ino)

    def _dots(self, fh: int, start: int, token: pyfuse3.ReaddirToken) -> bool:
        volume = self.volume
        own = volume.node(self._directories[fh])
        if start == 0 and not pyfuse3.readdir_reply(token, b".", self._dot(own.ino), 1):
            return False
        parent = own.ino if own.ino == self._root else own.parent
        return pyfuse3.readdir_reply(token, b"..", self._dot(parent), 2)

    def _dot(self, ino: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = 1 if ino == self._root else ino
        entry.st_mode = 0o040755
        entry.entry_timeout = 0
        entry.attr_timeout = 0
        return entry

    def release_directory(self, fh: int) -> None:
        self.volume.releasedir(fh)
        self._directories.pop(fh, None)
        self._openers.pop(fh, None)

    releasedir = handler(release_directory)

    @handler
    def fsyncdir(self, fh: int, datasync: bool) -> None:
        self.volume.fsyncdir(fh)

    @handler
    def statfs(self, ctx: RequestContext) -> StatvfsData:
        data = StatvfsData()
        for name, value in self.volume.statfs().items():
            setattr(data, name, value)
        return data

    # extended attributes

    def _check_xattr(self, name: bytes) -> None:
        if not self._xattr:
            # The kernel remembers ENOSYS, answers EOPNOTSUPP itself and spares one request a write.
            raise FUSEError(errno.ENOSYS)
        check_class(name, acl=self.enable_acl)

    def xattr(self, nodeid: int, name: bytes, ctx: RequestContext | None = None) -> bytes:
        self._check_xattr(name)
        try:
            return self.volume.getxattr(self.ino(nodeid), name)
        except PosixError as exc:
            if name == _LABEL and exc.errno == errno.ENODATA:
                raise FUSEError(errno.EOPNOTSUPP) from None
            raise

    getxattr = handler(xattr)

    @handler
    def setxattr(self, nodeid: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self._check_xattr(name)
        groups = functools.partial(groups_of, ctx)
        self.volume.setxattr(self.ino(nodeid), name, value, ctx.uid, groups)

    @handler
    def listxattr(self, nodeid: int, ctx: RequestContext) -> Sequence[bytes]:
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        return self.volume.listxattr(self.ino(nodeid), ctx.uid)

    @handler
    def removexattr(self, nodeid: int, name: bytes, ctx: RequestContext) -> None:
        self._check_xattr(name)
        self.volume.removexattr(self.ino(nodeid), name)
