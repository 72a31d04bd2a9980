"""Forks and merges on both engines: what is O(1), what waits, what is refused, what one transaction holds."""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.wait import wait_for

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Busy, Conflict, ForkCopying, LeaseHeld, NotFound
from fsd.model.limits import BLOCK, FEED_TOLD_MAX, FORK_ALIASES_MAX, FORK_WAITERS_MAX
from fsd.service.access import ADMIN_GRANT, FsRef, Grant
from fsd.service.audit import audit
from fsd.service.export import Export
from fsd.service.leases import Exclusive
from fsd.service.merge import CONFLICTS, MERGED, NOTHING, UNDO, Wish
from fsd.service.native import Ask
from fsd.service.retained import state_of
from fsd.service.sweep import Terms
from fsd.service.tree import inode
from fsd.service.upload import Reading


def fork(bench: Bench, of: FsRef | None = None, checkpoint: str | None = None) -> FsRef:
    """A fork; the bench stands for it afterwards only if told to."""
    service, origin = bench.service, of or bench.fs
    made = service.db.write(lambda tx: service.forks.create(tx, origin, "f", [("a", "b")], checkpoint))
    return service.filesystems.get(made["file_system_id"])


def merge(bench: Bench, parent: FsRef, child: FsRef, **wish: Any) -> dict[str, Any]:
    service = bench.service
    ready = service.merges.prepare(parent, child, Wish(**wish))
    return service.db.write(lambda tx: service.merges.merge(tx, parent, child, None, Wish(**wish), ready))


def fill(bench: Bench, count: int, size: int = 3) -> dict[bytes, int]:
    """`count` files in the root, committed."""
    mount = bench.mount()
    made = {}
    for at in range(count):
        name = b"f%05d" % at
        made[name] = mount.file(ROOT_INO, name, b"%d" % at * size)
        if at % 500 == 499:
            mount.commit()
    mount.commit()
    return made


def on(bench: Bench, fs: FsRef) -> Bench:
    bench.fs = fs
    return bench


@pytest.fixture(autouse=True)
def _audits(bench: Bench) -> Any:
    """Every filesystem of the test passes the audit, not the bench's last one alone."""
    first = bench.fs
    yield
    rows = bench.service.db.read(
        lambda tx: tx.all("SELECT id, name FROM fs WHERE status='active' AND id>=?", (first.id,))
    )
    for row in rows:
        found = audit(bench.service.db, FsRef(*row))
        assert not found, (row, found)


class Asked:
    """A transaction that counts what it is asked: on PostgreSQL a round trip each."""

    def __init__(self, tx: Tx) -> None:
        self._tx, self.count = tx, 0

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        return getattr(self._tx, name)


def test_forks_and_checkpoints_take_few_round_trips(bench: Bench) -> None:
    """On a loaded machine each waits for PostgreSQL to be run: fifteen for a fork were 45 ms there."""
    fill(bench, 3)
    service = bench.service
    token = service.tokens.list(bench.fs, include_expired=True, offset=0, limit=1)["tokens"][0]
    who = Grant(token["token_id"], "", "owner")

    def asked(effect: Callable[[Tx], Any]) -> int:
        def count(tx: Tx) -> int:
            counted = Asked(tx)
            effect(counted)
            return counted.count

        return service.db.write(count)

    def one() -> int:
        return asked(lambda tx: service.checkpoints.make(tx, bench.fs, who, Ask()))

    assert asked(lambda tx: service.forks.create(tx, bench.fs, "f", [], who=who)) == 8
    assert [one(), one()] == [7, 7]  # of which one is about no names, and asks nothing


def test_a_fork_reads_and_writes_at_once(bench: Bench) -> None:
    origin = bench.fs
    fill(bench, 20)
    big = bench.mount("big")
    data = bytes(range(256)) * (BLOCK // 128)
    big.file(ROOT_INO, b"big", data)
    big.commit()
    child = fork(bench)
    before = on(bench, origin).tree()
    assert on(bench, child).tree() == before
    assert bench.service.forks.page(origin, "", 10)["forks"][0]["copied"] is False
    mount = bench.mount("in the fork")
    mount.file(ROOT_INO, b"new", b"of the fork")
    assert mount.commit() == []
    assert bench.tree() == {**before, "new": b"of the fork"}
    assert on(bench, origin).tree() == before
    shown = bench.service.forks.page(origin, "", 10)["forks"][0]
    assert shown["copied"] is True
    assert shown["usage"]["file_count"] == 23
    pins = bench.service.db.read(lambda tx: tx.all("SELECT kind FROM pin WHERE fs=?", (origin.id,)))
    assert pins == [], "the origin is let go"


def test_a_parent_that_goes_on_does_not_show_in_the_fork(bench: Bench) -> None:
    origin = bench.fs
    made = fill(bench, 5)
    kept = bench.tree()
    child = fork(bench)
    mount = bench.mount("parent")
    mount.write(made[b"f00001"], b"changed", bench.service.feed.head(origin))
    mount.unlink(ROOT_INO, b"f00002", made[b"f00002"], bench.service.feed.head(origin))
    mount.commit()
    assert on(bench, child).tree() == kept
    bench.service.forks.finish(child)
    assert bench.tree() == kept
    assert on(bench, origin).tree() != kept


def test_making_a_fork_does_not_cost_what_there_is(bench: Bench) -> None:
    took: dict[str, list[float]] = {}
    small = bench.fs
    fill(bench, 10)
    large = bench.new_fs()
    fill(bench, 3000)
    for turn in range(12):
        origin = (small, large)[turn % 2]
        began = time.monotonic()
        fork(bench, origin)
        took.setdefault(origin.name, []).append(time.monotonic() - began)
    assert min(took[large.name]) < 5 * min(took[small.name]) + 0.01, took


def test_a_fork_of_a_checkpoint(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    fill(bench, 3)
    kept = bench.tree()
    made = service.db.write(lambda tx: service.checkpoints.make(tx, origin, None, Ask()))
    fill_more = bench.mount("more")
    fill_more.file(ROOT_INO, b"later", b"x")
    fill_more.commit()
    child = fork(bench, checkpoint=made["checkpoint_id"])
    service.db.write(lambda tx: service.checkpoints.delete(tx, origin, None, made["checkpoint_id"]))
    assert on(bench, child).tree() == kept, "its own pin keeps what the checkpoint kept"
    service.forks.finish(child)
    assert bench.tree() == kept
    described = service.db.read(lambda tx: service.forks.describe(tx, child))
    assert described is not None and described["origin_checkpoint"] == made["checkpoint_id"]
    with pytest.raises(NotFound):
        fork(bench, origin, "cp_none")
    on(bench, origin)


def test_forks_of_forks_before_any_is_copied(bench: Bench) -> None:
    origin = bench.fs
    fill(bench, 4)
    kept = bench.tree()
    line = [origin]
    for _ in range(FORK_ALIASES_MAX):
        line.append(fork(bench, line[-1]))
    assert on(bench, line[-1]).tree() == kept
    with pytest.raises(Busy, match="still being copied"):
        fork(bench, line[-1])
    chain = bench.service.forks.chain(line[-1])
    assert [one["file_system_id"] for one in chain] == [fs.name for fs in reversed(line)]
    bench.service.forks.finish(line[1])
    fork(bench, line[-1])
    while bench.service.forks.copy_some():
        continue
    assert bench.tree() == kept
    on(bench, origin)


def test_what_is_read_of_a_fork_while_it_is_copied_comes_whole(
    bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export, and a file, opened on the origin's rows; then those go."""
    origin, service = bench.fs, bench.service
    made = fill(bench, 4)
    mount = bench.mount("large")
    monkeypatch.setattr("fsd.service.upload.READ_SNAPSHOT_BLOCKS", 1)
    data = b"".join(random.Random(seed + at).randbytes(1024) * (BLOCK // 1024) for at in range(3))
    made[b"large"] = mount.file(ROOT_INO, b"large", data)
    mount.commit()
    child = fork(bench)
    export = Export.open(service.db, service.packs, bench.host, child, ADMIN_GRANT, None, ())

    def opened(tx: Tx) -> Reading:
        state = state_of(tx, child)
        attr = inode(tx, state.fs, made[b"large"], state.at)
        assert attr is not None
        return Reading.open(tx, service.db, service.packs, child, state, attr, 0, attr.size)

    reading = service.db.read(opened)
    service.forks.finish(child)
    head = service.feed.head(origin)
    for name, ino in made.items():
        mount.unlink(ROOT_INO, name, ino, head)
    mount.commit()
    service.db.write(lambda tx: tx.execute("UPDATE blob SET fresh=0 WHERE fs=?", (origin.id,)))
    service.sweep.call(origin.name, Terms(0.0), "")
    assert b"".join(iter(reading.next_piece, b"")) == data
    with tarfile.open(fileobj=io.BytesIO(b"".join(iter(export.next_piece, b"")))) as tar:
        assert sorted(tar.getnames()) == sorted([".", *(f"./{name.decode()}" for name in made)])
    export.close()


def test_deleting_what_forks_read(bench: Bench) -> None:
    origin, service = bench.fs, bench.service
    fill(bench, 4)
    kept = bench.tree()
    first, second = fork(bench), fork(bench)
    third = fork(bench, second)
    with pytest.raises(Conflict, match="not copied yet") as refused:
        service.db.write(lambda tx: service.filesystems.delete(tx, origin.name))
    assert set(refused.value.details["forks"]) == {first.name, second.name, third.name}
    answer = service.db.write(lambda tx: service.filesystems.delete(tx, second.name, cascade=True))
    assert answer["forks_deleted"] == [third.name]
    service.forks.detach(origin.name)
    service.db.write(lambda tx: service.filesystems.delete(tx, origin.name))
    while service.filesystems.collect():
        continue
    assert on(bench, first).tree() == kept, "its blobs lie in packs of a filesystem that is gone"
    chain = service.forks.chain(first)
    assert chain[-1] == {"file_system_id": origin.name, "status": "deleted"}


def test_a_write_waits_for_the_copy_somebody_else_makes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bench, 30)
    child = fork(bench)
    monkeypatch.setattr("fsd.service.forkcopy.FORK_CHUNK", 7)
    forks = bench.service.forks
    assert forks._chunk(child.id) == "more"
    me, forks._me = forks._me, "another process"
    with pytest.raises(ForkCopying) as told:
        forks.finish(child, patience=0.0)
    assert told.value.retryable and told.value.status == 503
    done: list[int] = []
    tries: list[str] = []
    chunk = forks._chunk

    def counted(fs: int) -> str:
        tries.append(chunk(fs))
        return tries[-1]

    monkeypatch.setattr(forks, "_chunk", counted)

    def write() -> None:
        mount = on(bench, child).mount("w")
        mount.file(ROOT_INO, b"w", b"w")
        mount.commit()
        done.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    wait_for(lambda: len(tries) > 2, 60, "the write to wait")
    assert not done and set(tries) == {"taken"}, "the lease of the other holds"
    forks._me = me
    thread.join(60)
    assert done


def test_only_a_few_requests_wait_for_copies(bench: Bench) -> None:
    origin = bench.fs
    fill(bench, 3)
    child = fork(bench)
    forks = bench.service.forks
    for _ in range(FORK_WAITERS_MAX):
        assert forks._waiters.acquire(blocking=False)
    mount = on(bench, child).mount("w")
    mount.file(ROOT_INO, b"w", b"w")
    with pytest.raises(ForkCopying):
        mount.commit()
    with pytest.raises(ForkCopying):
        forks.detach(origin.name)
    for _ in range(FORK_WAITERS_MAX):
        forks._waiters.release()
    assert mount.commit() == []


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
