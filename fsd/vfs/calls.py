"""What the namespace calls and the file calls share: finding nodes, handles, room in the log."""

from __future__ import annotations

import errno
import os
from collections import deque
from itertools import islice
from typing import Final, NamedTuple, NoReturn, TypeVar

from fsd.model.errors import FsdError, NoSpace, PosixError
from fsd.model.limits import NS_BATCH_MAX, PARKED_MAX, UNSENT_MAX
from fsd.model.ops import Op
from fsd.model.plain import dataclass, field
from fsd.vfs.commit import Committer
from fsd.vfs.compact import compact
from fsd.vfs.core import Core
from fsd.vfs.loads import Loader
from fsd.vfs.node import Inode
from fsd.vfs.siblings import Siblings
from fsd.vfs.types import Park, Want

T = TypeVar("T")

FLUSH_AT: Final = 0.75  # of the buffer: flush without waiting for age
ROUND_PAUSE: Final = 0.05  # seconds between flushes because of it
DISK_AGAIN: Final = 1.0  # seconds until a write on a full disk is tried again though nothing was freed
OWN_LINKS: Final = 2  # of a directory: its name and its `.`
SILENT_FRESH: Final = 1.0  # how long an answer counts while the change feed is silent
SENT_BACK: Final = 30.0  # how long the second try of an open that was sent back is awaited


def _bounded(found: dict[int, T], key: int, value: T) -> None:
    """Put, and drop the oldest beyond PARKED_MAX."""
    while len(found) >= PARKED_MAX:
        found.pop(next(iter(found)))
    found[key] = value


class Asked(NamedTuple):
    """A question at an open: who waits for it, which version of the inode was known before, and whether it
    had changes that the server did not have."""

    asker: object
    want: Want
    born: int = 0
    busy: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """Where a handle's reading of a large directory is. `first` is the cookie of the first name in its
    listing; `marks` are the pages read: the cookie each begins at, and the name it begins behind."""

    local: dict[bytes, int]
    first: int = 0
    after: bytes = b""
    ended: bool = False
    fresh: bool = True  # nothing was given out since it began
    marks: list[tuple[int, bytes]] = field(default_factory=list)
    passed: deque[list[bytes]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Handle:
    """An open file or directory. `error` is told once, by the next fsync or flush. `takes` are mode bits
    that writing by who opened it takes from the file and the kernel leaves to us."""

    fh: int
    node: Inode
    flags: int
    error: FsdError | None = None
    listing: list[tuple[bytes, int]] = field(default_factory=list)
    next_read: int = 0
    waits: Want | None = None  # what the last read that had to wait waited for
    takes: int = 0
    drops: int = -1  # `Inode.paged` when the kernel was told to drop its pages, until it has; -1: it has
    stream: Stream | None = None  # of a directory that is read page by page

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class Calls:
    """State of the calls. One thread."""

    def __init__(self, core: Core, committer: Committer, loader: Loader) -> None:
        self.core = core
        self.committer = committer
        self.flusher = committer.flusher
        self.loader = loader
        self.siblings = Siblings(core, loader)
        self.handles: dict[int, Handle] = {}
        self.asked: dict[int, Asked] = {}  # by the identity of the asker, which the entry keeps alive
        self.elsewhere: dict[int, None] = {}  # inodes that were no longer where an open asked for them
        # By threads: what their open found so, and until when the kernel's second try is awaited.
        self.sent_back: dict[int, tuple[int, tuple[int, bytes], float]] = {}
        self.last_fh = 0
        self.silent = False
        self.space_wants: list[tuple[int, Want]] = []
        self.round_at = 0.0
        self.disk_wants: list[Want] = []  # for room on the disk itself
        self.disk_since: float | None = None  # nothing could be written since
        self.disk_again = 0.0
        self.disk_freed = 0
        self.limit = core.capacity()
        self.unsent_max = UNSENT_MAX
        core.lazy = self.limit // 2

    # nodes -------------------------------------------------------------------------------------------
    def current(self, node: Inode) -> Inode:
        """`node` with attributes that may be shown; parks when they have to be asked for."""
        if node.busy or (node.gone and (node.handles or not node.stale)):
            return node  # its removal may have come too late: then it is there again
        if node.stale and not (node.is_dir and self.core.down):
            # A directory's old attributes have to do while the service is away: all below it would be out of
            # reach because of one name that another mount made in it.
            raise Park(self.loader.attrs([node, *self.other_stale(node)], soft=node.is_dir))
        if self.doubtful(node.checked):
            raise Park(self.loader.attrs([node], soft=True))
        return node

    def doubtful(self, checked: float) -> bool:
        """Whether what was answered at `checked` has to be asked for again: the change feed is silent, yet
        the server answers. Without a server what is known has to do, or nothing would go on."""
        return self.silent and not self.core.down and self.core.now() - checked > SILENT_FRESH

    def doubtful_name(self, directory: Inode, name: bytes) -> bool:
        """The same for a name, or (b"") all names of a directory that the server knows."""
        here_only = directory.born == 0 and directory.ino != self.core.root_ino
        return not here_only and self.doubtful(self.loader.fresh.get((directory.ino, name), 0.0))

    def other_stale(self, node: Inode) -> list[Inode]:
        """More inodes to ask about in the same question."""
        found = (
            n
            for n in self.core.nodes.by_ino.values()
            if n.stale and n is not node and not n.busy and not n.gone
        )
        return list(islice(found, NS_BATCH_MAX - 1))

    def child(self, parent: Inode, name: bytes) -> Inode | None:
        """What `name` means in a directory, None for nothing; parks when that is not known."""
        core = self.core
        parent.used = core.ticks
        if name in parent.names_stale and name not in parent.names_pending:
            raise Park(self.loader.name(parent, name))
        if self.silent and name not in parent.names_pending and self.doubtful_name(parent, name):
            raise Park(self.loader.name(parent, name, soft=True))
        ino = parent.entries.get(name, 0)
        if ino is None or (ino == 0 and parent.complete):
            return None
        node = core.nodes.by_ino.get(ino)
        if node is None or (node.gone and self.outlived(parent, name, node)):
            raise Park(self.loader.name(parent, name))
        return node

    @staticmethod
    def outlived(parent: Inode, name: bytes, node: Inode) -> bool:
        """Whether `name` means a file that was removed here under what was taken for its last name: another
        mount had given it this one."""
        return node.gone and name not in parent.names_pending

    def as_of_now(self, node: Inode, asker: object, thread: int = 0) -> None:
        """With consistency `open`: the server is asked once for each open, after it was called. Parks; with
        the answer there the same call comes again with the same `asker`. ESTALE when the file's name means
        another one now: the kernel then looks the path up again, once. What `thread` opens after that was
        there after it had called."""
        mine = self.asked.get(id(asker))
        if mine is None:
            self._ask_once(asker, self.loader.again(node), node.born, node.busy)
        elif node.is_dir and self._may_have_others(node, mine):
            node.complete = False  # other names may be in it than those that are known
            node.names_stale.update(node.entries)
        elif not node.is_dir and node.where is not None:
            self._is_where_it_was(node, node.where, asker, thread)

    def _is_where_it_was(self, node: Inode, where: tuple[int, bytes], asker: object, thread: int) -> None:
        """ESTALE when `where` means another file than `node`, also of one that an answer said is gone: the
        kernel may not have heard of that. An open by no name (/proc/self/fd) comes again with the same file,
        which is opened then. A caller who is not seen is not known again: it opens what is gone at once."""
        above = self.core.nodes.by_ino.get(where[0])
        if above is None or above.entries.get(where[1]) == node.ino or (node.gone and not thread):
            return
        ino, name, until = self.sent_back.get(thread, (0, None, 0.0))
        if (node.ino == ino or where == name) and self.core.now() < until:
            return
        self.answered(asker)
        _bounded(self.elsewhere, node.ino, None)
        if thread:
            # The kernel may refuse the second try itself (EACCES), of which nobody is told.
            _bounded(self.sent_back, thread, (node.ino, where, self.core.now() + SENT_BACK))
        raise PosixError(errno.ESTALE, "the name means another file now")

    def _may_have_others(self, node: Inode, mine: Asked) -> bool:
        """Whether a directory may have other names on the server than those known here, after the question
        at an open. Its version alone does not tell: that may have come with a look at its attributes, or
        with a listing of the directory above, before the feed told of the names."""
        if node.gone:
            return not node.busy
        if node.busy or mine.busy:
            # Of what is changed here answers do not say what the server has.
            return node.born != 0 or node.ino == self.core.root_ino
        return node.born != mine.born or (node.complete and node.born > node.listed)

    def named_as_of_now(self, parent: Inode, name: bytes, node: Inode | None, asker: object) -> Inode | None:
        """What a looked-up name means now: asked where nothing is known under it, and where an open cannot
        tell by which of several names it came, so that its question would be about the wrong one."""
        if node is not None and not node.is_dir and not node.busy and name not in parent.names_pending:
            doubtful = node.nlink > 1 or node.ino in self.elsewhere
        else:
            doubtful = node is None
        if doubtful:
            if id(asker) not in self.asked and name not in parent.names_pending:
                self._ask_once(asker, self.loader.again_absent(parent, name))
            node = self.child(parent, name)
        if node is not None and not node.is_dir:
            self.elsewhere.pop(node.ino, None)
            node.where = (parent.ino, name)
        return node

    def asks(self, asker: object) -> bool:
        return asker is not None and self.core.options.consistency == "open"

    def answered(self, asker: object) -> None:
        """The call comes to its end: it asks no more."""
        self.asked.pop(id(asker), None)

    def _ask_once(self, asker: object, want: Want, born: int = 0, busy: bool = False) -> NoReturn:
        _bounded(
            self.asked, id(asker), Asked(asker, want, born, busy)
        )  # some callers were killed while they waited
        raise Park(want)

    def must_be_writable(self, *nodes: Inode) -> None:
        """Before a change of these inodes, or of names in these directories. EROFS."""
        core = self.core
        if core.options.read_only:
            raise PosixError(errno.EROFS, "mounted read-only")
        if not core.guarded:
            return
        if core.fenced is not None:
            raise PosixError(errno.EROFS, core.fenced.message)
        if core.leased:
            raise PosixError(errno.EROFS, core.leased)
        for node in nodes:
            self._not_leased(node)

    def _not_leased(self, node: Inode) -> None:
        """Raises EROFS below the top of another mount's writer lease; the server looks once more."""
        for at in self.core.nodes.upwards(node):
            if at.ino == self.core.root_ino:
                return
            if at.ino in self.core.leases:
                raise PosixError(errno.EROFS, self.core.leases[at.ino])

    def handle(self, fh: int) -> Handle:
        found = self.handles.get(fh)
        if found is None:
            raise PosixError(errno.EBADF, "no such handle")
        return found

    def new_handle(self, node: Inode, flags: int) -> int:
        self.last_fh += 1
        node.handles += 1
        self.handles[self.last_fh] = Handle(self.last_fh, node, flags)
        return self.last_fh

    def move_handles(self, node: Inode, stays: Inode) -> None:
        """What has `node` open has `stays` open: the two are one inode."""
        for handle in self.handles.values():
            if handle.node is node:
                handle.node = stays

    def pages_kept(self, fh: int) -> bool:
        """Whether the kernel may keep the pages it has of a file that is opened as `fh`. It drops them when
        the answer to the open does not say so, which is some time after the answer: see `dropped`."""
        handle = self.handle(fh)
        node = handle.node
        kept = bool(node.paged & 1)
        handle.drops = -1 if kept else node.paged
        # With the feed silent nobody tells when they are old; of two numbers the kernel knows two files.
        return kept and not self.silent and node.ino not in self.core.nodes.also

    @staticmethod
    def dropped(handle: Handle) -> None:
        """The first call on a handle: its open has come to an end, and the kernel has dropped what it had of
        the file. From then on its pages are what is here, unless that changed between."""
        if handle.drops == handle.node.paged:
            handle.node.paged += 1
        handle.drops = -1

    @staticmethod
    def wait_out(want: Want, result: object = None) -> None:
        """Return when `want` has ended well, raise its error, or park; the call's result is `result` then."""
        if want.error is not None:
            raise want.told()
        if not want.finished:
            want.result = result
            raise Park(want, again=False)

    # changes -----------------------------------------------------------------------------------------
    def room(self, length: int) -> None:
        """Let a change of `length` bytes into the log, or park until there is room for it."""
        if self.unsent >= self.unsent_max:
            self.room_in_memory(length)
        used = self.core.log.used
        if used + length <= self.limit * FLUSH_AT:
            return
        over = used + length > self.limit
        if over or self.core.now() >= self.round_at:
            # While nothing can be sent each call comes here: a round looks at every changed file.
            self.round_at = self.core.now() + ROUND_PAUSE
            if over or self.flusher.round_until is None:
                self.flusher.start_round(self.core.now(), everything=over)
            compact(self.core)
        if over:
            if self.hopeless():
                raise self.orphans_fill_it()
            want = self.space_want()
            self.space_wants.append((length, want))
            raise Park(want)

    def room_in_memory(self, length: int = 0) -> None:
        """Park while as much is unsent as a mount keeps. All there is to removals and truncations, which need
        no room in the log. No round: what is to be sent goes by its age, and a look at each of so many files
        costs much."""
        if self.unsent >= self.unsent_max:
            want = self.space_want()
            self.space_wants.append((length, want))
            raise Park(want)

    @property
    def unsent(self) -> int:
        """What the memory of what is not sent grows with, however small it is: operations and changed
        files."""
        return len(self.core.queue) + len(self.core.dirty)

    def hopeless(self) -> bool:
        """Whether nothing will be freed, however long one waits: everything is sent, and what is in the log
        belongs to open files without a name."""
        core = self.core
        return bool(core.orphans) and not core.dirty and not len(core.queue) and core.sync_job is None

    def orphans_fill_it(self) -> NoSpace:
        return NoSpace(
            f"{len(self.core.orphans)} open files without a name fill the log under "
            f"{self.core.options.state_dir}",
            hint="close them, or raise --buffer-size: they are never sent",
        )

    def space_want(self) -> Want:
        """For room in the log: ends with ENOSPC when that takes too long."""
        want = self.core.want("room in the local log")
        if self.unsent >= self.unsent_max:
            want.late = NoSpace(
                f"{self.unsent} changes wait to be sent, as many as a mount keeps",
                hint="restore the connection: they are sent then",
            )
            return want
        want.late = NoSpace(
            f"the log under {self.core.options.state_dir} is full and cannot be sent",
            hint="restore the connection, free disk space there, or raise --buffer-size",
        )
        return want

    def freed(self) -> None:
        """Log space may have been freed: let those it suffices for try again, the first first."""
        if not self.space_wants and not self.disk_wants:
            return
        room, more = self.limit - self.core.log.used, self.unsent_max - self.unsent
        left = []
        for length, want in self.space_wants:
            if length <= room and more > 0:
                want.end()
                room, more = room - length, more - 1
            elif not want.finished:
                left.append((length, want))
        self.space_wants = left
        if left:
            compact(self.core)
            if self.hopeless():
                for _, want in left:
                    want.end(self.orphans_fill_it())
        if self.disk_wants and (self.core.log.freed != self.disk_freed or self.core.now() >= self.disk_again):
            for want in self.disk_wants:
                want.end()
            self.disk_wants = []

    def disk_want(self) -> Want:
        """Ends when log space was freed and after a while, for another try: others may free the disk. The
        time-out runs from the first try that failed."""
        core = self.core
        now = core.now()
        if self.disk_since is None:
            self.disk_since = now
        want = self.space_want()
        if want.deadline is not None:
            want.deadline = self.disk_since + core.options.io_timeout
        self.disk_wants.append(want)
        self.disk_again, self.disk_freed = now + DISK_AGAIN, core.log.freed
        return want

    def extend(self, seconds: float) -> None:
        """Whoever waits may wait so much longer: the process did not run for that time."""
        for want in self.core.wants:
            if want.deadline is not None:
                want.deadline += seconds
        if self.disk_since is not None:
            self.disk_since += seconds

    def do(self, op: Op, *, drops: Inode | None = None) -> None:
        """Log and queue an operation on inodes that are in memory; `drops` loses a name with it."""
        last = drops is not None and drops.nlink <= 1 and not drops.is_dir
        self.committer.add(op, drops=drops.ino if drops is not None and last else 0)

    def touch_parent(self, parent: Inode, time: int, links: int = 0) -> None:
        parent.mtime = parent.ctime = time
        # Of one that is changed here it is not known how many directories another mount made in it.
        parent.nlink = max(parent.nlink + links, OWN_LINKS)
        parent.stamp += 1

    def changed(self, node: Inode, time: int) -> None:
        """Its ctime moves; flights that have no number yet carry the new times."""
        node.ctime = time
        node.stamp += 1
        self.flusher.retime(node)

    def lose_name(self, node: Inode, time: int) -> None:
        """One name less; with the last one its changes are nobody's but its open handles'."""
        node.nlink = 0 if node.is_dir else max(node.nlink - 1, 0)  # another mount may have given it this name
        self.changed(node, time)
        if node.nlink > 0:
            return
        node.gone = True
        self.flusher.drop(node)
        if node.handles and node.is_file:
            self.core.orphans[node.ino] = None  # till its last handle is released
        else:
            self.core.forget_if_unused(node)

    def hold_content(self, node: Inode) -> None:
        """Before the last name of an open file goes: everything needed to go on without the server's row."""
        if node.nlink <= 1 and node.handles and node.is_file:
            self.know_blocks(node)

    def know_blocks(self, node: Inode) -> None:
        """Have the block list in memory, or park. ESTALE when the file was removed elsewhere before."""
        if node.file().void and not node.gone:
            raise Park(self.loader.attrs([node]))
        content = node.file()
        if content.base is None:
            content.base = self.core.lists.get(node.ino, content.cseq)
        if content.base is None:
            if node.gone:
                raise PosixError(errno.ESTALE, "the file was removed by another mount")
            if node.stale and node.pending and not content.unclean:
                # Attributes that are changed here are not replaced, and older ones never agree with the list.
                want = self.core.commit_want("earlier changes of the file", [], ino=node.ino)
                self.committer.kick()
                raise Park(want)
            raise Park(self.loader.block_list(node))

    def base_of(self, node: Inode) -> int:
        """The content seq a removal is based on."""
        return node.content.cseq if node.content is not None else node.cseq

    def tell(self, ino: int, error: FsdError) -> None:
        """A flush of the file failed for good: every open handle is told once."""
        for handle in self.handles.values():
            if handle.node.ino != ino:
                continue
            waiting = [w for w in self.core.commit_wants if w.fh == handle.fh and not w.want.finished]
            for one in waiting:
                one.want.end(error)
            if not waiting:
                handle.error = error
