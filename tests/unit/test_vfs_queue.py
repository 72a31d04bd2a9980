"""The commit queue and the map of inode numbers, without a log or a server."""

from __future__ import annotations

from sys import getsizeof

import pytest

from fsd.model.attrs import Attr
from fsd.model.limits import COMMIT_BLOBS_MAX, COMMIT_OPS_MAX, MIB
from fsd.model.ops import (
    CONTENT,
    CREATE,
    LINK,
    RENAME,
    SETATTR,
    UNLINK,
    Content,
    Create,
    Link,
    Op,
    Rename,
    Setattr,
    Unlink,
)
from fsd.vfs.node import FIT_EVERY, Inode, Nodes
from fsd.vfs.queue import HEADER_BLOCKS_MAX, CommitQueue, Queued, touched
from fsd.vfs.wiremap import WireMap
from fsd.wire.frame import Blob


def create(opno: int, ino: int, name: bytes = b"f", parent: int = 1) -> Create:
    return Create(opno, CREATE, parent, name, ino, 0o100644, 0, 0, 0, None, 5)


def chmod(opno: int, ino: int) -> Setattr:
    return Setattr(opno, SETATTR, ino, 0o600, None, None, None, None, 5)


def queue_of(*ops: Op) -> CommitQueue:
    queue = CommitQueue()
    for op in ops:
        queue.add(Queued(op.opno, op, op.opno, 0.0))
    return queue


def test_a_file_that_never_left_vanishes() -> None:
    queue = queue_of(create(1, 10), create(2, 11, b"g"), chmod(3, 10))
    assert queue.cancellable(1, b"f", 10) == [1, 3]


def test_a_file_that_was_sent_does_not_vanish() -> None:
    queue = queue_of(create(1, 10), chmod(2, 10))
    queue.sent = queue.batch(1)
    assert queue.cancellable(1, b"f", 10) is None


def test_a_file_the_server_knows_does_not_vanish() -> None:
    assert queue_of(chmod(1, 10)).cancellable(1, b"f", 10) is None
    assert CommitQueue().cancellable(1, b"f", 10) is None


def test_a_file_that_was_renamed_or_linked_does_not_vanish() -> None:
    renamed = Rename(2, RENAME, 1, b"f", 10, 1, b"h", 0, 0, 0, 5)
    assert queue_of(create(1, 10), renamed).cancellable(1, b"h", 10) is None
    linked = Link(2, LINK, 10, 1, b"h", 5)
    gone = Unlink(3, UNLINK, 1, b"f", 10, 0, 5)
    assert queue_of(create(1, 10), linked, gone).cancellable(1, b"h", 10) is None


def test_a_directory_with_something_in_it_does_not_vanish() -> None:
    queue = queue_of(create(1, 10), create(2, 11, b"x", parent=10))
    assert queue.cancellable(1, b"f", 10) is None


def test_a_batch_ends_before_what_is_not_made() -> None:
    queue = queue_of(create(1, 10))
    queue.add(Queued(2, None, 2, 0.0, flight=FakeFlight(10)))  # type: ignore[arg-type]
    queue.add(Queued(3, create(3, 11, b"g"), 3, 0.0))
    assert [queued.opno for queued in queue.batch(100)] == [1]


def pair(opno: int, ino: int, rows: int = 1, size: int = 0) -> list[Queued]:
    """A making that goes with its content, and that."""
    blocks = tuple((index, None) for index in range(rows))
    content = Content(opno + 1, CONTENT, ino, 0, 5, blocks, True, None, 5, 5)
    blobs = [Blob(b"h" * 32, 0, size, b"x" * size)] if size else []
    return [
        Queued(opno, create(opno, ino, b"n%d" % ino), opno, 0.0, with_next=True),
        Queued(opno + 1, content, opno, 0.0, FakeFlight(ino), blobs),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("most", "want"),
    [(1, [1]), (2, [1]), (3, [1, 2, 3]), (4, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (9, list(range(1, 7)))],
)
def test_a_making_and_its_content_are_never_apart(most: int, want: list[int]) -> None:
    queue = queue_of(create(1, 10))
    for queued in (*pair(2, 11), *pair(4, 12)):
        queue.add(queued)
    queue.add(Queued(6, create(6, 13, b"last"), 6, 0.0))
    assert [queued.opno for queued in queue.batch(most)] == want


@pytest.mark.parametrize("more", [{"rows": HEADER_BLOCKS_MAX + 1}, {"size": COMMIT_BLOBS_MAX + 1}])
def test_however_large_the_content_is(more: dict[str, int]) -> None:
    queue = queue_of(create(1, 10))
    for queued in pair(2, 11, **more):
        queue.add(queued)
    assert [queued.opno for queued in queue.batch(100)] == [1]
    queue.remove(1)
    assert [queued.opno for queued in queue.batch(1)] == [2, 3]


def test_a_making_waits_for_its_content() -> None:
    queue = CommitQueue()
    making, content = pair(1, 10)
    made, content.op = content.op, None
    queue.add(making)
    queue.add(content)
    assert queue.waits(making)
    content.op = made
    assert not queue.waits(making)
    queue.held = 1
    assert queue.waits(making)


class FakeFlight:
    broken = False

    def __init__(self, ino: int) -> None:
        self.ino = ino


def test_a_batch_is_bounded_in_operations_and_bytes() -> None:
    queue = queue_of(*(create(at, at + 10, b"%d" % at) for at in range(1, COMMIT_OPS_MAX + 10)))
    assert len(queue.batch(COMMIT_OPS_MAX)) == COMMIT_OPS_MAX
    assert len(queue.batch(3)) == 3
    heavy = CommitQueue()
    for at in range(1, 11):
        blob = Blob(bytes(32), 0, MIB, bytes(MIB))
        heavy.add(Queued(at, create(at, at + 10, b"%d" % at), at, 0.0, blobs=[blob]))
    assert len(heavy.batch(100)) == COMMIT_BLOBS_MAX // MIB


def test_removing_forgets_every_index() -> None:
    queue = queue_of(create(1, 10), chmod(2, 10))
    for opno in (1, 2):
        queue.remove(opno)
    assert len(queue) == 0
    assert queue.of(10) == []
    assert queue.last(10) is None
    assert queue.oldest() is None


def test_what_a_rename_touches() -> None:
    op = Rename(1, RENAME, 2, b"a", 10, 3, b"b", 0, 11, 0, 5)
    assert set(touched(op)[0]) == {2, 3, 10, 11}
    assert set(touched(op)[1]) == {(2, b"a"), (3, b"b")}


def attr(ino: int, parent: int = 0) -> Attr:
    return Attr(ino, 0o40755, 2, 0, 0, 0, 0, 0, 0, 0, None, parent, None, None, 0, 0, 0)


def test_numbers_are_themselves_until_something_is_said() -> None:
    wire = WireMap()
    assert wire.empty
    assert wire.out(5) == 5
    assert wire.known(5) == 5
    op = create(7, 10)
    assert wire.op(op, 0) is op
    assert wire.op(op, 3).opno == 4


def test_a_number_that_means_another_inode_here_is_told_apart() -> None:
    """The server's 10 is the other's file; what programs know as 10 is the copy 99."""
    wire = WireMap()
    wire.put(10, 99)
    assert wire.out(10) == 99
    assert wire.known(99) == 10
    assert wire.known(10) is None
    wire.put(500, 10)
    assert wire.known(10) == 500
    assert wire.out(500) == 10
    assert wire.op(create(1, 10, parent=500), 0)[2:5] == (10, b"f", 99)
    assert wire.attr(attr(99, parent=10), 10) == attr(10, parent=500)


def test_a_map_survives_the_log() -> None:
    wire = WireMap()
    wire.put(10, 99)
    wire.put(500, 10)
    wire.put(10, 100)
    again = WireMap(wire.pairs())
    assert again.pairs() == wire.pairs()
    assert again.known(99) == 99
    assert again.known(100) == 10


def test_tables_that_were_large_are_small_again_when_they_are_empty() -> None:
    queue = CommitQueue()
    fresh = getsizeof(queue._ops)
    for opno in range(1, 20_001):
        queue.add(Queued(opno, chmod(opno, opno), opno, 0.0))
    for opno in range(1, 20_001):
        queue.remove(opno)
    assert getsizeof(queue._ops) <= fresh
    assert getsizeof(queue._by_ino) <= fresh
    queue.add(Queued(20_001, chmod(20_001, 7), 20_001, 0.0))
    assert [queued.opno for queued in queue] == [20_001]


def test_a_table_of_inodes_is_made_anew_when_few_are_left() -> None:
    nodes, table = Nodes(), {}
    for ino in range(1, 20 * FIT_EVERY + 2):
        table[ino] = nodes.by_ino[ino] = Inode(attr(ino, 1), 0)
    held, large = nodes.by_ino, getsizeof(nodes.by_ino)
    for ino in range(2, 20 * FIT_EVERY + 2):
        nodes.drop(table[ino])
        assert ino not in held
    assert nodes.by_ino is held, "who has the table at hand goes on with it"
    assert held == {1: table[1]}
    assert getsizeof(held) < large / 100
