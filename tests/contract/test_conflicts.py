"""The record of conflicts: what was put beside is listed until somebody removes or renames it."""

from __future__ import annotations

import stat

import pytest
from support.bench import Bench, Mount

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import NotFound, UsageError
from fsd.model.limits import CONFLICTS_MAX
from fsd.model.names import LOST_DIR
from fsd.service import conflicts
from fsd.service.conflicts import COUNT, Conflict
from fsd.service.tree import resolve


def listed(bench: Bench, top: bytes = b"/") -> list[Conflict]:
    found: list[Conflict] = []
    after = None
    while True:
        page, after = bench.service.conflicts.page(bench.fs, top, after, 2)
        found += page
        if after is None:
            break
    assert len(found) == bench.service.conflicts.count(bench.fs, top)
    return sorted(found)


def both(bench: Bench) -> tuple[Mount, Mount, int, int]:
    """Two mounts and a file both know."""
    a, b = bench.mount("A"), bench.mount("B")
    top = a.mkdir(ROOT_INO, b"d")
    file = a.file(top, b"f", b"first")
    assert not a.commit()
    return a, b, top, file


def test_every_way_to_be_put_beside_is_listed_with_whose_it_is(bench: Bench) -> None:
    a, b, top, file = both(bench)
    other = a.file(top, b"g", b"other")
    gone = a.mkdir(ROOT_INO, b"gone")
    a.commit()
    base = a.seq
    a.write(file, b"A", base)
    a.create(top, b"new")
    a.create(top, b"linked")
    a.create(top, b"target")
    a.rmdir(ROOT_INO, b"gone", gone)
    a.commit()
    b.write(file, b"B", base)
    b.file(top, b"new", b"B")
    b.link(other, top, b"linked")
    b.rename(top, b"g", other, top, b"target")
    b.file(gone, b"below", b"B")
    assert len(b.commit()) >= 5
    found = listed(bench)
    assert [(one.kind, one.original) for one in found] == [
        ("lost", b"below"),  # its directory is gone: a bare name
        ("conflict", b"/d/f"),
        ("conflict", b"/d/linked"),
        ("conflict", b"/d/new"),
        ("conflict", b"/d/target"),
    ]
    assert {(one.host, one.place, one.session, one.seq) for one in found} == {("B", "/mnt", b.session, b.seq)}
    assert found[0].path == b"/.fsd-lost/below"
    assert all(one.path.startswith(one.original + b".conflict-B-") for one in found[1:])
    assert {one.reason for one in found} >= {"the other's content came first", "the name was taken first"}
    assert all(stat.S_ISREG(one.mode) for one in found)


@pytest.mark.parametrize("how", ["unlink", "rename", "replace", "rename above"])
def test_it_is_resolved_when_the_copy_is_removed_or_renamed(bench: Bench, how: str) -> None:
    a, b, top, file = both(bench)
    base = a.seq
    a.write(file, b"A", base)
    a.commit()
    b.write(file, b"B", base)
    (told,) = b.commit()
    (one,) = listed(bench)
    assert one.ino == told.ino
    if how == "unlink":
        b.unlink(top, told.name, told.ino, b.seq)
    elif how == "rename":
        b.rename(top, told.name, told.ino, top, b"mine")
    elif how == "replace":  # the usual way to take the copy
        b.rename(top, told.name, told.ino, top, b"f", file, a.seq)  # by its own idea it has both names
        assert not b.commit()
        assert listed(bench) == [one]
        b = bench.mount("C")
        b.rename(top, told.name, told.ino, top, b"f", file, a.seq)
    else:
        b.rename(ROOT_INO, b"d", top, ROOT_INO, b"e")
    assert not b.commit()
    left = listed(bench)
    if how == "rename above":  # it is still what it was, elsewhere
        assert [one.path for one in left] == [b"/e/" + told.name]
    else:
        assert not left


def test_a_subtree_shows_what_is_there_and_what_was_meant_for_it(bench: Bench) -> None:
    maker = bench.mount("maker")
    sub = maker.mkdir(ROOT_INO, b"sub")
    gone = maker.mkdir(sub, b"gone")
    plain = maker.file(sub, b"f", b"x")
    maker.commit()
    base = maker.seq
    maker.write(plain, b"A", base)
    maker.rmdir(sub, b"gone", gone)
    maker.commit()
    loser = bench.mount("loser", "/sub")
    loser.write(plain, b"B", base)
    loser.file(gone, b"lost", b"B")
    loser.commit()
    assert listed(bench, b"/sub")[0].path == b"/sub/" + LOST_DIR + b"/lost"
    assert len(listed(bench, b"/sub")) == 2
    assert not listed(bench, b"/other")
    assert not listed(bench, b"/su")


def test_what_a_power_cut_left_in_doubt_is_listed(bench: Bench) -> None:
    m = bench.mount("A")
    m.file(ROOT_INO, b"f.recovered-A-20260101T000000Z", b"x")
    assert not m.commit()
    (one,) = listed(bench)
    assert (one.kind, one.original) == ("recovered", b"/f")


def test_a_repeated_commit_is_one_conflict(bench: Bench) -> None:
    a, b, _, file = both(bench)
    base = a.seq
    a.write(file, b"A", base)
    a.commit()
    b.write(file, b"B", base)
    assert b.send(b.queue) == b.send(b.queue)
    assert len(listed(bench)) == 1


def test_resolved_rows_go_and_the_number_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "CONFLICTS_MAX", 5)
    assert CONFLICTS_MAX > 5
    a, b, top, file = both(bench)
    made = []
    for _ in range(8):
        base = a.seq = bench.service.feed.head(bench.fs)
        a.write(file, b"A%d" % base, base)
        a.commit()
        b = bench.mount("B")
        b.write(file, b"B%d" % base, base)
        made += b.commit()

    def rows() -> int:
        row = bench.service.db.read(lambda tx: tx.one(COUNT, (bench.fs.id,)))
        assert row is not None
        return int(row[0])

    assert rows() == 5  # the oldest were forgotten, their copies are there
    assert len(bench.entries(top)) == 9
    for one in made[3:7]:
        b.unlink(top, one.name, one.ino, b.seq)
    b.commit()
    base = a.seq = bench.service.feed.head(bench.fs)
    a.write(file, b"last", base)
    a.commit()
    b = bench.mount("B")
    b.write(file, b"B last", base)
    b.commit()
    assert rows() == 2
    assert len(listed(bench)) == 2


def test_what_a_client_put_beside_itself_is_listed_until_it_is_gone(bench: Bench) -> None:
    a, _, top, file = both(bench)

    def note(path: list[bytes], reason: str) -> None:
        def work(tx: Tx) -> None:
            place = resolve(tx, bench.fs.id, path, itself=True)
            conflicts.note_copy(
                tx, bench.fs.id, place, original=b"/d/meant", host="H", reason=reason, seq=a.seq, now=7
            )

        bench.service.db.write(work)

    note([b"d", b"f"], "first")
    note([b"d", b"f"], "said again")
    (found,) = listed(bench)
    assert (found.path, found.original, found.reason) == (b"/d/f", b"/d/meant", "said again")
    assert (found.kind, found.host, found.place, found.session) == ("conflict", "H", "", 0)
    assert (found.ino, found.seq, found.at) == (file, a.seq, 7)
    with pytest.raises(NotFound):
        note([b"d", b"nothing"], "")
    with pytest.raises(UsageError):
        note([], "")
    a.rename(top, b"f", file, top, b"looked-after")
    a.commit()
    assert listed(bench) == []


def test_who_listens_is_told_whose_a_commit_is_unless_something_became_of_it(bench: Bench) -> None:
    """A session that was told all of its own commit need not hear of it again."""
    told: list[tuple[int, int]] = []
    a, b, _, file = both(bench)
    stop = bench.service.feed.listen(lambda fs, seq, by: told.append((seq, by)))
    base = a.seq
    a.write(file, b"of A", base)
    assert not a.commit()
    b.write(file, b"of B", base)
    assert b.commit(), "put beside"
    stop()
    assert told == [(a.seq, a.session), (b.seq, 0)]
