"""Forks on both engines: what is O(1), what waits, what is refused."""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.bench import Bench
from support.forking import fill, fork, on
from support.wait import wait_for

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Busy, Conflict, ForkCopying, NotFound
from fsd.model.limits import BLOCK, FORK_ALIASES_MAX, FORK_WAITERS_MAX
from fsd.service.access import ADMIN_GRANT, Grant
from fsd.service.export import Export
from fsd.service.native import Ask
from fsd.service.retained import state_of
from fsd.service.sweep import Terms
from fsd.service.tree import inode
from fsd.service.upload import Reading

pytestmark = pytest.mark.usefixtures("all_audited")


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
