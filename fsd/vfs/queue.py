"""The operations the server does not have yet, in order of their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final, TypeAlias

from fsd.model.limits import COMMIT_BLOBS_MAX, COMMIT_OPS_MAX, UPLOAD_BLOBS_MAX
from fsd.model.ops import Content, Create, Link, Op, Rename, Rmdir, Unlink
from fsd.model.plain import dataclass
from fsd.vfs.build import Source
from fsd.vfs.content import Flight
from fsd.wire.frame import Blob

# Block lists travel in the header; one of a big file may be large, so few of them go together.
HEADER_BLOCKS_MAX = 100_000


# Inodes and names. Plain tuples: each operation is asked some ten times on its way.
Touched: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]
_NAMED: Final = (Create, Link, Unlink, Rmdir)


def touched(op: Op) -> Touched:
    """The inodes and names `op` changes."""
    if isinstance(op, _NAMED):
        parent = op.parent
        return (op.ino, parent), ((parent, op.name),)
    if isinstance(op, Rename):
        names = (op.parent, op.name), (op.new_parent, op.new_name)
        if op.parent == op.new_parent and not op.over:
            return (op.ino, op.parent), names
        inos = {op.ino, op.parent, op.new_parent, *((op.over,) if op.over else ())}
        return tuple(inos), names
    return (op.ino,), ()


def redirected(op: Op, old: int, new: int) -> Op:
    """`op` done to the inode `new` instead of `old` (a file)."""
    if op.ino == old:
        op = op._replace(ino=new)
    if isinstance(op, Rename) and op.over == old:
        op = op._replace(over=new)
    return op


@dataclass(slots=True, eq=False)
class Queued:
    """One operation on its way. `op` in local numbers; None while its number is only reserved for the
    content of `flight`. `pos` is the oldest log position it needs, `at` when it was queued (monotonic).
    `with_next`: it is a new file's making and goes only with what follows, the file's content (`partner`)."""

    opno: int
    op: Op | None
    pos: int
    at: float
    flight: Flight | None = None
    blobs: Sequence[Blob] = ()  # most operations have none, and many may wait
    sources: Sequence[Source] = ()
    with_next: bool = False

    @property
    def broken(self) -> bool:
        """Whether it is never sent but put aside: its content cannot be made."""
        return self.flight is not None and self.flight.broken


class CommitQueue:
    """Queued operations by rising number; those `sent` are at the front and not yet answered. `held`: a
    checkpoint is being made of the operations up to this number; later ones wait, and those before it are
    sent as they are. None: there is none."""

    def __init__(self) -> None:
        self._ops: dict[int, Queued] = {}
        self._by_ino: dict[int, dict[int, None]] = {}
        self.sent: list[Queued] = []
        self.held: int | None = None

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Queued]:
        return iter(self._ops.values())

    def add(self, queued: Queued, inos: Sequence[int] = ()) -> None:
        """Append; numbers rise. `inos`: those it touches, where they are known already."""
        opno, by_ino = queued.opno, self._by_ino
        self._ops[opno] = queued
        for ino in inos or self._inos(queued):
            numbers = by_ino.get(ino)
            if numbers is None:
                by_ino[ino] = {opno: None}
            else:
                numbers[opno] = None

    @staticmethod
    def _inos(queued: Queued) -> tuple[int, ...]:
        if queued.op is not None:
            return touched(queued.op)[0]
        assert queued.flight is not None
        return (queued.flight.ino,)

    def remove(self, opno: int, inos: Sequence[int] = ()) -> Queued:
        """`inos`: those it touches, where they are known already."""
        queued = self._ops.pop(opno)
        for ino in inos or self._inos(queued):
            left = self._by_ino.get(ino)
            if left is not None:
                left.pop(opno, None)
                if not left:
                    del self._by_ino[ino]
        if not self._ops:  # the tables keep the size of the longest queue until they are cleared
            self._ops.clear()
            self._by_ino.clear()
        return queued

    def redirect(self, old: int, new: int) -> None:
        """What is queued for inode `old` is done to `new`."""
        for opno in self._by_ino.pop(old, ()):
            queued = self._ops[opno]
            if queued.op is not None:
                queued.op = redirected(queued.op, old, new)
            self._by_ino.setdefault(new, {})[opno] = None
        if new in self._by_ino:
            self._by_ino[new] = dict.fromkeys(sorted(self._by_ino[new]))

    def get(self, opno: int) -> Queued | None:
        return self._ops.get(opno)

    def head(self) -> Queued | None:
        return next(iter(self._ops.values()), None)

    def of(self, ino: int) -> list[Queued]:
        """What is queued for an inode, in order."""
        return [self._ops[opno] for opno in sorted(self._by_ino.get(ino, ()))]

    def oldest_of(self, ino: int, default: int) -> int:
        """The oldest log position that anything queued for an inode needs."""
        return min((self._ops[opno].pos for opno in self._by_ino.get(ino, ())), default=default)

    def last(self, ino: int, but: Collection[int] = ()) -> Queued | None:
        """The newest operation queued for an inode, apart from the numbers in `but`."""
        for opno in reversed(self._by_ino.get(ino, {})):
            if opno not in but:
                return self._ops[opno]
        return None

    def cancellable(self, parent: int, name: bytes, ino: int) -> list[int] | None:
        """The operations that vanish when `name`, the only name of `ino`, is removed now: all that ever
        happened to it, if none was sent and the server never heard of it. None: it has to be told."""
        mine = self.of(ino)
        if (
            not mine
            or not isinstance(mine[0].op, Create)
            or (mine[0].op.parent, mine[0].op.name)
            != (
                parent,
                name,
            )
        ):
            return None
        if mine[0].opno <= self.fixed():
            return None
        if any(isinstance(q.op, Link | Unlink | Rmdir | Rename | Create) for q in mine[1:]):
            return None
        return [q.opno for q in mine]

    def fixed(self) -> int:
        """Operations up to this number are not changed any more: they were sent, or are in a checkpoint."""
        return max(self.sent[-1].opno if self.sent else 0, self.held or 0)

    def waits(self, queued: Queued) -> bool:
        """Whether an operation, or another that it goes with, is behind the cut of a checkpoint that is not
        made yet, or is not made."""
        last = (self.partner(queued) if queued.with_next else None) or queued
        if last.op is None:
            return True
        return self.held is not None and last.opno > self.held

    def partner(self, queued: Queued) -> Queued | None:
        """The content without which the making of a file does not go."""
        if not queued.with_next:
            return None
        found = self._ops.get(queued.opno + 1)
        if found is None or found.flight is None or queued.op is None or found.flight.ino != queued.op.ino:
            return None
        return found

    def after(self, batch: list[Queued]) -> Queued | None:
        """What follows the operations of `batch`, which are at the front."""
        return next(islice(self._ops.values(), len(batch), None), None)

    def batch(self, most: int) -> list[Queued]:
        """The operations of the next commit: from the head, up to the first that is not made yet, or is to be
        put aside. A making and its content are never apart, whatever `most` and their size."""
        taken: list[Queued] = []
        size = rows = count = 0
        most = min(most, COMMIT_OPS_MAX)
        for queued in self._ops.values():
            content = self.partner(queued) if queued.with_next else None
            if queued.broken or (content is not None and content.broken) or self.waits(queued):
                break
            second = bool(taken) and taken[-1].with_next and self.partner(taken[-1]) is queued
            if taken and not second and len(taken) + (1 if content is None else 2) > most:
                break
            if queued.blobs:
                size += sum(len(blob.stored) for blob in queued.blobs)
                count += len(queued.blobs)
            if isinstance(queued.op, Content):
                rows += len(queued.op.blocks)
            large = size > COMMIT_BLOBS_MAX or count > UPLOAD_BLOBS_MAX or rows > HEADER_BLOCKS_MAX
            if large and len(taken) > second:
                break
            taken.append(queued)
        if taken and self.partner(taken[-1]) is not None:
            taken.pop()
        return taken

    def oldest(self) -> Queued | None:
        """The one that needs the oldest log position."""
        return min(self._ops.values(), key=attrgetter("pos"), default=None)
