"""From runs of the log to blobs and block lists: what a flush does off the volume's thread.

Everything here is plain data in, plain data out: (file, offset, length) of the log, never an inode, so that
it could run in another process. Any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from fsd.model.blocks import HASH_LEN, Part, Parts, overlay, pieces
from fsd.model.errors import IntegrityError
from fsd.model.limits import KIB, PATCHES_MAX, SMALL_FILE, UPLOAD_MAX
from fsd.model.plain import dataclass
from fsd.remote.api import Remote
from fsd.vfs.log import Log, segment_of
from fsd.vfs.types import BULK, Cache
from fsd.wire.frame import Blob, make_blob, make_blobs, open_all
from fsd.wire.sha import AT_ONCE, sha256_all

UPLOAD_TIMEOUT: Final = 120.0
FETCH_TIMEOUT: Final = 60.0
# Below this a block is always written whole: a patch would save nothing and slow every read.
PATCH_MIN_BLOCK: Final = 64 * KIB
PACK_BLOBS: Final = 1024  # of one upload, and of a flight that travels in its commit
PACK_TARGET: Final = UPLOAD_MAX // 2  # smaller background bodies keep an fsync's latency low
# A name no blob has: in the parts of a block it stands for changes that cannot be read from the log any more.
LOST: Final = b"\xff" * HASH_LEN
_PAGE: Final = 4096  # what is unreadable together: a disk's pages, so those of the log's files

# Where the bytes of a blob come from, kept so that it can be sent again: a list of these, in order.
FROM_LOG: Final = 0  # (FROM_LOG, position, length)
FROM_BLOB: Final = 1  # (FROM_BLOB, hash, offset, length)
ZEROS: Final = 2  # (ZEROS, length)
Piece = tuple[int, int, int] | tuple[int, bytes, int, int] | tuple[int, int]


class Source(NamedTuple):
    """How to make the blob `hash` again."""

    hash: bytes
    pieces: tuple[Piece, ...]


class BlockTask(NamedTuple):
    """One block to make. `parts` is what it held (already clipped), `runs` the changes inside the block as
    (offset, length, log position) in order, disjoint; `length` the bytes of the block the file spans. A block
    without runs that has too many parts is to be made one blob."""

    block: int
    parts: Parts
    runs: tuple[tuple[int, int, int], ...]
    length: int

    def needs_base(self) -> bool:
        """Whether making it reads bytes that are not in the log."""
        return bool(self.parts) and not self.patched() and not self._covered()

    def patched(self) -> bool:
        """Whether the changes become patches: little of a big block, and room among its patches."""
        if self.length < PATCH_MIN_BLOCK or sum(run[1] for run in self.runs) * 4 >= self.length:
            return False
        return len(self.parts) + len(_joined(self.runs)) <= PATCHES_MAX + 1

    def _covered(self) -> bool:
        joined = _joined(self.runs)
        end = max((p.off + p.length for p in self.parts), default=0)
        return len(joined) == 1 and joined[0][0][0] == 0 and joined[0][-1][0] + joined[0][-1][1] >= end


class Built(NamedTuple):
    """A made block: its new parts, with the blobs that are new, how to make them again, and their bytes
    (only where it was made on the volume's thread)."""

    block: int
    parts: Parts
    blobs: tuple[Blob, ...]
    sources: tuple[Source, ...]
    raw: tuple[bytes, ...]


class _Whole(NamedTuple):
    """A block on its way to be one blob."""

    block: int
    plan: tuple[Piece, ...]
    data: bytes


Made: TypeAlias = tuple[int, list[Built] | IntegrityError]  # by flight key
NOTHING: Final[Mapping[bytes, Source]] = MappingProxyType({})
Unit: TypeAlias = tuple[int, tuple[BlockTask, ...]]  # flight key, blocks to make
Fetch = Callable[[Sequence[bytes]], dict[bytes, bytes]]


def _joined(runs: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Runs grouped so that each group is contiguous in the file."""
    groups: list[list[tuple[int, int, int]]] = []
    for run in runs:
        if groups and groups[-1][-1][0] + groups[-1][-1][1] == run[0]:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def build(task: BlockTask, log: Log, fetch: Fetch) -> Built:
    """Make one block. `fetch` is called only when `task.needs_base()`."""
    return next(_finished([_begun(task, log, fetch)]))


def _begun(task: BlockTask, log: Log, fetch: Fetch) -> Built | _Whole:
    """The block, or what becomes one blob: those of a job are hashed together."""
    if not task.runs and len(task.parts) <= PATCHES_MAX + 1:
        return Built(task.block, task.parts, (), (), ())
    return _patches(task, log) if task.patched() else _whole(task, log, fetch)


def _finished(begun: list[Built | _Whole]) -> Iterator[Built]:
    """Takes them out of `begun`: else the bytes of eight blocks would stay beside their blobs."""
    digests = iter(sha256_all([one.data for one in begun if isinstance(one, _Whole)]))
    while begun:
        one = begun.pop(0)
        if isinstance(one, _Whole):
            blob = make_blob(one.data, digest=next(digests))
            part, source = Part(0, len(one.data), 0, blob.hash), Source(blob.hash, one.plan)
            one = Built(one.block, (part,), (blob,), (source,), (one.data,))
        yield one


# The new small files of a job are made together: an untar's are most of what a flush has to do. One after the
# other each costs a read of the log, a hash and a compression, and with each of them the thread gives up the
# interpreter's lock and asks for it again, beside the thread that serves the kernel. Their bytes lie close
# together in the log.
TOGETHER: Final = 32  # files, and
_BYTES: Final = 128 * KIB  # of them
_SPAN: Final = 2  # times their bytes is the stretch of the log that is read for them, at most


def grouped(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    """The units in order: several small new files, or one of another kind."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        length = _small(unit[1])
        if group and (not length or len(group) == TOGETHER or size + length > _BYTES):
            yield group
            group, size = [], 0
        if length:
            group.append(unit)
            size += length
        else:
            yield (unit,)
    if group:
        yield group


def _small(tasks: tuple[BlockTask, ...]) -> int:
    """How many bytes a file has that is one block, all of it from the log; 0: it is no such file."""
    if len(tasks) != 1:
        return 0
    task = tasks[0]
    if task.parts or not 0 < task.length <= SMALL_FILE:
        return 0
    at = 0
    for start, length, _ in task.runs:
        if start != at:
            return 0
        at += length
    return at if at == task.length else 0


def make_small(units: Sequence[Unit], log: Log) -> list[Built] | None:
    """The block of each of `units`, which `grouped` gave as one. None: not all of it can be read; what can be
    is found one by one."""
    try:
        datas = _read([tasks[0].runs for _, tasks in units], log)
    except IntegrityError:
        return None
    blobs = make_blobs(datas, sha256_all(datas))
    made = []
    for (_, (task,)), data, blob in zip(units, datas, blobs, strict=True):
        if not data.strip(b"\0"):
            made.append(Built(task.block, (), (), (), ()))
            continue
        source = Source(blob.hash, tuple([(FROM_LOG, pos, length) for _, length, pos in task.runs]))
        made.append(Built(task.block, (Part(0, len(data), 0, blob.hash),), (blob,), (source,), ()))
    return made


def _read(files: Sequence[tuple[tuple[int, int, int], ...]], log: Log) -> list[bytes]:
    """The bytes of each, of one read where they lie together."""
    runs = [run for file in files for run in file]
    low = min(pos for _, _, pos in runs)
    high = max(pos + length for _, length, pos in runs)
    size = sum(length for _, length, _ in runs)
    if segment_of(low) != segment_of(high) or high - low > _SPAN * size:
        return [b"".join([log.read(pos, length) for _, length, pos in file]) for file in files]
    stretch = log.read(low, high - low)
    return [
        stretch[file[0][2] - low : file[0][2] - low + file[0][1]]
        if len(file) == 1
        else b"".join([stretch[pos - low : pos - low + length] for _, length, pos in file])
        for file in files
    ]


def _patches(task: BlockTask, log: Log) -> Built:
    parts, blobs, sources, raw = task.parts, [], [], []
    for group in _joined(task.runs):
        start = group[0][0]
        data = b"".join(log.read(pos, length) for _, length, pos in group)
        blob = make_blob(data)
        blobs.append(blob)
        raw.append(data)
        sources.append(Source(blob.hash, tuple((FROM_LOG, pos, length) for _, length, pos in group)))
        parts = overlay(parts, Part(start, len(data), 0, blob.hash))
    return Built(task.block, parts, tuple(blobs), tuple(sources), tuple(raw))


def _whole(task: BlockTask, log: Log, fetch: Fetch) -> Built | _Whole:
    end = max((run[0] + run[1] for run in task.runs), default=0)
    end = max(end, max((p.off + p.length for p in task.parts), default=0))
    plan: list[Piece] = []
    at = 0
    groups = [*task.runs, (end, 0, 0)]
    for start, length, pos in groups:
        if at < start:
            plan.extend(base_plan(task.parts, at, start - at))
        if length:
            plan.append((FROM_LOG, pos, length))
        at = start + length
    data = assemble(plan, log, fetch)
    if not data.strip(b"\0"):
        return Built(task.block, (), (), (), ())
    return _Whole(task.block, tuple(plan), data)


def salvage(task: BlockTask, log: Log) -> Built:
    """A block that cannot be made, as far as it is here: its changes as patches on what it held, however
    many. `sendable` tells whether the server can have it so; else its flight is put aside."""
    parts, blobs, sources = task.parts, [], []
    for group in _joined(task.runs):
        for start, length, data, plan in _legible(group, log):
            digest = LOST
            if data is not None:
                blob = make_blob(data)
                blobs.append(blob)
                sources.append(Source(blob.hash, plan))
                digest = blob.hash
            parts = overlay(parts, Part(start, length, 0, digest))
    return Built(task.block, parts, tuple(blobs), tuple(sources), ())


def _legible(
    group: Sequence[tuple[int, int, int]], log: Log
) -> Iterator[tuple[int, int, bytes | None, tuple[Piece, ...]]]:
    """A contiguous change: (offset, length, bytes, where they are from) in one, or where the log cannot be
    read in pages, without bytes for those that are lost."""
    try:
        data = b"".join(log.read(pos, length) for _, length, pos in group)
        yield group[0][0], len(data), data, tuple((FROM_LOG, pos, length) for _, length, pos in group)
        return
    except IntegrityError:
        pass
    for start, length, pos in group:
        at = 0
        while at < length:
            size = min(_PAGE - (pos + at) % _PAGE, length - at)
            page: bytes | None
            try:
                page = log.read(pos + at, size)
            except IntegrityError:
                page = None
            yield start + at, size, page, ((FROM_LOG, pos + at, size),)
            at += size


def sendable(parts: Parts) -> bool:
    """Whether the server can have a block as these parts."""
    return len(parts) <= PATCHES_MAX + 1 and all(part.hash != LOST for part in parts)


def base_plan(parts: Parts, off: int, length: int) -> list[Piece]:
    """Bytes [off, off+length) of a block as disjoint pieces of its blobs and zeros, in order."""
    edges = sorted({0, length, *(e for p in pieces(parts, off, length) for e in (p.at, p.at + p.length))})
    found = pieces(parts, off, length)
    plan: list[Piece] = []
    for low, high in pairwise(edges):
        top = next((p for p in reversed(found) if p.at <= low and p.at + p.length >= high), None)
        if top is None:
            plan.append((ZEROS, high - low))
        else:
            plan.append((FROM_BLOB, top.hash, top.boff + low - top.at, high - low))
    return plan


def assemble(plan: Sequence[Piece], log: Log, fetch: Fetch) -> bytes:
    """The bytes a list of pieces stands for."""
    wanted = [piece[1] for piece in plan if piece[0] == FROM_BLOB and isinstance(piece[1], bytes)]
    have = fetch(list(dict.fromkeys(wanted))) if wanted else {}
    out = []
    for piece in plan:
        if len(piece) == 4:
            _, digest, boff, length = piece
            out.append(have[digest][boff : boff + length])
        elif len(piece) == 3:
            out.append(log.read(piece[1], piece[2]))
        else:
            out.append(bytes(piece[1]))
    return b"".join(out)


def from_log(source: Source, log: Log) -> bytes | None:
    """The bytes of a blob that was made of the log alone, unverified; None for another."""
    if any(piece[0] == FROM_BLOB for piece in source.pieces):
        return None
    return assemble(source.pieces, log, lambda wanted: {})


def fetcher(
    remote: Remote, cache: Cache, log: Log | None = None, known: Mapping[bytes, Source] | None = None
) -> Fetch:
    """Verified blob bytes: from the cache, by making those of `known` again from the log (flights that are
    made but not committed: the server need not have their blobs yet), else from the server. Raises
    `IntegrityError` when nobody has one."""

    def fetch(wanted: Sequence[bytes]) -> dict[bytes, bytes]:
        lineage = _Lineage(remote, cache, log, known or NOTHING)
        found = lineage.make(wanted)
        absent = [digest for digest in wanted if digest not in found]
        if absent:
            raise IntegrityError(
                f"the server lacks {len(absent)} blobs, {absent[0].hex()} the first",
                hint="what is here of the files that need them: `fsd recover --export DIR`",
            )
        return found

    return fetch


def first_sources(sources: Iterable[Source]) -> dict[bytes, Source]:
    """How to make each blob again, of sources in the order they were made. The first one counts: content that
    was there before has its old name, and what it is made of then may be made of that name."""
    known: dict[bytes, Source] = {}
    for source in sources:
        known.setdefault(source.hash, source)
    return known


class _Lineage:
    """Some blobs and all they are made of, for one call.

    A blob's sources name others, as far back as the server has answered no commit: a chain as long as it was
    away, so nothing here recurses. And they can name each other in a circle: what was A, then B, then A again
    has A made of B and B made of A. At least one blob of a circle is the server's then (`first_sources`).
    """

    def __init__(self, remote: Remote, cache: Cache, log: Log | None, known: Mapping[bytes, Source]) -> None:
        self._remote, self._cache, self._log = remote, cache, log
        self._known: Mapping[bytes, Source] = known if log is not None else NOTHING
        self._have: dict[bytes, bytes] = {}
        self._of: dict[bytes, set[bytes]] = {}  # a blob -> those it is made of
        self._users: dict[bytes, set[bytes]] = {}  # a blob -> those made of it that are not made yet
        self._made: set[bytes] = set()
        self._wanted: set[bytes] = set()

    def make(self, wanted: Sequence[bytes]) -> dict[bytes, bytes]:
        """Those of `wanted` that are to be had."""
        self._wanted = set(wanted)
        self._look_back(wanted)
        self._ask([digest for digest in self._of if digest not in self._known])
        self._make_all()
        if not self._wanted <= self._have.keys():
            # A circle, or a segment of the log that went: then its commit was answered meanwhile.
            self._ask([one for one in self._of if one not in self._have and one not in self._made])
            self._make_all()
        return {digest: self._have[digest] for digest in wanted if digest in self._have}

    def _look_back(self, wanted: Sequence[bytes]) -> None:
        """What has to be made or asked for, back to what is at hand."""
        waiting = list(wanted)
        while waiting:
            digest = waiting.pop()
            if digest in self._of or digest in self._have:
                continue
            data = self._cache.get(digest)
            if data is not None:
                self._have[digest] = data
                continue
            source = self._known.get(digest)
            named = set() if source is None else {piece[1] for piece in source.pieces if len(piece) == 4}
            self._of[digest] = named
            for one in named:
                self._users.setdefault(one, set()).add(digest)
            waiting.extend(named)

    def _ask(self, digests: Sequence[bytes]) -> None:
        """Take from the server what it has of these."""
        for at in range(0, len(digests), 256):
            got, _ = self._remote.blobs(digests[at : at + 256], FETCH_TIMEOUT)
            for blob, data in zip(got, open_all(got), strict=True):
                self._have[blob.hash] = data
                self._cache.put(blob.hash, data)

    def _make_all(self) -> None:
        """Make what can be made now, and let go of what nothing more is made of."""
        ready = [digest for digest in self._of if self._can(digest)]
        while ready:
            digest = ready.pop()
            data = self._again(self._known[digest]) if self._can(digest) else None
            if data is None:
                continue
            self._have[digest] = data
            self._made.add(digest)
            for one in self._of[digest]:
                self._users[one].discard(digest)
                if not self._users[one] and one not in self._wanted:
                    self._have.pop(one, None)
            ready.extend(user for user in self._users.get(digest, ()) if self._can(user))

    def _can(self, digest: bytes) -> bool:
        """Whether it is to be made, and all it is made of is there."""
        if digest not in self._known or digest in self._made or digest in self._have:
            return False
        return self._of[digest] <= self._have.keys()

    def _again(self, source: Source) -> bytes | None:
        """Its bytes, or None where the log does not have them any more."""
        assert self._log is not None, "without a log nothing is known"
        try:
            data = assemble(source.pieces, self._log, lambda named: {one: self._have[one] for one in named})
        except IntegrityError:
            return None
        return data if hashlib.sha256(data).digest() == source.hash else None


def each(fetch: Fetch, wanted: Sequence[bytes]) -> dict[bytes, bytes | IntegrityError]:
    """The blobs, or for each by itself why there is none."""
    try:
        return dict(fetch(wanted))
    except IntegrityError:
        pass
    found: dict[bytes, bytes | IntegrityError] = {}
    for digest in wanted:
        try:
            found |= fetch([digest])
        except IntegrityError as exc:
            found[digest] = exc
    return found


@dataclass(frozen=True, slots=True, eq=False)
class BuildJob:
    """Make the blocks of some flights, and upload their blobs when they are more than `inline_max` bytes.

    `units` are (flight key, tasks). Returns for each unit the `Built`s, without blobs where they were
    uploaded, or why it cannot be made: something it needs is gone. Of flights in `anyhow` what is here is
    made all the same (`salvage`).
    """

    units: tuple[Unit, ...]
    log: Log
    inline_max: int
    known: dict[bytes, Source]  # what flights before these made and the server may not have yet
    anyhow: frozenset[int] = frozenset()
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> list[Made]:
        fetch = fetcher(remote, cache, self.log, self.known)
        sending = _Sending(remote)
        done: list[Made] = []
        for units in grouped(self.units):
            small = make_small(units, self.log) if len(units) > 1 else None
            if small is not None:
                done += [(key, [built]) for (key, _), built in zip(units, small, strict=True)]
                sending.add(small)
                continue
            for key, tasks in units:
                done.append((key, self._made(key, tasks, fetch, sending)))
        if sending.rest(self.inline_max):
            done = [(key, _bare(made)) for key, made in done]
        return done

    def _made(
        self, key: int, tasks: tuple[BlockTask, ...], fetch: Fetch, sending: _Sending
    ) -> list[Built] | IntegrityError:
        made: list[Built] = []
        for at in range(0, len(tasks), AT_ONCE):
            try:
                some = self._make(tasks[at : at + AT_ONCE], fetch, anyhow=key in self.anyhow)
            except IntegrityError as exc:
                return exc
            made += some
            sending.add(some)
        return made

    def _make(self, tasks: Sequence[BlockTask], fetch: Fetch, *, anyhow: bool) -> list[Built]:
        begun: list[Built | _Whole] = []
        for task in tasks:
            try:
                begun.append(_begun(task, self.log, fetch))
            except IntegrityError:
                if not anyhow:
                    raise
                begun.append(salvage(task, self.log))
        return [built._replace(raw=()) for built in _finished(begun)]


class _Sending:
    """The blobs of a job: they are uploaded as they come, once they are more than a body."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._waiting: list[Blob] = []
        self._size = 0
        self._uploaded = False

    def add(self, made: Sequence[Built]) -> None:
        for built in made:
            self._waiting += built.blobs
            self._size += sum([len(blob.stored) for blob in built.blobs])
        if self._size >= PACK_TARGET or len(self._waiting) >= PACK_BLOBS:
            self._upload()

    def rest(self, inline_max: int) -> bool:
        """Whether all were uploaded; else they are at most `inline_max` bytes and go with their commit."""
        if self._waiting and (self._uploaded or self._size > inline_max):
            self._upload()
        return self._uploaded

    def _upload(self) -> None:
        self._remote.upload(self._waiting, UPLOAD_TIMEOUT)
        self._waiting, self._size, self._uploaded = [], 0, True


def _bare(made: list[Built] | IntegrityError) -> list[Built] | IntegrityError:
    if isinstance(made, IntegrityError):
        return made
    return [built._replace(blobs=()) for built in made]


@dataclass(frozen=True, slots=True, eq=False)
class ResendJob:
    """Make blobs again from their sources and upload them: the server said `missing`."""

    sources: tuple[Source, ...]
    log: Log
    known: dict[bytes, Source]  # of all that is not committed
    lane: str = BULK

    def run(self, remote: Remote, cache: Cache) -> None:
        fetch = fetcher(remote, cache, self.log, self.known)
        waiting: list[Blob] = []
        size = 0
        for source in self.sources:
            blob = make_blob(assemble(source.pieces, self.log, fetch))
            if blob.hash != source.hash:
                raise IntegrityError(f"the log no longer holds the bytes of blob {source.hash.hex()}")
            waiting.append(blob)
            size += len(blob.stored)
            if size >= PACK_TARGET or len(waiting) >= PACK_BLOBS:
                remote.upload(waiting, UPLOAD_TIMEOUT)
                waiting, size = [], 0
        if waiting:
            remote.upload(waiting, UPLOAD_TIMEOUT)
