"""Merges on both engines: what one transaction holds, what is refused and told, the way back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bench import Bench, Mount
from support.forking import fill, fork, merge, on

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Conflict, LeaseHeld, NotFound
from fsd.model.limits import BLOCK, FEED_TOLD_MAX
from fsd.service.access import ADMIN_GRANT
from fsd.service.leases import Exclusive
from fsd.service.merge import CONFLICTS, MERGED, NOTHING, UNDO, Wish

pytestmark = pytest.mark.usefixtures("all_audited")


def test_a_merge_is_one_commit_and_can_be_undone(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    made = fill(bench, 10)
    child = fork(bench)
    mount = on(bench, child).mount("fork")
    base = service.feed.head(child)
    mount.write(made[b"f00001"], b"from the fork", base)
    mount.unlink(ROOT_INO, b"f00002", made[b"f00002"], base)
    directory = mount.mkdir(ROOT_INO, b"d")
    mount.rename(ROOT_INO, b"f00003", made[b"f00003"], directory, b"moved")
    mount.link(made[b"f00004"], directory, b"hard")
    mount.symlink(directory, b"soft", b"moved")
    mount.setattr(made[b"f00005"], mode=0o600)
    mount.setxattr(made[b"f00006"], b"user.x", b"1")
    large = mount.file(directory, b"large", bytes(3 * BLOCK + 5))
    mount.write(large, b"y" * (2 * BLOCK + 9), 0)
    mount.commit()
    theirs, ours = bench.tree(), on(bench, origin).tree()
    ours_mount = bench.mount("parent")
    ours_mount.write(made[b"f00003"], b"changed where it was", service.feed.head(origin))
    ours_mount.commit()
    head = service.feed.head(origin)
    told = service.merges.rehearse(origin, child, Wish())
    assert told["status"] == "clean" and service.feed.head(origin) == head
    assert {one["path"] for one in told["changes"]} >= {"/f00001", "/f00002", "/d", "/d/moved", "/d/hard"}
    done = merge(bench, origin, child)
    assert done["status"] == MERGED and done["fs_seq"] == head + 1
    page = service.feed.read(origin, head)
    assert len(page.changes) == 1 and page.changes[0].seq == head + 1
    assert bench.tree() == {**theirs, "d/moved": b"changed where it was"}
    shown = service.db.read(lambda tx: service.checkpoints.show(tx, origin, done["undo_checkpoint_id"]))
    assert shown["reason"] == UNDO and shown["fs_seq"] == head
    assert merge(bench, origin, child)["status"] == NOTHING
    assert ours != theirs


def test_conflicts_apply_nothing_and_are_told(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    made = fill(bench, 6)
    child = fork(bench)
    for fs, text in ((origin, b"ours"), (child, b"theirs")):
        mount = on(bench, fs).mount(text.decode())
        head = service.feed.head(fs)
        mount.write(made[b"f00001"], text, head)
        mount.file(ROOT_INO, b"both", text)
        mount.setattr(made[b"f00002"], mode=0o600 if fs is child else 0o640)
        if fs is child:
            mount.unlink(ROOT_INO, b"f00003", made[b"f00003"], head)
            mount.write(made[b"f00004"], text, head)
            mount.rename(ROOT_INO, b"f00005", made[b"f00005"], ROOT_INO, b"to-theirs")
        else:
            mount.write(made[b"f00003"], text, head)
            mount.unlink(ROOT_INO, b"f00004", made[b"f00004"], head)
            mount.rename(ROOT_INO, b"f00005", made[b"f00005"], ROOT_INO, b"to-ours")
        mount.commit()
    before, head = on(bench, origin).tree(), service.feed.head(origin)
    done = merge(bench, origin, child)
    assert done["status"] == CONFLICTS and done["applied"] == 0
    assert {(one["path"], one["kind"]) for one in done["conflicts"]} == {
        ("/f00001", "both-changed"),
        ("/both", "both-added"),
        ("/f00002", "attributes"),
        ("/f00003", "changed-removed"),
        ("/f00004", "removed-changed"),
        ("/f00005", "both-renamed"),
    }
    told = {one["path"]: one for one in done["conflicts"]}
    assert told["/f00004"]["ours"] is None and told["/f00004"]["theirs"]["size_bytes"] == 6
    assert told["/both"]["base"] is None
    assert bench.tree() == before and service.feed.head(origin) == head
    decided = merge(bench, origin, child, ours=("f00001",), theirs=("/both", "/f*"))
    assert decided["status"] == MERGED
    after = bench.tree()
    assert after["f00001"] == b"ours" and after["both"] == b"theirs"
    assert "f00003" not in after and after["f00004"] == b"theirs"
    assert after["to-theirs"] == b"555" and "to-ours" not in after
    assert bench.find("/f00002").mode & 0o777 == 0o600


def test_a_directory_that_stays_keeps_its_name_though_the_fork_gave_it_to_another(bench: Bench) -> None:
    """The fork moved directory f over a, and what lay in f to its place; the parent filled a meanwhile and
    keeps what it has: then f is not moved, and neither goes nor has its name taken."""
    origin, mount = bench.fs, bench.mount()
    over, moved = mount.mkdir(ROOT_INO, b"a"), mount.mkdir(ROOT_INO, b"f")
    inner = mount.mkdir(moved, b"d")
    mount.commit()
    child = fork(bench)
    mount = on(bench, child).mount("theirs")
    mount.rename(moved, b"d", inner, ROOT_INO, b"t")
    mount.rename(ROOT_INO, b"f", moved, ROOT_INO, b"a", over)
    mount.rename(ROOT_INO, b"t", inner, ROOT_INO, b"f")
    mount.setattr(moved, mode=0o700)
    assert mount.commit() == []
    mount = on(bench, origin).mount("ours")
    mount.file(over, b"new", b"of the parent")
    mount.commit()
    before = bench.tree()
    assert merge(bench, origin, child)["status"] == CONFLICTS
    assert merge(bench, origin, child, ours=("/a",))["status"] == CONFLICTS, "nobody decided what f is"
    assert bench.tree() == before
    assert merge(bench, origin, child, ours=("*",))["status"] != CONFLICTS
    assert bench.tree() == before


def test_what_was_decided_ahead_is_not_used_when_something_changed(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    made = fill(bench, 3)
    child = fork(bench)
    mount = on(bench, child).mount("fork")
    mount.write(made[b"f00001"], b"theirs", mount.bench.service.feed.head(child))
    mount.commit()
    ready = service.merges.prepare(origin, child, Wish())
    other = on(bench, origin).mount("parent")
    other.write(made[b"f00001"], b"ours", service.feed.head(origin))
    other.commit()
    done = service.db.write(lambda tx: service.merges.merge(tx, origin, child, None, Wish(), ready))
    assert done["status"] == CONFLICTS
    assert bench.tree()["f00001"] == b"ours"


def test_a_fork_that_was_deleted_meanwhile_is_not_merged(bench: Bench) -> None:
    """What is left of its rows must not be taken for what it holds."""
    origin, service = bench.fs, bench.service
    fill(bench, 3)
    kept, child = bench.tree(), fork(bench)
    mount = on(bench, child).mount("fork")
    mount.file(ROOT_INO, b"new", b"theirs")
    mount.commit()
    ready = service.merges.prepare(origin, child, Wish())
    service.db.write(lambda tx: service.filesystems.delete(tx, child.name))
    service.db.write(lambda tx: tx.execute("DELETE FROM blob WHERE fs=?", (child.id,)))  # as `collect` does
    for decided in (ready, None):
        with pytest.raises(NotFound):
            service.db.write(
                lambda tx, at=decided: service.merges.merge(tx, origin, child, None, Wish(), at)  # type: ignore[misc]
            )
    assert on(bench, origin).tree() == kept


def test_merging_again_brings_what_came_since(bench: Bench) -> None:
    origin = bench.fs
    fill(bench, 2)
    child = fork(bench)
    twins = []
    for fs in (origin, child):
        mount = on(bench, fs).mount("twin")
        directory = mount.mkdir(ROOT_INO, b"made by both")
        mount.file(directory, b"same", b"same")
        mount.commit()
        twins.append((mount, directory))
    assert merge(bench, origin, child)["status"] == NOTHING
    mount, directory = twins[1]
    on(bench, child)
    mount.file(directory, b"next", b"next")
    mount.write(bench.find("/made by both/same").ino, b"changed", mount.seq)
    mount.commit()
    assert merge(bench, origin, child)["status"] == MERGED
    assert on(bench, origin).tree()["made by both/next"] == b"next"
    assert bench.tree()["made by both/same"] == b"changed"
    other = bench.new_fs()
    with pytest.raises(Conflict, match="is a fork of"):
        merge(bench, other, child)
    with pytest.raises(Conflict, match="is no fork"):
        merge(bench, other, origin)


def test_a_fork_of_a_fork_is_merged_into_its_own_origin(bench: Bench) -> None:
    origin = bench.fs
    fill(bench, 3)
    first = fork(bench)
    second = fork(bench, first)
    mount = on(bench, second).mount("second")
    mount.file(ROOT_INO, b"deep", b"deep")
    mount.commit()
    bench.service.forks.finish(first)
    assert merge(bench, first, second)["status"] == MERGED
    assert merge(bench, origin, first)["status"] == MERGED
    assert on(bench, origin).tree()["deep"] == b"deep"


def test_what_lay_below_very_many_directories_that_went(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    mount, at = bench.mount(), ROOT_INO
    line: list[tuple[int, int]] = []
    for _ in range(1100):
        line.append((at, mount.mkdir(at, b"d")))
        at = line[-1][1]
    mount.commit()
    child = fork(bench)
    theirs = on(bench, child).mount("theirs")
    theirs.file(at, b"new", b"new")
    theirs.commit()
    on(bench, origin)
    for above, ino in reversed(line):
        mount.rmdir(above, b"d", ino)
    mount.commit()
    told = service.merges.rehearse(origin, child, Wish())
    assert (told["status"], told["conflicts_total"]) == (CONFLICTS, 1)


def test_a_large_merge_tells_readers_to_start_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsd.service.feed.FEED_TOLD_MAX", 50)
    assert FEED_TOLD_MAX > 1000
    origin = bench.fs
    fill(bench, 1)
    child = fork(bench)
    mount = on(bench, child).mount("many")
    for at in range(120):
        mount.file(ROOT_INO, b"n%d" % at, b"%d" % at)
    mount.commit()
    head = bench.service.feed.head(origin)
    assert merge(bench, origin, child)["applied"] == 120
    assert bench.service.feed.read(origin, head).reset
    on(bench, origin)


def test_a_merge_waits_for_whoever_has_the_parent_to_himself(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    fill(bench, 2)
    child = fork(bench)
    mount = on(bench, child).mount("fork")
    mount.file(ROOT_INO, b"new", b"n")
    mount.commit()
    alone = on(bench, origin).mount("alone")
    want = Exclusive(ROOT_INO, b"/", 60.0)
    lease = service.db.write(lambda tx: service.leases.take(tx, origin, alone.session, "host", "/mnt", want))
    with pytest.raises(LeaseHeld) as refused:
        merge(bench, origin, child)
    assert refused.value.exit_code == 7
    service.leases.release(origin, lease.fence, ADMIN_GRANT)
    assert merge(bench, origin, child)["status"] == MERGED


def test_a_merge_goes_past_a_lease_of_another_place(bench: Bench) -> None:
    """Only what the merge changes under it is in a lease's way, and only while the lease binds."""
    origin, service = bench.fs, bench.service
    mount = bench.mount("start")
    held, free = (mount.mkdir(ROOT_INO, name) for name in (b"held", b"free"))
    below = mount.mkdir(held, b"below")
    deep, shared = mount.file(below, b"deep", b"1"), mount.file(free, b"shared", b"1")
    mount.link(shared, below, b"link")
    mount.commit()
    child = fork(bench)
    alone = on(bench, origin).mount("alone")

    def hold(seconds: float = 60.0) -> int:
        want = Exclusive(held, b"/held", seconds)
        take = service.leases.take
        return service.db.write(lambda tx: take(tx, origin, alone.session, "host", "/mnt", want)).fence

    def change(act: Callable[[Mount], object]) -> None:
        fork_mount = on(bench, child).mount("fork")
        act(fork_mount)
        fork_mount.commit()
        bench.fs = origin

    fence = hold()
    change(lambda fork: fork.file(free, b"new", b"n"))
    change(lambda fork: fork.mkdir(fork.mkdir(ROOT_INO, b"made"), b"more"))
    assert merge(bench, origin, child)["status"] == MERGED
    for act in (
        lambda fork: fork.file(below, b"new", b"n"),
        lambda fork: fork.write(deep, b"2", 2**40),
        lambda fork: fork.write(shared, b"2", 2**40),  # the same file has a name there
        lambda fork: fork.rename(ROOT_INO, b"held", held, ROOT_INO, b"moved"),
    ):
        change(act)
        with pytest.raises(LeaseHeld) as refused:
            merge(bench, origin, child)
        assert refused.value.exit_code == 7
        service.leases.release(origin, fence, ADMIN_GRANT)
        assert merge(bench, origin, child)["status"] == MERGED
        fence = hold()
    service.leases.release(origin, fence, ADMIN_GRANT)
    bench.audit()


def test_rolling_a_fork_back(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    fill(bench, 3)
    child = fork(bench)
    kept = on(bench, child).tree()
    mount = bench.mount("fork")
    mount.file(ROOT_INO, b"tried", b"x")
    mount.commit()
    service.sessions.end(child, mount.session, "clean", (0, 0, 0))
    done = service.db.write(lambda tx: service.merges.roll_back(tx, child, service.restores, force=False))
    assert done["status"] == "rolled-back" and bench.tree() == kept
    assert merge(bench, origin, child)["status"] == NOTHING
    assert service.merges.changes(child, 10)["changes"] == []
