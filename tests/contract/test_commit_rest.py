"""Beside mounts on the real service: direct commands, the feed, sessions, questions, concurrency."""

from __future__ import annotations

import errno
import stat
import threading
from typing import Any

import pytest
from support.bench import Bench, Mount

from fsd.model import ops
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import Part, encode
from fsd.model.errors import (
    PosixError,
    SessionForked,
    SessionUnknown,
    TooLarge,
    UsageError,
)
from fsd.model.limits import (
    FEED_PAGE_MAX,
    NS_BATCH_MAX,
)
from fsd.model.ops import CONFLICT, Content, Op
from fsd.service import feed, namespace
from fsd.service.expire import old_rows
from fsd.service.retention import Retention
from fsd.service.view import View
from fsd.wire.frame import make_blob
from fsd.wire.messages import ATTRS, LIST, LOOKUP, TREE

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


def test_a_page_of_the_feed_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3 * feed._STEP
    assert most < FEED_PAGE_MAX and FEED_PAGE_MAX % feed._STEP == 0
    monkeypatch.setattr(feed, "FEED_PAGE_MAX", most)
    m = bench.mount()
    ino = m.mkdir(ROOT_INO, b"d")
    m.commit()
    for at in range(most):
        m.setattr(ino, mtime=at)
        m.commit()
    page = bench.service.feed.page(bench.fs, 0)
    assert len(page.changes) == most
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
    reader.join(60)
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


def test_a_replaced_session_that_lives_all_the_same_is_active_again(bench: Bench) -> None:
    """Its next run may be a copy of a sandbox: the other copy goes on under the session."""
    sessions, m = bench.service.sessions, bench.mount("m")

    def ended() -> str:
        (one,) = sessions.list(bench.fs, 1)
        return str(one["ended"])

    def replaced() -> None:
        sessions.end(bench.fs, m.session, "replaced", (0, 0, 0))
        assert ended() == "replaced"

    replaced()
    sessions.seen(bench.fs, m.session)
    assert ended() == "active"
    replaced()
    m.mkdir(ROOT_INO, b"d")
    m.commit()
    assert ended() == "active"
    replaced()
    sessions.report(bench.fs, m.session, (1, 0, 0))
    assert ended() == "active"
    sessions.end(bench.fs, m.session, "clean", (0, 0, 0))
    sessions.seen(bench.fs, m.session)
    assert ended() == "clean"
    with pytest.raises(UsageError):
        sessions.end(bench.fs, m.session, "gone", (0, 0, 0))


def test_what_a_long_gone_session_needed_is_forgotten(bench: Bench) -> None:
    a, b = bench.mount("A"), bench.mount("B")
    a.mkdir(ROOT_INO, b"d")
    a.commit()
    b.mkdir(ROOT_INO, b"d")
    queue = list(b.queue)
    b.commit()
    db = bench.service.db
    db.write(lambda tx: tx.execute("UPDATE session SET last_seen=1 WHERE id=?", (b.session,)))
    assert old_rows(db, bench.fs, Retention(), bench.host.wall_ns())
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

    def ask(*question: object) -> Any:
        seq, (answer,) = bench.service.namespace.ask(bench.fs, [question])
        assert seq == 1
        return answer

    entry, listing = ask("lookup", d, b"07", 31)
    assert entry.name == b"07"
    assert len(listing) == 31
    assert ask("lookup", d, b"07", 30) == (entry, None)
    assert ask("lookup", d, b"no", 0) == (None, None)
    assert ask("lookup", 12345, b"no", 10) is None
    assert ask("lookup", deep, b"no", 10) is None
    page, more = ask("list", d, b"05", 10)
    assert [one.name for one in page] == [b"%02d" % at for at in range(6, 16)]
    assert more
    page, more = ask("list", d, b"28", 10)
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


def test_answers_about_large_attributes_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is cut where it would be too large, and never empty; the rest is refused."""
    monkeypatch.setattr(namespace, "NS_BYTES_MAX", 200_000)
    mount = Mount(bench, "a")
    top = mount.mkdir(ROOT_INO, b"d")
    inos = [mount.file(top, b"%d" % number, b"x") for number in range(9)]
    for ino in inos:
        mount.setxattr(ino, b"user.x", bytes(60_000))
    mount.commit()

    def ask(*question: object) -> Any:
        return bench.service.namespace.ask(bench.fs, [question])[1][0]

    found, listing = ask(LOOKUP, top, b"3", 10_000)
    assert found.attr.ino == inos[3] and listing is None
    names: list[bytes] = []
    more, pages = True, 0
    while more:
        entries, more = ask(LIST, top, names[-1] if names else b"", 1000)
        assert entries
        names += [one.name for one in entries]
        pages += 1
    assert names == [b"%d" % number for number in range(9)] and pages == 3
    assert [directory for directory, _ in ask(TREE, ROOT_INO, 1000)] == [ROOT_INO]
    assert ask(TREE, top, 1000) == []
    assert len(ask(ATTRS, tuple(inos[:3]))) == 3
    with pytest.raises(TooLarge, match="too large"):
        ask(ATTRS, tuple(inos))
