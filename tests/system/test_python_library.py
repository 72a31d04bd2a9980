"""The Python library against a real server: files, checkpoints, leases, blobs; blocking, asyncio and trio."""

from __future__ import annotations

import asyncio
import inspect
import io
import random
import re
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from support.contract import artifact, checkpoint, file, key
from support.proxy import LOSE_REPLY, FaultProxy, Request, delay_reply
from support.server import Server
from support.wait import wait_for

import fsd.client
from fsd.client import AsyncFileSystem, FileSystem, connect, connect_async
from fsd.client.aio import AsyncBlobs, AsyncCheckpoints, AsyncInstances
from fsd.client.checkpoints import Blobs, Checkpoints, Instances, blob_key
from fsd.client.sources import LocalChanged
from fsd.model import errors
from fsd.model.errors import (
    CheckpointDuplicateId,
    CheckpointInvalidEntry,
    CheckpointInvalidId,
    Conflict,
    ForkSourceNotFound,
    FsdError,
    InternalError,
    InvalidRange,
    MissingBlob,
    NotAuthenticated,
    NotFound,
    NotHead,
    ParentMismatch,
    StaleHead,
    UsageError,
    WriterConflict,
    WriterLost,
    from_body,
)
from fsd.model.limits import ASYNC_CALLS

LEASE = 60_000


@pytest.fixture
def token(trusted: Server) -> str:
    return trusted.create(lease_duration_ms=LEASE, renew_after_ms=LEASE / 2).token


@pytest.fixture
def fs(token: str) -> Iterator[FileSystem]:
    with connect(token) as made:
        yield made


def run_on(library: str, scene: Callable[[], Awaitable[Any]]) -> Any:
    if library == "trio":
        return trio.run(scene)
    return asyncio.run(scene())  # type: ignore[arg-type]


def asks(op: str) -> Callable[[Request], bool]:
    return lambda request: request.path == f"/v1/checkpoints/{op}"


both = pytest.mark.parametrize("library", ["asyncio", "trio"])


def test_files_are_written_read_and_listed(fs: FileSystem, tmp_path: Path) -> None:
    stat = fs.write("/notes/a.txt", b"hello")
    assert stat["size_bytes"] == 5
    fs.write("/notes/a.txt", io.BytesIO(b" world"), append=True)
    assert fs.read("/notes/a.txt") == b"hello world"
    assert fs.read(b"/notes/a.txt", offset=6, length=3) == b"wor"
    with pytest.raises(Conflict):
        fs.write("/notes/a.txt", b"x", overwrite=False)
    with pytest.raises(Conflict):
        fs.write("/notes/a.txt", b"x", if_match=stat["revision"])
    fs.write("/notes/a.txt", memoryview(bytearray(b" of all")), append=True)
    assert fs.read("/notes/a.txt") == b"hello world of all"
    fs.write("/notes/a.txt", bytearray(b"new"))
    assert fs.read("/notes/a.txt") == b"new"
    with pytest.raises(TypeError, match="not str"):
        fs.write("/notes/a.txt", "text")  # type: ignore[arg-type]
    assert [entry["name"] for entry in fs.list("/", recursive=True)] == ["notes", "a.txt"]
    fs.rename("/notes/a.txt", "/notes/b.txt")
    fs.make_dir("/notes/below")
    assert sorted(entry["name"] for entry in fs.list("/notes")) == ["b.txt", "below"]
    assert fs.stat("/notes/b.txt")["kind"] == "file"
    assert fs.remove("/notes", recursive=True) == 3
    with pytest.raises(NotFound):
        fs.read("/notes/b.txt")
    with pytest.raises(UsageError):
        fs.read("relative")


def test_a_directory_goes_there_and_back(fs: FileSystem, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(20):
        (tree / "sub" / f"f{number}").write_bytes(random.Random(number).randbytes(5000))
    (tree / "link").symlink_to("sub/f1")
    done = fs.upload_dir(tree, "/up")
    assert done.ok and done.files == 20
    assert fs.upload_dir(tree, "/up", resume=True).skipped >= 20
    back = fs.download_dir("/up", tmp_path / "back")
    assert back.ok
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            assert (tmp_path / "back" / path.relative_to(tree)).read_bytes() == path.read_bytes()
    with pytest.raises(UsageError):
        fs.upload_dir(tree / "sub" / "f1", "/x")


def test_a_run_of_checkpoints(fs: FileSystem) -> None:
    """What a host does: save, branch, prune, sweep."""
    data = b"the file's content"
    blob = fs.blobs.put(data)
    there = fs.checkpoints
    with there.writer("t") as writer:
        with pytest.raises(WriterConflict):
            there.acquire_writer("t")
        head = None
        for name in ("a", "b", "c"):
            record = checkpoint(name, parent=head, files=[file("f", blob if name == "c" else key(name))])
            assert there.append(record, expected_head_id=head, writer=writer) == name
            head = name
    assert there.get_head("t") == "c"
    assert [record["id"] for record in there.list("t")] == ["a", "b", "c"]
    assert there.missing_blobs("c") == []
    assert there.missing_blobs("a") == [key("a")]
    with there.writer("u") as writer:
        made = there.fork_from_checkpoint(
            source_thread_id="t",
            source_checkpoint_id="b",
            destination_thread_id="u",
            destination_checkpoint_id="fork",
            created_at=time.time() * 1000,
            writer=writer,
        )
    assert made["reason"] == "fork-root"
    assert there.load_thread("u") == made["conversation"]
    assert there.keep_newest("t", 1) == ["a", "b"]
    assert {row["key"] for row in there.list_blob_references()} == {blob, key("b")}
    loose = fs.blobs.put(b"nobody's")
    wait_for(lambda: there.sweep(older_than_ms=0) == [loose], 30, "the clock to move on")
    assert fs.blobs.get(blob) == data
    lease = there.acquire_writer("t")
    there.delete_head("t", "c", writer=lease)
    lease.release()
    assert there.get_head("t") is None


def test_refusals_are_exceptions_by_code(fs: FileSystem) -> None:
    there = fs.checkpoints
    lease = there.acquire_writer("t")
    there.append(checkpoint("a"), expected_head_id=None, writer=lease)
    cases: list[tuple[type[FsdError], Callable[[], Any]]] = [
        (CheckpointInvalidId, lambda: there.get("")),
        (CheckpointInvalidId, lambda: there.get("\ud800")),
        (
            CheckpointInvalidEntry,
            lambda: there.append(checkpoint("b", files=[{}]), expected_head_id="a", writer=lease),
        ),
        (
            CheckpointDuplicateId,
            lambda: there.append(checkpoint("a", label="other"), expected_head_id="a", writer=lease),
        ),
        (StaleHead, lambda: there.append(checkpoint("b"), expected_head_id=None, writer=lease)),
        (ParentMismatch, lambda: there.append(checkpoint("b"), expected_head_id="a", writer=lease)),
        (NotHead, lambda: there.delete_head("t", "b", writer=lease)),
        (WriterConflict, lambda: there.keep_newest("t", 1)),
        (WriterLost, lambda: there.delete_head("t", "a", writer={**lease.fields, "fence": 99})),
        (InvalidRange, lambda: there.sweep(older_than_ms=-1)),
        (InvalidRange, lambda: there.sweep(older_than_ms=float("inf"))),
        (
            CheckpointInvalidEntry,
            lambda: there.append(checkpoint("b", createdAt=float("nan")), expected_head_id="a", writer=lease),
        ),
        (
            UsageError,
            lambda: there.append(checkpoint("b", extra=float("nan")), expected_head_id="a", writer=lease),
        ),
        (
            CheckpointInvalidEntry,
            lambda: there.fork_from_checkpoint(
                source_thread_id="t",
                source_checkpoint_id="a",
                destination_thread_id="u",
                destination_checkpoint_id="f",
                created_at=float("-inf"),
                writer=lease,
            ),
        ),
        (
            ForkSourceNotFound,
            lambda: there.fork_from_checkpoint(
                source_thread_id="t",
                source_checkpoint_id="never",
                destination_thread_id="u",
                destination_checkpoint_id="f",
                created_at=1,
                writer=lease,
            ),
        ),
    ]
    for wanted, call in cases:
        with pytest.raises(FsdError) as caught:
            call()
        assert type(caught.value) is wanted, (wanted, caught.value)
    lease.release()
    with pytest.raises(WriterLost):
        lease.renew()
    lease.release()


def test_a_code_of_a_newer_server_is_a_plain_error() -> None:
    made = from_body({"error": {"code": "SANDBOX_SNAPSHOT_LATER", "message": "m", "details": {"x": 1}}}, 409)
    assert type(made) is FsdError
    assert made.details == {"x": 1, "code": "SANDBOX_SNAPSHOT_LATER"}
    assert not made.retryable
    assert type(from_body({"error": {"code": "internal", "message": "m"}}, 500)) is InternalError


def test_an_append_again_is_a_success_when_it_is_the_same(fs: FileSystem) -> None:
    there = fs.checkpoints
    lease = there.acquire_writer("t")
    record = checkpoint("a", label=None, files=[file("f", size=3.0)], artifacts=[artifact("p")])
    del record["parentCheckpointId"]
    for _ in range(2):
        assert there.append(record, expected_head_id=None, writer=lease) == "a"
    with pytest.raises(CheckpointDuplicateId):
        there.append({**record, "reason": "another"}, expected_head_id=None, writer=lease)
    lease.release()


def test_lost_answers_do_nothing_twice(trusted: Server, token: str) -> None:
    """The answers to an acquire, an append and a release vanish on the way; the caller notices nothing."""
    with FaultProxy(trusted.url) as proxy, connect(token, endpoint=proxy.url, retry_for=20) as fs:
        for op in ("acquireWriter", "append", "release"):
            proxy.next(LOSE_REPLY, asks(op))
        with fs.checkpoints.writer("t") as writer:
            fs.checkpoints.append(checkpoint("a"), expected_head_id=None, writer=writer)
        assert fs.checkpoints.get_head("t") == "a"
        assert len(fs.checkpoints.list("t")) == 1
        fs.checkpoints.acquire_writer("t").release()
        assert proxy.pending() == 0, "each of the answers was lost"


def test_a_lease_is_renewed_while_it_is_held(trusted: Server) -> None:
    # Many renewals before its end: this process may stand still for a while.
    token = trusted.create(lease_duration_ms=4000, renew_after_ms=200).token
    with connect(token) as fs:
        with fs.checkpoints.writer("t") as writer:
            time.sleep(4.2)  # longer than the lease: time itself is what is tested
            fs.checkpoints.append(checkpoint("a"), expected_head_id=None, writer=writer)
        fs.checkpoints.acquire_writer("t").release()


def test_a_failed_renewal_is_what_the_caller_sees(trusted: Server) -> None:
    """Somebody released the lease: the renewal fails, then the write, then the block."""
    token = trusted.create(lease_duration_ms=30_000, renew_after_ms=50).token
    with connect(token) as fs:

        def block() -> None:
            with fs.checkpoints.writer("t") as writer:
                fs.checkpoints._call("release", {"writer": writer.current()})
                wait_for(lambda: writer._failed is not None, 30, "a renewal to fail")
                with pytest.raises(WriterLost):
                    fs.checkpoints.append(checkpoint("a"), expected_head_id=None, writer=writer)
                raise ValueError("the caller's own")

        with pytest.raises(WriterLost) as caught:
            block()
        assert isinstance(caught.value.__cause__, ValueError)
        assert fs.checkpoints.get_head("t") is None


def test_a_lease_shows_when_it_ends(fs: FileSystem) -> None:
    lease = fs.checkpoints.acquire_writer("t")
    before = lease.expires_at
    assert (lease.thread_id, lease.fence, lease.renew_after_ms) == ("t", 1, LEASE / 2)
    wait_for(lambda: lease.renew() > before, 30, "a later end")
    assert lease.expires_at > before
    lease.release()


def test_blobs_of_files_and_streams(fs: FileSystem, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3_000_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert fs.blobs.put_file(path) == (blob_key(data), len(data))
    assert fs.blobs.put(data) == blob_key(data)
    picture = fs.blobs.put(b"", "artifacts")
    assert fs.blobs.get(picture) == b""
    out = io.BytesIO()
    assert fs.blobs.save(blob_key(data), out) == len(data)
    assert out.getvalue() == data
    assert fs.blobs.has(blob_key(data))
    assert [one["key"] for one in fs.blobs.list("sandbox-files/")] == [blob_key(data)]
    fs.blobs.delete(blob_key(data))
    fs.blobs.delete(blob_key(data))
    assert not fs.blobs.has(blob_key(data))
    assert fs.blobs.get(blob_key(data)) is None
    with pytest.raises(MissingBlob):
        fs.blobs.save(blob_key(data), out)
    for bad in ("a b", "../x?", "\u00e9"):
        with pytest.raises(UsageError):
            fs.blobs.get(bad)


def test_a_file_written_while_it_is_stored_is_told(
    fs: FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    has = fs.blobs._contract.has

    def changing(asked: str) -> bool:
        path.write_bytes(b"y" * 1000)
        return has(asked)

    monkeypatch.setattr(fs.blobs._contract, "has", changing)
    with pytest.raises(LocalChanged):
        fs.blobs.put_file(path)
    assert list(fs.blobs.list()) == []


def test_instances(fs: FileSystem) -> None:
    assert fs.instances.get("k") is None
    fs.instances.upsert({"key": "k", "provider": "p", "latestRunId": None})
    assert fs.instances.get("k") == {"key": "k", "provider": "p"}
    fs.instances.delete("k")
    fs.instances.delete("k")
    assert fs.instances.get("k") is None


def test_a_wrong_token_is_told_at_once() -> None:
    with pytest.raises(NotAuthenticated):
        connect("no token")
    with pytest.raises(NotAuthenticated):
        connect_async("no token")
    with pytest.raises(AttributeError):
        fsd.client.nothing  # noqa: B018


# -- asyncio and trio ----------------------------------------------------------------------------------


@both
def test_a_run_without_blocking(library: str, token: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(b"1")

    async def scene() -> None:
        async with connect_async(token) as fs:
            await fs.write("/a/b", b"hello")
            assert await fs.read("/a/b", offset=1) == b"ello"
            assert [entry["name"] async for entry in fs.list("/a")] == ["b"]
            assert b"".join([piece async for piece in fs.stream("/a/b")]) == b"hello"
            assert (await fs.stat("/a/b"))["size_bytes"] == 5
            assert (await fs.upload_dir(tmp_path / "tree", "/up")).ok
            assert (await fs.download_dir("/up", tmp_path / "back")).ok
            await fs.make_dir("/d")
            await fs.rename("/d", "/e")
            assert await fs.remove("/e") == 1
            blob = await fs.blobs.put(b"blob")
            assert await fs.blobs.get(blob) == b"blob"
            assert [one["key"] async for one in fs.blobs.list()] == [blob]
            there = fs.checkpoints
            async with there.writer("t") as writer:
                record = checkpoint("a", files=[file("f", blob)])
                await there.append(record, expected_head_id=None, writer=writer)
                with pytest.raises(WriterConflict):
                    await there.acquire_writer("t")
            lease = await there.acquire_writer("t")
            assert (lease.thread_id, lease.fence) == ("t", 2)
            await lease.renew()
            await there.append(checkpoint("b", parent="a"), expected_head_id="a", writer=lease)
            await lease.release()
            assert await there.keep_newest("t", 1) == ["a"]
            assert [one["id"] for one in await there.list("t")] == ["b"]
            assert await there.get_head("t") == "b"
            await there.save_thread("t", [1])
            assert await there.load_thread("t") == [1]
            await fs.instances.upsert({"key": "k"})
            assert await fs.instances.get("k") == {"key": "k"}
            with pytest.raises(CheckpointInvalidId):
                await there.get("")

    run_on(library, scene)


@both
def test_calls_run_beside_each_other(library: str, token: str) -> None:
    """And the loop goes on meanwhile."""

    async def write(fs: AsyncFileSystem, number: int) -> None:
        await fs.write(f"/f{number}", b"x")

    async def on_asyncio(fs: AsyncFileSystem) -> None:
        await asyncio.gather(*(write(fs, number) for number in range(40)))

    async def on_trio(fs: AsyncFileSystem) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(write, fs, number)

    async def scene() -> None:
        async with connect_async(token) as fs:
            await (on_trio(fs) if library == "trio" else on_asyncio(fs))
            assert len([entry async for entry in fs.list()]) == 40
            mine = [one for one in threading.enumerate() if one.name.startswith("fsd-call")]
            assert 1 < len(mine) <= ASYNC_CALLS, "a bounded number at a time"

    run_on(library, scene)


@both
def test_a_cancelled_acquire_leaves_no_lease(library: str, trusted: Server, token: str) -> None:
    """The answer comes when nobody waits for it any more: the lease is given back."""
    with FaultProxy(trusted.url) as proxy, connect(token) as plain:
        proxy.always(delay_reply(0.5), asks("acquireWriter"))

        async def scene() -> None:
            async with connect_async(token, endpoint=proxy.url) as fs:
                for _ in range(2):
                    if library == "trio":
                        with trio.move_on_after(0.1):
                            await fs.checkpoints.acquire_writer("t")
                        with trio.move_on_after(0.1):
                            async with fs.checkpoints.writer("u"):
                                raise AssertionError("too soon")
                    else:
                        with pytest.raises(TimeoutError):
                            async with asyncio.timeout(0.1):
                                await fs.checkpoints.acquire_writer("t")
                        with pytest.raises(TimeoutError):
                            async with asyncio.timeout(0.1), fs.checkpoints.writer("u"):
                                raise AssertionError("too soon")

        run_on(library, scene)

        def free() -> bool:
            try:
                for thread in ("t", "u"):
                    plain.checkpoints.acquire_writer(thread).release()
            except WriterConflict:
                return False
            return True

        wait_for(free, 30, "the leases to be given back")


@both
def test_a_cancelled_block_releases_its_lease(library: str, token: str) -> None:
    async def scene() -> None:
        async with connect_async(token) as fs:
            if library == "trio":
                with trio.move_on_after(0.2):
                    async with fs.checkpoints.writer("t"):
                        await trio.sleep(60)
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2), fs.checkpoints.writer("t"):
                        await asyncio.sleep(60)

    run_on(library, scene)
    with connect(token) as fs:

        def free() -> bool:
            try:
                fs.checkpoints.acquire_writer("t").release()
            except WriterConflict:
                return False
            return True

        wait_for(free, 30, "the release")


def test_the_two_libraries_have_the_same_methods() -> None:
    for plain, twin in (
        (FileSystem, AsyncFileSystem),
        (Checkpoints, AsyncCheckpoints),
        (Instances, AsyncInstances),
        (Blobs, AsyncBlobs),
    ):
        names = {name for name in vars(plain) if not name.startswith("_")} - {"http"}
        assert names == {name for name in vars(twin) if not name.startswith("_")}, plain
        for name in names:
            mine, other = (inspect.signature(getattr(cls, name)) for cls in (plain, twin))
            assert list(mine.parameters) == list(other.parameters), name
            defaults = [parameter.default for parameter in mine.parameters.values()]
            assert defaults == [parameter.default for parameter in other.parameters.values()], name


def test_the_page_names_every_method_and_error_there_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    rows = dict(re.findall(r"^\| (?:`fs\.)?(\w+)`? \| (`.*) \|$", page, re.MULTILINE))
    for part, made in (
        ("files", FileSystem),
        ("checkpoints", Checkpoints),
        ("instances", Instances),
        ("blobs", Blobs),
    ):
        named = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", rows[part])))
        there = {name for name in vars(made) if not name.startswith("_")} - {"http", "close"}
        assert named == there - {"checkpoints", "instances", "blobs"}, part
    refusals = page[page.index("Refusals are exceptions") : page.index("all are `FsdError`")]
    names = re.findall(r"`([A-Z]\w+)`", refusals)
    assert len(names) > 10
    assert all(issubclass(getattr(errors, name), errors.FsdError) for name in names)


def test_threads_share_one_filesystem(fs: FileSystem) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(5):
                fs.write(f"/{number}/{turn}", b"x")
                fs.checkpoints.get_head("t")
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failed
    assert sum(1 for _ in fs.list("/", recursive=True)) == 36


def test_the_examples_of_the_page_run(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSD_TOKEN", token)
    exec(blocks[0], {})
    scene = "async def scene():\n" + textwrap.indent(blocks[1], "    ")
    for library in ("asyncio", "trio"):
        names: dict[str, Any] = {"fsd": fsd, "token": token}
        exec(scene, names)
        run_on(library, names["scene"])
    with connect(token) as made:
        exec(blocks[2], {"fs": made})
        assert made.checkpoints.get_head("thread-1") == "checkpoint-7"
