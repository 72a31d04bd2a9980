"""`fsd audit` finds what is broken in rows and packs, and the repair mends what the rows can mend."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.postgres import database_of
from support.sweeping import DAY, SweepBench, noise, same

from fsd.meta.sql import MAX
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Conflict
from fsd.model.limits import BLOCK
from fsd.service import pins, repair
from fsd.service.audit import audit, rows_of_lost
from fsd.service.audit_states import _States
from fsd.service.audit_store import audit_store, unknown_file_systems
from fsd.wire.frame import make_blob

LARGE = 90_000


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SweepBench]:
    bench = SweepBench(tmp_path_factory.mktemp(request.param), database=database_of(request))
    yield bench
    bench.service.close()


@pytest.fixture
def bench(made: SweepBench) -> SweepBench:
    """A filesystem with something of everything."""
    made.new_fs()
    m = made.mount()
    directory = m.mkdir(ROOT_INO, b"d")
    large = m.file(directory, b"large", noise(1, LARGE))
    m.file(ROOT_INO, b"small", noise(2, 500))
    m.commit()
    number, _ = made.service.db.write(lambda tx: pins.pin(tx, made.fs, "checkpoint", "c"))
    m.write(large, noise(3, LARGE), m.seq)
    m.commit()
    made.pin = number  # type: ignore[attr-defined]
    return made


FILES = {"d": None, "d/large": noise(3, LARGE), "small": noise(2, 500)}


def look(bench: SweepBench, *, read_data: bool = True) -> list[str]:
    """Every finding, as text."""
    service = bench.service
    found, _ = audit_store(service.db, service.store, bench.fs, read_data=read_data, rng=random.Random(1))
    return [" ".join(one) for one in [*audit(service.db, bench.fs), *found]]


def change(bench: SweepBench, sql: str, *params: object) -> None:
    assert bench.service.db.write(lambda tx: tx.execute(sql, params)) > 0, "the damage was not done"


def test_a_lost_block_row_is_told_by_what_it_named(bench: SweepBench) -> None:
    """It reads as a hole, so nothing but the counts can tell; of a dead version its blob's alone."""
    mount = bench.mount()
    ino = mount.file(ROOT_INO, b"long", noise(4, 2 * BLOCK))
    mount.commit()
    bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "checkpoint", "long"))
    mount.write(ino, noise(5, 2 * BLOCK), 2**40)
    mount.commit()
    assert look(bench) == []
    change(bench, f"DELETE FROM block WHERE fs=? AND ino=? AND idx=1 AND died<{MAX}", bench.fs.id, ino)
    (told,) = look(bench)
    assert "refs is 1, rows name it 0 times; if a row is lost" in told
    change(bench, f"DELETE FROM block WHERE fs=? AND ino=? AND idx=1 AND died={MAX}", bench.fs.id, ino)
    assert len(look(bench)) == 3
    assert any("storage_bytes" in one for one in look(bench))


LOST_FROM_A_STATE = {
    "version of a file": (
        "DELETE FROM inode WHERE fs=? AND died<? AND ino=(SELECT ino FROM dentry d "
        "WHERE d.fs=inode.fs AND d.name=?)",
        b"both",
        "it has no row, and names",
    ),
    "name": ("DELETE FROM dentry WHERE fs=? AND died<? AND name=?", b"gone", "it has 0 names"),
    "removed file": (
        "DELETE FROM inode WHERE fs=? AND died<? AND ino=(SELECT ino FROM dentry d "
        "WHERE d.fs=inode.fs AND d.name=?)",
        b"gone",
        "it has no row, and names",
    ),
    "directory": (
        "DELETE FROM inode WHERE fs=? AND died<? AND ino=(SELECT ino FROM dentry d "
        "WHERE d.fs=inode.fs AND d.name=?)",
        b"removed",
        "it has no row, and names",
    ),
    "name of a directory": (
        "DELETE FROM dentry WHERE fs=? AND died<? AND name=?",
        b"removed",
        "a directory has 0 names",
    ),
    "block that came elsewhere": (
        "UPDATE block SET ino=1 WHERE fs=? AND died<? AND ino=(SELECT ino FROM dentry d "
        "WHERE d.fs=block.fs AND d.name=?)",
        b"both",
        "it is of no regular file",
    ),
    "file that was longer": (
        "UPDATE inode SET size=5 WHERE fs=? AND died<? AND ino=(SELECT ino FROM dentry d "
        "WHERE d.fs=inode.fs AND d.name=?)",
        b"both",
        "it lies behind the file's end",
    ),
}


@pytest.mark.parametrize("name", sorted(LOST_FROM_A_STATE))
def test_what_is_lost_from_a_checkpoint_is_told(bench: SweepBench, name: str) -> None:
    """The live tree is whole: only the state that the pin keeps lacks something."""
    mount = bench.mount()
    directory = mount.mkdir(ROOT_INO, b"removed")
    both = mount.file(ROOT_INO, b"both", noise(6, BLOCK + 500))
    gone = mount.file(ROOT_INO, b"gone", noise(7, 700))
    mount.commit()
    bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "checkpoint", "whole"))
    mount.write(both, noise(8, BLOCK + 500), mount.seq)
    mount.unlink(ROOT_INO, b"gone", gone, mount.seq)
    mount.rmdir(ROOT_INO, b"removed", directory)
    mount.commit()
    assert look(bench) == []
    sql, about, what = LOST_FROM_A_STATE[name]
    change(bench, sql, bench.fs.id, MAX, about)
    told = [one for one in look(bench) if one.startswith("frozen") and "in the state" in one]
    assert told, look(bench)
    assert any(what in one for one in told), told


def test_many_pins_cost_an_audit_what_changed_between_them(
    bench: SweepBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = bench.mount()
    often, *others = (mount.file(ROOT_INO, b"%d" % at, noise(at, 100)) for at in range(20))
    mount.commit()
    for at in range(100):
        bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "checkpoint", "one of many"))
        mount.write(often, noise(at, 200), mount.seq)
        mount.commit()
    for ino in others:
        mount.write(ino, noise(ino, 200), mount.seq)
    mount.commit()
    looked: list[int] = []
    wrong = _States._wrong

    def counted(ino: int, *found: Any) -> str:
        looked.append(ino)
        return wrong(ino, *found)

    monkeypatch.setattr(_States, "_wrong", staticmethod(counted))
    assert look(bench) == []
    assert looked.count(often) >= 100
    assert max(looked.count(ino) for ino in others) <= 4


def test_a_fork_whose_row_is_lost_is_told(bench: SweepBench) -> None:
    service = bench.service
    made = service.db.write(lambda tx: service.forks.create(tx, bench.fs, "f", []))
    fork = service.filesystems.get(made["file_system_id"])
    service.forks.finish(fork)
    assert audit(service.db, fork) == []
    change(bench, "DELETE FROM fork WHERE fs=?", fork.id)
    assert any("its row of forks is lost" in one.what for one in audit(service.db, fork))
    service.db.write(lambda tx: service.filesystems.delete(tx, fork.name))


def mend(bench: SweepBench) -> repair.Repair:
    service = bench.service
    planned = repair.plan(service.db, service.store, bench.fs)
    before = look(bench)
    assert repair.plan(service.db, service.store, bench.fs) == planned, "a plan changes nothing"
    assert look(bench) == before
    done = repair.execute(service.db, service.store, bench.fs, planned.plan)
    assert done == planned
    return done


def test_a_whole_one_has_no_findings_and_nothing_to_repair(bench: SweepBench) -> None:
    assert look(bench) == []
    assert mend(bench).steps == []


def test_what_a_repair_finds_without_references_has_its_grace_before_it(bench: SweepBench) -> None:
    """While its count was wrong nobody who asked for it made it fresh."""
    blob = make_blob(noise(4, 300))
    bench.service.packs.store(bench.fs.id, bench.fs.name, [blob])
    change(bench, "UPDATE blob SET refs=2, fresh=0 WHERE fs=? AND hash=?", bench.fs.id, blob.hash)
    assert mend(bench).left == []
    row = bench.service.db.read(
        lambda tx: tx.one("SELECT refs, fresh FROM blob WHERE fs=? AND hash=?", (bench.fs.id, blob.hash))
    )
    assert row is not None and row[0] == 0 and row[1] > 0


DAMAGE = {
    "refs": ("UPDATE blob SET refs=refs+3 WHERE fs=?", "counted"),
    "storage": ("UPDATE fs SET storage_bytes=storage_bytes+1 WHERE id=?", "counted"),
    "files": ("UPDATE fs SET file_count=0 WHERE id=?", "counted"),
    "pinned": ("UPDATE fs SET pinned=-1 WHERE id=?", "frozen"),
    "pin": ("DELETE FROM pin WHERE fs=?", "frozen"),
    "nlink": (f"UPDATE inode SET nlink=9 WHERE fs=? AND died={MAX}", "tree"),
    "change": ("DELETE FROM change WHERE fs=? AND seq=1", ""),
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_what_the_rows_tell_is_put_right(bench: SweepBench, name: str) -> None:
    sql, rule = DAMAGE[name]
    change(bench, sql, bench.fs.id)
    found = look(bench)
    assert any(one.startswith(rule) for one in found) == bool(rule), found
    done = mend(bench)
    assert done.left == []
    assert bool(done.steps) == bool(rule)
    assert look(bench) == []
    same(bench.tree(), FILES)


def test_a_gap_in_the_feed_makes_readers_start_over(bench: SweepBench) -> None:
    m = bench.mount()
    for number in range(4):
        m.file(ROOT_INO, b"f%d" % number, b"x")
        m.commit()
    change(bench, "DELETE FROM change WHERE fs=? AND seq=4", bench.fs.id)
    assert any("one way" in one for one in look(bench))
    assert mend(bench).left == []
    assert bench.service.feed.read(bench.fs, 3).reset
    assert len(bench.service.feed.read(bench.fs, 4).changes) == 2
    assert look(bench) == []


def test_lost_bytes_nobody_needs_are_forgotten_others_stay_told(bench: SweepBench) -> None:
    service = bench.service
    service.packs.store(bench.fs.id, bench.fs.name, [make_blob(noise(8, LARGE))])
    objects = sorted(key for key in bench.objects() if bench.fs.name in key)
    assert len(objects) == 3
    bodies = {key: service.store.get(key, 0, bench.objects()[key]) for key in objects}
    for key in objects:
        service.store.delete(key)
    assert sum("object is missing" in one for one in look(bench, read_data=False)) == 3
    done = mend(bench)
    assert len(done.steps) == 1 and "nothing refers" in done.steps[0].what
    assert sum("object is missing" in one for one in look(bench, read_data=False)) == 2
    # Put back from a copy, all is well.
    for key in objects[:2]:
        service.store.put(key, [bodies[key]])
    assert look(bench) == []
    same(bench.tree(), FILES)


def test_damaged_and_short_objects_are_told(bench: SweepBench) -> None:
    [first, second] = sorted(key for key in bench.objects() if bench.fs.name in key)
    store = bench.service.store
    body = bytearray(store.get(first, 0, bench.objects()[first]))
    body[-1] ^= 1
    store.put(first, [bytes(body)])
    assert [one for one in look(bench, read_data=False) if "name is hash" in one], "few packs are all read"
    body[-1] ^= 1
    body[2] ^= 1
    store.put(first, [bytes(body)])
    assert [one for one in look(bench) if "index" in one]
    body[2] ^= 1
    store.put(first, [bytes(body)])
    assert look(bench) == []
    whole = store.get(second, 0, bench.objects()[second])
    store.put(second, [whole[:-10]])
    assert [
        one for one in look(bench, read_data=False) if "blob before name" in one and "its object has" in one
    ]
    store.put(second, [whole])
    assert look(bench) == []


def test_rows_and_index_that_differ_are_told(bench: SweepBench) -> None:
    change(bench, "UPDATE blob SET raw_len=raw_len-1 WHERE fs=? AND stored_len>1000", bench.fs.id)
    assert [one for one in look(bench) if "as its row" in one]
    change(bench, "UPDATE blob SET raw_len=raw_len+1 WHERE fs=? AND stored_len>1000", bench.fs.id)
    change(bench, "UPDATE blob SET off=off+100000 WHERE fs=? AND stored_len>1000", bench.fs.id)
    assert [one for one in look(bench) if "ends behind its end" in one]
    change(bench, "UPDATE blob SET off=off-100000 WHERE fs=? AND stored_len>1000", bench.fs.id)
    assert look(bench) == []


def test_what_is_used_waits_no_more_to_be_deleted(bench: SweepBench) -> None:
    change(
        bench,
        "INSERT INTO dropped (fs, pack, size, since) SELECT fs, id, size, 0 FROM pack"
        " WHERE fs=? AND data IS NULL",
        bench.fs.id,
    )
    assert [one for one in look(bench) if "deletion backwards" in one]
    bench.sweep(0)  # finds them in use, leaves them and says so in its log
    same(bench.tree(), FILES)
    change(
        bench,
        "INSERT INTO dropped (fs, pack, size, since) SELECT fs, id, size, 0 FROM pack"
        " WHERE fs=? AND data IS NULL",
        bench.fs.id,
    )
    assert mend(bench).left == []
    assert look(bench) == []
    same(bench.tree(), FILES)


def test_a_plan_that_does_not_hold_any_more_is_not_carried_out(bench: SweepBench) -> None:
    service = bench.service
    change(bench, "UPDATE fs SET file_count=0 WHERE id=?", bench.fs.id)
    planned = repair.plan(service.db, service.store, bench.fs)
    change(bench, "UPDATE fs SET storage_bytes=0 WHERE id=?", bench.fs.id)
    with pytest.raises(Conflict):
        repair.execute(service.db, service.store, bench.fs, planned.plan)
    assert len([one for one in look(bench) if one.startswith("counted")]) == 2, "nothing was done"
    assert mend(bench).left == []


def test_what_cannot_be_repaired_is_left_and_told(bench: SweepBench) -> None:
    change(bench, "DELETE FROM blob WHERE fs=? AND refs>0", bench.fs.id)
    done = mend(bench)
    assert done.left
    assert all(one.rule == "blob before name" for one in done.left)


def test_objects_of_unknown_filesystems_are_named(bench: SweepBench) -> None:
    service = bench.service
    for name in ("fs_other1", "fs_other2"):
        for number in range(3):
            service.store.put(f"packs/{name}/{number:016x}", [b"x"])
    assert unknown_file_systems(service.db, service.store) == ["fs_other1", "fs_other2"]
    for name in ("fs_other1", "fs_other2"):
        for number in range(3):
            service.store.delete(f"packs/{name}/{number:016x}")
    assert unknown_file_systems(service.db, service.store) == []


def test_rows_of_a_filesystem_whose_own_row_is_lost_are_told(bench: SweepBench) -> None:
    service, elsewhere = bench.service, bench.fs.id + 1_000_000
    assert rows_of_lost(service.db) == []
    change(bench, "UPDATE fs SET id=? WHERE id=?", elsewhere, bench.fs.id)
    [lost] = rows_of_lost(service.db)
    assert lost.where == f"fs {bench.fs.id}"
    assert lost.what.endswith("inode, token, pack")
    change(bench, "UPDATE fs SET id=? WHERE id=?", bench.fs.id, elsewhere)
    assert rows_of_lost(service.db) == []
    assert look(bench) == []


def test_packs_of_a_deleted_filesystem_are_audited_for_its_fork(bench: SweepBench) -> None:
    service, parent = bench.service, bench.fs
    made = service.db.write(lambda tx: service.forks.create(tx, parent, "fork", []))
    fork = service.filesystems.get(made["file_system_id"])
    service.forks.finish(fork)
    service.db.write(lambda tx: service.filesystems.delete(tx, parent.name))
    while service.filesystems.collect():
        pass
    assert service.db.read(lambda tx: tx.one("SELECT status FROM fs WHERE id=?", (parent.id,))) == ("kept",)
    found, seen = audit_store(service.db, service.store, parent, read_data=True, rng=random.Random(1))
    assert (found, seen.packs) == ([], 2)
    assert rows_of_lost(service.db) == []
    bench.fs = fork
    assert look(bench) == []
    same(bench.tree(), FILES)
    key = max(key for key in bench.objects() if parent.name in key)
    service.store.delete(key)
    found, _ = audit_store(service.db, service.store, parent, read_data=False, rng=random.Random(1))
    assert len(found) == 1


def test_going_back_to_a_copy_of_the_database(tmp_path: Path) -> None:
    """Younger than the grace: what it refers to is there. What it only remembers is forgotten by a repair."""
    with SweepBench(tmp_path / "data") as bench:
        m = bench.mount()
        kept = [m.file(ROOT_INO, b"f%d" % number, noise(number, 30_000)) for number in range(10)]
        m.commit()
        idle = m.file(ROOT_INO, b"idle", noise(50, LARGE))
        m.commit()
        m.unlink(ROOT_INO, b"idle", idle, m.seq)
        for number in range(7):
            m.unlink(ROOT_INO, b"f%d" % number, kept[number], m.seq)
        m.commit()
        wanted = bench.tree()
        bench.time.ahead = 0.9 * DAY
        fs = bench.fs
        with sqlite3.connect(tmp_path / "copy.db") as copy, sqlite3.connect(tmp_path / "data/fsd.db") as db:
            db.backup(copy)
        bench.time.ahead = 1.5 * DAY
        done = bench.sweep()
        assert done["packs_rewritten"] == 1 and done["objects"] == 1
    for path in (tmp_path / "data").glob("fsd.db*"):
        path.unlink()
    shutil.move(tmp_path / "copy.db", tmp_path / "data/fsd.db")
    bench = SweepBench(tmp_path / "data")
    bench.fs = fs
    same(bench.tree(), wanted)
    assert [one for one in look(bench) if "its object is missing" in one]
    assert mend(bench).left == []
    assert look(bench) == []
    bench.service.packs.store(fs.id, fs.name, [make_blob(noise(50, LARGE))])
    assert look(bench) == []
    same(bench.tree(), wanted)
    bench.close()
