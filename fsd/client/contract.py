"""The checkpoint contract over HTTP as capture and restore need it: methods, blobs, a thread's writer.

Any thread; raises `FsdError`. Each call that changes something carries one idempotency key through all its
tries, so an append or an acquire whose answer was lost is not done twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Final

from fsd.client.http import Http
from fsd.host import threads
from fsd.model.errors import (
    FsdError,
    MissingBlob,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    Unavailable,
    UsageError,
)
from fsd.model.limits import MIB

_PIECE: Final = MIB // 4


class SpoolBody:
    """The bytes of a temporary file as a body."""

    repeatable = True

    def __init__(self, size: int, spool: IO[bytes]) -> None:
        self.length: int | None = size
        self._spool = spool

    def pieces(self) -> Iterator[bytes]:
        self._spool.seek(0)
        while piece := self._spool.read(_PIECE):
            yield piece


class Contract:
    """One filesystem's checkpoints and blobs, which the token names."""

    def __init__(self, http: Http) -> None:
        self.http = http

    def call(self, op: str, body: dict[str, Any], *, key: str | None = None) -> Any:
        """A method of the contract; its result. Lone surrogates travel (as escapes); NaN is `UsageError`."""
        try:
            raw = json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")
        except (ValueError, TypeError) as exc:
            raise UsageError(f"not expressible in JSON: {exc}") from exc
        answer = self.http.json("POST", f"/v1/checkpoints/{op}", raw=raw, key=key)
        if "result" not in answer:
            raise Unavailable(f"the answer to {op} has no result")
        return answer["result"]

    def has(self, key: str) -> bool:
        """Whether a blob is there; asking keeps it from a sweep for its time of grace."""
        tries = self.http.tries(0)

        def once() -> bool:
            reply = self.http.exchange(
                "HEAD",
                f"/v1/blobs/{key}",
                query=(),
                headers={},
                body=None,
                wait=0.0,
                patience=tries.patience,
            )
            reply.read(0)  # there is nothing to read: the next question goes on the same connection
            if reply.status in (401, 403):
                raise (NotAuthenticated if reply.status == 401 else NotPermitted)(
                    "the token is not good for content (any more)"
                )
            if reply.status not in (200, 404):
                raise Unavailable(f"the server answered {reply.status} to a question about content")
            return reply.status == 200

        return self.http.retried(once, tries)

    def put(self, key: str, size: int, spool: IO[bytes]) -> None:
        headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": self.http.new_key()}
        self.http.send("PUT", f"/v1/blobs/{key}", SpoolBody(size, spool), headers=headers)

    def fetch(self, key: str) -> Iterator[bytes]:
        """The bytes of a blob; raises `MissingBlob`. Whoever reads them verifies them."""
        tries = self.http.tries(0)
        try:
            reply = self.http.retried(
                lambda: self.http.open(f"/v1/blobs/{key}", patience=tries.patience), tries
            )
        except NotFound as exc:
            raise MissingBlob(f"the content {key} is not stored") from exc
        try:
            yield from reply.pieces(_PIECE)
        finally:
            reply.close()


class Writer:
    """The lease of a thread's writer, renewed while it is held. Use as a context manager.

    One renewal at a time, `renewAfterMs` after the last one ended; the server's clock alone decides.
    `current` is what a write presents: it waits for a renewal under way, and raises what made one fail. That
    error also stands before one of the block itself; the release at the end never fails.
    """

    def __init__(self, contract: Contract, thread: str) -> None:
        self._contract, self._thread_id = contract, thread
        self._writer: dict[str, Any] = {}
        self._pause = 0.0
        self._stopped = threading.Event()
        self._renewing = threading.Lock()
        self._failed: FsdError | None = None
        self._timer = threading.Thread(target=self._renew, name="renew-writer", daemon=True)

    def __enter__(self) -> Writer:
        lease = self._contract.call("acquireWriter", {"threadId": self._thread_id})
        try:
            self._writer = {name: lease[name] for name in ("threadId", "ownerToken", "fence")}
            self._pause = float(lease["renewAfterMs"]) / 1000
        except (KeyError, TypeError, ValueError) as exc:
            raise Unavailable("the answer to acquireWriter is no lease") from exc
        try:
            self._timer.start()
        except RuntimeError as exc:
            self._release()  # nobody would renew it, and it would keep others out
            raise threads.failure(exc, f"the lease cannot be renewed: {exc}") from exc
        return self

    def current(self) -> dict[str, Any]:
        with self._renewing:
            if self._failed is not None:
                raise self._failed
            return dict(self._writer)

    def _renew(self) -> None:
        while not self._stopped.wait(self._pause):
            with self._renewing:
                try:
                    self._contract.call("renew", {"writer": self._writer})
                except FsdError as exc:
                    self._failed = exc
                    return

    def _release(self) -> None:
        try:
            self._contract.call("release", {"writer": self._writer})
        except FsdError:
            pass  # what was to be done is done, or failed with an error of its own; the lease ends by itself

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._timer.join()
        self._release()
        if exc is not None and self._failed is not None and exc is not self._failed:
            raise self._failed from exc
