"""Writer leases and locks on the real service, with a clock that is moved: whose is what, and until when."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.bench import Bench, Mount
from support.postgres import database_of

from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Busy, LeaseHeld, LeaseLost, UsageError
from fsd.model.limits import LEASE_KEEP, LEASES_MAX
from fsd.model.ops import CONFLICT, REFUSED, RENAME_EXCHANGE
from fsd.service.access import ADMIN_GRANT
from fsd.service.audit import audit
from fsd.service.leases import Exclusive
from fsd.service.writers import Lease, load

TTL = 30.0


class Clock:
    """Nanoseconds of the server; `pass_` moves them."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


CLOCK = Clock()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    host = replace(Host(), wall_ns=CLOCK)
    with Bench(tmp_path_factory.mktemp(request.param), host, database=database_of(request)) as made:
        yield made


class Holder(Mount):
    """A mount session with the writer lease of a directory."""

    def __init__(self, bench: Bench, name: str, top: int, before: Mount | None = None) -> None:
        super().__init__(bench, name)
        gone_on = None if before is None else (before.session, before.ticket, before.next_op)
        want = Exclusive(top, b"/t", TTL, gone_on)
        leases = bench.service.leases
        self.lease: Lease = bench.service.db.write(
            lambda tx: leases.take(tx, bench.fs, self.session, name, "/mnt", want)
        )
        leases.announced(bench.fs)
        self.fence = self.lease.fence

    def renew(self, ttl: float = TTL) -> Lease:
        leases = self.bench.service.leases
        self.lease = leases.renew(self.bench.fs, self.session, self.fence, ttl, ADMIN_GRANT)
        self.fence = self.lease.fence
        return self.lease

    def release(self) -> None:
        self.bench.service.leases.release(self.bench.fs, self.fence, ADMIN_GRANT)


class Tree:
    """/t/in with a file, /t is what is leased; /out beside it; one file with names in both."""

    def __init__(self, bench: Bench) -> None:
        m = bench.mount("maker")
        self.top, self.out = m.mkdir(ROOT_INO, b"t"), m.mkdir(ROOT_INO, b"out")
        self.inner = m.mkdir(self.top, b"in")
        self.file = m.file(self.inner, b"f", b"first")
        self.free = m.file(self.out, b"g", b"free")
        self.both = m.file(self.out, b"both", b"both")
        m.link(self.both, self.inner, b"both")
        assert not m.commit()
        self.seq = m.seq


@pytest.fixture
def tree(bench: Bench) -> Tree:
    return Tree(bench)


def writers(bench: Bench) -> int:
    row = bench.service.db.read(lambda tx: tx.one("SELECT writers FROM fs WHERE id=?", (bench.fs.id,)))
    assert row is not None
    return int(row[0])


def test_it_binds_every_kind_of_change_of_others_and_none_of_its_holder(bench: Bench, tree: Tree) -> None:
    holder, other = Holder(bench, "A", tree.top), bench.mount("B")
    fresh = other.create(tree.inner, b"new")  # what follows on it is refused as well: it does not exist
    other.write(tree.file, b"theirs", tree.seq)
    other.write(tree.both, b"by its other name", tree.seq)
    other.setattr(tree.file, mode=0o600)
    other.setattr(tree.top, mode=0o700)
    other.setxattr(tree.file, b"user.x", b"1")
    other.link(tree.free, tree.inner, b"linked")
    other.link(tree.both, tree.out, b"linked")
    other.unlink(tree.inner, b"f", tree.file, tree.seq)
    other.rmdir(tree.top, b"in", tree.inner)
    other.rename(tree.inner, b"f", tree.file, tree.out, b"out")
    other.rename(tree.out, b"g", tree.free, tree.inner, b"in")
    other.rename(ROOT_INO, b"t", tree.top, tree.out, b"t")
    other.rename(tree.out, b"g", tree.free, ROOT_INO, b"t", tree.top, 0, RENAME_EXCHANGE)
    count = len(other.queue)
    told = other.commit()
    assert [(one.status, one.errno) for one in told] == [(REFUSED, errno.EROFS)] * count
    assert "A:/mnt is the writer of /t since 2023" in told[0].reason
    assert fresh
    other.write(tree.free, b"still free", tree.seq)
    other.file(tree.out, b"more", b"more")
    other.unlink(tree.out, b"both", tree.both, tree.seq)
    assert not other.commit()
    holder.write(tree.file, b"mine", tree.seq)
    holder.create(tree.inner, b"new")
    holder.setattr(tree.top, mode=0o711)
    assert not holder.commit()
    assert bench.tree()["t/in/f"] == b"mine"


def test_what_follows_a_refused_creation_is_refused_with_it(bench: Bench, tree: Tree) -> None:
    """In the same commit and in a later one, in a directory that was to be as well: the client keeps it all.
    Nothing of it lies about without a name."""
    holder, other = Holder(bench, "A", tree.top), bench.mount("B")
    fresh = other.file(tree.inner, b"new", b"content")
    below = other.mkdir(tree.inner, b"dir")
    deep = other.file(below, b"deep", b"deep")
    other.rename(tree.inner, b"new", fresh, tree.out, b"moved")
    other.file(tree.out, b"fine", b"fine")
    count = len(other.queue)
    told = other.commit()
    assert [one.status for one in told] == [REFUSED] * (count - 2)
    other.write(fresh, b"more", 0)
    other.setattr(deep, mode=0o600)
    other.file(below, b"later", b"later")
    other.link(tree.free, below, b"linked")
    holder.release()  # what never was does not come into being by that
    other.write(deep, b"at last", 0)
    count = len(other.queue)
    told = other.commit()
    assert [one.status for one in told] == [REFUSED] * count
    assert sorted(bench.tree()) == [
        "out",
        "out/both",
        "out/fine",
        "out/g",
        "t",
        "t/in",
        "t/in/both",
        "t/in/f",
    ]
    assert other.file(tree.inner, b"new", b"again")
    assert not other.commit()


def test_it_binds_direct_commands_which_are_told_the_holder(bench: Bench, tree: Tree) -> None:
    holder = Holder(bench, "A", tree.top)
    paths, db = bench.service.paths, bench.service.db

    def mkdir(path: tuple[bytes, ...]) -> None:
        db.write(lambda tx: paths.execute(tx, bench.fs, paths.mkdir(tx, bench.fs, path)))

    with pytest.raises(LeaseHeld) as told:
        mkdir((b"t", b"in", b"d"))
    assert told.value.exit_code == 7
    assert told.value.details["holder"]["host"] == "A"
    assert told.value.details["holder"]["mount"] == "/mnt"
    mkdir((b"out", b"d"))
    holder.release()
    mkdir((b"t", b"in", b"d"))


def test_overlapping_leases_exclude_each_other_and_others_do_not(bench: Bench, tree: Tree) -> None:
    Holder(bench, "A", tree.inner)
    for top in (ROOT_INO, tree.top, tree.inner):
        with pytest.raises(LeaseHeld, match="A:/mnt is the writer of /t"):
            Holder(bench, "B", top)
    Holder(bench, "C", tree.out)
    assert writers(bench) == 2


def test_without_leases_a_commit_asks_no_further(bench: Bench, tree: Tree) -> None:
    holder = Holder(bench, "A", tree.top)
    assert writers(bench) == 1
    holder.release()
    holder.release()
    assert writers(bench) == 0
    assert not bench.service.leases.held(bench.fs)
    other = bench.mount("B")
    other.write(tree.file, b"theirs", tree.seq)
    assert not other.commit()


def test_an_expired_lease_binds_nobody_and_is_taken_again_silently(bench: Bench, tree: Tree) -> None:
    holder, other = Holder(bench, "A", tree.top), bench.mount("B")
    CLOCK.pass_(TTL - 1)
    before = holder.renew()
    CLOCK.pass_(TTL - 1)
    assert holder.renew().fence == before.fence  # in time: nothing changed
    CLOCK.pass_(TTL + 1)
    assert not bench.service.leases.held(bench.fs)
    other.file(tree.inner, b"o", b"meanwhile")
    assert not other.commit()
    holder.write(tree.file, b"one", tree.seq)
    assert not holder.commit()  # nobody took it: as if nothing had happened
    again = holder.renew()
    assert again.fence > before.fence
    holder.fence = before.fence  # the answer was lost: the old number still means it
    assert holder.renew().fence == again.fence
    holder.fence = before.fence
    holder.write(tree.file, b"two", tree.seq)
    assert not holder.commit()
    other.create(tree.inner, b"p")
    assert other.commit()[0].errno == errno.EROFS


def test_who_was_fenced_off_can_neither_commit_nor_renew_and_is_told_by_whom(
    bench: Bench, tree: Tree
) -> None:
    late = Holder(bench, "A", tree.top)
    late.write(tree.file, b"written before", tree.seq)
    assert not late.commit()
    CLOCK.pass_(TTL + 1)
    second = Holder(bench, "B", tree.inner)
    assert second.fence > late.fence
    assert writers(bench) == 1
    late.write(tree.file, b"too late", tree.seq)
    for act in (late.commit, late.renew):
        with pytest.raises(LeaseLost, match="it expired, and B:/mnt took it at 20"):
            act()
    second.write(tree.file, b"of the second", late.seq)
    assert not second.commit()
    second.release()
    with pytest.raises(LeaseLost):  # also when nobody has it any more
        late.commit()
    # By the rules for all it loses nothing: beside, under a conflict name.
    late.fence = 0
    told = late.commit()
    assert [one.status for one in told] == [CONFLICT]
    assert {b"too late", b"of the second"} <= {v for v in bench.tree().values() if isinstance(v, bytes)}


def test_a_repeated_commit_is_answered_after_the_lease_was_lost(bench: Bench, tree: Tree) -> None:
    holder = Holder(bench, "A", tree.top)
    holder.write(tree.file, b"applied", tree.seq)
    first = holder.send(holder.queue)
    CLOCK.pass_(TTL + 1)
    Holder(bench, "B", tree.top)
    assert holder.send(holder.queue) == first


def test_it_passes_to_the_next_session_of_its_mount(bench: Bench, tree: Tree) -> None:
    first = Holder(bench, "A", tree.top)
    first.write(tree.file, b"one", tree.seq)
    first.commit()
    second = Holder(bench, "A", tree.top, before=first)
    assert second.fence > first.fence
    assert writers(bench) == 1
    second.write(tree.file, b"two", first.seq)
    assert not second.commit()
    first.write(tree.file, b"no more", first.seq)
    with pytest.raises(LeaseLost, match="another session"):
        first.commit()


def test_it_stays_with_the_copy_that_commits_first(bench: Bench, tree: Tree) -> None:
    first = Holder(bench, "A", tree.top)
    copy = bench.mount("copy")
    copy.session, copy.ticket, copy.fence = first.session, first.ticket, first.fence
    copy.next_op = first.next_op
    first.write(tree.file, b"first", tree.seq)
    first.commit()
    with pytest.raises(LeaseHeld):  # the copy goes on in a session of its own, which has no lease
        Holder(bench, "copy", tree.top, before=copy)
    copy.ticket = first.ticket  # it was told, with what both had done: it still lacks what the first did
    with pytest.raises(LeaseHeld):
        Holder(bench, "copy", tree.top, before=copy)
    first.setattr(tree.file, mode=0o600)
    assert not first.commit()


def test_the_feed_tells_leases_and_their_end(bench: Bench, tree: Tree) -> None:
    feed = bench.service.feed
    head = feed.head(bench.fs)
    assert feed.read(bench.fs, head).leases == ()
    holder = Holder(bench, "A", tree.top)
    page = feed.page(bench.fs, head, 5.0)
    assert page.head == head + 1  # whoever waits hears of it at once
    (seen,) = page.leases
    assert (seen.fence, seen.ino, seen.session, seen.above) == (
        holder.fence,
        tree.top,
        holder.session,
        False,
    )
    assert [feed.read(bench.fs, head, root).leases[0].above for root in (tree.inner, tree.top, tree.out)] == [
        True,
        True,
        False,
    ]
    CLOCK.pass_(TTL + 1)
    assert feed.read(bench.fs, page.head).leases == ()
    holder.renew()
    assert len(feed.read(bench.fs, page.head).leases) == 1
    holder.release()
    page = feed.read(bench.fs, page.head)
    assert page.changes and not page.leases


def test_a_lease_follows_its_directory_and_ends_with_it(bench: Bench, tree: Tree) -> None:
    Holder(bench, "A", tree.inner)
    other = bench.mount("B")
    other.rename(ROOT_INO, b"t", tree.top, tree.out, b"t")  # what lies above is free to move
    assert not other.commit()
    other.create(tree.inner, b"x")
    assert other.commit()[0].errno == errno.EROFS


def test_what_would_come_back_into_a_leased_directory_is_refused(bench: Bench, tree: Tree) -> None:
    other, remover = bench.mount("B"), bench.mount("C")
    remover.unlink(tree.inner, b"f", tree.file, tree.seq)
    assert not remover.commit()
    Holder(bench, "A", tree.top)
    other.write(tree.file, b"would come back", tree.seq)
    assert [(o.status, o.errno) for o in other.commit()] == [(REFUSED, errno.EROFS)]


def test_what_would_go_into_a_leased_lost_and_found_is_refused(bench: Bench, tree: Tree) -> None:
    """Content and names whose directory is gone, too: into one that is made in the leased subtree, and into
    one that is leased itself."""
    here, above, remover = bench.mount("B", "/t"), bench.mount("D"), bench.mount("C")
    sub = remover.mkdir(tree.out, b"sub")
    files = [remover.file(sub, b"%d" % number, b"first") for number in range(2)]
    lost = remover.mkdir(ROOT_INO, b".fsd-lost")
    assert not remover.commit()
    seq = remover.seq
    for number, ino in enumerate(files):
        remover.unlink(sub, b"%d" % number, ino, seq)
    remover.rmdir(tree.out, b"sub", sub)
    assert not remover.commit()
    before = bench.tree()
    Holder(bench, "A", tree.top), Holder(bench, "E", lost)
    for other, ino in ((here, files[0]), (above, files[1])):
        other.write(ino, b"would come back", seq)
        other.file(sub, b"new", b"new")
        count = len(other.queue)
        told = other.commit()
        assert [(one.status, one.errno) for one in told[:2]] == [(REFUSED, errno.EROFS)] * 2
        assert len(told) == count
    assert bench.tree() == before


# `fsd lock`.


def lock(bench: Bench, path: bytes, name: str = "A", ttl: float = TTL) -> Lease:
    leases = bench.service.leases
    return bench.service.db.write(lambda tx: leases.lock(tx, bench.fs, path, name, "make", ttl, ADMIN_GRANT))


def test_a_lock_excludes_the_same_path_until_it_is_released_or_expires(bench: Bench) -> None:
    leases = bench.service.leases
    head = bench.service.feed.head(bench.fs)
    first = lock(bench, b"/db")
    assert lock(bench, b"/db/below").fence > first.fence  # a name, no subtree
    with pytest.raises(LeaseHeld, match="A:make holds the lock /db since") as told:
        lock(bench, b"/db", "B")
    assert told.value.details["holder"]["command"] == "make"
    CLOCK.pass_(TTL - 1)
    leases.renew(bench.fs, 0, first.fence, TTL, ADMIN_GRANT)
    CLOCK.pass_(TTL - 1)
    assert len(leases.held(bench.fs)) == 1
    CLOCK.pass_(2)
    leases.renew(bench.fs, 0, first.fence, TTL, ADMIN_GRANT)  # nobody took it: it is the same lock
    CLOCK.pass_(TTL + 1)
    second = lock(bench, b"/db", "B")
    assert second.fence > first.fence
    with pytest.raises(LeaseLost, match="B:make took it"):
        leases.renew(bench.fs, 0, first.fence, TTL, ADMIN_GRANT)
    leases.release(bench.fs, first.fence, ADMIN_GRANT)  # the late one takes nothing from the other
    assert [one.fence for one in leases.held(bench.fs)] == [second.fence]
    leases.release(bench.fs, second.fence, ADMIN_GRANT)
    third = lock(bench, b"/db")
    assert third.fence > second.fence
    assert bench.service.feed.head(bench.fs) == head  # a lock is no commit
    assert writers(bench) == 0


def test_the_audit_recounts_and_finds_two_writers_of_one_tree(bench: Bench, tree: Tree) -> None:
    outer, inner = Holder(bench, "A", tree.out), Holder(bench, "B", tree.inner)
    db, fs = bench.service.db, bench.fs

    def found() -> list[str]:
        return [f"{one.rule}: {one.what}" for one in audit(db, fs)]

    assert not found()
    db.write(lambda tx: tx.execute("UPDATE fs SET writers=0 WHERE id=?", (fs.id,)))
    assert found() == ["counted: writers is 0, there are 2 writer leases"]
    db.write(lambda tx: tx.execute("UPDATE fs SET writers=2, fence=1 WHERE id=?", (fs.id,)))
    assert len(found()) == 1
    db.write(lambda tx: tx.execute("UPDATE fs SET fence=9 WHERE id=?", (fs.id,)))
    move = "UPDATE lease SET ino=? WHERE fs=? AND fence=?"
    db.write(lambda tx: tx.execute(move, (tree.top, fs.id, outer.fence)))
    assert found() == [f"one way: it lies in the subtree of lease {outer.fence}"]
    db.write(lambda tx: tx.execute(move, (tree.out, fs.id, outer.fence)))
    inner.release()


def test_bounds(bench: Bench) -> None:
    for ttl in (0.5, 86_401.0, float("nan")):
        with pytest.raises(UsageError, match="a lease lasts"):
            lock(bench, b"/x", ttl=ttl)
    with pytest.raises(UsageError, match="4096 bytes"):
        lock(bench, b"/" + b"x" * 4096)
    rows = [(bench.fs.id, 10_000 + n, b"/%d" % n, CLOCK.now, CLOCK.now + 10**12) for n in range(LEASES_MAX)]
    insert = (
        "INSERT INTO lease (fs, fence, kind, ino, path, session, host, place, since, expires, ended) "
        "VALUES (?,?,'lock',0,?,0,'h','c',?,?,'')"
    )
    bench.service.db.write(lambda tx: tx.many(insert, rows))
    with pytest.raises(Busy, match="1000 leases"):
        lock(bench, b"/one-more")
    CLOCK.pass_(1000 + LEASE_KEEP + 1)
    lock(bench, b"/one-more")
    assert len(bench.service.db.read(lambda tx: load(tx, bench.fs.id))) == 1


def test_killed_holders_do_not_pile_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a subtree of its own, so nobody ever takes them."""
    monkeypatch.setattr("fsd.service.leases.LEASES_PAST_MAX", 3)
    maker = bench.mount("maker")
    tops = [maker.mkdir(ROOT_INO, b"%d" % at) for at in range(6)]
    assert not maker.commit()
    holders: list[Holder] = []
    for at, top in enumerate(tops):
        holders.append(Holder(bench, f"box{at}", top))
        CLOCK.pass_(TTL + 1)
    held = bench.service.db.read(lambda tx: load(tx, bench.fs.id))
    assert [one.fence for one in held] == [one.fence for one in holders[2:]]
    assert writers(bench) == 4
    holders[0].file(tops[0], b"f", b"late")
    with pytest.raises(LeaseLost):
        holders[0].renew()
    assert holders[-2].renew().fence > holders[-1].fence, "nobody took it: it comes back"
    assert not audit(bench.service.db, bench.fs)


@pytest.mark.parametrize("moved", ["the expired one", "the one that binds"])
def test_an_expired_one_does_not_come_back_where_another_is_the_writer_by_now(
    bench: Bench, tree: Tree, moved: str
) -> None:
    """A directory moves in beside the holder of what is above it."""
    late = Holder(bench, "A", tree.out if moved == "the expired one" else tree.top)
    CLOCK.pass_(TTL + 1)
    holder = Holder(bench, "B", tree.top if moved == "the expired one" else tree.out)
    holder.rename(ROOT_INO, b"out", tree.out, tree.top, b"out")
    assert not holder.commit()
    assert not audit(bench.service.db, bench.fs)
    with pytest.raises(LeaseLost, match="B:/mnt"):
        late.renew()
    holder.file(tree.out, b"still", b"mine")
    assert not holder.commit()
    holder.release()
    late.renew()
