"""Files without a name (O_TMPFILE): nobody's but their handles', until they are given one.

Nothing of such a file has an operation or is sent: its changes are in the log behind an UNNAMED record, and a
recovery passes over them, as over those of a file that lost its last name. With its first name it becomes a
new file whose content is complete: the two travel in one commit (`queue.Queued.with_next`), so that the name
is never seen with less.
"""

from __future__ import annotations

import stat

from fsd.model import acl
from fsd.model.attrs import Attr, session_of
from fsd.model.ops import CREATE, SETATTR, Create, Setattr
from fsd.vfs.attributes import RECORD_ROOM, AttributeCalls
from fsd.vfs.node import Inode


class UnnamedCalls(AttributeCalls):
    """See the module."""

    def make_unnamed(self, parent: int, mode: int, uid: int, gid: int, umask: int = 0) -> Inode:
        """A regular file that has no name, and of the directory only what it takes over from it. Counts one
        kernel lookup."""
        core = self.core
        directory = core.nodes.directory(parent)
        self.must_be_writable(directory)
        mode = stat.S_IFREG | mode & 0o7777
        given = self.inherited(directory, mode) if core.options.acl else None
        mode = mode & ~umask if given is None else mode & ~0o777 | given.mode & 0o777
        time, ino = core.stamp(), core.new_ino()
        attr = Attr(
            ino=ino,
            mode=mode,
            nlink=0,
            uid=uid,
            gid=directory.gid if directory.mode & stat.S_ISGID else gid,
            size=0,
            atime=time,
            mtime=time,
            ctime=time,
            rdev=0,
            target=None,
            parent=0,
            parts=None,
            xattrs=None if given is None or given.access is None else {acl.ACCESS: given.access},
            cseq=0,
            writer=core.session,
            born=0,
        )
        node = core.nodes.by_ino[ino] = Inode(attr, core.seq)
        node.gone = True
        node.lookups = node.paged = 1
        core.unnamed.add(ino)
        core.orphans[ino] = None
        return node

    def give_name(self, node: Inode, directory: Inode, name: bytes) -> None:
        """The first name of a file made without one. Parks for room before anything is changed."""
        core = self.core
        xattrs = node.xattrs or {}
        length = (3 + len(xattrs)) * RECORD_ROOM + sum(map(len, xattrs.values()))
        self.room(length)
        if session_of(node.ino) != core.session:
            core.alias(node.ino, core.new_ino())  # the session it was made in is over
        core.prepare(length)
        time = core.stamp()
        mode = node.mode & ~0o077 if acl.ACCESS in xattrs else node.mode
        op = Create(
            core.take_opno(), CREATE, directory.ino, name, node.ino, mode, node.uid, node.gid, 0, None, time
        )
        pos = self.committer.write(op)
        core.unnamed.discard(node.ino)
        core.orphans.pop(node.ino, None)
        node.gone, node.nlink, node.ctime = False, 1, time
        node.stamp += 1
        core.nodes.enter(directory, name, node.ino)
        self.committer.enqueue(op, pos)
        content = node.file()
        if content.first is not None:
            core.dirty[node.ino] = None
            content.window = True
            self.flusher.reserve(node)
            queued = core.queue.get(op.opno)
            assert queued is not None
            queued.with_next = True
        for key, value in xattrs.items():
            self._put(node, key, value, time)
        # The making gave it its own time for all three, and with an ACL less than its mode.
        bits, opno = node.mode & 0o7777, core.take_opno()
        self.do(Setattr(opno, SETATTR, node.ino, bits, None, None, node.atime, node.mtime, time))
