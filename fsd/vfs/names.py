"""The namespace calls: lookup to rename."""

from __future__ import annotations

import errno
import stat

from fsd.model.attrs import Attr
from fsd.model.errors import PosixError
from fsd.model.limits import LINK_MAX, SYMLINK_MAX
from fsd.model.names import check_name
from fsd.model.ops import (
    CREATE,
    LINK,
    RENAME,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RMDIR,
    UNLINK,
    Create,
    Link,
    Rename,
    Rmdir,
    Unlink,
)
from fsd.vfs.attributes import RECORD_ROOM
from fsd.vfs.listing import ListingCalls
from fsd.vfs.node import Inode
from fsd.vfs.unnamed import UnnamedCalls


def _made(op: Create, writer: int) -> Attr:
    """The attributes of a new inode."""
    is_dir = stat.S_ISDIR(op.mode)
    _, _, parent, _, ino, mode, uid, gid, rdev, target, time = op
    # By places: by their names it takes three times as long, of each new file.
    nlink, size, above = 2 if is_dir else 1, len(target or b""), parent if is_dir else 0
    return Attr(
        ino, mode, nlink, uid, gid, size, time, time, time, rdev, target, above, None, None, 0, writer, 0
    )


class NameCalls(UnnamedCalls, ListingCalls):
    """See the module."""

    def lookup(self, parent: int, name: bytes, asker: object = None, thread: int = 0) -> Inode | None:
        """The inode `name` means, None if there is none. Counts one kernel lookup when found. `asker` stands
        for the request, `thread` is the caller, 0 where that is not seen (see `as_of_now`)."""
        directory = self.core.nodes.directory(parent)
        if len(name) > 255:
            raise PosixError(errno.ENAMETOOLONG, "the name is too long")
        node = self.child(directory, name)
        if self.asks(asker):
            node = self.named_as_of_now(directory, name, node, asker)
            self.answered(asker)
            if node is None:  # an open that was sent back ends with that, and the next one is another
                self.sent_back.pop(thread, None)
        if node is None:
            return None
        self.current(node)
        node.lookups += 1
        return node

    def node(self, ino: int) -> Inode:
        """The inode in memory, whatever its state (ESTALE if there is none). Never parks."""
        return self.core.nodes.get(ino)

    def getattr(self, ino: int) -> Inode:
        return self.current(self.core.nodes.get(ino))

    def readlink(self, ino: int) -> bytes:
        node = self.core.nodes.get(ino)
        if node.target is None:
            raise PosixError(errno.EINVAL, "not a symlink")
        return node.target

    def ref(self, ino: int) -> None:
        """Count one kernel lookup (an entry answered by readdirplus)."""
        self.core.nodes.get(ino).lookups += 1

    def forget(self, ino: int, nlookup: int) -> None:
        node = self.core.nodes.by_ino.get(ino)
        if node is not None:
            node.lookups = max(0, node.lookups - nlookup)
            if not node.lookups:
                node.kernel = None
            self.core.forget_if_unused(node)

    # making ------------------------------------------------------------------------------------------
    def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        rdev: int = 0,
        target: bytes | None = None,
        umask: int = 0,
    ) -> Inode:
        """A new inode of any type; `mode` is the whole st_mode, of which `umask` is taken off unless the
        directory has a default ACL. Counts one kernel lookup."""
        directory = self.core.nodes.directory(parent)
        self.must_be_writable(directory)
        check_name(name)
        if self.child(directory, name) is not None:
            raise PosixError(errno.EEXIST, "the name exists")
        is_dir = stat.S_ISDIR(mode)
        if is_dir and directory.nlink >= LINK_MAX:
            raise PosixError(errno.EMLINK, "too many directories in one")
        given = self.inherited(directory, mode) if self.core.options.acl and target is None else None
        length = RECORD_ROOM if given is None else 4 * RECORD_ROOM + given.length
        self.room(length)
        if given is not None:
            self.core.prepare(length)
        mode = mode & ~umask if given is None else given.safe
        if stat.S_ISREG(mode):
            rdev = 0
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if is_dir:
                mode |= stat.S_ISGID
        core = self.core
        time, ino = core.stamp(), core.new_ino()
        op = Create(core.take_opno(), CREATE, parent, name, ino, mode, uid, gid, rdev, target, time)
        pos = self.committer.write(op)
        node = core.nodes.by_ino[ino] = Inode(_made(op, core.session), core.seq)
        node.complete = is_dir
        node.lookups = 1
        core.nodes.enter(directory, name, ino)
        self.touch_parent(directory, time, 1 if is_dir else 0)
        self.committer.enqueue(op, pos)
        if given is not None:
            self.take_over(node, given)
        return node

    def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, uid: int, gid: int, umask: int = 0
    ) -> Inode:
        return self.make(parent, name, mode, uid, gid, rdev, umask=umask)

    def mkdir(self, parent: int, name: bytes, mode: int, uid: int, gid: int, umask: int = 0) -> Inode:
        return self.make(parent, name, stat.S_IFDIR | mode & 0o7777, uid, gid, umask=umask)

    def symlink(self, parent: int, name: bytes, target: bytes, uid: int, gid: int) -> Inode:
        if not target:
            raise PosixError(errno.ENOENT, "an empty target")
        if len(target) > SYMLINK_MAX:
            raise PosixError(errno.ENAMETOOLONG, f"a target of {len(target)} bytes, at most {SYMLINK_MAX}")
        return self.make(parent, name, stat.S_IFLNK | 0o777, uid, gid, 0, target)

    def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """A further name. Counts one kernel lookup."""
        core = self.core
        directory, node = core.nodes.directory(parent), core.nodes.get(ino)
        self.must_be_writable(directory, node)
        check_name(name)
        if node.is_dir:
            raise PosixError(errno.EPERM, "a directory has one name")
        self.current(node)
        unnamed = ino in core.unnamed
        if node.gone and not unnamed:
            raise PosixError(errno.ENOENT, "the file was removed")
        if node.nlink >= LINK_MAX:
            raise PosixError(errno.EMLINK, "too many names")
        if self.child(directory, name) is not None:
            raise PosixError(errno.EEXIST, "the name exists")
        if unnamed:
            self.give_name(node, directory, name)
        else:
            self.room(RECORD_ROOM)
            self.flusher.reserve(node)
            time = core.stamp()
            self.do(Link(core.take_opno(), LINK, ino, parent, name, time))
            core.nodes.enter(directory, name, ino)
            node.nlink += 1
            self.changed(node, time)
        self.touch_parent(directory, node.ctime)
        node.lookups += 1
        return node

    # removing ----------------------------------------------------------------------------------------
    def unlink(self, parent: int, name: bytes) -> None:
        core = self.core
        directory = core.nodes.directory(parent)
        self.must_be_writable(directory)
        node = self.child(directory, name)
        if node is None:
            raise PosixError(errno.ENOENT, "no such name")
        if node.is_dir:
            raise PosixError(errno.EISDIR, "it is a directory")
        self.current(node)
        self.hold_content(node)
        time = core.stamp()
        vanish = core.queue.cancellable(parent, name, node.ino) if node.nlink <= 1 else None
        if vanish is not None:
            self.committer.cancel(vanish, node.ino, parent, time)
        else:
            self.room_in_memory()
            op = Unlink(core.take_opno(), UNLINK, parent, name, node.ino, self.base_of(node), time)
            self.do(op, drops=node)
        self.unname(directory, name)
        self.touch_parent(directory, time)
        self.lose_name(node, time)

    def unname(self, directory: Inode, name: bytes) -> None:
        """The name means nothing now."""
        if directory.complete and name not in directory.names_pending:
            directory.entries.pop(name, None)
        else:
            directory.entries[name] = None

    def rmdir(self, parent: int, name: bytes) -> None:
        core = self.core
        directory = core.nodes.directory(parent)
        self.must_be_writable(directory)
        node = self.child(directory, name)
        if node is None:
            raise PosixError(errno.ENOENT, "no such name")
        if not node.is_dir:
            raise PosixError(errno.ENOTDIR, "not a directory")
        self.must_be_writable(node)
        self.must_be_empty(node)
        time = core.stamp()
        vanish = core.queue.cancellable(parent, name, node.ino)
        if vanish is not None and all(q.op.ino == node.ino for q in core.queue.of(node.ino) if q.op):
            self.committer.cancel(vanish, node.ino, parent, time)
        else:
            self.room_in_memory()
            self.do(Rmdir(core.take_opno(), RMDIR, parent, name, node.ino, time))
        self.unname(directory, name)
        self.touch_parent(directory, time, -1)
        self.lose_name(node, time)

    # renaming ----------------------------------------------------------------------------------------
    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        core = self.core
        source, target = core.nodes.directory(parent), core.nodes.directory(new_parent)
        self.must_be_writable(source, target)
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise PosixError(errno.EINVAL, "unknown rename flags")
        check_name(new_name)
        node, over = self.child(source, name), self.child(target, new_name)
        if node is None or (over is None and flags == RENAME_EXCHANGE):
            raise PosixError(errno.ENOENT, "no such name")
        if over is not None and flags == RENAME_NOREPLACE:
            raise PosixError(errno.EEXIST, "the name exists")
        if node is over:
            return
        if core.guarded:
            self.must_be_writable(*(one for one in (node, over) if one is not None and one.is_dir))
        self.may_rename(node, over, source, target, flags)
        self.room(RECORD_ROOM)
        self.publish(node)
        if over is not None and (flags == RENAME_EXCHANGE or (node.born and not over.is_dir)):
            # What is replaced is never sent, but where another mount may have moved or removed what replaces
            # it: then it stays, as it was written last.
            self.publish(over)
        time = core.stamp()
        self.do(
            Rename(
                core.take_opno(),
                RENAME,
                parent,
                name,
                node.ino,
                new_parent,
                new_name,
                flags,
                0 if over is None else over.ino,
                0 if over is None else self.base_of(over),
                time,
            ),
            drops=over if flags != RENAME_EXCHANGE else None,
        )
        self.moved(node, over, source, name, target, new_name, flags, time)

    def may_rename(self, node: Inode, over: Inode | None, source: Inode, target: Inode, flags: int) -> None:
        """Raises what Linux raises; parks for what has to be known."""
        if node.is_dir and self.inside(target, node):
            raise PosixError(errno.EINVAL, "a directory cannot move into itself")
        if over is None:
            return
        if flags == RENAME_EXCHANGE:
            if over.is_dir and self.inside(source, over):
                raise PosixError(errno.EINVAL, "a directory cannot move into itself")
            return
        if node.is_dir and not over.is_dir:
            raise PosixError(errno.ENOTDIR, "a directory replaces only a directory")
        if over.is_dir and not node.is_dir:
            raise PosixError(errno.EISDIR, "the target is a directory")
        if over.is_dir:
            self.must_be_empty(over)
        else:
            self.current(over)
            self.hold_content(over)

    def inside(self, directory: Inode, ancestor: Inode) -> bool:
        """Whether `directory` is `ancestor` or lies below it."""
        for at in self.core.nodes.upwards(directory):
            if at is ancestor or at.ino == self.core.root_ino:
                return at is ancestor
        return False

    def publish(self, node: Inode) -> None:
        """A name for `node` is about to appear: its content so far, or that of the files below it, first."""
        if not node.is_dir:
            self.flusher.reserve(node)
            return
        for ino in list(self.core.dirty):
            at = self.core.nodes.by_ino.get(ino)
            if at is None or at.where is None:
                continue
            parent = self.core.nodes.by_ino.get(at.where[0])
            if parent is not None and self.inside(parent, node):
                self.flusher.reserve(at)

    def moved(
        self,
        node: Inode,
        over: Inode | None,
        source: Inode,
        name: bytes,
        target: Inode,
        new_name: bytes,
        flags: int,
        time: int,
    ) -> None:
        """The memory's side of a rename that was logged."""
        nodes = self.core.nodes
        down = up = 0  # how the parents' link counts change
        if node.is_dir:
            down, up = down - 1, up + 1
            node.parent = target.ino
        nodes.enter(target, new_name, node.ino)
        if over is not None and flags == RENAME_EXCHANGE:
            nodes.enter(source, name, over.ino)
            if over.is_dir:
                down, up = down + 1, up - 1
                over.parent = source.ino
            self.changed(over, time)
        else:
            self.unname(source, name)
            if over is not None:
                up -= 1 if over.is_dir else 0
                self.lose_name(over, time)
        if source is target:
            self.touch_parent(source, time, down + up)
        else:
            self.touch_parent(source, time, down)
            self.touch_parent(target, time, up)
        self.changed(node, time)
