"""The Python library for asyncio and trio: `library.FileSystem` with every call on a worker thread.

The calls are the blocking ones; a bounded number run at a time for each filesystem, more wait. A call whose
task is cancelled is given up at once and ends by itself on its thread, within the time-outs; a lease that it
acquired so is released again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Generic, ParamSpec, TypeVar

from fsd.client.atfork import watch
from fsd.client.checkpoints import AnyWriter, Blobs, Checkpoints, Instances, JsonObject, Kind, Lease
from fsd.client.contract import Writer
from fsd.client.library import Bytes, FileSystem, LocalPath, Path, open_http
from fsd.client.transfer import CopyResult
from fsd.model.limits import ASYNC_CALLS

T = TypeVar("T")
P = ParamSpec("P")
_END: Any = object()


class _Call(Generic[T]):
    """A blocking call on a worker thread. Where nobody takes its result any more, `undo` gets it."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], None] | None) -> None:
        self._call, self._undo = call, undo
        self._lock = threading.Lock()
        self._given_up = False
        self._made: list[T] = []

    def run(self) -> T:
        made = self._call()
        with self._lock:
            self._made.append(made)
            late = self._given_up
        if late and self._undo is not None:
            self._undo(made)
        return made

    def give_up(self) -> Callable[[], None] | None:
        """The task was cancelled; what is left to do on a thread."""
        with self._lock:
            self._given_up = True
            made = list(self._made)
        if not made or self._undo is None:
            return None
        undo = self._undo
        return lambda: undo(made[0])


class Threads:
    """Runs blocking calls for whichever event loop runs the caller."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(ASYNC_CALLS, "fsd-call")
        self._closed = False
        watch(self)

    def forked(self) -> None:
        """In a forked child: the pool's threads are the parent's, and it would wait for them."""
        self._pool = ThreadPoolExecutor(ASYNC_CALLS, "fsd-call")
        if self._closed:
            self._pool.shutdown(wait=False)

    async def run(
        self, call: Callable[[], T], undo: Callable[[T], None] | None = None, *, finish: bool = False
    ) -> T:
        """`call()` on a thread. Cancelling gives it up (see `_Call`), and drops it where it has not begun
        unless it must `finish`."""
        one = _Call(call, undo)
        future = self._pool.submit(one.run)
        try:
            return await _result(future)
        except BaseException:
            left = one.give_up()
            if not finish:
                future.cancel()
            if left is not None:
                # Not in the pool, which may be closed already.
                threading.Thread(target=left, name="fsd-undo", daemon=True).start()
            raise

    def close(self) -> None:
        """Without waiting for calls that were given up."""
        self._closed = True
        self._pool.shutdown(wait=False)


async def _result(future: Future[T]) -> T:
    """Wait for a thread's result; cancelling leaves the thread alone."""
    if _in_asyncio():
        return await asyncio.shield(asyncio.wrap_future(future))
    import trio

    token, done = trio.lowlevel.current_trio_token(), trio.Event()
    future.add_done_callback(lambda _: _tell(token.run_sync_soon, done.set))
    await done.wait()
    return future.result()


def _tell(soon: Callable[[Callable[[], None]], None], what: Callable[[], None]) -> None:
    """Wake a trio task, unless its run has ended."""
    import trio

    try:
        soon(what)
    except trio.RunFinishedError:
        return


def _in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Part:
    """A part of the library whose methods run on threads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def _run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(lambda: method(*args, **kwargs))


class AsyncLease:
    """As `Lease`."""

    def __init__(self, threads: Threads, lease: Lease) -> None:
        self._threads, self.lease = threads, lease

    @property
    def fields(self) -> JsonObject:
        return self.lease.fields

    @property
    def thread_id(self) -> str:
        return self.lease.thread_id

    @property
    def fence(self) -> int:
        return self.lease.fence

    @property
    def expires_at(self) -> float:
        return self.lease.expires_at

    @property
    def renew_after_ms(self) -> float:
        return self.lease.renew_after_ms

    async def renew(self) -> float:
        return await self._threads.run(self.lease.renew)

    async def release(self) -> None:
        await self._threads.run(self.lease.release)


class AsyncWriter:
    """As `Writer`: a lease that is renewed while an `async with` block runs, and released at its end."""

    def __init__(self, threads: Threads, writer: Writer) -> None:
        self._threads, self.writer = threads, writer

    async def __aenter__(self) -> AsyncWriter:
        await self._threads.run(self.writer.__enter__, lambda held: held.__exit__(None, None, None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The release happens, whoever still waits for it.
        await self._threads.run(lambda: self.writer.__exit__(kind, exc, trace), finish=True)


Held = AnyWriter | AsyncLease | AsyncWriter


def _plain(writer: Held) -> AnyWriter:
    if isinstance(writer, AsyncLease):
        return writer.lease
    return writer.writer if isinstance(writer, AsyncWriter) else writer


class AsyncCheckpoints(_Part):
    """As `Checkpoints`."""

    def __init__(self, threads: Threads, there: Checkpoints) -> None:
        super().__init__(threads)
        self._there = there

    async def get(self, checkpoint_id: str, *, portable: bool = False) -> JsonObject | None:
        return await self._run(self._there.get, checkpoint_id, portable=portable)

    async def list(
        self, thread_id: str, *, render: bool = False, portable: bool = False
    ) -> Sequence[JsonObject]:
        return await self._run(self._there.list, thread_id, render=render, portable=portable)

    async def get_head(self, thread_id: str) -> str | None:
        return await self._run(self._there.get_head, thread_id)

    async def list_blob_references(self) -> Sequence[JsonObject]:
        return await self._run(self._there.list_blob_references)

    async def missing_blobs(self, checkpoint_id: str) -> Sequence[str]:
        return await self._run(self._there.missing_blobs, checkpoint_id)

    async def acquire_writer(self, thread_id: str) -> AsyncLease:
        lease = await self._threads.run(lambda: self._there.acquire_writer(thread_id), Lease.release)
        return AsyncLease(self._threads, lease)

    def writer(self, thread_id: str) -> AsyncWriter:
        return AsyncWriter(self._threads, self._there.writer(thread_id))

    async def append(self, checkpoint: JsonObject, *, expected_head_id: str | None, writer: Held) -> str:
        there = self._there.append
        return await self._run(there, checkpoint, expected_head_id=expected_head_id, writer=_plain(writer))

    async def delete_head(self, thread_id: str, checkpoint_id: str, *, writer: Held) -> None:
        await self._run(self._there.delete_head, thread_id, checkpoint_id, writer=_plain(writer))

    async def delete_checkpoints(self, thread_id: str, keep: int, *, writer: Held) -> Sequence[str]:
        return await self._run(self._there.delete_checkpoints, thread_id, keep, writer=_plain(writer))

    async def keep_newest(self, thread_id: str, keep: int) -> Sequence[str]:
        return await self._run(self._there.keep_newest, thread_id, keep)

    async def fork_from_checkpoint(
        self,
        *,
        source_thread_id: str,
        source_checkpoint_id: str,
        destination_thread_id: str,
        destination_checkpoint_id: str,
        created_at: float,
        writer: Held,
    ) -> JsonObject:
        return await self._run(
            self._there.fork_from_checkpoint,
            source_thread_id=source_thread_id,
            source_checkpoint_id=source_checkpoint_id,
            destination_thread_id=destination_thread_id,
            destination_checkpoint_id=destination_checkpoint_id,
            created_at=created_at,
            writer=_plain(writer),
        )

    async def sweep(self, *, older_than_ms: float | None = None) -> Sequence[str]:
        return await self._run(self._there.sweep, older_than_ms=older_than_ms)

    async def load_thread(self, thread_id: str) -> Sequence[Any]:
        return await self._run(self._there.load_thread, thread_id)

    async def save_thread(self, thread_id: str, messages: Sequence[Any]) -> None:
        await self._run(self._there.save_thread, thread_id, messages)


class AsyncInstances(_Part):
    """As `Instances`."""

    def __init__(self, threads: Threads, there: Instances) -> None:
        super().__init__(threads)
        self._there = there

    async def get(self, key: str) -> JsonObject | None:
        return await self._run(self._there.get, key)

    async def upsert(self, record: JsonObject) -> None:
        await self._run(self._there.upsert, record)

    async def delete(self, key: str) -> None:
        await self._run(self._there.delete, key)


class AsyncBlobs(_Part):
    """As `Blobs`."""

    def __init__(self, threads: Threads, there: Blobs) -> None:
        super().__init__(threads)
        self._there = there

    async def put(self, data: bytes, kind: Kind = "files") -> str:
        return await self._run(self._there.put, data, kind)

    async def put_file(self, path: str | bytes | os.PathLike[str], kind: Kind = "files") -> tuple[str, int]:
        return await self._run(self._there.put_file, path, kind)

    async def get(self, key: str) -> bytes | None:
        return await self._run(self._there.get, key)

    async def save(self, key: str, target: BinaryIO) -> int:
        return await self._run(self._there.save, key, target)

    async def has(self, key: str) -> bool:
        return await self._run(self._there.has, key)

    async def delete(self, key: str) -> None:
        await self._run(self._there.delete, key)

    def list(self, prefix: str = "") -> AsyncIterator[JsonObject]:
        return _iterate(self._threads, lambda: self._there.list(prefix))


class AsyncFileSystem(_Part):
    """As `FileSystem`. Use as `async with`, or call `close`."""

    def __init__(self, there: FileSystem) -> None:
        super().__init__(Threads())
        self.there = there
        self.id = there.id
        self.checkpoints = AsyncCheckpoints(self._threads, there.checkpoints)
        self.instances = AsyncInstances(self._threads, there.instances)
        self.blobs = AsyncBlobs(self._threads, there.blobs)

    async def __aenter__(self) -> AsyncFileSystem:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.there.close()
        self._threads.close()

    async def read(self, path: Path, *, offset: int = 0, length: int | None = None) -> bytes:
        return await self._run(self.there.read, path, offset=offset, length=length)

    def stream(self, path: Path, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        return _iterate(self._threads, lambda: self.there.stream(path, offset=offset, length=length))

    async def write(
        self,
        path: Path,
        data: Bytes | BinaryIO,
        *,
        append: bool = False,
        overwrite: bool = True,
        mode: int | None = None,
        if_match: str | None = None,
    ) -> JsonObject:
        there = self.there.write
        return await self._run(
            there, path, data, append=append, overwrite=overwrite, mode=mode, if_match=if_match
        )

    async def stat(self, path: Path, *, follow: bool = True) -> JsonObject:
        return await self._run(self.there.stat, path, follow=follow)

    def list(self, path: Path = "/", *, recursive: bool = False) -> AsyncIterator[JsonObject]:
        return _iterate(self._threads, lambda: self.there.list(path, recursive=recursive))

    async def make_dir(self, path: Path, *, parents: bool = True) -> JsonObject:
        return await self._run(self.there.make_dir, path, parents=parents)

    async def remove(self, path: Path, *, recursive: bool = False) -> int:
        return await self._run(self.there.remove, path, recursive=recursive)

    async def rename(self, source: Path, target: Path, *, overwrite: bool = True) -> JsonObject:
        return await self._run(self.there.rename, source, target, overwrite=overwrite)

    async def upload_dir(self, local: LocalPath, path: Path, *, resume: bool = False) -> CopyResult:
        return await self._run(self.there.upload_dir, local, path, resume=resume)

    async def download_dir(self, path: Path, local: LocalPath, *, resume: bool = False) -> CopyResult:
        return await self._run(self.there.download_dir, path, local, resume=resume)


async def _iterate(threads: Threads, begin: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
    """What a blocking iterator gives, each step on a thread."""
    source = begin()
    while True:
        one: T = await threads.run(lambda: next(source, _END))
        if one is _END:
            return
        yield one


def connect_async(
    token: str,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    ca_file: str | None = None,
    insecure: bool = False,
    timeout: float | None = None,
    retry_for: float | None = None,
) -> AsyncFileSystem:
    """As `library.connect`, for asyncio and trio. Nothing is asked yet."""
    http = open_http(
        token,
        region=region,
        endpoint=endpoint,
        ca_file=ca_file,
        insecure=insecure,
        timeout=timeout,
        retry_for=retry_for,
    )
    return AsyncFileSystem(FileSystem(http))
