"""The commit protocol on the real service: tickets, repeats, copies, missing blobs, bounds, refusals."""

from __future__ import annotations

import errno
import stat

import pytest
from support.bench import Bench, Mount

from fsd.model import ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.errors import (
    DamagedBody,
    SessionForked,
    SessionUnknown,
    TooLarge,
    UsageError,
)
from fsd.model.limits import (
    APPLIED_KEEP,
    BLOCK,
    COMMIT_OPS_MAX,
    XATTR_VALUE_MAX,
    XATTRS_TOTAL_MAX,
)
from fsd.model.ops import CONFLICT, REFUSED, Content, Op

# Tickets.


def test_the_same_commit_twice_is_one_commit(bench: Bench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"a", b"data")
    first = m.send(m.queue)
    again = m.send(m.queue)
    assert again == first
    assert first.seq == bench.service.feed.head(bench.fs) == 1
    assert bench.tree() == {"a": b"data"}


def test_a_repeat_tells_the_outcomes_again(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    a.file(ROOT_INO, b"f", b"A")
    b.file(ROOT_INO, b"f", b"B")
    a.commit()
    first = b.send(b.queue)
    assert first.outcomes[0].status == CONFLICT
    assert b.send(b.queue) == first
    assert len(bench.tree()) == 2


def test_two_copies_of_a_session_one_is_told(bench: Bench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"a", b"before the copy")
    m.commit()
    clone = bench.mount("clone")
    clone.session, clone.ticket, clone.next_op, clone.counter = m.session, m.ticket, m.next_op, m.counter
    m.file(ROOT_INO, b"of-m", b"m")
    clone.file(ROOT_INO, b"of-clone", b"clone")
    m.commit()
    with pytest.raises(SessionForked):
        clone.send(clone.queue)
    assert set(bench.tree()) == {"a", "of-m"}


def test_a_copy_that_sends_the_same_operations_gets_their_outcomes(bench: Bench) -> None:
    """A log tail lost in a power cut: the operations come again under an old ticket, in other commits."""
    m = bench.mount()
    old_ticket = m.ticket
    m.file(ROOT_INO, b"a", b"one")
    m.commit()
    m.file(ROOT_INO, b"b", b"two")
    m.commit()
    tail = bench.mount("tail")
    tail.session, tail.ticket, tail.time = m.session, old_ticket, m.time
    tail.file(ROOT_INO, b"a", b"one")
    tail.file(ROOT_INO, b"b", b"two")
    answer = tail.send(tail.queue)
    assert answer.next_op == m.next_op
    assert answer.ticket == m.ticket
    assert bench.tree() == {"a": b"one", "b": b"two"}
    assert answer.seq == 0, "before the oldest of those it is about: no base may look newer than it is"


def test_new_operations_behind_matched_ones_are_applied(bench: Bench) -> None:
    m = bench.mount()
    old_ticket = m.ticket
    m.mkdir(ROOT_INO, b"d")
    queue = list(m.queue)
    m.commit()
    m.ticket = old_ticket
    m.mkdir(ROOT_INO, b"e")
    m.queue = queue + m.queue
    assert m.commit() == []
    assert set(bench.tree()) == {"d", "e"}


def test_a_wrong_ticket_is_a_copy(bench: Bench) -> None:
    m = bench.mount()
    m.mkdir(ROOT_INO, b"d")
    m.ticket = b"x" * 16
    with pytest.raises(SessionForked):
        m.commit()
    assert bench.tree() == {}


def test_a_changed_operation_below_next_is_a_copy(bench: Bench) -> None:
    m = bench.mount()
    m.mkdir(ROOT_INO, b"d")
    m.commit()
    m.next_op = 1
    m.mkdir(ROOT_INO, b"other")
    with pytest.raises(SessionForked):
        m.send(m.queue)


def test_a_copy_is_told_what_both_hold_before_it_is_told_that_it_is_one(bench: Bench) -> None:
    """Else it would make that a second time under its new session: a conflict copy of each equal file."""
    m = bench.mount()
    old_ticket = m.ticket
    m.mkdir(ROOT_INO, b"both")
    common, next_op = list(m.queue), m.next_op
    m.mkdir(ROOT_INO, b"of the first")
    m.commit()
    clone = bench.mount("clone")
    clone.session, clone.ticket, clone.next_op, clone.counter = m.session, old_ticket, next_op, 100
    clone.mkdir(ROOT_INO, b"of the copy")
    answer = clone.send(common + clone.queue)
    assert answer.next_op == next_op
    assert bench.tree().keys() == {"both", "of the first"}
    clone.ticket = answer.ticket
    with pytest.raises(SessionForked):
        clone.send(clone.queue)


def test_numbers_may_be_missing_and_one_that_was_missing_is_a_copy(bench: Bench) -> None:
    m = bench.mount()
    m.mkdir(ROOT_INO, b"d")
    m.next_op += 10
    m.mkdir(ROOT_INO, b"e")
    assert m.commit() == []
    m.next_op = 5
    m.mkdir(ROOT_INO, b"late")
    with pytest.raises(SessionForked):
        m.send(m.queue)


def test_only_the_last_outcomes_are_kept(bench: Bench) -> None:
    m = bench.mount()
    m.mkdir(ROOT_INO, b"old")
    old = list(m.queue)
    m.commit()
    m.next_op = APPLIED_KEEP + 10
    m.mkdir(ROOT_INO, b"new")
    new = list(m.queue)
    m.commit()
    m.mkdir(ROOT_INO, b"newer")
    m.commit()
    rows = bench.service.db.read(
        lambda tx: tx.all("SELECT last_op FROM applied WHERE session=? ORDER BY last_op", (m.session,))
    )
    assert [row[0] for row in rows] == [APPLIED_KEEP + 10, APPLIED_KEEP + 11]
    assert m.send(new).next_op == new[-1].opno + 1
    with pytest.raises(SessionForked):
        m.send(old)


def test_an_unknown_session_and_one_of_another_filesystem(bench: Bench) -> None:
    m = bench.mount()
    m.mkdir(ROOT_INO, b"d")
    first = bench.fs
    bench.new_fs()
    with pytest.raises(SessionUnknown):
        m.commit()
    bench.fs = first
    m.session += 1000
    with pytest.raises(SessionUnknown):
        m.commit()


def test_an_empty_commit_says_where_the_session_stands(bench: Bench) -> None:
    m = bench.mount()
    answer = m.send([])
    assert (answer.seq, answer.next_op, answer.outcomes) == (0, 1, ())
    m.ticket = b"no"
    with pytest.raises(SessionForked):
        m.send([])


# Blobs.


def test_missing_blobs_are_named_and_nothing_happens(bench: Bench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"a", b"data")
    before = m.ticket
    answer = m.send(m.queue, with_blobs=False)
    assert list(answer.missing) == list(m.blobs)
    assert (answer.seq, answer.ticket, answer.next_op) == (0, before, 1)
    assert bench.tree() == {}
    bench.service.packs.store(bench.fs.id, bench.fs.name, list(m.blobs.values()))
    m.send(m.queue, with_blobs=False)
    assert bench.tree() == {"a": b"data"}


def test_a_blob_with_other_bytes_is_refused(bench: Bench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"a", b"data")
    (digest, blob) = next(iter(m.blobs.items()))
    m.blobs[digest] = blob._replace(stored=b"DATA")
    with pytest.raises(DamagedBody):
        m.commit()
    assert bench.tree() == {}


def test_damaged_parts_are_refused_whole(bench: Bench) -> None:
    m = bench.mount()
    ino = m.create(ROOT_INO, b"a")
    m.add(Content(m.number(), ops.CONTENT, ino, 0, 5, ((0, b"\xc1"),), True, None, 1, 1))
    with pytest.raises(UsageError):
        m.commit()
    assert bench.tree() == {}


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (-1, ()),
        (2**60, ()),
        (10, ((1, None),)),
        (10, ((-1, None),)),
        (3 * BLOCK, ((1, None), (0, None))),
        (10, ((0, "text"),)),
    ],
)
def test_content_out_of_range_is_one_refused_operation(
    bench: Bench, size: int, blocks: tuple[tuple[int, bytes | None], ...]
) -> None:
    m = bench.mount()
    ino = m.create(ROOT_INO, b"a")
    m.add(Content(m.number(), ops.CONTENT, ino, 0, size, blocks, True, None, 1, 1))
    m.mkdir(ROOT_INO, b"d")
    told = m.commit()
    assert [(one.opno, one.status) for one in told] == [(2, REFUSED)]
    assert bench.tree() == {"a": b"", "d": None}


# Limits and refusals: one bad operation never stops the others.


def _refusals(m: Mount, top: int) -> list[tuple[Op, int]]:
    number = m.number
    f, d = m.create(top, b"file"), m.mkdir(top, b"dir")
    return [
        (
            ops.Create(number(), ops.CREATE, top, b"", m.new_ino(), stat.S_IFREG, 0, 0, 0, None, 1),
            errno.EINVAL,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"a/b", m.new_ino(), stat.S_IFREG, 0, 0, 0, None, 1),
            errno.EINVAL,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"..", m.new_ino(), stat.S_IFREG, 0, 0, 0, None, 1),
            errno.EEXIST,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"x" * 256, m.new_ino(), stat.S_IFREG, 0, 0, 0, None, 1),
            errno.ENAMETOOLONG,
        ),
        (ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), 0o644, 0, 0, 0, None, 1), errno.EINVAL),
        (ops.Create(number(), ops.CREATE, top, b"t", 99, stat.S_IFREG, 0, 0, 0, None, 1), errno.EINVAL),
        (ops.Create(number(), ops.CREATE, top, b"t", f, stat.S_IFREG, 0, 0, 0, None, 1), errno.EEXIST),
        (
            ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), stat.S_IFREG, -1, 0, 0, None, 1),
            errno.EINVAL,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), stat.S_IFLNK, 0, 0, 0, None, 1),
            errno.EINVAL,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), stat.S_IFLNK, 0, 0, 0, b"t" * 4096, 1),
            errno.ENAMETOOLONG,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), stat.S_IFLNK, 0, 0, 0, b"t\0", 1),
            errno.EINVAL,
        ),
        (
            ops.Create(number(), ops.CREATE, top, b"t", m.new_ino(), stat.S_IFCHR, 0, 0, -1, None, 1),
            errno.EINVAL,
        ),
        (ops.Link(number(), ops.LINK, d, top, b"l", 1), errno.EPERM),
        (ops.Link(number(), ops.LINK, 12345, top, b"l", 1), errno.ENOENT),
        (ops.Unlink(number(), ops.UNLINK, top, b"dir", d, 0, 1), errno.EISDIR),
        (ops.Rmdir(number(), ops.RMDIR, top, b"file", f, 1), errno.ENOTDIR),
        (ops.Rename(number(), ops.RENAME, top, b"dir", d, d, b"self", 0, 0, 0, 1), errno.EINVAL),
        (ops.Rename(number(), ops.RENAME, top, b"no", 12345, top, b"x", 0, 0, 0, 1), errno.ENOENT),
        (ops.Rename(number(), ops.RENAME, top, b"file", f, top, b"x", 4, 0, 0, 1), errno.EINVAL),
        (ops.Rename(number(), ops.RENAME, top, b"file", f, top, b"x", 2, 0, 0, 1), errno.ENOENT),
        (ops.Rename(number(), ops.RENAME, top, b"file", f, top, b"a/b", 0, 0, 0, 1), errno.EINVAL),
        (ops.Setattr(number(), ops.SETATTR, f, None, 2**32, None, None, None, 1), errno.EINVAL),
        (ops.Setxattr(number(), ops.SETXATTR, f, b"", b"v", 1), errno.ERANGE),
        (ops.Setxattr(number(), ops.SETXATTR, f, b"user." + b"n" * 251, b"v", 1), errno.ERANGE),
        (ops.Setxattr(number(), ops.SETXATTR, f, b"user.n", bytes(XATTR_VALUE_MAX + 1), 1), errno.E2BIG),
        (ops.Content(number(), ops.CONTENT, d, 0, 0, (), True, None, 1, 1), errno.EINVAL),
    ]


def test_each_bad_operation_is_refused_alone(bench: Bench) -> None:
    m = bench.mount()
    bad = _refusals(m, ROOT_INO)
    for op, _ in bad:
        m.add(op)
    file = make_ino(m.session, 1)
    fits = bytes(XATTRS_TOTAL_MAX - XATTR_VALUE_MAX - 2 * 255)  # to the byte, beside one of the largest
    m.setxattr(file, b"user." + b"n" * 250, bytes(XATTR_VALUE_MAX))
    m.setxattr(file, b"user." + b"m" * 250, fits)
    over = ops.Setxattr(m.number(), ops.SETXATTR, file, b"user.o", b"", 1)
    m.add(over)
    bad.append((over, errno.ENOSPC))
    told = {one.opno: one for one in m.commit()}
    for op, number in bad:
        assert told[op.opno].status == REFUSED, op
        assert told[op.opno].errno == number, op
    assert len(told) == len(bad)
    assert bench.tree() == {"dir": None, "file": b""}


def test_too_many_operations(bench: Bench) -> None:
    m = bench.mount()
    for at in range(COMMIT_OPS_MAX):
        m.create(ROOT_INO, b"%d" % at)
    extra = m.create(ROOT_INO, b"one more")
    assert extra
    with pytest.raises(TooLarge):
        m.commit()
    m.queue.pop()
    m.commit()
    assert len(bench.entries()) == COMMIT_OPS_MAX


def test_nothing_applied_moves_no_seq(bench: Bench) -> None:
    m = bench.mount()
    m.unlink(ROOT_INO, b"nothing", 12345, 0)
    assert m.commit() == []
    assert m.seq == 0
    assert bench.service.feed.head(bench.fs) == 0
