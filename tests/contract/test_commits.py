"""The commit protocol on the real service: tickets, repeats, copies, missing blobs, full lists, redirects."""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Iterator

import pytest
from support.bench import Bench, Mount
from support.postgres import PostgresServer

from fsd.model import ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.blocks import Part, encode
from fsd.model.errors import (
    DamagedBody,
    PosixError,
    SessionForked,
    SessionUnknown,
    TooLarge,
    UsageError,
)
from fsd.model.limits import (
    APPLIED_KEEP,
    BLOCK,
    COMMIT_OPS_MAX,
    FEED_PAGE_MAX,
    NS_BATCH_MAX,
    XATTR_VALUE_MAX,
    XATTRS_TOTAL_MAX,
)
from fsd.model.ops import CONFLICT, REFUSED, Content, Op
from fsd.service import feed
from fsd.service.view import View
from fsd.wire.frame import make_blob


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    url = None
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.fresh()
    with Bench(tmp_path_factory.mktemp(request.param), database=url) as made:
        yield made


@pytest.fixture
def bench(service: Bench) -> Iterator[Bench]:
    """A filesystem of its own for each test; the invariants hold after it."""
    service.new_fs()
    yield service
    service.audit()


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
    assert answer.seq == 1, "the oldest of those it is about: no base may look newer than it is"


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


# Content.


def test_blocks_not_named_stay_and_truncation_never_comes_back(bench: Bench) -> None:
    m = bench.mount()
    data = bytes(range(256)) * (BLOCK // 256) * 3 + b"tail"
    ino = m.file(ROOT_INO, b"big", data)
    m.commit()
    changed = b"!" * 100 + data[100:]
    m.write(ino, changed, m.seq, full=False)
    m.commit()
    assert bench.read(bench.find("big")) == changed
    short = BLOCK + 1000
    m.add(Content(m.number(), ops.CONTENT, ino, m.seq, short, (), False, None, 1, 1))
    m.commit()
    assert bench.read(bench.find("big")) == changed[:short]
    m.add(Content(m.number(), ops.CONTENT, ino, m.seq, 4 * BLOCK, (), False, None, 1, 1))
    m.commit()
    assert bench.read(bench.find("big")) == changed[:short] + bytes(4 * BLOCK - short)
    m.add(Content(m.number(), ops.CONTENT, ino, m.seq, 0, (), False, None, 1, 1))
    m.commit()
    assert bench.read(bench.find("big")) == b""


def test_a_truncation_inside_one_commit_never_comes_back(bench: Bench) -> None:
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", b"x" * (2 * BLOCK + 10))
    m.add(Content(m.number(), ops.CONTENT, ino, 0, 10, (), False, None, 1, 1))
    m.add(Content(m.number(), ops.CONTENT, ino, 0, 2 * BLOCK + 5, (), False, None, 1, 1))
    m.commit()
    assert bench.read(bench.find("f")) == b"x" * 10 + bytes(2 * BLOCK - 5)


def test_a_part_behind_the_end_of_the_file_is_cut(bench: Bench) -> None:
    m = bench.mount()
    blob = make_blob(b"0123456789")
    m.blobs[blob.hash] = blob
    ino = m.create(ROOT_INO, b"f")
    m.add(
        Content(
            m.number(), ops.CONTENT, ino, 0, 4, ((0, encode((Part(0, 10, 0, blob.hash),))),), True, None, 1, 1
        )
    )
    m.add(Content(m.number(), ops.CONTENT, ino, 0, 8, (), False, None, 1, 1))
    m.commit()
    assert bench.read(bench.find("f")) == b"0123\0\0\0\0"


def test_the_later_content_goes_on_beside_under_one_name(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    ino = a.file(ROOT_INO, b"f", b"base")
    a.commit()
    base = a.seq
    a.write(ino, b"of A", base)
    a.commit()
    b.write(ino, b"of B", base, full=False)
    b.write(ino, b"of B, more", base, full=False)
    told = b.commit()
    assert b.asked_full == 1
    assert [one.status for one in told] == [CONFLICT]
    # Later operations of the loser on the old number and the old name mean its copy.
    b.write(ino, b"of B, later", base, full=False)
    b.setattr(ino, mode=0o640)
    assert b.commit() == []
    tree = bench.tree()
    assert tree.pop("f") == b"of A"
    ((name, data),) = tree.items()
    assert name.startswith("f.conflict-B-")
    assert data == b"of B, later"
    assert stat.S_IMODE(bench.find(name).mode) == 0o640
    b.rename(ROOT_INO, b"f", ino, ROOT_INO, b"mine")
    assert b.commit() == []
    assert bench.tree() == {"f": b"of A", "mine": b"of B, later"}
    b.unlink(ROOT_INO, b"mine", ino, base)
    assert b.commit() == []
    assert bench.tree() == {"f": b"of A"}


def test_appends_of_many_mounts_are_one_file_however_often(bench: Bench) -> None:
    """Rule 5, past the number of patches a block may have and over its end."""
    mounts = [bench.mount(name) for name in "ABC"]
    start = b"s" * (BLOCK - 200)
    ino = mounts[0].file(ROOT_INO, b"log", start)
    mounts[0].commit()
    base = mounts[0].seq
    sizes = [len(start)] * 3
    lines = []
    for turn in range(40):
        for at, m in enumerate(mounts):
            line = f"{m.name}{turn:03};".encode()
            lines.append(line)
            pad = bytes(sizes[at] - len(start))
            m.write(ino, start + pad + line, base, full=False, appended_from=sizes[at])
            # Only the appended bytes are looked at; the mount's own idea of what is before them is its own.
            sizes[at] += len(line)
            m.commit()
    data = bench.tree()["log"]
    assert isinstance(data, bytes)
    assert data[: len(start)] == start
    tail = data[len(start) :]
    assert sorted(tail[i : i + 5] for i in range(0, len(tail), 5)) == sorted(lines)
    assert set(bench.tree()) == {"log"}


def test_content_of_a_removed_file_comes_back_to_its_name(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    d = a.mkdir(ROOT_INO, b"d")
    ino = a.file(d, b"f", b"base")
    a.setxattr(ino, b"user.k", b"v")
    a.commit()
    base = a.seq
    a.unlink(d, b"f", ino, base)
    a.commit()
    b.write(ino, b"of B", base, full=False)
    (told,) = b.commit()
    assert (told.status, told.parent, told.name) == (CONFLICT, d, b"f")
    assert told.ino == bench.find("d/f").ino != ino
    assert bench.find("d/f").xattrs == {b"user.k": b"v"}
    assert bench.tree() == {"d": None, "d/f": b"of B"}


def test_content_whose_directory_is_gone_goes_to_lost(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    d = a.mkdir(ROOT_INO, b"d")
    ino = a.file(d, b"f", b"base")
    a.commit()
    base = a.seq
    a.unlink(d, b"f", ino, base)
    a.rmdir(ROOT_INO, b"d", d)
    a.commit()
    b.write(ino, b"of B", base, full=False)
    b.file(d, b"new", b"new of B")
    below = b.mkdir(d, b"below")
    b.file(below, b"deep", b"deep of B")
    told = b.commit()
    assert [one.status for one in told] == [CONFLICT] * 3
    assert bench.tree() == {
        ".fsd-lost": None,
        ".fsd-lost/f": b"of B",
        ".fsd-lost/new": b"new of B",
        ".fsd-lost/below": None,
        ".fsd-lost/below/deep": b"deep of B",
    }


def test_lost_files_go_to_the_root_of_the_mount(bench: Bench) -> None:
    a = bench.mount("A")
    tasks = a.mkdir(ROOT_INO, b"tasks")
    d = a.mkdir(tasks, b"d")
    a.commit()
    b = bench.mount("B", "/tasks")
    c = bench.mount("C", "/tasks/d")
    a.rmdir(tasks, b"d", d)
    a.commit()
    b.file(d, b"of-b", b"B")
    b.commit()
    c.file(d, b"of-c", b"C")
    c.commit()
    assert bench.tree() == {
        ".fsd-lost": None,
        ".fsd-lost/of-c": b"C",
        "tasks": None,
        "tasks/.fsd-lost": None,
        "tasks/.fsd-lost/of-b": b"B",
    }


def test_operations_are_numbered_from_one(bench: Bench) -> None:
    for number in (0, -1):
        m = bench.mount()
        m.next_op = number
        m.mkdir(ROOT_INO, b"d")
        with pytest.raises(UsageError):
            m.commit()


def test_content_comes_back_even_when_its_own_session_took_the_last_name(bench: Bench) -> None:
    """The session knew of two names and removed one; the other had been removed by somebody else."""
    a, b = bench.mount("A"), bench.mount("B")
    ino = a.file(ROOT_INO, b"one", b"base")
    a.link(ino, ROOT_INO, b"two")
    a.commit()
    base = a.seq
    b.unlink(ROOT_INO, b"two", ino, base)
    b.commit()
    a.unlink(ROOT_INO, b"one", ino, base)
    a.write(ino, b"written through two", base)
    (told,) = a.commit()
    assert (told.status, told.name) == (CONFLICT, b"one")
    assert bench.tree() == {"one": b"written through two"}


def test_directories_made_twice_are_one(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    for m in (a, b):
        d = m.mkdir(ROOT_INO, b"d")
        e = m.mkdir(d, b"e")
        m.file(e, b"of-" + m.name.encode(), m.name.encode())
    a.commit()
    told = b.commit()
    assert [one.ino for one in told] == [bench.find("d").ino, bench.find("d/e").ino]
    assert bench.tree() == {"d": None, "d/e": None, "d/e/of-A": b"A", "d/e/of-B": b"B"}


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
        (ops.Setxattr(number(), ops.SETXATTR, f, b"user.n", bytes(XATTRS_TOTAL_MAX), 1), errno.ENOSPC),
        (ops.Content(number(), ops.CONTENT, d, 0, 0, (), True, None, 1, 1), errno.EINVAL),
    ]


def test_each_bad_operation_is_refused_alone(bench: Bench) -> None:
    m = bench.mount()
    bad = _refusals(m, ROOT_INO)
    for op, _ in bad:
        m.add(op)
    m.setxattr(make_ino(m.session, 1), b"user." + b"n" * 250, bytes(XATTR_VALUE_MAX - 255))
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


# Direct commands.


def test_a_direct_command_is_one_commit_or_nothing(bench: Bench) -> None:
    commits = bench.service.commits

    def build(view: View) -> list[Op]:
        ino = view.new_ino()
        return [
            ops.Create(1, ops.CREATE, ROOT_INO, b"d", ino, stat.S_IFDIR | 0o755, 0, 0, 0, None, 5),
            ops.Create(2, ops.CREATE, ino, b"f", view.new_ino(), stat.S_IFREG | 0o644, 0, 0, 0, None, 5),
        ]

    def after(view: View) -> int:
        slot = view.name(ROOT_INO, b"d")
        assert slot is not None
        attr = view.attr(slot.ino)
        assert attr is not None
        assert attr.born == view.seq == 1
        return attr.ino

    seq, ino = commits.apply_direct(bench.fs, build, after=after)
    assert (seq, ino) == (1, bench.find("d").ino)
    with pytest.raises(PosixError) as caught:
        commits.apply_direct(bench.fs, build)
    assert caught.value.errno == errno.EEXIST
    assert bench.service.feed.head(bench.fs) == 1
    assert bench.tree() == {"d": None, "d/f": b""}


def test_a_mount_on_an_old_base_meets_a_direct_write(bench: Bench) -> None:
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", b"base")
    m.commit()
    blob = make_blob(b"direct")

    def build(view: View) -> list[Op]:
        node = view.node(ino)
        assert node is not None
        parts = encode((Part(0, 6, 0, blob.hash),))
        return [Content(1, ops.CONTENT, ino, node.cseq, 6, ((0, parts),), True, None, 9, 9)]

    bench.service.commits.apply_direct(bench.fs, build, [blob])
    m.write(ino, b"of the mount", m.seq)
    (told,) = m.commit()
    assert told.status == CONFLICT
    assert sorted(v for v in bench.tree().values() if isinstance(v, bytes)) == [b"direct", b"of the mount"]


# Feed.


def test_the_feed_tells_each_commit(bench: Bench) -> None:
    m = bench.mount()
    ino = m.file(ROOT_INO, b"a", b"1")
    m.commit()
    m.setattr(ino, mode=0o600)
    m.commit()
    page = bench.service.feed.page(bench.fs, 0)
    assert (page.head, page.reset) == (2, False)
    first, second = page.changes
    assert (first.seq, first.session, first.names) == (1, m.session, ((ROOT_INO, b"a"),))
    assert set(first.inodes) == {ROOT_INO, ino}
    assert (second.inodes, second.names) == ((ino,), ())
    assert bench.service.feed.page(bench.fs, 2).changes == ()
    assert bench.service.feed.page(bench.fs, 3).reset


def test_a_page_of_the_feed_is_bounded(bench: Bench) -> None:
    m = bench.mount()
    ino = m.mkdir(ROOT_INO, b"d")
    m.commit()
    for at in range(FEED_PAGE_MAX):
        m.setattr(ino, mtime=at)
        m.commit()
    page = bench.service.feed.page(bench.fs, 0)
    assert len(page.changes) == FEED_PAGE_MAX
    assert [one.seq for one in bench.service.feed.page(bench.fs, page.changes[-1].seq).changes] == [page.head]


def test_old_rows_of_the_feed_go_and_a_reader_behind_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEEP_ROWS", 10)
    monkeypatch.setattr(feed, "PRUNE_EVERY", 8)
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", b"x")
    m.commit()
    m.unlink(ROOT_INO, b"f", ino, m.seq)
    for at in range(25):
        m.mkdir(ROOT_INO, b"%d" % at)
        m.commit()
    rows = "SELECT count(*) FROM change WHERE fs=?"
    assert bench.service.db.read(lambda tx: tx.one(rows, (bench.fs.id,))) == (26,), "7 days are kept"
    bench.service.db.write(
        lambda tx: tx.execute("UPDATE change SET at=1 WHERE fs=? AND seq<=20", (bench.fs.id,))
    )
    for at in range(25, 33):
        m.mkdir(ROOT_INO, b"%d" % at)
        m.commit()
    page = bench.service.feed.page(bench.fs, 3)
    assert (page.reset, page.changes, page.head) == (True, (), 34)
    assert bench.service.feed.page(bench.fs, 20).changes[0].seq == 21
    gone = bench.service.db.read(lambda tx: tx.all("SELECT ino FROM gone WHERE fs=?", (bench.fs.id,)))
    assert gone == []


def test_a_reader_that_waits_is_woken(bench: Bench) -> None:
    m = bench.mount()
    got = []
    reader = threading.Thread(target=lambda: got.append(bench.service.feed.page(bench.fs, 0, 20.0)))
    reader.start()
    m.mkdir(ROOT_INO, b"d")
    m.commit()
    reader.join(10)
    assert [one.seq for one in got[0].changes] == [1]


# Sessions and questions.


def test_what_a_mount_hears_of_the_one_before(bench: Bench) -> None:
    m = bench.mount("here")
    assert m.previous is None
    m.mkdir(ROOT_INO, b"d")
    m.commit()
    bench.service.sessions.report(bench.fs, m.session, (3, 2, 1000))
    second = bench.mount("here")
    assert second.previous is not None
    assert second.previous["pending_at_last_report"] == {"operations": 3, "files": 2, "bytes": 1000}
    assert second.previous["last_commit_at"]
    bench.service.sessions.end(bench.fs, second.session, "clean", (0, 0, 0))
    third = bench.mount("here")
    assert third.previous is not None
    assert third.previous["ended"] == "clean"
    listed = bench.service.sessions.list(bench.fs, 2)
    assert [one["session"] for one in listed] == [third.session, second.session]
    (last,) = bench.service.sessions.list(bench.fs, 2, before=second.session)
    assert last["session"] == m.session
    with pytest.raises(SessionUnknown):
        bench.service.sessions.report(bench.fs, 10**6, (0, 0, 0))


def test_what_a_long_gone_session_needed_is_forgotten(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    a.mkdir(ROOT_INO, b"d")
    a.commit()
    b.mkdir(ROOT_INO, b"d")
    queue = list(b.queue)
    b.commit()
    db = bench.service.db
    db.write(lambda tx: tx.execute("UPDATE session SET last_seen=1 WHERE id=?", (b.session,)))
    bench.mount("C")
    for table in ("applied", "redirect"):
        left = db.read(
            lambda tx, t=table: tx.all(
                f"SELECT session FROM {t} WHERE session IN (?,?)", (a.session, b.session)
            )
        )
        assert left == ([(a.session,)] if table == "applied" else [])
    with pytest.raises(SessionForked):
        b.send(queue)
    assert b.session in [one["session"] for one in bench.service.sessions.list(bench.fs, 10)]


@pytest.mark.parametrize(
    "question",
    [
        None,
        (),
        ("no",),
        ("lookup", 1, b"x"),
        ("lookup", 1, "text", 0),
        ("lookup", -1, b"x", 0),
        ("attrs", ("x",)),
        ("attrs", tuple(range(5000))),
        ("path", ("text",)),
        ("blocks", 1, 0, 10**6),
        ("tree", True, 5),
    ],
)
def test_a_bad_question_is_said_to_be_one(bench: Bench, question: object) -> None:
    with pytest.raises(UsageError):
        bench.service.namespace.ask(bench.fs, [question])


def test_questions(bench: Bench) -> None:
    m = bench.mount()
    d = m.mkdir(ROOT_INO, b"d")
    for at in range(30):
        m.file(d, b"%02d" % at, b"x")
    e = m.mkdir(d, b"e")
    deep = m.file(e, b"deep", b"deep")
    m.commit()

    def ask(*question: object) -> object:
        seq, (answer,) = bench.service.namespace.ask(bench.fs, [question])
        assert seq == 1
        return answer

    entry, listing = ask("lookup", d, b"07", 31)  # type: ignore[misc]
    assert entry.name == b"07"
    assert len(listing) == 31
    assert ask("lookup", d, b"07", 30) == (entry, None)
    assert ask("lookup", d, b"no", 0) == (None, None)
    assert ask("lookup", 12345, b"no", 10) is None
    assert ask("lookup", deep, b"no", 10) is None
    page, more = ask("list", d, b"05", 10)  # type: ignore[misc]
    assert [one.name for one in page] == [b"%02d" % at for at in range(6, 16)]
    assert more
    page, more = ask("list", d, b"28", 10)  # type: ignore[misc]
    assert [one.name for one in page] == [b"29", b"e"]
    assert not more
    found = ask("attrs", (d, 12345, deep, d))
    assert [one and one.ino for one in found] == [d, None, deep, d]  # type: ignore[attr-defined]
    tree = ask("tree", ROOT_INO, 100)
    assert [(ino, len(entries)) for ino, entries in tree] == [(ROOT_INO, 1), (d, 31), (e, 1)]  # type: ignore[attr-defined]
    tree = ask("tree", ROOT_INO, 31)
    assert [ino for ino, _ in tree] == [ROOT_INO]  # type: ignore[attr-defined]
    tree = ask("tree", d, 1)
    assert [(ino, len(entries)) for ino, entries in tree] == [(d, 31)]  # type: ignore[attr-defined]
    path = ask("path", (b"d", b"e", b"deep", b"no"))
    assert [one and one.attr.ino for one in path] == [d, e, deep, None]  # type: ignore[attr-defined]
    assert ask("blocks", 12345, 0, 1) is None
    with pytest.raises(TooLarge):
        bench.service.namespace.ask(bench.fs, [("path", ())] * (NS_BATCH_MAX + 1))


def test_concurrent_commits_all_arrive(bench: Bench) -> None:
    """Eight sessions in eight threads on one filesystem: one seq a commit, none lost."""
    mounts = [bench.mount(f"host{at}") for at in range(8)]
    failed: list[BaseException] = []

    def work(m: Mount) -> None:
        try:
            for at in range(20):
                m.file(ROOT_INO, f"{m.name}-{at}".encode(), m.name.encode())
                m.commit()
        except BaseException as exc:  # noqa: BLE001 - told by the main thread
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(m,)) for m in mounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert bench.service.feed.head(bench.fs) == 160
    assert len(bench.entries()) == 160
