"""Directory handles, and whether a directory is empty.

A directory is listed from memory, where all of its names are loaded first. One of more than LISTING_MAX names
is read page after page from the server instead: a handle has a window of it, and what was passed is forgotten
again, in the kernel too. What is made in it and not yet known to the server comes first.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from fsd.model.attrs import Entry
from fsd.model.errors import PosixError
from fsd.model.limits import INODES_MAX, LISTING_MAX
from fsd.vfs.calls import Calls, Handle, Stream
from fsd.vfs.evict import forget_some
from fsd.vfs.loads import LIST_PAGE
from fsd.vfs.node import Inode
from fsd.vfs.types import Park, Want

# The kernel forgets names of a directory only between two of its readers' calls: with too much in memory they
# get few names a call.
SLOW: Final = 8
STALE_ASKED: Final = 64  # names that are asked for one by one; of more the whole directory is
SEEN_COUNTS: Final = 2.0  # seconds for which an answer says whether a directory is empty
WINDOW: Final = 2 * LIST_PAGE  # what the kernel may come back to without a question


class ListingCalls(Calls):
    """See the module."""

    def opendir(self, ino: int, asker: object = None) -> int:
        """Of a removed directory too, which is empty: a working directory is opened as `.`. Where the
        question an open asks finds that it was removed, there is nothing of that name."""
        node = self.core.nodes.get(ino)
        if self.asks(asker) and (not node.gone or id(asker) in self.asked):
            self.as_of_now(self.core.nodes.directory(ino), asker)
            self.answered(asker)
        return self.new_handle(node if node.gone else self.core.nodes.directory(ino), 0)

    def readdir(self, fh: int, cookie: int, limit: int = 1000) -> list[tuple[bytes, Inode, int]]:
        """Entries behind `cookie` (0: from the start), without '.' and '..': (name, inode, next cookie).

        The listing is taken when read from the start; names removed since are left out, so that a program
        that deletes as it reads loses no place. Counts no lookups: call `ref` for each one given out.
        """
        handle = self.handle(fh)
        directory = handle.node
        directory.used = self.core.ticks
        if cookie == 0:
            self._begin(handle)
        stream = handle.stream
        if stream is None:
            return self._some(handle, cookie, cookie, limit)
        if cookie < stream.first:
            self._go_back(handle, stream, cookie)
        self._shed(handle, stream)
        if len(self.core.nodes.by_ino) > INODES_MAX:
            limit = min(limit, SLOW)
        found = self._some(handle, cookie - stream.first, cookie, limit)
        if not found and not stream.ended:
            raise Park(self._next_page(handle, stream))
        stream.fresh = False
        return found

    def _some(self, handle: Handle, start: int, cookie: int, limit: int) -> list[tuple[bytes, Inode, int]]:
        """What there is in the handle's listing from index `start` on, which is at `cookie`."""
        directory, by_ino = handle.node, self.core.nodes.by_ino
        found: list[tuple[bytes, Inode, int]] = []
        for at in range(start, len(handle.listing)):
            name = handle.listing[at][0]
            if name in directory.names_stale and name not in directory.names_pending:
                if found:
                    break
                raise Park(self._names_again(handle, at, limit))
            ino = directory.entries.get(name)
            if ino is None:
                continue
            node = by_ino.get(ino)
            if node is None or self.outlived(directory, name, node):
                if found:
                    break
                raise Park(self.loader.name(directory, name))
            if node.stale and not found:
                self.current(node)
            elif node.stale and not node.busy:
                break
            found.append((name, node, cookie + at - start + 1))
            if len(found) >= limit:
                break
        return found

    def _names_again(self, handle: Handle, at: int, limit: int) -> Want:
        """Another mount changed what the listing's name at `at` means: that is asked for, with those behind
        it. Given out as it was, the kernel would keep it for a minute."""
        directory, stale = handle.node, handle.node.names_stale
        if len(stale) > STALE_ASKED and directory.ino not in self.loader.endless:
            return self.loader.directory(directory)
        names = (name for name, _ in handle.listing[at : at + limit] if name in stale)
        wants = [self.loader.name(directory, name) for name in names]
        return wants[0]

    def releasedir(self, fh: int) -> None:
        handle = self.handles.pop(fh)
        handle.node.handles -= 1
        self.core.forget_if_unused(handle.node)

    def fsyncdir(self, fh: int) -> None:
        self.handle(fh)
        want = self.core.commit_want("fsync of a directory", [], fh=fh)
        self.committer.kick()
        self.wait_out(want)

    # all names, or no more than a page of them --------------------------------------------------------
    def _begin(self, handle: Handle) -> None:
        """Take the listing of a handle that is read from the start."""
        directory = handle.node
        if handle.stream is not None and handle.stream.fresh:
            return  # the same call again: its first page has come
        handle.stream = None
        if not directory.gone and not directory.complete and directory.ino in self.loader.endless:
            made = {name: directory.entries.get(name) for name in directory.names_pending}
            handle.stream = Stream({name: ino for name, ino in made.items() if ino is not None})
            handle.listing = list(handle.stream.local.items())
            return
        if not directory.gone:
            self.all_names(directory)
        handle.listing = [(name, ino) for name, ino in directory.entries.items() if ino is not None]

    def all_names(self, node: Inode) -> None:
        """Have every name of a directory in memory, or park."""
        if not node.complete:
            raise Park(self.loader.directory(node))
        if self.doubtful_name(node, b""):
            raise Park(self.loader.directory(node, soft=True))
        stale = [name for name in node.names_stale if name not in node.names_pending]
        if len(stale) > STALE_ASKED:
            raise Park(self.loader.directory(node))
        wants = [self.loader.name(node, name) for name in stale]
        if wants:
            raise Park(wants[0])

    def must_be_empty(self, node: Inode) -> None:
        if node.complete or node.ino not in self.loader.endless:
            self.all_names(node)
            has_names = any(ino is not None for ino in node.entries.values())
        else:
            seen, at = self.loader.seen.pop(node.ino, (False, 0.0))
            if self.core.now() - at > SEEN_COUNTS:  # never asked, or by a call that was given up
                raise Park(self.loader.any_name(node))
            known = (n for n, ino in node.entries.items() if ino is not None and n not in node.names_stale)
            has_names = seen or next(known, None) is not None
        if has_names:
            raise PosixError(errno.ENOTEMPTY, "the directory is not empty")

    # pages -------------------------------------------------------------------------------------------
    def _next_page(self, handle: Handle, stream: Stream) -> Want:
        after = stream.after

        def took(entries: Sequence[Entry], more: bool) -> None:
            if stream.after == after:
                self._took(handle, stream, entries, more)

        return self.loader.page(handle.node, (handle.fh, id(stream)), after, took)

    def _took(self, handle: Handle, stream: Stream, entries: Sequence[Entry], more: bool) -> None:
        surplus = len(handle.listing) - WINDOW
        if surplus > 0:
            stream.passed.append([name for name, _ in handle.listing[:surplus]])
            del handle.listing[:surplus]
            stream.first += surplus
        stream.marks.append((stream.first + len(handle.listing), stream.after))
        handle.listing += [(one.name, one.attr.ino) for one in entries if one.name not in stream.local]
        stream.ended = not (more and entries)
        if entries:
            stream.after = entries[-1].name
        if stream.ended and stream.first + len(handle.listing) < LISTING_MAX // 2:
            self.loader.endless.discard(handle.node.ino)

    @staticmethod
    def _go_back(handle: Handle, stream: Stream, cookie: int) -> None:
        """The kernel asks for what was passed (seekdir): that page again."""
        page = bisect_right(stream.marks, cookie, key=lambda mark: mark[0]) - 1
        stream.ended = False
        if page < 0:
            stream.first, stream.after, stream.marks = 0, b"", []
            handle.listing = list(stream.local.items())
        else:
            stream.first, stream.after = stream.marks[page]
            del stream.marks[page:]
            handle.listing = []

    def _shed(self, handle: Handle, stream: Stream) -> None:
        """Forget what was passed. Not while a question is open, as for the evictor; and what another handle
        is about to give out is forgotten when that one has passed it: for it a name that is not known would
        be one that was removed."""
        if stream.passed and not self.core.asking:
            names, directory = stream.passed.popleft(), handle.node
            others = [o for o in self.handles.values() if o.node is directory and o is not handle]
            needed = {name for other in others for name, _ in other.listing}
            forget_some(self.core, directory, [name for name in names if name not in needed])
