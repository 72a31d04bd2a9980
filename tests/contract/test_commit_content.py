"""What becomes of content on the real service: full lists, appends, redirects, what comes back."""

from __future__ import annotations

import errno
import stat

import pytest
from support.bench import Bench

from fsd.model import ops
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Part, encode
from fsd.model.errors import (
    UsageError,
)
from fsd.model.limits import (
    BLOCK,
)
from fsd.model.ops import CONFLICT, REFUSED, Content
from fsd.service.audit import audit
from fsd.wire.frame import make_blob

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


def test_bytes_that_no_blob_has_are_refused(bench: Bench) -> None:
    """A hash alone says nothing of how many bytes there are; content of them would be torn when read."""
    m = bench.mount()
    blob = make_blob(b"0123456789")
    m.blobs[blob.hash] = blob
    good, bad = m.create(ROOT_INO, b"good"), m.create(ROOT_INO, b"bad")
    for ino, part in ((good, Part(0, 5, 5, blob.hash)), (bad, Part(0, 6, 5, blob.hash))):
        parts = encode((part,))
        m.add(Content(m.number(), ops.CONTENT, ino, 0, part.length, ((0, parts),), True, None, 1, 1))
    answer = m.send(list(m.queue))
    assert [(told.status, told.errno, told.opno) for told in answer.outcomes] == [
        (REFUSED, errno.EINVAL, m.queue[-1].opno)
    ]
    assert bench.read(bench.find("good")) == b"56789"
    assert bench.find("bad").size == 0
    torn = encode((Part(0, 11, 0, blob.hash),))
    damage = "UPDATE inode SET parts=?, size=? WHERE fs=? AND ino=?"
    for parts, size in ((torn, 11), (encode((Part(0, 5, 5, blob.hash),)), 5)):
        bench.service.db.write(
            lambda tx, p=parts, s=size: tx.execute(damage, (p, s, bench.fs.id, good))  # type: ignore[misc]
        )
        found = [one.what for one in audit(bench.service.db, bench.fs)]
        assert ("it names bytes behind the end of a blob" in found) is (parts == torn)


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
