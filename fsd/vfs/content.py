"""The content of one regular file in memory: what the server has, what the log has on top, what is flying.

*Base* is the newest content the server has acknowledged. Extents and limits (truncations) since the base lie
on top; reads show base + limits + extents. A *flight* is one content operation on its way: a frozen log
position, so that later writes do not disturb it. Flights of one file follow each other: the block list of
each is made from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from fsd.model.blocks import Part, Parts, clip, covered, encode, overlay, without
from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOCK, FULL_LIST_BLOCKS, KIB, PATCHES_MAX
from fsd.model.ops import CONTENT
from fsd.model.ops import Content as ContentOp
from fsd.model.plain import dataclass, field
from fsd.vfs.build import BlockTask, Built, Source, sendable
from fsd.vfs.extents import HOLE, Extents, Ref, Run
from fsd.wire.frame import Blob

WAITING: Final = "waiting"  # an earlier flight of the file is not made yet
MAKING: Final = "making"
READY: Final = "ready"  # has its operation, in the commit queue
DEAD: Final = "dead"  # replaced by a newer one, or the file went
REF_WEIGHT: Final = (
    2 * KIB
)  # of a change that needs no bytes, among those that make a file big enough to flush

Blocks = dict[int, Parts]


@dataclass(slots=True, eq=False)
class Flight:
    """One content operation being made. `frozen` is the log position it covers up to; `runs` the changes in
    it, `limit` the smallest size the file was cut to meanwhile. `opno` 0: not numbered yet. `unmade` is why
    blocks of it could not be made, `since` from when on (monotonic); `broken`: made as far as it is here, it
    can only be put aside."""

    key: int
    ino: int
    frozen: int
    size: int
    mtime: int
    ctime: int
    runs: list[Run]
    limit: int | None
    appended_from: int | None
    full: bool = False  # its operation must carry the whole block list
    opno: int = 0
    state: str = WAITING
    left: int = 0
    blocks: Blocks = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    blobs: list[Blob] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    unmade: IntegrityError | None = None
    since: float = 0.0
    broken: bool = False


class Content:
    """See the module. `base` None: the block list has not been asked for yet."""

    __slots__ = (
        "acked",
        "append_from",
        "base",
        "base_size",
        "changed",
        "cseq",
        "extents",
        "first",
        "flights",
        "frozen",
        "full",
        "hold",
        "limits",
        "since",
        "void",
        "window",
        "window_bytes",
        "writers",
    )

    def __init__(self, base: Blocks | None, size: int, cseq: int) -> None:
        self.base = base
        self.base_size = size
        self.cseq = cseq
        self.extents = Extents()
        self.limits: list[tuple[int, int]] = []  # (log position, size) of truncations since the base
        self.flights: list[Flight] = []
        self.changed = -1  # log position of the newest change
        self.frozen = 0  # log position up to which flights cover
        self.acked = 0  # log position up to which the server has it
        self.first: int | None = None  # oldest log position still needed
        self.since = 0.0  # when the oldest change not in a flight was made (monotonic)
        self.window = False  # there are changes since the last freeze
        self.window_bytes = 0
        self.append_from: int | None = None
        self.full = False  # the next operation must carry the whole block list
        self.void = False  # what is here is not what the server has, whatever the content seqs say
        self.hold = False  # truncated and still open for writing: an empty file is not to be published
        self.writers = 0

    @property
    def dirty(self) -> bool:
        """There are changes no flight covers."""
        return self.window

    @property
    def unclean(self) -> bool:
        """There are changes the server has not acknowledged."""
        return self.window or bool(self.flights)

    @property
    def needs_log(self) -> bool:
        """Whether anything of it is only in the log. A file without a name is not sent, so its changes may
        stay there after its last flight."""
        return self.unclean or bool(self.extents) or bool(self.limits)

    def tip(self) -> Blocks:
        """The block list the next flight is made from."""
        made = self.flights[-1].blocks if self.flights else self.base
        return {} if made is None else made

    # changes -----------------------------------------------------------------------------------------
    def wrote(
        self, start: int, end: int, pos: int, now: float, *, append: bool = False, ref: Ref | None = None
    ) -> None:
        """[start, end) was written and lies at `pos` of the log, or is what `ref` says. Call before the
        inode's size changes."""
        if not self.window:
            self._open_window(now)
            self.append_from = start if append else None
        elif not append:
            self.append_from = None
        self.extents.put(start, end, pos, ref)
        self.window_bytes += end - start if ref is None else REF_WEIGHT
        self.changed = pos

    def cut(self, size: int, pos: int, now: float) -> None:
        """The file was truncated (or extended) to `size`."""
        if not self.window:
            self._open_window(now)
        self.append_from = None
        if size == 0 and self.base is None:
            self.base = {}  # nothing of it is shown again; the flight will carry the whole list
        self.extents.cut(size)
        while self.limits and self.limits[-1][1] >= size and self.limits[-1][0] >= self.frozen:
            self.limits.pop()
        self.limits.append((pos, size))
        self.changed = pos

    def _open_window(self, now: float) -> None:
        self.window = True
        self.since = now

    def named(self) -> Iterator[bytes]:
        """Blobs that its changes name and that nothing on the server need refer to."""
        yield from (ref.hash for ref in self.extents.refs())
        for flight in self.flights:
            yield from (run.ref.hash for run in flight.runs if run.ref is not None and run.ref.hash)

    def limit(self, since: int = 0) -> int | None:
        """The smallest size the file was cut to at or behind log position `since`."""
        if not self.limits:
            return None
        return min((size for pos, size in self.limits if pos >= since), default=None)

    def needed(self) -> int | None:
        """The oldest log position with bytes or a truncation the server does not have. A flight's runs count
        though newer writes hide them: its blocks are made from them."""
        positions = [pos for pos, _ in self.limits]
        positions.extend(run.pos for flight in self.flights for run in flight.runs)
        oldest = self.extents.oldest()
        if oldest is not None:
            positions.append(oldest)
        return min(positions, default=None)

    # flights -----------------------------------------------------------------------------------------
    def freeze(self, key: int, ino: int, tail: int, size: int, mtime: int, ctime: int) -> Flight:
        """A flight of everything up to the log's `tail`. The caller plans it when `startable`."""
        flight = Flight(
            key=key,
            ino=ino,
            frozen=tail,
            size=size,
            mtime=mtime,
            ctime=ctime,
            runs=self.extents.since(self.frozen),
            limit=self.limit(self.frozen),
            appended_from=self.append_from,
            full=self.full,
        )
        self.flights.append(flight)
        self.frozen = tail
        self.window = False
        self.window_bytes = 0
        self.append_from = None
        return flight

    def startable(self, flight: Flight) -> bool:
        """Whether every earlier flight has its block list."""
        if flight.state != WAITING or flight is self.flights[0]:
            return flight.state == WAITING
        return all(f.state == READY for f in self.flights[: self.flights.index(flight)])

    def plan(self, flight: Flight) -> list[BlockTask]:
        """Set the flight's block list to what it starts from; returns the blocks to make."""
        at = self.flights.index(flight)
        last = self.flights[at - 1] if at else None
        blocks = dict(self.base or {}) if last is None else dict(last.blocks)
        if last is not None and last.broken:
            # The server never gets what this one starts from; where it covers what is gone it can be sent.
            flight.unmade, flight.since, flight.full = last.unmade, -math.inf, True
            flight.sources = list(last.sources)  # logged with it: who is killed now finds only the number
        if flight.limit is not None:
            for index in list(blocks):
                start = index * BLOCK
                if start + BLOCK <= flight.limit:
                    continue
                kept = clip(blocks[index], flight.limit - start) if start < flight.limit else ()
                if kept == blocks[index]:
                    continue
                flight.touched.add(index)
                if kept:
                    blocks[index] = kept
                else:
                    del blocks[index]
        flight.blocks = blocks
        if not blocks and len(flight.runs) == 1:
            only = _one_block(flight)
            if only is not None:  # most files of an untar are such
                flight.state = MAKING
                return [only]
        crowded = _put_refs(flight, blocks)
        if flight.unmade is not None:
            crowded |= {index for index, parts in blocks.items() if len(parts) > PATCHES_MAX + 1}
        by_block: dict[int, list[tuple[int, int, int]]] = {index: [] for index in crowded}
        for start, end, pos, ref in flight.runs:
            while start < end and ref is None:
                index = start // BLOCK
                stop = min(end, (index + 1) * BLOCK)
                by_block.setdefault(index, []).append((start - index * BLOCK, stop - start, pos))
                pos += stop - start
                start = stop
        flight.state = MAKING
        return [
            BlockTask(index, blocks.get(index, ()), tuple(runs), min(BLOCK, flight.size - index * BLOCK))
            for index, runs in sorted(by_block.items())
        ]

    @staticmethod
    def took(flight: Flight, made: list[Built]) -> None:
        """Some of the flight's blocks are made."""
        for built in made:
            flight.touched.add(built.block)
            if built.parts:
                flight.blocks[built.block] = built.parts
            else:
                flight.blocks.pop(built.block, None)
            flight.blobs.extend(built.blobs)
            flight.sources.extend(built.sources)

    @staticmethod
    def look(flight: Flight) -> None:
        """A flight is made: see whether the server can have it."""
        if flight.unmade is not None:
            flight.broken = not all(map(sendable, flight.blocks.values()))

    def landed(self, flight: Flight, seq: int) -> None:
        """The server has the flight's content (always the oldest flight), at `seq`."""
        self.flights.remove(flight)
        self.base = flight.blocks
        self.base_size = flight.size
        self.cseq = seq
        self.acked = flight.frozen
        self.extents.drop_before(flight.frozen)
        self.limits = [(pos, size) for pos, size in self.limits if pos >= flight.frozen]
        if not self.needs_log:
            self.first = None

    def refused(self, flight: Flight) -> Flight | None:
        """The server did not take the flight (always the oldest). Returns the one that takes its changes
        along, if it was frozen already; changes since go with the next. Without either they are given up:
        what the server has has to be asked for (`void`)."""
        self.flights.remove(flight)
        if self.flights:
            after = self.flights[0]
            after.full = True
            after.sources = [*flight.sources, *after.sources]
            return after
        if self.window:
            self.frozen = self.acked
            return None
        self.extents = Extents()
        self.limits = []
        self.first = None
        self.void = True
        return None

    # room --------------------------------------------------------------------------------------------
    def stored(self, start: int, end: int) -> int:
        """Bytes of [start, end) that are stored, here or there; the others are a hole. The block list is
        known."""
        total, at = 0, start
        for run in self.extents.runs(start, end):
            total += self._base_stored(at, run.start) + (0 if run.ref == HOLE else run.end - run.start)
            at = run.end
        return total + self._base_stored(at, end)

    def held(self, indexes: Iterable[int], size: int) -> int:
        """What is stored of these blocks of a file of `size` bytes."""
        ranges = ((at * BLOCK, min(size, (at + 1) * BLOCK)) for at in indexes)
        return sum(self.stored(start, end) for start, end in ranges if start < end)

    def _base_stored(self, start: int, end: int) -> int:
        if start >= end or not self.base:
            return 0
        first, last = start // BLOCK, (end - 1) // BLOCK
        if last - first < len(self.base):
            indexes: Iterable[int] = range(first, last + 1)
        else:
            indexes = [index for index in self.base if first <= index <= last]
        return sum(covered(self.shown(index), *_block_range(index, start, end)) for index in indexes)

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The stored parts of [start, end) in order: (start, end) pairs, which may touch. The block list is
        known."""
        at = start
        for run in self.extents.runs(start, end):
            yield from self._base_spans(at, run.start)
            if run.ref != HOLE:
                yield run.start, run.end
            at = run.end
        yield from self._base_spans(at, end)

    def indexes(self, start: int, end: int) -> Iterable[int]:
        """The blocks of the base that hold something of [start, end), and perhaps some that hold nothing,
        rising: little work also for a range that is nearly all hole."""
        first, last = start // BLOCK, (end - 1) // BLOCK
        base = self.base or {}
        if last - first <= 4 * len(base):
            return range(first, last + 1)
        return sorted(index for index in base if first <= index <= last)

    def _base_spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        if start >= end or not self.base:
            return
        for index in self.indexes(start, end):
            block = index * BLOCK
            done = max(start, block)
            for part in sorted(self.shown(index)):
                low, high = max(done, block + part.off), min(end, block + part.off + part.length)
                if low < high:
                    yield low, high
                    done = high

    # reads -------------------------------------------------------------------------------------------
    def shown(self, index: int) -> Parts:
        """What the base contributes to block `index`."""
        parts = (self.base or {}).get(index, ())
        if self.limits and parts:
            limit = min(size for _, size in self.limits)
            start = index * BLOCK
            if start + BLOCK > limit:
                parts = clip(parts, limit - start) if start < limit else ()
        return parts


def _one_block(flight: Flight) -> BlockTask | None:
    """The block to make where one run of the log within it is all there is of a file; else None."""
    start, end, pos, ref = flight.runs[0]
    index = start // BLOCK
    block = index * BLOCK
    if ref is not None or end > block + BLOCK:
        return None
    return BlockTask(index, (), ((start - block, end - start, pos),), min(BLOCK, flight.size - block))


def _put_refs(flight: Flight, blocks: Blocks) -> set[int]:
    """Apply the runs whose bytes are not in the log to the list of a flight. Returns the blocks that have too
    many parts now: they have to be made as one."""
    for start, end, _, ref in flight.runs:
        if ref is None:
            continue
        first, last = start // BLOCK, (end - 1) // BLOCK
        indexes: Iterable[int] = range(first, last + 1)
        if not ref.hash:  # what holds nothing needs no hole
            few = last - first < len(blocks)
            indexes = (
                [i for i in indexes if i in blocks] if few else [i for i in blocks if first <= i <= last]
            )
        for index in indexes:
            low, high = _block_range(index, start, end)
            parts = without(blocks.get(index, ()), low, high - low)
            if ref.hash:
                boff = ref.boff + index * BLOCK + low - start
                parts = overlay(parts, Part(low, high - low, boff, ref.hash))
            flight.touched.add(index)
            if parts:
                blocks[index] = parts
            else:
                blocks.pop(index, None)
    return {index for index in flight.touched if len(blocks.get(index, ())) > PATCHES_MAX + 1}


def _block_range(index: int, start: int, end: int) -> tuple[int, int]:
    """The part of the file's [start, end) in block `index`, counted from the block's beginning."""
    return max(0, start - index * BLOCK), min(BLOCK, end - index * BLOCK)


def operation(flight: Flight, base: int, *, full: bool | None = None, opno: int = 0) -> ContentOp:
    """The content operation of a made flight. `full` None: as the size says. `opno`: where the flight has no
    number yet."""
    if full is None:
        full = flight.full or flight.limit == 0 or flight.size <= FULL_LIST_BLOCKS * BLOCK
    if full:
        rows = tuple((i, encode(parts)) for i, parts in sorted(flight.blocks.items()) if parts)
    else:
        last = (flight.size + BLOCK - 1) // BLOCK
        rows = tuple((i, encode(flight.blocks.get(i, ()))) for i in sorted(flight.touched) if i < last)
    return ContentOp(
        opno or flight.opno,
        CONTENT,
        flight.ino,
        base,
        flight.size,
        rows,
        full,
        flight.appended_from,
        flight.mtime,
        flight.ctime,
    )


def part_rows(blocks: Blocks) -> list[tuple[int, bytes | None]]:
    """A block list for the log."""
    return [(index, encode(parts)) for index, parts in sorted(blocks.items())]


__all__ = ["Content", "Flight", "Part", "operation", "part_rows"]
