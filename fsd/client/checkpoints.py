"""The Python library's checkpoint store: the methods of the checkpoint contract, with its data as it is.

Checkpoints, entries, artifacts and instance records are plain JSON values with the contract's own field
names; what comes back is the caller's to change. Refusals are exceptions by code (`fsd.model.errors`:
`WriterLost`, `StaleHead`, …). Any thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final, Literal, TypeAlias

from fsd.client.contract import Contract, Writer
from fsd.client.http import BytesBody, Query
from fsd.client.sources import LocalChanged, LocalFile
from fsd.model.errors import (
    CheckpointDuplicateId,
    CheckpointInvalidEntry,
    FsdError,
    IntegrityError,
    InvalidBlob,
    InvalidRange,
    MissingBlob,
    Unavailable,
    UsageError,
)
from fsd.model.limits import LIST_PAGE_MAX
from fsd.model.names import show

JsonObject = dict[str, Any]
Kind = Literal["files", "artifacts"]
_FIELDS: Final = ("threadId", "ownerToken", "fence")
_OPTIONAL: Final = ("label", "sourceRunId")


class Lease:
    """A thread's writer lease as `acquire_writer` gives it: nobody renews it by itself (`Checkpoints.writer`
    does). Times are the server's; do not compare `expires_at` with a local clock."""

    def __init__(self, contract: Contract, answer: JsonObject) -> None:
        self._contract = contract
        try:
            self.fields: JsonObject = {name: answer[name] for name in _FIELDS}
            self._expires_at: float = answer["expiresAt"]
            self.renew_after_ms: float = answer["renewAfterMs"]
        except KeyError as exc:
            raise Unavailable("the answer to acquireWriter is no lease") from exc

    @property
    def thread_id(self) -> str:
        return str(self.fields["threadId"])

    @property
    def fence(self) -> int:
        return int(self.fields["fence"])

    @property
    def expires_at(self) -> float:
        """Ms since 1970 by the server's clock; moves when `renew` succeeds."""
        return self._expires_at

    def renew(self) -> float:
        """Extend it by its whole duration from now on; the new `expires_at`. Raises `WriterLost`."""
        self._expires_at = self._contract.call("renew", {"writer": self.fields})["expiresAt"]
        return self._expires_at

    def release(self) -> None:
        """End it. Never raises: where the server cannot be told, the lease ends by itself."""
        try:
            self._contract.call("release", {"writer": self.fields})
        except FsdError:
            return


AnyWriter: TypeAlias = Lease | Writer | JsonObject


def writer_fields(writer: AnyWriter) -> JsonObject:
    """What a write presents. Of a renewed `Writer` it waits for a renewal under way; raises what made one
    fail."""
    if isinstance(writer, Lease):
        return dict(writer.fields)
    if isinstance(writer, Writer):
        return writer.current()
    return {name: writer[name] for name in _FIELDS if name in writer}


class Checkpoints:
    """Checkpoints, transcripts and blob counts of one filesystem."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._call = contract.call

    # -- reading -------------------------------------------------------------------------------------

    def get(self, checkpoint_id: str, *, portable: bool = False) -> JsonObject | None:
        """A checkpoint, None when there is none. With `portable` without symlinks, which are then named in
        `leftOut`."""
        found: JsonObject | None = self._call("get", {"id": checkpoint_id, "portable": portable})
        return found

    def list(self, thread_id: str, *, render: bool = False, portable: bool = False) -> Sequence[JsonObject]:
        """All of a thread, by time, then id. Native ones come with their files where `render` asks for it."""
        body = {"threadId": thread_id, "render": render, "portable": portable}
        found: Sequence[JsonObject] = self._call("list", body)
        return found

    def get_head(self, thread_id: str) -> str | None:
        found: str | None = self._call("getHead", {"threadId": thread_id})
        return found

    def list_blob_references(self) -> Sequence[JsonObject]:
        """`{key, references}` of every key that a checkpoint uses, in order of key."""
        found: Sequence[JsonObject] = self._call("listBlobReferences", {})
        return found

    def missing_blobs(self, checkpoint_id: str) -> Sequence[str]:
        """The keys a checkpoint uses that are not stored: ask when you have appended one. Raises
        `CheckpointNotFound`."""
        found: Sequence[str] = self._call("missingBlobs", {"id": checkpoint_id})
        return found

    # -- leases --------------------------------------------------------------------------------------

    def acquire_writer(self, thread_id: str) -> Lease:
        """The thread's writer lease, once; raises `WriterConflict` at once while somebody holds it."""
        return Lease(self._contract, self._call("acquireWriter", {"threadId": thread_id}))

    def writer(self, thread_id: str) -> Writer:
        """A lease that is renewed while a `with` block runs and released at its end."""
        return Writer(self._contract, thread_id)

    # -- writing -------------------------------------------------------------------------------------

    def append(self, checkpoint: JsonObject, *, expected_head_id: str | None, writer: AnyWriter) -> str:
        """Add a checkpoint and make it the head; its id. One that is there already and equal is a success:
        it was an earlier try's whose answer got lost."""
        _check_created(checkpoint.get("createdAt"))
        body = {
            "checkpoint": checkpoint,
            "expectedHeadId": expected_head_id,
            "writer": writer_fields(writer),
        }
        try:
            return str(self._call("append", body)["headId"])
        except CheckpointDuplicateId:
            there = self.get(str(checkpoint.get("id")))
            if there is None or there != _as_stored(checkpoint):
                raise
            return str(there["id"])

    def delete_head(self, thread_id: str, checkpoint_id: str, *, writer: AnyWriter) -> None:
        body = {"threadId": thread_id, "checkpointId": checkpoint_id, "writer": writer_fields(writer)}
        self._call("deleteHead", body)

    def delete_checkpoints(self, thread_id: str, keep: int, *, writer: AnyWriter) -> Sequence[str]:
        """Keep the newest `keep` of the head's chain; the ids of the removed ones, oldest first."""
        body = {"threadId": thread_id, "keep": keep, "writer": writer_fields(writer)}
        found: Sequence[str] = self._call("deleteCheckpoints", body)["deleted"]
        return found

    def keep_newest(self, thread_id: str, keep: int) -> Sequence[str]:
        """`delete_checkpoints` under a lease of its own; raises `WriterConflict` while a run or a capture
        holds the thread."""
        with self.writer(thread_id) as writer:
            return self.delete_checkpoints(thread_id, keep, writer=writer)

    def fork_from_checkpoint(
        self,
        *,
        source_thread_id: str,
        source_checkpoint_id: str,
        destination_thread_id: str,
        destination_checkpoint_id: str,
        created_at: float,
        writer: AnyWriter,
    ) -> JsonObject:
        """Copy a checkpoint and its conversation into an empty thread, whose writer is given; the new one."""
        _check_created(created_at)
        body = {
            "sourceThreadId": source_thread_id,
            "sourceCheckpointId": source_checkpoint_id,
            "destinationThreadId": destination_thread_id,
            "destinationCheckpointId": destination_checkpoint_id,
            "createdAt": created_at,
            "writer": writer_fields(writer),
        }
        found: JsonObject = self._call("forkFromCheckpoint", body)["checkpoint"]
        return found

    def sweep(self, *, older_than_ms: float | None = None) -> Sequence[str]:
        """Delete the blobs that no checkpoint uses and that are older (None: than a day); their keys. Raises
        `InvalidRange`."""
        if older_than_ms is not None and not math.isfinite(older_than_ms):
            raise InvalidRange("olderThanMs is a finite number of 0 or more")
        body = {} if older_than_ms is None else {"olderThanMs": older_than_ms}
        found: Sequence[str] = self._call("sweep", body)["deleted"]
        return found

    # -- transcripts ---------------------------------------------------------------------------------

    def load_thread(self, thread_id: str) -> Sequence[Any]:
        """The messages last saved, [] when none were."""
        found: Sequence[Any] = self._call("loadThread", {"threadId": thread_id})
        return found

    def save_thread(self, thread_id: str, messages: Sequence[Any]) -> None:
        self._call("saveThread", {"threadId": thread_id, "messages": messages})


def _check_created(value: object) -> None:
    """A time that JSON has no form for never comes to the server, which refuses all other bad ones."""
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointInvalidEntry("createdAt is a finite number of milliseconds")


def _as_stored(checkpoint: JsonObject) -> JsonObject:
    """A record as the server gives it back."""
    made: JsonObject = json.loads(json.dumps(checkpoint))
    made.setdefault("parentCheckpointId", None)
    for name in _OPTIONAL:
        if made.get(name, 0) is None:
            del made[name]
    return made


class Instances:
    """Which provider sandbox to resume for a key."""

    def __init__(self, contract: Contract) -> None:
        self._call = contract.call

    def get(self, key: str) -> JsonObject | None:
        found: JsonObject | None = self._call("instances.get", {"key": key})
        return found

    def upsert(self, record: JsonObject) -> None:
        """Replace the record of `record["key"]`; an optional field left out is cleared."""
        self._call("instances.upsert", {"record": record})

    def delete(self, key: str) -> None:
        """A missing one is no error."""
        self._call("instances.delete", {"key": key})


def blob_key(data: bytes, kind: Kind = "files") -> str:
    """The key of bytes."""
    return f"sandbox-{kind}/sha256/{hashlib.sha256(data).hexdigest()}"


class Blobs:
    """Bytes under keys that name their SHA-256."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._http = contract.http

    def put(self, data: bytes, kind: Kind = "files") -> str:
        """Store bytes, unless they are there; their key."""
        key = blob_key(data, kind)
        if not self._contract.has(key):
            self._send(key, BytesBody(data))
        return key

    def put_file(self, path: str | bytes | os.PathLike[str], kind: Kind = "files") -> tuple[str, int]:
        """Store a local file without holding it in memory; key and size. Raises `LocalChanged` when it is
        written meanwhile."""
        with LocalFile(os.fsencode(path)) as source:
            digest, size = hashlib.sha256(), 0
            for piece in source.pieces():
                digest.update(piece)
                size += len(piece)
            key = f"sandbox-{kind}/sha256/{digest.hexdigest()}"
            if not self._contract.has(key):
                try:
                    self._send(key, source)
                except InvalidBlob as exc:
                    if not source.changed():
                        raise
                    raise LocalChanged(f"{show(source.path)} was written while it was read") from exc
        return key, size

    def _send(self, key: str, body: BytesBody | LocalFile) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        self._http.send("PUT", f"/v1/blobs/{_checked(key)}", body, headers=headers)

    def get(self, key: str) -> bytes | None:
        """The bytes, verified; None when they are not there. Raises `IntegrityError`."""
        try:
            data = self._http.retried(lambda: b"".join(self._contract.fetch(_checked(key))))
        except MissingBlob:
            return None
        if hashlib.sha256(data).hexdigest() != key.rpartition("/")[2]:
            raise IntegrityError(f"what came for {key} does not hash to it")
        return data

    def save(self, key: str, target: IO[bytes]) -> int:
        """Write the bytes to an open file, verified at the end; how many. Raises `MissingBlob`,
        `IntegrityError`."""
        digest, size = hashlib.sha256(), 0
        for piece in self._contract.fetch(_checked(key)):
            digest.update(piece)
            size += target.write(piece)
        if digest.hexdigest() != key.rpartition("/")[2]:
            raise IntegrityError(f"what came for {key} does not hash to it")
        return size

    def has(self, key: str) -> bool:
        """Whether it is there. Asking makes it young: no sweep takes it from who then does not upload it."""
        return self._contract.has(_checked(key))

    def delete(self, key: str) -> None:
        """Gone already is no error; raises `Conflict` while a checkpoint uses it."""
        self._http.json("DELETE", f"/v1/blobs/{_checked(key)}")

    def list(self, prefix: str = "") -> Iterator[JsonObject]:
        """`{key, size, uploadedAt}` of those whose keys begin with `prefix`, in order, page by page."""
        cursor: str | None = None
        while True:
            query: Query = {"prefix": prefix, "cursor": cursor, "limit": LIST_PAGE_MAX}
            page = self._http.json("GET", "/v1/blobs", query=query)
            yield from page["blobs"]
            cursor = page["cursor"]
            if cursor is None:
                return


def _checked(key: str) -> str:
    """A key for a path; raises `UsageError`."""
    if not key.isascii() or not key.replace("/", "").replace("-", "").isalnum():
        raise UsageError(f"no blob's key: {key!a}")
    return key
