"""What other mounts and direct commands changed: mark it stale, tell the kernel to forget it."""

from __future__ import annotations

from fsd.vfs.core import Core
from fsd.vfs.types import Invalidation
from fsd.wire.messages import Change, FeedPage


class Feed:
    """Applies pages of the change feed. One thread. Own changes are known, unless the server made something
    else of them (a copy, `.fsd-lost`): the feed says all of what that was."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def apply(self, page: FeedPage) -> list[Invalidation]:
        """Mark what changed; returns what the kernel has to forget. Own changes are known already."""
        core = self.core
        core.seq = max(core.seq, page.head)
        if page.leases != core.leases_told:
            core.see_leases(page.leases)
        core.space = page.space or core.space
        if page.mark is not None and page.mark.seq > core.mark.seq:
            core.mark = page.mark
            # Of own commits the answers say it.
            core.unsaid |= page.reset or not all(self._own(one) for one in page.changes)
        if page.reset:
            core.feed_seq = page.head
            self._go_on()
            return self.forget_everything(page.head)
        found: list[Invalidation] = []
        for change in page.changes:
            if not self._own(change):
                core.surprises.discard(change.seq)
                self._foreign(change, found)
            core.feed_seq = max(core.feed_seq, change.seq)
        self._go_on()
        return found

    def _own(self, change: Change) -> bool:
        """Whether this process made it, and knows all of it. What is of this session and no answer told of is
        a copy's of this process, which goes on under the same session until one of the two hears of that by
        a commit: who only reads may never. With a commit out it may be that one; if it is not, that one's
        answer is that there is a copy, and then everything is asked for again (`switch`)."""
        core, seq = self.core, change.seq
        if change.session != core.session or seq in core.surprises:
            return False
        return seq <= core.feed_seq or seq in core.ahead or bool(core.queue.sent)

    def _go_on(self) -> None:
        core = self.core
        if core.ahead:
            core.ahead = {seq for seq in core.ahead if seq > core.feed_seq}
            core.feed_goes_on()

    def _foreign(self, change: Change, found: list[Invalidation]) -> None:
        core = self.core
        inos = tuple(core.local(ino) for ino in change.inodes)
        names = tuple((core.local(parent), name) for parent, name in change.names)
        if core.asking:
            core.meanwhile.append((change.seq, names, inos, False))
        for ino in inos:
            node = core.nodes.by_ino.get(ino)
            if node is not None and node.seen < change.seq:
                node.stale = True
                node.unpage()
                found.extend(Invalidation(number, None) for number in core.nodes.numbers(node))
        for parent, name in names:
            node = core.nodes.by_ino.get(parent)
            if node is not None:
                if node.complete or name in node.entries:
                    node.names_stale.add(name)
                # Of a directory that was evicted the kernel may still know that there is no such name.
                found.append(Invalidation(parent, name))

    def forget_everything(self, head: int) -> list[Invalidation]:
        """The feed no longer reaches back to what this mount knows: everything is asked for again."""
        core = self.core
        found: list[Invalidation] = []
        for node in core.nodes.by_ino.values():
            if node.busy and not node.is_dir:
                continue
            node.stale = True
            node.unpage()
            if node.lookups:
                found.append(Invalidation(node.ino, None))
            if node.is_dir and not node.gone:
                found.extend(Invalidation(node.ino, name, ask=True) for name in node.entries)
                node.names_stale.update(node.entries)
                # A directory made here and not yet committed is known whole.
                node.complete = node.complete and node.born == 0 and node.ino != core.root_ino
        if core.asking:
            core.forgotten = max(core.forgotten, head)
        found += core.take_absent()
        return found
