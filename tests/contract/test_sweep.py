"""Room comes back: what the sweep removes, what it leaves; nothing needed is lost. On both engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.postgres import PostgresServer, database_of
from support.sweeping import DAY, SweepBench, noise, same

from fsd.blobs.store import Listed
from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import Busy, NotFound, Unavailable, UsageError
from fsd.model.limits import (
    FEED_KEEP,
    REPACK_INLINE,
    SESSION_KEEP,
    SESSION_ROWS_KEEP,
    STRAY_LEAST,
    SWEEP_EVERY,
)
from fsd.service import expire, pins, repack
from fsd.service import sweep as sweep_module
from fsd.service.open import ServiceOptions, open_service
from fsd.service.sweep import Sweep, Terms
from fsd.wire.frame import make_blob

LARGE = 90_000  # more than an inline pack


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SweepBench]:
    with SweepBench(tmp_path_factory.mktemp(request.param), database=database_of(request)) as bench:
        yield bench


@pytest.fixture
def bench(made: SweepBench) -> Iterator[SweepBench]:
    made.new_fs()
    made.time.ahead = 0.0
    yield made
    made.audit()


def own(bench: SweepBench) -> list[str]:
    return [key for key in bench.objects() if key.startswith(f"packs/{bench.fs.name}/")]


def test_replaced_and_removed_content_goes_after_the_grace(bench: SweepBench) -> None:
    m = bench.mount()
    kept = m.file(ROOT_INO, b"kept", noise(1, LARGE))
    replaced = m.file(ROOT_INO, b"replaced", noise(2, 300))
    m.commit()
    removed = m.file(ROOT_INO, b"removed", noise(3, LARGE))
    m.commit()
    m.write(replaced, noise(4, 300), m.seq)
    m.unlink(ROOT_INO, b"removed", removed, m.seq)
    m.commit()
    assert (bench.rows("blob"), len(own(bench))) == (4, 2)
    assert not any(bench.sweep()[name] for name in ("blobs", "packs", "objects"))
    bench.time.ahead = DAY + 1
    done = bench.sweep()
    assert (done["blobs"], done["packs"], done["objects"]) == (2, 1, 1)
    assert done["object_bytes"] > LARGE
    assert (bench.rows("blob"), len(own(bench))) == (2, 1)
    same(bench.tree(), {"kept": noise(1, LARGE), "replaced": noise(4, 300)})
    assert kept
    assert not any(bench.sweep()[name] for name in ("blobs", "packs", "objects"))


def test_a_dry_run_tells_what_a_sweep_then_does(bench: SweepBench) -> None:
    m = bench.mount()
    for number in range(3):
        ino = m.file(ROOT_INO, b"f%d" % number, noise(number, LARGE))
        m.commit()
        m.unlink(ROOT_INO, b"f%d" % number, ino, m.seq)
    m.commit()
    bench.time.ahead = DAY + 1
    before = bench.objects(), bench.rows("blob"), bench.rows("pack")
    told = bench.sweep(dry=True)
    assert (bench.objects(), bench.rows("blob"), bench.rows("pack")) == before
    done = bench.sweep()
    assert told["blobs"] == done["blobs"] == 3
    assert told["packs"] == done["packs"] == 3
    assert own(bench) == []


def test_what_a_pin_sees_stays_until_it_is_unpinned(bench: SweepBench) -> None:
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", noise(1, LARGE))
    m.commit()
    number, _ = bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "checkpoint", "c"))
    m.write(ino, noise(2, LARGE), m.seq)
    m.commit()
    bench.time.ahead = 10 * DAY
    assert bench.sweep()["blobs"] == 0
    bench.service.db.write(lambda tx: pins.unpin(tx, bench.service.packs, bench.fs, number))
    assert bench.sweep()["blobs"] == 0, "its time begins when the last reference goes"
    bench.time.ahead = 11 * DAY + 1
    assert bench.sweep()["blobs"] == 1
    same(bench.tree(), {"f": noise(2, LARGE)})


def test_soft_pins_go_when_their_time_is_over(bench: SweepBench) -> None:
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", noise(1, 100))
    m.commit()
    now = bench.host.wall_ns()
    for number in range(40):
        m.write(ino, noise(10 + number, 100), m.seq)
        m.commit()
        kind = ("journal", "mount", "checkpoint")[number % 3]
        expires = now + int(DAY * 1e9)
        bench.service.db.write(lambda tx, k=kind, e=expires: pins.pin(tx, bench.fs, k, "x", e))  # type: ignore[misc]
    assert bench.sweep()["pins"] == 0
    bench.time.ahead = DAY + 60
    assert bench.sweep(dry=True)["pins"] == 27
    assert bench.sweep()["pins"] == 27
    assert bench.rows("pin") == bench.rows("pin", "AND kind='checkpoint'") == 13


def test_a_pack_mostly_dead_is_rewritten_and_its_object_kept_for_the_grace(bench: SweepBench) -> None:
    m = bench.mount()
    inos = [m.file(ROOT_INO, b"f%d" % number, noise(number, 30_000)) for number in range(10)]
    m.commit()
    for number in range(7):
        m.unlink(ROOT_INO, b"f%d" % number, inos[number], m.seq)
    m.commit()
    [old] = own(bench)
    bench.time.ahead = DAY + 1
    done = bench.sweep()
    assert (done["blobs"], done["packs_rewritten"], done["objects"]) == (7, 1, 0)
    assert 90_000 <= done["bytes_rewritten"] < 95_000
    assert old in own(bench) and len(own(bench)) == 2
    wanted = {f"f{number}": noise(number, 30_000) for number in (7, 8, 9)}
    same(bench.tree(), wanted)
    bench.time.ahead += DAY + 1
    assert bench.sweep()["objects"] == 1
    assert old not in own(bench) and len(own(bench)) == 1
    same(bench.tree(), wanted)
    assert bench.sweep()["packs_rewritten"] == 0


def test_a_damaged_pack_is_left_as_it_is_and_told(bench: SweepBench) -> None:
    m = bench.mount()
    inos = [m.file(ROOT_INO, b"f%d" % number, noise(number, 30_000)) for number in range(10)]
    m.commit()
    for number in range(7):
        m.unlink(ROOT_INO, b"f%d" % number, inos[number], m.seq)
    m.commit()
    [key] = own(bench)
    body = bytearray(bench.service.store.get(key, 0, bench.objects()[key]))
    body[-1] ^= 1  # of f9
    bench.service.store.put(key, [bytes(body)])
    bench.time.ahead = DAY + 1
    done = bench.sweep()
    assert (done["blobs"], done["packs_rewritten"], done["packs_damaged"]) == (7, 0, 1)
    bench.time.ahead = 3 * DAY
    bench.sweep()
    assert own(bench) == [key]
    assert bench.read(bench.find("f7")) == noise(7, 30_000)


def test_small_packs_are_gathered_out_of_their_rows(bench: SweepBench) -> None:
    m = bench.mount()
    count = REPACK_INLINE + 6
    wanted = {}
    for number in range(count):
        m.file(ROOT_INO, b"f%d" % number, noise(number, 2000))
        m.commit()
        wanted[f"f{number}"] = noise(number, 2000)
    assert bench.rows("pack", "AND data IS NOT NULL") == count
    assert bench.sweep()["packs_gathered"] == 0, "what is young may soon go by itself"
    bench.time.ahead = DAY + 1
    done = bench.sweep()
    assert done["packs_gathered"] == count
    assert (bench.rows("pack"), bench.rows("pack", "AND data IS NULL")) == (1, 1)
    same(bench.tree(), wanted)
    assert bench.sweep()["packs_gathered"] == 0


def test_many_tiny_packs_become_one_row(bench: SweepBench) -> None:
    m = bench.mount()
    for number in range(REPACK_INLINE):
        m.file(ROOT_INO, b"f%d" % number, b"%d" % number)
        m.commit()
    bench.time.ahead = DAY + 1
    assert bench.sweep()["packs_gathered"] == REPACK_INLINE
    assert bench.rows("pack", "AND data IS NOT NULL") == bench.rows("pack") == 1
    assert own(bench) == []
    same(bench.tree(), {f"f{number}": b"%d" % number for number in range(REPACK_INLINE)})


def test_a_pack_other_filesystems_use_stays_and_moves_as_a_whole(bench: SweepBench) -> None:
    """As a fork does it: copied blob rows that point into the ancestor's packs."""
    m = bench.mount()
    inos = [m.file(ROOT_INO, b"f%d" % number, noise(number, 30_000)) for number in range(10)]
    m.commit()
    parent = bench.fs
    child = bench.new_fs()
    other = [make_blob(noise(number, 30_000)).hash for number in (0, 1)]

    def copy(tx: Tx) -> None:
        tx.lock_fs(parent.id)
        for digest in other:
            tx.execute(
                "INSERT INTO blob SELECT CAST(? AS BIGINT), hash, pack, off, raw_len, stored_len, codec,"
                " CAST(0 AS BIGINT), fresh FROM blob WHERE fs=? AND hash=?",
                (child.id, parent.id, digest),
            )

    bench.service.db.write(copy)
    bench.fs = parent
    for number in range(10):
        m.unlink(ROOT_INO, b"f%d" % number, inos[number], m.seq)
    m.commit()
    bench.time.ahead = DAY + 1
    # The child's rows are idle too, and not yet swept: the pack stays for them.
    done = bench.sweep()
    assert (done["blobs"], done["packs"]) == (10, 0)
    assert len(bench.service.packs.read(child.id, other)) == 2
    bench.time.ahead = DAY + 1
    bench.service.db.write(lambda tx: bench.service.packs.missing(tx, child.id, set(other)))
    done = bench.sweep()
    assert done["packs_rewritten"] == 1
    assert len(bench.service.packs.read(child.id, other)) == 2
    bench.service.db.write(lambda tx: bench.service.filesystems.delete(tx, parent.name))
    while bench.service.filesystems.collect():
        pass
    assert len(bench.service.packs.read(child.id, other)) == 2, "the ancestor is kept for them"
    bench.fs = child
    bench.time.ahead = 3 * DAY
    assert bench.sweep(everything=True)["blobs"] >= 2
    bench.sweep(everything=True)
    assert not [key for key in bench.objects() if parent.name in key]
    gone = bench.service.db.read(lambda tx: tx.one("SELECT status FROM fs WHERE id=?", (parent.id,)))
    assert gone is None


def test_objects_of_crashed_uploads_go_others_stay(bench: SweepBench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"f", noise(1, LARGE))
    m.commit()
    bench.service.packs.prepare(bench.fs.id, bench.fs.name, [make_blob(noise(5, LARGE))])
    bench.service.store.put(f"packs/{bench.fs.name}/notes.txt", [b"somebody's"])
    bench.service.store.put("packs/fs_of_another_database/0000000000000001", [b"somebody's"])
    assert bench.sweep()["strays"] == 0, "an upload that is under way looks the same"
    bench.time.ahead = DAY + 60
    assert bench.sweep()["strays"] == 1
    left = bench.objects()
    assert f"packs/{bench.fs.name}/notes.txt" in left
    assert "packs/fs_of_another_database/0000000000000001" in left
    assert len(own(bench)) == 2
    bench.service.store.delete("packs/fs_of_another_database/0000000000000001")
    same(bench.tree(), {"f": noise(1, LARGE)})


def test_old_rows_go_and_readers_start_over(bench: SweepBench) -> None:
    m = bench.mount()
    for number in range(5):
        ino = m.file(ROOT_INO, b"f%d" % number, b"x")
        m.commit()
        m.unlink(ROOT_INO, b"f%d" % number, ino, m.seq)
        m.commit()
    head = bench.service.feed.head(bench.fs)
    assert len(bench.service.feed.read(bench.fs, 0).changes) == head
    assert bench.rows("gone") == 5
    bench.time.ahead = FEED_KEEP + 60
    bench.sweep()
    assert bench.rows("change") == 1
    assert bench.rows("gone") == 0
    assert bench.service.feed.read(bench.fs, 0).reset
    assert not bench.service.feed.read(bench.fs, head).reset
    m.file(ROOT_INO, b"after", b"x")
    m.commit()
    assert len(bench.service.feed.read(bench.fs, head).changes) == 1


def test_what_sessions_left_goes_and_the_late_one_becomes_another(bench: SweepBench) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"f", b"x")
    m.commit()

    def applied() -> int:
        row = bench.service.db.read(
            lambda tx: tx.one("SELECT count(*) FROM applied WHERE session=?", (m.session,))
        )
        return int(row[0]) if row else 0

    assert applied()
    bench.time.ahead = SESSION_KEEP - 60
    bench.sweep()
    assert applied()
    bench.time.ahead = SESSION_KEEP + 60
    bench.sweep()
    assert not applied()
    assert [one["session"] for one in bench.service.sessions.list(bench.fs, 5)] == [m.session]
    bench.time.ahead = SESSION_ROWS_KEEP * SESSION_KEEP + 60
    bench.sweep()
    assert bench.service.sessions.list(bench.fs, 5) == []


def test_the_background_takes_turns_and_leaves_the_leased_alone(bench: SweepBench) -> None:
    sweep = bench.service.sweep
    while sweep.turn():
        pass
    bench.new_fs()
    m = bench.mount()
    ino = m.file(ROOT_INO, b"f", noise(1, LARGE))
    m.commit()
    m.unlink(ROOT_INO, b"f", ino, m.seq)
    m.commit()
    bench.time.ahead = DAY + SWEEP_EVERY + 60
    rounds = sweep.totals()["rounds"]
    turns = 0
    while sweep.turn():
        turns += 1
    assert turns > 5
    assert sweep.totals()["rounds"] > rounds
    assert bench.rows("blob") == 0
    assert not sweep.turn()
    # A person's sweep takes the lease from a server, another person's waits.
    first = sweep.call(bench.fs.name, Terms(DAY), "")
    assert first["next_cursor"] is None
    bench.service.db.write(
        lambda tx: tx.execute(
            "UPDATE sweep SET holder='call:other', until=? WHERE fs=?",
            (bench.host.wall_ns() + 10**10, bench.fs.id),
        )
    )
    with pytest.raises(Busy):
        sweep.call(bench.fs.name, Terms(DAY), "")
    bench.time.ahead += 60
    assert sweep.call(bench.fs.name, Terms(DAY), "")["next_cursor"] is None


@pytest.mark.parametrize(
    "cursor", ["x", "0" * 16 + "/1/blobs/zz", "0" * 16 + "/1/nothing/", "0" * 16 + "/1/packs/1", "/" * 9]
)
def test_cursors_that_are_none(bench: SweepBench, cursor: str) -> None:
    with pytest.raises(UsageError):
        bench.service.sweep.call(None, Terms(DAY), cursor)


def test_a_filesystem_that_is_not_there(bench: SweepBench) -> None:
    with pytest.raises(NotFound):
        bench.service.sweep.call("fs_" + "z" * 20, Terms(DAY), "")


def test_replicas_share_the_work(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Two servers in turn and at once: every filesystem is swept once, none is left out."""
    with SweepBench(tmp_path / "data", database=postgres_server.fresh()) as bench:
        filesystems = [bench.fs, *(bench.new_fs() for _ in range(7))]
        for fs in filesystems:
            bench.fs = fs
            m = bench.mount()
            ino = m.file(ROOT_INO, b"f", noise(fs.id, LARGE))
            m.commit()
            m.unlink(ROOT_INO, b"f", ino, m.seq)
            m.commit()
        bench.time.ahead = DAY + 60
        options = ServiceOptions(tmp_path / "data", bench.database)
        other = open_service(options, bench.host)
        sweeps = [bench.service.sweep, other.sweep]
        with ThreadPoolExecutor(2) as pool:

            def work(sweep: Sweep) -> None:
                while sweep.turn():
                    pass

            list(pool.map(work, sweeps))
        rounds = [sweep.totals()["rounds"] for sweep in sweeps]
        assert sum(rounds) == len(filesystems) and min(rounds) > 0
        assert sum(sweep.totals()["objects"] for sweep in sweeps) == len(filesystems)
        assert bench.objects() == {}
        other.close()


def test_a_store_whose_clock_is_behind_loses_no_upload(
    bench: SweepBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = bench.mount()
    m.file(ROOT_INO, b"f", noise(1, LARGE))
    m.commit()
    prepared = bench.service.packs.prepare(bench.fs.id, bench.fs.name, [make_blob(noise(5, LARGE))])
    whole = bench.service.store.list

    def behind(prefix: str, after: str = "") -> Iterator[Listed]:
        return (one._replace(mtime=one.mtime - 3 * int(DAY)) for one in whole(prefix, after))

    monkeypatch.setattr(bench.service.store, "list", behind)
    assert bench.sweep()["strays"] == 0
    bench.service.db.write(lambda tx: bench.service.packs.insert(tx, prepared))
    assert len(bench.service.packs.read(bench.fs.id, sorted(prepared.hashes))) == 1


def test_an_upload_that_was_stopped_for_hours_names_no_object(bench: SweepBench) -> None:
    prepared = bench.service.packs.prepare(bench.fs.id, bench.fs.name, [make_blob(noise(5, LARGE))])
    bench.time.ahead = STRAY_LEAST
    with pytest.raises(Unavailable):
        bench.service.db.write(lambda tx: bench.service.packs.insert(tx, prepared))
    assert bench.rows("pack") == bench.rows("blob") == 0


def test_the_smallest_steps_do_the_same(bench: SweepBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request does one step of a few rows, and the next goes on at its cursor."""
    for module, name, value in (
        (sweep_module, "SWEEP_BLOBS", 7),
        (sweep_module, "SWEEP_OBJECTS", 2),
        (sweep_module, "SWEEP_LIST", 3),
        (sweep_module, "SWEEP_CALL", -1.0),
        (repack, "SWEEP_PACKS", 5),
        (repack, "REPACK_INLINE", 3),
        (repack, "REPACK_BYTES", 70_000),
        (expire, "SWEEP_ROWS", 4),
        (sweep_module, "SWEEP_ROWS", 4),
    ):
        monkeypatch.setattr(module, name, value)
    m = bench.mount()
    wanted = {}
    for number in range(12):
        inos = [
            m.file(ROOT_INO, b"f%d-%d" % (number, at), noise(10 * number + at, 30_000)) for at in range(3)
        ]
        m.file(ROOT_INO, b"s%d" % number, noise(1000 + number, 500))
        m.commit()
        wanted[f"s{number}"] = noise(1000 + number, 500)
        wanted[f"f{number}-0"] = noise(10 * number, 30_000)
        for at in (1, 2):
            m.unlink(ROOT_INO, b"f%d-%d" % (number, at), inos[at], m.seq)
        m.commit()
    for number in range(12):  # more inline packs
        m.file(ROOT_INO, b"i%d" % number, noise(2000 + number, 400))
        m.commit()
        wanted[f"i{number}"] = noise(2000 + number, 400)
    bench.time.ahead = DAY + 1
    told = bench.sweep(dry=True)
    done = bench.sweep()
    assert told["blobs"] == done["blobs"] == 24
    assert done["packs_rewritten"] == told["packs_rewritten"] == 12
    assert done["packs_gathered"] >= 9
    same(bench.tree(), wanted)
    bench.time.ahead = 40 * DAY
    done = bench.sweep()
    assert done["objects"] == 12
    assert done["rows"] >= 24
    assert bench.rows("change") == 1 and bench.rows("gone") == 0
    same(bench.tree(), wanted)
