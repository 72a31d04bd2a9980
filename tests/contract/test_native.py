"""Native checkpoints on both engines, without HTTP: records, what they keep, what goes with them."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.postgres import PostgresServer, database_of

from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import IntegrityError, InvalidPath, NotFound, UnsupportedEntry, UsageError
from fsd.model.limits import BLOCK, EXPORT_PAGE, GIB
from fsd.model.ops import CONTENT, Content
from fsd.service import barriers, feed, names, records
from fsd.service.access import ADMIN_GRANT
from fsd.service.barriers import BarrierAnswer
from fsd.service.export import Export
from fsd.service.native import Ask, read_ask
from fsd.service.open import ServiceOptions, open_service
from fsd.service.restore import Restored, Wish
from fsd.service.retained import At
from fsd.wire.messages import LIST, PATH, make_commit


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def make(bench: Bench, **ask: Any) -> dict[str, Any]:
    return bench.service.db.write(lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask(**ask)))


def delete(bench: Bench, name: str) -> None:
    bench.service.db.write(lambda tx: bench.service.checkpoints.delete(tx, bench.fs, None, name))


def page(
    bench: Bench, before: int | None = None, limit: int = 100
) -> tuple[list[dict[str, Any]], int | None]:
    return bench.service.db.read(lambda tx: bench.service.checkpoints.page(tx, bench.fs, None, before, limit))


def test_a_checkpoint_that_a_commit_cannot_make_leaves_no_pin(bench: Bench) -> None:
    """The record of the head is lost: the commit is made, and tells why there is no checkpoint."""
    service, mount = bench.service, bench.mount()
    mount.mkdir(ROOT_INO, b"d")
    mount.commit()
    made = make(bench)

    def pin_count() -> int:
        row = service.db.read(lambda tx: tx.one("SELECT count(*) FROM pin WHERE fs=?", (bench.fs.id,)))
        assert row is not None
        return int(row[0])

    def set_head(key: bytes) -> None:
        service.db.write(lambda tx: tx.execute("UPDATE thread SET head=? WHERE fs=?", (key, bench.fs.id)))

    set_head(b"lost")
    mount.mkdir(ROOT_INO, b"e")
    commit = make_commit(mount.session, mount.ticket, mount.queue, (0, 0, 0), [], {"label": "x"})
    answer = service.commits.commit(bench.fs, commit, ADMIN_GRANT)
    assert answer.checkpoint is not None
    assert answer.checkpoint["error"]["code"] == "integrity"
    assert sorted(bench.entries()) == [b"d", b"e"]
    assert pin_count() == 1
    set_head(records.key_of(made["checkpoint_id"]))


def test_a_record_a_state_and_its_end(bench: Bench) -> None:
    mount = bench.mount()
    ino = mount.file(ROOT_INO, b"f", b"one")
    mount.commit()
    first = make(bench, label="first")
    mount.write(ino, b"two", mount.seq)
    mount.file(ROOT_INO, b"g", b"new")
    mount.commit()
    second = make(bench, reason="automatic", keep_s=3600.0)
    assert (first["parent_id"], second["parent_id"]) == (None, first["checkpoint_id"])
    assert first["thread_id"] == f"fsd:{bench.fs.name}"
    assert (first["entries"], second["entries"]) == (1, 2)
    shown, following = page(bench)
    assert [one["checkpoint_id"] for one in shown] == [second["checkpoint_id"], first["checkpoint_id"]]
    assert following is None
    assert [one["label"] for one in shown] == [None, "first"]
    assert shown[0]["expires_at"] > shown[0]["created_at"]
    assert shown[1]["expires_at"] is None
    one, following = page(bench, limit=1)
    assert one == shown[:1]
    assert page(bench, following) == (shown[1:], None)
    at = At(checkpoint=first["checkpoint_id"])
    seq, (listing, found) = bench.service.namespace.ask(
        bench.fs, [(LIST, ROOT_INO, b"", 10), (PATH, (b"g",))], at
    )
    assert seq == first["fs_seq"]
    assert [entry.name for entry in listing[0]] == [b"f"]
    assert found == [None]
    delete(bench, first["checkpoint_id"])
    bench.audit()
    with pytest.raises(NotFound, match="no checkpoint cp_"):
        bench.service.namespace.ask(bench.fs, [], at)
    with pytest.raises(NotFound, match="is not kept"):
        bench.service.namespace.ask(bench.fs, [], At(seq=first["fs_seq"]))
    assert [one["parent_id"] for one in page(bench)[0]] == [None], "a deleted parent is told as none"
    delete(bench, second["checkpoint_id"])
    assert page(bench) == ([], None)
    third = make(bench)
    assert third["parent_id"] is None


def test_the_head_goes_back_to_the_newest_that_is_left(bench: Bench) -> None:
    first, second, third = (make(bench) for _ in range(3))
    delete(bench, third["checkpoint_id"])
    assert make(bench)["parent_id"] == second["checkpoint_id"]
    delete(bench, first["checkpoint_id"])
    assert len(page(bench)[0]) == 2
    with pytest.raises(NotFound):
        delete(bench, first["checkpoint_id"])


def test_one_whose_time_is_over_goes_by_itself(tmp_path: Path) -> None:
    now = [time.time_ns()]
    with Bench(tmp_path, replace(Host(), wall_ns=lambda: now[0])) as bench:
        short, stays = make(bench, keep_s=60.0), make(bench)
        assert bench.service.checkpoints.expire() == 0
        now[0] += 61 * 10**9
        assert bench.service.checkpoints.expire() == 1
        assert [one["checkpoint_id"] for one in page(bench)[0]] == [stays["checkpoint_id"]]
        assert short["checkpoint_id"] != stays["checkpoint_id"]
        assert bench.service.checkpoints.expire() == 0


@pytest.mark.parametrize(
    "body",
    [{"label": 5}, {"label": ""}, {"label": "a\nb"}, {"label": "x" * 257}, {"expires_in_s": 0},
     {"expires_in_s": True}, {"reason": "x" * 65}, {"not_flushed": "x"}],
)  # fmt: skip
def test_what_is_asked_for_is_checked(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_ask(body)


def test_rendered_files_have_names_for_their_bytes(bench: Bench) -> None:
    mount = bench.mount()
    large = bytes(range(256)) * (2 * BLOCK // 256) + b"tail"
    contents = {"a": b"small", "d/b": large, "d/empty": b"", "é": b"small"}
    d = mount.mkdir(ROOT_INO, b"d")
    mount.mkdir(d, b"none")
    mount.symlink(d, b"link", b"../a")
    for path, data in contents.items():
        *above, name = path.encode().split(b"/")
        mount.file(d if above else ROOT_INO, name, data)
    mount.commit()
    ino = bench.find("a").ino
    mount.write(ino, b"smallest", mount.seq, full=False, appended_from=5)
    mount.commit()
    contents["a"] = b"smallest"
    made = make(bench)
    bench.find("d/b")
    mount.unlink(ROOT_INO, b"a", ino, mount.seq)
    mount.commit()
    record = bench.service.db.read(
        lambda tx: records.find(tx, bench.fs, records.key_of(made["checkpoint_id"]))
    )
    assert record is not None
    for _ in range(2):
        files = bench.service.checkpoints.render(bench.fs, record)
        assert [one["path"] for one in files] == ["a", "d/b", "d/empty", "d/link", "d/none", "é"]
        assert [one["kind"] for one in files] == ["file", "file", "file", "symlink", "dir", "file"]
        assert files[3] == {"path": "d/link", "kind": "symlink", "target": "../a"}
        bench.audit()
    reader = names.Names(bench.service.db, bench.service.packs, bench.host)
    for one in files:
        if one["kind"] != "file":
            continue
        data = contents[one["path"]]
        assert one["blobKey"].endswith(hashlib.sha256(data).hexdigest())
        assert (one["size"], one["mode"]) == (len(data), 0o644)
        opened = reader.open(bench.fs, one["blobKey"])
        assert opened is not None
        assert b"".join(iter(opened.next_piece, b"")) == data
    # A name outlives the checkpoint it was made for.
    delete(bench, made["checkpoint_id"])
    opened = reader.open(bench.fs, files[0]["blobKey"])
    assert opened is not None
    assert opened.next_piece() == b"smallest"


@pytest.mark.parametrize(
    ("name", "error"), [(b"\xff", InvalidPath), (b"a\\b", InvalidPath), (b"fifo", UnsupportedEntry)]
)
def test_what_no_manifest_can_hold_is_refused_by_name(
    tmp_path: Path, name: bytes, error: type[Exception]
) -> None:
    with Bench(tmp_path) as bench:
        mount = bench.mount()
        mount.create(ROOT_INO, name, 0o010644 if name == b"fifo" else 0o100644)
        mount.commit()
        made = make(bench)
        record = bench.service.db.read(
            lambda tx: records.find(tx, bench.fs, records.key_of(made["checkpoint_id"]))
        )
        assert record is not None
        with pytest.raises(error, match="/"):
            bench.service.checkpoints.render(bench.fs, record)


@pytest.mark.parametrize(
    ("sizes", "told"), [((2**44,), "/f0 has 17592186044416 bytes"), ((16 * GIB,) * 5, "bytes of holes")]
)
def test_holes_without_end_are_not_hashed(tmp_path: Path, sizes: tuple[int, ...], told: str) -> None:
    """`truncate -s 16T` costs nothing; to render it would keep a thread busy for hours."""
    with Bench(tmp_path) as bench:
        mount = bench.mount()
        for at, size in enumerate(sizes):
            ino = mount.create(ROOT_INO, b"f%d" % at)
            number = mount.number()
            mount.whole[number] = b""
            times = (mount.time, mount.time)
            mount.add(Content(number, CONTENT, ino, 0, size, (), True, None, *times))
        mount.commit()
        made = make(bench)
        began = time.monotonic()
        with pytest.raises(UnsupportedEntry, match=told):
            bench.service.checkpoints.files(bench.fs, At(checkpoint=made["checkpoint_id"]))
        assert time.monotonic() - began < 60


def test_making_one_does_not_depend_on_the_size_of_the_tree(tmp_path: Path) -> None:
    """The quickest of several in two trees, one twenty times the other's size, one beside the other."""
    with Bench(tmp_path) as bench:
        times: dict[int, list[float]] = {100: [], 2000: []}
        trees = {}
        for count in times:
            trees[count] = bench.new_fs()
            mount = bench.mount()
            for number in range(count):
                mount.create(ROOT_INO, b"%d" % number)
                if len(mount.queue) == 1000:
                    mount.commit()
            mount.commit()
        for turn in range(18):
            bench.fs = trees[count := (100, 2000)[turn % 2]]
            began = time.perf_counter()
            make(bench)
            times[count].append(time.perf_counter() - began)
        assert min(times[2000]) < 4 * min(times[100]) + 0.01, times


def restore(bench: Bench, name: str, *path: bytes, own: int = 0) -> Restored:
    wish = Wish(At(checkpoint=name), path, own=frozenset([own]))
    return bench.service.db.write(lambda tx: bench.service.restores.restore(tx, bench.fs, None, wish))


@pytest.mark.parametrize("path", [(), (b"f",)])
def test_a_write_on_what_a_restore_replaced_becomes_a_copy(bench: Bench, path: tuple[bytes, ...]) -> None:
    """A mount that has not heard of the restore sends a patch of the content it knew."""
    mount = bench.mount()
    ino = mount.file(ROOT_INO, b"f", b"one")
    mount.commit()
    made = make(bench)
    mount.write(ino, b"two" * 100, mount.seq)
    mount.commit()
    restore(bench, made["checkpoint_id"], *path, own=mount.session)
    mount.write(ino, b"two" * 100 + b"!", mount.seq, full=False, appended_from=300)
    (told,) = mount.commit()
    assert (told.status, told.name[:11]) == ("conflict", b"f.conflict-")
    tree = bench.tree()
    assert tree.pop("f") == b"one"
    assert list(tree.values()) == [b"two" * 100 + b"!"]


def test_content_of_a_file_that_a_restore_removed_comes_back_in_its_place(bench: Bench) -> None:
    mount = bench.mount()
    d = mount.mkdir(ROOT_INO, b"d")
    mount.commit()
    made = make(bench)
    ino = mount.file(d, b"late", b"x")
    mount.commit()
    seq = mount.seq
    restore(bench, made["checkpoint_id"], own=mount.session)
    assert bench.tree() == {"d": None}
    mount.write(ino, b"still written", seq)
    assert [one.status for one in mount.commit()] == ["conflict"]
    assert bench.tree() == {"d": None, "d/late": b"still written"}


def test_the_feed_tells_a_restore_and_of_a_large_one_to_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(tmp_path) as bench:
        mount = bench.mount()
        inos = [mount.file(ROOT_INO, b"f%d" % number, b"one") for number in range(20)]
        mount.commit()
        made = make(bench)
        mount.write(inos[0], b"two", mount.seq)
        mount.commit()
        done = restore(bench, made["checkpoint_id"], own=mount.session)
        page = bench.service.feed.read(bench.fs, done.seq - 1)
        assert [change.inodes for change in page.changes] == [(inos[0],)]
        for ino in inos:
            mount.write(ino, b"three", done.seq)
        mount.commit()
        monkeypatch.setattr(feed, "FEED_TOLD_MAX", 10)
        large = restore(bench, made["checkpoint_id"], own=mount.session)
        assert bench.service.feed.read(bench.fs, large.seq - 1).reset
        assert bench.service.feed.read(bench.fs, large.seq).changes == ()
        assert not bench.service.feed.read(bench.fs, large.seq).reset
        assert bench.read(bench.find("f7")) == b"one"


def test_a_restore_of_what_is_there_does_nothing(bench: Bench) -> None:
    mount = bench.mount()
    directory = mount.mkdir(ROOT_INO, b"d")
    kept = mount.file(directory, b"kept", b"1")
    long = mount.file(ROOT_INO, b"long", b"x" * (BLOCK + 5))
    mount.symlink(ROOT_INO, b"link", b"long")
    mount.setxattr(kept, b"user.a", b"1")
    mount.commit()
    made = make(bench)["checkpoint_id"]

    def differs(act: Callable[[Mount], object]) -> None:
        other = bench.mount("other")
        act(other)
        other.commit()
        wish = Wish(At(checkpoint=made), force=True)
        done, again = (
            bench.service.db.write(lambda tx: bench.service.restores.restore(tx, bench.fs, None, wish))
            for _ in range(2)
        )
        assert done.moved
        assert done.undo is not None
        assert (again.moved, again.changes, again.undo, again.seq) == (False, 0, None, done.seq)

    differs(lambda other: other.write(kept, b"2", 2**40))
    differs(lambda other: other.write(long, b"x" * BLOCK + b"other", 2**40))
    differs(lambda other: other.setattr(kept, mode=0o600))
    differs(lambda other: other.setxattr(kept, b"user.a", None))
    differs(lambda other: other.file(directory, b"new", b""))
    differs(lambda other: other.unlink(directory, b"kept", kept, 2**40))
    differs(lambda other: other.rename(directory, b"kept", kept, ROOT_INO, b"moved"))
    differs(lambda other: other.link(kept, ROOT_INO, b"second"))
    assert len(page(bench)[0]) == 9


def test_a_path_restore_leaves_what_is_outside_alone(bench: Bench) -> None:
    mount = bench.mount()
    d = mount.mkdir(ROOT_INO, b"d")
    ino = mount.file(d, b"in", b"one")
    mount.link(ino, ROOT_INO, b"out")
    mount.link(ino, d, b"in2")
    mount.setxattr(ino, b"user.k", b"v1")
    mount.mkdir(d, b"sub")
    mount.commit()
    made = make(bench)
    mount.write(ino, b"two", mount.seq)
    mount.setxattr(ino, b"user.k", b"v2")
    mount.setattr(d, mode=0o700)
    mount.rmdir(d, b"sub", bench.find("d/sub").ino)
    mount.file(d, b"new", b"n")
    mount.commit()
    done = restore(bench, made["checkpoint_id"], b"d", own=mount.session)
    assert done.undo is not None
    assert bench.tree() == {"d": None, "d/in": b"one", "d/in2": b"one", "d/sub": None, "out": b"two"}
    inside, outside = bench.find("d/in"), bench.find("out")
    assert inside.ino == bench.find("d/in2").ino != outside.ino == ino
    assert (inside.xattrs, outside.xattrs) == ({b"user.k": b"v1"}, {b"user.k": b"v2"})
    assert bench.find("d").mode & 0o777 == 0o755
    again = restore(bench, made["checkpoint_id"], b"d", own=mount.session)
    assert (again.moved, again.undo) == (False, None), "nothing is left to do"


def test_an_export_survives_the_end_of_its_checkpoint(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        export_while_it_goes(bench)


def export_while_it_goes(bench: Bench) -> None:
    mount = bench.mount()
    data = {f"f{number}": b"%d" % number * 50 for number in range(2 * EXPORT_PAGE)}
    inos = {name.encode(): mount.file(ROOT_INO, name.encode(), content) for name, content in data.items()}
    mount.commit()
    made = make(bench)
    service, at = bench.service, At(checkpoint=made["checkpoint_id"])
    opened = Export.open(service.db, service.packs, bench.host, bench.fs, ADMIN_GRANT, at, ())
    pieces = [opened.next_piece()]
    for name in list(inos)[::2]:
        mount.unlink(ROOT_INO, name, inos[name], mount.seq)
    mount.commit()
    delete(bench, made["checkpoint_id"])
    while piece := opened.next_piece():
        pieces.append(piece)
    opened.close()
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        found = {one.name[2:]: tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]
    assert found == data
    pins = service.db.read(lambda tx: tx.all("SELECT kind FROM pin WHERE fs=?", (bench.fs.id,)))
    assert pins == []


def test_checkpoints_and_commits_race_for_one_filesystem(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """Two replicas: one commits, the other makes checkpoints. Each shows a prefix of the commits."""
    url = postgres_server.fresh()
    with Bench(tmp_path, database=url) as bench:
        other = open_service(ServiceOptions(tmp_path, url), bench.host)
        mount = bench.mount()
        ino = mount.file(ROOT_INO, b"count", b"0")
        mount.commit()
        failed: list[BaseException] = []
        ready = threading.Event()

        def write() -> None:
            try:
                for turn in range(1, 21):
                    mount.write(ino, b"%d" % turn, mount.seq)
                    mount.create(ROOT_INO, b"n%d" % turn)
                    mount.commit()
                    ready.set()
            except BaseException as exc:
                failed.append(exc)
                raise

        thread = threading.Thread(target=write)
        thread.start()
        assert ready.wait(60)
        made = [
            other.db.write(lambda tx: other.checkpoints.make(tx, bench.fs, None, Ask())) for _ in range(10)
        ]
        for one in made[::3]:
            other.db.write(
                lambda tx, n=one["checkpoint_id"]: other.checkpoints.delete(tx, bench.fs, None, n)  # type: ignore[misc]
            )
        thread.join(60)
        assert not failed
        for at, one in enumerate(made):
            if at % 3 == 0:
                continue
            _, (listing,) = bench.service.namespace.ask(
                bench.fs, [(LIST, ROOT_INO, b"", 1000)], At(checkpoint=one["checkpoint_id"])
            )
            names = {entry.name for entry in listing[0]}
            turns = one["fs_seq"] - 1
            assert names == {b"count", *(b"n%d" % turn for turn in range(1, turns + 1))}
        other.close()


@pytest.mark.parametrize("size", [200_000, 2 * BLOCK])
def test_an_export_of_damaged_content_ends_with_its_name(tmp_path: Path, size: int) -> None:
    with Bench(tmp_path) as bench:
        mount = bench.mount()
        mount.file(ROOT_INO, b"a", b"fine")
        mount.commit()
        mount.file(ROOT_INO, b"b", random.Random(1).randbytes(size))
        mount.file(ROOT_INO, b"c", b"fine too")
        mount.commit()
        (pack,) = (path for path in (tmp_path / "blobs").rglob("*") if path.is_file())
        raw = bytearray(pack.read_bytes())
        raw[-1000] ^= 1
        pack.write_bytes(raw)
        opened = Export.open(
            bench.service.db, bench.service.packs, bench.host, bench.fs, ADMIN_GRANT, None, ()
        )
        with pytest.raises(IntegrityError, match=r"^b: bytes do not match"):
            list(iter(opened.next_piece, b""))
        opened.close()


def test_mounts_beyond_those_that_may_be_asked_are_not_said_to_be_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barriers, "DRAIN_SESSIONS_MAX", 2)
    with Bench(tmp_path) as bench:
        mounts = [bench.mount(f"host{number}") for number in range(4)]
        found = bench.service.barriers.ask(bench.fs, ADMIN_GRANT, 10)
        assert [one.id != 0 for one in found] == [True, True, False]
        for one in found[:2]:
            bench.service.barriers.answer(
                bench.fs, one.session, one.id, BarrierAnswer(True, 1, (0, 0, 0), "")
            )
        answers = bench.service.barriers.answers(found)
        assert len(answers) == 2
        told = barriers.shown(found, answers, 10)
        assert [one["included"] for one in told] == [True, True, False]
        assert told[2]["session"] == mounts[2].session and "more than 2 mounts" in told[2]["reason"]
        bench.service.barriers.done(found)
        assert bench.service.db.read(lambda tx: tx.all("SELECT 1 FROM barrier")) == []
