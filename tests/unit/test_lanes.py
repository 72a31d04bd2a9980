"""Connections on loan to a thread: what it answers, what goes back, the bounds; which requests it takes."""

from __future__ import annotations

import errno
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.wait import wait_for

from fsd.blobs.store import OpenFile, Stretch
from fsd.host.seam import Host
from fsd.model.limits import LANE_IDLE, LANE_IDLE_FULL, LANES_MAX, MIB, SENT_AT_ONCE_MAX
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.server import lanes as module
from fsd.server.content import HASHES_MAX
from fsd.server.lanes import Headers, Lanes, Told
from fsd.server.small import Usual, read
from fsd.service.tokens import token_key
from fsd.wire.messages import MEDIA_TYPE

LONG = 60.0
DATE: Headers = [(b"date", b"today")]
Back = queue.SimpleQueue[tuple[bytes, bool]]


class Lines:
    """Answers lines; one with a question mark is not its business, "!" fails, "wait" waits for `go`, "much"
    is answered with more than a socket takes, what follows from "bad" begins with what fails, "content" has
    `content` behind its answer, which it gives away."""

    def __init__(self) -> None:
        self.content: list[bytes | Stretch] = []
        self.go = threading.Event()
        self.began = threading.Event()
        self.later: list[bytes] = []  # requests of which all that follows was done

    def part(self, data: bytes) -> bool:
        return not data.endswith(b"\n")

    def answer(self, data: bytes, default: Headers) -> Told | None:
        if b"?" in data:
            return None
        if b"!" in data:
            raise ValueError(data)
        if b"wait" in data:
            self.began.set()
            assert self.go.wait(LONG)
        later: list[Callable[[], object]] = [partial(self.go.wait, LONG)] if b"slow" in data else []
        if b"bad" in data:
            later.append(partial(int, "bad"))
        told = data.upper() + default[0][1] + b"much" * (b"much" in data) * (1 << 22)
        content, self.content = (self.content, []) if b"content" in data else ([], self.content)
        return Told(told, [*later, partial(self.later.append, data)], content)


class Line:
    """A connection: `far` is the client's end, `near` the loop's. `sent` is there before it is lent."""

    def __init__(self, lanes: Lanes, sent: bytes = b"") -> None:
        self.far, self.near = socket.socketpair()
        self.far.sendall(sent)
        self.near.setblocking(False)
        self.far.settimeout(LONG)
        self.back: Back = queue.SimpleQueue()
        self.lane = lanes.lend(self.near.fileno(), lambda: DATE, lambda *given: self.back.put(given))

    def ask(self, text: bytes) -> bytes:
        self.far.sendall(text)
        return self.far.recv(1 << 20)

    def returned(self) -> tuple[bytes, bool]:
        found = self.back.get(timeout=LONG)
        assert not self.near.getblocking()
        assert not os.get_blocking(self.near.fileno()), "the loop would wait in its calls"
        return found

    def sent_for(self) -> int:
        """Seconds the lane's socket waits for an answer to be taken."""
        return int(struct.unpack("ll", self.near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))[0])

    def waits_for(self) -> float:
        """Seconds the lane waits for a request."""
        found = struct.unpack("ll", self.near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        return found[0] + found[1] / 1e6

    def close(self) -> None:
        self.far.close()
        self.near.close()


@pytest.fixture
def made() -> Iterator[list[Line]]:
    lines: list[Line] = []
    yield lines
    for line in lines:
        line.close()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    serving = Lanes(Lines(), time.monotonic, 2)
    yield serving
    serving.shutdown()
    assert serving.count == 0


def test_requests_are_answered_until_one_is_another_kind(lanes: Lanes, made: list[Line]) -> None:
    line = Line(lanes)
    made.append(line)
    assert line.ask(b"a\n") == b"A\ntoday"
    line.far.sendall(b"b")  # in two pieces
    assert line.ask(b"c\n") == b"BC\ntoday"
    line.far.sendall(b"what?\n")
    assert line.returned() == (b"what?\n", False)
    line.far.sendall(b"more")
    assert wait_for(lambda: line.near.recv(10), LONG, "what came later") == b"more", "not the lane's any more"
    wait_for(lambda: lanes.count == 0, LONG, "the lane to be forgotten")


def test_nobody_waits_for_what_follows_from_an_answer(made: list[Line]) -> None:
    serving = Lines()
    lanes = Lanes(serving, time.monotonic, 2)
    line = Line(lanes)
    made.append(line)
    assert line.ask(b"slow\n") == b"SLOW\ntoday"
    assert serving.later == []
    serving.go.set()
    wait_for(lambda: serving.later == [b"slow\n"], LONG, "what follows")
    serving.go.clear()
    line.far.sendall(b"wait\n")
    assert serving.began.wait(LONG)
    line.far.close()
    serving.go.set()
    assert line.back.get(timeout=LONG) == (b"", True)
    assert serving.later == [b"slow\n", b"wait\n"], "it is done where nobody takes the answer, too"
    lanes.shutdown()


def test_what_follows_waits_for_nobody_who_takes_no_answer(made: list[Line]) -> None:
    """Others were not told of a commit for a minute, whose client had not read its answer."""
    serving = Lines()
    lanes = Lanes(serving, time.monotonic, 2)
    line = Line(lanes)
    made.append(line)
    line.far.sendall(b"much\n")
    wait_for(lambda: serving.later == [b"much\n"], LONG, "what follows")
    whole = b"MUCH\ntoday" + b"much" * (1 << 22)
    got = bytearray()
    while len(got) < len(whole):
        got += line.far.recv(1 << 20)
    assert got == whole
    assert line.ask(b"a\n") == b"A\ntoday"
    line.far.close()
    assert line.returned() == (b"", True)
    lanes.shutdown()


def test_one_of_what_follows_that_fails_is_logged_and_stops_nothing(
    made: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    serving = Lines()
    lanes = Lanes(serving, time.monotonic, 2)
    line = Line(lanes)
    made.append(line)
    assert line.ask(b"bad\n") == b"BAD\ntoday"
    assert line.ask(b"a\n") == b"A\ntoday"
    wait_for(lambda: serving.later == [b"bad\n", b"a\n"], LONG, "what follows")
    assert "ValueError" in caplog.text
    lanes.shutdown()


def test_a_client_that_goes_ends_it(lanes: Lanes, made: list[Line]) -> None:
    for left in (b"", b"half a request"):
        line = Line(lanes)
        made.append(line)
        assert line.ask(b"a\n")
        line.far.sendall(left)
        line.far.close()
        assert line.returned() == (b"", True)


def test_a_request_larger_than_its_room_goes_back_as_far_as_it_came(lanes: Lanes, made: list[Line]) -> None:
    line = Line(lanes)
    made.append(line)
    sent = b"x" * 100_000
    line.far.sendall(sent)
    data, over = line.returned()
    assert not over and SENT_AT_ONCE_MAX < len(data) < len(sent) and sent.startswith(data)


def test_a_request_that_drips_goes_back(made: list[Line]) -> None:
    """By the clock, whenever its last piece came."""
    now = queue.SimpleQueue[float]()
    lanes = Lanes(Lines(), lambda: now.get(timeout=LONG), 2)
    line = Line(lanes)
    made.append(line)
    for at, piece in ((100.0, b"a"), (100.0 + LANE_IDLE - 1, b"b"), (100.0 + LANE_IDLE, b"c")):
        line.far.sendall(piece)
        now.put(at)
        wait_for(now.empty, LONG, "the piece to be read")
    assert line.returned() == (b"abc", False)
    lanes.shutdown()


def test_who_asks_nothing_for_a_while_goes_back(monkeypatch: pytest.MonkeyPatch, made: list[Line]) -> None:
    monkeypatch.setattr(module, "LANE_IDLE", 0.02)
    lanes = Lanes(Lines(), time.monotonic, 2)
    for left in (b"", b"half"):
        line = Line(lanes, left)  # later, the lane might have given up already
        made.append(line)
        assert line.returned() == (left, False)
    lanes.shutdown()


def test_few_wait_long_and_many_give_their_places_back(
    monkeypatch: pytest.MonkeyPatch, made: list[Line]
) -> None:
    """So that those who commit now and then do not keep the lanes from those who always do."""
    monkeypatch.setattr(module, "LANE_IDLE_FULL", LONG)
    lines = Lines()
    lanes = Lanes(lines, time.monotonic, 2)
    made.append(Line(lanes))
    assert made[0].ask(b"a\n") == b"A\ntoday"
    assert (lanes.idle(), made[0].waits_for()) == (LANE_IDLE, LANE_IDLE)
    made[0].far.sendall(b"wait\n")
    assert lines.began.wait(LONG)
    made.append(Line(lanes))
    assert lanes.idle() == LONG
    wait_for(lambda: made[1].waits_for() == LONG, LONG, "the second lane to wait for a request")
    monkeypatch.setattr(module, "LANE_IDLE_FULL", 0.02)
    lines.go.set()
    assert made[0].far.recv(1 << 20) == b"WAIT\ntoday"
    assert made[0].returned() == (b"", False)  # from its next request on it knows that there are many
    assert made[1].ask(b"c\n") == b"C\ntoday"  # there are few again
    wait_for(lambda: made[1].waits_for() == LANE_IDLE, LONG, "the lane to wait longer")
    assert LANE_IDLE_FULL < LANE_IDLE
    lanes.shutdown()


def test_a_defect_closes_the_connection_and_is_logged(
    lanes: Lanes, made: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(lanes)
    made.append(line)
    line.far.sendall(b"!\n")
    assert line.back.get(timeout=LONG) == (b"", True)
    assert "ValueError" in caplog.text


def test_there_are_at_most_so_many(lanes: Lanes, made: list[Line], monkeypatch: pytest.MonkeyPatch) -> None:
    made += [Line(lanes), Line(lanes), Line(lanes)]
    assert [line.lane is not None for line in made] == [True, True, False] and lanes.count == 2
    made[0].far.close()
    assert made[0].returned() == (b"", True)

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        without = Line(lanes)
    made.append(without)
    assert without.lane is None and lanes.count == 1, "a place that nobody has is free"
    last = Line(lanes)
    made.append(last)
    assert last.lane is not None and last.ask(b"a\n") == b"A\ntoday"
    assert LANES_MAX == 64


def test_an_end_waits_for_what_is_being_answered(made: list[Line]) -> None:
    serving = Lines()
    lanes = Lanes(serving, time.monotonic, 2)
    busy, idle = Line(lanes), Line(lanes)
    made += [busy, idle]
    busy.far.sendall(b"wait\n")
    assert serving.began.wait(LONG)
    assert lanes.busy == 1 and lanes.count == 2
    ending = threading.Thread(target=lanes.shutdown)
    ending.start()
    assert idle.returned() == (b"", True)
    assert ending.is_alive()
    serving.go.set()
    assert busy.far.recv(100) == b"WAIT\ntoday"
    assert busy.returned() == (b"", True)
    ending.join(LONG)
    assert not ending.is_alive()
    late = Line(lanes)
    made.append(late)
    assert late.lane is None


@pytest.mark.parametrize("asked", [b"much\n", b"wait: much\n"])
def test_an_end_waits_for_nobody_who_takes_no_answer(
    asked: bytes, made: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_IDLE", 3600)
    monkeypatch.setattr(module, "_LAST_WORD", 0.1)
    serving = Lines()
    lanes = Lanes(serving, time.monotonic, 2)
    line = Line(lanes)
    made.append(line)
    line.far.sendall(asked)
    ending = threading.Thread(target=lanes.shutdown, daemon=True)
    if asked.startswith(b"wait"):
        assert serving.began.wait(LONG)
        ending.start()
        wait_for(lambda: line.sent_for() < 3600, LONG, "the end to be told")
        serving.go.set()
    else:
        assert line.far.recv(1) == b"M", "the rest waits to be taken"
        ending.start()
    ending.join(LONG)
    assert not ending.is_alive()
    assert line.back.get(timeout=LONG) == (b"", True)


class Content:
    """A file on its way by a lane, and who asks for it."""

    def __init__(self, path: Path, lines: list[Line]) -> None:
        self.path = path
        self.path.write_bytes(os.urandom(3 * MIB))
        self.serving = Lines()
        self.lanes = Lanes(self.serving, time.monotonic, 4)
        self.line = Line(self.lanes)
        lines.append(self.line)

    def ask(self, offset: int, length: int) -> None:
        file = OpenFile(os.open(self.path, os.O_RDONLY))
        self.serving.content = [b"<", Stretch(file, offset, length), b">"]
        self.line.far.sendall(b"content\n")

    def closed(self) -> bool:
        there = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return not any(os.path.realpath(one) == os.path.realpath(self.path) for one in there)

    def got(self, size: int) -> bytes:
        found = b""
        while len(found) < size and (piece := self.line.far.recv(size - len(found))):
            found += piece
        return found


@pytest.fixture
def content(tmp_path: Path, made: list[Line]) -> Iterator[Content]:
    found = Content(tmp_path / "object", made)
    yield found
    found.lanes.shutdown()


FRONT = b"CONTENT\ntoday<"


@pytest.mark.parametrize("by", ["sendfile", "reading"])
def test_content_follows_its_answer_and_nothing_of_it_is_kept(
    content: Content, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    def none(*_: object) -> int:
        raise OSError(errno.EINVAL, "no such thing here")

    if by == "reading":
        monkeypatch.setattr("fsd.server.lanes.os.sendfile", none)
    for _ in range(2):
        content.ask(5, 2 * MIB + 7)
        whole = content.path.read_bytes()[5 : 2 * MIB + 12]
        assert content.got(len(FRONT) + len(whole) + 1) == FRONT + whole + b">"
        wait_for(content.closed, LONG, "the file to be closed while the lane waits")


def test_a_file_that_became_shorter_ends_the_connection(content: Content) -> None:
    content.ask(2 * MIB, 2 * MIB)
    assert content.got(len(FRONT) + MIB) == FRONT + content.path.read_bytes()[2 * MIB :]
    assert content.line.back.get(timeout=LONG) == (b"", True)


def test_a_disk_that_gives_nothing_of_content_is_told_in_the_log(
    content: Content, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fsd.server.lanes.os.sendfile", broken)
    monkeypatch.setattr(Stretch, "read", broken)
    content.ask(0, MIB)
    assert content.line.back.get(timeout=LONG) == (b"", True)
    assert [one.levelname for one in caplog.records if one.name == module.__name__] == ["ERROR"]
    assert "an object cannot be read: Input/output error" in caplog.text


def test_who_reads_has_a_lane_for_a_short_while_alone(content: Content) -> None:
    line = content.line
    for ask, seconds in ((b"a\n", LANE_IDLE), (b"", LANE_IDLE_FULL), (b"b\n", LANE_IDLE)):
        if ask:
            line.ask(ask)
        else:
            content.ask(0, 1)
            content.got(len(FRONT) + 2)
        wait_for(lambda: line.waits_for() == seconds, LONG, f"{seconds} s after {ask!r}")  # noqa: B023


HEAD = (
    b"POST /v1/file-systems/fs_abc/commits HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer fsd1.x.y\r\n"
    b"X-Fsd-Call: c1\r\nContent-Length: 3\r\n\r\n"
)


def test_an_ordinary_commit_is_read() -> None:
    found = read(HEAD + b"abc")
    assert found is not None
    assert found[:4] == ("fs_abc", "fsd1.x.y", b"c1", b"abc")
    bare = read(HEAD.replace(b"X-Fsd-Call: c1\r\n", b"") + b"abc")
    assert bare is not None
    assert bare[:4] == ("fs_abc", "fsd1.x.y", b"", b"abc")


def test_a_question_for_content_is_read_each_time() -> None:
    head = HEAD.replace(b"/commits", b"/blobs")
    found = read(head + b"abc")
    assert found is not None
    assert found[:5] == ("fs_abc", "fsd1.x.y", b"c1", b"abc", "blobs")
    assert read(head.replace(b"/blobs", b"/blobs?keep=1") + b"abc") is None
    for length, taken in ((HASHES_MAX, True), (HASHES_MAX + 1, False)):
        assert (read(head.replace(b"Length: 3", b"Length: %d" % length) + bytes(length)) is not None) is taken
    none: Any = None
    usual = Usual(none)
    mounts = mounts_head(b"c1", 3).replace(b"/commits", b"/blobs") + b"abc"
    asked = usual.asked(mounts)
    assert asked is not None
    assert asked[:5] == ("fs_abc", TOKEN, b"c1", b"abc", "blobs")
    assert not usual._heads, "what stands for a token in memory does for a commit alone, which asks again"


CHANGES = (
    (b"POST ", b"PUT "),
    (b"/commits", b"/packs"),
    (b"/commits", b"/commits?x=1"),
    (b"/commits", b"/%63ommits"),
    (b"fs_abc/", b"fs_abc/x/"),
    (b"HTTP/1.1", b"HTTP/1.0"),
    (b"HTTP/1.1", b"HTTP/9"),
    (b"Host: h", b"Connection: close"),
    (b"Host: h", b"Connection: upgrade\r\nUpgrade: h2c"),
    (b"Host: h", b"Expect: 100-continue"),
    (b"Host: h", b"Transfer-Encoding: chunked"),
    (b"Host: h", b"X-Fsd-Test-Now: 1000"),
    (b"Host: h", b"Content-Length: 3"),
    (b"Host: h", b"Authorization: Bearer other"),
    (b"Host: h", b"Host : h"),
    (b"Bearer", b"Basic"),
    (b"Bearer fsd1.x.y", b"Bearer "),
    (b"Bearer fsd1.x.y", b"Bearer \xff"),
    (b"Authorization", b"X-Authorization"),
    (b"c1", b"c" * 65),
    (b"c1", b"a b"),
    (b"Length: 3", b"Length: 4"),
    (b"Length: 3", b"Length: 2"),
    (b"Length: 3", b"Length: +3"),
    (b"Content-Length: 3\r\n", b""),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_just_that_is_left_to_the_loop(change: tuple[bytes, bytes]) -> None:
    assert HEAD.replace(*change) != HEAD
    assert read(HEAD.replace(*change) + b"abc") is None


def test_only_the_beginning_of_a_small_commit_is_waited_for() -> None:
    none: Any = None
    commits = Usual(none)
    whole = HEAD + b"abc"
    for at in range(1, len(whole)):
        assert commits.part(whole[:at]), whole[:at]
        assert read(whole[:at]) is None
    assert not commits.part(whole) and not commits.part(whole + b"POST")
    for data in (b"GET /v1/", b"P\0", HEAD.replace(b"Length: 3", b"Length: 65537"), b"\x16\x03\x01\x02"):
        assert not commits.part(data), data
    assert commits.part(HEAD.replace(b"Length: 3", b"Length: 65536"))
    assert not commits.part(HEAD.replace(b"Host: h", b"expect: 100-continue")), (
        "nobody would tell it to go on"
    )


ME: Any = ("fs", "grant")


class Remembers:
    """Tokens, all of which are known while `known`."""

    def __init__(self) -> None:
        self.known = True
        self.asked: list[tuple[bytes, str]] = []

    def remembered(self, key: bytes, fs: str) -> Any:
        self.asked.append((key, fs))
        return ME if self.known else None


@pytest.fixture
def again() -> tuple[Usual, Remembers]:
    """It has read one commit of a mount."""
    tokens = Remembers()
    ctx: Any = SimpleNamespace(service=SimpleNamespace(tokens=tokens))
    commits = Usual(ctx)
    assert commits.asked(mounts_head(b"c1", 3) + b"abc") == ("fs_abc", TOKEN, b"c1", b"abc", "commits", None)
    assert tokens.asked == []
    return commits, tokens


TOKEN = "fsd1." + "x" * 20 + ".y"


def mounts_head(call: bytes, length: int) -> bytes:
    """As `HttpRemote` makes it."""
    token: Any = SimpleNamespace(file_system_id="fs_abc", text=lambda: TOKEN)
    remote = HttpRemote(RemoteOptions("http://127.0.0.1:1", token, insecure=True), Host())
    made, head = remote._head("POST", "/commits", length, MEDIA_TYPE, "")
    return head.replace(made.encode(), call)


def test_a_head_that_was_read_is_not_parsed_again(
    again: tuple[Usual, Remembers], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, tokens = again
    with monkeypatch.context() as patch:
        patch.setattr("fsd.server.small.read", lambda data: pytest.fail("it was parsed"))
        for body in (b"de", b"", b"\r\n\r\n" * 1000):
            data = mounts_head(b"c2", len(body)) + body
            assert commits.asked(data) == ("fs_abc", "", b"c2", body, "commits", ME)
            assert not commits.part(data)
            assert commits.part(data[:-1])
    assert set(tokens.asked) == {(token_key(TOKEN), "fs_abc")}
    tokens.known = False
    assert commits.asked(mounts_head(b"c3", 2) + b"fg") == ("fs_abc", TOKEN, b"c3", b"fg", "commits", None)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_new_in_a_head_is_looked_at(
    change: tuple[bytes, bytes], again: tuple[Usual, Remembers]
) -> None:
    commits, _ = again
    old, new = (one.replace(b"Host: h", b"Host: 127.0.0.1:1") for one in change)
    old, new = (one.replace(b"fsd1.x.y", TOKEN.encode()) for one in (old, new))
    head = mounts_head(b"c1", 3)
    assert (changed := head.replace(old, new) + b"abc") != head + b"abc"
    assert commits.asked(changed) is None
    assert commits.asked(head + b"abcd") is None, "more than one request"


def test_no_more_heads_are_kept_than_the_bound(
    again: tuple[Usual, Remembers], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, _ = again
    monkeypatch.setattr("fsd.server.small._HEADS_MAX", 3)
    for at in range(10):
        head = mounts_head(b"c1", 3).replace(b"Host: ", b"Host: %d" % at)
        assert commits.asked(head + b"abc") is not None
        assert len(commits._heads) <= 3
