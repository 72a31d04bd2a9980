"""Writes with O_DIRECT beside reads through the kernel's pages. FUSE thread only.

Before such a write the kernel drops the pages it covers. Who reads meanwhile brings back what was there
before it, and after an asynchronous write (io_submit, io_uring) the kernel of a FUSE mount does not look
again: the reader would keep the old bytes for good. So while a file is read or written through pages beside a
writer with O_DIRECT, the kernel is made to drop them once more, and the writer's call returns when it has.

The call that makes it drop them waits for pages that are just being read, and those wait for us: it is made
on the notifier's thread while the write is parked. A page that comes back later was asked for after the write
was done. The kernel has only so many asynchronous requests under way at once, reads among them; were all of
them parked writes, the reads they wait for would never come. Beyond DIRECT_WAITING_MAX they return at
once, and a reader may see the old bytes for some milliseconds. Who uses O_DIRECT alone waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsd.kernel.machine import Machine
from fsd.model.limits import DIRECT_WAITING_MAX
from fsd.vfs.types import Park, Want


class Both(Park):
    """Of a write that is done: wait for its commit, then for `after`. Its result is the commit's."""

    def __init__(self, commit: Want, after: Want) -> None:
        super().__init__(commit, again=False)
        self.after = after


class DirectWrites:
    """`drop` has the kernel drop a file's pages and calls back, from another thread."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.drop: Callable[[int, Callable[[], None]], None] = lambda ino, done: done()
        self.writers: dict[int, int] = {}  # handles that write with O_DIRECT: their inodes
        self._paged: set[int] = set()  # of these inodes: those with pages that no drop was asked for yet
        self._waiting = 0
        self._newest: dict[int, list[Want]] = {}  # who waits for the newest drop that is under way

    def opened(self, fh: int, ino: int) -> None:
        self.writers[fh] = ino

    def closed(self, fh: int) -> None:
        ino = self.writers.pop(fh, None)
        if ino is not None and ino not in self.writers.values():
            self._paged.discard(ino)

    def writes(self, ino: int) -> bool:
        """Whether somebody writes `ino` with O_DIRECT."""
        return bool(self.writers) and ino in self.writers.values()

    def through_pages(self, ino: int) -> None:
        """The kernel is about to have pages of `ino`. Need not be told while there are no `writers`."""
        if ino in self.writers.values():
            self._paged.add(ino)

    def written(self, fh: int, result: int) -> None:
        """A write through `fh` was done. Parks, with `result`, while the kernel may have older pages."""
        ino = self.writers[fh]
        if ino in self._paged:
            self._paged.discard(ino)
            wants: list[Want] = []
            self._newest[ino] = wants
            self.drop(ino, partial(self._machine.post, partial(self._dropped, ino, wants)))
        if ino in self._newest and self._waiting < DIRECT_WAITING_MAX:
            self._waiting += 1
            want = Want("the kernel to drop pages", result=result)
            self._newest[ino].append(want)
            raise Park(want, again=False)

    def give_up_pages(self, ino: int) -> Want:
        """Ends when the kernel has written what was changed of the pages of `ino`, and dropped them."""
        want = Want("the kernel to write pages")
        self.drop(ino, partial(self._machine.post, partial(self._given_up, want)))
        return want

    def _given_up(self, want: Want) -> None:
        want.end()
        self._machine.settle()

    def _dropped(self, ino: int, wants: list[Want]) -> None:
        if self._newest.get(ino) is wants:
            del self._newest[ino]
        self._waiting -= len(wants)
        for want in wants:
            want.end()
        self._machine.settle()
