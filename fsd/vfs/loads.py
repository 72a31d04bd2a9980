"""What is asked of the server so that a parked call can go on: names, attributes, block lists, bytes.

Asking twice for the same thing is one question and one want. Questions that are open at the same time travel
together. An answer is older than what was committed since it was read: `core.meanwhile` says what that was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from stat import S_IFMT
from typing import Any, Final

from fsd.model.attrs import Attr, Entry
from fsd.model.errors import FsdError, HistoryChanged, IntegrityError, TooLarge, Unavailable
from fsd.model.limits import BLOBS_GET_MAX, BLOCK, DIR_INLINE_MAX, LISTING_MAX, NS_BATCH_MAX
from fsd.vfs.asking import Answered, Asked, AskJob, BlobJob, CacheJob, Key, Question, Together
from fsd.vfs.core import Core
from fsd.vfs.node import Inode
from fsd.vfs.types import Invalidation, Want
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, TREE

RETRY_FIRST: Final = 0.1
RETRY_MAX: Final = 2.0
BLOCKS_PAGE: Final = 4096
BLOCKS_TOGETHER: Final = 4  # pages, of one moment: 16 GiB
LIST_PAGE: Final = 4096
TREE_ENTRIES: Final = 5000  # decoding more would keep every thread waiting too long
READ_AHEAD: Final = 8  # blocks
LARGE_AFTER: Final = 3  # names without their directory, until it is no longer asked for
SOFT_WAIT: Final = 1.0  # seconds an answer is waited for where what is known would do without


class Loader:
    """See the module."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.open: dict[Key, Asked] = {}  # the newest of each key
        self.unanswered: set[Asked] = set()  # also those whose user did not wait, asked anew since
        self.waiting: list[Asked] = []
        self.blob_wants: dict[bytes, list[Want]] = {}
        self.wanted: dict[Want, set[bytes]] = {}
        self.blob_queue: list[bytes] = []
        self.retry_at: float | None = None
        self.delay = RETRY_FIRST
        self.questions = 0  # numbers those that are never shared
        self.too_big: set[int] = set()  # directories whose trees do not fit into one answer
        # How often a directory was too large to come with a name of it. Of several questions together not
        # all may bring one along, so once says little.
        self.large: dict[int, int] = {}
        self.endless: set[int] = set()  # directories of more names than are all loaded
        # Of these: whether they had a name when that was asked last, and when that was.
        self.seen: dict[int, tuple[bool, float]] = {}
        # When names (and listings, under b"") were last answered, while the change feed is silent (`watch`).
        self.watch = False
        self.fresh: dict[tuple[int, bytes], float] = {}

    # asking ------------------------------------------------------------------------------------------
    def _ask(
        self,
        key: Key,
        what: str,
        question: Question | Together,
        answered: Answered,
        *,
        soft: bool = False,
    ) -> Want:
        already = self.open.get(key)
        if already is not None and not already.want.finished:
            already.soft = already.soft and soft
            return already.want
        asked = Asked(key, question, self.core.want(what), answered, soft, self.core.now())
        self.open[key] = asked
        self.unanswered.add(asked)
        self.core.asking = len(self.unanswered)
        self.waiting.append(asked)
        return asked.want

    def name(self, parent: Inode, name: bytes, *, soft: bool = False) -> Want:
        """Load one name, and the whole directory with it where that is allowed."""
        large = self.large.get(parent.ino, 0) >= LARGE_AFTER
        alone = large or parent.complete or ("dir", parent.ino) in self.open
        whole = 0 if alone else DIR_INLINE_MAX
        question = (LOOKUP, self.core.wire.out(parent.ino), name, whole)

        def answered(answer: Any, seq: int) -> Question | None:
            self.looked_up(parent, name, answer, seq)
            if whole and answer is not None and answer[1] is None:
                self.large[parent.ino] = self.large.get(parent.ino, 0) + 1
            return None

        key = ("name", parent.ino, name) if alone else ("dir", parent.ino)
        return self._ask(key, "a name", question, answered, soft=soft)

    def directory(self, node: Inode, *, soft: bool = False) -> Want:
        """Load a whole directory. When its parent was listed before it, somebody walks the tree: what lies
        beside and below it comes in the same answer, where that is not too much; else in pages."""
        above = self.core.nodes.by_ino.get(node.where[0]) if node.where is not None else None
        if above is None or not above.complete or node.complete or node.ino in self.too_big:
            return self._list(node, soft=soft)
        return self._tree(node if above.ino in self.too_big else above, node, soft=soft)

    def _tree(self, top: Inode, node: Inode, *, soft: bool) -> Want:
        """Load directories breadth first from `top` on, `node` among them."""

        def answered(answer: Any, seq: int) -> Question | None:
            for wire, entries in answer or ():
                found = self.core.nodes.by_ino.get(self.core.local(wire))
                if found is not None and not found.complete:
                    self.listed(found, entries, seq)
            if not node.complete and not node.gone:
                self.too_big.add(top.ino)
            return None

        question = (TREE, self.core.wire.out(top.ino), TREE_ENTRIES)
        return self._ask(("tree", top.ino), "a tree", question, answered, soft=soft)

    def _list(self, node: Inode, *, soft: bool = False) -> Want:
        found: list[Entry] = []
        first = [-1]

        def answered(answer: Any, seq: int) -> Question | None:
            if answer is None:
                self.vanished(node, seq)
                return None
            entries, more = answer
            if first[0] < 0:
                first[0] = seq
            found.extend(entries)
            if more and len(found) > LISTING_MAX:
                self.endless.add(node.ino)
                # Others made more in it than are kept: it is read page by page from now on.
                node.complete = False
                return None
            if more and entries:
                return (LIST, wire, entries[-1].name, LIST_PAGE)
            self.listed(node, found, first[0])
            return None

        key = ("list", node.ino)
        wire = self.core.wire.out(node.ino)
        return self._ask(key, "a directory", (LIST, wire, b"", LIST_PAGE), answered, soft=soft)

    def page(
        self, node: Inode, key: Key, after: bytes, took: Callable[[Sequence[Entry], bool], None]
    ) -> Want:
        """Load the names behind `after`, without asking for more; `took` gets them and whether there are."""

        def answered(answer: Any, seq: int) -> Question | None:
            if answer is None:
                self.vanished(node, seq)
                took((), False)
                return None
            entries, more = answer
            self._enter(node, {entry.name: entry for entry in entries}, seq)
            took(entries, more)
            return None

        question = (LIST, self.core.wire.out(node.ino), after, LIST_PAGE)
        return self._ask(("page", node.ino, *key, after), "a page of a directory", question, answered)

    def any_name(self, node: Inode) -> Want:
        """Find out whether a directory that is not all in memory has a name that is not being removed."""

        def answered(answer: Any, seq: int) -> Question | None:
            entries, more = ((), False) if answer is None else answer
            for entry in entries:
                if entry.name not in node.names_pending or node.entries.get(entry.name) is not None:
                    self.seen[node.ino] = True, self.core.now()
                    return None
            if more and entries:
                return (LIST, wire, entries[-1].name, LIST_PAGE)
            made = any(node.entries.get(name) is not None for name in node.names_pending)
            self.seen[node.ino] = made, self.core.now()
            return None

        key = ("any", node.ino)
        wire = self.core.wire.out(node.ino)
        return self._ask(key, "whether a directory is empty", (LIST, wire, b"", LIST_PAGE), answered)

    def attrs(self, nodes: Sequence[Inode], *, soft: bool = False) -> Want:
        """Ask for attributes again."""
        return self._attrs(("attrs", nodes[0].ino), list(nodes)[:NS_BATCH_MAX], soft=soft)

    def _attrs(self, key: Key, nodes: list[Inode], *, soft: bool = False) -> Want:
        def answered(answer: Any, seq: int) -> Question | None:
            for node, attr in zip(nodes, answer):
                self.refreshed(node, attr, seq)
            return None

        inos = tuple(self.core.wire.out(node.ino) for node in nodes)
        return self._ask(key, "attributes", (ATTRS, inos), answered, soft=soft)

    def again(self, node: Inode) -> Want:
        """Ask what the server has of `node` now, by its name: a question of its own each time, sent after
        this call. Of the mount's root, and where no name is known, by its number."""
        self.questions += 1
        key = ("again", self.questions)
        above = self.core.nodes.by_ino.get(node.where[0]) if node.where is not None else None
        if above is None or node.where is None:
            return self._attrs(key, [node])
        return self._again_name(key, above, node.where[1])

    def again_absent(self, parent: Inode, name: bytes) -> Want:
        """The same for a name that is not known to exist."""
        self.questions += 1
        return self._again_name(("again", self.questions), parent, name)

    def _again_name(self, key: Key, parent: Inode, name: bytes) -> Want:
        def answered(answer: Any, seq: int) -> Question | None:
            self.looked_up(parent, name, answer, seq)
            return None

        question = (LOOKUP, self.core.wire.out(parent.ino), name, 0)
        return self._ask(key, "a name, at an open", question, answered)

    def block_list(self, node: Inode) -> Want:
        """Load the block list of a file of more than one block, and with it the attributes of that moment: of
        a file that another mount changes all the time two answers would never agree."""
        wire = self.core.wire.out(node.ino)
        found: dict[int, tuple[Any, ...]] = {}
        version, first = -1, 0

        def question() -> Together:
            end = min(max(first + 1, -(-node.size // BLOCK)), first + BLOCKS_TOGETHER * BLOCKS_PAGE)
            pages = ((BLOCKS, wire, at, BLOCKS_PAGE) for at in range(first, end, BLOCKS_PAGE))
            return Together(((ATTRS, (wire,)), *pages))

        def answered(answer: Any, seq: int) -> Together | None:
            nonlocal version, first
            if node.file().base is not None:
                return None  # it was truncated meanwhile: the answer is about what was there before
            (attr,), *lists = answer
            if attr is None or None in lists:
                self.vanished(node, seq)
                return None
            self.refreshed(node, attr, seq)
            content, cseq = node.file(), lists[0][0]
            if content.base is not None or cseq != content.cseq:
                # It is small by now; or what is here is not replaced, for changes of its own.
                node.stale |= content.base is None
                return None
            if version not in (-1, cseq):
                found.clear()
                version, first = -1, 0
                return question()
            version = cseq
            for _, rows in lists:
                found.update(rows)
            first += len(lists) * BLOCKS_PAGE
            if first * BLOCK < node.size:
                return question()
            content.base = {index: parts for index, parts in found.items() if parts}
            return None

        return self._ask(("blocks", node.ino), "a block list", question(), answered)

    # jobs --------------------------------------------------------------------------------------------
    def pump(self) -> None:
        """Put the open questions into jobs."""
        if self.retry_at is not None:
            return
        if isinstance(self.core.fenced, HistoryChanged):
            # The numbers mean something else there. What is known goes on being shown.
            self.core.down = True
            for asked in self.waiting:
                self._end(asked, None if asked.soft else self.core.fenced)
            self.waiting = []
        while self.waiting:
            count = batch = 0
            for asked in self.waiting:
                count += len(asked.question) if isinstance(asked.question, Together) else 1
                if count > NS_BATCH_MAX:
                    break
                batch += 1
            self.core.jobs.append(AskJob(tuple(self.waiting[:batch])))
            self.waiting = self.waiting[batch:]
        while self.blob_queue:
            hashes, self.blob_queue = (
                self.blob_queue[: BLOBS_GET_MAX // 16],
                self.blob_queue[BLOBS_GET_MAX // 16 :],
            )
            away = self.watch or self.core.down
            self.core.jobs.append(CacheJob(tuple(hashes), True) if away else BlobJob(tuple(hashes)))

    def watching(self, watch: bool) -> None:
        """The change feed is silent, or no longer. What is on its way may hang with it: the cache may have
        it."""
        self.watch = watch
        self.fresh.clear()
        coming = tuple(digest for digest in self.blob_wants if digest not in self.blob_queue)
        if watch and coming:
            self.core.jobs.append(CacheJob(coming, False))

    def finish_ask(self, job: AskJob, result: tuple[int, list[Any]] | FsdError) -> None:
        core = self.core
        if isinstance(result, TooLarge) and len(job.asked) > 1:
            # Together they are: a file of many patched blocks has megabytes of them.
            half = len(job.asked) // 2
            core.jobs += [AskJob(job.asked[:half]), AskJob(job.asked[half:])]
            return
        if not isinstance(result, FsdError) and len(result[1]) != len(job.asked):
            result = Unavailable("the server answered another number of questions than were asked")
        if isinstance(result, FsdError):
            self._retry(result)
            for asked in job.asked:
                if asked.soft:
                    self._end(asked, None)
                elif asked.want.finished or not result.retryable:
                    self._end(asked, result)
                else:
                    self.waiting.append(asked)
        else:
            self.delay = RETRY_FIRST
            core.down = False
            seq, answers = result
            core.seq = max(core.seq, seq)
            for asked, answer in zip(job.asked, answers):
                try:
                    further = asked.answered(answer, seq)
                except FsdError as exc:  # what it says cannot be: told to who asked, the others have theirs
                    self._end(asked, exc)
                    continue
                if further is None or self.open.get(asked.key) is not asked:
                    self._end(asked, None)
                else:
                    asked.question = further
                    self.waiting.append(asked)

    def _end(self, asked: Asked, error: FsdError | None) -> None:
        if self.open.get(asked.key) is asked:
            del self.open[asked.key]
        self.unanswered.discard(asked)
        self.core.asking = len(self.unanswered)
        if not self.unanswered:
            self.core.meanwhile.clear()
            self.core.forgotten = 0
        asked.want.end(error)

    def _retry(self, error: FsdError) -> None:
        self.core.reason = self.core.reason or error.message
        self.core.down = True
        if error.retryable:
            self.retry_at = self.core.now() + self.delay
            self.delay = min(RETRY_MAX, self.delay * 2)

    def wake(self, now: float) -> None:
        for asked in list(self.open.values()):
            if asked.soft and not asked.want.finished and now - asked.at >= SOFT_WAIT:
                # What is known has to do; the answer is taken when it comes.
                self.core.down = True
                asked.want.end()
        if self.retry_at is not None and self.retry_at <= now:
            self.retry_at = None
        self.pump()

    # answers -----------------------------------------------------------------------------------------
    def _since(self, seq: int) -> tuple[set[tuple[int, bytes]], set[int], set[tuple[int, bytes]], set[int]]:
        """What changed behind `seq` while the question was open: own names and inodes, foreign ones."""
        own_names: set[tuple[int, bytes]] = set()
        own_inos: set[int] = set()
        names: set[tuple[int, bytes]] = set()
        inos: set[int] = set()
        for at, changed_names, changed_inos, own in self.core.meanwhile:
            if at > seq:
                (own_names if own else names).update(changed_names)
                (own_inos if own else inos).update(changed_inos)
        return own_names, own_inos, names, inos

    def looked_up(self, parent: Inode, name: bytes, answer: Any, seq: int) -> None:
        if answer is None:
            self.vanished(parent, seq)
            return
        entry, entries = answer
        if entries is not None:
            self.listed(parent, entries, seq)
        else:
            self._enter(parent, {name: entry}, seq)

    def listed(self, parent: Inode, entries: Iterable[Entry], seq: int) -> None:
        """The whole directory, as of `seq`."""
        found: dict[bytes, Entry | None] = {entry.name: entry for entry in entries}
        for name in parent.entries:
            found.setdefault(name, None)
        self._enter(parent, found, seq)
        if seq < self.core.forgotten:
            return  # there may be other names by now
        parent.complete = True
        parent.listed = seq
        own, _, foreign, _ = self._since(seq)
        # This answer says nothing of names that changed since: what was to be asked again still is, and what
        # was not known when the feed told of it is asked for, too.
        parent.names_stale = {
            name for name in parent.names_stale if name in parent.names_pending or (parent.ino, name) in own
        }
        parent.names_stale.update(name for ino, name in foreign if ino == parent.ino)
        if self.watch:
            self.fresh[parent.ino, b""] = self.core.now()
        for name in [n for n, ino in parent.entries.items() if ino is None]:
            del parent.entries[name]

    def _enter(self, parent: Inode, found: dict[bytes, Entry | None], seq: int) -> None:
        core = self.core
        own_names, own_inos, foreign_names, foreign_inos = self._since(seq)
        now, old = core.now(), seq < core.forgotten
        for name, entry in found.items():
            if self.watch:
                self.fresh[parent.ino, name] = now
            keep = name in parent.names_pending or (parent.ino, name) in own_names
            before = parent.entries.get(name)
            if entry is not None:
                attr = core.local_attr(entry.attr)
                if not keep:
                    attr = self._apart(attr, entry.attr.ino)
                    node = self._install(attr, seq, now, keep=attr.ino in own_inos)
                    if old or attr.ino in foreign_inos:
                        node.stale = True
                    core.nodes.enter(parent, name, attr.ino)
            elif not keep:
                parent.entries[name] = None
            if before is not None and parent.entries[name] != before:
                core.unused[before] = None
                if name not in parent.names_stale:  # the first to tell: see `_install`
                    core.invalidations.append(Invalidation(parent.ino, name))
            if old or (parent.ino, name) in foreign_names:
                parent.names_stale.add(name)
            elif not keep:
                parent.names_stale.discard(name)

    def _install(self, attr: Attr, seq: int, now: float, *, keep: bool) -> Inode:
        """Have an inode as of `seq`. Of what an answer was the first to tell the feed says nothing any more:
        the kernel is made to forget what it was told before."""
        nodes = self.core.nodes
        known = nodes.by_ino.get(attr.ino)
        if known is not None and S_IFMT(known.mode) != S_IFMT(attr.mode):
            raise Unavailable(f"the server answers that inode {attr.ino} is of another type than it was")
        told = None
        if (
            known is not None
            and known.lookups
            and not known.stale
            and (known.born != attr.born or known.gone)
        ):
            told = known.shown()
        node = nodes.install(attr, seq, now, keep=keep)
        if told is not None and told != (shown := node.shown()):
            same = told[-1] == shown[-1]
            self.core.invalidations += (Invalidation(n, None, attr_only=same) for n in nodes.numbers(node))
        return node

    def _apart(self, attr: Attr, wire: int) -> Attr:
        """A file that was removed here and is still open, but was kept on the server: whoever has it open
        goes on with what they have, and the name means the server's file under another number."""
        there = self.core.nodes.by_ino.get(attr.ino)
        if there is None or not there.gone or there.is_dir or not (there.handles or there.busy):
            return attr
        alias = self.core.new_ino()
        self.core.alias(alias, wire)
        return attr._replace(ino=alias)

    def refreshed(self, node: Inode, attr: Attr | None, seq: int) -> None:
        """The server's present version of an inode; None: it is gone there."""
        _, own, _, foreign = self._since(seq)
        if attr is None:
            self.vanished(node, seq)
            node.stale = node.ino in foreign or seq < self.core.forgotten
            return
        attr = self.core.local_attr(attr)
        if self.core.nodes.by_ino.get(node.ino) is node:
            attr = attr._replace(ino=node.ino)  # one inode may be here under two numbers (`differ.becomes`)
        self._install(attr, seq, self.core.now(), keep=node.ino in own)
        if node.ino in foreign or seq < self.core.forgotten:
            node.stale = True

    def vanished(self, node: Inode, seq: int) -> None:
        """The server had no such inode as of `seq`: that says nothing of one it got since, from here or by a
        restore."""
        _, own, _, foreign = self._since(seq)
        if node.ino == self.core.root_ino or node.busy or node.ino in own or node.ino in foreign:
            return
        node.gone, node.stale, node.nlink = True, False, 0
        node.stamp += 1
        above = self.core.nodes.by_ino.get(node.where[0]) if node.where is not None else None
        if above is not None and node.where is not None and above.entries.get(node.where[1]) == node.ino:
            above.names_stale.add(node.where[1])
            self.core.invalidate(above.ino, node.where[1])
        if node.is_dir:
            node.entries.clear()
            node.complete = True

    # bytes -------------------------------------------------------------------------------------------
    def want_blobs(self, hashes: Iterable[bytes]) -> Want:
        """Load blobs that are not in memory."""
        want = self.core.want("file data")
        lacking = {digest for digest in hashes if self.core.recent.get(digest) is None}
        if not lacking:
            want.end()
            return want
        self.wanted[want] = set(lacking)
        for digest in lacking:
            waiting = self.blob_wants.get(digest)
            if waiting is None:
                self.blob_wants[digest] = [want]
                self.blob_queue.append(digest)
            else:
                waiting.append(want)
        return want

    def comes(self, digest: bytes) -> bool:
        """Whether a blob is at hand or on its way."""
        return digest in self.core.recent or digest in self.blob_wants

    def ahead(self, hashes: Iterable[bytes]) -> None:
        """Load blobs nobody waits for yet."""
        for digest in hashes:
            if not self.comes(digest):
                self.blob_wants[digest] = []
                self.blob_queue.append(digest)

    def finish_blobs(self, job: BlobJob, result: dict[bytes, bytes | IntegrityError] | FsdError) -> None:
        if isinstance(result, FsdError):
            self._retry(result)
            for digest in job.hashes:
                waiting = [w for w in self.blob_wants.pop(digest, []) if not w.finished]
                if waiting and result.retryable:
                    self.blob_wants[digest] = waiting
                    self.blob_queue.append(digest)
                    continue
                self._lost(waiting, result)
            return
        self.delay = RETRY_FIRST
        for digest, data in result.items():
            if isinstance(data, IntegrityError):
                self._lost(self.blob_wants.pop(digest, []), data)
        self._have({digest: data for digest, data in result.items() if isinstance(data, bytes)})

    def _lost(self, waiting: list[Want], error: FsdError) -> None:
        for want in waiting:
            self.wanted.pop(want, None)
            want.end(error)

    def finish_cached(self, job: CacheJob, result: dict[bytes, bytes] | FsdError) -> None:
        """What the cache has; the rest is fetched."""
        found = {} if isinstance(result, FsdError) else result
        self._have(found)
        rest = tuple(digest for digest in job.hashes if digest not in found and digest in self.blob_wants)
        if job.then and rest:
            self.core.jobs.append(BlobJob(rest))

    def _have(self, result: dict[bytes, bytes]) -> None:
        for digest, data in result.items():
            self.core.recent.keep(digest, data)
            for want in self.blob_wants.pop(digest, []):
                left = self.wanted.get(want)
                if left is None:
                    continue
                left.discard(digest)
                if not left:
                    del self.wanted[want]
                    want.end()

    def next_deadline(self) -> float | None:
        return self.retry_at
