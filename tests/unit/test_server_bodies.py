"""Bodies on their way in and out: what drips, stands still or is large is bounded. No server."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from support.virtualtime import run

from fsd.blobs.store import OpenFile, Stretch
from fsd.model.attrs import Attr
from fsd.model.errors import IntegrityError, Unavailable, UsageError
from fsd.model.limits import JSON_BODY_MAX, KIB, MIB
from fsd.server import context, files, passing, streaming
from fsd.server.body import Arriving, Landing, arriving
from fsd.server.checkpoints import read_foreign
from fsd.server.context import hold_large, read_body, read_json, release_large, seconds, whole

FILE = Attr(5, 0o100644, 1, 0, 0, 8, 0, 0, 0, 0, None, 0, None, None, 1, 0, 1)


def request(receive: Any = None, *, length: int | None = None, app: Any = None) -> Request:
    chunked = (b"transfer-encoding", b"chunked")
    headers = [chunked if length is None else (b"content-length", b"%d" % length)]
    return Request({"type": "http", "method": "POST", "headers": headers, "app": app}, receive)


def app(slots: int) -> Any:
    async def run(fn: Any) -> Any:
        return fn()

    async def who(asking: Any) -> None:
        return None

    made = SimpleNamespace(
        large_bodies=asyncio.Semaphore(slots), manifests=asyncio.Semaphore(slots), run=run, who=who
    )
    return SimpleNamespace(state=SimpleNamespace(fsd=made))


@pytest.mark.parametrize("pause", [0.005, 3600.0])
def test_a_body_that_drips_or_stands_still_is_given_up(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "BODY_IDLE", 0.1)
    monkeypatch.setattr(context, "BODY_RATE", 1000)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def scene() -> None:
        with pytest.raises(Unavailable, match="too slowly"):
            await asyncio.wait_for(read_body(request(receive), 10**6), 30)

    run(scene())


def test_a_body_that_keeps_its_pace_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "BODY_IDLE", 0.05)
    monkeypatch.setattr(context, "BODY_RATE", 1000)
    left = 40

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b"x" * 100, "more_body": left > 0}

    assert len(run(read_body(request(receive), 10**6))) == 4000


@pytest.mark.parametrize("length", [256 * KIB + 1, None])
def test_large_bodies_wait_for_a_slot_unread(length: int | None) -> None:
    async def scene() -> None:
        shared = app(1)
        first = request(length=length, app=shared)
        await hold_large(first, JSON_BODY_MAX)
        await hold_large(first, JSON_BODY_MAX)  # one slot a request
        read = asyncio.Event()

        async def receive() -> dict[str, Any]:
            read.set()
            return {"type": "http.request", "body": b'{"a":1}'.ljust(length or 7), "more_body": False}

        second = request(receive, length=length, app=shared)
        waiting = asyncio.create_task(read_json(second))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not read.is_set()
        release_large(first)
        release_large(first)
        assert (await asyncio.wait_for(waiting, 30))[0] == {"a": 1}
        assert shared.state.fsd.large_bodies.locked()
        release_large(second)
        assert not shared.state.fsd.large_bodies.locked()

    run(scene())


def test_huge_manifests_wait_for_a_slot_of_their_own() -> None:
    """Beside them other large bodies go on."""

    async def scene() -> None:
        shared = app(1)
        text = b'{"a":"\\ud800"}'

        def sent(length: int, read: asyncio.Event) -> Request:
            async def receive() -> dict[str, Any]:
                read.set()
                return {"type": "http.request", "body": text.ljust(length), "more_body": False}

            return request(receive, length=length, app=shared)

        ctx, events = shared.state.fsd, [asyncio.Event() for _ in range(3)]
        first = sent(JSON_BODY_MAX + 1, events[0])
        assert (await read_foreign(ctx, first))[0] == {"a": "\ud800"}
        waiting = asyncio.create_task(read_foreign(ctx, sent(JSON_BODY_MAX + 1, events[1])))
        small = sent(256 * KIB + 1, events[2])
        assert (await asyncio.wait_for(read_foreign(ctx, small), 30))[0] == {"a": "\ud800"}
        assert not events[1].is_set()
        release_large(first)
        assert (await asyncio.wait_for(waiting, 30))[0] == {"a": "\ud800"}

    run(scene())


def test_who_takes_nothing_of_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BODY_IDLE", 0.05)
    pieces = [b"5678"]

    class Pool:
        async def run(self, fn: Any) -> bytes:
            return bytes(fn())

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def scene() -> None:
        reading = SimpleNamespace(next_piece=lambda: pieces.pop() if pieces else b"")
        opened = files._Opened(FILE, (0, 8), False, reading, b"1234", None)  # type: ignore[arg-type]
        answer = files._file_response(Pool(), opened)  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="taken"):
            await asyncio.wait_for(answer({"method": "GET"}, receive, send), 30)  # type: ignore[arg-type]

    run(scene())


def test_a_head_reads_nothing_of_the_file() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scene() -> None:
        opened = files._Opened(FILE, (0, 8), False, SimpleNamespace(next_piece=None), b"1234", None)  # type: ignore[arg-type]
        answer = files._file_response(None, opened)  # type: ignore[arg-type]
        await answer({"method": "HEAD"}, None, send)  # type: ignore[arg-type]

    run(scene())
    assert (b"content-length", b"8") in sent[0]["headers"]
    assert [message.get("body") for message in sent] == [None, b""]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64 - 1, 10**400, 1.5, True, "1"])
def test_whole_numbers_fit_the_database(value: Any) -> None:
    with pytest.raises(UsageError, match="n is"):
        whole({"n": value}, "n")
    assert whole({"n": 2**63 - 1}, "n") == 2**63 - 1 and whole({}, "n") is None


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), True, "1", None])
def test_time_spans_are_numbers_of_a_sane_size(value: Any) -> None:
    with pytest.raises(UsageError, match="t is"):
        seconds({"t": value}, "t", 5.0)
    assert seconds({"t": 3}, "t", 5.0) == 3.0 and seconds({}, "t", 5.0) == 5.0


def connection(scope: Any, pieces: list[bytes], pause: float) -> Any:
    """A `receive` as uvicorn's with our protocol: the first piece is a message, the others go where the
    request wants them, and the end is a message again."""
    told = False

    async def receive() -> dict[str, Any]:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": pieces[0], "more_body": True}
        for piece in pieces[1:]:
            await asyncio.sleep(pause)
            there = arriving(scope())
            assert there is not None
            there.take(piece, asyncio.get_running_loop().time())
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


def test_a_large_body_comes_past_the_buffer_whole_and_in_order() -> None:
    pieces = [b"%d," % at for at in range(500)]
    made: Request = request(connection(lambda: made.scope, pieces, 0), length=len(b"".join(pieces)))

    async def scene() -> None:
        assert await read_body(made, 10**6) == b"".join(pieces)
        assert arriving(made.scope) is None

    run(scene())


def test_a_large_body_keeps_its_pace_or_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message tells of what comes past the buffer: the time it has moves with it all the same."""
    monkeypatch.setattr(context, "BODY_IDLE", 0.1)
    monkeypatch.setattr(context, "BODY_RATE", 1000)

    class Kept:
        """What goes on arriving while `receive` is cancelled and begun again."""

        def __init__(self, piece: bytes, count: int) -> None:
            self.piece, self.left = piece, count

        async def receive(self) -> dict[str, Any]:
            there = arriving(self.made.scope)
            if there is None:
                return {"type": "http.request", "body": self.piece, "more_body": True}
            while self.left:
                await asyncio.sleep(0.02)
                self.left -= 1
                there.take(self.piece, asyncio.get_running_loop().time())
            return {"type": "http.request", "body": b"", "more_body": False}

        async def read(self, length: int) -> bytes:
            self.made = request(self.receive, length=length)
            return await asyncio.wait_for(read_body(self.made, 10**6), 30)

    async def scene() -> None:
        assert len(await Kept(b"x" * 400, 20).read(21 * 400)) == 21 * 400
        drips = Kept(b"x", 10**6)
        with pytest.raises(Unavailable, match="too slowly"):
            await drips.read(10**6)
        assert arriving(drips.made.scope) is None

    run(scene())


def test_a_large_body_that_is_cut_or_of_another_length_is_refused() -> None:
    async def cut() -> dict[str, Any]:
        if arriving(made.scope) is None:
            return {"type": "http.request", "body": b"x", "more_body": True}
        return {"type": "http.disconnect"}

    async def scene() -> None:
        with pytest.raises(UsageError, match="cut off"):
            await read_body(made, 10**6)
        short: Request = request(connection(lambda: short.scope, [b"x"] * 5, 0), length=9)
        with pytest.raises(UsageError, match="Content-Length"):
            await read_body(short, 10**6)

    made = request(cut, length=100)
    run(scene())


def test_what_nobody_wants_any_more_still_passes_but_is_not_kept() -> None:
    """A body that was given up goes on arriving: it is taken in, in little memory, and the connection given
    back at its end."""

    class Back(asyncio.Protocol):
        lost = False

        def connection_lost(self, exc: Exception | None) -> None:
            self.lost = True

    async def scene() -> None:
        back, done = Back(), []
        body = Arriving(0.0, 1000 * KIB)
        body.take(b"x" * KIB, 0.0)
        body.make_room()
        landing = Landing(body, back, lambda: done.append(body.size))
        landing.get_buffer(-1)[: 2 * KIB] = b"y" * (2 * KIB)
        landing.buffer_updated(2 * KIB)
        assert (body.size, body.left) == (3 * KIB, 997 * KIB)
        assert body.whole()[: 3 * KIB] == b"x" * KIB + b"y" * (2 * KIB)
        body.drop()
        assert body.whole() == b""
        while not done:
            room = landing.get_buffer(-1)
            assert 0 < len(room) <= 64 * KIB
            landing.buffer_updated(len(room))
        assert done == [1000 * KIB]
        landing.connection_lost(None)
        assert back.lost

    run(scene())


def test_an_answer_in_pieces_is_sent_as_they_are_and_given_up_where_nobody_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "BODY_IDLE", 0.05)
    monkeypatch.setattr(streaming, "MESSAGE_LEAST", 4)
    pieces: list[bytes | memoryview] = [b"12", memoryview(b"345")]

    async def scene() -> None:
        sent: list[Any] = []
        stuck = asyncio.Event()

        async def take(message: Any) -> None:
            sent.append(message)

        async def take_none(message: Any) -> None:
            if message.get("body"):
                await stuck.wait()

        ctx = app(1).state.fsd
        answer = streaming.JoinedResponse(ctx, pieces, "application/x-fsd")
        await answer({"type": "http"}, None, take)  # type: ignore[arg-type]
        assert (b"content-length", b"5") in sent[0]["headers"]
        assert [one["body"] for one in sent[1:]] == [*pieces, b""]
        assert sent[2]["body"] is pieces[1] and "more_body" not in sent[-1]
        sent.clear()
        small = [b"1", memoryview(b"2"), b"34", b"56789", b"a", b"b"]
        await streaming.JoinedResponse(ctx, small, "application/x-fsd")({"type": "http"}, None, take)  # type: ignore[arg-type]
        assert [one["body"] for one in sent[1:]] == [b"1234", b"56789", b"ab", b""]
        with pytest.raises(Unavailable, match="taken"):
            await answer({"type": "http"}, None, take_none)  # type: ignore[arg-type]

    asyncio.run(scene())


class Outlet:
    """A connection of which `sock` is the server's end."""

    def __init__(self, sock: socket.socket | None) -> None:
        self.sock, self.size = sock, 0

    def descriptor(self) -> int | None:
        return None if self.sock is None else self.sock.fileno()

    def passed(self, size: int) -> None:
        self.size += size


async def sent(outlet: Outlet, pieces: list[Any]) -> list[bytes]:
    """Send them as an answer; what did not go past the connection."""
    written: list[bytes] = []

    async def take(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.append(bytes(message["body"]))

    ctx = app(1).state.fsd
    ctx.host = SimpleNamespace(monotonic=time.monotonic)
    answer = streaming.JoinedResponse(ctx, pieces, "application/x-fsd")
    assert answer.headers["content-length"] == str(sum(map(len, pieces)))
    await answer({"type": "http", passing.OUTLET: outlet}, None, take)  # type: ignore[arg-type]
    return written


def received(sock: socket.socket) -> bytes:
    """What is there."""
    got = b""
    sock.setblocking(False)
    try:
        while some := sock.recv(MIB):
            got += some
    except BlockingIOError:
        return got
    return got


@pytest.mark.parametrize("taken", ["all", "slowly", "by copies"])
def test_stretches_of_files_arrive_whole_however_they_are_taken(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "_WAIT", 0.001)
    data = os.urandom(5 * MIB)
    (tmp_path / "object").write_bytes(data)
    file = OpenFile(os.open(tmp_path / "object", os.O_RDONLY))
    much = 16 * KIB if taken == "all" else MIB  # less than a socket holds, or more
    first, second = Stretch(file, 7, much), Stretch(file, 7 + much, much)
    other = Stretch(file, 4 * MIB, 10)
    here, there = socket.socketpair()
    here.setblocking(False)
    outlet = Outlet(None if taken == "by copies" else here)
    written = asyncio.run(sent(outlet, [b"head", first, second, b"between", other]))
    got = received(there)
    # The first two are one stretch; what nobody took of it was written, and of the last as much as fits.
    assert len(got) == outlet.size
    split = {"all": 2 * much, "slowly": outlet.size, "by copies": 0}[taken]
    tail = b"" if taken == "all" else data[4 * MIB : 4 * MIB + 10]
    assert written[0] == b"head" and b"between" in written
    at = written.index(b"between")
    assert got[:split] + b"".join(written[1:at]) == data[7 : 7 + 2 * much]
    assert b"".join(written[at + 1 :]) == tail and got[split:] == (
        data[4 * MIB : 4 * MIB + 10] if taken == "all" else b""
    )
    assert 0 < outlet.size < 2 * MIB if taken == "slowly" else True
    here.close(), there.close()


def test_an_object_that_became_shorter_ends_the_answer(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"x" * 100)
    file = OpenFile(os.open(tmp_path / "object", os.O_RDONLY))
    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there, pytest.raises(IntegrityError, match="shorter"):
        asyncio.run(sent(Outlet(here), [Stretch(file, 50, 100)]))


def test_a_descriptor_goes_with_the_last_who_refers_to_it(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"0123456789")
    whole = Stretch(OpenFile(os.open(tmp_path / "object", os.O_RDONLY)), 0, 10)
    fd, part = whole.file.fd, whole[2:5]
    del whole
    assert part.read() == b"234" and len(part[1:]) == 2
    del part
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
