"""Bodies that stream: what is received is passed on as it arrives, what is sent is read one piece ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fsd.blobs.store import Stretch
from fsd.model.errors import IntegrityError, Unavailable, UsageError
from fsd.model.limits import BODY_IDLE, KIB, MIB
from fsd.server.context import Context
from fsd.server.passing import copied, outlet_of, pass_on

Piece: TypeAlias = bytes | memoryview | Stretch
HAND_OVER: Final = MIB  # bytes of a body gathered before a worker thread takes them
MESSAGE_LEAST: Final = 128 * KIB  # a message of its own costs 3 us, as much as copying some 100 KiB


async def receive(ctx: Context, request: Request, take: Callable[[list[bytes]], None]) -> int:
    """Pass the body on to `take` on worker threads; how many bytes there were."""
    stream = request.stream()
    pieces: list[bytes] = []
    held = total = 0
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE):
                piece = await anext(stream)
        except StopAsyncIteration:
            break
        except TimeoutError as exc:
            raise Unavailable(f"no byte of the body for {BODY_IDLE:.0f} s") from exc
        except ClientDisconnect as exc:
            raise UsageError("the body was cut off; nothing was changed") from exc
        pieces.append(piece)
        held += len(piece)
        total += len(piece)
        if held >= HAND_OVER:
            batch, pieces, held = pieces, [], 0
            await ctx.run(lambda batch=batch: take(batch))  # type: ignore[misc]
    if pieces:
        await ctx.run(lambda: take(pieces))
    return total


class PiecesResponse(Response):
    """Sends `first`, then what `next_piece` (blocks, on a worker thread) gives until it is empty. An error in
    the middle cuts the answer off: its length, or the missing end of a chunked one, shows that."""

    def __init__(
        self,
        ctx: Context,
        first: bytes,
        next_piece: Callable[[], bytes],
        status: int,
        headers: Mapping[str, str],
        media_type: str = "application/octet-stream",
    ) -> None:
        super().__init__(None, status, dict(headers), media_type)
        # Starlette gives an answer without a body the length 0.
        if "content-length" not in {name.lower() for name in headers}:
            del self.headers["content-length"]
        self._ctx, self._first, self._next = ctx, first, next_piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        left = asyncio.ensure_future(_gone(receive))
        try:
            await self._body(send, left)
        finally:
            left.cancel()

    async def _body(self, send: Send, left: asyncio.Future[None]) -> None:
        piece = self._first
        while piece and not left.done():  # the server drops what is sent to a client that went away
            following = asyncio.ensure_future(self._ctx.run(self._next))
            try:
                # Who takes nothing of the answer any more must not hold its pieces for ever.
                async with asyncio.timeout(BODY_IDLE):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except TimeoutError as exc:
                raise Unavailable(f"nothing of the answer was taken for {BODY_IDLE:.0f} s") from exc
            finally:
                piece = await following
        await send({"type": "http.response.body", "body": b""})


class JoinedResponse(Response):
    """Sends the pieces of a body one after the other, large ones as they are: joined, each would be copied
    once more. Stretches of files the kernel passes on, where it can."""

    def __init__(self, ctx: Context, pieces: Sequence[Piece], media_type: str) -> None:
        super().__init__(None, 200, {"content-length": str(sum(map(len, pieces)))}, media_type)
        self._ctx, self._pieces = ctx, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in messages(self._pieces):
            if not isinstance(piece, Stretch):
                await _taken(send, piece)
                continue
            rest = piece[await self._passed(scope, piece) :]
            while rest:
                some, rest = rest[:MIB], rest[MIB:]
                data = await self._ctx.run(some.read)
                if len(data) != len(some):
                    raise IntegrityError("an object became shorter while it was sent")
                await _taken(send, data)
        await send({"type": "http.response.body", "body": b""})

    async def _passed(self, scope: Scope, stretch: Stretch) -> int:
        """How much of `stretch` was sent past the connection."""
        outlet = outlet_of(scope)
        if outlet is None:
            return 0
        await asyncio.sleep(0)  # what was written goes at the end of the loop's turn
        descriptor = outlet.descriptor()
        out = None if descriptor is None else copied(descriptor)
        if out is None:
            return 0
        done = await self._ctx.run(lambda: pass_on(out, stretch, self._ctx.host.monotonic))
        outlet.passed(done)
        return done


async def _taken(send: Send, piece: bytes | memoryview) -> None:
    """Send it; raises `Unavailable` when nobody takes it."""
    try:
        async with asyncio.timeout(BODY_IDLE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except TimeoutError as exc:
        raise Unavailable(f"nothing of the answer was taken for {BODY_IDLE:.0f} s") from exc


def messages(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, small ones joined, and stretches that follow each other in their file."""
    held: list[bytes | memoryview] = []
    size = 0
    stretch: Stretch | None = None
    for piece in pieces:
        if isinstance(piece, Stretch):
            joined = None if stretch is None else stretch.with_next(piece)
            if joined is None:
                yield from _one(held, stretch)
                held, size = [], 0
            stretch = joined or piece
            continue
        if stretch is not None or (held and size + len(piece) > MESSAGE_LEAST):
            yield from _one(held, stretch)
            held, size, stretch = [], 0, None
        held.append(piece)
        size += len(piece)
    yield from _one(held, stretch)


def _one(held: Sequence[bytes | memoryview], stretch: Stretch | None) -> Iterator[Piece]:
    """What was gathered: pieces or a stretch."""
    if stretch is not None:
        yield stretch
    elif held:
        yield held[0] if len(held) == 1 else b"".join(held)


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        continue
