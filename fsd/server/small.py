"""Small commits as a lane serves them (`lanes`): the request's bytes in, the answer's bytes out.

What is asked and answered is what `mount.commit` does behind uvicorn and Starlette; only the way is shorter.
Everything that is not exactly a mount's ordinary commit is left to that way, errors of the protocol included.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final, NamedTuple

import httptools

from fsd.model.limits import HEAD_MAX, SENT_AT_ONCE_MAX
from fsd.server.clock import HEADER as TEST_CLOCK
from fsd.server.context import Context
from fsd.server.errors import answer, translate
from fsd.server.lanes import Headers
from fsd.service.text import new_id
from fsd.wire.messages import MEDIA_TYPE, read_commit

REQUEST_ID: Final = b"x-request-id"
CALL_ID: Final = b"x-fsd-call"  # a caller's own id, given back: a reply that came twice is recognised
CALL_ID_MAX: Final = 64
TEMPLATE: Final = "/v1/file-systems/{id}/commits"
_TARGET: Final = re.compile(rb"/v1/file-systems/([A-Za-z0-9_]{1,64})/commits")
_BEGIN: Final = b"POST /v1/file-systems/"
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,6})[ \t]*\r\n", re.IGNORECASE)
_EXPECT: Final = re.compile(rb"\r\nexpect:", re.IGNORECASE)
_ELSEWHERE: Final = {b"expect", b"upgrade", b"transfer-encoding", b"content-encoding", TEST_CLOCK}
_KIND: Final = (b"content-type", MEDIA_TYPE.encode())


class Asked(NamedTuple):
    """`call`: the id its caller gave it, b"": none."""

    fs: str
    secret: str
    call: bytes
    body: bytes


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
    kind, _, secret = heard.headers.get(b"authorization", b"").partition(b" ")
    secret = secret.strip()
    call = heard.headers.get(CALL_ID, b"")
    if target is None or kind.lower() != b"bearer" or not secret or not secret.isascii():
        return None
    if call and not (call.isalnum() and len(call) <= CALL_ID_MAX):
        return None
    return Asked(target[1].decode(), secret.decode(), call, data[ends[0] :])


class SmallCommits:
    """See `lanes.Serving`. Any thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def part(self, data: bytes) -> bool:
        if b"\r\n\r\n" not in data:
            return data[: len(_BEGIN)] == _BEGIN[: len(data)]
        ends = _length(data)
        if ends is None or len(data) >= ends[1] or ends[1] - ends[0] > SENT_AT_ONCE_MAX:
            return False
        return _EXPECT.search(data, 0, ends[0]) is None  # its body waits for a word of the loop's

    def answer(self, data: bytes, default: Headers) -> bytes | None:
        asked = read(data)
        if asked is None:
            return None
        ctx = self._ctx
        began = ctx.host.monotonic()
        name = new_id(ctx.host, "req_")
        status, headers, body = self._done(asked, name)
        ctx.metrics.request(TEMPLATE, "POST", status, ctx.host.monotonic() - began)
        echoed = [(REQUEST_ID, name.encode())]
        if asked.call:
            echoed.append((CALL_ID, asked.call))
        lines = [b"%b: %b\r\n" % line for line in (*default, *headers, *echoed)]
        return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (
            status,
            HTTPStatus(status).phrase.encode(),
            b"".join(lines),
            body,
        )

    def _done(self, asked: Asked, name: str) -> tuple[int, Headers, bytes]:
        service = self._ctx.service
        try:
            fs, who = service.tokens.recall(asked.secret, asked.fs)
            body = service.commits.commit(fs, read_commit(asked.body), who).encode()
        except Exception as exc:  # noqa: BLE001 - every defect becomes a logged answer, as in `route`
            return self._told(exc, name)
        return 200, [(b"content-length", b"%d" % len(body)), _KIND], body

    def _told(self, exc: Exception, name: str) -> tuple[int, Headers, bytes]:
        """A function of its own: in a frame that `exc` came through a name for it would be a circle that
        keeps the body."""
        error = translate(exc, name)
        self._ctx.metrics.error(error.code)
        made = answer(error, name)
        return made.status_code, made.raw_headers, bytes(made.body)
