"""Small commits and questions for content as a lane serves them (`lanes`): the request's bytes in, the
answer's bytes out.

What is asked and answered is what `mount.commit` and `mount.get_blobs` do behind uvicorn and Starlette; only
the way is shorter. Everything that is not exactly a mount's ordinary request is left to that way, errors of
the protocol included.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple

import httptools

from fsd.model.limits import HEAD_MAX, LANES_MAX, SENT_AT_ONCE_MAX
from fsd.server.clock import HEADER as TEST_CLOCK
from fsd.server.content import HASHES_MAX, content_of
from fsd.server.context import Context
from fsd.server.errors import answer, translate
from fsd.server.lanes import Headers, Told
from fsd.server.streaming import Piece, messages
from fsd.service.access import FsRef, Grant
from fsd.service.text import new_id
from fsd.service.tokens import token_key
from fsd.wire.messages import MEDIA_TYPE, read_commit

REQUEST_ID: Final = b"x-request-id"
CALL_ID: Final = b"x-fsd-call"  # a caller's own id, given back: a reply that came twice is recognised
CALL_ID_MAX: Final = 64
TEMPLATE: Final = "/v1/file-systems/{id}/"
COMMITS: Final = "commits"
BLOBS: Final = "blobs"
_TARGET: Final = re.compile(rb"/v1/file-systems/([A-Za-z0-9_]{1,64})/(commits|blobs)")
_BEGIN: Final = b"POST /v1/file-systems/"
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,6})[ \t]*\r\n", re.IGNORECASE)
_EXPECT: Final = re.compile(rb"\r\nexpect:", re.IGNORECASE)
_ELSEWHERE: Final = {b"expect", b"upgrade", b"transfer-encoding", b"content-encoding", TEST_CLOCK}
_KIND: Final = (b"content-type", MEDIA_TYPE.encode())
# How the head of a mount's commit ends. What is before that is the same from one commit to the next.
_OWN: Final = b"\r\nX-Fsd-Call: "
_END: Final = re.compile(
    rb"\r\nX-Fsd-Call: ([A-Za-z0-9]{1,%d})\r\nContent-Type: %b\r\nContent-Length: ([0-9]{1,6})\r\n\r\n"
    % (CALL_ID_MAX, re.escape(_KIND[1]))
)
_HEADS_MAX: Final = 4 * LANES_MAX


class Asked(NamedTuple):
    """`what`: COMMITS or BLOBS. `call`: the id its caller gave it, b"": none. `who`: whose token that is,
    where that is known, which does for a commit alone."""

    fs: str
    secret: str
    call: bytes
    body: bytes
    what: str = COMMITS
    who: tuple[FsRef, Grant] | None = None


class _Heard:
    """What the parser tells of one request."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.twice = self.usual = self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.twice |= name in self.headers
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        """The parser knows these things now, and not at the message's end."""
        asks = self.parser.get_method(), self.parser.get_http_version()
        self.usual = asks == (b"POST", "1.1") and self.parser.should_keep_alive()
        self.usual &= not self.twice and not self.parser.should_upgrade()

    def on_message_complete(self) -> None:
        self.complete = True


def _length(data: bytes) -> tuple[int, int] | None:
    """Where head and body end; None while the head is not whole, or says nothing of a body."""
    end = data.find(b"\r\n\r\n") + 4
    if end < 4:
        return None
    found = _LENGTH.search(data, 0, end)
    return None if found is None else (end, end + int(found[1]))


def read(data: bytes) -> Asked | None:
    """The commit that `data` is; None where the longer way has to look at it."""
    ends = _length(data)
    if ends is None or ends[1] != len(data) or ends[0] > HEAD_MAX:
        return None
    heard = _Heard()
    try:
        heard.parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if not heard.complete or not heard.usual or not _ELSEWHERE.isdisjoint(heard.headers):
        return None
    target = _TARGET.fullmatch(heard.url)
    if target is not None and target[2] == b"blobs" and len(data) - ends[0] > HASHES_MAX:
        return None
    kind, _, secret = heard.headers.get(b"authorization", b"").partition(b" ")
    secret = secret.strip()
    call = heard.headers.get(CALL_ID, b"")
    if target is None or kind.lower() != b"bearer" or not secret or not secret.isascii():
        return None
    if call and not (call.isalnum() and len(call) <= CALL_ID_MAX):
        return None
    return Asked(target[1].decode(), secret.decode(), call, data[ends[0] :], target[2].decode())


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % line for line in headers])


def _end(data: bytes) -> re.Match[bytes] | None:
    """The end of its head, if that ends as a mount's does."""
    at = data.find(_OWN)
    return None if at < 0 else _END.match(data, at)


class Usual:
    """See `lanes.Serving`. Any thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        # Heads that were read: the hash of what is before `_END` → filesystem, and what stands for the token.
        self._heads: dict[bytes, tuple[str, bytes]] = {}
        self._usual: tuple[Headers, bytes] = ([], b"")

    def part(self, data: bytes) -> bool:
        end = _end(data)
        if end is not None and len(data) >= end.end() + int(end[2]):
            return False
        if b"\r\n\r\n" not in data:
            return data[: len(_BEGIN)] == _BEGIN[: len(data)]
        ends = _length(data)
        if ends is None or len(data) >= ends[1] or ends[1] - ends[0] > SENT_AT_ONCE_MAX:
            return False
        return _EXPECT.search(data, 0, ends[0]) is None  # its body waits for a word of the loop's

    def answer(self, data: bytes, default: Headers) -> Told | None:
        asked = self.asked(data)
        if asked is None:
            return None
        ctx = self._ctx
        began = ctx.host.monotonic()
        name = new_id(ctx.host, "req_")
        later: list[Callable[[], object]] = []
        content: list[Piece] = []
        if asked.what == COMMITS:
            status, headers, body = self._committed(asked, name, later.append)
        else:
            status, headers, body = self._found(asked, name, content.extend)
        seconds = ctx.host.monotonic() - began
        later.append(partial(ctx.metrics.request, TEMPLATE + asked.what, "POST", status, seconds))
        call = b"%b: %b\r\n" % (CALL_ID, asked.call) if asked.call else b""
        head = b"HTTP/1.1 %d %b\r\n%b" % (status, HTTPStatus(status).phrase.encode(), self._lines(default))
        return Told(
            b"%b%b%b: %b\r\n%b\r\n%b" % (head, _lines(headers), REQUEST_ID, name.encode(), call, body),
            later,
            content,
        )

    def _lines(self, default: Headers) -> bytes:
        """Made anew once a second, as the list is."""
        of, lines = self._usual
        if of is not default:
            lines = _lines(default)
            self._usual = default, lines
        return lines

    def asked(self, data: bytes) -> Asked | None:
        """As `read`, without the parser where it read the same head before, and the token is known still."""
        end = _end(data)
        if end is None:
            return read(data)
        head = hashlib.sha256(data[: end.start()]).digest()
        known = self._heads.get(head)
        if known is not None and len(data) == end.end() + int(end[2]):
            fs, token = known
            who = self._ctx.service.tokens.remembered(token, fs)
            if who is not None:
                return Asked(fs, "", end[1], data[end.end() :], COMMITS, who)
        asked = read(data)
        if asked is not None and asked.what == COMMITS and len(asked.body) == len(data) - end.end():
            if len(self._heads) >= _HEADS_MAX:
                self._heads.clear()
            self._heads[head] = asked.fs, token_key(asked.secret)
        return asked

    def _committed(
        self, asked: Asked, name: str, later: Callable[[Callable[[], object]], None]
    ) -> tuple[int, Headers, bytes]:
        service = self._ctx.service
        try:
            fs, who = asked.who or service.tokens.recall(asked.secret, asked.fs)
            body = service.commits.commit(fs, read_commit(asked.body), who, later).encode()
        except Exception as exc:  # noqa: BLE001 - every defect becomes a logged answer, as in `route`
            return self._told(exc, name)
        return 200, [(b"content-length", b"%d" % len(body)), _KIND], body

    def _found(
        self, asked: Asked, name: str, content: Callable[[list[Piece]], object]
    ) -> tuple[int, Headers, bytes]:
        service = self._ctx.service
        try:
            fs, _ = service.tokens.authenticate(asked.secret, asked.fs)
            found = list(messages(content_of(service, fs, asked.body)))
        except Exception as exc:  # noqa: BLE001 - as above
            return self._told(exc, name)
        content(found)
        return 200, [(b"content-length", b"%d" % sum(map(len, found))), _KIND], b""

    def _told(self, exc: Exception, name: str) -> tuple[int, Headers, bytes]:
        """A function of its own: in a frame that `exc` came through a name for it would be a circle that
        keeps the body."""
        error = translate(exc, name)
        self._ctx.metrics.error(error.code)
        made = answer(error, name)
        return made.status_code, made.raw_headers, bytes(made.body)
